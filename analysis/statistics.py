"""Intervals of differences that are paired by seed, and how many seeds would decide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

MIN_SEEDS = (
    3  # pairs from which on a verdict is given: of two, the interval is fifty standard errors wide in the worst case
)
MOST_SEEDS = 30  # more than this are not proposed: what they would show is too small to matter

Side = Literal["above", "below"]
Verdict = Literal["supported", "contradicted", "undecided"]


class Interval(NamedTuple):
    """The mean of paired differences, and where the true mean lies with the stated confidence."""

    mean: float
    low: float
    high: float

    def verdict(self, threshold: float, side: Side) -> Verdict:
        """Return what the interval says of the claim that the true mean lies on that side of the threshold.

        >>> Interval(1.0, 0.4, 1.6).verdict(0.5, "above"), Interval(1.0, 0.6, 1.4).verdict(0.5, "below")
        ('undecided', 'contradicted')
        """
        above, below = self.low > threshold, self.high < threshold
        if not (above or below):
            return "undecided"
        return "supported" if (above and side == "above") or (below and side == "below") else "contradicted"


def paired_interval(differences: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the mean of differences, one a seed, with the two-sided interval of Student's t.

    It covers the true mean at the stated confidence where the differences are normal. Infinite for fewer than two. Where all
    are equal it is a point: of differences that coarse (accuracies on few samples) have more seeds.
    """
    values = np.asarray(differences, float)
    if len(values) < 2:
        return Interval(float(values[0]) if len(values) else math.nan, -math.inf, math.inf)
    mean, error = float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values))
    half = _quantile((1 + confidence) / 2, len(values) - 1) * error
    return Interval(mean, mean - half, mean + half)


@cache
def _quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t: asked for thousands of times, at a few places."""
    return float(stats.t.ppf(probability, freedom))


def seeds_to_decide(differences: Sequence[float], threshold: float, confidence: float = 0.95) -> int | None:
    """Return how many seeds would decide in four of five cases, if these tell the mean and the spread; None for too many."""
    values = np.asarray(differences, float)
    if len(values) < 2:
        return MIN_SEEDS
    distance, spread = abs(float(values.mean()) - threshold), float(values.std(ddof=1))
    for count in range(max(MIN_SEEDS, len(values) + 1), MOST_SEEDS + 1):
        needed = _quantile((1 + confidence) / 2, count - 1) + _quantile(0.8, count - 1)
        if needed * spread / math.sqrt(count) <= distance and distance > 0:
            return count
    return None
