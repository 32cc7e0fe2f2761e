"""GraVAC's controller (Tyagi and Swany 2023, 2305.12201), for replica gradients and, in the plug-in, links.

It chooses among compression levels by their gains and the speed of the system. Levels range from mild to strong. Each
step evaluates two of them, the `minimum` and a stronger `candidate`, and sends the stronger one whose gain reaches
`epsilon`; if neither does, it sends the uncompressed tensor. At the end of every window the controller moves both
levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from raysim.notation import check_real
from raysim.on_demand import torch

POLICIES = ("exponential", "geometric")
PROMOTE = ("evaluated", "listing", "passing")


def check_factors(cf_min: object, cf_max: object) -> tuple[float, float]:
    """Return the lowest and highest factor; raises ValueError naming the field and the rule."""
    low, high = check_real("cf_min", cf_min, 1, 1e9), check_real("cf_max", cf_max, 1, 1e9)
    if low > high:
        raise ValueError(f"`cf_min` must be at most `cf_max`, but got {low:g} and {high:g}.")
    return low, high


def candidate_factors(cf_min: float, cf_max: float, policy: str) -> tuple[float, ...]:
    """Return the compression factors to explore, from `cf_min` up to exactly `cf_max`.

    >>> candidate_factors(10, 1000, "exponential"), candidate_factors(1.5, 10, "geometric")
    ((10, 20, 40, 160, 1000), (1.5, 3.0, 6.0, 10))
    """
    factors = [cf_min]
    power = 1
    while cf_min < cf_max:
        factor = cf_min * (2 ** (2 ** (power - 1)) if policy == "exponential" else 2**power)
        if factor >= cf_max:
            factors.append(cf_max)
            break
        factors.append(factor)
        power += 1
    return tuple(factors)


class Rules(NamedTuple):
    """Settings of the controller; `GraVAC` documents each."""

    epsilon: float
    omega: float
    window: int  # steps
    alpha: float  # of the moving averages
    promote: str = "evaluated"


class Choice(NamedTuple):
    """The evaluated levels of a step, and the level to send."""

    branch: str  # "candidate", "minimum" or "dense"
    level: int  # the number of levels means uncompressed
    gain: float  # used by the rule


@dataclass
class Controller:
    """The state of a controller. Level `num_levels`, one past the last, means uncompressed."""

    num_levels: int
    minimum: int
    candidate: int
    frozen: bool
    steps: int
    used: int  # the level of the last step, -1 before the first
    used_gain: float
    agreed: list[float]  # gains of minimum and candidate that the rule last used
    averages: list[float]  # moving averages of the gains of minimum and candidate
    speeds: list[float]  # throughput times gain, by level; NaN if not measured
    sums: list[float]  # over the current window
    counts: list[int]

    @classmethod
    def new(cls, num_levels: int) -> Controller:
        """Return the initial state of a controller with `num_levels` levels."""
        nothing = [math.nan] * (num_levels + 1)
        return cls(
            num_levels,
            minimum=0,
            candidate=min(1, num_levels - 1),
            frozen=False,
            steps=0,
            used=-1,
            used_gain=math.nan,
            agreed=[math.nan] * 2,
            averages=[math.nan] * 2,
            speeds=nothing,
            sums=[0.0] * (num_levels + 1),
            counts=[0] * (num_levels + 1),
        )

    # Checkpoints.

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the state as int64 and float64; unmeasured values are infinity rather than NaN, so that states compare equal."""
        whole = [self.minimum, self.candidate, self.frozen, self.steps, self.used, *self.counts]
        real = [self.used_gain, *self.agreed, *self.averages, *self.speeds, *self.sums]
        seen = torch.tensor(real, dtype=torch.float64).nan_to_num(nan=math.inf)
        return torch.tensor(whole, dtype=torch.int64), seen

    @classmethod
    def from_tensors(cls, whole: torch.Tensor, real: torch.Tensor) -> Controller:
        """Restore the state from `tensors`."""
        minimum, candidate, frozen, steps, used, *counts = (int(value) for value in whole.tolist())
        used_gain, *values = (math.nan if value == math.inf else value for value in real.tolist())
        count = len(counts)
        agreed, averages, speeds, sums = values[:2], values[2:4], values[4 : 4 + count], values[4 + count :]
        position = (count - 1, minimum, candidate, bool(frozen), steps, used)
        return cls(*position, used_gain, agreed, averages, speeds, sums, counts)

    # Steps.

    def book(self, throughput: float) -> None:
        """Credit the last step's throughput, in samples per second, to the level it sent."""
        self.sums[self.used] += throughput * self.used_gain
        self.counts[self.used] += 1

    def observe(self, minimum: float, candidate: float, alpha: float) -> tuple[float, float]:
        """Add the gains of minimum and candidate to their moving averages; return the averages.

        An average starts at its first value. While minimum and candidate are the same level, they share one average.
        """
        for i, value in enumerate((minimum, candidate)):
            before = self.averages[i]
            self.averages[i] = value if math.isnan(before) else alpha * value + (1 - alpha) * before
        if self.candidate == self.minimum:
            self.averages[1] = self.averages[0]
        return self.gains

    @property
    def gains(self) -> tuple[float, float]:
        """The averaged gains of minimum and candidate; NaN before the first measurement."""
        return self.averages[0], self.averages[1]

    def choose(self, minimum: float, candidate: float, epsilon: float) -> Choice:
        """Return the strongest level whose gain reaches `epsilon`; NaN never does."""
        if candidate >= epsilon:
            return Choice("candidate", self.candidate, candidate)
        if minimum >= epsilon:
            return Choice("minimum", self.minimum, minimum)
        return Choice("dense", self.num_levels, 1.0)

    def end_step(self, sent: Choice, minimum: float, candidate: float) -> None:
        """Record a step's choice and the gains behind it."""
        self.used, self.used_gain = sent.level, sent.gain
        self.agreed = [minimum, candidate]
        self.steps += 1

    def at_window(self, rules: Rules) -> bool:
        """Return whether a window ended with the last step."""
        return self.steps > 0 and self.steps % rules.window == 0

    def close_window(self) -> None:
        """Set each level's speed to its mean over the window, and start the next window."""
        for level, count in enumerate(self.counts):
            if count:
                self.speeds[level] = self.sums[level] / count
        self.sums, self.counts = [0.0] * len(self.sums), [0] * len(self.counts)

    def decide(self, rules: Rules) -> list[str]:
        """Move minimum and candidate after a window; return the events: "promote", "advance", "retreat", "saturate"."""
        if self.frozen:
            return []
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
        """Raise the minimum if the candidate's gain is about equal."""
        minimum, candidate = self.agreed
        target = self.candidate if rules.promote == "evaluated" else following
        if not minimum > 0 or abs(minimum - candidate) / minimum > rules.omega or target == self.minimum:
            return []
        self._promote(target)
        return ["promote"]

    def _track(self, rules: Rules) -> list[str]:
        """Raise the minimum to a passing candidate, or lower it by one level if the minimum itself fails."""
        minimum, candidate = self.agreed
        if candidate >= rules.epsilon and self.candidate != self.minimum:
            self._promote(self.candidate)
            return ["promote"]
        if minimum >= rules.epsilon or self.minimum == 0:
            return []
        self.candidate, self.minimum = self.minimum, self.minimum - 1
        self.averages = [math.nan, self.averages[0]]
        return ["retreat"]

    def _saturated(self, rules: Rules) -> int | None:
        """Return the lower of the two fastest levels if they are equally fast, else None."""
        known = [level for level in range(self.num_levels) if not math.isnan(self.speeds[level])]
        if len(known) < 2:
            return None
        first, second = sorted(known, key=lambda level: -self.speeds[level])[:2]
        fastest, next_fastest = self.speeds[first], self.speeds[second]
        if next_fastest <= 0 or abs(fastest - next_fastest) / next_fastest > rules.omega:
            return None
        return min(first, second)

    def _promote(self, level: int) -> None:
        self.minimum = level
        self.averages[0] = self.averages[1] if level == self.candidate else math.nan

    def _explore(self, level: int) -> None:
        if level != self.candidate:
            self.candidate = level
            self.averages[1] = math.nan

    def _freeze(self, level: int) -> None:
        self.frozen = True
        self._explore(level)
        if level < self.minimum:
            self._promote(level)
