"""Intervals of measured figures."""

from __future__ import annotations


def median_interval(ordered: list[float]) -> tuple[float, float]:
    """Return an interval of the median of at least 95 %, from order statistics: no assumption on the distribution.

    >>> median_interval([1, 2, 3, 4, 5, 6, 7, 8, 9])
    (2, 8)
    """
    count = len(ordered)
    cut, tail, term = 0, 0.0, 0.5**count
    for k in range(count // 2):  # P(fewer than k+1 of count lie below the median)
        tail += term
        if 2 * tail > 0.05:
            break
        cut = k + 1
        term *= (count - k) / (k + 1)
    return ordered[max(0, cut - 1)], ordered[min(count - 1, count - cut)]
