"""Steps without a flush: several of them on end, and the step in the middle that is priced, once all of them take as long.

The time of a step is the time between the ends of two steps that follow each other, not from its first action to its last. Stages
update within their rows, in the seconds of their last action, and no stage waits for the driver.

The messages of post-validation are left out, since no action waits for them: before its update, a worker needs the norms of the
workers before it, which arrive no later than the activation that its next step needs from them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysim.network.profile import COSTS, Profile
from raysim.schedules.arrays import OPS, ActionTable, make_table
from raysim.schedules.families import Schedule
from raysim.schedules.unflushed import PostValidatedSteps, Unflushed

Floats = NDArray[np.float64]

FEWEST_STEPS, MOST_STEPS = 12, 96
SAME = 1e-9  # of all time simulated: steps that differ by less take as long


def steps_table(schedule: Schedule, num_stages: int, num_microbatches: int) -> ActionTable:
    """Return the rows that give the time of a step: its own, or those of several steps without a flush."""
    if isinstance(schedule, PostValidatedSteps):
        table = make_table(schedule.schedule, num_stages, num_microbatches)
        return table.repeated(FEWEST_STEPS + 1)._replace(priced_step=FEWEST_STEPS - 1)  # no worker is two steps ahead
    if not isinstance(schedule, Unflushed):
        return make_table(schedule, num_stages, num_microbatches)
    priced, ahead = _lengths(schedule, num_stages, num_microbatches)
    table = make_table(schedule.schedule, num_stages, (priced + ahead) * num_microbatches)
    return table._replace(num_steps=priced + ahead, priced_step=priced - 1)


@lru_cache(maxsize=256)
def _lengths(schedule: Unflushed, num_stages: int, num_microbatches: int) -> tuple[int, int]:
    """Return the number of steps to the end of the priced one, and of those whose forwards come before that end.

    Steps repeat after at most as many as there are microbatches in flight. There are three times as many steps, the first third
    of which may differ from the others.
    """
    in_flight = max(schedule.in_flight(num_stages))
    ahead = math.ceil((in_flight - 1) / num_microbatches)
    return max(FEWEST_STEPS, min(3 * in_flight + 3, MOST_STEPS)) + 3 * ahead, ahead


def on_end(profile: Profile, table: ActionTable) -> Profile:
    """Return the costs of all steps of a table; without a flush, the last action of a stage in a step holds its update."""
    if table.num_steps == 1:
        return profile
    if profile.num_microbatches is None and not profile.update_s.any():
        return profile
    changed: dict[str, Any] = {
        name: np.broadcast_to(getattr(profile, name), (*profile.compute_s.shape[:3], table.per_step)).copy()
        for name in COSTS
    }
    for stage, op in enumerate(_last_ops(table)):
        for name in ("compute_s", "cpu_s"):
            changed[name][:, stage, op, -1] += profile.update_s[stage]
    changed = {name: np.tile(costs, table.num_steps) for name, costs in changed.items()}
    return replace(profile, **changed)


def _last_ops(table: ActionTable) -> list[int]:
    """Return the op of each stage's last action, which works on the last microbatch."""
    return [int(table.op[np.flatnonzero(table.stage == stage)[-1]]) for stage in range(table.num_stages)]


def steady_end(table: ActionTable, free: Floats, done: Floats) -> tuple[Floats, Floats, Floats]:
    """Return, for each network, the start and the seconds of the priced step, and the times at which stages end it (stage, network).

    `free`: the times at which workers are done (replica, worker, network). `done`: the times at which stages end each step
    (replica, step, stage, network).
    """
    ends = done[:, table.priced_step].max(axis=0)
    if table.num_steps == 1:
        return np.zeros(free.shape[2]), free.max(axis=(0, 1)), ends
    seconds = _period_s(
        done[:, : table.priced_step + 1].swapaxes(0, 1).reshape(table.priced_step + 1, -1, free.shape[2])
    )
    start = ends.max(axis=0) - seconds
    return start, seconds, np.maximum(ends - start, 0.0)


def _period_s(done: Floats) -> Floats:
    """Return by network the seconds between the ends of steps, of their ends (step, stage of a replica, network).

    Exact where the steps repeat: in each cycle of steps every stage goes on by as much, wherever the cycle begins. Elsewhere, such as
    with jitter or while a queue drains, it is the mean of the slowest stage, which is never less than that stage's work. The first
    third of the steps, in which the pipeline fills, does not count.
    """
    steady = done[len(done) // 3 :]
    last, wholes = len(steady) - 1, steady.max(axis=1)
    found: Floats = (steady[last] - steady[0]).max(axis=0) / last
    settled = np.zeros(done.shape[2], bool)
    for cycle in range(1, last // 2 + 1):
        passed = steady[cycle:] - steady[:-cycle]
        new = ~settled & (np.ptp(passed, axis=0) <= SAME * wholes[last]).all(axis=0)
        found[new] = passed[-1].max(axis=0)[new] / cycle
        settled |= new
    return found


def windows(table: ActionTable) -> NDArray[np.int64]:
    """Return the actions of the priced step of each worker, from the first to behind the last, in the table's numbers.

    Without a flush these follow the worker's last backward of the step before. Its forwards are those of later microbatches.
    """
    whole = np.stack([table.offsets[:-1], table.offsets[1:]], axis=1)
    if table.num_steps == 1:
        return whole
    if table.repeats:
        lengths = np.diff(table.offsets) // table.num_steps
        first = table.offsets[:-1] + table.priced_step * lengths
        return np.stack([first, first + lengths], axis=1)
    for edge, step in ((0, table.priced_step - 1), (1, table.priced_step)):
        lasts = np.flatnonzero((table.op == OPS.index("B")) & (table.microbatch == (step + 1) * table.per_step - 1))
        whole[:, edge] = lasts + 1  # of one stage a worker, in order
    return whole
