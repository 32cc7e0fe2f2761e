"""Estimates with their intervals, and the random weights and factors of the resamples behind these."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

INTERVAL = 0.9
"""Share of the resamples in an interval."""
BOUNDS = ((1 - INTERVAL) / 2, (1 + INTERVAL) / 2)
RESAMPLES = 60


class Estimate(NamedTuple):
    """An estimate, and the 90 % interval that the spread of the recordings implies."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, resamples: Floats) -> Estimate:
        """Return the estimate with the central 90 % of the resamples as interval, widened to include the estimate."""
        low, high = np.quantile(resamples, BOUNDS)
        return cls(value, min(value, float(low)), max(value, float(high)))

    def at(self, value: float) -> Estimate:
        """Return the estimate moved to another value, its interval in proportion."""
        return Estimate(value, *(end * value / self.value for end in (self.low, self.high)))

    def columns(self, name: str, unit: str = "") -> dict[str, float]:
        """Return the estimate and the ends of its interval under the names of columns.

        >>> Estimate(1.3, 1.2, 1.4).columns("step", "_s")
        {'step_s': 1.3, 'step_low_s': 1.2, 'step_high_s': 1.4}
        """
        return {f"{name}{unit}": self.value, f"{name}_low{unit}": self.low, f"{name}_high{unit}": self.high}

    @property
    def verdict(self) -> str:
        """The verdict on a speed-up: "faster" or "slower" if the whole interval is, else "not distinguishable".

        >>> Estimate(1.3, 1.2, 1.4).verdict, Estimate(1.3, 0.9, 1.7).verdict
        ('faster', 'not distinguishable')
        """
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "not distinguishable"


def random_weights(seed: tuple[int, ...], count: int) -> Floats:
    """Return random weights of a Bayesian bootstrap (Rubin 1981): a row of ones for the estimate, then one row per resample."""
    weights = np.random.default_rng(seed).exponential(size=(1 + RESAMPLES, count))
    weights[0] = 1.0
    return weights


@lru_cache
def random_factors(seed: tuple[int, ...], spread: float) -> Floats:
    """Return 1 for the estimate, then one log-normal factor per resample, with this standard deviation of the logarithm."""
    factors = np.exp(spread * np.random.default_rng(seed).standard_normal(1 + RESAMPLES))
    factors[0] = 1.0
    factors.flags.writeable = False
    return factors


def weighted_quantile(values: Floats, weights: Floats, quantiles: Floats) -> Floats:
    """Return a quantile of values (1 or rows, n) under each row of weights (rows, n): the least value that reaches it."""
    order = np.argsort(values, axis=1, kind="stable")
    values, weights = np.take_along_axis(values, order, 1), np.take_along_axis(weights, order, 1)
    reached = np.cumsum(weights, axis=1) >= quantiles[:, None] * weights.sum(axis=1, keepdims=True)
    result: Floats = np.take_along_axis(values, np.argmax(reached, axis=1)[:, None], 1)[:, 0]
    return result


def crossing(bandwidths: Floats, ratios: Floats) -> float:
    """Return the greatest bandwidth with a ratio above 1, interpolated between grid points in logarithms."""
    above = np.flatnonzero(ratios > 1)
    if not len(above):
        return 0.0
    last = int(above[-1])
    if last == len(bandwidths) - 1:
        return math.inf
    share = (ratios[last] - 1) / (ratios[last] - ratios[last + 1])
    low, high = np.log(bandwidths[last]), np.log(bandwidths[last + 1])
    return float(np.exp(low + share * (high - low)))
