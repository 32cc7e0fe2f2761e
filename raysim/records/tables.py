"""Files of tables: writing one, and finding the files that hold a table's rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raysim.errors import InputError
from raysim.records.schema import ENCODINGS, SCHEMA_VERSION, schema_of
from raysim.storage.files import write_whole
from raysim.storage.places import ListedPath, Place

UNREADABLE = (OSError, ValueError, pa.ArrowException)  # a file that is gone, cut short or damaged


class RecordsError(InputError):
    """A run's folder cannot be written or read; the sentence names its path and the cause."""


def write_table(table: pa.Table, path: Path) -> str:
    """Write a Parquet file, whole or not at all, and return its SHA-256; raises OSError.

    The schema version is in its metadata, and a checksum with every page, so that damage is noticed when it is read.
    """
    metadata = {**(table.schema.metadata or {}), b"raysim_schema_version": str(SCHEMA_VERSION).encode()}
    sink = pa.BufferOutputStream()
    pq.write_table(
        table.replace_schema_metadata(metadata), sink, compression="zstd", write_page_checksum=True, **_encoded(table)
    )
    content = sink.getvalue()
    write_whole(path, memoryview(content))
    return hashlib.sha256(content).hexdigest()


def _encoded(table: pa.Table) -> dict[str, Any]:
    """Return the options of Parquet's writer for columns with an encoding of their own."""
    if "sample" not in table.column_names:
        return {}
    return {
        "column_encoding": ENCODINGS,
        "use_dictionary": [name for name in table.column_names if name not in ENCODINGS],
    }


def table_files(folder: Place, table: str) -> list[Place]:
    """Return the files of a table: its one file, or the parts of an unfinished run, in order."""
    whole = folder / f"{table}.parquet"
    if whole.is_file():
        return [whole]
    parts = part_files(folder, table)
    return [whole] if whole.is_file() else parts  # of which some may be gone, if they were merged meanwhile


def part_files(folder: Place, table: str) -> list[Place]:
    """Return the parts of a table, in order."""
    try:
        parts: list[Place] = list((folder / "parts").glob(f"{table}-*.parquet"))
    except FileNotFoundError:  # the run has just merged them, and removed their folder
        return []
    return sorted(parts, key=lambda path: (len(path.name), path.name))


def read_table(files: Sequence[Place], table: str, measures: Iterable[str] = ()) -> pa.Table:
    """Return the rows of a table's files, for a run with these `measures`."""
    schema = schema_of(table, measures)
    if not files:
        return schema.empty_table()
    rows = pa.concat_tables([read_as(file, schema) for file in files])
    if rows["step"].null_count:
        raise pa.ArrowInvalid("it has rows without a step")
    return rows


def read_whole(file: Place) -> pa.Table:
    """Return the rows of one file as it was written; raises one of `UNREADABLE`."""
    if isinstance(file, ListedPath) and file.pack is not None:
        return file.pack.table(file.key)
    content = pa.BufferReader(file.read_bytes())  # one request of a bucket
    with pq.ParquetFile(content, page_checksum_verification=True) as opened:
        return opened.read(use_threads=False)


def read_as(file: Place, schema: pa.Schema) -> pa.Table:
    """Return the rows of one file in a schema: missing columns are null, others are left out."""
    rows = read_whole(file)
    known = set(rows.column_names)
    columns = [
        rows[field.name].cast(field.type) if field.name in known else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
