"""Metrics, computed from sums over the batches of an evaluation.

Sums are additive, so batches may be of any size. Positions whose target is -100 are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from raysim.on_demand import torch
from raysim.quality import MEASURES, Measure
from raysim.workloads.losses import IGNORED
from raysim.workloads.options import import_function, reason_of
from raysim.workloads.splits import DataShape, Split

if TYPE_CHECKING:
    from torch import Tensor

Sums = NDArray[np.float64]


@dataclass(frozen=True)
class Metric:
    """A metric: `sums` are added over batches, and `value` computes the metric from the totals.

    By default a mean, whose sums are a total and a count.
    """

    measure: Measure

    @property
    def size(self) -> int:
        """The number of sums."""
        return 2

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[float]:
        """Return the contribution of a batch to the sums, `size` numbers."""
        raise NotImplementedError

    def value(self, sums: Sums) -> float:
        """Return the metric; NaN if nothing was counted."""
        return float(sums[0] / sums[1]) if sums[1] else math.nan


@dataclass(frozen=True)
class Accuracy(Metric):
    """The share of targets (classes or tokens) among the `top` highest scores."""

    top: int = 1

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[float]:
        if self.top == 1:
            right = outputs.argmax(dim=-1) == targets
        else:
            best = outputs.topk(min(self.top, outputs.shape[-1]), dim=-1).indices
            right = (best == targets.unsqueeze(-1)).any(dim=-1)
        return int(right.sum()), count(targets)


@dataclass(frozen=True)
class ExactMatch(Metric):
    """The share of samples with a fully correct greedily generated answer.

    Evaluations generate the answers, see `raysim.pipeline.inference`, except the first `given` targets and targets of -100.
    """

    given: int = 0

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[float]:
        """Return the sums for constant outputs, which always generate the token with the highest score."""
        return self.matches(outputs.argmax(dim=-1), targets)

    def matches(self, generated: Tensor, targets: Tensor) -> Sequence[float]:
        """Return the number of right answers and the number of answers; both tensors have shape (batch, length)."""
        counted = targets != IGNORED
        counted[:, : self.given] = False
        answered = counted.any(dim=1)
        right = ((generated == targets) | ~counted).all(dim=1)
        return int((right & answered).sum()), int(answered.sum())


@dataclass(frozen=True)
class F1(Metric):
    """F1 score, the harmonic mean of precision and recall: of class 1 if there are two classes, else averaged over classes.

    Classes that occur neither among targets nor among predictions are left out of the average.
    """

    num_classes: int

    @property
    def size(self) -> int:
        return 3 * self.num_classes

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[float]:
        counted = targets != IGNORED
        predicted, wanted = outputs.argmax(dim=-1)[counted], targets[counted]
        counts = [
            torch.bincount(classes, minlength=self.num_classes)[: self.num_classes]
            for classes in (wanted[predicted == wanted], predicted, wanted)
        ]
        return torch.cat(counts).tolist()

    def value(self, sums: Sums) -> float:
        right, predicted, wanted = sums.reshape(3, self.num_classes)
        occurring = predicted + wanted
        scores = np.divide(2 * right, occurring, out=np.zeros_like(right), where=occurring > 0)
        if self.num_classes == 2:
            return float(scores[1])
        return float(scores[occurring > 0].mean()) if occurring.any() else math.nan


@dataclass(frozen=True)
class MeanAbsoluteError(Metric):
    """Mean absolute error in the units of the data: the error of each output is multiplied by its entry of `scale`."""

    scale: tuple[float, ...] = ()

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[float]:
        differences = (outputs.double() - targets.double()).abs()
        if self.scale:
            differences = differences * torch.tensor(self.scale, dtype=torch.float64, device=differences.device)
        return float(differences.sum()), targets.numel()


@dataclass(frozen=True)
class R2(Metric):
    """Coefficient of determination, averaged over `num_outputs`: 0 for a model that predicts the mean."""

    num_outputs: int

    @property
    def size(self) -> int:
        return 1 + 3 * self.num_outputs

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[float]:
        wanted = targets.double().reshape(-1, self.num_outputs)
        errors = (outputs.double().reshape(-1, self.num_outputs) - wanted).square().sum(0)
        return [len(wanted), *torch.cat([wanted.sum(0), wanted.square().sum(0), errors]).tolist()]

    def value(self, sums: Sums) -> float:
        number, (total, squares, errors) = sums[0], sums[1:].reshape(3, self.num_outputs)
        if not number:
            return math.nan
        spread = squares - total**2 / number
        known = spread > 0
        return float((1 - errors[known] / spread[known]).mean()) if known.any() else math.nan


@dataclass(frozen=True)
class OwnMetric(Metric):
    """A user's function from outputs and targets to a mean over samples; evaluations average it over all samples."""

    function: Callable[[Tensor, Tensor], Any]

    def sums(self, outputs: Tensor, targets: Tensor) -> Sequence[float]:
        return float(self.function(outputs, targets)) * len(targets), len(targets)


def own_metric(name: str) -> OwnMetric:
    """Return the metric `package.module:function`; raises ValueError if it does not exist or does not declare if higher is better."""
    function = import_function("Metric", name)
    higher = getattr(function, "higher_is_better", None)
    own = name.rpartition(":")[2]
    if not isinstance(higher, bool):
        raise ValueError(
            f"Metric `{name}` must say whether more is better: set `{own}.higher_is_better` to True or False."
        )
    return OwnMetric(Measure(own, higher), function)


def make_metric(name: str, shape: DataShape) -> Metric:
    """Return the metric `name`, one of `METRICS` or `package.module:function`; raises ValueError if it does not fit the data."""
    if ":" in name:
        return own_metric(name)
    classes, make = _METRICS[name]
    if name == "exact_match" and not (shape.classifies and shape.target_shape and (shape.has_ignored or shape.given)):
        raise ValueError(
            "`metrics` can have 'exact_match' only if the targets are tokens, those of the prompt -100: set `data` to "
            "'addition', 'brackets' or 'copying', or to a function of your own with such targets."
        )
    if classes != shape.classifies:
        held = "classes" if shape.classifies else "numbers"
        fitting = [
            other for other, (of_classes, _) in _METRICS.items() if of_classes != classes and other != "exact_match"
        ]
        raise ValueError(
            f"`metrics` cannot be {name!r} with targets that are {held}. For such targets: {', '.join(fitting)}."
        )
    return make(MEASURES[name], shape)


def check_metrics(metrics: Sequence[Metric], output_shape: tuple[int, ...], test: Split) -> None:
    """Raise ValueError naming a custom metric that fails on zero outputs and the first targets of the test data.

    The first dimension of `output_shape` is the microbatch.
    """
    own = [metric for metric in metrics if isinstance(metric, OwnMetric)]
    if not own:
        return
    targets = test.targets(np.arange(min(output_shape[0], len(test))))
    outputs = torch.zeros((len(targets), *output_shape[1:]))
    for metric in own:
        try:
            metric.sums(outputs, targets)
        except Exception as error:
            reason = reason_of(error)
            raise ValueError(
                f"Metric `{metric.measure.name}` must return one number, but failed on outputs of shape {tuple(outputs.shape)} "
                f"and targets of shape {tuple(targets.shape)}: {reason}."
            ) from error


def count(targets: Tensor) -> int:
    """Return the number of predictions: one per target that is not ignored."""
    return targets.numel() if targets.is_floating_point() else int((targets != IGNORED).sum())


_METRICS: dict[str, tuple[bool, Callable[[Measure, DataShape], Metric]]] = {  # by name: for classes?, constructor
    "accuracy": (True, lambda measure, shape: Accuracy(measure)),
    "top5_accuracy": (True, lambda measure, shape: Accuracy(measure, 5)),
    "exact_match": (True, lambda measure, shape: ExactMatch(measure, shape.given)),
    "f1": (True, lambda measure, shape: F1(measure, shape.num_classes)),
    "mae": (False, lambda measure, shape: MeanAbsoluteError(measure, shape.target_scale)),
    "r2": (False, lambda measure, shape: R2(measure, shape.num_classes)),
}
METRICS = tuple(_METRICS)
