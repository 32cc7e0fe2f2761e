"""One-sided bounds of the mean of differences paired by seed, Holm's method, and the bound of a rate of divergence.

The bounds are those of a moderated t (Smyth 2004): a setting's spread is shrunk to that of similar settings of its job
(see `prior_of`), and upper bounds are raised to correct Student's t for skewness (Hall 1992).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

SKEWNESS = 1.3
"""Skewness assumed of differences: upwards, since what is rare is large harm."""
ASSUMED = 5.0
"""Differences that the assumed skewness counts for, beside the recorded ones.

Chosen by simulation of single settings on 3, 5 and 8 seeds (2026-11-25): of all pairs of `SKEWNESS` and `ASSUMED` that call at
most 7 % of settings of skewness 2 (gamma) safe at the margin, this is among those with the narrowest bounds of normal differences.
At skewness 1 the error of a bound at 2.5 % is at most 3.2 % for 3 to 40 seeds.
"""

Side = Literal["above", "below"]
Array: TypeAlias = NDArray[np.float64]
Number: TypeAlias = float | Array


class Bounds(NamedTuple):
    """The mean of paired differences, and the two one-sided bounds of the true mean, each at the stated confidence."""

    mean: float
    low: float
    high: float

    def beyond(self, threshold: float, side: Side) -> bool:
        """Return whether the bound next to the threshold lies beyond it, on that side.

        >>> Bounds(1.0, 0.6, 1.4).beyond(0.5, "above"), Bounds(1.0, 0.4, 1.6).beyond(0.5, "above")
        (True, False)
        """
        return self.low > threshold if side == "above" else self.high < threshold


class Prior(NamedTuple):
    """The spread and the skewness that a sample borrows from similar settings of its job; nothing by default."""

    variance: Number = 1.0
    freedom: Number = 0.0
    """Degrees of freedom of the variance."""
    skewness: Number = 0.0
    differences: Number = 0.0
    """Independent ones behind the skewness."""


ALONE = Prior()


class Studentised(NamedTuple):
    """The mean of differences, its standard error with degrees of freedom, and how much wider skewness makes its bounds.

    Each is an array of the leading shape of the differences.
    """

    mean: Array
    error: Array
    freedom: Array
    above: Array
    """Factor of a lower bound's distance from the mean, for differences skewed downwards."""
    below: Array
    """Factor of an upper bound's distance from the mean, for differences skewed upwards."""

    def p_value(self, threshold: Number, side: Side) -> Array:
        """Return the smallest error level at which the bound lies beyond the threshold on that side."""
        distance = self.mean - threshold if side == "above" else threshold - self.mean
        wider = self.above if side == "above" else self.below
        with np.errstate(divide="ignore", invalid="ignore"):
            tail = special.stdtr(self.freedom, -distance / (self.error * wider))
        return np.where(self.error > 0, tail, np.where(distance > 0, 0.0, 1.0))


def studentise(differences: ArrayLike, step: ArrayLike = 0.0, prior: Prior = ALONE) -> Studentised:
    """Return the mean of two or more differences, on the last axis, with its error.

    `step` is the smallest difference that the metric can show. Values a step apart have a variance of at most a quarter of its
    square; that much is added to the sample's, so that differences equal by chance keep an interval. The variance is shrunk to
    that of the prior, but never below the sample's own (Smyth 2004).
    """
    values = np.asarray(differences, float)
    count = values.shape[-1]
    mean = values.mean(axis=-1)
    own = variance_of(values, step)
    freedom = count - 1 + np.asarray(prior.freedom, float)
    weight = (count - 1) / freedom
    variance = np.maximum(own, weight * own + (1 - weight) * prior.variance)
    borrows = np.asarray(prior.freedom) > 0
    skewness = np.where(borrows, prior.skewness, skewness_of(values, step))
    known = np.where(borrows, prior.differences, count if count > 2 else 0)
    skewness = (ASSUMED * SKEWNESS + known * skewness) / (ASSUMED + known) * weight**2 / math.sqrt(count)
    above, below = (1 + np.maximum(sign * skewness, 0) for sign in (-1, 1))
    return Studentised(mean, np.sqrt(variance / count), freedom, above, below)


def variance_of(values: Array, step: ArrayLike) -> Array:
    """Return the variance on the last axis, plus the square of half the metric's step."""
    return np.asarray(values.var(axis=-1, ddof=1) + (np.asarray(step) / 2) ** 2)


def skewness_of(values: Array, step: ArrayLike) -> Array:
    """Return the adjusted Fisher-Pearson skewness on the last axis; 0 for fewer than three values, or equal ones."""
    count = values.shape[-1]
    if count < 3:
        return np.zeros(values.shape[:-1])
    spread = np.sqrt(variance_of(values, step))
    moment = ((values - values.mean(axis=-1, keepdims=True)) ** 3).sum(axis=-1) * count / (count - 1) / (count - 2)
    return np.asarray(np.divide(moment, spread**3, out=np.zeros_like(spread), where=spread > 0))


def bounds(differences: Sequence[float], confidence: float = 0.95, step: float = 0.0, prior: Prior = ALONE) -> Bounds:
    """Return the mean of differences, one per seed, with the lower and the upper one-sided bound; see `studentise`.

    Infinite for fewer than two differences.
    """
    if len(differences) < 2:
        return Bounds(float(differences[0]) if len(differences) else math.nan, -math.inf, math.inf)
    studentised = studentise(differences, step, prior)
    half = quantile(confidence, float(studentised.freedom)) * float(studentised.error)
    mean = float(studentised.mean)
    return Bounds(mean, mean - half * float(studentised.above), mean + half * float(studentised.below))


def p_value(
    differences: Sequence[float], threshold: float, side: Side, step: float = 0.0, prior: Prior = ALONE
) -> float:
    """Return the smallest error level at which the bound of `bounds` lies beyond the threshold on that side; 1 for one seed."""
    if len(differences) < 2:
        return 1.0
    return float(studentise(differences, step, prior).p_value(threshold, side))


def wider(seeds: int, freedom: float = 0.0) -> float:
    """Return how much the skewness correction widens upper bounds if `seeds` differences are symmetric; `freedom` is the prior's."""
    weight = (seeds - 1) / (seeds - 1 + freedom)
    return 1 + ASSUMED * SKEWNESS / (ASSUMED + (seeds if seeds > 2 else 0)) * weight**2 / math.sqrt(seeds)


def holm(p_values: Sequence[float], alpha: float) -> list[float]:
    """Return the error level at which each hypothesis of a family is tested (Holm 1979): it is rejected if its p is less.

    The chance of rejecting any true hypothesis of the family is at most `alpha`, whatever their dependence.

    >>> [round(level, 4) for level in holm([0.01, 0.6, 0.025], 0.06)]
    [0.02, 0.06, 0.03]
    >>> [round(level, 4) for level in holm([0.01, 0.6, 0.04], 0.06)]
    [0.02, 0.03, 0.03]
    """
    levels = [0.0] * len(p_values)
    remaining = len(p_values)
    level, passing = 0.0, True
    for i in sorted(range(len(p_values)), key=lambda i: p_values[i]):
        if passing:
            level = alpha / remaining
            passing = p_values[i] < level
            remaining -= 1
        levels[i] = level
    return levels


def highest_rate(events: int, trials: int, confidence: float = 0.95) -> float:
    """Return the one-sided upper bound of a rate (Clopper and Pearson 1934).

    >>> round(highest_rate(0, 5), 3), highest_rate(5, 5)
    (0.451, 1.0)
    """
    test: Any = stats.binomtest(events, trials, alternative="less")
    return float(test.proportion_ci(confidence, method="exact").high)


@cache
def quantile(probability: float, freedom: float) -> float:
    """Return a quantile of Student's t, cached since a report needs a few of them thousands of times."""
    return float(special.stdtrit(freedom, probability))


MOST = 8.0
"""Most degrees of freedom of a prior. In simulated families of 2 to 20 settings with 3 to 8 seeds the error at a nominal 2.5 % is
at most 2.4 % for normal and t(3) differences, whether settings share all, part or none of their noise."""
SHARED = 0.25
OUTLYING = (1e-4, 0.01)
"""Chances of a variance as small or as large as a setting's, by the prior, below which the setting borrows nothing. A setting
whose few seeds agree by luck is common; one that computes nearly the same as dense has a variance thousands of times smaller."""
REACH = 4.0
"""Margins between the mean of a setting and the threshold within which settings are similar. The spread of a setting grows with
its harm: in the runs of docs/findings from 0.1 % at harms of 1 % to 19 % at 112 %."""
TREND = 0.66
"""Growth of the logarithm of a variance with each margin of harm, in the studies of docs/findings within the reach: 0.66 +- 0.19
in 47 settings (2026-11-25). A setting that may lie at the threshold is compared with what others would have there."""

_FREEDOMS = np.geomspace(0.05, MOST, 400)
_EXCESS = special.polygamma(1, _FREEDOMS / 2)  # of the variance of log variances, by the prior's degrees of freedom


def similar(means: Array, threshold: float) -> Array:
    """Return whether each setting is close enough to the threshold to share its spread with others."""
    return np.asarray(np.abs(means - threshold) <= REACH * abs(threshold))


def at_threshold(variances: Array, freedoms: Array, means: Array, threshold: float) -> Array:
    """Return the variances that settings would have at the threshold, if their mean harm is a standard error beyond it."""
    beyond = np.abs(means) - np.sqrt(variances / (freedoms + 1)) - abs(threshold)
    return np.asarray(variances * np.exp(-TREND * np.maximum(beyond / abs(threshold), 0)))


def prior_of(variances: Array, freedoms: Array, skewnesses: Array) -> Prior:
    """Return the prior of each setting on the last axis; `ALONE` for settings that borrow nothing.

    `freedoms`: the degrees of freedom of each variance, at least one; broadcast like the others.

    Three to five seeds estimate a setting's variance badly. If the variances of a job's settings are scaled inverse chi-squares,
    the best estimate of one is its own, shrunk to the job's typical one as if that had been seen on `freedom` further differences
    (Smyth 2004; limma's `fitFDist`, robust). Unmodified, the method calls settings safe too often on three seeds: the typical
    variance and its degrees of freedom are estimates, taken as known; and all differences of a seed share the noise of its dense
    run, so that k settings are worth far less than k times their seeds. Therefore `freedom` is the harmonic sum of the
    estimate, at most `MOST`, and of the degrees of freedom of the typical variance, in which differences of one seed count as
    correlated by a half, as they are if dense runs are as noisy as others: the correlation of their sample variances is a quarter
    (`SHARED`).
    """
    count = variances.shape[-1]
    if count < 2:
        return Prior(*(np.full(variances.shape, value) for value in ALONE))
    freedoms = np.broadcast_to(freedoms, variances.shape)
    logs = np.log(np.maximum(variances, 1e-300)) - np.log(special.chdtri(freedoms, 0.5) / freedoms)
    middle = np.median(logs, axis=-1, keepdims=True)
    spread = 1.4826 * np.median(np.abs(logs - middle), axis=-1)
    excess = spread**2 * count / (count - 1) - special.polygamma(1, freedoms / 2).mean(axis=-1)
    estimated = np.interp(excess, _EXCESS[::-1], _FREEDOMS[::-1])
    known = freedoms.mean(axis=-1) * (count - 1) / (1 + (count - 2) * SHARED)
    freedom = np.broadcast_to((1 / (1 / estimated + 1 / known))[..., None], variances.shape)
    typical = np.broadcast_to(np.exp(middle), variances.shape)
    ratio = variances / typical
    apart = (special.fdtr(freedoms, freedom, ratio) < OUTLYING[0]) | (
        special.fdtrc(freedoms, freedom, ratio) < OUTLYING[1]
    )
    differences = (freedoms + 1).mean(axis=-1, keepdims=True) * count / (1 + (count - 1) * SHARED)
    return Prior(
        typical,
        np.where(apart, 0.0, freedom),
        np.broadcast_to(skewnesses.mean(axis=-1, keepdims=True), variances.shape),
        np.broadcast_to(differences, variances.shape),
    )


def priors(
    samples: Sequence[Sequence[float]],
    steps: Sequence[float],
    threshold: float,
    lenders: Sequence[tuple[Sequence[float], float]] = (),
) -> list[Prior]:
    """Return the variance that each sample of a job borrows from the others, all compared with one threshold.

    `steps`: the least difference that each can show. `lenders`: further samples with their steps, that only lend.
    """
    everything = [*zip(samples, steps, strict=True), *lenders]
    arrays = [np.asarray(values, float) for values, _ in everything]
    means = np.array([values.mean() if len(values) > 1 else np.nan for values in arrays])
    chosen = np.flatnonzero(similar(means, threshold))
    borrowed = [ALONE] * len(samples)
    if len(chosen) < 2:
        return borrowed
    variances = np.array([variance_of(arrays[i], everything[i][1]) for i in chosen])
    freedoms = np.array([len(arrays[i]) - 1.0 for i in chosen])
    prior = prior_of(
        at_threshold(variances, freedoms, means[chosen], threshold),
        freedoms,
        np.array([skewness_of(arrays[i], everything[i][1]) for i in chosen]),
    )
    for number, i in enumerate(chosen):
        if i < len(samples):
            borrowed[i] = Prior(*(float(np.asarray(part)[number]) for part in prior))
    return borrowed
