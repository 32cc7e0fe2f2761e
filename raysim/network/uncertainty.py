"""The uncertainty of a price: the pace of the machine, whose steps vary, and the error of the network model."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

BOUNDS = (0.05, 0.95)  # of an interval that holds nine tenths
NINE_TENTHS = 1.645  # standard deviations on either side of the mean that hold nine tenths of a normal distribution
DRAWS = 400
MODEL_ERROR = 0.12
"""Standard deviation of the network model's error, as a share of the seconds that a network adds to a step.

It is the smallest of 0.05, 0.06, 0.08, 0.1, 0.12, 0.15 with which the intervals hold nine tenths of every second case of pipelines of
the campaign of 2026-11-22 (`raysim validate`); the other cases, which did not choose it, are its test (docs/validation.md).
"""


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


def with_model_error(seconds: ArrayLike, free_s: ArrayLike) -> Floats:
    """Return draws of a step on a network with the error of the network model added to each; `free_s` are the draws without a network.

    The last axis is that of the draws. The n-th draws of all steps have one error in common, since one model prices them all.

    >>> with_model_error([[2.0, 2.0]], [[2.0, 2.0]]).tolist()  # where a network adds nothing, nor does its model
    [[2.0, 2.0]]
    """
    drawn = np.asarray(seconds, np.float64)
    errors = np.random.default_rng(0).normal(0.0, MODEL_ERROR, drawn.shape[-1])
    found: Floats = drawn + errors * np.maximum(drawn - np.asarray(free_s, np.float64), 0.0)
    return found


def bounds_with_model_error(step_s: float, bounds_s: tuple[float, float], free_s: float) -> tuple[float, float]:
    """Return the 90 % interval of a step whose interval by its costs alone is `bounds_s`; `free_s` is the step without a network.

    >>> bounds_with_model_error(2.0, (1.9, 2.2), free_s=2.0)
    (1.9, 2.2)
    """
    error_s = NINE_TENTHS * MODEL_ERROR * max(step_s - free_s, 0.0)
    low, high = bounds_s
    return step_s - math.hypot(step_s - low, error_s), step_s + math.hypot(high - step_s, error_s)
