"""The end of a step: of its pipeline in the steady state, and of the collectives that follow or overlap it.

Without a flush, several steps on end are simulated, of which the one in the middle is priced, once all of them take as long. The time
of a step is the time between the ends of two steps that follow each other, not from its first action to its last. Stages update within
their rows, in the seconds of their last action, and no stage waits for the driver. The messages of post-validation are left out,
since no action waits for them: before its update, a worker needs the norms of the workers before it, which arrive no later than the
activation that its next step needs from them.

Averages in buckets overlap the last backward of their stage: bucket k of n may leave once that backward has come k/n of its way, as
its parameters are taken to be spread evenly over it. All buckets of a stage leave one after another. Packets between stages and
collectives do not slow one another down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from raysim.network.collectives import DIRECTIONS, Collective
from raysim.network.profile import COSTS, Floats, Profile
from raysim.schedules.arrays import OPS, ActionTable

SAME = 1e-9  # of all time simulated: steps that differ by less take as long


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
    period_s: Floats = (steady[last] - steady[0]).max(axis=0) / last
    settled = np.zeros(done.shape[2], bool)
    for cycle in range(1, last // 2 + 1):
        passed = steady[cycle:] - steady[:-cycle]
        new = ~settled & (np.ptp(passed, axis=0) <= SAME * wholes[last]).all(axis=0)
        period_s[new] = passed[-1].max(axis=0)[new] / cycle
        settled |= new
    return period_s


class Starts(NamedTuple):
    """Start and end of each collective, (collective, network), and the end of all, (network)."""

    start_s: Floats
    end_s: Floats
    over_s: Floats


def start_times(
    collectives: Sequence[Collective], seconds: Floats, ready_s: Floats, last_s: Floats, pipeline_s: Floats
) -> Starts:
    """Return when collectives start and end.

    `seconds`: duration of each, all its buckets together, (collective, network); `ready_s`: the end of each stage, (stage, network);
    `last_s`: seconds of each stage's last backward; `pipeline_s`: the end of all stages. Averages in buckets start within the last
    backward of their stage, others when all pipelines are done; those that share a host follow one another. Owners of tied
    parameters start after all averages.
    """
    starts = np.empty(seconds.shape)
    ends = np.empty(seconds.shape)
    averages = [i for i, one in enumerate(collectives) if one.direction == DIRECTIONS[0]]
    sums = [i for i, one in enumerate(collectives) if one.direction != DIRECTIONS[0]]
    first, last = np.empty(seconds.shape), np.empty(seconds.shape)  # when the first and the last bucket are ready
    for i in averages:
        one = collectives[i]
        last[i] = ready_s[list(one.stages)].max(axis=0) if one.num_buckets else pipeline_s
        lasted = last_s[one.stages[0]] if one.num_buckets else 0.0
        first[i] = last[i] - lasted * (1 - 1 / max(one.num_buckets, 1))
    hosts = [collectives[i].hosts for i in averages]
    alone = len(frozenset().union(*hosts)) == sum(len(each) for each in hosts)
    for lanes in [slice(None)] if alone else range(seconds.shape[1]):
        free: dict[int, Floats] = {}
        order = averages if alone else sorted(averages, key=lambda i: (first[i, lanes], i))
        for i in order:
            one = collectives[i]
            begin = first[i, lanes]
            for host in one.hosts & free.keys():
                begin = np.maximum(begin, free[host])
            whole, bucket = seconds[i, lanes], seconds[i, lanes] / max(one.num_buckets, 1)
            starts[i, lanes] = begin
            ends[i, lanes] = np.maximum(begin + whole, last[i, lanes] + bucket)
            free |= dict.fromkeys(one.hosts, ends[i, lanes])
    averaged = np.max([pipeline_s, *ends[averages]], axis=0)
    starts[sums] = averaged
    ends[sums] = averaged + seconds[sums]
    over: Floats = np.max([averaged, *ends[sums]], axis=0)
    return Starts(starts, ends, over)


def last_backwards(table: ActionTable, profile: Profile) -> Floats:
    """Return the seconds of each stage's last backward in the priced step, or of its last W; the fastest replica's."""
    of_step = (table.op != OPS.index("F")) & (table.microbatch // table.per_step == table.priced_step)
    seconds = np.zeros(table.num_stages)
    for stage in range(table.num_stages):
        i = int(np.flatnonzero(of_step & (table.stage == stage))[-1])
        key = stage, table.op[i], table.microbatch[i] if profile.compute_s.shape[3] > 1 else 0
        seconds[stage] = profile.compute_s[:, *key].min()
    return seconds
