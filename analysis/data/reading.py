"""Reading Parquet files of many runs: small files whole into one frame, large tables by columns and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from raysim.analysis.data import AnalysisError
from raysim.records import tables as records
from raysim.records.bounds import check_values, printable_rows
from raysim.storage.places import ListedPath, Place, arrow_source

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
    """Return a sentence: the file is left out, and why."""
    reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
    return f"{file} cannot be read and is left out: {reason}."


# --- small files with different columns: `run.parquet` and `trials.parquet` ---------------------------------------------------


def read_whole(files: Sequence[Place], most_rows: int | None = None) -> list[pa.Table | str]:
    """Return each file's table, or a sentence on why it cannot be read, for instance because it was deleted meanwhile.

    `most_rows`: the most rows that each may have.
    Local files are read one after another: they are so small that threads would only wait for each other.
    """
    if any(isinstance(file, ListedPath) for file in files):
        with ThreadPoolExecutor(READERS) as readers:
            return list(readers.map(_read, files, repeat(most_rows)))
    return [_read(file, most_rows) for file in files]


def _read(file: Place, most_rows: int | None) -> pa.Table | str:
    try:
        return records.read_whole(file, most_rows).replace_schema_metadata()
    except (OSError, pa.ArrowException) as error:
        return unreadable(file, error)


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
) -> Iterator[tuple[Place, pa.RecordBatch | str]]:
    """Yield each file with batches of its rows, or with a sentence if it cannot be read.

    `files`: the most rows that each may have, None if unknown.
    """
    by_system: dict[object, list[Place]] = {}
    for file in files:
        packed = isinstance(file, ListedPath) and file.pack is not None
        by_system.setdefault(file if packed else id(arrow_source(file)[1]), []).append(file)
    for group in by_system.values():
        try:
            yield from list(_scan({file: files[file] for file in group}, schema, columns, where))
        except (OSError, pa.ArrowException):
            for file in group:
                try:
                    yield from list(_scan({file: files[file]}, schema, columns, where))
                except (OSError, pa.ArrowException) as error:
                    yield file, unreadable(origin_of(file), error)


def _scan(
    files: Mapping[Place, int | None], schema: pa.Schema, columns: Sequence[str], where: pc.Expression | None
) -> Iterator[tuple[Place, pa.RecordBatch]]:
    """Yield the rows of files of one file system, or of one file of a pack."""
    first = next(iter(files))
    if isinstance(first, ListedPath) and first.pack is not None:
        by_path: dict[str, Place] = {}
        dataset = ds.dataset(records.read_as(first, schema, files[first]))
    else:
        by_path = {arrow_source(file)[0]: file for file in files}
        dataset = ds.dataset(list(by_path), schema=schema, format="parquet", filesystem=arrow_source(first)[1])
        if arrow_source(first)[1] is None:  # the metadata of files in buckets take a request each
            for fragment in dataset.get_fragments():
                records.check_size(fragment.metadata, files[by_path[fragment.path]])
    for tagged in dataset.scanner(columns=list(columns), filter=where).scan_batches():
        if tagged.record_batch.num_rows:
            check_values(tagged.record_batch)
            file = by_path[tagged.fragment.path] if by_path else first
            yield file, printable_rows(tagged.record_batch)


def origin_of(file: Place) -> Place:
    """Return the file that holds a run's rows: its own, or the pack's file for a run in a pack."""
    return file.origin if isinstance(file, ListedPath) else file


def condition_of(where: Filter | None, schema: pa.Schema) -> pc.Expression | None:
    """Return the condition on rows as an expression, tried on an empty table so that no file is blamed for its errors."""
    try:
        condition = pq.filters_to_expression(list(where)) if isinstance(where, Sequence) else where
        ds.dataset(schema.empty_table()).to_table(filter=condition)
    except (TypeError, ValueError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise AnalysisError(
            f"`where` must be a condition on {', '.join(schema.names)}, but got {where!r}: {reason}."
        ) from None
    return condition


def labelled(batch: pa.RecordBatch, runs: pa.Array, i: int) -> pa.RecordBatch:
    """Return the rows of run `i` with its name as first column, and texts as categories."""
    index = pa.array(np.full(batch.num_rows, i, np.int32))
    columns = [pa.DictionaryArray.from_arrays(index, runs)]
    columns += [c.dictionary_encode() if pa.types.is_string(c.type) else c for c in batch.columns]
    return pa.RecordBatch.from_arrays(columns, ["run", *batch.schema.names])
