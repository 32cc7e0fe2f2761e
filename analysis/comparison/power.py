"""The power of seeds: their chance to call a setting safe, and the number that decides about it."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from scipy import stats

from raysim.analysis.comparison.contexts import contexts
from raysim.analysis.comparison.rule import CONFIDENCE, PLANNED
from raysim.analysis.comparison.statistics import MIN_SEEDS, MOST_SEEDS
from raysim.analysis.data.settings import Setting
from raysim.analysis.runs.results import Results

DECIDES = 0.8  # chance of a verdict at which seeds are enough


class Spread(NamedTuple):
    """The spread over seeds of the difference between settings and dense, and the terms of its judgement."""

    deviation: float
    """Standard deviation, in `unit`; not a number if no setting has two seeds in common with dense."""
    step: float
    """The least difference that an evaluation can show."""
    margin: float
    unit: str


def paired_spread(results: Results, runs: Collection[str]) -> Spread:
    """Return the spread of the settings of `runs`, pooled over them; all `runs` are of one job."""
    for context in contexts(results):
        settings = dict.fromkeys(Setting(*row) for row in context.rows.loc[context.rows["run"].isin(runs), "setting"])
        dense = context.settings.get(Setting())
        if not settings or dense is None:
            continue
        variances, weights = [0.0], [0]
        for setting in settings:
            runs_of = context.settings[setting]
            seeds = [seed for seed in runs_of.index if seed in dense.index]
            harms = [context.harm(runs_of.loc[seed], "on", dense.loc[seed], "on") for seed in seeds]
            if len(harms) > 1:
                variances.append(float(np.var(harms, ddof=1)))
                weights.append(len(harms) - 1)
        pooled = math.sqrt(np.average(variances, weights=weights)) if sum(weights) else math.nan
        return Spread(pooled, context.step, context.margin, context.unit)
    return Spread(math.nan, math.nan, math.nan, "")


def chance_of_safe(spread: Spread, seeds: int, *, settings: int, harm: float = 0.0) -> float:
    """Return the chance that a setting of a true `harm` is called safe on planned seeds, as one of `settings` judged ones.

    It is the power of Student's one-sided test, from the non-central t distribution, at the level of Holm's method for the
    first of the settings: the others can only be tested at a milder one. Not a number if the spread is unknown.
    """
    if seeds < MIN_SEEDS:
        return 0.0
    level = (1 - CONFIDENCE) * PLANNED / settings
    error = math.hypot(spread.deviation, spread.step / 2) / math.sqrt(seeds)
    if error == 0:
        return float(harm < spread.margin)
    return float(stats.nct.sf(stats.t.isf(level, seeds - 1), seeds - 1, (spread.margin - harm) / error))


def seeds_needed(spread: Spread, *, settings: int, harm: float) -> int | None:
    """Return the least number of planned seeds to decide about a setting of a true `harm` in four of five cases.

    It is called safe or harmful by its side of the margin, as one of `settings`. None if the spread is unknown, or if it needs
    more than `MOST_SEEDS`.
    """
    distance = abs(spread.margin - harm)  # a harmful setting is as far from the margin as a safe one
    for seeds in range(MIN_SEEDS, MOST_SEEDS + 1):
        if chance_of_safe(spread, seeds, settings=settings, harm=spread.margin - distance) >= DECIDES:
            return seeds
    return None
