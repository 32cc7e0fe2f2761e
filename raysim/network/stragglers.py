"""Stragglers: the expected step of hosts that take random times and wait for the slowest."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from raysim.notation import Notation, check_real


class Spread(Protocol):
    """A distribution of `scipy.stats`."""

    def isf(self, share: float) -> float:
        """Return the value exceeded with a probability of `share`."""


@dataclass(frozen=True, repr=False)
class StepTimes(Notation):
    """Base of distributions of a host's compute seconds in a step, relative to their mean, independent by host and step."""

    most: ClassVar[float] = math.inf

    deviation: float
    """Standard deviation, as a share of the mean."""

    def __post_init__(self) -> None:
        self._coerce(deviation=check_real("deviation", self.deviation, 0, self.most))

    def slowest(self, workers: int, replicas: int = 1, steps: int = 1) -> float:
        """Return the expected seconds of a step, relative to a host's mean, of hosts that wait for one another.

        The `workers` of a replica wait in every step, the `replicas` once in `steps`.
        """
        if not self.deviation or workers * replicas == 1:
            return 1.0
        least, own = self.least, self.matched(1 - self.least, self.deviation**2)
        if steps == 1:
            return least + expected_largest(own, workers * replicas)
        mean = expected_largest(own, workers)
        variance = expected_largest(own, workers, lambda value: (value - mean) ** 2)
        return least + expected_largest(self.matched(mean, variance / steps), replicas)

    @property
    def least(self) -> float:
        """The shortest possible time, as a share of the mean."""
        return 0.0

    def matched(self, mean: float, variance: float) -> Spread:
        """Return the distribution of this family with these moments, without `least`."""
        raise NotImplementedError


class Lognormal(StepTimes):
    """Lognormal times; their sums over steps are matched by mean and variance (Fenton 1960).

    >>> round(Lognormal(0.2).slowest(64), 2)
    1.57
    """

    def matched(self, mean: float, variance: float) -> Spread:
        """Return the lognormal distribution with these moments."""
        from scipy.stats import lognorm

        sigma = math.sqrt(math.log1p(variance / mean**2))
        matched: Spread = lognorm(sigma, scale=mean * math.exp(-(sigma**2) / 2))
        return matched


class Exponential(StepTimes):
    """A least time and an exponential delay (Lee et al. 2018, 1512.02673); sums over the steps of a host are exact.

    >>> round(Exponential(0.5).slowest(2), 9)  # 0.5 + 0.5 (1 + 1/2)
    1.25
    """

    most = 1.0

    @property
    def least(self) -> float:
        """The least time: a delay has its standard deviation as its mean."""
        return 1 - self.deviation

    def matched(self, mean: float, variance: float) -> Spread:
        """Return the gamma distribution with these moments."""
        from scipy.stats import gamma

        matched: Spread = gamma(mean**2 / variance, scale=variance / mean)
        return matched


STEP_TIMES: dict[str, type[StepTimes]] = {each.name(): each for each in (Lognormal, Exponential)}


def expected_largest(spread: Spread, count: int, of: Callable[[float], float] = float) -> float:
    """Return the expectation of the largest of `count` independent values, or of a function of it."""
    from scipy.integrate import quad

    def at(share: float) -> float:  # of the largest, exceeded with 1 - share
        return of(spread.isf(-math.expm1(math.log(share) / count)))

    return float(quad(at, 0.0, 1.0, limit=200)[0])
