"""Prices beyond a simulated step: exchanges that overlap later steps, and the uncertainty of a price.

A price is uncertain because the machine's step times vary, and because of the network model's error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from raysim.network.collectives import EXCHANGES
from raysim.network.profile import Floats, Profile
from raysim.network.topology import FREE, Network
from raysim.units import decimals

Seconds = TypeVar("Seconds", float, Floats)

BOUNDS = (0.05, 0.95)  # quantiles of a 90 % interval
NINE_TENTHS = 1.645  # standard deviations on either side of the mean that contain 90 % of a normal distribution
DRAWS = 400
PAYS = 1.05
"""Least speed-up over dense that is worth a study or a recommendation."""
MODEL_ERROR = 0.12
"""Standard deviation of the network model's error, as a share of the seconds that a network adds to a step.

The smallest of 0.05, 0.06, 0.08, 0.1, 0.12, 0.15 for which the intervals contain 90 % of every second pipeline case of the campaign of
2026-11-22 (`raysim validate`); the other cases are the held-out test (docs/measurements/validation.md).
"""


def times(speedup: float) -> str:
    """Return a speed-up with two decimals, or more if these would put it on another side of 1 or of `PAYS`.

    >>> times(1.312), times(1.0496), times(1.0004)
    ('1.31', '1.0496', '1.0004')
    """
    return decimals(speedup, 2, 1.0, PAYS)


class WireSeconds(NamedTuple):
    """Seconds that a network adds to a step, by cause."""

    bytes_s: float
    """Seconds of the step without latency, less those on `FREE`: 0 with unlimited bandwidth."""
    latency_s: float
    """Seconds that the step would save without latency and jitter: 0 if there are none."""


def wire_seconds(step_s: Callable[[list[Network]], Floats], networks: Sequence[Network]) -> list[WireSeconds]:
    """Return the seconds that each network adds to a step; `step_s` prices the step on networks.

    >>> from raysim.network.presets import parse_network
    >>> pipeline = lambda networks: np.array([1 + 4 * network.p2p_s(0, 1, 1_000_000) for network in networks])
    >>> wire_seconds(pipeline, [parse_network("8mbps+0.5s"), FREE])
    [WireSeconds(bytes_s=4.0, latency_s=2.0), WireSeconds(bytes_s=0.0, latency_s=0.0)]
    """
    steps_s = step_s([FREE, *networks, *(network.without_latency for network in networks)]).tolist()
    free_s, count = steps_s[0], len(networks)
    pairs = zip(steps_s[1 : count + 1], steps_s[count + 1 :], strict=True)
    return [WireSeconds(instant_s - free_s, latent_s - instant_s) for latent_s, instant_s in pairs]


def averaging_words(profile: Profile) -> str:
    """Describe how the replicas of a step average, for use in sentences."""
    return profile.transport.averaging.words(
        dense=bool(profile.gradient_bytes.any()), in_buckets=bool(profile.bucketed_bytes.any())
    )


def without_exchange(profile: Profile, direction: str = EXCHANGES[0]) -> Profile:
    """Return the profile of a step without an exchange between replicas, or without sums of tied parameters."""
    left = profile.transfers[profile.transfers["direction"] != direction]
    if direction != EXCHANGES[0]:
        return replace(profile, transfers=left)
    nothing = np.zeros(profile.num_stages)
    return replace(profile, transfers=left, method_s=nothing, gradient_bytes=nothing, bucketed_bytes=nothing)


def after_pipelines(profile: Profile) -> Profile:
    """Return the profile with averages that start once all pipelines are done, as they do if later steps hide them."""
    return replace(profile, bucketed_bytes=np.zeros(profile.num_stages))


def overlapped(seconds: Callable[[bool, bool], Seconds], codec_s: Seconds, num_steps: int, interval: float) -> Seconds:
    """Return the seconds of a step whose exchange may overlap the next `num_steps` steps, as far as it fits into them.

    `seconds(exchanging, latent)` prices the step with or without its exchange, and with or without network latency. `codec_s`: the
    exchange's codecs, which compute and are not hidden. Its transfers without latency delay the next exchange, `interval` steps later.
    The steps that hide an exchange are assumed to last as long as the step that sends it.

    >>> def seconds(exchanging, latent):
    ...     return (10.0 if latent else 8.0) if exchanging else 2.0
    >>> [overlapped(seconds, 1.0, num_steps, interval) for num_steps, interval in ((3, 4.0), (4, 4.0), (4, 1.0))]
    [4.0, 3.0, 6.0]
    """
    step_s = seconds(True, True)
    if not num_steps:
        return step_s
    quiet_s = seconds(False, True)
    waited = step_s - quiet_s - codec_s - num_steps * quiet_s
    queued = -interval * quiet_s
    if num_steps > interval:  # an exchange may still be in progress when the next one is sent
        queued += seconds(True, False) - seconds(False, False) - codec_s
    longer = queued + (waited - queued) * (waited > queued)
    return quiet_s + codec_s + longer * (longer > 0)


def overlapped_steps(
    step_s: Callable[[Sequence[Profile], Sequence[Network]], Floats],
    profiles: Sequence[Profile],
    networks: Sequence[Network],
    num_steps: int,
    interval: float,
    owner: ArrayLike,
) -> Floats:
    """Return the seconds (networks, profiles) of steps whose exchange may overlap the next `num_steps` steps; see `overlapped`.

    `step_s` prices steps that wait for their exchange. `interval`: steps from one exchange to the next. `owner`: worker of each stage,
    which runs the codecs of its stages in turn.
    """
    if num_steps:
        profiles = [after_pipelines(profile) for profile in profiles]

    def seconds(exchanging: bool, latent: bool) -> Floats:
        costs = profiles if exchanging else [*map(without_exchange, profiles)]
        return step_s(costs, networks if latent else [network.without_latency for network in networks])

    codec_s = np.array([np.bincount(owner, profile.method_s).max() for profile in profiles])
    return overlapped(seconds, codec_s, num_steps, interval)


def spread_as_of_many(shares: ArrayLike) -> Floats:
    """Return shares of the mean, moved away from 1 to correct for the small sample's underestimated spread.

    >>> spread_as_of_many([0.9, 1.1]).round(3).tolist()
    [0.859, 1.141]
    """
    each = np.asarray(shares, np.float64)
    return 1 + (each - 1) * math.sqrt(len(each) / max(len(each) - 1, 1))


def mean_bounds(shares: ArrayLike) -> tuple[float, float]:
    """Return the 90 % interval of the mean of steps as shares of that mean, by the bootstrap; (1, 1) for a single step.

    >>> low, high = mean_bounds([0.9, 1.0, 1.1])
    >>> low < 1 < high
    True
    """
    wider = spread_as_of_many(shares)
    drawn = np.random.default_rng(0).choice(wider, (DRAWS, len(wider))).mean(axis=1)
    low, high = np.quantile(drawn, BOUNDS).tolist()
    return min(low, 1.0), max(high, 1.0)


def with_model_error(seconds: ArrayLike, free_s: ArrayLike) -> Floats:
    """Add the network model's error to draws of a step's seconds; `free_s` are the draws without a network.

    The last axis is the draws. The n-th draws of all steps share one error, since one model prices them all.

    >>> with_model_error([[2.0, 2.0]], [[2.0, 2.0]]).tolist()  # no network time, so no model error
    [[2.0, 2.0]]
    """
    drawn = np.asarray(seconds, np.float64)
    errors = np.random.default_rng(0).normal(0.0, MODEL_ERROR, drawn.shape[-1])
    draws: Floats = drawn + errors * np.maximum(drawn - np.asarray(free_s, np.float64), 0.0)
    return draws


def bounds_with_model_error(step_s: float, bounds_s: tuple[float, float], free_s: float) -> tuple[float, float]:
    """Widen a step's interval `bounds_s` to a 90 % interval with the model error; `free_s` is the step without a network.

    >>> bounds_with_model_error(2.0, (1.9, 2.2), free_s=2.0)
    (1.9, 2.2)
    """
    error_s = NINE_TENTHS * MODEL_ERROR * max(step_s - free_s, 0.0)
    low, high = bounds_s
    return step_s - math.hypot(step_s - low, error_s), step_s + math.hypot(high - step_s, error_s)
