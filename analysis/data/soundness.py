"""Checks of one run's tables against each other, so that a run that does not fit itself spoils no price of others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from raysim.network.collectives import DIRECTIONS

ACTION = ("step", "replica", "stage", "op", "microbatch", "start_s", "end_s", "decode_s", "compute_wall_s", "encode_s")
TRANSFER = ("stage", "round", "source_replica", "source_stage", "target_replica", "target_stage", "wire_bytes")


def check_actions(row: Mapping[str, Any], actions: pd.DataFrame) -> None:
    """Check a run's actions before arrays are made by their numbers; raises ValueError by column."""
    _check_known("actions", actions, ACTION)
    shape = [int(actions[name].max()) + 1 for name in ("replica", "stage", "microbatch")]
    stated = [int(row[name]) for name in ("num_stages", "num_microbatches")]
    for name, counts in (("numbers", shape), ("stages and microbatches", stated)):
        if math.prod(counts) > len(actions):
            raise ValueError(f"its {len(actions)} actions are too few for the {name} {counts}")


def check_tables(row: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> None:
    """Check `steps`, `actions`, `links` and `collectives` of a run against each other; raises ValueError by table."""
    steps, links, collectives = tables["steps"], tables["links"], tables["collectives"]
    _check_known("steps", steps, ("step", "seconds"))
    if not steps["step"].is_unique:
        raise ValueError("its table of steps has a step twice")
    groups = links[links["direction"].isin(DIRECTIONS)]
    _check_known("links", links, ("step", "direction", "codec"))
    _check_known("links", groups, ("stage", "rounds", "wire_bytes", "dense_bytes", "encode_s"))
    _check_known("links", links[links["boundary"].notna()], ("replica",))
    _check_known("collectives", collectives, TRANSFER)
    known = set(steps["step"])
    for name, found in (("actions", tables["actions"]), ("links", groups), ("collectives", collectives)):
        missing = sorted(set(found["step"]) - known)
        if missing:
            raise ValueError(f"its table of {name} has step {missing[0]}, which its table of steps lacks")
    for column, most in _numbered(row):
        for name, found in (("links", groups), ("collectives", collectives)):
            if column in found and len(found) and found[column].max() >= most:
                raise ValueError(f"its table of {name} has {column} {found[column].max()}, but the run has {most}")


def check_finite(samples: Mapping[Any, Any]) -> None:
    """Raise ValueError if a recorded time is negative or not finite: it would spoil the prices of all runs of its job."""
    for kind, found in samples.items():
        if not (np.isfinite(found.seconds) & (found.seconds >= 0)).all():
            raise ValueError(f"its seconds of {kind[0]} are not all numbers of at least 0")


def _check_known(name: str, table: pd.DataFrame, columns: tuple[str, ...]) -> None:
    for column in columns:
        if table[column].isna().any():
            raise ValueError(f"its table of {name} has rows without `{column}`")


def _numbered(row: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the columns that number stages and replicas, with the number of them."""
    stages, replicas = int(row["num_stages"]), int(row.get("num_replicas") or 1)
    yield "stage", stages
    for end in ("source", "target"):
        yield f"{end}_stage", stages
        yield f"{end}_replica", replicas
