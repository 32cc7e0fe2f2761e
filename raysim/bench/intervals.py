"""Intervals of measured figures."""

from __future__ import annotations

import math
from typing import NamedTuple

LEVEL = 0.95  # that an interval of a median has where there are measurements enough


class MedianInterval(NamedTuple):
    """Order statistics between which the median lies, and the chance of that: the real one, whatever was wished."""

    low: float
    high: float
    coverage: float

    def __str__(self) -> str:
        """Return it with its coverage.

        >>> str(MedianInterval(0.97, 1.1, 0.75))
        '0.970 to 1.100 (75 %)'
        """
        return f"{self.low:.3f} to {self.high:.3f} ({100 * self.coverage:.0f} %)"


def median_interval(ordered: list[float]) -> MedianInterval:
    """Return the narrowest interval of the median of at least 95 %, from order statistics: no assumption on the distribution.

    Fewer than six measurements cannot reach that: then it is from the least to the greatest, and `coverage` says how much that
    is.

    >>> median_interval([1, 2, 3, 4, 5, 6, 7, 8, 9])
    MedianInterval(low=2, high=8, coverage=0.9609375)
    >>> [median_interval(list(range(count))).coverage for count in (2, 3, 5, 6)]
    [0.5, 0.75, 0.9375, 0.96875]
    """
    count = len(ordered)
    tails = [sum(math.comb(count, below) for below in range(cut + 1)) / 2**count for cut in range((count + 1) // 2)]
    cut = max((place for place, tail in enumerate(tails) if 1 - 2 * tail >= LEVEL), default=0)
    return MedianInterval(ordered[cut], ordered[count - 1 - cut], max(0.0, 1 - 2 * tails[cut]))
