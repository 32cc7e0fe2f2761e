"""Distributions of a host's compute seconds, and how long hosts that wait for one another take."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from raysim.notation import Notation, check_real, parse_notation


@dataclass(frozen=True, repr=False)
class StepTimes(Notation):
    """Base of distributions of a host's compute seconds in a step, relative to their mean, independent by host and step."""

    most: ClassVar[float] = math.inf

    deviation: float
    """Standard deviation, as a share of the mean."""

    def __post_init__(self) -> None:
        self._coerce(deviation=check_real("deviation", self.deviation, 0, self.most))

    def slowest(self, workers: int, replicas: int = 1, steps: int = 1) -> float:
        """Return the expected step seconds of hosts that wait for one another, relative to one host's mean.

        The `workers` of a replica wait in every step, `replicas` once every `steps` steps.
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

    def matched(self, mean: float, variance: float) -> Any:
        """Return the distribution of this family with these moments, without `least`."""
        raise NotImplementedError


class Lognormal(StepTimes):
    """Lognormal times; their sums over steps are matched by mean and variance (Fenton 1960).

    >>> round(Lognormal(0.2).slowest(64), 2)
    1.57
    """

    def matched(self, mean: float, variance: float) -> Any:
        """Return the lognormal distribution with these moments."""
        from scipy.stats import lognorm

        sigma = math.sqrt(math.log1p(variance / mean**2))
        return lognorm(sigma, scale=mean * math.exp(-(sigma**2) / 2))


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

    def matched(self, mean: float, variance: float) -> Any:
        """Return the gamma distribution with these moments."""
        from scipy.stats import gamma

        return gamma(mean**2 / variance, scale=variance / mean)


STEP_TIMES: dict[str, type[StepTimes]] = {each.name(): each for each in (Lognormal, Exponential)}


def expected_largest(spread: Any, count: int, of: Callable[[float], float] = float) -> float:
    """Return the expectation of the largest of `count` independent values, or of a function of it."""
    from scipy.integrate import quad

    def at(share: float) -> float:  # of the largest, exceeded with 1 - share
        return of(spread.isf(-math.expm1(math.log(share) / count)))

    return float(quad(at, 0.0, 1.0, limit=200)[0])


def parse_step_times(text: Any) -> StepTimes:
    """Return a distribution from its notation; raises ValueError."""
    try:
        return parse_notation(text, STEP_TIMES, kind="distribution of step times")
    except ValueError as error:
        raise ValueError(f"`step_times` must look like Lognormal(0.1) or Exponential(0.1): {error}") from None
