"""One frame from small files with different columns: `run.parquet` and `trials.parquet`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from raysim.places import ListedPath, Place

READERS = 32  # files of a bucket under way at once

_NUMPY_HAS_NO_NULL: dict[pa.DataType, Any] = {
    pa.bool_(): pd.BooleanDtype(),
    pa.int8(): pd.Int8Dtype(),
    pa.int16(): pd.Int16Dtype(),
    pa.int32(): pd.Int32Dtype(),
    pa.int64(): pd.Int64Dtype(),
}


def to_frame(table: pa.Table) -> pd.DataFrame:
    """Return a table in pandas with its types kept: integers and truth values stay so where some are missing."""
    frame: pd.DataFrame = table.to_pandas(types_mapper=_NUMPY_HAS_NO_NULL.get)
    return frame


def read_whole(files: Sequence[Place]) -> list[pa.Table | str]:
    """Return each file's table, or a sentence on why it cannot be read, for instance because it is gone by now.

    Files of this machine are read one after the other: threads would wait for each other at such small ones.
    """
    if any(isinstance(file, ListedPath) for file in files):
        with ThreadPoolExecutor(READERS) as readers:
            return list(readers.map(_read, files))
    return [_read(file) for file in files]


def _read(file: Place) -> pa.Table | str:
    try:
        content = pa.BufferReader(file.read_bytes())
        opened = pq.ParquetFile(content, page_checksum_verification=True)
        return opened.read(use_threads=False).replace_schema_metadata()
    except (OSError, pa.ArrowException) as error:
        return unreadable(file, error)


def unreadable(file: Place, error: Exception) -> str:
    """Return that a file is left out and why, in one sentence."""
    reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return f"{file} cannot be read and is left out: {reason}."


def stack(tables: Sequence[pa.Table], key: str, values: Sequence[str]) -> pd.DataFrame:
    """Return tables below each other as `stacked` does, in pandas."""
    return to_frame(stacked(tables, key, values)) if tables else pd.DataFrame({key: []})


def stacked(tables: Sequence[pa.Table], key: str, values: Sequence[str]) -> pa.Table:
    """Return tables below each other, the first column `key` saying of each which of `values` it is from.

    A column that a table does not have is missing there. Where tables disagree on a column's type, integers become floats,
    and anything else is written as text. Tables of the same columns stand together.
    """
    named = [t.add_column(0, key, pa.array([v] * len(t), pa.string())) for t, v in zip(tables, values, strict=True)]
    alike: dict[pa.Schema, list[pa.Table]] = {}
    for table in named:
        alike.setdefault(table.schema, []).append(table)
    groups = [pa.concat_tables(group) for group in alike.values()]
    held = {name for group in groups for name in group.column_names if not _is_empty(group, name)}
    groups = [_rewritten(group, {n for n in held if _is_empty(group, n)}, _as_nothing) for group in groups]
    disputed = {name for name in {n for g in groups for n in g.column_names} if not _agree(groups, name)}
    groups = [_rewritten(group, disputed, _as_text) for group in groups]
    return pa.concat_tables(groups, promote_options="permissive")


def _agree(groups: Sequence[pa.Table], name: str) -> bool:
    """Return whether Arrow finds one type for a column in all tables, and its values are of that type."""
    try:
        pa.concat_tables([g.select([name]) for g in groups if name in g.column_names], promote_options="permissive")
    except pa.ArrowException:
        return False
    return True


def _is_empty(table: pa.Table, name: str) -> bool:
    """Return whether a column holds nulls alone, so that another table decides its type."""
    return name in table.column_names and table[name].null_count == len(table)


def _as_nothing(column: pa.ChunkedArray) -> pa.Array:
    return pa.nulls(len(column))


def _as_text(column: pa.ChunkedArray) -> pa.Array:
    return pa.array([None if value is None else str(value) for value in column.to_pylist()], pa.string())


def _rewritten(table: pa.Table, names: set[str], change: Callable[[pa.ChunkedArray], pa.Array]) -> pa.Table:
    for place, name in enumerate(table.column_names):
        if name in names:
            table = table.set_column(place, name, change(table[name]))
    return table
