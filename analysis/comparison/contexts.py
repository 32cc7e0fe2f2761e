"""Comparable runs: equal in all but compression and seed, with their final quality."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from raysim.analysis.comparison.rule import MIN_SEEDS, PairedSample, PairedSpread, at_chance, sample
from raysim.analysis.comparison.statistics import priors
from raysim.analysis.data import AnalysisError
from raysim.analysis.data.folders import is_confirmation
from raysim.analysis.data.settings import COMPRESSION, compared_keys, differing, model_of
from raysim.analysis.runs.results import Results
from raysim.config.identity import Setting, as_text, is_missing
from raysim.quality import MEASURES, Measure, measures_of
from raysim.records import FINISHED

AT_CHANCE = "the dense runs are not surely above chance"
"""Why nothing can be said of a setting, however many seeds it has."""

Mode = Literal["on", "off", "on_estimated", "off_estimated"]
"""Compression on or off in an evaluation, with the BatchNorm statistics of training or with those estimated anew under that mode."""
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, eq=False)
class ComparedRuns:
    """Comparable runs: equal in all but compression and seed.

    `rows` has one row for each run: run, setting (a Setting), seed, the measure with compression on and off and by chance,
    predictions (of an evaluation), study, confirms (whether it confirms the choice of other runs), data (a digest), and diverged.
    Runs without a number as their measure come last.
    """

    label: str
    rows: pd.DataFrame
    quality: Measure = MEASURES["accuracy"]
    margin: float = MEASURES["accuracy"].margin
    """The largest degradation that counts as none, in the unit of the measure."""
    plans: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The seeds that each study fixed before it began."""
    begun: frozenset[Setting] = frozenset()
    """The settings with runs that confirm no choice, finished or not, without dense: the candidates."""
    confirming: frozenset[Setting] = frozenset()
    """The same of runs that confirm a choice."""

    @cached_property
    def settings(self) -> dict[Setting, pd.DataFrame]:
        """The runs of each setting, one row per seed; of several runs with one seed, the first counts."""
        groups = self.rows.groupby(self.rows["setting"].map(tuple), sort=True)
        return {
            Setting(*setting): rows.drop_duplicates("seed").set_index("seed").sort_index() for setting, rows in groups
        }

    @cached_property
    def confirmations(self) -> ComparedRuns | None:
        """The confirming runs only; None if there are none."""
        rows = self.rows[self.rows["confirms"].astype(bool)]
        return replace(self, rows=rows, begun=self.confirming) if len(rows) else None

    @cached_property
    def choices(self) -> ComparedRuns:
        """The runs by which settings were chosen, without the confirmation."""
        return replace(self, rows=self.rows[~self.rows["confirms"].astype(bool)])

    def sample(self, effects: Mapping[int, float], *settings: Setting, step: float | None = None) -> PairedSample:
        """Return the differences by seed on which a verdict is based: all planned seeds, or those of the last interim analysis.

        With runs of several studies the longest plan counts as already judged, and so does the plan of a race that trained more
        seeds of a setting than planned. `step` is the smallest difference that can be shown; by default the resolution of an
        evaluation.
        """
        runs = [self.settings[setting].loc[list(effects)] for setting in settings if effects]
        studies = {study for of_setting in runs for study in of_setting["study"]}
        named = [study for study in studies if study is not None]
        confirming = bool(runs) and all(of_setting["confirms"].all() for of_setting in runs)
        plan = max((self.plans.get(name, ()) for name in named), key=len, default=())
        by_plan = bool(plan) and len(named) == 1 and (len(studies) == 1 or confirming)
        grown = not set(effects) <= set(plan) if by_plan else bool(named) or confirming
        return sample(effects, plan=plan, grown=grown, step=self.step if step is None else step)

    def harm_sample(
        self, setting: Setting, harms: Mapping[int, float], alpha: float, end: ComparedRuns | None = None
    ) -> PairedSample:
        """Return the harms by seed behind a verdict; there is none if one is no number, or dense may have learned nothing.

        `end`: the context of the dense runs in question, if it differs.
        """
        chosen = self.sample(harms, setting, Setting())
        lost = sum(map(math.isnan, harms.values()))
        if lost:  # a broken model may have no number: the others are no fair sample
            chosen = chosen._replace(
                lacking=f"{lost} of {len(harms)} seeds have no number as their {self.quality.name}"
            )
        if (end or self).undefined:  # of no seed, since those of the best dense runs are missing
            return chosen._replace(values=(), seeds=(), lacking=(end or self).undefined)
        if len(chosen.seeds) < MIN_SEEDS or (end or self).learned(Setting(), chosen.seeds, alpha=alpha):
            return chosen
        return chosen._replace(lacking=AT_CHANCE)  # even if seeds are missing, since more would not help

    def harms(self, setting: Setting) -> dict[int, float]:
        """Return how much worse a setting is than dense at each shared seed, with compression on, unless their data differ."""
        runs, dense = self.settings[setting], self.settings.get(Setting())
        if dense is None:
            return {}
        pairs = ((seed, runs.loc[seed], dense.loc[seed]) for seed in runs.index if seed in dense.index)
        return {seed: self.harm(own, "on", other, "on") for seed, own, other in pairs if same_data(own, other)}

    def learned(self, setting: Setting, seeds: Iterable[int], mode: Mode = "on", *, alpha: float) -> bool:
        """Return whether the models of a setting at these seeds are clearly better than chance."""
        runs = self.settings.get(setting)
        if runs is None:
            return False
        kept = runs[runs.index.isin(list(seeds))]
        return not at_chance([self.skill(kept.iloc[i], mode) for i in range(len(kept))], alpha)

    @cached_property
    def undefined(self) -> str:
        """The reason why harm against the dense runs is undefined; empty if it is not."""
        dense = self.settings.get(Setting())
        return "" if dense is None else self.quality.undefined(float(dense[f"{self.quality.name}_on"].min()))

    @cached_property
    def step(self) -> float:
        """The smallest difference in quality that an evaluation can show, in `unit`; NaN if it was not recorded."""
        return self.quality.step(float(self.rows["predictions"].min()))

    @property
    def unit(self) -> str:
        """The unit of harm."""
        return self.quality.unit

    def harm(self, worse: pd.Series[Any], worse_mode: Mode, than: pd.Series[Any], than_mode: Mode) -> float:
        """Return how much worse one run's quality is than another's, in `unit`."""
        name = self.quality.name
        return self.quality.harm(float(worse[f"{name}_{worse_mode}"]), float(than[f"{name}_{than_mode}"]))

    def skill(self, run: pd.Series[Any], mode: Mode = "on") -> float:
        """Return a run's quality as per cent of the way from chance to perfection."""
        name = self.quality.name
        return self.quality.skill(float(run[f"{name}_{mode}"]), float(run[f"chance_{name}"]))


def contexts(results: Results, *, quality: str = "auto", margin: float | None = None) -> list[ComparedRuns]:
    """Return the finished runs, in groups equal in all but compression and seed.

    A diverged run counts as untrained: it gets the loss of its first step or that by chance, the greater, and chance for other
    measures, 0 for an accuracy. `quality` is a measure of the runs, or "auto" for the measure that each is judged by, see
    `Results.measure_of`. `margin` is the tolerated harm: by default half a point or one per cent. Runs without a final evaluation, or
    without the measure, are named in the problems of `results`.
    """
    begun = results.runs
    if "probe" in begun:  # a probe trains nothing
        begun = begun[begun["probe"].astype(str) != "True"]
    runs = begun[begun["status"].isin(FINISHED)]
    known = [*results.measures]
    if quality not in ("auto", *(known or MEASURES)):
        raise AnalysisError(f"`quality` must be one of auto, {', '.join(known or MEASURES)}, but got {quality!r}.")
    if runs.empty:
        return []
    keys = compared_keys(results.keys)
    groups = begun.groupby([begun[key].map(repr) for key in keys], sort=False) if keys else [("", begun)]
    evals = results.table("evals", ["predictions", "samples"])
    counts = {whole: _fewest(evals, "samples" if whole else "predictions") for whole in (False, True)}
    plans = {name: results.planned_seeds(name) for name in runs["study"].dropna().unique()}
    comparable = []
    for _, candidates in groups:
        group = candidates[candidates["status"].isin(FINISHED)]
        if group.empty:
            continue
        own = measures_of(results.rows[group["run"].iloc[0]])
        if quality != "auto" and quality not in own:
            for run in group["run"]:
                results.complain(f"The run {run} does not measure {quality}, and is not compared.")
            continue
        measure = results.measure_of(group) if quality == "auto" else own[quality]
        rows = _rows(results, group, measure, counts[measure.whole])
        if len(rows):
            label = _label(group.iloc[0], runs, keys)
            if rows["data"].nunique() > 1:
                results.complain(f"{label}: the data changed between runs, and only runs on equal data are compared.")
            comparable.append(
                ComparedRuns(
                    label,
                    rows,
                    measure,
                    measure.margin if margin is None else margin,
                    plans,
                    *(_begun(results, candidates, confirm=confirm) for confirm in (False, True)),
                )
            )
    return sorted(comparable, key=lambda context: context.label)


def _rows(results: Results, runs: pd.DataFrame, measure: Measure, predictions: Mapping[str, int]) -> pd.DataFrame:
    numbered, unnumbered = list[dict[str, Any]](), list[dict[str, Any]]()
    name = measure.name
    for run in runs["run"]:
        row = results.rows[run]
        values = {f"{name}_{mode}": _number(row.get(f"final_{name}_{mode}")) for mode in MODES}
        chance = _number(row.get(f"chance_{name}"))
        if row["status"] == "diverged":
            untrained, reason = _untrained(results, run, measure, chance)
            results.complain(f"The run {run} diverged, and counts as untrained: {reason}.")
            values = dict.fromkeys(values, untrained)
        evaluated = run in predictions or row["status"] == "diverged"
        if not evaluated and all(math.isnan(value) for value in values.values()):
            results.complain(f"The run {run} has no final evaluation, and is not compared.")
            continue
        if lacks := math.isnan(values[f"{name}_on"]):
            results.complain(f"The run {run} has no number as its final {name} with compression on, and is not judged.")
        (unnumbered if lacks else numbered).append(
            {
                "run": run,
                "setting": Setting.of(row),
                "seed": int(row["seed"]),
                **values,
                f"chance_{name}": chance,
                "predictions": predictions.get(run, math.nan),
                "study": None if is_missing(row["study"]) else str(row["study"]),
                "confirms": is_confirmation(results.path(run)),
                "data": None if is_missing(row.get("data_digest")) else str(row["data_digest"]),
                "diverged": row["status"] == "diverged",
            }
        )
    return pd.DataFrame(numbered + unnumbered)


def _begun(results: Results, runs: pd.DataFrame, *, confirm: bool) -> frozenset[Setting]:
    """Return the compressed settings of the runs that confirm a choice, or of the others."""
    settings = {Setting.of(results.rows[run]) for run in runs["run"] if is_confirmation(results.path(run)) is confirm}
    return frozenset(settings) - {Setting()}


def _fewest(evals: pd.DataFrame, column: str) -> dict[str, int]:
    """Return the minimum number of predictions, or of samples judged as a whole, in each run's evaluations."""
    fewest = evals[["run", column]].dropna().groupby("run", observed=True)[column].min()
    return {str(run): int(count) for run, count in fewest.items()}


def _untrained(results: Results, run: str, measure: Measure, chance: float) -> tuple[float, str]:
    if measure.name == "loss":
        steps = results.select([run]).table("steps", ["step", "loss"]).sort_values("step")
        first = float(steps["loss"].iloc[0]) if len(steps) else math.nan
        return float(np.fmax(first, chance)), "the loss of its first step, or by chance if that is more"
    if measure.counted:
        return 0.0, f"{measure.name} 0"
    return chance, f"the {measure.name} by chance"


def same_data(run: pd.Series[Any], other: pd.Series[Any]) -> bool:
    """Return whether two runs have the same samples, as far as their records say."""
    own, its = run.get("data"), other.get("data")
    return is_missing(own) or is_missing(its) or own == its


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _label(row: pd.Series[Any], runs: pd.DataFrame, keys: Iterable[str]) -> str:
    """Return the label of a run: its model, its data, and the keys in which other runs of both differ."""
    names = [key for key in ("model", "data") if key in runs]
    alike = runs[(runs[names] == row[names]).all(axis=1)]
    telling = [key for key in differing(alike, keys) if key not in COMPRESSION]
    parts = [f"{key}={as_text(row[key])}" for key in telling if not is_missing(row[key])]
    values = {str(key): value for key, value in row.items()}
    return ", ".join([" on ".join(model_of(values) if name == "model" else str(row[name]) for name in names), *parts])


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
