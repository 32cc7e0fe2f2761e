"""Packs: many runs in one Parquet file per table, read as if each run had its own folder.

A pack is a folder with `runs.parquet`, with one row per run, and one file per table of the runs. Their column `run` names each row's
run; the rows of a run are consecutive. Files of studies keep their paths relative to the packed folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raysim.records.tables import UNREADABLE, RecordsError
from raysim.storage.places import ListedPath, Listing, Place, folders_above, inside, open_place, read_place, walk

RUNS = "runs.parquet"
ROW = "row"  # column of `runs.parquet`: the run's original row, an Arrow stream
TABLES = "tables"  # column of `runs.parquet`: the run's tables
MARK = b"raysim_pack"  # in the metadata of `runs.parquet`; files without it are not packs
VERSION = b"1"


class _Rows(NamedTuple):
    """A table of all runs, with the first row and number of rows of each run."""

    table: pa.Table
    spans: Mapping[str, tuple[int, int]]


class Pack(Listing):
    """The files of the original folder; each table of the pack is read completely on first use, and kept."""

    def __init__(self, home: str, origins: Mapping[str, Place], packed: set[str]) -> None:
        super().__init__(home, "", origins, None)
        self._origins, self._packed = origins, packed
        self._read: dict[Place, _Rows | Exception] = {}
        self._lock = Lock()

    def origin(self, key: str) -> Place:
        """Return the pack's file that holds the contents of a run's or a study's file."""
        return self._origins[key]

    def rows(self, key: str) -> pa.Table | None:
        """Return the rows of a run's Parquet file, None for other files; raises one of `UNREADABLE`."""
        if key not in self._packed:
            return None
        run, file = key.rsplit("/", 1)
        rows = self._rows(self._origins[key])
        own = rows.table.slice(*rows.spans.get(run, (0, 0)))
        if file != "run.parquet":
            return own
        with pa.ipc.open_stream(own[ROW][0].as_buffer()) as stream:
            return stream.read_all()

    def _rows(self, file: Place) -> _Rows:
        """Return a table of the pack, read once; raises the same error again if it cannot be read."""
        with self._lock:
            if file not in self._read:
                try:
                    self._read[file] = _read(file)
                except (OSError, pa.ArrowException) as error:
                    self._read[file] = error
        rows = self._read[file]
        if isinstance(rows, Exception):
            raise rows
        return rows


def _read(file: Place) -> _Rows:
    content = pa.BufferReader(read_place(file))
    with pq.ParquetFile(content, read_dictionary=["run"], page_checksum_verification=True) as opened:
        table = opened.read(use_threads=False).replace_schema_metadata()
    column = table["run"].combine_chunks()
    codes, names = column.indices.to_numpy(), column.dictionary.to_pylist()
    starts = np.flatnonzero(np.diff(codes, prepend=-1)).tolist()
    ends = [*starts, len(codes)][1:]
    spans = {names[codes[start]]: (start, end - start) for start, end in zip(starts, ends, strict=True)}
    if len(spans) != len(starts):
        raise pa.ArrowInvalid("the rows of a run must follow each other")
    return _Rows(table.drop_columns("run"), spans)


def open_pack(folder: Place) -> ListedPath | None:
    """Open a pack as the original folder; None if the folder is not a pack.

    Raises RecordsError if its `runs.parquet` cannot be read, or has a different version.
    """
    if not (folder / RUNS).is_file():
        return None
    try:
        with pq.ParquetFile(pa.BufferReader(read_place(folder / RUNS))) as opened:
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
    files = {inside(path, folder): path for within, _, names in walk(folder) for path in (within / n for n in names)}
    packed = {f"{run['run']}/run.parquet": folder / RUNS for run in runs}
    packed |= {f"{run['run']}/{table}.parquet": folder / f"{table}.parquet" for run in runs for table in run[TABLES]}
    used = set(packed.values())
    origins = {key: file for key, file in files.items() if file not in used} | packed
    home = f"{folder.resolve()}/"
    return ListedPath(home, "", Pack(home, origins, set(packed)))


def open_folder(where: str | Place) -> Place:
    """Open the folder at a path or URI; `study-packed/trials/0-s0` is the run `trials/0-s0` in the pack `study-packed`.

    Raises PlaceError if a bucket does not answer.
    """
    folder = open_place(where)
    if (folder / "run.parquet").is_file() or (isinstance(folder, ListedPath) and folder.is_dir()):
        return folder
    for home in folders_above(folder, RUNS):
        try:
            pack = open_pack(home)
        except RecordsError:  # perhaps a foreign file of that name
            continue
        if pack is not None:
            packed = pack / inside(folder, home)
            return packed if packed.is_dir() else folder
    return folder
