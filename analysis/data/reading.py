"""Reading Parquet files of many runs: small files whole into one frame, large tables by columns and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from raysim.analysis.data import AnalysisError
from raysim.records.bounds import check_values, printable_rows
from raysim.records.tables import check_table_size, read_as, read_whole
from raysim.storage.places import ListedPath, Place, origin_of, read_place

READERS = 32  # files of a bucket read at once

Filter: TypeAlias = "pc.Expression | Sequence[tuple[str, str, Any]]"

_NUMPY_HAS_NO_NULL: dict[pa.DataType, Any] = {
    pa.bool_(): pd.BooleanDtype(),
    pa.int8(): pd.Int8Dtype(),
    pa.int16(): pd.Int16Dtype(),
    pa.int32(): pd.Int32Dtype(),
    pa.int64(): pd.Int64Dtype(),
}


def to_frame(table: pa.Table) -> pd.DataFrame:
    """Return a table in pandas with its types kept: integers and booleans stay so if some are missing."""
    frame: pd.DataFrame = table.to_pandas(types_mapper=_NUMPY_HAS_NO_NULL.get)
    return frame


def unreadable(file: Place, error: Exception) -> str:
    """Return a sentence that says why a file is left out."""
    reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return f"{file} cannot be read and is left out: {reason}."


def read_each(files: Iterable[Place], read: Callable[[Place], pa.Table]) -> list[pa.Table | str]:
    """Read each file by `read`; of an unreadable file, such as one deleted meanwhile, return a sentence with the cause.

    Local files are read one after another: they are so small that threads would only wait for each other.
    """

    def attempt(file: Place) -> pa.Table | str:
        try:
            return read(file)
        except (OSError, pa.ArrowException) as error:
            return unreadable(origin_of(file), error)

    files = list(files)
    if any(isinstance(file, ListedPath) for file in files):
        with ThreadPoolExecutor(READERS) as readers:
            return list(readers.map(attempt, files))
    return [attempt(file) for file in files]


# --- small files with different columns: `run.parquet` and `trials.parquet` ---------------------------------------------------


def read_files(files: Iterable[Place], most_rows: int | None = None) -> list[pa.Table | str]:
    """Return each file's table, or a sentence; `most_rows`: the most rows that each may have."""
    return read_each(files, lambda file: read_whole(file, most_rows).replace_schema_metadata())


def stack(tables: Sequence[pa.Table], key: str, values: Sequence[str]) -> pd.DataFrame:
    """Return concatenated tables as `stacked` does, in pandas."""
    return to_frame(stacked(tables, key, values)) if tables else pd.DataFrame({key: []})


def stacked(tables: Sequence[pa.Table], key: str, values: Sequence[str]) -> pa.Table:
    """Return the concatenated tables; the first column, `key`, names the source of each row, one of `values`.

    Columns absent from a table are null in its rows. If tables disagree on a column's type, integers become floats, and
    other types become text. In the result, tables with the same columns are adjacent.
    """
    named = [t.add_column(0, key, pa.array([v] * len(t), pa.string())) for t, v in zip(tables, values, strict=True)]
    by_schema: dict[pa.Schema, list[pa.Table]] = {}
    for table in named:
        by_schema.setdefault(table.schema, []).append(table)
    groups = [pa.concat_tables(group) for group in by_schema.values()]
    filled = {name for group in groups for name in group.column_names if not _is_empty(group, name)}
    groups = [
        _rewritten(group, {n for n in filled if _is_empty(group, n)}, lambda c: pa.nulls(len(c))) for group in groups
    ]
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
    """Return whether a column holds only nulls, so that another table decides its type."""
    return name in table.column_names and table[name].null_count == len(table)


def _as_text(column: pa.ChunkedArray) -> pa.Array:
    return pa.array([None if value is None else str(value) for value in column.to_pylist()], pa.string())


def _rewritten(table: pa.Table, names: set[str], change: Callable[[pa.ChunkedArray], pa.Array]) -> pa.Table:
    for i, name in enumerate(table.column_names):
        if name in names:
            table = table.set_column(i, name, change(table[name]))
    return table


# --- some columns and rows of large tables ------------------------------------------------------------------------------------


def scan(
    files: Mapping[Place, int | None], schema: pa.Schema, columns: Sequence[str], where: pc.Expression | None
) -> list[pa.Table | str]:
    """Return `columns` of the rows of each file that satisfy `where`, or a sentence if it cannot be read.

    `files`: the most rows that each may have, None if unknown.
    """

    def read(file: Place) -> pa.Table:
        if isinstance(file, ListedPath) and file.listing.rows(file.key) is not None:
            table = ds.dataset(read_as(file, schema)).to_table(columns=list(columns), filter=where)
        else:
            fragment = ds.ParquetFileFormat().make_fragment(pa.BufferReader(read_place(file)))
            check_table_size(fragment.metadata, files[file])
            table = fragment.to_table(schema=schema, columns=list(columns), filter=where)
        check_values(table)
        return printable_rows(table)

    return read_each(files, read)


def condition_of(where: Filter | None, schema: pa.Schema) -> pc.Expression | None:
    """Return the condition on rows as an expression, checked on an empty table before any file is read."""
    try:
        condition = pq.filters_to_expression(list(where)) if isinstance(where, Sequence) else where
        ds.dataset(schema.empty_table()).to_table(filter=condition)
    except (TypeError, ValueError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise AnalysisError(
            f"`where` must be a condition on {', '.join(schema.names)}, but got {where!r}: {reason}."
        ) from None
    return condition


def labelled(table: pa.Table, runs: pa.Array, i: int) -> pa.Table:
    """Return the rows of run `i` with its name as first column, and texts as categories."""
    index = pa.array(np.full(len(table), i, np.int32))
    columns = [pa.DictionaryArray.from_arrays(index, runs)]
    columns += [c.dictionary_encode() if pa.types.is_string(c.type) else c for c in table.columns]
    return pa.table(columns, ["run", *table.column_names])
