"""Intervals of medians cover as often as they say, for few measurements too."""

import numpy as np
import pytest
from raysim_benchmarks.harness import LEVEL, median_interval


@pytest.mark.parametrize("count", [2, 3, 5, 6, 7, 9, 20])
def test_an_interval_covers_the_median_as_often_as_it_says(count):
    rng, tries = np.random.default_rng(count), 4000
    drawn = np.sort(rng.exponential(1.0, (tries, count)), axis=1)  # skewed: the median is log 2
    found = [median_interval(row.tolist()) for row in drawn]
    covered = np.mean([one.low <= np.log(2) <= one.high for one in found])
    stated = found[0].coverage
    assert abs(covered - stated) < 4 * np.sqrt(stated * (1 - stated) / tries)
    assert stated >= LEVEL or (found[0].low, found[0].high) == (drawn[0, 0], drawn[0, -1])
