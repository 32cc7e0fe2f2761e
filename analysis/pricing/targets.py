"""A quality to reach, and the first evaluation of a run that reaches it."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

from raysim.analysis.data import ReplayError
from raysim.quality import MEASURES

if TYPE_CHECKING:
    import pandas as pd

    from raysim.analysis.data.recording import Recording

MODES = ("on", "off")


class Target(NamedTuple):
    """A quality to reach: a measure of `evals.parquet`, and its value."""

    metric: str
    value: float
    higher: bool | None = None
    """True if values above `value` reach it; None to look up a measure that raysim knows by name."""

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.from_below else '<='} {self.value:g}"

    @property
    def from_below(self) -> bool:
        """True if values above `value` reach the target."""
        return MEASURES[self.metric].higher if self.higher is None else self.higher

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse a target: "loss=0.5" or "accuracy=0.9"; with a metric of your own "dice>=0.8" or "error<=0.1".

        >>> print(Target.parse("accuracy=0.9"))
        accuracy >= 0.9
        """
        parts = re.fullmatch(r"\s*(\w+)\s*(>=|<=|=)\s*(\S+)\s*", text)
        try:
            number = float(parts[3]) if parts else math.nan
        except ValueError:
            number = math.nan
        if parts is None or not math.isfinite(number) or (parts[2] == "=" and parts[1] not in MEASURES):
            known = ", ".join(f"{name}=" for name in MEASURES)
            raise ReplayError(
                f"`target` must be a measure and a number, as in 'accuracy=0.9' ({known}; of your own 'name>=' or 'name<='), "
                f"but got {text!r}."
            )
        return cls(parts[1], number, None if parts[2] == "=" else parts[2] == ">=")

    def reached(self, values: pd.Series[float]) -> pd.Series[bool]:
        """Return for each value whether it reaches the target."""
        return values >= self.value if self.from_below else values <= self.value


def steps_to_target(recording: Recording, target: Target) -> dict[str, int | None]:
    """Return the steps to the first evaluation that reached `target`, by mode: links "on" and "off"; None if none did.

    The resolution is `evaluate_every_steps`, the interval between evaluations.
    """
    run = recording.run
    evals = recording.evals[recording.evals["batchnorm"] == "running"]
    if not len(evals):
        raise ReplayError(
            f"The run in {run.folder} has no evaluations to find {target} in: it is {recording.row.get('status')}."
        )
    if target.metric not in evals or evals[target.metric].isna().all():
        raise ReplayError(
            f"The run in {run.folder} does not measure {target.metric}. It has {', '.join(run.measures)}."
        )
    steps: dict[str, int | None] = {}
    for mode in MODES:
        rows = evals[evals["mode"] == mode].sort_values("step")
        reached = rows[target.reached(rows[target.metric])]
        steps[mode] = int(reached["step"].iloc[0]) if len(reached) else None
    return steps


def best_value(recording: Recording, target: Target, mode: str) -> float:
    """Return the best evaluated value of the target's measure, with compression `mode`: "on" or "off"."""
    rows = recording.evals
    values = rows[(rows["batchnorm"] == "running") & (rows["mode"] == mode)][target.metric]
    return float(values.max() if target.from_below else values.min())
