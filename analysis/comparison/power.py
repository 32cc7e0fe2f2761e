"""The power of seeds: the chance that they call a setting safe, and how many decide about it."""

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

DECIDES = 0.8  # chance of a verdict with which seeds count as enough


class Spread(NamedTuple):
    """The spread over seeds of the difference between settings and dense, and the terms in which it is judged."""

    deviation: float
    """Standard deviation, in `unit`; not a number where no setting has two seeds in common with dense."""
    step: float
    """The least difference that an evaluation can show."""
    margin: float
    unit: str


def paired_spread(results: Results, runs: Collection[str]) -> Spread:
    """Return the spread of the settings that `runs` have, pooled over them; all `runs` are of one job."""
    for context in contexts(results):
        settings = dict.fromkeys(Setting(*row) for row in context.rows.loc[context.rows["run"].isin(runs), "setting"])
        dense = context.settings.get(Setting())
        if not settings or dense is None:
            continue
        variances, weights = [0.0], [0]
        for setting in settings:
            mine = context.settings[setting]
            harms = [
                context.harm(mine.loc[seed], "on", dense.loc[seed], "on") for seed in mine.index if seed in dense.index
            ]
            if len(harms) > 1:
                variances.append(float(np.var(harms, ddof=1)))
                weights.append(len(harms) - 1)
        pooled = math.sqrt(np.average(variances, weights=weights)) if sum(weights) else math.nan
        return Spread(pooled, context.step, context.margin, context.unit)
    return Spread(math.nan, math.nan, math.nan, "")


def chance_of_safe(spread: Spread, seeds: int, *, settings: int, harm: float = 0.0) -> float:
    """Return the chance that a setting of a true `harm` is called safe on planned seeds, among `settings` that are judged.

    It is the power of Student's one-sided test, from the non-central t distribution, at the level at which Holm's method tests the
    first of the settings: the others can only be tested at a milder one. Not a number where the spread is unknown.
    """
    if seeds < MIN_SEEDS:
        return 0.0
    level = (1 - CONFIDENCE) * PLANNED / settings
    error = math.hypot(spread.deviation, spread.step / 2) / math.sqrt(seeds)
    if error == 0:
        return float(harm < spread.margin)
    return float(stats.nct.sf(stats.t.isf(level, seeds - 1), seeds - 1, (spread.margin - harm) / error))


def seeds_needed(spread: Spread, *, settings: int, harm: float) -> int | None:
    """Return the least number of planned seeds that decides about a setting of a true `harm` in four of five cases.

    It is called safe or harmful by its side of the margin, as one of `settings`. None if the spread is unknown, or if more than
    `MOST_SEEDS` would be needed.
    """
    distance = abs(spread.margin - harm)  # a harmful setting is told from the margin as a safe one is
    for seeds in range(MIN_SEEDS, MOST_SEEDS + 1):
        if chance_of_safe(spread, seeds, settings=settings, harm=spread.margin - distance) >= DECIDES:
            return seeds
    return None
