"""The end of a step: of its pipeline in the steady state, and of the collectives that follow or overlap it.

Without a flush, several consecutive steps are simulated, and one in the steady state is priced. The time of a step is the time
between the ends of two consecutive steps, not from its first action to its last. Stages update within their rows, as part of their
last action, and no stage waits for the driver. Post-validation messages are not simulated, since no action waits for them: before its
update, a worker needs the norms of the preceding workers, which arrive no later than the activation it needs from them for its next
step.

Bucketed averages overlap the last backward of their stage: bucket k of n may be sent once k/n of that backward is done, assuming that
parameters are spread evenly over it. The buckets of a stage are sent one after another. Packets between stages and collectives do not
slow each other down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from raysim.network.collectives import EXCHANGES, TRANSFER, Collective, collectives
from raysim.network.exchanges import all_reduce_rounds, sites_of
from raysim.network.profile import COSTS, Floats, Profile
from raysim.network.topology import Placement
from raysim.network.transport import Transport
from raysim.schedules.arrays import OPS, ActionTable

SAME = 1e-9  # share of the simulated time below which step times count as equal


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
    for stage in range(table.num_stages):
        last_op = int(table.op[np.flatnonzero(table.stage == stage)[-1]])  # of the last microbatch
        for name in ("compute_s", "cpu_s"):
            changed[name][:, stage, last_op, -1] += profile.update_s[stage]
    changed = {name: np.tile(costs, table.num_steps) for name, costs in changed.items()}
    return replace(profile, **changed)


def steady_end(
    table: ActionTable, free: Floats, done: Floats, least_s: Floats | float
) -> tuple[Floats, Floats, Floats]:
    """Return, for each network, the start and the seconds of the priced step, and the end times of its stages (stage, network).

    `free`: end times of workers (replica, worker, network). `done`: end times of each step's stages (replica, step, stage,
    network). `least_s`: the work of the busiest wire in a step, which bounds steps without a flush.
    """
    ends = done[:, table.priced_step].max(axis=0)
    if table.num_steps == 1:
        return np.zeros(free.shape[2]), free.max(axis=(0, 1)), ends
    seconds = _period_s(
        done[:, : table.priced_step + 1].swapaxes(0, 1).reshape(table.priced_step + 1, -1, free.shape[2]), least_s
    )
    start = ends.max(axis=0) - seconds
    return start, seconds, np.maximum(ends - start, 0.0)


def _period_s(done: Floats, least_s: Floats | float) -> Floats:
    """Return the seconds between consecutive step ends by network, from the end times (step, stage of a replica, network).

    Exact if the steps repeat in a cycle, over which every stage advances by the same time from any start. Otherwise, such as with
    jitter or while a queue drains, it is the mean of the slowest stage, which is never less than that stage's work, or `least_s`.
    The first third of the steps, in which the pipeline fills, is ignored.
    """
    steady = done[len(done) // 3 :]
    last, wholes = len(steady) - 1, steady.max(axis=1)
    period_s: Floats = np.maximum((steady[last] - steady[0]).max(axis=0) / last, least_s)
    settled = np.zeros(done.shape[2], bool)
    for cycle in range(1, last // 2 + 1):
        passed = steady[cycle:] - steady[:-cycle]
        new = ~settled & (np.ptp(passed, axis=0) <= SAME * wholes[last]).all(axis=0)
        period_s[new] = passed[-1].max(axis=0)[new] / cycle
        settled |= new
    return period_s


def step_collectives(
    profile: Profile,
    placement: Placement,
    owner: tuple[int, ...],
    host_sites: tuple[str, ...] | None,
    labels: tuple[int, ...],
) -> tuple[Collective, ...]:
    """Return the collectives that end a step, shared by steps of equal messages; `labels`: see `raysim.network.rounds.equal_hosts`."""
    coded = np.flatnonzero(profile.method_s)
    costs = (tuple(each.tolist()) for each in (profile.gradient_bytes, profile.bucketed_bytes, coded))
    return _collectives(profile.transfers.tobytes(), *costs, profile.transport, placement, owner, host_sites, labels)


@lru_cache(maxsize=16)
def _collectives(
    listed: bytes,
    gradient_bytes: tuple[float, ...],
    bucketed_bytes: tuple[float, ...],
    coded: tuple[int, ...],
    transport: Transport,
    placement: Placement,
    owner: tuple[int, ...],
    host_sites: tuple[str, ...] | None,
    labels: tuple[int, ...],
) -> tuple[Collective, ...]:
    """Return the collectives of steps of one kind, which many profiles and networks share."""
    hosts = placement.by_replica(max(owner) + 1)[:, owner]
    averaging = transport.averaging
    transfers, averages = np.frombuffer(listed, TRANSFER), {}
    stages = np.flatnonzero(gradient_bytes).tolist() if len(hosts) > 1 else []
    buckets = [averaging.num_buckets(size) for size in bucketed_bytes]
    for stage in stages:
        own = (transfers["direction"] == EXCHANGES[0]) & (transfers["stage"] == stage)
        if averaging.algorithm == "direct" and own.any():
            continue
        transfers = transfers[~own]
        averages[stage] = all_reduce_rounds(
            len(hosts),
            gradient_bytes[stage],
            averaging.algorithm,
            sites_of(hosts[:, stage].tolist(), host_sites),
        )
    return collectives(
        transfers,
        hosts,
        buckets,
        averages=averages,
        coded=coded,
        labels=np.array(labels),
        transport=transport,
    )


class Starts(NamedTuple):
    """Start and end of each collective (collective, lane), and the end of all (lane); lanes are steps or networks."""

    start_s: Floats
    end_s: Floats
    over_s: Floats


def start_times(
    collectives: Sequence[Collective], seconds: Floats, ready_s: Floats, last_s: Floats, pipeline_s: Floats
) -> Starts:
    """Return when collectives start and end.

    `seconds`: duration of each with all its buckets (collective, lane); `ready_s`: end of each stage (stage, lane); `last_s`:
    seconds of each stage's last backward (stage, lane); `pipeline_s`: end of all stages (lane). Bucketed averages start during the
    last backward of their stage, others when all pipelines are done; averages that share a host run one after another. Owners of tied
    parameters start after all averages.
    """
    starts = np.empty(seconds.shape)
    ends = np.empty(seconds.shape)
    averages = [i for i, collective in enumerate(collectives) if collective.direction == EXCHANGES[0]]
    sums = [i for i, collective in enumerate(collectives) if collective.direction != EXCHANGES[0]]
    first, last = np.empty(seconds.shape), np.empty(seconds.shape)  # when the first and the last bucket are ready
    for i in averages:
        collective = collectives[i]
        last[i] = ready_s[list(collective.stages)].max(axis=0) if collective.num_buckets else pipeline_s
        lasted = last_s[collective.stages[0]] if collective.num_buckets else 0.0
        first[i] = last[i] - lasted * (1 - 1 / max(collective.num_buckets, 1))
    used = np.concatenate([np.empty(0, np.int64), *(collectives[i].hosts for i in averages)])
    alone = len(np.unique(used)) == len(used)
    free_s = np.zeros((int(used.max(initial=-1)) + 1, seconds.shape[1]))
    for lanes in [slice(None)] if alone else range(seconds.shape[1]):
        order = averages if alone else sorted(averages, key=lambda i: (first[i, lanes], i))
        for i in order:
            collective = collectives[i]
            begin = first[i, lanes]
            if not alone:
                begin = max(begin, free_s[collective.hosts, lanes].max(initial=0.0))
            whole, bucket = seconds[i, lanes], seconds[i, lanes] / max(collective.num_buckets, 1)
            starts[i, lanes] = begin
            ends[i, lanes] = np.maximum(begin + whole, last[i, lanes] + bucket)
            if not alone:
                free_s[collective.hosts, lanes] = ends[i, lanes]
    averaged = np.max([pipeline_s, *ends[averages]], axis=0)
    starts[sums] = averaged
    ends[sums] = averaged + seconds[sums]
    over: Floats = np.max([averaged, *ends[sums]], axis=0)
    return Starts(starts, ends, over)


def last_backwards(table: ActionTable, profiles: Sequence[Profile]) -> Floats:
    """Return the seconds of each stage's last backward (or W) in the priced step, on the fastest replica: (stage, profile)."""
    of_step = (table.op != OPS.index("F")) & (table.microbatch // table.per_step == table.priced_step)
    last = [int(np.flatnonzero(of_step & (table.stage == stage))[-1]) for stage in range(table.num_stages)]
    microbatch = table.microbatch[last] if profiles[0].compute_s.shape[3] > 1 else 0
    places = np.arange(table.num_stages), table.op[last], microbatch
    return np.stack([profile.compute_s[:, *places].min(axis=0) for profile in profiles], axis=-1)
