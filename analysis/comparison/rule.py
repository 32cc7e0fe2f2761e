"""The rule of all verdicts: one-sided bounds against a margin, in families, at fixed numbers of seeds.

`RULE` states it. Three errors are bounded together: a harmful setting is called safe because its seeds were
lucky, because it was the luckiest of many, or because seeds were added until it looked safe. Sources: non-inferiority by a
one-sided bound (Schuirmann 1987), spreads shrunk to those of the job (Smyth 2004), families by Holm 1979, interim analyses by
spending the error in fixed shares (Lan and DeMets 1983, their sum bounded as Bonferroni's).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from scipy import stats

from raysim.analysis.comparison.statistics import (
    ALONE,
    Bounds,
    Prior,
    Side,
    bounds,
    holm,
    p_value,
    quantile,
    studentise,
    wider,
)

LOOKS = {3: 0.1, 5: 0.3, 8: 0.3, 13: 0.2, 21: 0.1}
"""Numbers of seeds of interim analyses, and the share of the error spent at each without a plan."""
MIN_SEEDS = min(LOOKS)
MOST_SEEDS = max(LOOKS)  # nothing is judged beyond: an effect that needs more seeds is too small to matter
PLANNED = 0.5  # share of the error for planned seeds if interim analyses can follow


def planned_share(planned: int) -> float:
    """Return the share of the error spent on a plan's seeds: all of it if no interim analysis can follow.

    >>> planned_share(5), planned_share(40)
    (0.5, 1.0)
    """
    return PLANNED if planned < MOST_SEEDS else 1.0


def looks_after(planned: int) -> dict[int, float]:
    """Return the possible interim analyses after a plan, with their shares of the error; all `LOOKS` without a plan (0).

    A study with fixed seeds is judged on all of them first: analyses of fewer seeds are then impossible, and later ones get
    their shares. The shares of a plan and of its analyses sum to one (Lan and DeMets 1983; Bonferroni). A plan of fewer than
    `MIN_SEEDS` seeds is not judged, and spends nothing.

    >>> {count: round(share, 3) for count, share in looks_after(8).items()}
    {13: 0.333, 21: 0.167}
    """
    if planned < MIN_SEEDS:
        return dict(LOOKS)
    later = {count: share for count, share in LOOKS.items() if count > planned}
    left = 1 - planned_share(planned)
    return {count: left * share / sum(later.values()) for count, share in later.items()}


def look_at(seeds: int, planned: int = 0) -> int:
    """Return the number of seeds of the last interim analysis within `seeds` seeds, after any plan; 0 before the first.

    >>> look_at(2), look_at(7), look_at(100), look_at(7, planned=5)
    (0, 5, 21, 0)
    """
    return max((count for count in looks_after(planned) if count <= seeds), default=0)


CONFIDENCE = 0.95
SKILL = 10.0  # per cent of the way from chance to perfection that a model must surely have learned

RULE = (
    "A setting is safe if the one-sided 95 % upper bound of its mean harm lies below the margin (half a point of an "
    "accuracy, an F1 score or R2, or 1 % of a loss or another measure), and harmful if the lower bound lies above it; else it "
    "is undecided. Harm is the loss of final quality against dense runs of the same seeds; its spread over seeds is shrunk to that "
    "of similar settings of the job, and upper bounds allow for skewness. The 95 % hold for all settings of a job together (Holm), and "
    "for all looks: half of the error is spent on the seeds that a study fixed before it began, the rest at those of "
    f"{', '.join(map(str, LOOKS))} seeds that follow. If the dense baseline is not clearly better than chance, no setting is "
    "called safe."
)

Where = Literal["below", "above", "undecided"]


class PairedSample(NamedTuple):
    """The differences behind a verdict, and its share of the error."""

    values: tuple[float, ...]
    seeds: tuple[int, ...]
    share: float
    step: float
    """The least difference that the metric can show."""
    lacking: str
    """The reason for no verdict; empty if there can be one."""
    planned: int = 0
    """Number of seeds that a study fixed before it began; 0 without a plan."""

    @property
    def known_step(self) -> float:
        """The `step`, or 0 if it was not recorded."""
        return 0.0 if math.isnan(self.step) else self.step


class Judged(NamedTuple):
    """The judgement of a sample: its bounds at the levels of its family, and the side on which its mean surely lies."""

    bounds: Bounds
    where: Where


def sample(
    effects: Mapping[int, float], *, plan: Sequence[int] = (), grown: bool = False, step: float = 0.0
) -> PairedSample:
    """Select the seeds' differences that a verdict may use.

    `plan`: the seeds fixed by a study before it began; only they count, and none may be missing. `grown`: runs were added to an
    already judged plan: the seeds of the last interim analysis after the plan count, or the plan's until there is one. Without
    a plan the first seeds up to the last interim analysis count, so that analysing after every seed gives no advantage.
    """
    known = {seed: effects[seed] for seed in sorted(effects) if not math.isnan(effects[seed])}
    planned = len(plan) if len(plan) >= MIN_SEEDS else 0
    count = 0 if plan and not grown else look_at(len(known), planned)
    if count or not plan:
        chosen = list(known)[:count] if count else list(known)
        share = looks_after(planned).get(count, 1.0)
        if grown and not plan:  # by a study whose seeds are not known
            share *= 1 - PLANNED
    else:
        chosen = [seed for seed in sorted(plan) if seed in known]
        share = planned_share(planned) if planned else 1.0
    lacking = "the number of predictions is not recorded" if math.isnan(step) else ""
    if not count and planned and len(chosen) < planned:
        lacking = f"{len(chosen)} of {planned} planned seeds"
    elif len(chosen) < MIN_SEEDS:
        lacking = f"{len(chosen)} of at least {MIN_SEEDS} seeds"
    return PairedSample(tuple(known[seed] for seed in chosen), tuple(chosen), share, step, lacking, planned)


def judge(
    samples: Sequence[PairedSample],
    thresholds: Sequence[float],
    alpha: float = 1 - CONFIDENCE,
    *,
    alpha_above: float | None = None,
    priors: Sequence[Prior] | None = None,
    family: int = 0,
) -> list[Judged]:
    """Return the side of its threshold on which the mean of each sample of a family surely lies.

    `priors`: what each sample borrows from similar ones, see `raysim.analysis.comparison.statistics.priors`; nothing by default.
    `family`: the size of the family, if it has members without a sample.

    The chance of wrongly putting any mean of the family below its threshold is at most `alpha` over all interim analyses; that
    of wrongly putting any above is at most `alpha_above`, by default `alpha` too.
    """
    tests = list(zip(samples, thresholds, priors or [ALONE] * len(samples), strict=True))
    highs = _confidences(tests, "below", alpha, family)
    lows = _confidences(tests, "above", alpha if alpha_above is None else alpha_above, family)
    judged = []
    for (each, threshold, prior), high, low in zip(tests, highs, lows, strict=True):
        lower, upper = (bounds(each.values, confidence, each.known_step, prior) for confidence in (low, high))
        both = lower._replace(high=upper.high)
        where: Where = "undecided"
        if not each.lacking:
            where = next((side for side in _SIDES if both.beyond(threshold, side)), "undecided")
        judged.append(Judged(both, where))
    return judged


def at_chance(skills: Sequence[float], alpha: float = 1 - CONFIDENCE) -> bool:
    """Return whether models, one per seed, may be at chance: their mean skill is not surely above `SKILL` per cent."""
    known = [skill for skill in skills if not math.isnan(skill)]
    return len(known) < MIN_SEEDS or not bounds(known, 1 - alpha).beyond(SKILL, "above")


_SIDES: tuple[Side, Side] = ("below", "above")


def _confidences(
    tests: Sequence[tuple[PairedSample, float, Prior]], side: Side, alpha: float, family: int
) -> list[float]:
    """Return the confidence of the bound that puts each sample on a side of its threshold."""
    spread = [
        min(1.0, p_value(each.values, threshold, side, each.known_step, prior) / each.share)
        for each, threshold, prior in tests
    ]
    levels = holm([*spread, *[1.0] * (family - len(spread))], alpha)
    return [1 - level * each.share for level, (each, *_) in zip(levels, tests, strict=False)]


# --- power: the chance of a verdict, and the seeds that it needs -------------------------------------------------------------

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
