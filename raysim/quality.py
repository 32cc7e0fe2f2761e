"""Measures of quality by name: their direction, the unit of a difference, and the tolerated harm.

The names are the columns of `evals.parquet`. `raysim.workloads.metrics` computes them; this
module needs only Python, so that records can be read without torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

LOSS_STEP = 100 * 2.0**-23  # per cent: losses are computed in float32
LOSSES = ("cross_entropy", "mse")
"""Losses by name; others are written `package.module:function`."""


class Measure(NamedTuple):
    """A measure of quality.

    `points`: 1 is perfect, and differences are given in points (hundredths), as for an accuracy, an F1 score, or R2.
    Differences of other measures are given in per cent of the reference value.
    """

    name: str
    higher: bool
    """True if higher is better."""
    points: bool = False
    counted: bool = False
    """True for a share of predictions, with a resolution of one prediction."""
    whole: bool = False
    """True for a share of samples instead: each is right or wrong as a whole."""

    @property
    def margin(self) -> float:
        """The tolerated harm: half a point, or one per cent."""
        return 0.5 if self.points else 1.0

    @property
    def unit(self) -> str:
        """The unit of harm."""
        return f"points of {self.name}" if self.points else f"% {'less' if self.higher else 'of'} {self.name}"

    def harm(self, value: float, reference: float) -> float:
        """Return how much worse `value` is than `reference`, in `unit`; NaN if it is `undefined`.

        >>> MEASURES["accuracy"].harm(0.75, 1.0), MEASURES["loss"].harm(1.5, 1.0)
        (25.0, 50.0)
        """
        if self.points:
            return 100 * (reference - value if self.higher else value - reference)
        if self.undefined(reference):
            return math.nan
        return 100 * (1 - value / reference if self.higher else value / reference - 1)

    def undefined(self, reference: float) -> str:
        """Return why there is no harm against `reference`, the value of dense; empty if there is.

        >>> MEASURES["loss"].undefined(-1.5)
        'dense has a loss of -1.5, and harm is a share of it, which must be above 0: judge by another measure, or shift this one'
        >>> MEASURES["accuracy"].undefined(0.0), MEASURES["loss"].undefined(0.1)
        ('', '')
        """
        if self.points or not reference <= 0:
            return ""
        return (
            f"dense has a {self.name} of {reference:.3g}, and harm is a share of it, which must be above 0: judge by another measure, "
            "or shift this one"
        )

    def harmed(self, reference: float, harm: float) -> float:
        """Return the value that is `harm`, in `unit`, worse than `reference`.

        >>> MEASURES["accuracy"].harmed(1.0, 25.0), MEASURES["loss"].harmed(1.0, 50.0)
        (0.75, 1.5)
        """
        lost = harm / 100 if self.points else harm / 100 * reference
        return reference - lost if self.higher else reference + lost

    def skill(self, value: float, chance: float) -> float:
        """Return how far `value` is above chance, in per cent of the distance from chance to perfection.

        For a measure without a perfect value, return the excess over chance in per cent.

        >>> MEASURES["accuracy"].skill(0.75, 0.5), MEASURES["loss"].skill(2.3, 2.3)
        (50.0, 0.0)
        """
        if self.points and self.higher:
            return 100 * (value - chance) / (1 - chance)
        if self.higher:
            return 100 * (value / chance - 1) if chance > 0 else math.nan
        return 100 * (1 - value / chance) if chance > 0 else math.nan

    def step(self, count: float) -> float:
        """Return the smallest difference, in `unit`, that `count` predictions, or samples if `whole`, can show; NaN if it is unknown.

        >>> MEASURES["accuracy"].step(200), MEASURES["accuracy"].step(math.nan)
        (0.5, nan)
        """
        if not self.counted:
            return LOSS_STEP
        return 100 / count if count > 0 else math.nan

    @property
    def worst(self) -> float | None:
        """The value assigned to a diverged model, or None if the measure has no worst value."""
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
    """Write measures as JSON for `run.parquet`; the first one judges settings.

    >>> write_measures([MEASURES["accuracy"]])
    '{"accuracy": {"higher": true, "points": true}}'
    """
    return json.dumps({measure.name: {"higher": measure.higher, "points": measure.points} for measure in measures})


def is_language(row: Mapping[Any, Any]) -> bool:
    """Return whether a run, by its row of `run.parquet`, trains a language model (predicts the next token)."""
    if str(row.get("data")) in ("text", "topics", "wikitext2"):
        return not isinstance(row.get("data.label"), str)
    return next(iter(_read(row.get("measures"))), None) in ("loss", "perplexity")


def measures_of(row: Mapping[Any, Any]) -> dict[str, Measure]:
    """Return a run's measures by name from its row of `run.parquet`, starting with the one that judges settings.

    Older rows, which do not name their measures, have a loss, a perplexity and an accuracy.
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
