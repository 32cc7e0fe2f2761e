"""Runs that may be compared: equal in all but compression and seed, with the quality that they reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import pandas as pd

from raysim.analysis.comparison.rule import Sample, at_chance, sample
from raysim.analysis.data import AnalysisError
from raysim.analysis.data.folders import is_confirmation
from raysim.analysis.data.jobs import model_of
from raysim.analysis.data.probe_candidates import are_probes
from raysim.analysis.data.settings import COMPRESSION, NO_SETTING, Setting, differing, is_missing, setting_of
from raysim.analysis.data.studies import USUAL_TRANSPORT, over
from raysim.analysis.pricing.estimates import Estimate
from raysim.analysis.runs.results import Results
from raysim.quality import MEASURES, Measure, is_language, measures_of
from raysim.records import FINISHED

UNPRICED = Estimate(math.nan, math.nan, math.nan)
LOSS_STEP = 100 * 2.0**-23  # per cent: losses are computed in float32

Mode = Literal["on", "off", "on_estimated", "off_estimated"]
"""Compression on or off in an evaluation, with the BatchNorm statistics of training or with those estimated anew under that mode."""
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, eq=False)
class Context:
    """Runs that are alike in all but compression and seed.

    `rows` has one row for each run: run, setting (a Setting), seed, the measure with compression on and off and by chance,
    predictions (of an evaluation), study, and confirms (whether it confirms a choice that other runs made). `quantities`
    are worked out only if a claim asks for them.
    """

    label: str
    rows: pd.DataFrame
    quality: Measure = MEASURES["accuracy"]
    margin: float = MEASURES["accuracy"].margin
    """The largest degradation that counts as none, in the unit of the measure."""
    language: bool = False
    num_replicas: int = 1
    quantities: Quantities = field(default_factory=lambda: Quantities())
    plans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The seeds that each study fixed before it began."""

    @cached_property
    def settings(self) -> dict[Setting, pd.DataFrame]:
        """The runs of each setting, one row for each seed; the first of several runs with one seed counts."""
        found: dict[Setting, pd.DataFrame] = {}
        for setting, rows in self.rows.groupby(self.rows["setting"].map(tuple), sort=True):
            found[Setting(*setting)] = rows.drop_duplicates("seed").set_index("seed").sort_index()
        return found

    @cached_property
    def confirmations(self) -> Context | None:
        """The runs that confirm a choice, by themselves; None where there are none."""
        rows = self.rows[self.rows["confirms"].astype(bool)]
        return replace(self, rows=rows) if len(rows) else None

    @cached_property
    def choices(self) -> Context:
        """The runs among which a choice was made, without the runs that confirm it."""
        return replace(self, rows=self.rows[~self.rows["confirms"].astype(bool)])

    def sample(self, effects: Mapping[int, float], *settings: Setting, step: float | None = None) -> Sample:
        """Return the differences between settings, by seed, that a verdict rests on: all of a plan, or of the last look.

        `step` is the least difference that can be shown; by default the resolution of an evaluation.
        """
        rows = [self.settings[setting].loc[list(effects)] for setting in settings if effects]
        studies = {study for each in rows for study in each["study"]}
        named = [study for study in studies if study is not None]
        confirming = bool(rows) and all(each["confirms"].all() for each in rows)
        planned = len(named) == 1 and (len(studies) == 1 or confirming)
        plan = (self.plans.get(named[0]) or None) if planned else None
        return sample(effects, plan=plan, spent=bool(named) or confirming, step=self.step if step is None else step)

    def learned(self, setting: Setting, seeds: Iterable[int], mode: Mode = "on", *, alpha: float) -> bool:
        """Return whether models of a setting, at these seeds, are surely above chance."""
        runs = self.settings.get(setting)
        if runs is None:
            return False
        kept = runs[runs.index.isin(list(seeds))]
        return not at_chance([self.skill(kept.iloc[place], mode) for place in range(len(kept))], alpha)

    @cached_property
    def step(self) -> float:
        """The least difference in quality that an evaluation can show, in `unit`; not a number where that is not recorded."""
        if not self.quality.counted:
            return LOSS_STEP
        predictions = self.rows["predictions"].min()
        return 100 / float(predictions) if predictions > 0 else math.nan

    @property
    def unit(self) -> str:
        """The unit of harm."""
        return self.quality.unit

    def harm(self, worse: pd.Series[Any], worse_mode: Mode, than: pd.Series[Any], than_mode: Mode) -> float:
        """Return how much worse one run's quality is than another's, in `unit`."""
        name = self.quality.name
        return self.quality.harm(float(worse[f"{name}_{worse_mode}"]), float(than[f"{name}_{than_mode}"]))

    def skill(self, run: pd.Series[Any], mode: Mode = "on") -> float:
        """Return how far a run's quality lies above chance: per cent of the way from chance to perfection."""
        name = self.quality.name
        return self.quality.skill(float(run[f"{name}_{mode}"]), float(run[f"chance_{name}"]))


@dataclass(frozen=True)
class Quantities:
    """Quantities of runs besides their quality, each a function of the names of runs."""

    factor: Callable[[str, str], float] = lambda run, direction: math.nan
    """Dense over wire bytes of a run in a direction."""
    step_bytes: Callable[[str], float] = lambda run: math.nan
    """Bytes that a run sends in a step, the mean over its steps."""
    values: Callable[[str], float] = lambda run: math.nan
    """Dense values over values sent, as an adaptive method of replica gradients chose them."""
    slowdown: Callable[[str, str], Estimate] = lambda run, than: UNPRICED
    """Per cent by which a step takes longer than one of another run of the same job, on the network asked for, with the price's
    interval."""
    network: str = ""


def contexts(
    results: Results,
    *,
    quality: str = "auto",
    margin: float | None = None,
    network: str | None = None,
    transport: str | None = None,
) -> list[Context]:
    """Return the runs that are over, apart by all that is not compression or seed.

    A diverged run counts as untrained: the loss of its first step, and of other measures the value by chance, 0 of an
    accuracy. `quality` is a measure of the runs, or "auto": the one that each is judged by, see
    `Results.measure_of`. `margin` is the harm that counts as none, half a point or one per cent where not given. `network` and
    `transport` are where step times are compared: by default those of the runs' study, see `Results.network_of`. Runs without a
    final evaluation, or without the measure, are named in the problems of `results`.
    """
    ended = results.runs["status"].isin(FINISHED)
    runs = results.runs[ended & ~are_probes(results.runs)]
    known = [*results.measures]
    if quality not in ("auto", *(known or MEASURES)):
        raise AnalysisError(f"`quality` must be one of auto, {', '.join(known or MEASURES)}, but got {quality!r}.")
    if runs.empty:
        return []
    keys = [key for key in results.keys if key not in {*COMPRESSION, *NO_SETTING, "seed"} and key in runs]
    groups = runs.groupby([runs[key].map(repr) for key in keys], sort=False) if keys else [("", runs)]
    predictions = _predictions(results)
    plans = {name: results.planned_seeds(name) for name in runs["study"].dropna().unique()}
    found = []
    for _, mine in groups:
        first = mine.iloc[0].to_dict()
        its = measures_of(first)
        if quality != "auto" and quality not in its:
            for run in mine["run"]:
                results.complain(f"The run {run} does not measure {quality}, and is not compared.")
            continue
        measure = results.measure_of(mine) if quality == "auto" else its[quality]
        rows = _rows(results, mine, measure, predictions)
        if len(rows):
            language = is_language(first)
            limit = measure.margin if margin is None else margin
            replicas = 1 if pd.isna(first.get("num_replicas")) else int(first["num_replicas"])
            label = _label(mine.iloc[0], runs, keys)
            studies = mine["study"].dropna()
            chosen = results.network_of(studies) if network is None else network
            quantities = _quantities(results, chosen, transport or results.transport_of(studies))
            found.append(Context(label, rows, measure, limit, language, replicas, quantities, plans))
    return sorted(found, key=lambda context: context.label)


def _rows(results: Results, runs: pd.DataFrame, measure: Measure, predictions: Mapping[str, int]) -> pd.DataFrame:
    rows = []
    for row in runs.to_dict("records"):
        name = measure.name
        values = {f"{name}_{mode}": _number(row.get(f"final_{name}_{mode}")) for mode in MODES}
        chance = _number(row.get(f"chance_{name}"))
        if row["status"] == "diverged":
            untrained, said = _untrained(results, row["run"], measure, chance)
            results.complain(f"The run {row['run']} diverged, and counts as untrained: {said}.")
            values = dict.fromkeys(values, untrained)
        if all(math.isnan(value) for value in values.values()):
            results.complain(f"The run {row['run']} has no final evaluation, and is not compared.")
            continue
        by_chance = {f"chance_{name}": chance}
        study = None if pd.isna(row["study"]) else str(row["study"])
        origin = {"study": study, "confirms": is_confirmation(results.path(row["run"]))}
        counted = {"predictions": predictions.get(row["run"], math.nan)}
        setting, seed = setting_of(row), int(row["seed"])
        rows.append({"run": row["run"], "setting": setting, "seed": seed, **values, **by_chance, **counted, **origin})
    return pd.DataFrame(rows)


def _predictions(results: Results) -> dict[str, int]:
    """Return the number of predictions in each run's evaluations."""
    evals = results.evals[["run", "predictions"]].dropna()
    fewest = evals.groupby("run", observed=True)["predictions"].min()
    return {str(run): int(count) for run, count in fewest.items()}


def _untrained(results: Results, run: str, measure: Measure, chance: float) -> tuple[float, str]:
    """Return the quality that a diverged run counts with, and the reason in words."""
    if measure.name == "loss":
        return _first_loss(results, run), "the loss of its first step"
    if measure.counted:
        return 0.0, f"{measure.name} 0"
    return chance, f"the {measure.name} that is reached by chance"


def _first_loss(results: Results, run: str) -> float:
    losses = results.select([run]).table("steps", ["loss"], [("step", "==", 0)])["loss"]
    return float(losses.iloc[0]) if len(losses) else math.nan


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _label(row: pd.Series[Any], runs: pd.DataFrame, keys: Iterable[str]) -> str:
    """Return the label of a run: its model, its data, and the keys in which other runs of the two differ."""
    names = [key for key in ("model", "data") if key in runs]
    alike = runs[(runs[names] == row[names]).all(axis=1)]
    telling = [key for key in differing(alike, keys) if key not in COMPRESSION]
    parts = [f"{key}={row[key]}" for key in telling if not is_missing(row[key])]
    values = {str(key): value for key, value in row.items()}
    return ", ".join([" on ".join(model_of(values) if name == "model" else str(row[name]) for name in names), *parts])


def _quantities(results: Results, network: str, transport: str) -> Quantities:
    from raysim.network.presets import parse_network

    try:
        parsed = parse_network(network)
    except ValueError as error:
        raise AnalysisError(f"`network`: {error}") from None

    def factor(run: str, direction: str) -> float:
        where = [("direction", "==", direction)]
        links = results.select([run]).table("links", ["wire_bytes", "dense_bytes"], where)
        sent = float(links["wire_bytes"].sum())
        return float(links["dense_bytes"].sum()) / sent if sent else math.nan

    def step_bytes(run: str) -> float:
        (row,) = results.runs[results.runs["run"] == run].to_dict("records")
        return float(row["wire_bytes"]) / row["steps_done"] if row["steps_done"] else math.nan

    def values(run: str) -> float:
        where = [("where", "==", "replica_gradient")]
        factors = results.select([run]).table("decisions", ["factor"], where)["factor"].dropna()
        return 1 / float((1 / factors).mean()) if len(factors) else math.nan

    def slowdown(run: str, than: str) -> Estimate:
        try:
            one, other = (results.replay(name, transport=transport) for name in (run, than))
            (speedup,) = one.speedup(other, [parsed])
        except ValueError as error:
            results.complain(str(error))
            return UNPRICED
        return Estimate(*(100 * (1 / times - 1) for times in (speedup.value, speedup.high, speedup.low)))

    named = "" if transport == USUAL_TRANSPORT else f" {over(transport)}"
    return Quantities(factor, step_bytes, values, slowdown, f"{parsed!r}{named}")
