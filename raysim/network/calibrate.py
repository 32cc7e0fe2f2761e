"""The overheads of a host, read off a recorded run: what packets take beside compute, codec and wire.

The run must be on hosts between which the wire costs nothing to speak of: one machine, or a network far faster than the packets need.
"""

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
    """On the sender's clock, to hand a packet over."""
    message_s: float
    """From the end of the action that sent a packet to the start of the one that awaited it."""
    byte_s: float
    """The same, for every byte of the packet."""
    step_s: float
    """Of every step, outside of its actions."""


def read_overheads(
    columns: Mapping[str, ArrayLike], rows: Sequence[Row], step_seconds: Mapping[int, float] | None = None
) -> Overheads:
    """Return the overheads of a recorded run, from the columns of `actions.parquet` and the rows that it ran.

    An action whose worker was free starts when its packet is there: what lies between is the message. One whose packet was
    there, or that awaits none, starts when its worker is free: what lies between belongs to the packet that the worker sent
    before, as does what the clock of the sending action holds beside codec and compute. A packet is taken to have been there
    if it left twice as long before as packets take; where actions are shorter than that few are. Means of both, since they add
    up over a step, and a line through the packets' sizes where those differ. `step_seconds` are the seconds of whole steps, of
    `steps.parquet`. Leave out the first steps of a run: they warm up.
    """
    num_stages = 1 + max(action.stage for row in rows for action in row)
    names = ("step", "replica", "stage", "op", "microbatch")
    arrays = [np.asarray(columns[name]) for name in names]
    start, end, wire = (np.asarray(columns[name], np.float64) for name in ("start_s", "end_s", "wire_bytes"))
    busy = np.zeros(len(start))
    for name in ("decode_s", "compute_wall_s", "encode_s"):
        busy += np.asarray(columns[name], np.float64)
    place: dict[tuple[int, int, Action], int] = {}
    for i, (step, replica, stage, op, microbatch) in enumerate(zip(*arrays, strict=True)):
        place[int(step), int(replica), Action(int(stage), str(op), int(microbatch))] = i
    runs = sorted({(step, replica) for step, replica, _ in place})

    within, late, sizes = [], [], []
    follows: list[
        tuple[float, float, float]
    ] = []  # of busy workers that sent: gap, seconds since the packet left, bytes
    for step, replica in runs:
        for before, action in (
            (before, action) for row in rows for before, action in zip([None, *row], row, strict=False)
        ):
            here, source = place[step, replica, action], dependency(action, num_stages)
            if sends(action, num_stages):
                within.append(end[here] - start[here] - busy[here])
            ready = end[place[step, replica, source]] if source else -np.inf
            done = end[place[step, replica, before]] if before else -np.inf
            size = wire[place[step, replica, source]] if source else 0.0
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

    Packets of one size say nothing of a slope: then the whole delay is the intercept.
    """
    middle = np.median(sizes)
    small, large = sizes <= middle, sizes > middle
    slope = 0.0
    if large.any():
        rise = float(np.mean(delays[large]) - np.mean(delays[small]))
        slope = max(rise / float(np.mean(sizes[large]) - np.mean(sizes[small])), 0.0)
    return max(float(np.mean(delays - slope * sizes)), 0.0), slope
