"""Objectives of trials: their Pareto front, and the importance of each parameter for each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysim.analysis.data import AnalysisError
from raysim.analysis.data.folders import natural_direction
from raysim.analysis.runs.results import Results
from raysim.config.identity import plain
from raysim.quality import Measure, measures_of

if TYPE_CHECKING:
    import optuna

PREFIXES = ("objective.", "constraint.", "param.")


def frontier(frame: pd.DataFrame, objectives: Iterable[str] | Mapping[str, str]) -> pd.DataFrame:
    """Return the rows that no other row dominates, sorted by the first objective.

    `objectives` are columns, each minimised or maximised by its name, or a mapping to "minimize" or "maximize".
    Trials that break a constraint of their study (`feasible` is false) are left out. Columns of trials may be named without their
    "objective." or "param.". Rows keep their index; a row that lacks an objective is left out, and equal rows are both kept.
    Raises AnalysisError if a column is unknown, or the direction of your own measure.
    """
    names = [objectives] if isinstance(objectives, str) else list(objectives)
    if not names:
        raise AnalysisError("`objectives` must name at least one column.")
    given = dict(objectives) if isinstance(objectives, Mapping) else {}
    allowed = frame
    if "feasible" in frame:
        allowed = frame[frame["feasible"].astype("boolean").fillna(True)]
    columns = [column_of(frame, name) for name in names]
    allowed = allowed.dropna(subset=columns)
    values = allowed[columns].to_numpy(float, copy=True)
    measures = _measures(frame)
    for i, (name, column) in enumerate(zip(names, columns, strict=True)):
        direction = given.get(name) or natural_direction(column, measures)
        if direction not in ("minimize", "maximize"):
            raise AnalysisError(
                f"`objectives` must have the direction 'minimize' or 'maximize', but {name!r} has {direction!r}."
            )
        if direction == "maximize":
            values[:, i] *= -1
    kept = _unbeaten(values)
    return allowed[kept].iloc[np.lexsort(values[kept].T[::-1])]


def _measures(frame: pd.DataFrame) -> dict[str, Measure]:
    texts: list[str] = frame["measures"].dropna().unique().tolist() if "measures" in frame else []
    return {name: measure for text in texts for name, measure in measures_of({"measures": text}).items()}


def column_of(frame: pd.DataFrame, name: str) -> str:
    """Return the column of a name with or without its prefix; raises AnalysisError if there is none."""
    for column in (name, *(f"{prefix}{name}" for prefix in PREFIXES)):
        if column in frame:
            return column
    known = [str(column) for column in frame if str(column).startswith(PREFIXES)] or list(map(str, frame))
    raise AnalysisError(f"There is no column {name!r}. Known: {', '.join(known)}.")


def _unbeaten(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return a mask of the rows dominated by no other, if less is better in every column."""
    keep = np.ones(len(values), bool)
    for i, row in enumerate(values):
        if keep[i]:  # the rows below a dominated row are dominated by its dominator too
            keep &= ~((values >= row).all(axis=1) & (values > row).any(axis=1))
    return keep


MIN_TRIALS = 4  # with fewer, trees learn nothing


def importance(of: Results | pd.DataFrame, objectives: Iterable[str] | None = None, *, seed: int = 0) -> pd.DataFrame:
    """Return the importance of each parameter for each objective: the share of the objective's variance due to the parameter.

    `of` is a result of `load` or a frame of trials. Importances of an objective sum to 1 over the parameters that all trials have. A
    parameter that only some trials have (such as a density, if others quantise) is judged over these trials, beside the parameters
    that all have: the column `trials` is their number, and `conditional` marks such parameters. Trials without the objective,
    baselines, and trials that share another's results are left out. Raises AnalysisError if an objective is unknown. Source: Optuna's
    fANOVA; Hutter, Hoos, Leyton-Brown 2014, "An efficient approach for assessing hyperparameter importance".
    """
    trials = _trials(of)
    wanted = None if objectives is None else list(objectives)
    rows = []
    for study, of_study in trials.groupby("folder" if "folder" in trials else "study", sort=True):
        names = [str(name) for name in of_study if str(name).startswith("objective.")] if wanted is None else wanted
        for objective in names:
            column = column_of(of_study, objective)
            rows += [{"study": study, **row} for row in _of_objective(of_study, column, seed)]
    return pd.DataFrame(rows, columns=["study", "objective", "parameter", "importance", "trials", "conditional"])


def _trials(of: Results | pd.DataFrame) -> pd.DataFrame:
    frame = of.trials if isinstance(of, Results) else of
    if "baseline" in frame:
        frame = frame[~frame["baseline"].fillna(False).astype(bool)]
    if "same_as" in frame:
        frame = frame[frame["same_as"].isna()]
    return frame if {"folder", "study"} & set(frame) else frame.assign(study="study")


def _of_objective(trials: pd.DataFrame, objective: str, seed: int) -> list[dict[str, Any]]:
    known = trials[[math.isfinite(value) for value in trials[objective].astype("float64")]]
    params = [str(n) for n in known if str(n).startswith("param.") and known[n].nunique() > 1]
    common = [name for name in params if known[name].notna().all()]
    rows = _rows(known, objective, common, common, seed)
    for name in params:
        if name not in common:
            with_it = known[known[name].notna()]
            others = [other for other in common if with_it[other].nunique() > 1]
            rows += _rows(with_it, objective, [*others, name], [name], seed)
    return rows


def _rows(
    trials: pd.DataFrame, objective: str, params: list[str], wanted: list[str], seed: int
) -> list[dict[str, Any]]:
    """Return Optuna's importances of `params` over trials that have them all, for the `wanted` parameters."""
    if not params or len(trials) < MIN_TRIALS or trials[objective].nunique() < 2:
        return []
    import optuna

    study = _new_study()
    distributions = {name: _distribution(trials[name], optuna) for name in params}
    for i in range(len(trials)):
        row = trials.iloc[i]
        study.add_trial(
            optuna.trial.create_trial(
                params={name: plain(row[name]) for name in params},
                distributions=distributions,
                value=float(row[objective]),
            )
        )
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=seed)
    importances = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return [
        {
            "objective": objective.removeprefix("objective."),
            "parameter": name.removeprefix("param."),
            "importance": importances[name],
            "trials": len(trials),
            "conditional": wanted != params,
        }
        for name in wanted
    ]


def _new_study() -> optuna.Study:
    """Return an empty study in memory, without Optuna's log line about it."""
    import optuna

    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study()
    finally:
        optuna.logging.set_verbosity(before)


def _distribution(values: pd.Series[Any], optuna: Any) -> Any:
    """Return the tried range of a parameter: numbers over their span, on a logarithmic scale if it is wide."""
    distributions = optuna.distributions
    if not pd.api.types.is_numeric_dtype(values) or pd.api.types.is_bool_dtype(values):
        return distributions.CategoricalDistribution(sorted({plain(value) for value in values}, key=repr))
    low, high = plain(values.min()), plain(values.max())
    log = bool(low > 0 and high / low >= 30)
    if pd.api.types.is_integer_dtype(values):
        return distributions.IntDistribution(low, high, log=log)
    return distributions.FloatDistribution(float(low), float(high), log=log)
