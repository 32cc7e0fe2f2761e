"""Reading some columns and rows of many runs' files of a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from raysim.analysis.data.errors import AnalysisError
from raysim.analysis.data.rows import unreadable
from raysim.places import ListedPath, Place, arrow_source
from raysim.records.bounds import check_values, printable_rows

Filter: TypeAlias = "pc.Expression | Sequence[tuple[str, str, Any]]"


def scan(
    files: Iterable[Place], schema: pa.Schema, columns: Sequence[str], where: pc.Expression | None
) -> Iterator[tuple[Place, pa.RecordBatch | str]]:
    """Yield each file with some of its rows, as often as it takes; with a sentence, where it cannot be read."""
    systems: dict[int, list[Place]] = {}
    for file in files:
        systems.setdefault(id(arrow_source(file)[1]), []).append(file)
    for alike in systems.values():
        try:
            yield from list(_of_one_system(alike, schema, columns, where))
        except (OSError, pa.ArrowException):
            for file in alike:
                try:
                    yield from list(_of_one_system([file], schema, columns, where))
                except (OSError, pa.ArrowException) as error:
                    yield file, unreadable(origin_of(file), error)


def _of_one_system(
    files: list[Place], schema: pa.Schema, columns: Sequence[str], where: pc.Expression | None
) -> Iterator[tuple[Place, pa.RecordBatch]]:
    """Yield the rows of files of one file system."""
    by_path = {arrow_source(file)[0]: file for file in files}
    dataset = ds.dataset(list(by_path), schema=schema, format="parquet", filesystem=arrow_source(files[0])[1])
    for tagged in dataset.scanner(columns=list(columns), filter=where).scan_batches():
        if tagged.record_batch.num_rows:
            check_values(tagged.record_batch)
            yield by_path[tagged.fragment.path], printable_rows(tagged.record_batch)


def origin_of(file: Place) -> Place:
    """Return the file that holds the rows of a run's file: the pack's, of a run in a pack."""
    return file.origin if isinstance(file, ListedPath) else file


def condition_of(where: Filter | None, schema: pa.Schema) -> pc.Expression | None:
    """Return the rows asked for as an expression, tried on no rows: a wrong one is no file's fault."""
    try:
        condition = pq.filters_to_expression(list(where)) if isinstance(where, Sequence) else where
        ds.dataset(schema.empty_table()).to_table(filter=condition)
    except (TypeError, ValueError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise AnalysisError(
            f"`where` must be a condition on {', '.join(schema.names)}, but got {where!r}: {reason}."
        ) from None
    return condition


def labelled(batch: pa.RecordBatch, runs: pa.Array, place: int) -> pa.RecordBatch:
    """Return the rows with the run that they are of before them, and texts as categories."""
    index = pa.array(np.full(batch.num_rows, place, np.int32))
    columns = [pa.DictionaryArray.from_arrays(index, runs)]
    columns += [c.dictionary_encode() if pa.types.is_string(c.type) else c for c in batch.columns]
    return pa.RecordBatch.from_arrays(columns, ["run", *batch.schema.names])


def only(schema: pa.Schema, columns: Iterable[str]) -> pa.Schema:
    """Return a schema with some of its columns, in the order asked for."""
    return pa.schema([schema.field(column) for column in columns])
