"""Starts of the collectives of a step, and the seconds of them that a step waits for.

Averages in buckets overlap the last backward of their stage: bucket k of n may leave once that backward has come k/n of its way, as
its parameters are taken to be spread evenly over it. All buckets of a stage leave one after another. Packets between stages and
collectives do not slow one another down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from raysim.network.collectives import DIRECTIONS, Collective, Floats
from raysim.network.profile import Profile
from raysim.schedules.arrays import OPS, ActionTable

Seconds = TypeVar("Seconds", float, Floats)


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


def averaging_words(profile: Profile) -> str:
    """Return how the replicas of a step average, for sentences."""
    return profile.transport.averaging.words(
        dense=bool(profile.gradient_bytes.any()), in_buckets=bool(profile.bucketed_bytes.any())
    )


def without_exchange(profile: Profile) -> Profile:
    """Return a step's profile in which replicas exchange nothing."""
    left = profile.transfers[profile.transfers["direction"] != DIRECTIONS[0]]
    nothing = np.zeros(profile.num_stages)
    return replace(profile, transfers=left, method_s=nothing, gradient_bytes=nothing, bucketed_bytes=nothing)


def hidden(
    step_s: Seconds,
    quiet_s: Seconds,
    codec_s: Seconds,
    num_steps: int,
    busy_s: Seconds | float = 0.0,
    interval: float = 1.0,
) -> Seconds:
    """Return the seconds of a step whose exchange goes on under the next `num_steps` steps, as far as they last.

    `step_s`: with the exchange waited for at once. `quiet_s`: without an exchange. `codec_s`: of its codecs, which compute and are
    not hidden. `busy_s`: of its transfers without latency, for which the next exchange, `interval` steps later, waits.
    The steps that hide the exchange are taken to last as long as the step that sends it.

    >>> hidden(10.0, 2.0, 1.0, 3), hidden(10.0, 2.0, 1.0, 4), hidden(10.0, 2.0, 1.0, 4, busy_s=5.0)
    (4.0, 3.0, 6.0)
    """
    waited = step_s - quiet_s - codec_s - num_steps * quiet_s
    queued = busy_s - interval * quiet_s
    longer = queued + (waited - queued) * (waited > queued)
    return quiet_s + codec_s + longer * (longer > 0)


def overlapped(seconds: Callable[[bool, bool], Seconds], codec_s: Seconds, num_steps: int, interval: float) -> Seconds:
    """Return the seconds of a step whose exchange may last `num_steps` steps more, see `hidden`.

    `seconds(exchanging, latent)` prices the step with or without its exchange, with or without the latencies of the network.
    """
    step_s = seconds(True, True)
    if not num_steps:
        return step_s
    queued = num_steps > interval  # an exchange may still be under way when the next one is sent
    busy_s = seconds(True, False) - seconds(False, False) - codec_s if queued else 0.0 * step_s
    return hidden(step_s, seconds(False, True), codec_s, num_steps, busy_s, interval)
