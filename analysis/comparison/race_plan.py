"""The plan of a race: what it will cost, and the chance that it decides, by simulation before anything is trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from raysim.analysis.comparison.harm_forecast import Observation
from raysim.analysis.comparison.race import DEVIATION, RUNGS, Evidence, Exit, Race
from raysim.quality import Measure

COUNT = 60  # simulated races of a plan: the standard error of a chance is 6 points at most
HARMLESS = 1 / 3  # share of settings that are within half the margin, as in docs/findings/data (2026-11-25)
HARMS = (1.5, 30.0)  # margins: the others lie between, evenly in the logarithm
SEED = 42
SEEDS = (3, 5, 8, 13, 21)  # among which a plan chooses


def usual_spread(measure: Measure, *, branched: bool) -> float:
    """Return the standard deviation over seeds of a harmless setting's harm in docs/findings/data, in the unit of the measure.

    `branched`: runs go on from one checkpoint, as in fine-tuning.
    """
    if measure.points:
        return 0.3 if branched else 1.1  # digits-cnn, branches at two thirds of the steps: 0.31 points (2026-11-25)
    return 0.22 if branched else 0.39


class Plan(NamedTuple):
    """A race within a budget: seeds of each setting, the cost, and the chance that it calls a harmless setting safe."""

    seeds: int
    budget_s: float
    runs: float
    """Whole runs trained, in the mean of the simulations: dense ones among them."""
    seconds: float
    """Seconds of training of these runs."""
    chance: float


class _Simulated(NamedTuple):
    """A simulated race: whole runs until a harmless setting was called safe (infinite if none was), and in all."""

    answered: float
    total: float


def race_plan(
    settings: int, *, run_s: float, budget_s: float, spread: float, margin: float = 1.0, seeds: Sequence[int] = SEEDS
) -> pd.DataFrame:
    """Return what a race of `settings` settings decides within half of a budget, the budget, and twice as much: a row each.

    `run_s`: seconds of a whole run. `budget_s`: seconds for all runs together. `spread` is the standard
    deviation over seeds of a harmless setting's harm, in the unit of `margin`. The number of seeds is the best of `seeds`. A third of
    the settings are taken to be harmless, as in the kept studies; `chance` is that of calling one of them safe.
    """
    budgets_s = [share * budget_s for share in (0.5, 1, 2)]
    plans = plans_within(settings, run_s=run_s, budgets_s=budgets_s, spread=spread, margin=margin, seeds=seeds)
    return pd.DataFrame(plans, columns=list(Plan._fields))


def plans_within(
    settings: int, *, run_s: float, budgets_s: Sequence[float], spread: float, margin: float, seeds: Sequence[int]
) -> list[Plan]:
    """Return the best plan within each budget, see `race_plan`."""
    simulated = {count: _simulate(Race(count, margin, settings), spread) for count in seeds}
    return [_best(simulated, budget_s, run_s) for budget_s in budgets_s]


def _best(simulated: dict[int, list[_Simulated]], budget_s: float, run_s: float) -> Plan:
    """Return the plan with the best chance of an answer within a budget, with the fewest seeds if several are as good."""
    limit = budget_s / run_s
    plans = []
    for seeds, races in simulated.items():
        chance = float(np.mean([race.answered <= limit for race in races]))
        runs = float(np.mean([min(race.total, limit) for race in races]))
        plans.append(Plan(seeds, budget_s, runs, runs * run_s, chance))
    return max(plans, key=lambda plan: (plan.chance, -plan.seeds))


def _simulate(race: Race, spread: float) -> list[_Simulated]:
    return [_simulate_one(race, spread, np.random.default_rng([SEED, i])) for i in range(COUNT)]


def _simulate_one(race: Race, spread: float, rng: np.random.Generator) -> _Simulated:
    """Play one race on drawn harms; the order of speed is random."""
    harmless = max(1, round(HARMLESS * race.family))
    low, high = (math.log(each) for each in HARMS)
    drawn = [*rng.uniform(0, 0.5, harmless), *np.exp(rng.uniform(low, high, race.family - harmless))]
    harms = {f"{i:04d}": race.margin * float(drawn[j]) for i, j in enumerate(rng.permutation(race.family))}
    off = DEVIATION.mean + DEVIATION.between * rng.standard_normal()
    forecasts = {name: harm / math.exp(off + DEVIATION.within * rng.standard_normal()) for name, harm in harms.items()}
    evidence = {name: Evidence(step_s=float(i)) for i, name in enumerate(harms)}
    good = {name for name, harm in harms.items() if harm <= race.margin}
    left: dict[str, Exit] = {}
    runs, dense, answered = 0.0, race.first, math.inf
    for parts in race.rounds(evidence, left):
        for part in parts:
            name, before = part.setting, evidence[part.setting]
            noise = max(spread, 0.2 * harms[name]) * rng.standard_normal(len(part.seeds))
            if part.rung == len(RUNGS) - 1:
                evidence[name] = before._replace(final=(*before.final, *(harms[name] + noise)))
                begun = RUNGS[-2] if not before.final else 0.0
                dense = max(dense, len(evidence[name].final))
            else:
                seen = forecasts[name] + noise
                evidence[name] = before._replace(
                    observed=(*before.observed, Observation(tuple(seen), float(seen.mean())))
                )
                begun = RUNGS[part.rung - 1] if part.rung else 0.0
            runs += len(part.seeds) * (RUNGS[part.rung] - begun)
        if math.isinf(answered) and good & set(race.safe(evidence)):
            answered = runs + dense
    return _Simulated(answered, runs + dense)
