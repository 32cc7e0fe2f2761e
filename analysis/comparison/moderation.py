"""The spread that few seeds of a setting borrow from similar settings of its job (Smyth 2004; limma's `fitFDist`, robust).

Three to five seeds know a setting's variance badly. If the variances of a job's settings are scaled inverse chi-squares, the
best guess of one is its own, shrunk to the typical one of the job as if that had been seen on `freedom` further differences.

Taken as it is, the method calls settings safe too often on three seeds, for two reasons. The typical variance and its
degrees of freedom are estimates and taken as known; and all differences of a seed share the noise of its dense run, so that k settings
know it by far fewer than k times their seeds. Therefore `freedom` is the harmonic sum of the estimate, at most `MOST`, and of
the degrees of freedom of the typical variance, in which differences of one seed count as correlated by a half, as they are if
dense runs are as noisy as others: the correlation of their sample variances is a quarter (`SHARED`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import special

from raysim.analysis.comparison.statistics import ALONE, Array, Prior, skewness_of, variance_of

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
    """Return whether each setting is near enough to the threshold to lend and borrow spread."""
    return np.asarray(np.abs(means - threshold) <= REACH * abs(threshold))


def at_threshold(variances: Array, freedoms: Array, means: Array, threshold: float) -> Array:
    """Return the variances that settings would have at the threshold, if their mean harm is a standard error beyond it."""
    beyond = np.abs(means) - np.sqrt(variances / (freedoms + 1)) - abs(threshold)
    return np.asarray(variances * np.exp(-TREND * np.maximum(beyond / abs(threshold), 0)))


def prior_of(variances: Array, freedoms: Array, skewnesses: Array) -> Prior:
    """Return the prior of each setting on the last axis; `ALONE` for settings that borrow nothing.

    `freedoms`: the degrees of freedom of each variance, at least one; broadcast like the others.
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
    """Return what each of the samples of a job, all compared with one threshold, borrows from the others.

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
