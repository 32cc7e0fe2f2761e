"""Costs of a pipeline stage for one microbatch, whatever its model: operations, parameters, bytes."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

Shapes = Counter[tuple[int, ...]]
"""Shapes of parameters, with the number of each."""


class Unit(NamedTuple):
    """Layers whose parameters sharded replicas gather together: a block, the embedding, the head."""

    forward_flops: float
    num_parameters: int


class StageCost(NamedTuple):
    """One stage for one microbatch."""

    forward_flops: float
    """Two for each multiplication and addition; a causal mask saves none."""
    weight_flops: float
    """The part of `forward_flops` that multiplies by parameters; weight gradients take as many."""
    parameters: Shapes
    saved_bytes: float
    """From the forward to the backward."""
    workspace_bytes: float
    """Besides, within one action."""
    output: tuple[int, ...]
    """Shape of the activation that the stage sends on."""
    units: tuple[Unit, ...]
    """In the order of the forward."""

    @property
    def num_parameters(self) -> int:
        """Number of values that the stage learns."""
        return count_values(self.parameters)


def count_values(shapes: Shapes) -> int:
    """Return the number of values in tensors of these shapes."""
    total = 0
    for shape, count in shapes.items():
        size = count
        for length in shape:
            size *= length
        total += size
    return total
