"""The bandwidth needed for a utilisation."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.forecast.fleet import HostLayout, Proposal
from raysim.forecast.job import Job
from raysim.network.prices import MODEL_ERROR, NINE_TENTHS
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


@lru_cache(maxsize=64)
def free_s(job: Job, layout: HostLayout) -> float:
    """Return the seconds of an uncompressed step on an unlimited network, which is utilisation 1."""
    return job.step(Proposal(layout)).step_s(FREE)


def needed(job: Job, way: Proposal, network: Network) -> tuple[Needed, ...]:
    """Return the bandwidth needed for each utilisation of `LEVELS`, with all else as in `network`.

    `network` has one bandwidth. Utilisation is `free_s` divided by the step. A step's seconds fall with the bandwidth and are
    piecewise linear in the seconds per bit, so they are interpolated linearly in these between two close networks.
    """
    free = free_s(job, way.layout)
    grid = np.geomspace(LOWEST, HIGHEST, COARSE)
    step = job.step(way)
    own, *coarse = step.steps_s([FREE, *_at_bandwidths(network, tuple(grid.tolist()))]).tolist()
    # own + error (step - own) seconds have utilisation `level` if step = own + (free / level - own) / error
    targets = np.array([own + (free / level - own) / error for level in LEVELS for error in ERRORS])
    starts = np.clip(np.searchsorted(-np.array(coarse), -targets), 1, COARSE - 1)
    starts, bracket = np.unique(starts, return_inverse=True)  # close targets share one
    inner = np.geomspace(grid[starts - 1], grid[starts], FINE, axis=1)
    within = step.steps_s(_at_bandwidths(network, tuple(inner.reshape(-1).tolist()))).reshape(inner.shape)
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
