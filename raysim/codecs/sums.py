"""Sums within codecs: in blocks of 4,096 values, accumulated in float64, in block order, so that no thread count changes them.

Within a block neighbours at half its length are added until one value is left; both this torch code and the kernel do so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.layout import Layout
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 4096


_TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda values: values,
    "magnitudes": lambda values: values.abs(),
    "squares": lambda values: values.square(),
    "positive": lambda values: values.clamp_min(0),
    "negative": lambda values: values.clamp_max(0),
    "count": lambda values: (values >= 0).double(),  # of values that are not negative
}


def group_sums(x: Tensor, layout: Layout, of: str, center: float = 0.0) -> Tensor:
    """Return the sum over each group of `layout` of a term of every x - center, float64; `_TERMS` lists the terms.

    The difference is rounded to float32, so that terms are the same whatever makes them.

    >>> from raysim.codecs.layout import layout_of
    >>> group_sums(torch.tensor([[1.0, -2.0], [3.0, 4.0]]), layout_of((2, 2), "row", 0), "magnitudes")
    tensor([3., 7.], dtype=torch.float64)
    """
    if not layout.numel:
        return torch.zeros(layout.groups, dtype=torch.float64, device=x.device)
    if kernels.serve(x) and layout.inner > 1:
        from raysim.codecs.kernels.sums import group_sums as native

        sums = np.zeros(layout.groups)
        native(
            x.contiguous().float().view(-1).numpy(), layout.groups, layout.inner, list(_TERMS).index(of), center, sums
        )
        return torch.from_numpy(sums)
    values = x.reshape(-1).double()
    values = _TERMS[of]((values - center).float().double() if center else values)
    missing = -layout.numel % (layout.groups * layout.inner)
    runs = torch.nn.functional.pad(values, (0, missing)).view(-1, layout.groups, layout.inner)
    width = min(BLOCK, 1 << (layout.inner - 1).bit_length())
    blocks = torch.nn.functional.pad(runs, (0, -layout.inner % width)).view(*runs.shape[:2], -1, width)
    while width > 1:
        width //= 2
        blocks = blocks[..., :width] + blocks[..., width:]
    # runs of a group follow one another, and so do the blocks of a run; one after the other is the order of the design
    ordered = blocks[..., 0].permute(1, 0, 2).reshape(layout.groups, -1).cpu().numpy()
    return torch.from_numpy(np.add.accumulate(ordered, axis=1)[:, -1].copy()).to(x.device)
