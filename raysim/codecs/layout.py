"""Groups of values that share a range or a scale, laid out as (outer, groups, inner) in memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from raysim.notation import check_integer
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

PER = ("tensor", "sample", "channel", "row", "block")
BLOCK = 4096  # the size of a block where none is given


def check_block(per: str, block: object) -> int:
    """Return the size of a block; raises ValueError where it is none, or given without effect."""
    size = check_integer("block", block, 1)
    if per != "block" and size != BLOCK:
        raise ValueError(f"`block` is the size of a group with `per='block'`, but got {size} with `per={per!r}`.")
    return size


class Layout(NamedTuple):
    """Value i of the flat tensor is of group (i // inner) % groups; the last run may be cut short (blocks)."""

    numel: int
    groups: int
    inner: int

    def spread(self, per_group: Tensor) -> Tensor:
        """Return one value a group in a shape that broadcasts with `view`."""
        return per_group.view(1, -1, 1)

    def view(self, x: Tensor) -> Tensor:
        """Return `x` as (outer, groups, inner), a cut last run filled up with its last value."""
        flat = x.reshape(-1)
        missing = -self.numel % max(1, self.groups * self.inner)
        if missing:
            flat = torch.cat([flat, flat[-1:].expand(missing)])
        return flat.view(self.numel and -1, self.groups, self.inner)

    def flat(self, viewed: Tensor) -> Tensor:
        """Return the flat tensor of a view; the inverse of `view`."""
        return viewed.reshape(-1)[: self.numel]


def channel_axis(shape: tuple[int, ...]) -> int:
    """Return the axis of channels, the features of a tensor: 1 of vectors and images, the last of (batch, length, width)."""
    return 2 if len(shape) == 3 else min(1, len(shape) - 1)


def channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shape` with the axis of channels moved to the end.

    >>> channels_last((8, 3, 5, 4)), channels_last((8, 64, 16))
    ((8, 5, 4, 3), (8, 64, 16))
    """
    axis = channel_axis(shape)
    return (*shape[:axis], *shape[axis + 1 :], shape[axis]) if shape else shape


def layout_of(shape: tuple[int, ...], per: str, block: int) -> Layout:
    """Return the layout of the groups `per` in a tensor of `shape`.

    A channel is axis 1 of images and vectors, and the last axis of (batch, length, width).

    >>> layout_of((8, 3, 4, 4), "channel", 0), layout_of((10,), "block", 4)
    (Layout(numel=384, groups=3, inner=16), Layout(numel=10, groups=3, inner=4))
    """
    numel = math.prod(shape)
    if not numel:
        return Layout(0, 0, 0)
    if per == "block":
        return Layout(numel, -(-numel // block), block)
    if per == "tensor" or not shape:
        return Layout(numel, 1, numel)
    if per == "row":
        return Layout(numel, numel // shape[-1], shape[-1])
    axis = 0 if per == "sample" else channel_axis(shape)
    return Layout(numel, shape[axis], math.prod(shape[axis + 1 :]))
