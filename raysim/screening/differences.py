"""Differences of a candidate's results from dense, paired by sample, with bounds."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from raysim.workloads.task import Task

ERROR = 0.05
"""Chance that a bound does not hold."""


class Difference(NamedTuple):
    """A measure with the candidate, and its difference from dense within `bound` at 95 %; NaN for a single unit."""

    value: float
    difference: float
    bound: float

    @property
    def low(self) -> float:
        """The least difference; infinite if it is unknown."""
        return self.difference - (self.bound if math.isfinite(self.bound) else math.inf)


def differences(task: Task, sums: NDArray[np.float64], dense: NDArray[np.float64]) -> dict[str, Difference]:
    """Return the difference of each measure, by name; the units (first axis) of both are the same samples.

    The bound is that of the jackknife over units, which for a mean is Student's interval of the paired differences.
    """
    own, reference = _results(task, sums.sum(0)), _results(task, dense.sum(0))
    without = [
        (_results(task, sums.sum(0) - sums[i]), _results(task, dense.sum(0) - dense[i])) for i in range(len(sums))
    ]
    results = {}
    for measure in task.measures:
        name = measure.name
        if math.isnan(reference[name]):  # of generated tokens
            continue
        bound = _bound(np.array([a[name] - b[name] for a, b in without]))
        results[name] = Difference(own[name], own[name] - reference[name], bound)
    return results


def changed(own: NDArray[np.int64], dense: NDArray[np.int64], counted: NDArray[np.bool_]) -> Difference:
    """Return the share of counted predictions that differ from dense's; the first axis is that of samples."""
    count = len(own)
    moved, of = (each.reshape(count, -1).sum(1) for each in ((own != dense) & counted, counted))
    share = float(moved.sum() / of.sum())
    left = of.sum() - of
    bound = _bound((moved.sum() - moved) / left) if count > 1 and left.all() else math.nan
    return Difference(share, share, bound)


def _bound(left_out: NDArray[np.float64]) -> float:
    """Return the bound of an estimate by its values without each unit; NaN for a single unit."""
    count = len(left_out)
    if count < 2:
        return math.nan
    error = math.sqrt((count - 1) / count * float(np.square(left_out - left_out.mean()).sum()))
    return float(special.stdtrit(count - 1, 1 - ERROR / 2)) * error


def _results(task: Task, sums: NDArray[np.float64]) -> dict[str, float]:
    return task.results(sums.tolist())
