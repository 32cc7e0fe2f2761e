"""The pace of a machine: how its steps vary, and the uncertainty of their mean."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

BOUNDS = (0.05, 0.95)  # of an interval that holds nine tenths
DRAWS = 400


def spread_as_of_many(shares: ArrayLike) -> Floats:
    """Return shares of their mean, moved away from 1: few steps spread less around their own mean than steps do in truth.

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
