"""The task of a run: its training loss, its evaluation metrics, and the quality reached by chance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from raysim.notation import InputError
from raysim.on_demand import torch
from raysim.quality import MEASURES, Measure
from raysim.workloads.losses import IGNORED, CrossEntropy, Loss, OwnLoss, make_loss
from raysim.workloads.metrics import F1, Accuracy, ExactMatch, Metric, OwnMetric, Sums, count, make_metric
from raysim.workloads.splits import Data, DataShape, Split

if TYPE_CHECKING:
    from torch import Tensor

_MOST_EXPONENT = 700.0  # of a perplexity in float64


@dataclass(frozen=True)
class Task:
    """A loss and the evaluation metrics; settings are judged by the first of `measures`."""

    loss: Loss
    metrics: tuple[Metric, ...]
    judged_by: str
    has_ignored: bool = False  # whether microbatches are weighted by their number of targets that are not ignored

    @property
    def measures(self) -> tuple[Measure, ...]:
        """The measures of an evaluation; settings are judged by the first."""
        measures = [MEASURES["loss"], *([MEASURES["perplexity"]] if isinstance(self.loss, CrossEntropy) else [])]
        measures += [metric.measure for metric in self.metrics]
        return tuple(sorted(measures, key=lambda measure: measure.name != self.judged_by))

    def sums(self, outputs: Tensor, targets: Tensor, *, taught: bool = False) -> tuple[float, ...]:
        """Return a batch's sums for an evaluation: loss times weight, weight, predictions, and the sums of all metrics.

        The weight is the number of samples, reduced by the share of ignored positions. Sums of metrics on generated tokens are
        zero here, since `generated_sums` returns them; with `taught`, every token is generated after the right ones.
        """
        predictions = count(targets)
        weight = predictions * len(targets) / targets.numel() if targets.numel() else 0.0
        loss = float(self.loss.evaluate(outputs, targets)) * weight if weight else 0.0
        parts = (
            [0.0] * m.size if isinstance(m, ExactMatch) and not taught else m.sums(outputs, targets)
            for m in self.metrics
        )
        return (loss, float(weight), float(predictions), *map(float, chain.from_iterable(parts)))

    @property
    def generates(self) -> bool:
        """True if evaluations generate tokens."""
        return any(isinstance(metric, ExactMatch) for metric in self.metrics)

    def generated_sums(self, generated: Tensor, targets: Tensor) -> tuple[float, ...]:
        """Return a batch's sums that depend on generated tokens (batch, length), laid out as in `sums`."""
        parts = (m.matches(generated, targets) if isinstance(m, ExactMatch) else [0.0] * m.size for m in self.metrics)
        return (0.0, 0.0, 0.0, *map(float, chain.from_iterable(parts)))

    def results(self, sums: Sequence[float]) -> dict[str, float]:
        """Return the results of an evaluation by name, including the number of `predictions`, from the sums over its batches."""
        loss = sums[0] / sums[1] if sums[1] else math.nan
        figures: dict[str, float] = {"loss": loss, "predictions": int(sums[2])}
        if isinstance(self.loss, CrossEntropy):
            figures["perplexity"] = math.exp(min(loss, _MOST_EXPONENT))
        rest = iter(sums[3:])
        for metric in self.metrics:
            figures[metric.measure.name] = metric.value(np.array(list(islice(rest, metric.size)), np.float64))
        return figures


def make_task(loss: str | None, options: Mapping[str, object], metrics: Sequence[str] | None, shape: DataShape) -> Task:
    """Return the task of a run; `loss` and `metrics` are names or import paths, with defaults by the kind of targets.

    Settings are judged by the first of `metrics`; by default by accuracy for classes, the loss for tokens, and R2 for numbers.
    Raises ValueError for an unknown or unfit loss or metric.
    """
    made_loss = make_loss(loss, options, shape)
    if metrics is None:
        metrics = ("accuracy",) if shape.classifies else ("r2", "mae")
        judged_by = "loss" if shape.classifies and shape.target_shape else metrics[0]
    else:
        judged_by = metrics[0].rpartition(":")[2]
    of_loss = {"loss", "perplexity"} if isinstance(made_loss, CrossEntropy) else {"loss"}
    if "perplexity" in metrics and "perplexity" not in of_loss:
        raise ValueError("`metrics` can have 'perplexity' only with `loss` = 'cross_entropy'.")
    made = tuple(make_metric(name, shape) for name in metrics if name not in of_loss)
    names = [metric.measure.name for metric in made]
    taken = {*MEASURES, "predictions", "seconds", "step", "mode", "batchnorm"} - set(metrics)
    for name in names:
        if names.count(name) > 1 or name in taken:
            raise ValueError(f"`metrics` must have unique names, but {name!r} is already taken.")
    return Task(made_loss, made, judged_by, shape.has_ignored)


def answer_span(split: Split, given: int) -> tuple[int, int]:
    """Return the range (start, stop) of positions from `given` on with a target other than -100 in any sample."""
    counted = np.any([(targets != IGNORED).any(axis=0) for targets in _targets(split)], axis=0)
    positions = given + np.flatnonzero(counted[given:])
    if not len(positions):
        raise ValueError("`data` must have test targets other than -100.")
    return int(positions[0]), int(positions[-1]) + 1


_AT_ONCE = 65_536  # targets read at once


def chance(data: Data, task: Task) -> dict[str, float]:
    """Return the evaluation results, by name, of a model that knows only the training targets.

    It predicts the class frequencies or the mean of the training targets. A class absent from training counts as seen once,
    so that the loss stays finite. Custom metrics are evaluated on batches of these constant outputs. If a custom metric or
    loss cannot be evaluated in this way, its value is NaN. Raises InputError if no target of a split counts.
    """
    known, constant = _of_classes(data, task) if data.shape.classifies else ({}, _mean_target(data))
    if "loss" not in known:
        loss = OwnMetric(MEASURES["loss"], task.loss.evaluate)
        known["loss"] = _mean_metric(loss, data, constant, may_fail=isinstance(task.loss, OwnLoss))
    figures: dict[str, float] = {name: known[name] for name in ("loss", "perplexity") if name in known}
    for metric in task.metrics:
        name = metric.measure.name
        own = isinstance(metric, OwnMetric)
        figures[name] = known[name] if name in known else _mean_metric(metric, data, constant, may_fail=own)
    return figures


def _of_classes(data: Data, task: Task) -> tuple[dict[str, float], Tensor]:
    """Return the results that follow from class frequencies alone, and the constant outputs."""
    trained, tested = (_count(split, data.shape.num_classes) for split in (data.train, data.test))
    for name, counts in (("training", trained), ("test", tested)):
        if not counts.any():
            raise InputError(f"`data` must have {name} targets other than -100.")
    seen = np.maximum(trained, 1)
    logs = np.log(seen / seen.sum())
    known = {}
    if isinstance(task.loss, CrossEntropy):
        known["loss"] = float(-(tested @ logs) / tested.sum())
        known["perplexity"] = math.exp(known["loss"])
    ranked = np.argsort(-trained, kind="stable")
    for metric in task.metrics:
        if isinstance(metric, Accuracy):
            known[metric.measure.name] = float(tested[ranked[: metric.top]].sum() / tested.sum())
        elif isinstance(metric, F1):
            known[metric.measure.name] = _f1(int(ranked[0]), tested)
    return known, torch.from_numpy(logs).float()


def _f1(predicted: int, tested: NDArray[np.int64]) -> float:
    """Return the F1 score (see `F1`) of always predicting one class."""
    precision = tested[predicted] / tested.sum()
    score = float(2 * precision / (1 + precision))
    if len(tested) == 2:
        return score if predicted == 1 else 0.0
    return score / len(np.union1d(np.flatnonzero(tested), [predicted]))


def _mean_target(data: Data) -> Tensor:
    number, total = 0, np.zeros(data.shape.num_classes)
    for targets in _targets(data.train):
        rows = targets.reshape(-1, data.shape.num_classes)
        number, total = number + len(rows), total + rows.sum(axis=0, dtype=np.float64)
    return torch.from_numpy(total / number).float()


def _mean_metric(metric: Metric, data: Data, constant: Tensor, *, may_fail: bool) -> float:
    """Return the metric of constant outputs; NaN if it fails and may."""
    total: Sums = np.zeros(metric.size)
    try:
        for outputs, targets in _batches(data, constant):
            total = total + np.array(metric.sums(outputs, targets))
    except Exception:
        if not may_fail:
            raise
        return math.nan
    return metric.value(total)


def _batches(data: Data, constant: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield constant outputs, and the targets of the test split, batch by batch."""
    for targets in _targets(data.test):
        known = torch.from_numpy(targets)
        shape = known.shape if not data.shape.classifies else (*known.shape, len(constant))
        yield constant.expand(shape), known


def _count(split: Split, num_classes: int) -> np.ndarray:
    total = np.zeros(num_classes, np.int64)
    for targets in _targets(split):
        flat = targets.ravel()
        total += np.bincount(flat[flat != IGNORED], minlength=num_classes)
    return total


def _targets(split: Split) -> Iterator[np.ndarray]:
    """Yield the targets of a split in batches."""
    if not len(split):
        return
    each = max(1, split.targets(np.zeros(1, np.int64)).numel())
    size = max(1, _AT_ONCE // each)
    for start in range(0, len(split), size):
        yield split.targets(np.arange(start, min(start + size, len(split)), dtype=np.int64)).numpy()
