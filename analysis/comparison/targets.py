"""A quality to reach, and where evaluations reach it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from analysis.data.errors import ReplayError

if TYPE_CHECKING:
    import pandas as pd

METRICS = {"loss": "<=", "perplexity": "<=", "accuracy": ">="}


class Target(NamedTuple):
    """A quality to reach: a metric of `evals.parquet`, and its value."""

    metric: str
    value: float

    def __str__(self) -> str:
        return f"{self.metric} {METRICS[self.metric]} {self.value:g}"

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return what `text` writes: "loss=0.5", "perplexity=20" or "accuracy=0.9".

        >>> print(Target.parse("accuracy=0.9"))
        accuracy >= 0.9
        """
        metric, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if metric.strip() not in METRICS or not math.isfinite(number):
            raise ReplayError(
                f"`target` must be loss=, perplexity= or accuracy= and a number, as in 'accuracy=0.9', but got {text!r}."
            )
        return cls(metric.strip(), number)

    def reached(self, values: pd.Series[float]) -> pd.Series[bool]:
        """Return where it is reached: at most the value for a loss or a perplexity, at least for an accuracy."""
        return values >= self.value if METRICS[self.metric] == ">=" else values <= self.value
