"""Packs: many runs in one Parquet file a table, read as if each run had its own folder.

A pack is a folder with `runs.parquet`, one row for each run, and a file for each table of the runs. Their column `run` names the run
of a row; the rows of a run follow each other. Files of studies lie in it where they lay in the folder that was packed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow.parquet as pq
from pyarrow import fs

from raysim.places import ListedPath, Listing, Place, arrow_source, open_place, walk
from raysim.records.tables import UNREADABLE, RecordsError

RUNS = "runs.parquet"
ROW = "row"  # of `runs.parquet`: the run's own row as it was written, an Arrow stream
TABLES = "tables"  # of `runs.parquet`: the tables that the run has
MARK = b"raysim_pack"  # in the metadata of `runs.parquet`: other files of that name are no packs
VERSION = b"1"


def open_pack(folder: Place) -> ListedPath | None:
    """Return a pack as the folder that was packed; None where a folder is no pack.

    Raises RecordsError where its `runs.parquet` cannot be read, or is of another version.
    """
    if not (folder / RUNS).is_file():
        return None
    path, system = arrow_source(folder / RUNS)
    try:
        with pq.ParquetFile(path, filesystem=system) as opened:
            version = (opened.metadata.metadata or {}).get(MARK)
            if version is None:
                return None
            if version != VERSION:
                known = VERSION.decode()
                raise RecordsError(f"{folder} is a pack of version {version.decode()}, but this raysim reads {known}.")
            if lacking := {"run", ROW, TABLES} - set(opened.schema_arrow.names):
                raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
            runs = opened.read(columns=["run", TABLES], use_threads=False).to_pylist()
    except RecordsError:
        raise
    except UNREADABLE as error:
        raise RecordsError(f"{folder / RUNS} cannot be read: {str(error).rstrip('.')}.") from None
    files = {_inside(place / name, folder): place / name for place, _, names in walk(folder) for name in names}
    packed = {f"{run['run']}/run.parquet": folder / RUNS for run in runs}
    packed |= {f"{run['run']}/{table}.parquet": folder / f"{table}.parquet" for run in runs for table in run[TABLES]}
    used = set(packed.values())
    origins = {key: file for key, file in files.items() if file not in used} | packed
    from raysim.records.packed_files import PackedFiles  # fsspec takes a while, and is for packs alone

    served = fs.PyFileSystem(fs.FSSpecHandler(PackedFiles(origins, set(packed), ROW)))
    return ListedPath(Listing.of(f"{folder.resolve()}/", served, "", origins, origins), "")


def open_folder(where: str | Place) -> Place:
    """Return the folder that a path or a URI names; `study-packed/trials/0-s0` is the run `trials/0-s0` of the pack `study-packed`.

    Raises PlaceError where a bucket does not answer.
    """
    place = open_place(where)
    if (place / "run.parquet").is_file() or (isinstance(place, ListedPath) and place.is_dir()):
        return place
    for home in _above(place):
        try:
            pack = open_pack(home)
        except RecordsError:  # somebody else's file of that name, perhaps
            continue
        if pack is not None:
            inside = pack / _inside(place.resolve(), home)
            return inside if inside.is_dir() else place
    return place


def _above(place: Place) -> Iterator[Place]:
    """Yield the folders above a place that may be packs, from below."""
    if isinstance(place, ListedPath):
        yield from place.above(RUNS)
    else:
        yield from place.resolve().parents


def _inside(file: Place, folder: Place) -> str:
    """Return the path of a place in a folder."""
    return str(file).removeprefix(str(folder)).lstrip("/")
