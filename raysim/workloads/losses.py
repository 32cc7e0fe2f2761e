"""Losses by name or by import path, each a mean over a batch."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from raysim.on_demand import torch
from raysim.workloads.options import bind_options, import_function, reason_of
from raysim.workloads.splits import DataShape

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100  # the target of an ignored position, as in torch and transformers


class Loss:
    """A training loss of outputs and targets."""

    def __call__(self, outputs: Tensor, targets: Tensor, divisor: float | None = None) -> Tensor:
        """Return the training loss of a microbatch: the mean, or with `divisor` the sum divided by it.

        Both are over the targets other than -100.
        """
        raise NotImplementedError

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss for evaluations."""
        return self(outputs, targets)


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Cross-entropy in float32, averaged over samples and positions; targets of -100 are ignored.

    `label_smoothing` affects only training: evaluations report the plain cross-entropy, so that runs with different
    smoothing are comparable.

    >>> CrossEntropy()(torch.zeros(2, 3, 10), torch.zeros(2, 3, dtype=torch.int64))
    tensor(2.3026)
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        smoothing = self.label_smoothing
        if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)) or not 0 <= smoothing < 1:
            raise ValueError(f"`loss.label_smoothing` must be in [0, 1), but got {smoothing!r}.")

    def __call__(self, outputs: Tensor, targets: Tensor, divisor: float | None = None) -> Tensor:
        if divisor is None:
            return _cross_entropy(outputs, targets, "mean", self.label_smoothing)
        return _cross_entropy(outputs, targets, "sum", self.label_smoothing) / divisor

    def evaluate(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _cross_entropy(outputs, targets, "mean")


def _cross_entropy(outputs: Tensor, targets: Tensor, reduction: str, smoothing: float = 0.0) -> Tensor:
    logits, flat = outputs.float().flatten(0, -2), targets.flatten()
    return torch.nn.functional.cross_entropy(
        logits, flat, ignore_index=IGNORED, reduction=reduction, label_smoothing=smoothing
    )


@dataclass(frozen=True)
class MeanSquaredError(Loss):
    """The mean squared error in float32, over samples and outputs.

    >>> MeanSquaredError()(torch.zeros(2, 1), torch.tensor([[1.0], [3.0]]))
    tensor(5.)
    """

    def __call__(self, outputs: Tensor, targets: Tensor, divisor: float | None = None) -> Tensor:
        return torch.nn.functional.mse_loss(outputs.float(), targets.float())


@dataclass(frozen=True)
class OwnLoss(Loss):
    """A user's function from outputs and targets to their mean loss; not called if all targets are ignored."""

    name: str
    function: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, outputs: Tensor, targets: Tensor, divisor: float | None = None) -> Tensor:
        if divisor is None:
            return self.function(outputs, targets)
        counted = int((targets != IGNORED).sum())
        return self.function(outputs, targets) * (counted / divisor) if counted else outputs.float().sum() * 0.0


def make_loss(name: str | None, options: Mapping[str, object], shape: DataShape) -> Loss:
    """Return the loss `name`; by default cross-entropy for classes, mean squared error for numbers.

    Raises ValueError if the loss or an option is unknown, or the loss does not fit the targets.
    """
    name = name or ("cross_entropy" if shape.classifies else "mse")
    if ":" in name:
        function = import_function("Loss", name)
        if options:
            rest = partial(function, None, None)  # the function without outputs and targets
            try:
                inspect.signature(rest)
            except (TypeError, ValueError):  # a function in C, or one that does not take outputs and targets
                raise ValueError(
                    f"Loss `{name}` must be a function of outputs and targets, written in Python, to take options."
                ) from None
            function = partial(function, **bind_options("loss", name, rest, options))
        return OwnLoss(name, function)
    kind = _LOSSES[name]
    arguments = bind_options("loss", name, kind, options)
    if shape.classifies != (name == "cross_entropy"):
        held, other = ("classes", "cross_entropy") if shape.classifies else ("numbers", "mse")
        raise ValueError(f"`loss` = {name!r} does not fit the data, whose targets are {held}. Use {other!r}.")
    return kind(**arguments)


def example_targets(loss: Loss, outputs: Tensor, shape: DataShape) -> Tensor:
    """Return zero targets for a model's outputs of one microbatch."""
    if isinstance(loss, OwnLoss):
        return torch.zeros((len(outputs), *shape.target_shape), dtype=getattr(torch, shape.target_dtype))
    of_classes = isinstance(loss, CrossEntropy)
    return torch.zeros(outputs.shape[:-1] if of_classes else outputs.shape, dtype=getattr(torch, shape.target_dtype))


def check_loss(loss: Loss, layer: str, output_shape: tuple[int, ...], shape: DataShape) -> None:
    """Raise ValueError if the outputs of a model's last `layer` do not fit the loss and the targets.

    The first dimension of `output_shape` is the microbatch.
    """
    if isinstance(loss, CrossEntropy) and (len(output_shape) == 1 or output_shape[-1] < shape.num_classes):
        raise ValueError(
            f"The last layer `{layer}` must return a score for each class ({shape.num_classes}), "
            f"but returns the shape {output_shape}."
        )
    wanted = (*output_shape[:1], *shape.target_shape)
    known = shape.target_shape or shape.num_tokens or shape.input_dtype != "int64"  # unknown for plain text
    if isinstance(loss, CrossEntropy) and known and output_shape[:-1] != wanted:
        raise ValueError(
            f"The last layer `{layer}` must return scores of shape {(*wanted, shape.num_classes)}, "
            f"but returns the shape {output_shape}."
        )
    if isinstance(loss, MeanSquaredError) and output_shape != wanted:
        raise ValueError(
            f"The last layer `{layer}` must return numbers of the shape of the targets {wanted}, "
            f"but returns the shape {output_shape}."
        )
    if isinstance(loss, OwnLoss):
        _check_own(loss, output_shape, shape)


def _check_own(loss: OwnLoss, output_shape: tuple[int, ...], shape: DataShape) -> None:
    outputs = torch.zeros(output_shape, requires_grad=True)
    targets = example_targets(loss, outputs, shape)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about mismatched shapes, which torch's error reports
            value = loss(outputs, targets)
    except Exception as error:
        shapes = f"outputs of shape {output_shape} and targets of shape {tuple(targets.shape)}"
        raise ValueError(f"Loss `{loss.name}` failed on {shapes}: {reason_of(error)}.") from error
    if not isinstance(value, torch.Tensor) or value.shape != () or not value.requires_grad:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise ValueError(
            f"Loss `{loss.name}` must return one number, as a tensor that depends on the outputs, but got {got}."
        )


_LOSSES: dict[str, type[CrossEntropy | MeanSquaredError]] = {"cross_entropy": CrossEntropy, "mse": MeanSquaredError}
