"""Writing a pack: the runs of a folder in one Parquet file per table."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from raysim.analysis.data import AnalysisError
from raysim.analysis.data.folders import PROFILE
from raysim.analysis.data.reading import file_problems, read_files, stacked
from raysim.analysis.runs.loading import load
from raysim.records import FINISHED, SCHEMAS, table_files
from raysim.records.packs import MARK, ROW, RUNS, TABLES, VERSION
from raysim.storage.files import make_folder, sync_folder, write_through
from raysim.storage.places import Place, in_bucket, inside, local_path, read_place

OF_STUDIES = ("study.toml", "trials.parquet", PROFILE)


class Packed(NamedTuple):
    """Counts of the contents of a pack, and the problems of the runs in it."""

    runs: int
    studies: int
    left_out: int
    """Unfinished runs."""
    size: int
    """In bytes."""
    problems: list[str]
    """A sentence for each table that is missing, short or empty."""


def pack(folder: str | Path, target: str | Path) -> Packed:
    """Write all finished runs of `folder` as a pack into `target`, a new or empty folder.

    `load`, `replay`, reports and findings read a pack as they read `folder`, a path or a bucket's URI: all rows and values are
    kept; checkpoints, logs, and the state of an unfinished sweep are not. A pack is written completely or not at all. Raises
    AnalysisError if no run is over, a table cannot be read, or `target` holds files.
    """
    home = _checked(target)
    results = load(folder)
    (root,) = results.folders
    over = results.select(results.runs["status"].isin(FINISHED))
    if not len(over):
        raise AnalysisError(" ".join(results.problems))
    paths = [over.path(run) for run in over.runs["run"].astype(str)]
    folders = {inside(path, root) or path.name.lstrip("."): path for path in paths}
    files = {
        name: {table: table_files(folder_of_run, table) for table in SCHEMAS} for name, folder_of_run in folders.items()
    }
    draft = home.with_name(f".{home.name}.{secrets.token_hex(8)}")  # unique, even beside drafts of killed processes
    try:
        make_folder(draft.parent)
        draft.mkdir()
        for table in SCHEMAS:
            _write_table(
                {name: parts[table] for name, parts in files.items() if parts[table]}, draft / f"{table}.parquet"
            )
        rows = _read([folder_of_run / "run.parquet" for folder_of_run in folders.values()])
        has = [[table for table, parts in tables.items() if parts] for tables in files.values()]
        rows = [_with_own(row, tables) for row, tables in zip(rows, has, strict=True)]
        _write(stacked(rows, "run", list(folders)), draft / RUNS)
        for folder_of_run in results.studies.values():
            below = draft / inside(folder_of_run, root)
            below.mkdir(parents=True, exist_ok=True)
            for file in (folder_of_run / name for name in OF_STUDIES):
                if file.is_file():
                    write_through(below / file.name, read_place(file))
        size = sum(file.stat().st_size for file in draft.rglob("*") if file.is_file())
        for below in (draft, *(path for path in draft.rglob("*") if path.is_dir())):
            sync_folder(below)
        try:
            draft.replace(home)
        except OSError:
            _checked(target)  # another process may have filled it by now
            raise
        sync_folder(home.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    problems = file_problems(over.runs, {run: over.path(run) for run in over.runs["run"].astype(str)})
    return Packed(len(over), len(results.studies), len(results) - len(over), size, problems)


def _checked(target: str | Path) -> Path:
    """Return the folder to write; raises AnalysisError if it cannot be one."""
    if in_bucket(target):
        raise AnalysisError(
            f"`target` must be a folder of this machine, but got {str(target)!r}: copy a pack to a bucket."
        )
    home = local_path(target).absolute()
    if home.is_symlink() or (home.exists() and not home.is_dir()):
        raise AnalysisError(f"`target` must be a new or empty folder, but {target} is not a folder.")
    if home.exists() and any(home.iterdir()):
        raise AnalysisError(f"`target` must be a new or empty folder, but {target} holds files.")
    return home


def _read(files: list[Place]) -> list[pa.Table]:
    """Return the tables of files; raises AnalysisError if one cannot be read."""
    tables = read_files(files)
    wrong = [sentence.replace(" and is left out", "") for sentence in tables if isinstance(sentence, str)]
    if wrong:
        raise AnalysisError(wrong[0])
    return [table for table in tables if not isinstance(table, str)]


def _with_own(row: pa.Table, tables: list[str]) -> pa.Table:
    """Add to a run's row a copy of it as written, and the names of the run's tables."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, row.schema) as stream:
        stream.write_table(row)
    shown = row.select([name for name in row.column_names if name not in ("run", ROW, TABLES)])
    shown = shown.append_column(TABLES, pa.array([tables], pa.list_(pa.string())))
    return shown.append_column(ROW, pa.array([sink.getvalue().to_pybytes()], pa.binary()))


def _write_table(files: Mapping[str, list[Place]], target: Path) -> None:
    """Concatenate the rows of runs into one file, each with the name of its run; write none without runs."""
    if not files:
        return
    runs = [run for run, parts in files.items() for _ in parts]
    tables = _read([file for parts in files.values() for file in parts])
    named = [
        table.add_column(0, "run", pa.array([run] * len(table), pa.string()))
        for run, table in zip(runs, tables, strict=True)
    ]
    try:
        _write(pa.concat_tables(named, promote_options="permissive"), target)
    except pa.ArrowException as error:
        raise AnalysisError(
            f"The runs disagree on a column of {target.name}: pack them separately. ({error})"
        ) from None


def _write(table: pa.Table, file: Path) -> None:
    """Write a table compactly: floats by byte-stream split, integers by delta encoding."""
    encoding = {}
    for field in table.schema:
        if pa.types.is_floating(field.type):
            encoding[field.name] = "BYTE_STREAM_SPLIT"
        elif pa.types.is_integer(field.type):
            encoding[field.name] = "DELTA_BINARY_PACKED"
    texts = [field.name for field in table.schema if pa.types.is_string(field.type)]
    options = {"compression": "zstd", "compression_level": 19, "write_statistics": False, "store_schema": False}
    table = table.replace_schema_metadata()
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, table.schema, use_dictionary=texts, column_encoding=encoding, write_page_checksum=True, **options
    ) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({MARK.decode(): VERSION.decode()})
    write_through(file, memoryview(sink.getvalue()))
