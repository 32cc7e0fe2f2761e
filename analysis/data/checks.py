"""Checks of the tables of runs that are over, by the metadata of their files: no row is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from raysim.analysis.data.probes import is_probe
from raysim.analysis.data.rows import unreadable
from raysim.places import Place
from raysim.records import FINISHED, SCHEMA_VERSION, table_files

FILLED = {  # tables that every run that is over has, and their columns that are never empty
    "steps": ("step", "loss", "seconds", "wire_bytes", "dense_bytes"),
    "evals": ("step", "mode", "loss"),
    "links": ("step", "direction", "codec", "wire_bytes", "dense_bytes"),
    "actions": ("step", "stage", "op", "start_s", "end_s"),
}
OF_PROBES = {
    name: columns for name, columns in FILLED.items() if name != "evals"
} | {  # which train nothing by themselves
    "steps": tuple(column for column in FILLED["steps"] if column != "loss")
}
VERSION = b"raysim_schema_version"


def check_tables(runs: pd.DataFrame, folders: Mapping[str, Place]) -> list[str]:
    """Return a sentence for each table that is missing, unreadable, empty, short, without values, or of another version.

    `run.parquet` counts the steps that its tables must have. Files in buckets are only checked for being there: their
    metadata would take a request each.
    """
    if "steps_done" not in runs:
        return []
    counting = runs[runs["status"].isin(FINISHED) & (runs["steps_done"] > 0)]
    return [problem for row in counting.to_dict("records") for problem in _of_run(row, folders[row["run"]])]


def _of_run(row: Mapping[Any, Any], folder: Place) -> Iterator[str]:
    missing = []
    filled = OF_PROBES if is_probe(row) else FILLED
    for table in filled:
        file, found = folder / f"{table}.parquet", table_files(folder, table)
        if isinstance(file, Path) and file.is_symlink() and not file.exists():
            yield f"{file} is a link to {file.readlink()}, which is not there."
        elif not found:
            missing.append(table)
        elif found == [file] and isinstance(file, Path):
            yield from _of_file(file, table, row, filled[table])
    if missing:
        steps = int(row["steps_done"])
        yield f"The run in {folder} has done {steps} steps, but has no table {', '.join(missing)}: copy it again."


def _of_file(file: Path, table: str, row: Mapping[Any, Any], filled: tuple[str, ...]) -> Iterator[str]:
    """Yield the problems of a table that is a single file."""
    try:
        metadata = pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        yield unreadable(file, error)
        return
    version = (metadata.metadata or {}).get(VERSION)
    if version is not None and version != str(SCHEMA_VERSION).encode() and row["schema_version"] == SCHEMA_VERSION:
        yield f"{file} is of version {version.decode()} of the records, where its run is of {SCHEMA_VERSION}: it may be of another run."
    steps, first, last = int(row["steps_done"]), *_wanted(table, row)
    if last is None:
        return
    if metadata.num_rows == 0:
        yield f"{file} is empty, but the run has done {steps} steps."
        return
    known = _statistics(metadata, filled)
    without = [name for name, (nulls, _, _) in known.items() if nulls == metadata.num_rows]
    if without:
        yield f"{file} has no value in {', '.join(without)}."
    _, low, high = known.get("step", (0, None, None))
    if not isinstance(low, int | None) or not isinstance(high, int | None):
        yield f"{file} has steps that are no integers."
    elif (high is not None and high < last) or (low is not None and low > first):
        yield f"{file} has the steps {low} to {high}, but the run has {first} to {last}: copy it again."
    elif table == "steps" and metadata.num_rows != steps:
        yield f"{file} has {metadata.num_rows} rows, but the run has done {steps} steps: copy it again."


def _wanted(table: str, row: Mapping[Any, Any]) -> tuple[int, int | None]:
    """Return the first and the last step that a table must have, None as the last where it may be empty."""
    steps = int(row["steps_done"])
    if table == "evals":  # of the final one; a run that diverged may have none
        evaluated = row["status"] == "finished" and not pd.isna(row.get("final_loss_on"))
        return steps, steps if evaluated else None
    if table == "actions":  # of the middle of each period
        every = row.get("profile_every_steps")
        if pd.isna(every) or not every or steps <= every // 2:
            return 0, None
        first = int(every) // 2
        return first, first + (steps - 1 - first) // int(every) * int(every)
    if table == "links" and row.get("num_stages") == 1:  # replicas need not average in every step
        return 0, None
    return 0, steps - 1


def _statistics(metadata: pq.FileMetaData, names: tuple[str, ...]) -> dict[str, tuple[int, Any, Any]]:
    """Return the number of nulls, the least and the greatest value of columns, over all row groups; a column that is not there
    holds nulls alone."""
    places = {name: place for place, name in enumerate(metadata.schema.names)}
    found = {}
    for name in names:
        if name not in places:
            found[name] = (metadata.num_rows, None, None)
            continue
        groups = [metadata.row_group(group).column(places[name]).statistics for group in range(metadata.num_row_groups)]
        if any(one is None or not one.has_null_count for one in groups):
            continue
        ends = [(one.min, one.max) for one in groups if one.has_min_max]
        low, high = (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (None, None)
        found[name] = (sum(one.null_count for one in groups), low, high)
    return found
