"""Overheads of calls and messages in a recorded run, from the gaps between its actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.schedules.actions import Action, Row, dependency, sends

Floats = NDArray[np.float64]


class Overheads(NamedTuple):
    """Overheads of calls and messages, as fields of `Profile`: `profiles_from_actions(columns, **overheads._asdict())`."""

    call_s: float
    """Seconds of the sender to hand a packet over."""
    message_s: float
    """Seconds from the end of the sending action to the start of the action that awaits the packet."""
    byte_s: float
    """The same, for every byte of the packet."""
    step_s: float
    """Seconds of every step outside its actions."""


def read_overheads(
    columns: Mapping[str, ArrayLike], rows: Sequence[Row], step_seconds: Mapping[int, float] | None = None
) -> Overheads:
    """Return the overheads of a recorded run, from the columns of `actions.parquet` and the rows of its schedule.

    The cost of wires must be negligible: the run is on one machine, or on a network far faster than its packets need.
    If an action's worker was idle, the action starts when its packet arrives, and the time since the packet left is the message's
    overhead. If its packet had arrived before, or it needs none, the action starts when its worker is free. The time since then is
    call overhead of the packet that the worker sent before, and so is the sending action's time beyond codec and compute.
    A packet counts as arrived if it left at least twice the usual time of a packet earlier, which is rare if actions are shorter.
    Both overheads are means, since they add up over a step; if packets differ in size, the message's is linear in their size.
    `step_seconds` are the seconds of whole steps, from `steps.parquet`. Leave out a run's first steps, which warm up.
    """
    num_stages = 1 + max(action.stage for row in rows for action in row)
    names = ("step", "replica", "stage", "op", "microbatch")
    arrays = [np.asarray(columns[name]) for name in names]
    start, end, wire = (np.asarray(columns[name], np.float64) for name in ("start_s", "end_s", "wire_bytes"))
    busy = np.zeros(len(start))
    for name in ("decode_s", "compute_wall_s", "encode_s"):
        busy += np.asarray(columns[name], np.float64)
    index_of: dict[tuple[int, int, Action], int] = {}
    for i, (step, replica, stage, op, microbatch) in enumerate(zip(*arrays, strict=True)):
        index_of[int(step), int(replica), Action(int(stage), str(op), int(microbatch))] = i
    runs = sorted({(step, replica) for step, replica, _ in index_of})

    within, late, sizes = [], [], []
    follows: list[
        tuple[float, float, float]
    ] = []  # of busy workers that sent: gap, seconds since the packet left, bytes
    for step, replica in runs:
        for before, action in (
            (before, action) for row in rows for before, action in zip([None, *row], row, strict=False)
        ):
            here, source = index_of[step, replica, action], dependency(action, num_stages)
            if sends(action, num_stages):
                within.append(end[here] - start[here] - busy[here])
            ready = end[index_of[step, replica, source]] if source else -np.inf
            done = end[index_of[step, replica, before]] if before else -np.inf
            size = wire[index_of[step, replica, source]] if source else 0.0
            if before and done > ready:
                if sends(before, num_stages):
                    follows.append((start[here] - done, done - ready, size))
            elif source:
                late.append(start[here] - ready)
                sizes.append(size)
    message_s, byte_s = _line(np.array(sizes), np.array(late)) if late else (0.0, 0.0)
    free = [gap for gap, passed, size in follows if passed > 2 * (message_s + byte_s * size)]
    call_s = float(np.mean(within)) + (float(np.mean(free)) if free else 0.0) if within else 0.0
    step_s = 0.0
    if step_seconds:
        spans = {}
        for step in {step for step, _ in runs}:
            here = arrays[0] == step
            spans[step] = float(end[here].max() - start[here].min())
        step_s = float(np.mean([step_seconds[step] - span for step, span in spans.items() if step in step_seconds]))
    return Overheads(max(call_s, 0.0), message_s, byte_s, max(step_s, 0.0))


def _line(sizes: Floats, delays: Floats) -> tuple[float, float]:
    """Return the intercept and slope, neither negative, through the means of the smaller and of the larger packets.

    If all packets have one size, the whole delay is the intercept.
    """
    middle = np.median(sizes)
    small, large = sizes <= middle, sizes > middle
    slope = 0.0
    if large.any():
        rise = float(np.mean(delays[large]) - np.mean(delays[small]))
        slope = max(rise / float(np.mean(sizes[large]) - np.mean(sizes[small])), 0.0)
    return max(float(np.mean(delays - slope * sizes)), 0.0), slope
