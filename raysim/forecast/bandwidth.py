"""Step times over networks, and the bandwidth needed for a utilisation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.forecast.fleet import HostLayout, Proposal
from raysim.forecast.job import Job
from raysim.network.prices import MODEL_ERROR, NINE_TENTHS, overlapped
from raysim.network.profile import Profile
from raysim.network.simulate import step_seconds
from raysim.network.topology import FREE, Network

Floats = NDArray[np.float64]

LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Utilisations for which the bandwidth is searched."""
LOWEST, HIGHEST = 1e4, 1e13
"""Limits of the search, in bit/s."""
COARSE, FINE = 48, 6
"""Grid points between the limits, and within each bracket."""
ERRORS = (1.0, 1 + NINE_TENTHS * MODEL_ERROR, 1 - NINE_TENTHS * MODEL_ERROR)
"""Factors on the seconds added by a network: as simulated, and the ends of the 90 % interval of the model's error."""


class Needed(NamedTuple):
    """The bandwidth needed for a utilisation, with its 90 % interval; infinite if none is enough."""

    bps: float
    low_bps: float
    high_bps: float


def steps_s(job: Job, way: Proposal, networks: Sequence[Network]) -> Floats:
    """Return the mean seconds of a step on each network."""
    layout, kinds, count = way.layout, job.mixture(way), job.num_microbatches(way.layout)
    if job.steps_under_way(way):
        return _lagging_s(job, way, networks)
    if way.overlap or _differ(networks):
        return sum(
            (share * _run(job, way, profile, networks, count, layout.replicas) for share, profile in kinds),
            np.zeros(len(networks)),
        )
    # identical replicas finish together: one pipeline's step, plus the time an exchange adds to a step of few microbatches
    if layout.sharding is None:
        total = _alone_s(job, way.links, tuple(networks)).copy()
    else:
        total = _run(job, way, job.profile(way), networks, count, 1)
    quiet = job.profile(way)
    if kinds != [(1.0, quiet)]:
        distinct = list(dict.fromkeys([quiet, *(profile for _, profile in kinds)]))
        few = job.fewest_microbatches(layout)
        once = step_seconds(job.schedule, distinct, networks, num_microbatches=few, num_replicas=layout.replicas)
        for share, profile in kinds:
            total += share * (once[:, distinct.index(profile)] - once[:, 0])
    return total


def _lagging_s(job: Job, way: Proposal, networks: Sequence[Network]) -> Floats:
    """Return the mean seconds of a step if later steps hide exchanges, as far as these fit."""
    quiet, exchanges, count = job.profile(way), job.exchanges(way), job.num_microbatches(way.layout)
    instant = [network.without_latency for network in networks]
    pipelines = [_pipeline_s(job, way, on, tied=True) for on in (instant, networks)]

    def seconds(profile: Profile, exchanging: bool, latent: bool) -> Floats:
        if not exchanging:
            return pipelines[latent]
        on = networks if latent else instant
        if _differ(on):
            return _run(job, way, profile, on, count, way.layout.replicas)
        few = job.fewest_microbatches(way.layout)
        with_and_without = (_run(job, way.unsharded, each, on, few, way.layout.replicas) for each in (profile, quiet))
        added: Floats = np.subtract(*with_and_without)
        return pipelines[latent] + added

    total = pipelines[True] * (1 - sum(share for share, _ in exchanges))
    for share, profile in exchanges:
        total += share * overlapped(
            partial(seconds, profile),
            np.full(len(networks), profile.method_s.max()),
            job.steps_under_way(way),
            1 / sum(share for share, _ in exchanges),
        )
    return total


def _differ(networks: Sequence[Network]) -> bool:
    """Return whether replicas may take different times on some network."""
    return any(network.num_hosts is not None or network.jitter_s for network in networks)


def _run(job: Job, way: Proposal, profile: Profile, networks: Sequence[Network], count: int, replicas: int) -> Floats:
    """Return the seconds of a step of `count` microbatches on each network; of the first replica if `replicas` is 1."""
    if replicas == 1:
        profile = replace(profile, transfers=profile.transfers[profile.transfers["source_replica"] == 0])
    waiting = partial(step_seconds, job.schedule, num_microbatches=count, num_replicas=replicas)
    if way.layout.sharding is None:
        return waiting(profile, networks)[:, 0]
    step = job.timed(way, profile, count)
    groups = [[network] for network in networks] if _differ(networks) else [networks]
    own = [costs for group in groups for costs in step.profiles(group)]
    if way.layout.workers == replicas == 1:  # only shards cross the network, and their seconds are in the actions
        return waiting(own, [FREE])[0]  # type: ignore[no-any-return]
    return np.concatenate([waiting(costs, [network])[:, 0] for costs, network in zip(own, networks, strict=True)])


def _pipeline_s(job: Job, way: Proposal, networks: Sequence[Network], *, tied: bool) -> Floats:
    """Return the seconds of a step without an exchange of replicas, and with or without the sums of tied parameters."""
    replicas, profile = way.layout.replicas if _differ(networks) else 1, job.profile(way)
    if (tied or not len(profile.transfers)) and replicas == 1 and way.layout.sharding is None:
        return _alone_s(job, way.links, tuple(networks))
    if not tied:
        profile = replace(profile, transfers=profile.transfers[:0])
    return _run(job, way.unsharded, profile, networks, job.num_microbatches(way.layout), replicas)


@lru_cache(maxsize=64)
def _alone_s(job: Job, way: Proposal, networks: tuple[Network, ...]) -> Floats:
    """Return the seconds of the first pipeline's step on each network, cached for all ways with the same links."""
    seconds = _run(job, way, job.profile(way), networks, job.num_microbatches(way.layout), 1)
    seconds.flags.writeable = False
    return seconds


class Parts(NamedTuple):
    """Seconds of a step by cause, adding up to the step."""

    compute: float
    bubble: float
    """Idle time due to the schedule, plus the optimiser, on an unlimited network."""
    codecs: float
    links: float
    tied: float
    """Sums of tied parameters, such as an embedding that is also the head, over their stages."""
    averaging: float
    latency: float


def parts_of(job: Job, way: Proposal, network: Network) -> Parts:
    """Return a step's seconds by cause: the time saved by removing the causes one after another."""
    prompt = network.without_latency
    step, without_latency, own = steps_s(job, way, [network, prompt, FREE]).tolist()
    quiet, untied = (float(np.subtract(*_pipeline_s(job, way, [prompt, FREE], tied=tied))) for tied in (True, False))
    free, compute = free_s(job, way.layout), job.compute_s(way.layout)
    return Parts(
        compute=compute,
        bubble=free - compute,
        codecs=own - free,
        links=untied,
        tied=quiet - untied,
        averaging=(without_latency - own) - quiet,
        latency=step - without_latency,
    )


@lru_cache(maxsize=64)
def free_s(job: Job, layout: HostLayout) -> float:
    """Return the seconds of an uncompressed step on an unlimited network, which is utilisation 1."""
    return float(steps_s(job, Proposal(layout), [FREE])[0])


def needed(job: Job, way: Proposal, network: Network) -> tuple[Needed, ...]:
    """Return the bandwidth needed for each utilisation of `LEVELS`, with all else as in `network`.

    `network` has one bandwidth. Utilisation is `free_s` divided by the step. A step's seconds fall with the bandwidth and are
    piecewise linear in the seconds per bit, so they are interpolated linearly in these between two close networks.
    """
    free = free_s(job, way.layout)
    grid = np.geomspace(LOWEST, HIGHEST, COARSE)
    own, *coarse = steps_s(job, way, [FREE, *_at_bandwidths(network, tuple(grid.tolist()))]).tolist()
    # own + error (step - own) seconds have utilisation `level` if step = own + (free / level - own) / error
    targets = np.array([own + (free / level - own) / error for level in LEVELS for error in ERRORS])
    starts = np.clip(np.searchsorted(-np.array(coarse), -targets), 1, COARSE - 1)
    starts, bracket = np.unique(starts, return_inverse=True)  # close targets share one
    inner = np.geomspace(grid[starts - 1], grid[starts], FINE, axis=1)
    within = steps_s(job, way, _at_bandwidths(network, tuple(inner.reshape(-1).tolist()))).reshape(inner.shape)
    found = [_crossing(inner[i], within[i], target) for i, target in zip(bracket, targets.tolist(), strict=True)]
    ends = np.array(found).reshape(len(LEVELS), len(ERRORS))
    return tuple(Needed(float(row[0]), float(row.min()), float(row.max())) for row in ends)


@lru_cache(maxsize=2)
def _at_bandwidths(network: Network, bandwidths_bps: tuple[float, ...]) -> list[Network]:
    """Return the network at each bandwidth, cached because all ways start with the same ones."""
    return [replace(network, bandwidth_bps=bps, name="") for bps in bandwidths_bps]


def _crossing(bps: Floats, seconds: Floats, target: float) -> float:
    """Return the bandwidth at which `seconds` fall to `target`, interpolated; infinite if they never do."""
    below = np.flatnonzero(seconds <= target)
    if not len(below):
        return float("inf")
    i = int(below[0])
    if i == 0:
        return float(bps[0])
    share = (seconds[i - 1] - target) / (seconds[i - 1] - seconds[i])
    return float(1 / (1 / bps[i - 1] + share * (1 / bps[i] - 1 / bps[i - 1])))
