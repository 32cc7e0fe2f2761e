"""The plan of a race: its cost and its chance of deciding, simulated before and during the race."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from raysim.analysis.comparison.harm_forecast import Observation
from raysim.analysis.comparison.race import DEVIATION, FLOOR, RUNGS, Evidence, Race, RaceExit, deviation_of
from raysim.analysis.comparison.rule import LOOKS
from raysim.quality import Measure

COUNT = 60  # simulated races of a plan: the standard error of a chance is 6 points at most
HARMLESS = 1 / 3  # share of settings that are within half the margin, as in docs/findings/data (2026-11-25)
HARMS = (1.5, 30.0)  # margins: the others lie between, log-uniformly
SEED = 42
TIE = 0.05  # share of the best chance given up for fewer seeds
SEEDS = tuple(LOOKS)  # numbers from which a plan chooses


def usual_spread(measure: Measure, *, branched: bool) -> float:
    """Return the standard deviation over seeds of a harmless setting's harm in docs/findings/data, in the unit of the measure.

    `branched`: runs continue from one checkpoint, as in fine-tuning.
    """
    if measure.points:
        return 0.3 if branched else 1.1  # digits-cnn, branches at two thirds of the steps: 0.31 points (2026-11-25)
    return 0.22 if branched else 0.39


class RacePlan(NamedTuple):
    """A race within a budget: its settings and their seeds, the cost, and the chance that it calls a harmless setting safe."""

    settings: int
    """Settings in the race; the others of the study wait for time that is left."""
    seeds: int
    budget_s: float
    runs: float
    """Whole runs trained, in the mean of the simulations: dense ones among them."""
    seconds: float
    """Seconds of training of these runs."""
    chance: float


@dataclass(frozen=True)
class Standing:
    """The current state of a race: the evidence, the settings in it, and the cost of their runs."""

    evidence: Mapping[Any, Evidence]
    running: Sequence[Any]
    """Settings in the race, without a final evaluation."""
    costs: Mapping[Any, float]
    """Seconds of a whole run of a setting, over those of dense."""
    dense: int = 0
    """Seeds of dense that have been trained."""
    start: float = 0.0
    """Seconds to start a part of a run, over those of a whole run of dense."""

    def draw(self, race: Race, rng: np.random.Generator) -> tuple[dict[Any, float], dict[Any, float]]:
        """Draw final harms of the settings in the race that agree with their forecasts, and noise-free forecasts."""
        harms, forecasts = {}, {}
        between, within = rng.standard_normal(), rng.standard_normal(len(self.running))
        for name, own in zip(self.running, within, strict=True):
            each = self.evidence[name]
            off = deviation_of(each.rung, self.evidence)
            error = race.standard_error(each.harms, each.rung, self.evidence)
            forecast = each.observed[-1].forecast + error * rng.standard_normal()
            ratio = math.exp(off.mean + off.between * between + DEVIATION.within * own)
            forecasts[name] = max(forecast, FLOOR * race.margin)
            harms[name] = forecasts[name] * ratio
        return harms, forecasts


class FreshStanding(Standing):
    """Settings that have not begun: a third of the race's family is harmless, and their speeds are in random order."""

    def __init__(self, settings: int, *, dense: int = 0, start: float = 0.0) -> None:
        names = [f"{i:04d}" for i in range(settings)]
        evidence = {name: Evidence(step_s=float(i)) for i, name in enumerate(names)}
        super().__init__(evidence, names, dict.fromkeys(names, 1.0), dense, start)

    def draw(self, race: Race, rng: np.random.Generator) -> tuple[dict[Any, float], dict[Any, float]]:
        harmless = max(1, round(HARMLESS * race.family))
        low, high = (math.log(each) for each in HARMS)
        drawn = [*rng.uniform(0, 0.5, harmless), *np.exp(rng.uniform(low, high, race.family - harmless))]
        order = rng.permutation(race.family)
        harms = {name: race.margin * float(drawn[j]) for name, j in zip(self.running, order, strict=False)}
        off = DEVIATION.mean + DEVIATION.between * rng.standard_normal()
        ratios = {name: math.exp(off + DEVIATION.within * rng.standard_normal()) for name in harms}
        return harms, {name: harm / ratios[name] for name, harm in harms.items()}


def race_plan(
    settings: int, *, run_s: float, budget_s: float, spread: float, margin: float = 1.0, seeds: Sequence[int] = SEEDS
) -> pd.DataFrame:
    """Return the expected outcome of a race within half a budget, the budget, and twice as much, a row for each.

    `run_s`: seconds of a whole run. `budget_s`: seconds for all runs together. `spread` is the standard
    deviation over seeds of a harmless setting's harm, in the unit of `margin`. The number of seeds is the best of `seeds`, and that
    of settings the best of `settings` and its halves. A third of the settings are assumed harmless, as in the kept studies; `chance`
    is that of calling one of them safe.
    """
    races = fresh_races(Race(max(seeds), margin, settings), settings, spread=spread, seeds=seeds)
    budgets_s = [share * budget_s for share in (0.5, 1, 2)]
    return pd.DataFrame([best_plan(races, each, run_s) for each in budgets_s], columns=list(RacePlan._fields))


class Simulated(NamedTuple):
    """Simulated races by number of seeds: the training in each race, in units of a dense run."""

    settings: int
    answered: dict[int, list[float]]
    """Until a harmless setting was called safe: infinite if none was."""
    total: dict[int, list[float]]

    def within(self, budget_s: float, run_s: float) -> dict[int, RacePlan]:
        """Return the plan of each number of seeds within a budget, of which a dense run takes `run_s` seconds."""
        limit = budget_s / run_s
        plans = {}
        for seeds, answered in self.answered.items():
            chance = float(np.mean([runs <= limit for runs in answered]))
            runs = float(np.mean([min(runs, limit) for runs in self.total[seeds]]))
            plans[seeds] = RacePlan(self.settings, seeds, budget_s, runs, runs * run_s, chance)
        return plans


def best(plans: Iterable[RacePlan]) -> RacePlan:
    """Return the plan with the most settings, then the fewest seeds, among those with (nearly) the best chance of an answer.

    If none has a chance, the plan with the fewest settings comes nearest to one.
    """
    plans = list(plans)
    most = max(plan.chance for plan in plans)
    sign = -1 if most else 1
    return min(
        (plan for plan in plans if plan.chance >= (1 - TIE) * most), key=lambda plan: (sign * plan.settings, plan.seeds)
    )


def best_plan(races: Iterable[Simulated], budget_s: float, run_s: float) -> RacePlan:
    """Return the best plan within a budget, of which a dense run takes `run_s` seconds, see `best`."""
    return best(plan for each in races for plan in each.within(budget_s, run_s).values())


def fresh_races(
    race: Race, settings: int, *, spread: float, seeds: Sequence[int], dense: int = 0, start: float = 0.0
) -> list[Simulated]:
    """Simulate races that have not begun: of all `settings`, half of them, a quarter, and so on."""
    counts = [settings]
    while counts[-1] > 1:
        counts.append(-(-counts[-1] // 2))
    return [
        simulate_races(race, FreshStanding(count, dense=dense, start=start), spread=spread, seeds=seeds)
        for count in counts
    ]


def simulate_races(race: Race, standing: Standing, *, spread: float, seeds: Sequence[int]) -> Simulated:
    """Simulate a race from its standing to the end on each number of seeds, `COUNT` times, with the same draws of harm."""
    played = {
        count: [
            _play(replace(race, seeds=count, planned=None), standing, spread, np.random.default_rng([SEED, i]))
            for i in range(COUNT)
        ]
        for count in seeds
    }
    answered = {count: [each[0] for each in races] for count, races in played.items()}
    total = {count: [each[1] for each in races] for count, races in played.items()}
    return Simulated(len(standing.running), answered, total)


def _play(race: Race, standing: Standing, spread: float, rng: np.random.Generator) -> tuple[float, float]:
    """Play one race on drawn harms; return the training until an answer and in all, see `Simulated`."""
    harms, forecasts = standing.draw(race, rng)
    evidence = dict(standing.evidence)
    good = {name for name, harm in harms.items() if harm <= race.margin}
    left: dict[Any, RaceExit] = {}
    runs, dense, answered = 0.0, max(0, race.first - standing.dense), math.inf
    for parts in race.rounds(evidence, left, standing.running):
        for part in parts:
            name, before = part.setting, evidence[part.setting]
            noise = max(spread, 0.2 * harms[name]) * rng.standard_normal(len(part.seeds))
            if part.rung == len(RUNGS) - 1:
                evidence[name] = before._replace(final=(*before.final, *(harms[name] + noise)))
                begun = RUNGS[-2] if not before.final else 0.0
                dense = max(dense, len(evidence[name].final) - standing.dense)
            else:
                seen = forecasts[name] + noise
                evidence[name] = before._replace(
                    observed=(*before.observed, Observation(tuple(seen), float(seen.mean())))
                )
                begun = RUNGS[part.rung - 1] if part.rung else 0.0
            share = standing.start + (1 - standing.start) * (RUNGS[part.rung] - begun)
            runs += standing.costs[name] * len(part.seeds) * share
        if math.isinf(answered) and good & set(race.safe(evidence)):
            answered = runs + dense
    return answered, runs + dense
