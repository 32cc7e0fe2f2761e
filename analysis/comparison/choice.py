"""The frame of settings: harm, verdict and price of each, by comparison with otherwise equal dense runs, seed by seed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from raysim.analysis.comparison.contexts import AT_CHANCE, ComparedRuns, contexts
from raysim.analysis.comparison.rule import CONFIDENCE, Judged, PairedSample, Where, judge
from raysim.analysis.comparison.statistics import ALONE, Prior, highest_rate, priors, studentise
from raysim.analysis.data import AnalysisError, ReplayError
from raysim.analysis.runs.estimates import Estimate
from raysim.analysis.runs.prices import dense_partners
from raysim.analysis.runs.results import Results
from raysim.config.identity import DENSE, Setting
from raysim.network.presets import parse_network
from raysim.network.topology import Network

VERDICTS: dict[Where, str] = {"below": "safe", "above": "harmful", "undecided": "undecided"}


def settings(
    results: Results,
    within: float | None = None,
    *,
    networks: Network | str | Iterable[Network | str] = (),
    quality: str = "auto",
    confidence: float = CONFIDENCE,
    transport: str | None = None,
    compute: str | None = None,
    profile: Path | str | None = None,
) -> pd.DataFrame:
    """Return one row for each compressed setting of each job: its harm against dense, the verdict and, on networks, its price.

    Rows of one `job` and `context` are compared with one another: their runs, in `runs`, are equal in all but compression and seed.
    `wire_bytes` and `dense_bytes` are those of a step.

    `harm` is the mean over seeds of the difference in final quality with compression on, in points of accuracy or per cent of
    the loss (`unit`); `within` is by default half a point or one per cent.
    `verdict` follows `raysim.analysis.comparison.rule.RULE`: "safe" if `harm_high` is below `within`, "harmful" if `harm_low`
    is above it, else "undecided", and then `lacking` may say why. The family is all settings of a context that have begun,
    including those that left a race, except finished ones without a seed in common with dense. If some runs confirm a choice,
    only the settings that they confirm can be safe, by those runs alone. The seeds that chose can show other settings to be
    harmful; the error of calling a setting harmful is then halved between the two families. `chose_on` and `confirmed_on` are
    the seeds of a setting; `seeds` is the number behind the verdict.
    `deviation` is the standard deviation of the differences, shrunk to that of similar settings as if it had been seen on
    `borrowed` further seeds, and `chance` the chance that the true harm is less than `within`, without regard to the family:
    missing for fewer than two seeds. A diverged run counts as untrained; `diverged` counts them among `seeds`, and their rate
    is at most `diverged_high`, by a one-sided bound at `confidence`.

    With `networks` there is a row for each network. `transport`, `compute` and `profile` are as for `replay`, by default those of the
    runs' study, see `Results.pricing_of`. `step_s`, `dense_step_s` and `speedup`, with its interval and its `pace` ("faster", "slower"
    or "not distinguishable"), are means over the `priced` runs, each against its dense run. `break_even_bps`, their median, is the
    bandwidth below which the setting is faster on an otherwise equal network: 0 if it never `pays`, infinity if it always does, and
    missing if the network has several. Runs without a price are named in the problems of `results`.
    """
    if within is not None and not isinstance(within, (int, float)):
        raise AnalysisError(
            f"`within` must be a number, in points of accuracy or per cent of the loss, but got {within!r}: write 1 for 1 %."
        )
    several = [networks] if isinstance(networks, (Network, str)) else networks
    parsed = [parse_network(network) if isinstance(network, str) else network for network in several]
    partners = dense_partners(results, without=results.unpriced(compute or "auto")) if parsed else {}
    columns = results.runs.set_index("run")
    rows = []
    for context in contexts(results, quality=quality, margin=within):
        verdicts = _verdicts(context, 1 - confidence)
        for setting, runs in context.settings.items():
            if setting == DENSE:
                continue
            names = [str(run) for run in context.rows["run"][context.rows["setting"] == setting]]
            row = {
                "job": columns["job"][names[0]],
                "context": context.label,
                **_described(setting, columns.loc[runs["run"]]),
                "runs": names,
                **_seeds(runs),
                "unit": context.unit,
                "within": context.margin,
                "confidence": confidence,
                **verdicts[setting],
            }
            options = results.pricing_of(runs, compute=compute, profile=profile, transport=transport)
            pairs = [(str(run), partners[run]) for run in runs["run"] if run in partners]
            rows += [row | price_of_pairs(results, pairs, network, options) for network in parsed] or [row]
    return pd.DataFrame(rows, columns=[*_COLUMNS, *(_PRICES if parsed else ())])


def is_promising(judged: Mapping[str, Any]) -> bool:
    """Return whether a setting, given by its row of `settings`, is worth more seeds: it is more likely safe than not.

    It is undecided, its dense runs learned, and its mean harm is within the margin. With two seeds or more its `chance` is then
    at least a half.
    """
    open_still = judged.get("verdict") == "undecided" and judged.get("lacking") != AT_CHANCE
    return bool(open_still and judged["harm"] <= judged["within"])


def divergence(judged: Mapping[Any, Any]) -> str:
    """Return how many of a setting's runs diverged, with the upper bound of their rate, in a few words.

    >>> divergence({"diverged": 0, "seeds": 5, "diverged_high": 0.4507})
    '0 of 5 diverged: rate below 45 %'
    """
    return f"{judged['diverged']} of {judged['seeds']} diverged: rate below {100 * judged['diverged_high']:.0f} %"


def _verdicts(context: ComparedRuns, alpha: float) -> dict[Setting, dict[str, Any]]:
    """Return the verdict on each compressed setting: by the runs that confirm a choice, if there are any."""
    if context.confirmations is None:
        return _judged(context, alpha)
    choices, confirmations = context.choices, context.confirmations
    verdicts = _judged(choices, alpha, alpha_above=alpha / 2, lender=confirmations)
    for row in verdicts.values():
        if row["verdict"] != "harmful":
            row |= {"verdict": "undecided", "lacking": "its choice was not confirmed"}
    return verdicts | _judged(confirmations, alpha, alpha_above=alpha / 2, lender=choices)


def _judged(
    context: ComparedRuns, alpha: float, *, alpha_above: float | None = None, lender: ComparedRuns | None = None
) -> dict[Setting, dict[str, Any]]:
    """Return the bounds and the verdict of each compressed setting of a context, which is one family.

    The settings of `lender`, on other seeds, lend their spread.
    """
    samples = _samples(context, alpha)
    lenders = [] if lender is None else [*_samples(lender, alpha).values()]
    family = {setting: sample for setting, sample in samples.items() if sample.values}
    borrowed = priors(
        [sample.values for sample in family.values()],
        [sample.known_step for sample in family.values()],
        context.margin,
        [(sample.values, sample.known_step) for sample in lenders],
    )
    size = len(family) + len(context.begun - samples.keys())
    margins = [context.margin] * len(family)
    outcomes = judge([*family.values()], margins, alpha, alpha_above=alpha_above, priors=borrowed, family=size)
    judged = dict(zip(family, zip(outcomes, borrowed, strict=True), strict=True))
    rows = {}
    for setting, sample in samples.items():
        outcome, prior = judged.get(setting, (None, ALONE))
        diverged = int(context.settings[setting].loc[list(sample.seeds), "diverged"].sum())
        rows[setting] = {
            **outcome_columns(sample, outcome),
            **_spread(sample, prior, context.margin),
            "family": size,
            "diverged": diverged,
            "diverged_high": highest_rate(diverged, len(sample.seeds), 1 - alpha) if sample.seeds else 1.0,
        }
    return rows


def _samples(context: ComparedRuns, alpha: float) -> dict[Setting, PairedSample]:
    compressed = [setting for setting in context.settings if setting != DENSE]
    return {setting: context.harm_sample(setting, context.harms(setting), alpha) for setting in compressed}


def outcome_columns(sample: PairedSample, judged: Judged | None) -> dict[str, Any]:
    """Return a sample's bounds and verdict; None if it was not judged."""
    mean, low, high = judged.bounds if judged is not None else (math.nan, -math.inf, math.inf)
    return {
        "seeds": len(sample.values),
        "harm": mean,
        "harm_low": low,
        "harm_high": high,
        "verdict": VERDICTS[judged.where if judged is not None else "undecided"],
        "lacking": sample.lacking,
    }


def _spread(sample: PairedSample, prior: Prior, margin: float) -> dict[str, float]:
    """Return the spread of a sample, and the chance that its mean lies below the margin; NaN for fewer than two seeds."""
    if len(sample.values) < 2:
        return {"deviation": math.nan, "borrowed": math.nan, "chance": math.nan}
    studentised = studentise(sample.values, sample.known_step, prior)
    return {
        "deviation": float(studentised.error) * math.sqrt(len(sample.values)),
        "borrowed": float(prior.freedom),
        "chance": 1 - float(studentised.p_value(margin, "below")),
    }


def price_of_pairs(
    results: Results, pairs: Sequence[tuple[str, str]], network: Network, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the price of a setting as in `settings`, over its runs, each paired with its dense run; `options` are for `replay`."""
    evens, steps, speedups = [], [], []
    for pair in pairs:
        try:
            compressed, dense = (results.replay(name, **options) for name in pair)
            even = compressed.break_even_bps(dense, network)
            steps.append([float(replay.step_seconds([network]).mean()) for replay in (compressed, dense)])
            speedups += compressed.speedup(dense, [network])
        except ReplayError as error:
            results.complain(str(error))
            continue
        evens += [] if even is None else [even]
    bandwidth = Estimate(*(float(np.median(values)) for values in zip(*evens, strict=True))) if evens else UNKNOWN
    speedup = Estimate(*(float(np.mean(values)) for values in zip(*speedups, strict=True))) if steps else UNKNOWN
    step_s, dense_step_s = np.mean(steps, axis=0) if steps else (math.nan, math.nan)
    return {
        "network": repr(network),
        "priced": len(steps),
        **bandwidth.columns("break_even", "_bps"),
        "pays": _pays(bandwidth),
        "step_s": step_s,
        "dense_step_s": dense_step_s,
        **speedup._replace(value=dense_step_s / step_s).columns("speedup"),
        "pace": speedup.verdict if steps else None,
    }


UNKNOWN = Estimate(math.nan, math.nan, math.nan)
_COLUMNS = (
    *("job", "context", "setting", *Setting._fields, "compression_factor", "wire_bytes", "dense_bytes", "runs"),
    *("seeds", "chose_on", "confirmed_on", "harm", "harm_low", "harm_high", "unit", "within", "confidence", "family"),
    *("verdict", "lacking", "deviation", "borrowed", "chance", "diverged", "diverged_high"),
)
_PRICES = (
    *("network", "priced", "step_s", "dense_step_s", "speedup", "speedup_low", "speedup_high", "pace"),
    *("break_even_bps", "break_even_low_bps", "break_even_high_bps", "pays"),
)


def _described(setting: Setting, runs: pd.DataFrame) -> dict[str, Any]:
    """Return a setting's name and keys, and its bytes in a mean step of its runs."""
    steps = runs["steps_done"].astype(float).clip(lower=1) if "steps_done" in runs else math.nan
    sizes = {name: (runs[name].astype(float) / steps).mean() for name in ("wire_bytes", "dense_bytes")}
    return {
        "setting": str(setting),
        **setting._asdict(),
        "compression_factor": runs["compression_factor"].mean(),
    } | sizes


def _seeds(runs: pd.DataFrame) -> dict[str, list[int]]:
    """Return the seeds that chose a setting, and those that confirmed it."""
    confirms = runs["confirms"].astype(bool)
    groups = {"chose_on": runs.index[~confirms], "confirmed_on": runs.index[confirms]}
    return {name: [int(seed) for seed in seeds] for name, seeds in groups.items()}


def _pays(even: Estimate) -> str | None:
    """Return where a setting pays, in a word; "not distinguishable" if the interval leaves that open."""
    if math.isnan(even.value):
        return None
    if math.isinf(even.low):
        return "always"
    if even.high == 0:
        return "never"
    return "below" if even.low > 0 else "not distinguishable"
