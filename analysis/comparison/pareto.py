"""The Pareto front of settings for any objectives, under constraints."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from raysim.analysis.data import AnalysisError
from raysim.analysis.data.studies import natural_direction
from raysim.quality import Measure, measures_of

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from numpy.typing import NDArray

PREFIXES = ("objective.", "constraint.", "param.")

_RELATIONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}


def frontier(
    frame: pd.DataFrame, objectives: Iterable[str] | Mapping[str, str], *, constraints: Iterable[str] = ()
) -> pd.DataFrame:
    """Return the rows that no other row dominates, sorted by the first objective.

    `objectives` are columns, each minimised or maximised by its name, or a mapping to "minimize" or "maximize".
    `constraints` are texts such as "loss_on <= 0.3". Trials that break a constraint of their study (`feasible` is false) are left
    out. Columns of trials may be named without their "objective." or "param.". Rows keep their index; a row that lacks an
    objective is left out, and equal rows are both kept. Raises AnalysisError if a column or constraint is not understood.
    """
    names = [objectives] if isinstance(objectives, str) else list(objectives)
    if not names:
        raise AnalysisError("`objectives` must name a column or more.")
    given = dict(objectives) if isinstance(objectives, Mapping) else {}
    allowed = frame
    if "feasible" in frame:
        allowed = frame[frame["feasible"].astype("boolean").fillna(True)]
    for constraint in constraints:
        allowed = allowed[_holds(allowed, constraint)]
    columns = [column_of(frame, name) for name in names]
    allowed = allowed.dropna(subset=columns)
    values = allowed[columns].to_numpy(float, copy=True)
    measures = _measures(frame)
    for i, name in enumerate(names):
        direction = given.get(name, natural_direction(name, measures))
        if direction not in ("minimize", "maximize"):
            raise AnalysisError(f"`objectives` must be to minimize or maximize, but {name!r} is to {direction!r}.")
        if direction == "maximize":
            values[:, i] *= -1
    kept = _unbeaten(values)
    return allowed[kept].iloc[_order(values[kept])]


def _measures(frame: pd.DataFrame) -> dict[str, Measure]:
    """Return the measures of the runs whose rows a frame has."""
    texts: list[str] = frame["measures"].dropna().unique().tolist() if "measures" in frame else []
    return {name: measure for text in texts for name, measure in measures_of({"measures": text}).items()}


def column_of(frame: pd.DataFrame, name: str) -> str:
    """Return the column of a name with or without its prefix; raises AnalysisError if there is none."""
    for column in (name, *(f"{prefix}{name}" for prefix in PREFIXES)):
        if column in frame:
            return column
    known = [str(column) for column in frame if str(column).startswith(PREFIXES)] or list(map(str, frame))
    raise AnalysisError(f"There is no column {name!r}. Known: {', '.join(known)}.")


def _holds(frame: pd.DataFrame, constraint: str) -> pd.Series[bool]:
    parts = re.fullmatch(r"\s*(.+?)\s*(<=|>=|==|<|>)\s*(\S+)\s*", constraint)
    try:
        limit = float(parts[3]) if parts else None
    except ValueError:
        limit = None
    if parts is None or limit is None:
        raise AnalysisError(
            f"A constraint is a column, a relation and a number, as in 'loss_on <= 0.3', but got {constraint!r}."
        )
    values = frame[column_of(frame, parts[1])].astype("Float64")
    held: pd.Series[bool] = _RELATIONS[parts[2]](values, limit).fillna(False).astype(bool)
    return held


def _unbeaten(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether each row is dominated by no other, if less of everything is better."""
    import numpy as np

    keep = np.ones(len(values), bool)
    for i, row in enumerate(values):
        if keep[i]:  # the rows below a dominated row are dominated by its dominator too
            keep &= ~((values >= row).all(axis=1) & (values > row).any(axis=1))
    return keep


def _order(values: NDArray[np.float64]) -> NDArray[np.intp]:
    import numpy as np

    return np.lexsort(values.T[::-1])
