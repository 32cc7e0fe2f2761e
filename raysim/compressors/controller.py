"""The controller of GraVAC (Tyagi and Swany 2023, 2305.12201): which of several compressions is sent, by what each keeps of
the tensor and by how fast the system then runs. Replica gradients and links share it.

Levels run from mild to strong. Two are looked at in a step: the `minimum`, and the `candidate` that is explored above it. The
strongest of them whose gain reaches `epsilon` is sent, else the tensor as it is; at the end of every window the controller
moves both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

POLICIES = ("exponential", "geometric")
PROMOTE = ("evaluated", "listing", "passing")
EVENTS = ("promote", "advance", "retreat", "saturate", "reopen")


def candidate_factors(cf_min: float, cf_max: float, policy: str, growth: float = 2.0) -> tuple[float, ...]:
    """Return the compression factors to explore: `cf_min`, growing to just `cf_max`.

    >>> candidate_factors(10, 1000, "exponential"), candidate_factors(1.5, 10, "geometric")
    ((10, 20, 40, 160, 1000), (1.5, 3.0, 6.0, 10))
    """
    factors = [cf_min]
    power = 1
    while cf_min < cf_max:
        factor = cf_min * (2 ** (2 ** (power - 1)) if policy == "exponential" else growth**power)
        if factor >= cf_max:
            factors.append(cf_max)
            break
        factors.append(factor)
        power += 1
    return tuple(factors)


class Rules(NamedTuple):
    """What moves the controller; where the paper leaves room, `GraVAC` says what choices there are."""

    epsilon: float
    omega: float
    window: int  # steps
    alpha: float  # of the moving averages
    promote: str = "evaluated"
    saturation: str = "lower"
    throughput: str = "mean"
    reopen_every: int | None = None  # windows
    saturate_on_dense: bool = False


class Choice(NamedTuple):
    """What is sent in a step."""

    branch: str  # "candidate", "minimum" or "dense"
    level: int  # beyond the last one: the tensor as it is
    gain: float  # as the rule saw it


@dataclass
class Standing:
    """Where a controller stands; level `num_levels`, beyond the last, is the tensor as it is."""

    num_levels: int
    minimum: int
    candidate: int
    frozen: bool
    steps: int
    frozen_windows: int
    used: int  # the level of the last step, -1 before the first
    used_gain: float
    agreed: list[float]  # gains of minimum and candidate, as the rule saw them last
    averages: list[float]  # moving averages, numerator and denominator of the minimum's gain and of the candidate's
    speeds: list[float]  # throughput times gain, by level; NaN where none was seen
    sums: list[float]  # of the window at hand
    counts: list[int]

    @classmethod
    def fresh(cls, num_levels: int, *, start_at_min: bool = False) -> Standing:
        """Return where a controller of `num_levels` begins."""
        candidate = 0 if start_at_min else min(1, num_levels - 1)
        nothing = [math.nan] * (num_levels + 1)
        return cls(
            num_levels,
            minimum=0,
            candidate=candidate,
            frozen=False,
            steps=0,
            frozen_windows=0,
            used=-1,
            used_gain=math.nan,
            agreed=[math.nan] * 2,
            averages=[math.nan] * 4,
            speeds=nothing,
            sums=[0.0] * (num_levels + 1),
            counts=[0] * (num_levels + 1),
        )

    # In a checkpoint.

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return what `from_tensors` takes: int64 and float64; what was not seen yet is infinity, so that states compare."""
        whole = [self.minimum, self.candidate, self.frozen, self.steps, self.frozen_windows, self.used, *self.counts]
        real = [self.used_gain, *self.agreed, *self.averages, *self.speeds, *self.sums]
        seen = torch.tensor(real, dtype=torch.float64).nan_to_num(nan=math.inf)
        return torch.tensor(whole, dtype=torch.int64), seen

    @classmethod
    def from_tensors(cls, whole: Tensor, real: Tensor) -> Standing:
        """Return where a controller stood."""
        minimum, candidate, frozen, steps, frozen_windows, used, *counts = (int(value) for value in whole.tolist())
        used_gain, *values = (math.nan if value == math.inf else value for value in real.tolist())
        places = len(counts)
        agreed, averages, speeds, sums = values[:2], values[2:6], values[6 : 6 + places], values[6 + places :]
        position = (places - 1, minimum, candidate, bool(frozen), steps, frozen_windows, used)
        return cls(*position, used_gain, agreed, averages, speeds, sums, counts)

    # In a step.

    def book(self, throughput: float, rules: Rules) -> None:
        """Take the throughput of the last step, in samples a second: that of the level that was sent in it."""
        level, speed = self.used, throughput * self.used_gain
        if rules.throughput == "mean":
            self.sums[level] += speed
            self.counts[level] += 1
        elif rules.throughput == "last" or math.isnan(self.speeds[level]):
            self.speeds[level] = speed
        else:
            self.speeds[level] += rules.alpha * (speed - self.speeds[level])

    def observe(
        self, minimum: tuple[float, float], candidate: tuple[float, float], alpha: float
    ) -> tuple[float, float]:
        """Average the gains of minimum and candidate, each a numerator and a denominator; return the averaged gains.

        An average starts with its first value. Where both are the same level its history is one.
        """
        for place, value in enumerate((*minimum, *candidate)):
            before = self.averages[place]
            self.averages[place] = value if math.isnan(before) else alpha * value + (1 - alpha) * before
        if self.candidate == self.minimum:
            self.averages[2:] = self.averages[:2]
        return self.gains

    @property
    def gains(self) -> tuple[float, float]:
        """The averaged gains of minimum and candidate, NaN where none was seen."""
        low, low_of, high, high_of = self.averages
        return low / low_of, high / high_of

    def choose(self, minimum: float, candidate: float, epsilon: float) -> Choice:
        """Return what is sent where these are the gains: the strongest that reaches `epsilon`. Of NaN it is known not to."""
        if candidate >= epsilon:
            return Choice("candidate", self.candidate, candidate)
        if minimum >= epsilon:
            return Choice("minimum", self.minimum, minimum)
        return Choice("dense", self.num_levels, 1.0)

    def end_step(self, sent: Choice, minimum: float, candidate: float) -> None:
        """Take what was sent in a step, and the gains that were seen in it."""
        self.used, self.used_gain = sent.level, sent.gain
        self.agreed = [minimum, candidate]
        self.steps += 1

    def at_window(self, rules: Rules) -> bool:
        """Whether a window ended with the last step."""
        return self.steps > 0 and self.steps % rules.window == 0

    def close_window(self) -> None:
        """Take the means of the window at hand, and begin the next."""
        for level, count in enumerate(self.counts):
            if count:
                self.speeds[level] = self.sums[level] / count
        self.sums, self.counts = [0.0] * len(self.sums), [0] * len(self.counts)
        self.frozen_windows += self.frozen

    def decide(self, rules: Rules) -> list[str]:
        """Move minimum and candidate, after a window was closed; return what happened, of `EVENTS`."""
        if self.frozen:
            if rules.reopen_every is None or self.frozen_windows < rules.reopen_every:
                return []
            self._reopen()
            return ["reopen"]
        following = min(self.candidate + 1, self.num_levels - 1)
        events = self._track(rules) if rules.promote == "passing" else self._promoted(rules, following)
        settled = self._saturated(rules)
        if settled is not None:
            self._freeze(settled)
            return [*events, "saturate"]
        climbs = rules.promote != "passing" or events == ["promote"]
        if climbs and following != self.candidate:
            self._explore(following)
            events.append("advance")
        return events

    def _promoted(self, rules: Rules, following: int) -> list[str]:
        """Raise the minimum where the candidate keeps as much of the tensor."""
        minimum, candidate = self.agreed
        target = self.candidate if rules.promote == "evaluated" else following
        if not minimum > 0 or abs(minimum - candidate) / minimum > rules.omega or target == self.minimum:
            return []
        self._promote(target)
        return ["promote"]

    def _track(self, rules: Rules) -> list[str]:
        """Raise the minimum to a candidate that passes, or lower it by one where it fails itself."""
        minimum, candidate = self.agreed
        if candidate >= rules.epsilon and self.candidate != self.minimum:
            self._promote(self.candidate)
            return ["promote"]
        if minimum >= rules.epsilon or self.minimum == 0:
            return []
        self.candidate, self.minimum = self.minimum, self.minimum - 1
        self.averages = [math.nan, math.nan, *self.averages[:2]]
        return ["retreat"]

    def _saturated(self, rules: Rules) -> int | None:
        """Return the level to stay at, where the two fastest are equally fast."""
        places = self.num_levels + (1 if rules.saturate_on_dense else 0)
        known = [level for level in range(places) if not math.isnan(self.speeds[level])]
        if len(known) < 2:
            return None
        first, second = sorted(known, key=lambda level: -self.speeds[level])[:2]
        fastest, next_fastest = self.speeds[first], self.speeds[second]
        if next_fastest <= 0 or abs(fastest - next_fastest) / next_fastest > rules.omega:
            return None
        if rules.saturation == "listing":
            return second
        return self.num_levels if self.num_levels in (first, second) else min(first, second)

    def _promote(self, level: int) -> None:
        self.minimum = level
        self.averages[:2] = self.averages[2:] if level == self.candidate else [math.nan] * 2

    def _explore(self, level: int) -> None:
        if level != self.candidate:
            self.candidate = level
            self.averages[2:] = [math.nan] * 2

    def _freeze(self, level: int) -> None:
        self.frozen = True
        self._explore(level)
        if level < self.minimum or level == self.num_levels:
            self._promote(level)

    def _reopen(self) -> None:
        self.frozen, self.frozen_windows = False, 0
        self.speeds = [math.nan] * len(self.speeds)
        if self.minimum == self.num_levels:
            self._promote(0)
        self._explore(min(self.minimum + 1, self.num_levels - 1))
