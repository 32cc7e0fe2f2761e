"""The task of a run: the loss that training follows, and the metrics of its evaluations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raysim.quality import MEASURES, Measure
from raysim.workloads.losses import CrossEntropy, Loss, make_loss
from raysim.workloads.metrics import Metric, count, make_metric
from raysim.workloads.splits import DataShape

if TYPE_CHECKING:
    from torch import Tensor

_MOST_EXPONENT = 700.0  # of a perplexity that a float64 holds


@dataclass(frozen=True)
class Task:
    """A loss, and metrics measured beside it at evaluations; the first of `measures` is the one that settings are judged by."""

    loss: Loss
    metrics: tuple[Metric, ...]
    judged_by: str
    has_ignored: bool = False
    """True if some targets may be ignored, so that microbatches are weighted by the number of targets that count."""

    @property
    def measures(self) -> tuple[Measure, ...]:
        """Figures of an evaluation, the measure by which settings are judged first."""
        found = [MEASURES["loss"], *([MEASURES["perplexity"]] if self._has_perplexity else [])]
        found += [metric.measure for metric in self.metrics]
        return tuple(sorted(found, key=lambda measure: measure.name != self.judged_by))

    @property
    def _has_perplexity(self) -> bool:
        return isinstance(self.loss, CrossEntropy)

    def sums(self, outputs: Tensor, targets: Tensor) -> tuple[float, ...]:
        """Return a batch's part of an evaluation: loss times weight, weight, predictions, and the sums of all metrics.

        The weight is the number of samples, of which positions that do not count are taken away in their share.
        """
        predictions = count(targets)
        weight = predictions * len(targets) / targets.numel() if targets.numel() else 0.0
        loss = float(self.loss.evaluate(outputs, targets)) * weight if weight else 0.0
        parts = [part for metric in self.metrics for part in metric.sums(outputs, targets)]
        return (loss, float(weight), float(predictions), *map(float, parts))

    def results(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the figures of an evaluation by name, from the sums over its batches, and the number of `predictions`."""
        loss = sums[0] / sums[1] if sums[1] else math.nan
        found: dict[str, float] = {"loss": loss, "predictions": int(sums[2])}
        if self._has_perplexity:
            found["perplexity"] = math.exp(min(loss, _MOST_EXPONENT))
        place = 3
        for metric in self.metrics:
            found[metric.measure.name] = metric.value(np.array(sums[place : place + metric.size], np.float64))
            place += metric.size
        return found


def make_task(loss: str | None, options: Mapping[str, object], metrics: Sequence[str] | None, shape: DataShape) -> Task:
    """Return the task of a run: `loss` and `metrics` by name or import path, with defaults for the kind of targets.

    Settings are judged by the first of `metrics`. The default is accuracy for classes, the loss for tokens, and R2 for numbers.
    Raises ValueError for an unknown or unfit loss or metric.
    """
    found = make_loss(loss, options, shape)
    if metrics is None:
        metrics = ("accuracy",) if shape.classifies else ("r2", "mae")
        judged_by = "loss" if shape.classifies and shape.target_shape else metrics[0]
    else:
        judged_by = metrics[0].rpartition(":")[2]
    known = {"loss", "perplexity"} if isinstance(found, CrossEntropy) else {"loss"}
    if "perplexity" in metrics and "perplexity" not in known:
        raise ValueError("`metrics` can have 'perplexity' only with `loss` = 'cross_entropy'.")
    made = tuple(make_metric(name, shape) for name in metrics if name not in known)
    names = [metric.measure.name for metric in made]
    for name in names:
        if names.count(name) > 1 or name in {*MEASURES, "predictions", "seconds", "step", "mode", "batchnorm"} - set(
            metrics
        ):
            raise ValueError(f"`metrics` must have names of their own, but {name!r} is there already.")
    return Task(found, made, judged_by, shape.has_ignored and isinstance(found, CrossEntropy))
