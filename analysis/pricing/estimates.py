"""Estimates with their intervals, and the words that these allow."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

INTERVAL = 0.9
"""Share of the resamples that an interval holds."""
BOUNDS = ((1 - INTERVAL) / 2, (1 + INTERVAL) / 2)


class Estimate(NamedTuple):
    """An estimate, and the 90 % interval that the spread of the recordings implies."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, resamples: Floats) -> Estimate:
        """Return the interval that holds nine tenths of the resamples, and the estimate in any case."""
        low, high = np.quantile(resamples, BOUNDS)
        return cls(value, min(value, float(low)), max(value, float(high)))

    def at(self, value: float) -> Estimate:
        """Return the estimate moved to another value, its interval in proportion."""
        return Estimate(value, *(end * value / self.value for end in (self.low, self.high)))

    @property
    def verdict(self) -> str:
        """The verdict on a speed-up: "faster" or "slower" where the whole interval does, else "not distinguishable".

        >>> Estimate(1.3, 1.2, 1.4).verdict, Estimate(1.3, 0.9, 1.7).verdict
        ('faster', 'not distinguishable')
        """
        return "faster" if self.low > 1 else "slower" if self.high < 1 else "not distinguishable"


def crossing(grid: Floats, ratios: Floats) -> float:
    """Return the greatest bandwidth at which a ratio is above 1, between the places of the grid by a line through their logarithms."""
    above = np.flatnonzero(ratios > 1)
    if not len(above):
        return 0.0
    last = int(above[-1])
    if last == len(grid) - 1:
        return math.inf
    share = (ratios[last] - 1) / (ratios[last] - ratios[last + 1])
    return float(np.exp(np.log(grid[last]) + share * (np.log(grid[last + 1]) - np.log(grid[last]))))
