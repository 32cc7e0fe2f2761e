"""Harm by test sample: the shares of training and of the test set in its spread, and the changed samples.

For each setting, the differences from dense form a table of seeds by test samples. Their variance is split by a two-way analysis of
variance with random effects (Searle, Casella and McCulloch 1992, section 4.5).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from raysim.analysis.comparison.contexts import Context, contexts
from raysim.analysis.runs.results import Results
from raysim.config.identity import Setting
from raysim.quality import Measure

MEASURED = ("loss", "accuracy")
"""Measures that are means over samples, so that their harm is a mean of differences."""
LEAST_SEEDS = 2

Array = NDArray[np.float64]
_COLUMNS = (
    *("context", "setting", "unit", "seeds", "samples", "harm", "deviation", "of_training", "of_samples"),
    *("another_test", "worse", "better", "p"),
)


def sample_harms(results: Results) -> pd.DataFrame:
    """Return one row for each setting that, like dense, has per-sample scores on two seeds or more.

    `harm` is the mean of `settings` over these `seeds`, and `deviation` the standard deviation between seeds of their harm, in
    `unit`. It is split into `of_training`, which more seeds average out, and `of_samples`, the noise of so few `samples` in each
    seed, which a larger test set would reduce: the squares of both add up to its square, unless an estimate is below 0 and counts as 0.
    `another_test` is the standard deviation of the mean harm over test sets of this size: bounds over seeds do not include it.
    `worse` and `better` count the samples with fewer and with more right predictions than dense, over all seeds; `p` is that of
    their two-sided sign test (McNemar 1947). They are missing for numeric targets. Only settings judged by a loss or an
    accuracy have rows.
    """
    rows = []
    for context in contexts(results):
        if context.quality.name not in MEASURED or Setting() not in context.settings:
            continue
        scores = _scores(results, context)
        for setting in context.settings:
            pairs = [] if setting == Setting() else _pairs(context, setting, scores)
            if len(pairs) >= LEAST_SEEDS:
                row = {"context": context.label, "setting": str(setting), "unit": context.unit}
                rows.append(row | _parted(pairs, context.quality) | _changed(pairs))
    return pd.DataFrame(rows, columns=list(_COLUMNS))


def sample_sentence(row: Mapping[Any, Any]) -> str:
    """Summarise a row of `sample_harms` in one sentence.

    >>> row = dict(unit="points of accuracy", seeds=5, samples=360, deviation=0.5, of_training=0.4, of_samples=0.3, another_test=0.2)
    >>> sample_sentence(row | dict(worse=31, better=25, p=0.5))
    'Harm spreads by 0.5 points of accuracy over 5 seeds: 0.4 by training and 0.3 by 360 test samples; another test set would move \
the mean by 0.2; samples right less often than with dense: 31, more often: 25 (sign test, p = 0.5).'
    """
    more = ""
    if row["worse"] is not None and not math.isnan(row["worse"]):
        more = f"; samples right less often than with dense: {row['worse']:.0f}, more often: {row['better']:.0f} "
        more += f"(sign test, p = {row['p']:.2g})"
    return (
        f"Harm spreads by {row['deviation']:.2g} {row['unit']} over {row['seeds']} seeds: {row['of_training']:.2g} by training and "
        f"{row['of_samples']:.2g} by {row['samples']:,} test samples; another test set would move the mean by "
        f"{row['another_test']:.2g}{more}."
    )


def _scores(results: Results, context: Context) -> dict[str, pd.DataFrame]:
    """Return the per-sample scores of the runs of a context that finished, in the order of samples."""
    runs = context.rows["run"][~context.rows["diverged"].astype(bool)].astype(str)
    table = results.select(runs).table("samples", ["sample", "loss", "right", "predictions"])
    return {str(run): rows.sort_values("sample") for run, rows in table.groupby("run", observed=True) if len(rows) > 1}


def _pairs(
    context: Context, setting: Setting, scores: Mapping[str, pd.DataFrame]
) -> list[tuple[pd.DataFrame, pd.DataFrame]]:
    """Return the scores of a setting and of dense for each seed at which both have those of the same samples."""
    runs, dense = context.settings[setting], context.settings[Setting()]
    pairs = []
    for seed in runs.index.intersection(dense.index):
        names: list[str] = [str(each.loc[seed, "run"]) for each in (runs, dense)]
        pair = [scores[name] for name in names if name in scores]
        if len(pair) == 2 and np.array_equal(pair[0]["predictions"], pair[1]["predictions"]):
            pairs.append((pair[0], pair[1]))
    sizes = [len(worse) for worse, _ in pairs]
    return [pair for pair in pairs if len(pair[0]) == max(sizes)]


def _parted(pairs: list[tuple[pd.DataFrame, pd.DataFrame]], measure: Measure) -> dict[str, Any]:
    harms = np.stack([_differences(worse, dense, measure) for worse, dense in pairs])
    seeds, samples = harms.shape
    of_seeds, of_samples = harms.mean(axis=1), harms.mean(axis=0)
    residual = harms - of_seeds[:, None] - of_samples + harms.mean()
    noise = float((residual**2).sum()) / ((seeds - 1) * (samples - 1))
    between = float(of_seeds.var(ddof=1))
    return {
        "seeds": seeds,
        "samples": samples,
        "harm": float(harms.mean()),
        "deviation": math.sqrt(between),
        "of_training": math.sqrt(max(0.0, between - noise / samples)),
        "of_samples": math.sqrt(noise / samples),
        "another_test": math.sqrt(max(0.0, float(of_samples.var(ddof=1)) - noise / seeds) / samples),
    }


def _differences(worse: pd.DataFrame, dense: pd.DataFrame, measure: Measure) -> Array:
    """Return each sample's part of the harm, in the measure's unit: their mean is the harm."""
    weights = (dense["predictions"] / dense["predictions"].mean()).to_numpy(float)
    if measure.counted:
        own, other = (each["right"].to_numpy(float) / dense["predictions"].mean() for each in (worse, dense))
        return np.asarray(100 * (other - own))
    own, other = (each["loss"].to_numpy(float) * weights for each in (worse, dense))
    return np.asarray(100 * (own - other) / other.mean())


def _changed(pairs: list[tuple[pd.DataFrame, pd.DataFrame]]) -> dict[str, Any]:
    """Return how many samples have fewer and more right predictions than dense, over all seeds, and their sign test."""
    net = np.sum([worse["right"].to_numpy(float) - dense["right"].to_numpy(float) for worse, dense in pairs], axis=0)
    if np.isnan(net).any():
        return {"worse": None, "better": None, "p": math.nan}
    worse, better = int((net < 0).sum()), int((net > 0).sum())
    p = float(stats.binomtest(worse, worse + better).pvalue) if worse + better else 1.0
    return {"worse": worse, "better": better, "p": p}
