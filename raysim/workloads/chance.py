"""The quality that a model reaches by chance: of outputs that are the same for every sample, the best that training shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from raysim.on_demand import torch
from raysim.workloads.losses import IGNORED, CrossEntropy, OwnLoss
from raysim.workloads.metrics import F1, Accuracy, Metric, OwnMetric, Sums
from raysim.workloads.splits import Data, Split
from raysim.workloads.task import Task

if TYPE_CHECKING:
    from torch import Tensor

_AT_ONCE = 65_536  # targets that are read at once


def chance(data: Data, task: Task) -> dict[str, float]:
    """Return the figures of an evaluation, by name, of a model that knows nothing but the targets of training.

    It gives each class the frequency that it has in training, or predicts the mean. A class that does not occur in training
    counts as seen once, so that the loss stays finite. Metrics of your own are asked for batches of such outputs; where one,
    or a loss of your own, cannot be worked out like this, the figure is not a number.
    """
    if data.shape.classifies:
        return _of_classes(data, task)
    return _of_numbers(data, task)


def _of_classes(data: Data, task: Task) -> dict[str, float]:
    trained, tested = (_count(split, data.shape.num_classes) for split in (data.train, data.test))
    seen = np.maximum(trained, 1)
    logs = np.log(seen / seen.sum())
    found = {}
    constant = torch.from_numpy(logs).float()
    if isinstance(task.loss, CrossEntropy):
        found["loss"] = float(-(tested @ logs) / tested.sum())
        found["perplexity"] = math.exp(found["loss"])
    else:
        found["loss"] = _mean_loss(data, task, constant)
    for metric in task.metrics:
        if isinstance(metric, Accuracy):
            found[metric.measure.name] = _share(trained, tested, metric.top)
        elif isinstance(metric, F1):
            found[metric.measure.name] = _f1(trained, tested)
        else:
            found[metric.measure.name] = _mean_metric(metric, data, constant)
    return found


def _share(trained: np.ndarray, tested: np.ndarray, top: int) -> float:
    """Return the share of test targets that are among the `top` most frequent classes of training."""
    best = np.argsort(-trained, kind="stable")[:top]
    return float(tested[best].sum() / tested.sum())


def _f1(trained: np.ndarray, tested: np.ndarray) -> float:
    """Return the F1 score, see `F1`, of predicting the most frequent class of training every time."""
    predicted = int(trained.argmax())
    precision = tested[predicted] / tested.sum()
    score = float(2 * precision / (1 + precision))
    if len(tested) == 2:
        return score if predicted == 1 else 0.0
    occurring = np.union1d(np.flatnonzero(tested), [predicted])
    return score / len(occurring)


def _of_numbers(data: Data, task: Task) -> dict[str, float]:
    width = data.shape.num_classes
    number, total = 0, np.zeros(width)
    for targets in _targets(data.train):
        rows = targets.reshape(-1, width)
        number, total = number + len(rows), total + rows.sum(axis=0, dtype=np.float64)
    constant = torch.from_numpy(total / number).float()
    found = {"loss": _mean_loss(data, task, constant)}
    return found | {metric.measure.name: _mean_metric(metric, data, constant) for metric in task.metrics}


def _mean_loss(data: Data, task: Task, constant: Tensor) -> float:
    """Return the loss of constant outputs."""
    total, weight = 0.0, 0
    try:
        for outputs, targets in _batches(data, constant):
            total, weight = total + float(task.loss.evaluate(outputs, targets)) * len(targets), weight + len(targets)
    except Exception:
        if not isinstance(task.loss, OwnLoss):
            raise
        return math.nan
    return total / weight


def _mean_metric(metric: Metric, data: Data, constant: Tensor) -> float:
    """Return a metric of constant outputs."""
    total: Sums = np.zeros(metric.size)
    try:
        for outputs, targets in _batches(data, constant):
            total = total + np.array(metric.sums(outputs, targets))
    except Exception:
        if not isinstance(metric, OwnMetric):
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
    """Yield the targets of a split, some samples at a time."""
    if not len(split):
        return
    each = max(1, split.targets(np.zeros(1, np.int64)).numel())
    size = max(1, _AT_ONCE // each)
    for start in range(0, len(split), size):
        yield split.targets(np.arange(start, min(start + size, len(split)), dtype=np.int64)).numpy()
