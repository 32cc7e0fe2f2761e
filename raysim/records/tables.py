"""Files of tables: how one is written, and which of them hold a table's rows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raysim.places import Place, arrow_source
from raysim.records.schema import SCHEMA_VERSION, schema_of


class RecordsError(ValueError):
    """A run's folder cannot be written or read; the sentence names its path and the cause."""


def write_table(table: pa.Table, path: Path) -> None:
    """Write a Parquet file whole and rename it into place; the schema version is in its metadata."""
    metadata = {**(table.schema.metadata or {}), b"raysim_schema_version": str(SCHEMA_VERSION).encode()}
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(table.replace_schema_metadata(metadata), draft, compression="zstd")
    draft.replace(path)


def table_files(folder: Place, table: str) -> list[Place]:
    """Return the files of a table: the whole one, or the parts of a run that goes on or broke off, in their order."""
    whole = folder / f"{table}.parquet"
    if whole.is_file():
        return [whole]
    return part_files(folder, table)


def part_files(folder: Place, table: str) -> list[Place]:
    """Return the parts of a table, in their order."""
    return sorted((folder / "parts").glob(f"{table}-*.parquet"), key=lambda path: (len(path.name), path.name))


def read_table(files: Sequence[Place], table: str, measures: Iterable[str] = ()) -> pa.Table:
    """Return the rows of a table's files, of a run that has these `measures`."""
    schema = schema_of(table, measures)
    if not files:
        return schema.empty_table()
    sources = [arrow_source(file) for file in files]
    return pa.concat_tables([pq.read_table(path, schema=schema, filesystem=fs) for path, fs in sources])
