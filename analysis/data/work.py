"""Kinds of work in a run: actions of one kind have the same price in all runs of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysim.schedules.arrays import OPS

Floats = NDArray[np.float64]
Codes = NDArray[np.int32]
Kind: TypeAlias = tuple[Any, ...]
"""A kind of work with one price in a job. The first item is its family: "compute", "encode", "decode", "average" or "update"."""

UPDATE: Kind = ("update",)
NO_KIND = -1  # of an action that does not exist, or has no packet


class WorkCodes(NamedTuple):
    """The kind of each action's work, as an index into `kinds`; axes (step, replica, stage, op, microbatch)."""

    kinds: list[Kind]
    compute: Codes
    encode: Codes
    """Of the action's output."""
    decode: Codes
    """Of the action's input."""


def work_codes(
    steps: Sequence[int],
    wire_bytes: Floats,
    dense_bytes: Floats,
    *,
    split_backwards: set[tuple[int, int]],
    extra_work: Mapping[tuple[int, int], str],
    compressors: Mapping[tuple[int, str, int], str],
    shared_indices: bool,
) -> WorkCodes:
    """Return the kinds of work of all actions.

    `split_backwards`: stages and microbatches with a separate backward for weights. `extra_work`: by step and stage,
    see `extra_work_of`. `compressors`: by replica, direction and boundary, see `recorded_compressors`. Messages of one
    compressor and dense size are separated by the power of two of their compression factor, which separates an
    adaptive method's branches.
    """
    numbers: dict[Kind, int] = {}

    def code(kind: Kind) -> int:
        return numbers.setdefault(kind, len(numbers))

    shape = wire_bytes.shape
    compute, encode, decode = (np.full(shape, NO_KIND, np.int32) for _ in range(3))
    every_action = product(range(len(steps)), range(shape[2]), range(shape[3]), range(shape[4]))
    for i, stage, op, microbatch in every_action:
        split = (stage, microbatch) in split_backwards
        if op < 2 or split:
            kind = ("compute", stage, OPS[op], split and op > 0, extra_work.get((steps[i], stage), ""))
            compute[i, :, stage, op, microbatch] = code(kind)
    for stage in range(shape[2]):
        for op, direction, boundary, target in (
            (0, "forward", stage, stage + 1),
            (1, "backward", stage - 1, stage - 1),
        ):
            if not 0 <= target < shape[2]:
                continue
            for replica in range(shape[1]):
                wire, dense = wire_bytes[:, replica, stage, op], dense_bytes[:, replica, stage, op]
                octaves = octaves_of(dense, wire)
                sent = wire > 0
                compressor = compressors.get((replica, direction, boundary), "")
                for size, octave in {(a, b) for a, b in zip(dense[sent], octaves[sent], strict=True)}:
                    same = sent & (dense == size) & (octaves == octave)
                    message = (compressor, direction, shared_indices, int(size), int(octave))
                    encode[:, replica, stage, op][same] = code(("encode", *message))
                    decode[:, replica, target, op][same] = code(("decode", *message))
    return WorkCodes(list(numbers), compute, encode, decode)


def octaves_of(dense_bytes: Any, wire_bytes: Any) -> NDArray[np.int64]:
    """Return compression factors rounded to powers of two, as exponents; 0 if nothing was sent."""
    with np.errstate(divide="ignore", invalid="ignore"):
        octaves = np.round(np.log2(np.asarray(dense_bytes, np.float64) / np.asarray(wire_bytes, np.float64)))
    return np.where(np.isfinite(octaves), octaves, 0).astype(np.int64)


def extra_work_of(actions: Mapping[str, NDArray[Any]]) -> dict[tuple[int, int], str]:
    """Return, by step and stage, the work of actions beyond a forward or a backward, if there is any."""
    if "work" not in actions:
        return {}
    columns = (actions[name] for name in ("step", "stage", "work"))
    return {(int(step), int(stage)): work for step, stage, work in zip(*columns, strict=True) if isinstance(work, str)}


def recorded_compressors(links: pd.DataFrame) -> dict[tuple[int, str, int], str]:
    """Return the compressors of each replica, direction and boundary, of all its tensors."""
    columns = (links[name].tolist() for name in ("replica", "direction", "boundary", "tensor", "codec"))
    by_link: dict[tuple[int, str, int], dict[str, str]] = {}
    for replica, direction, boundary, tensor, codec in zip(*columns, strict=True):
        if boundary is not None and boundary == boundary:  # not of a group that ends a step
            by_link.setdefault((int(replica), str(direction), int(boundary)), {}).setdefault(str(tensor), str(codec))
    return {link: " + ".join(codecs.values()) for link, codecs in by_link.items()}
