"""Compare a candidate's gradients with the dense ones, and with their noise between batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raysim.replication.method import Gradients
from raysim.screening.passes import Passes

AT_ONCE = 1 << 22  # values converted to float64 at once


class Direction(NamedTuple):
    """The gradient of a stage's parameters beside the dense one."""

    stage: int
    cosine: float
    norm_ratio: float
    error: float
    """Norm of the difference over the norm of the dense gradient."""
    noise: float
    """The same for the dense gradients of single steps around their mean; NaN for a single microbatch."""


class Reference:
    """The dense gradients of all microbatches: their sum by stage, that of each replica, and their noise.

    `by_replica`: keep the gradients of each replica, for replica methods.
    """

    def __init__(self, passes: Passes, *, by_replica: bool) -> None:
        config = passes.plan.config
        self._passes = passes
        self._per_step = config.num_replicas * config.num_microbatches
        self._squares = [0.0] * len(passes.stages)  # summed over microbatches
        self._norms2: list[float] = []
        self.total: list[Gradients] = []
        self.of_replica: list[list[Gradients]] = [[] for _ in range(config.num_replicas if by_replica else 0)]

    def add(self, i: int) -> None:
        """Add the gradients in the parameters, those of microbatch `i`, and clear them."""
        gradients = self._passes.gradients()
        for stage, own in enumerate(gradients):
            self._squares[stage] += _product(own, own)
        _accumulate(self.total, gradients)
        if self.of_replica:
            _accumulate(self.of_replica[self._passes.microbatches[i].replica], gradients)
        self._passes.clear()

    def compare(self, gradients: Sequence[Gradients]) -> list[Direction]:
        """Return the direction of each stage's gradients."""
        self._norms2 = self._norms2 or [_product(own, own) for own in self.total]
        return [
            self._direction(stage, own, self.total[stage], self._norms2[stage]) for stage, own in enumerate(gradients)
        ]

    def _direction(self, stage: int, own: Gradients, dense: Gradients, dense2: float) -> Direction:
        own2, product = _product(own, own), _product(own, dense)
        noise = self._noise(stage, dense2)
        if not own2 or not dense2:
            return Direction(stage, float(own2 == dense2), float(own2 == dense2), float(own2 != dense2), noise)
        return Direction(
            stage,
            cosine=product / math.sqrt(own2 * dense2),
            norm_ratio=math.sqrt(own2 / dense2),
            error=math.sqrt(max(own2 + dense2 - 2 * product, 0.0) / dense2),
            noise=noise,
        )

    def _noise(self, stage: int, dense2: float) -> float:
        count = len(self._passes.microbatches)
        if count < 2 or not dense2:
            return math.nan
        # the gradient of microbatch i is g_i / count, and `total` is their mean
        variance = max(count * count * self._squares[stage] - count * dense2, 0.0) / (count - 1)
        return math.sqrt(variance / self._per_step / dense2)


def _accumulate(sums: list[Gradients], gradients: Sequence[Gradients]) -> None:
    if not sums:
        sums += [{name: x.clone() for name, x in own.items()} for own in gradients]
        return
    for total, own in zip(sums, gradients, strict=True):
        for name, x in own.items():
            total[name] += x


def _product(a: Gradients, b: Gradients) -> float:
    """Return the inner product of two gradients, in float64."""
    return sum(_dot(x, b[name]) for name, x in a.items())


def _dot(a: Tensor, b: Tensor) -> float:
    pairs = zip(torch.split(a.reshape(-1), AT_ONCE), torch.split(b.reshape(-1), AT_ONCE), strict=True)
    return sum(float(torch.dot(x.double(), y.double())) for x, y in pairs)
