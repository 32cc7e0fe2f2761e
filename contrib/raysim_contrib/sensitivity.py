"""Sensitivity of a stage's weight gradients to errors in its received activations, for AC-GC's error budget.

Evans, Aamodt 2021, NeurIPS. Hooks on layers and outputs also cover recomputed activations and split backwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

READERS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)


@dataclass
class _Reading:
    """One call of a layer on a microbatch."""

    weight: nn.Parameter
    uses: float  # mean number of values in an output channel that depend on one input value
    direct: bool  # whether its input is the received tensor itself
    norm2: Tensor | None = None  # of the gradient of its output, once it has arrived

    def arrived(self, gradient: Tensor) -> None:
        """Keep the squared norm of the output's gradient; only the first one if the backward is split."""
        if self.norm2 is None:
            self.norm2 = _norm2(gradient)


class Sensitivity:
    """Measures S = sum ||grad w||^2 / sum u ||grad y||^2 of a stage over the microbatches of a step.

    The sums are over the layers of `READERS` with a trained weight w whose input is the received tensor itself, or, if there is
    none, the first one that runs. y: a layer's output. u: kernel positions over stride, for all axes of a convolution; 1 for nn.Linear.
    """

    work = "sensitivity"

    def __init__(self, module: nn.Module) -> None:
        self._received: Tensor | None = None  # while a forward with gradients runs
        self._passed: list[_Reading] = []  # of that forward
        self._readings: list[_Reading] = []  # of the step
        module.register_forward_pre_hook(self._begin)
        for layer in module.modules():
            if isinstance(layer, READERS):
                layer.register_forward_hook(self._see)
        module.register_forward_hook(self._end)

    def take(self) -> float | None:
        """Return S over the backwards since the last call, before replicas average; None unless it is positive and finite."""
        weights = {id(reading.weight): reading.weight.grad for reading in self._readings}
        moved = [float(_norm2(gradient)) for gradient in weights.values() if gradient is not None]
        arrived = [reading.uses * float(reading.norm2) for reading in self._readings if reading.norm2 is not None]
        self.clear()
        above, below = math.fsum(moved), math.fsum(arrived)  # exact, so independent of the order of microbatches
        quotient = above / below if below > 0 else 0.0
        return quotient if 0 < quotient < math.inf else None

    def clear(self) -> None:
        self._received = None
        self._passed, self._readings = [], []

    def _begin(self, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self._received = arguments[0] if torch.is_grad_enabled() else None
        self._passed = []

    def _see(self, layer: nn.Module, arguments: tuple[Tensor, ...], y: Tensor) -> None:
        if self._received is None or not y.requires_grad:
            return
        weight = layer.weight
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad:
            return
        direct = any(argument is self._received for argument in arguments)
        if direct or not self._passed:
            reading = _Reading(weight, _uses(layer), direct)
            y.register_hook(reading.arrived)  # type: ignore[no-untyped-call]
            self._passed.append(reading)

    def _end(self, module: nn.Module, arguments: tuple[Tensor, ...], y: Tensor) -> None:
        direct = [reading for reading in self._passed if reading.direct]
        self._readings += direct or self._passed[:1]
        self._received, self._passed = None, []


def _uses(layer: nn.Module) -> float:
    if isinstance(layer, nn.Linear):
        return 1.0
    assert isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d))
    return math.prod(layer.kernel_size) / math.prod(layer.stride)


def _norm2(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()
