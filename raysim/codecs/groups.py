"""Groups of values with a common range or scale: their memory layout (outer, groups, inner), and sums over them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from raysim.codecs import kernels
from raysim.notation import check_choice, check_integer
from raysim.on_demand import torch

PER = ("tensor", "sample", "channel", "row", "block")
BLOCK = 4096  # the default size of a block


def check_groups(per: str, block: object) -> int:
    """Return the block size; raises ValueError if `per` is unknown, or the size is not positive or has no effect."""
    check_choice("per", per, PER)
    size = check_integer("block", block, 1)
    if per != "block" and size != BLOCK:
        raise ValueError(f"`block` is the size of a group with `per='block'`, but got {size} with `per={per!r}`.")
    return size


class Layout(NamedTuple):
    """Assign value i of the flat tensor to group (i // inner) % groups; the last block may be shorter."""

    numel: int
    groups: int
    inner: int

    def spread(self, per_group: torch.Tensor) -> torch.Tensor:
        """Return one value per group, in a shape that broadcasts with `view`."""
        return per_group.view(1, -1, 1)

    def view(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` as (outer, groups, inner); a shorter last block is padded with its last value."""
        flat = x.reshape(-1)
        missing = -self.numel % max(1, self.groups * self.inner)
        if missing:
            flat = torch.cat([flat, flat[-1:].expand(missing)])
        return flat.view(self.numel and -1, self.groups, self.inner)

    def flat(self, viewed: torch.Tensor) -> torch.Tensor:
        """Return the flat tensor of a view; the inverse of `view`."""
        return viewed.reshape(-1)[: self.numel]


def channel_axis(shape: tuple[int, ...]) -> int:
    """Return the channel (feature) axis: 1 for vectors and images, the last for (batch, length, width)."""
    return 2 if len(shape) == 3 else min(1, len(shape) - 1)


def channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return `shape` with the channel axis moved to the end.

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


_SUMMED = 4096  # block size of pairwise summation
_TERMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda values: values,
    "magnitudes": lambda values: values.abs(),
    "squares": lambda values: values.square(),
}


def group_sums(x: torch.Tensor, layout: Layout, of: str, center: float = 0.0) -> torch.Tensor:
    """Return the float64 sum over each group of a function of x - center, named in `_TERMS`.

    The difference is rounded to float32, so kernel and reference sum the same terms. Sums do not depend on the number
    of threads: blocks of 4,096 values are added in order, and within a block the halves are added pairwise until one
    value is left.

    >>> group_sums(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), layout_of((2, 2), "row", 0), "magnitudes")
    tensor([3., 7.], dtype=torch.float64)
    """
    if not layout.numel:
        return torch.zeros(layout.groups, dtype=torch.float64, device=x.device)
    if layout.inner > 1 and (kernel := kernels.find("linear.group_sums", x)):
        sums: torch.Tensor = kernel(x, layout, list(_TERMS).index(of), center)
        return sums
    values = x.reshape(-1).double()
    values = _TERMS[of]((values - center).float().double() if center else values)
    missing = -layout.numel % (layout.groups * layout.inner)
    runs = torch.nn.functional.pad(values, (0, missing)).view(-1, layout.groups, layout.inner)
    width = min(_SUMMED, 1 << (layout.inner - 1).bit_length())
    blocks = torch.nn.functional.pad(runs, (0, -layout.inner % width)).view(*runs.shape[:2], -1, width)
    while width > 1:
        width //= 2
        blocks = blocks[..., :width] + blocks[..., width:]
    # the runs of a group are consecutive, and so are the blocks of a run
    ordered = blocks[..., 0].permute(1, 0, 2).reshape(layout.groups, -1).cpu().numpy()
    return torch.from_numpy(np.add.accumulate(ordered, axis=1)[:, -1].copy()).to(x.device)


def total(x: torch.Tensor, of: str, center: float = 0.0) -> float:
    """Return the sum over all values of `x`, as `group_sums` does for one group."""
    return float(group_sums(x, layout_of((x.numel(),), "tensor", 0), of, center))
