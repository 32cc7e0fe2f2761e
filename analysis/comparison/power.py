"""Statistical power: the chance that a setting is called safe, and the number of seeds needed for a verdict."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from raysim.analysis.comparison.contexts import contexts
from raysim.analysis.comparison.rule import CONFIDENCE, LOOKS, MIN_SEEDS, MOST_SEEDS, planned_share
from raysim.analysis.comparison.statistics import priors, quantile, studentise, wider
from raysim.analysis.runs.results import Results
from raysim.config.identity import Setting

DECIDES = 0.8  # chance of a verdict at which seeds are enough


class PairedSpread(NamedTuple):
    """The spread over seeds of the difference between settings and dense, and the terms of its judgement."""

    deviation: float
    """Standard deviation, in `unit`; not a number if no setting has two seeds in common with dense."""
    step: float
    """The least difference that an evaluation can show."""
    margin: float
    unit: str
    freedom: float = 0.0
    """Degrees of freedom that a setting borrows from the spread of similar ones."""


def paired_spread(results: Results, runs: Collection[str]) -> PairedSpread:
    """Return the spread of the settings of `runs`, pooled over them; all `runs` are of one job."""
    for context in contexts(results):
        settings = dict.fromkeys(Setting(*row) for row in context.rows.loc[context.rows["run"].isin(runs), "setting"])
        dense = context.settings.get(Setting())
        if not settings or dense is None:
            continue
        harms = {setting: list(context.harms(setting).values()) for setting in context.settings if setting != Setting()}
        known = [values for setting in settings if len(values := harms.get(setting, [])) > 1]
        if not known:
            return PairedSpread(math.nan, context.step, context.margin, context.unit)
        weights = [len(values) - 1 for values in known]
        pooled = math.sqrt(np.average([np.var(values, ddof=1) for values in known], weights=weights))
        step = 0.0 if math.isnan(context.step) else context.step
        borrowed = dict(zip(harms, priors([*harms.values()], [step] * len(harms), context.margin), strict=True))
        freedom = float(np.mean([borrowed[setting].freedom for setting in settings if setting in harms]))
        return PairedSpread(pooled, context.step, context.margin, context.unit, freedom)
    return PairedSpread(math.nan, math.nan, math.nan, "")


def chance_of_safe(spread: PairedSpread, seeds: int, *, settings: int, harm: float = 0.0) -> float:
    """Return the chance that a setting with the true `harm` is called safe on planned seeds, as one of `settings`.

    It is the power of the rule's one-sided test, from the non-central t distribution, at the level of Holm's method for the
    first of the settings: the others can only be tested at a milder one. NaN if the spread is unknown.
    """
    if seeds < MIN_SEEDS:
        return 0.0
    level = (1 - CONFIDENCE) * planned_share(seeds) / settings
    freedom = seeds - 1 + spread.freedom
    error = math.hypot(spread.deviation, spread.step / 2) / math.sqrt(seeds)
    if error == 0:
        return float(harm < spread.margin)
    critical = float(stats.t.isf(level, freedom)) * wider(seeds, spread.freedom)
    return float(stats.nct.sf(critical, freedom, (spread.margin - harm) / error))


def seeds_needed(spread: PairedSpread, *, settings: int, harm: float) -> int | None:
    """Return the fewest planned seeds that decide about a setting with the true `harm` in four of five cases.

    It is called safe or harmful by its side of the margin, as one of `settings`. None if the spread is unknown, or if it needs
    more than `MOST_SEEDS`.
    """
    distance = abs(spread.margin - harm)  # a harmful setting is as far from the margin as a safe one
    for seeds in range(MIN_SEEDS, MOST_SEEDS + 1):
        if chance_of_safe(spread, seeds, settings=settings, harm=spread.margin - distance) >= DECIDES:
            return seeds
    return None


def seeds_to_decide(
    differences: Sequence[float],
    threshold: float,
    alpha: float = 0.05,
    step: float = 0.0,
    looks: dict[int, float] = LOOKS,
) -> int | None:
    """Return the seeds of the first interim analysis that decides in four of five cases, given these differences.

    None if all would need more seeds. `looks`: the numbers of seeds at which verdicts can still be given, with their shares of
    the error.
    """
    if len(differences) < 2:
        return MIN_SEEDS
    studentised = studentise(differences, step)
    distance, spread = abs(float(studentised.mean) - threshold), float(studentised.error) * math.sqrt(len(differences))
    for count, share in looks.items():
        needed = quantile(1 - alpha * share, count - 1) * wider(count) + quantile(0.8, count - 1)
        if count > len(differences) and needed * spread / math.sqrt(count) <= distance and distance > 0:
            return count
    return None
