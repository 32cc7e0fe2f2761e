"""Checks of recorded tables: each file by its metadata, and the tables of one run against each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from raysim.analysis.data.reading import unreadable
from raysim.analysis.data.settings import is_probe
from raysim.network.collectives import EXCHANGES
from raysim.records import FINISHED, SCHEMA_VERSION, table_files
from raysim.storage.places import Place

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
