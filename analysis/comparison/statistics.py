"""One-sided bounds of differences paired by seed, judged in families and at fixed numbers of seeds.

The bounds are Student's, so they assume roughly normal differences. A metric that moves in steps, such as an accuracy
on 360 samples, can give equal differences by chance; its step counts as spread (see `bounds`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from scipy import stats

LOOKS = {3: 0.1, 5: 0.3, 8: 0.3, 13: 0.2, 21: 0.1}
"""Numbers of seeds of interim analyses, and the share of the error spent at each (Lan and DeMets 1983)."""
MIN_SEEDS = min(LOOKS)
MOST_SEEDS = max(LOOKS)  # nothing is judged beyond: an effect that needs more seeds is too small to matter

Side = Literal["above", "below"]


class Bounds(NamedTuple):
    """The mean of paired differences, and the two one-sided bounds of the true mean, each at the stated confidence."""

    mean: float
    low: float
    high: float

    def beyond(self, threshold: float, side: Side) -> bool:
        """Return whether the bound next to the threshold lies beyond it, on that side.

        >>> Bounds(1.0, 0.6, 1.4).beyond(0.5, "above"), Bounds(1.0, 0.4, 1.6).beyond(0.5, "above")
        (True, False)
        """
        return self.low > threshold if side == "above" else self.high < threshold


def bounds(differences: Sequence[float], confidence: float = 0.95, step: float = 0.0) -> Bounds:
    """Return the mean of differences, one a seed, with the lower and the upper one-sided bound of Student's t.

    `step` is the least difference that the metric can show. Values a step apart have a variance of at most a quarter of its
    square; that much is added to the sample's, so that differences equal by chance keep an interval. Infinite for fewer
    than two differences.
    """
    values = np.asarray(differences, float)
    if len(values) < 2:
        return Bounds(float(values[0]) if len(values) else math.nan, -math.inf, math.inf)
    mean, half = float(values.mean()), _quantile(confidence, len(values) - 1) * _error(values, step)
    return Bounds(mean, mean - half, mean + half)


def p_value(differences: Sequence[float], threshold: float, side: Side, step: float = 0.0) -> float:
    """Return the least error level at which the bound of `bounds` lies beyond the threshold on that side; 1 for one seed."""
    values = np.asarray(differences, float)
    if len(values) < 2:
        return 1.0
    distance = float(values.mean()) - threshold
    distance = distance if side == "above" else -distance
    error = _error(values, step)
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return float(stats.t.sf(distance / error, len(values) - 1))


def holm(p_values: Sequence[float], alpha: float) -> list[float]:
    """Return the error level at which each hypothesis of a family is tested (Holm 1979): it is rejected if its p is less.

    The chance of rejecting any true hypothesis of the family is at most `alpha`, however they depend on each other.

    >>> [round(level, 4) for level in holm([0.01, 0.6, 0.025], 0.06)]
    [0.02, 0.06, 0.03]
    >>> [round(level, 4) for level in holm([0.01, 0.6, 0.04], 0.06)]
    [0.02, 0.03, 0.03]
    """
    levels = [0.0] * len(p_values)
    remaining = len(p_values)
    level, passing = 0.0, True
    for i in sorted(range(len(p_values)), key=lambda i: p_values[i]):
        if passing:
            level = alpha / remaining
            passing = p_values[i] < level
            remaining -= 1
        levels[i] = level
    return levels


def look_at(seeds: int) -> int:
    """Return the number of seeds of the last interim analysis among `seeds` seeds, of `LOOKS`; 0 before the first.

    >>> look_at(2), look_at(7), look_at(100)
    (0, 5, 21)
    """
    return max((count for count in LOOKS if count <= seeds), default=0)


def seeds_to_decide(
    differences: Sequence[float], threshold: float, alpha: float = 0.05, step: float = 0.0
) -> int | None:
    """Return the first of `LOOKS` with a verdict in four of five cases, by the mean and the spread of these differences.

    None if all would need more seeds.
    """
    values = np.asarray(differences, float)
    if len(values) < 2:
        return MIN_SEEDS
    distance, spread = abs(float(values.mean()) - threshold), _error(values, step) * math.sqrt(len(values))
    for count, share in LOOKS.items():
        needed = _quantile(1 - alpha * share, count - 1) + _quantile(0.8, count - 1)
        if count > len(values) and needed * spread / math.sqrt(count) <= distance and distance > 0:
            return count
    return None


def _error(values: np.ndarray, step: float) -> float:
    """Return the standard error of the mean, the metric's own step counted as spread."""
    return math.sqrt((float(values.var(ddof=1)) + (step / 2) ** 2) / len(values))


@cache
def _quantile(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t; a report asks for a few of them thousands of times."""
    return float(stats.t.ppf(probability, freedom))
