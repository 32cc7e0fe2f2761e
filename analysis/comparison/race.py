"""A race: settings are trained in parts, and only as long as they may be the answer.

A race trains in parts. A part ends at a rung, a share of a run's steps. There the final harm of each setting is forecast
(`harm_forecast`), and the setting continues, or leaves: because it is surely harmful, because its seeds would hardly show that it is
safe, or because a faster setting is safe. The error of forecasts is known from earlier studies (`DEVIATION`), and better from the
finished settings of the same job. The parts are those of successive halving (Jamieson and Talwalkar 2016), but settings leave by
bounds, not by ranks, so that no harmless setting has to go. The error of leaving is spent over all rungs (Lan and DeMets 1983).

All functions are pure: the same evidence gives the same decision, so that a killed race resumes as if it had not been killed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, median, variance
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from scipy import special

from raysim.analysis.comparison.harm_forecast import Observation
from raysim.analysis.comparison.rule import CONFIDENCE, PairedSample, judge, looks_after, planned_share, sample
from raysim.analysis.comparison.statistics import priors


class ForecastError(NamedTuple):
    """Errors of forecasts, as logarithms of the final harm divided by the forecast."""

    mean: float
    between: float
    """Standard deviation of the mean between jobs."""
    within: float
    """Standard deviation within a job, over its settings."""


RUNGS = (0.1, 0.2, 0.4, 0.7, 1.0)
"""Shares of the steps of a run after which a race decides."""
DEVIATION = ForecastError(mean=0.3, between=0.68, within=0.68)
"""Before a setting of the job has finished: by docs/findings/data/finetune-links, gravac-text, pictures-causes and
equal-bandwidth-pictures, on forecasts beyond the margin and twice their error (2026-11-25). Other studies had no part in it."""
PRIOR_FREEDOM = 3.0  # degrees of freedom of the variance of a job's settings, as a prior for each
GROWTH = 1.5  # factor by which the finished seeds grow from part to part
PATIENCE = 1  # first rung at which a setting is given up as hopeless
FLOOR = 0.05  # lower limit of the ratio of final to forecast harm, so that its logarithm exists

Name = TypeVar("Name", int, str)
"""The name of a setting: a number in a sweep, its notation in recorded runs."""
Kind = Literal["harmful", "hopeless", "slower", "chance"]
"""Why a setting leaves: it does harm; its seeds will hardly show that it is safe; a faster setting is safe; dense is near chance."""


class Evidence(NamedTuple):
    """The results of a setting in a race so far. Seeds are always in the same order."""

    step_s: float
    """Seconds of a step on the study's network, or another cost to be minimised."""
    observed: tuple[Observation, ...] = ()
    """By rung, without the last one."""
    final: tuple[float, ...] = ()
    """Harm by the final evaluation, one a seed."""

    @property
    def rung(self) -> int:
        """The last rung that it reached; -1 before the first."""
        return len(RUNGS) - 1 if self.final else len(self.observed) - 1

    @property
    def harms(self) -> tuple[float, ...]:
        """Harms at its last rung, one per seed."""
        return self.final or self.observed[-1].harms


class RaceExit(NamedTuple):
    """A setting's exit from a race: why, at which rung and on how many seeds, and the figures behind it."""

    kind: Kind
    rung: int
    seeds: int
    harm: float
    """The mean by training losses or, at the last rung, by final evaluations."""
    bound: float
    """Lower bound of the final harm if harmful; the chance of a verdict of safe if hopeless."""


class RacePart(NamedTuple, Generic[Name]):
    """The training to do next: a setting's seeds, by position, up to a rung."""

    setting: Name
    seeds: tuple[int, ...]
    rung: int


@dataclass(frozen=True)
class Race:
    """The terms of a race: how many seeds a setting trains at most and at first, and when it leaves.

    `error`: the chance of calling a harmless setting harmful, over all rungs. `hopeless`: the chance of a safe verdict below
    which a setting is dropped. `family`: the number of settings judged together, without dense. `step`: the smallest
    difference that an evaluation can show. `planned`: the number of seeds of the first verdicts, by default `seeds`; more
    seeds than that must be those of a later interim analysis. `at_chance`: dense on the planned seeds is not clearly better than
    chance, so that nothing can be called safe and all settings leave.
    """

    seeds: int
    margin: float
    family: int
    first: int = 2
    error: float = 1 - CONFIDENCE
    hopeless: float = 0.1
    step: float = 0.0
    planned: int | None = None
    at_chance: bool = False

    @property
    def plan(self) -> int:
        """The number of seeds on which settings are judged first."""
        return self.seeds if self.planned is None else self.planned

    @property
    def share(self) -> float:
        """The share of the error spent on `seeds` seeds."""
        return planned_share(self.plan) if self.seeds == self.plan else looks_after(self.plan)[self.seeds]

    def safe(self, evidence: Mapping[Name, Evidence]) -> list[Name]:
        """Return the settings called safe on planned seeds or at an interim analysis. The family includes settings that have left."""
        samples = {name: self._sample(each.final) for name, each in evidence.items() if each.final}
        if self.at_chance:
            return []
        chosen = list(samples.values())
        borrowed = priors([each.values for each in chosen], [self.step] * len(chosen), self.margin)
        judged = judge(chosen, [self.margin] * len(chosen), priors=borrowed, family=self.family)
        return [name for name, each in zip(samples, judged, strict=True) if each.where == "below"]

    def _sample(self, values: tuple[float, ...]) -> PairedSample:
        grown = len(values) > self.plan
        return sample(dict(enumerate(values)), plan=range(self.plan), grown=grown, step=self.step)

    def exits(self, evidence: Mapping[Name, Evidence], running: Iterable[Name] | None = None) -> dict[Name, RaceExit]:
        """Return the exits due now among all settings, or those `running`; settings that have not begun stay."""
        safe = self.safe(evidence)
        fastest = min((evidence[name].step_s for name in safe), default=math.inf)
        exits: dict[Name, RaceExit] = {}
        for name in evidence if running is None else running:
            each = evidence[name]
            if name in safe or not each.observed:
                continue
            reason: tuple[Kind, float] | None = (
                ("slower", math.nan) if each.step_s > fastest else self._reason(each, evidence)
            )
            if reason is not None:
                kind, bound = reason
                exits[name] = RaceExit(kind, each.rung, len(each.harms), fmean(each.harms), bound)
        return exits

    def _reason(self, each: Evidence, evidence: Mapping[Any, Evidence]) -> tuple[Kind, float] | None:
        """Return why a setting leaves: its final harm is surely above the margin, or its seeds would hardly show it safe."""
        if self.at_chance:
            return "chance", math.nan
        if len(each.final) >= self.seeds:
            return None
        bound = self.lower_bound(each, evidence) if len(each.harms) > 1 else -math.inf
        if bound > self.margin:
            return "harmful", bound
        chance = self.chance_safe(each, evidence) if each.rung >= PATIENCE else 1.0
        return ("hopeless", chance) if chance < self.hopeless else None

    def next_parts(
        self, evidence: Mapping[Name, Evidence], running: Sequence[Name], width: int = 2
    ) -> list[RacePart[Name]]:
        """Return the next parts: the first rung of all settings, then those of the `width` fastest ones that are likely safe.

        Only the fastest get more than the first seeds. `running`: the settings still in the race.
        """
        fresh = [name for name in running if not evidence[name].observed]
        if fresh:
            return [RacePart(name, tuple(range(self.first)), 0) for name in fresh]
        unfinished = [name for name in running if len(evidence[name].final) < self.seeds]
        first = sorted(unfinished, key=lambda name: self._turn(name, evidence))[:width]
        return [self._part(name, evidence[name]) for name in first if name == first[0] or not evidence[name].final]

    def rounds(
        self, evidence: dict[Name, Evidence], left: dict[Name, RaceExit], running: Sequence[Name] | None = None
    ) -> Iterator[list[RacePart[Name]]]:
        """Yield the parts of one round after another until the race is over.

        The caller adds what the parts show to `evidence` before it asks for the next round. `left` collects the exits. `running`:
        the settings in the race, by default all.
        """
        running = list(evidence if running is None else running)
        while parts := self.next_parts(evidence, running):
            yield parts
            left |= self.exits(evidence, running)
            running = [name for name in running if name not in left and len(evidence[name].final) < self.seeds]

    def _part(self, name: Name, each: Evidence) -> RacePart[Name]:
        if each.final:
            count = len(each.final)
            return RacePart(name, tuple(range(count, min(self.seeds, math.ceil(GROWTH * count)))), each.rung)
        return RacePart(name, tuple(range(self.first)), each.rung + 1)

    def _turn(self, name: Name, evidence: Mapping[Name, Evidence]) -> tuple[bool, float, float, Name]:
        """Return the sort key of promotion: settings more likely safe than not by speed, then the others by chance."""
        each = evidence[name]
        chance = self.chance_harmless(each, evidence)
        likely = chance >= 0.5
        return (not likely, each.step_s if likely else -chance, each.step_s, name)

    def chance_harmless(self, each: Evidence, evidence: Mapping[Any, Evidence]) -> float:
        """Return the chance that a setting's true final harm lies within the margin, by its forecast."""
        error = self.standard_error(each.harms, each.rung, evidence)
        if each.final:
            return float(special.ndtr((self.margin - fmean(each.final)) / max(error, 1e-12)))
        deviation = deviation_of(each.rung, evidence)
        mean = max(each.observed[-1].forecast, FLOOR * self.margin)
        spread = math.hypot(deviation.within, error / mean)
        return float(special.ndtr((math.log(self.margin / mean) - deviation.mean) / spread))

    def lower_bound(self, each: Evidence, evidence: Mapping[Any, Evidence]) -> float:
        """Return the lower bound of a setting's final harm, at a rung's share of the error."""
        level = self.error / len(RUNGS)
        half = float(special.stdtrit(PRIOR_FREEDOM + len(each.harms) - 1, 1 - level))
        half *= self.standard_error(each.harms, each.rung, evidence)
        mean = fmean(each.final) if each.final else each.observed[-1].forecast
        if each.final or mean <= half:
            return mean - half
        deviation = deviation_of(each.rung, evidence)
        unsure = float(-special.ndtri(level)) * deviation.within
        return mean * math.exp(min(0.0, deviation.mean) - math.hypot(unsure, half / mean))

    def chance_safe(self, each: Evidence, evidence: Mapping[Any, Evidence]) -> float:
        """Return the chance that `seeds` seeds will call a setting safe."""
        if not each.final:
            return self.chance_harmless(each, evidence)
        spread = self._spread(each.final, each.rung, evidence)
        freedom = self.seeds - 1 + self._borrowed(each, evidence)
        level = (1 - CONFIDENCE) * self.share / self.family
        critical = float(special.stdtrit(freedom, 1 - level)) * spread / math.sqrt(self.seeds)
        unseen = spread * math.sqrt(1 / len(each.final) - 1 / self.seeds)
        room = self.margin - critical - fmean(each.final)
        return float(special.stdtr(PRIOR_FREEDOM + len(each.final) - 1, room / unseen)) if unseen else float(room > 0)

    def _borrowed(self, each: Evidence, evidence: Mapping[Any, Evidence]) -> float:
        """Return the degrees of freedom that the rule will lend to a setting, estimated from the finished settings."""
        finals = [each.final, *(other.final for other in evidence.values() if other is not each and other.final)]
        return float(priors(finals, [self.step] * len(finals), self.margin)[0].freedom)

    def standard_error(self, harms: Sequence[float], rung: int, evidence: Mapping[Any, Evidence]) -> float:
        """Return the standard error of a setting's mean harm."""
        return self._spread(harms, rung, evidence) / math.sqrt(len(harms))

    def spread(self, each: Evidence, evidence: Mapping[Any, Evidence]) -> float:
        """Return the standard deviation of a setting's harm over seeds, at its last rung."""
        return self._spread(each.harms, each.rung, evidence)

    def _spread(self, harms: Sequence[float], rung: int, evidence: Mapping[Any, Evidence]) -> float:
        """Return the standard deviation of harms over seeds, its square shrunk to the median of the job's (Smyth 2004)."""
        reached = [each for each in evidence.values() if each.rung >= rung]
        of_job = [each.final if rung == len(RUNGS) - 1 else each.observed[rung].harms for each in reached]
        variance = median([_variance(each) for each in of_job if len(each) > 1] or [0.0])
        if len(harms) > 1:
            freedom = len(harms) - 1
            own = _variance(tuple(harms))
            variance = (PRIOR_FREEDOM * variance + freedom * own) / (PRIOR_FREEDOM + freedom) if own else 0.0
        return math.sqrt(variance + (self.step / 2) ** 2)


def deviation_of(rung: int, evidence: Mapping[Any, Evidence]) -> ForecastError:
    """Return the error of forecasts at a rung, learned from the job's finished settings.

    `within` is the standard deviation of a prediction for another setting of the job, and `between` that of the mean.
    """
    seen = []
    for each in evidence.values():
        if each.final and len(each.observed) > rung:
            observed = each.observed[rung]
            seeds = len(observed.harms)
            error = math.sqrt(_variance(observed.harms) / seeds) if seeds > 1 else math.inf
            if observed.forecast > 2 * error:
                seen.append(math.log(max(fmean(each.final[:seeds]) / observed.forecast, FLOOR)))
    mean, between, within = DEVIATION
    precision = between**-2 + len(seen) * within**-2
    mean = (mean * between**-2 + sum(seen) * within**-2) / precision
    return ForecastError(mean, precision**-0.5, math.sqrt(within**2 + 1 / precision))


@lru_cache(maxsize=1024)
def _variance(harms: tuple[float, ...]) -> float:
    """Return the variance of harms, cached because rounds need the same ones again and again."""
    return variance(harms)
