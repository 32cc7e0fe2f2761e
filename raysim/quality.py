"""Measures of quality by name: whether more is better, how a difference is expressed, and which difference does no harm.

The names are the columns of `evals.parquet`. How each is computed is the business of `raysim.workloads.metrics`; this
module needs nothing but Python, so that records are read where torch is not installed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

LOSSES = ("cross_entropy", "mse")
"""Losses by name; others are written `package.module:function`."""


class Measure(NamedTuple):
    """A measure of quality.

    `points` says that 1 is perfect and that differences are given in points (hundredths): an accuracy, an F1 score, R2.
    Differences of other measures are given in per cent of the value that they are compared with.
    """

    name: str
    higher: bool
    """True if more is better."""
    points: bool = False
    counted: bool = False
    """True if it is a share of predictions, so that its resolution is one prediction."""
    whole: bool = False
    """True if it is a share of samples instead: each is right as a whole, or not."""

    @property
    def margin(self) -> float:
        """The harm that counts as none: half a point, or one per cent."""
        return 0.5 if self.points else 1.0

    @property
    def unit(self) -> str:
        """The unit of harm."""
        return f"points of {self.name}" if self.points else f"% {'less' if self.higher else 'of'} {self.name}"

    def harm(self, value: float, reference: float) -> float:
        """Return how much worse `value` is than `reference`, in `unit`.

        >>> MEASURES["accuracy"].harm(0.75, 1.0), MEASURES["loss"].harm(1.5, 1.0)
        (25.0, 50.0)
        """
        if self.points:
            return 100 * (reference - value if self.higher else value - reference)
        if not reference > 0:
            return math.nan
        return 100 * (1 - value / reference if self.higher else value / reference - 1)

    def skill(self, value: float, chance: float) -> float:
        """Return how far `value` lies above chance: per cent of the way from chance to perfection.

        Where perfection has no number, per cent by which chance is exceeded.

        >>> MEASURES["accuracy"].skill(0.75, 0.5), MEASURES["loss"].skill(2.3, 2.3)
        (50.0, 0.0)
        """
        if self.points and self.higher:
            return 100 * (value - chance) / (1 - chance)
        if self.higher:
            return 100 * (value / chance - 1) if chance > 0 else math.nan
        return 100 * (1 - value / chance) if chance > 0 else math.nan

    @property
    def worst(self) -> float | None:
        """The value of a model that has learned nothing and diverged, None if the measure has none."""
        return 0.0 if self.points and self.higher else None


MEASURES: dict[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure("loss", higher=False),
        Measure("perplexity", higher=False),
        Measure("accuracy", higher=True, points=True, counted=True),
        Measure("top5_accuracy", higher=True, points=True, counted=True),
        Measure("exact_match", higher=True, points=True, counted=True, whole=True),
        Measure("f1", higher=True, points=True, counted=True),
        Measure("mae", higher=False),
        Measure("r2", higher=True, points=True),
    )
}


def write_measures(measures: Iterable[Measure]) -> str:
    """Return measures as `run.parquet` keeps them: JSON, the first of which judges settings.

    >>> write_measures([MEASURES["accuracy"]])
    '{"accuracy": {"higher": true, "points": true}}'
    """
    return json.dumps({measure.name: {"higher": measure.higher, "points": measure.points} for measure in measures})


def is_language(row: Mapping[Any, Any]) -> bool:
    """Return whether a run's model is one of language, which predicts the next token, from its row of `run.parquet`."""
    if str(row.get("data")) in ("text", "topics", "wikitext2"):
        return not isinstance(row.get("data.label"), str)
    return next(iter(_read(row.get("measures"))), None) in ("loss", "perplexity")


def measures_of(row: Mapping[Any, Any]) -> dict[str, Measure]:
    """Return the measures of a run, from its row of `run.parquet`, by name; the one by which settings are judged first.

    Rows of an older version, which do not name them, have a loss, a perplexity and an accuracy.
    """
    measures = _read(row.get("measures"))
    if measures:
        return measures
    names = ["loss", "perplexity", "accuracy"]
    return {name: MEASURES[name] for name in (names if is_language(row) else reversed(names))}


def _read(text: object) -> dict[str, Measure]:
    if not isinstance(text, str):
        return {}
    try:
        entries: Mapping[str, Mapping[str, bool]] = json.loads(text)
        return {
            name: MEASURES.get(name) or Measure(name, bool(entry["higher"]), bool(entry["points"]))
            for name, entry in entries.items()
            if name.isidentifier()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
