"""Profiles of recorded steps, from the columns of `actions.parquet`, and their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.network.collectives import mean_transfers
from raysim.network.profile import COSTS, STAGE_COSTS, Floats, Profile
from raysim.schedules.arrays import OPS


def profiles_from_actions(columns: Mapping[str, ArrayLike], **overheads: Any) -> dict[int, Profile]:
    """Return one profile per recorded step, keyed by step, from the columns of `actions.parquet` as arrays.

    Uses step, replica, stage, op ("F", "B", "W"; rows of other ops are ignored), microbatch, decode_s, compute_wall_s,
    compute_cpu_s, encode_s, wire_bytes, dense_bytes. Every step must contain every action once, W at most once. `overheads`
    are further fields of `Profile`, such as `call_s` from a calibration.
    """
    taken = {
        "decode_s": "decode_s",
        "compute_s": "compute_wall_s",
        "cpu_s": "compute_cpu_s",
        "encode_s": "encode_s",
        "wire_bytes": "wire_bytes",
        "dense_bytes": "dense_bytes",
    }
    keys = ("step", "replica", "stage", "op", "microbatch")
    for name in (*keys, *taken.values()):
        if name not in columns:
            raise ValueError(f"`columns` must hold {name!r}, but got {sorted(columns)}.")
    letters = np.asarray(columns["op"]).astype(str)
    chosen = np.isin(letters, list(OPS))
    if not chosen.any():
        raise ValueError("`columns` must hold at least one forward or backward, but got none.")
    op = np.array([OPS.index(letter) for letter in letters[chosen]])
    step, replica, stage, microbatch = (
        np.asarray(columns[name])[chosen].astype(np.int64) for name in ("step", "replica", "stage", "microbatch")
    )
    values = {name: _numbers(np.asarray(columns[column])[chosen]) for name, column in taken.items()}
    if np.isnan(values["cpu_s"]).all():  # on a GPU
        del values["cpu_s"]
    values = {name: np.nan_to_num(column) for name, column in values.items()}
    shape = (int(replica.max()) + 1, int(stage.max()) + 1, max(int(op.max()) + 1, 2), int(microbatch.max()) + 1)
    index = np.ravel_multi_index((replica, stage, op, microbatch), shape)
    lacking = np.indices(shape)[2].reshape(-1) == OPS.index("W")  # costs nothing if backward is not split
    profiles: dict[int, Profile] = {}
    for number in np.unique(step):
        here = step == number
        counts = np.bincount(index[here], minlength=math.prod(shape))
        false = counts != 1
        false[lacking & (counts == 0)] = False
        if false.any():
            wrong = int(np.flatnonzero(false)[0])
            r, s, o, m = (int(part) for part in np.unravel_index(wrong, shape))
            raise ValueError(
                f"Step {number} must hold every action once, but got {s}{OPS[o]}{m} of replica {r} {counts[wrong]} times."
            )
        arrays: dict[str, Any] = {}
        for name, column in values.items():
            whole = np.zeros(math.prod(shape))
            whole[index[here]] = column[here]
            arrays[name] = whole.reshape(shape)
        profiles[int(number)] = Profile(**({"source": f"recorded step {number}"} | arrays | overheads))
    return profiles


def mean_profile(profiles: Sequence[Profile]) -> Profile:
    """Return the mean of profiles of one shape, such as a run's recorded steps after warm-up."""
    if not profiles or len({profile.compute_s.shape for profile in profiles}) != 1:
        shapes = [profile.compute_s.shape for profile in profiles]
        raise ValueError(f"`profiles` must be one or more of the same shape, but got shapes {shapes}.")
    means = {name: np.mean([getattr(profile, name) for profile in profiles], axis=0) for name in (*COSTS, *STAGE_COSTS)}
    transfers = mean_transfers([profile.transfers for profile in profiles])
    busy_s = np.array(
        [sum(getattr(profile, name).sum() for name in ("decode_s", "compute_s", "encode_s")) for profile in profiles]
    )
    paces = busy_s / busy_s.mean() if busy_s.mean() > 0 else np.ones(len(profiles))
    return replace(profiles[0], transfers=transfers, paces=paces, source=f"mean of {len(profiles)} steps", **means)


def _numbers(column: NDArray[Any]) -> Floats:
    """Return a column as numbers with null as NaN."""
    if column.dtype == object:
        column = np.array([np.nan if value is None else float(value) for value in column])
    return column.astype(np.float64)
