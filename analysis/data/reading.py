"""Read and check the Parquet files of many runs: small ones whole, large ones by columns and rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from raysim.analysis.data import AnalysisError
from raysim.analysis.data.settings import is_probe
from raysim.network.collectives import EXCHANGES
from raysim.records import FINISHED, SCHEMA_VERSION, table_files
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


FILLED = {  # tables of every ended run, and their columns without missing values
    "steps": ("step", "loss", "seconds", "wire_bytes", "dense_bytes"),
    "evals": ("step", "mode", "loss"),
    "links": ("step", "direction", "codec", "wire_bytes", "dense_bytes"),
    "actions": ("step", "stage", "op", "start_s", "end_s"),
}
FILLED_OF_PROBES = {  # probes train nothing themselves
    "steps": tuple(column for column in FILLED["steps"] if column != "loss"),
    "links": FILLED["links"],
    "actions": FILLED["actions"],
}
ACTION = ("step", "replica", "stage", "op", "microbatch", "start_s", "end_s", "decode_s", "compute_wall_s", "encode_s")
TRANSFER = ("stage", "round", "source_replica", "source_stage", "target_replica", "target_stage", "wire_bytes")
VERSION = b"raysim_schema_version"


# --- files, by their metadata: no row is read ---------------------------------------------------------------------------------


def file_problems(runs: pd.DataFrame, folders: Mapping[str, Place]) -> list[str]:
    """Return a sentence for each table that is missing, unreadable, empty, short, without values, or of another version.

    `run.parquet` counts the steps that its tables must have. Files in buckets are only checked for presence: their
    metadata would take a request each.
    """
    if "steps_done" not in runs:
        return []
    counting = runs[runs["status"].isin(FINISHED) & (runs["steps_done"] > 0)]
    return [problem for row in counting.to_dict("records") for problem in _run_problems(row, folders[row["run"]])]


def _run_problems(row: Mapping[Any, Any], folder: Place) -> Iterator[str]:
    missing = []
    filled = FILLED_OF_PROBES if is_probe(row) else FILLED
    for table in filled:
        file, files = folder / f"{table}.parquet", table_files(folder, table)
        if isinstance(file, Path) and file.is_symlink() and not file.exists():
            yield f"{file} is a link to {file.readlink()}, which is not there."
        elif not files:
            missing.append(table)
        elif files == [file] and isinstance(file, Path):
            yield from _table_problems(file, table, row, filled[table])
    if missing:
        steps = int(row["steps_done"])
        yield f"The run in {folder} has done {steps} steps, but has no table {', '.join(missing)}: copy it again."


def _table_problems(file: Path, table: str, row: Mapping[Any, Any], filled: tuple[str, ...]) -> Iterator[str]:
    try:
        metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        yield unreadable(file, error)
        return
    version = (metadata.metadata or {}).get(VERSION)
    if version is not None and version != str(SCHEMA_VERSION).encode() and row["schema_version"] == SCHEMA_VERSION:
        yield f"{file} is of version {version.decode()} of the records, where its run is of {SCHEMA_VERSION}: it may be of another run."
    steps, first, last = int(row["steps_done"]), *_expected_steps(table, row)
    if last is None:
        return
    if metadata.num_rows == 0:
        yield f"{file} is empty, but the run has done {steps} steps."
        return
    columns = _statistics(metadata, filled)
    empty = [name for name, (nulls, _, _) in columns.items() if nulls == metadata.num_rows]
    if empty:
        yield f"{file} has no value in {', '.join(empty)}."
    _, low, high = columns.get("step", (0, None, None))
    if not isinstance(low, int | None) or not isinstance(high, int | None):
        yield f"{file} has steps that are no integers."
    elif (high is not None and high < last) or (low is not None and low > first):
        yield f"{file} has the steps {low} to {high}, but the run has {first} to {last}: copy it again."
    elif table == "steps" and metadata.num_rows != steps:
        yield f"{file} has {metadata.num_rows} rows, but the run has done {steps} steps: copy it again."


def _expected_steps(table: str, row: Mapping[Any, Any]) -> tuple[int, int | None]:
    """Return the first and the last step that a table must have; None as the last if it may be empty."""
    begin = 0 if pd.isna(row.get("first_step")) else int(row["first_step"])
    end = begin + int(row["steps_done"])
    if table == "evals":  # of the final one; a run that diverged may have none
        evaluated = row["status"] == "finished" and not pd.isna(row.get("final_loss_on"))
        return end, end if evaluated else None
    if table == "actions":  # of the middle of each period; earlier versions did not record the first steps
        every = row.get("profile_every_steps")
        if pd.isna(every) or not every:
            return begin, None
        middle = int(every) // 2
        first = begin + (middle - begin) % int(every)
        return first, first + (end - 1 - first) // int(every) * int(every) if first < end else None
    if table == "links" and row.get("num_stages") == 1:  # replicas need not average in every step
        return begin, None
    return begin, end - 1


def _statistics(metadata: pq.FileMetaData, names: tuple[str, ...]) -> dict[str, tuple[int, Any, Any]]:
    """Return the null count, minimum and maximum of columns over all row groups; a missing column holds only nulls."""
    positions = {name: i for i, name in enumerate(metadata.schema.names)}
    columns = {}
    for name in names:
        if name not in positions:
            columns[name] = (metadata.num_rows, None, None)
            continue
        groups = [metadata.row_group(i).column(positions[name]).statistics for i in range(metadata.num_row_groups)]
        if any(group is None or not group.has_null_count for group in groups):
            continue
        ends = [(group.min, group.max) for group in groups if group.has_min_max]
        low, high = (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (None, None)
        columns[name] = (sum(group.null_count for group in groups), low, high)
    return columns


# --- the tables of one run: a run that contradicts itself must not spoil the prices of others ---------------------------------


def check_actions(row: Mapping[str, Any], actions: pd.DataFrame) -> None:
    """Check a run's actions before their numbers become the shape of arrays; raises ValueError by column."""
    _check_filled("actions", actions, ACTION)
    shape = [int(actions[name].max()) + 1 for name in ("replica", "stage", "microbatch")]
    stated = [int(row[name]) for name in ("num_stages", "num_microbatches")]
    for name, counts in (("numbers", shape), ("stages and microbatches", stated)):
        if math.prod(counts) > len(actions):
            raise ValueError(f"its {len(actions)} actions are too few for the {name} {counts}")


def check_tables(row: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> None:
    """Check `steps`, `actions`, `links` and `collectives` of a run against each other; raises ValueError by table."""
    steps, links, collectives = tables["steps"], tables["links"], tables["collectives"]
    _check_filled("steps", steps, ("step", "seconds"))
    if not steps["step"].is_unique:
        raise ValueError("its table of steps has a step twice")
    groups = links[links["direction"].isin(EXCHANGES)]
    _check_filled("links", links, ("step", "direction", "codec"))
    _check_filled("links", groups, ("stage", "rounds", "wire_bytes", "dense_bytes", "encode_s"))
    _check_filled("links", links[links["boundary"].notna()], ("replica",))
    _check_filled("collectives", collectives, TRANSFER)
    known = set(steps["step"])
    for name, table in (("actions", tables["actions"]), ("links", groups), ("collectives", collectives)):
        missing = sorted(set(table["step"]) - known)
        if missing:
            raise ValueError(f"its table of {name} has step {missing[0]}, which is missing from its table of steps")
    stages, replicas = int(row["num_stages"]), int(row.get("num_replicas") or 1)
    limits = {"stage": stages} | dict.fromkeys(("source_stage", "target_stage"), stages)
    for column, count in {**limits, **dict.fromkeys(("source_replica", "target_replica"), replicas)}.items():
        for name, table in (("links", groups), ("collectives", collectives)):
            if column in table and len(table) and table[column].max() >= count:
                raise ValueError(f"its table of {name} has {column} {table[column].max()}, but the run has {count}")


def check_seconds(samples: Mapping[Any, Any]) -> None:
    """Raise ValueError if a recorded time is negative or not finite: it would spoil the prices of all runs of its job."""
    for kind, sample in samples.items():
        if not (np.isfinite(sample.seconds) & (sample.seconds >= 0)).all():
            raise ValueError(f"its seconds of {kind[0]} are not all numbers of at least 0")


def _check_filled(name: str, table: pd.DataFrame, columns: tuple[str, ...]) -> None:
    for column in columns:
        if table[column].isna().any():
            raise ValueError(f"its table of {name} has rows without `{column}`")
