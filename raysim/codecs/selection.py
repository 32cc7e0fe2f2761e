"""Selection of values by magnitude."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from raysim.codecs import kernels
from raysim.codecs.codec import NonFiniteError
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_Selected = tuple["Tensor", "Tensor"]  # flat increasing positions, and the values there


def kept_of(density: float, count: int) -> int:
    """Return how many of `count` values a density keeps, as in Rudakov et al.: rounded up, at least one.

    >>> kept_of(0.1, 65536), kept_of(0.07, 100), kept_of(0.5, 1)
    (6554, 7, 1)
    """
    return min(count, max(1, math.ceil(density * count - 1e-6)))


def select_topk(x: Tensor, kept: int) -> Tensor:
    """Return the flat positions of the `kept` greatest magnitudes of each row of (rows, length), increasing.

    Of equal magnitudes the lower index is kept. Raises NonFiniteError on NaN or infinity.
    """
    return select_with_values(x, kept)[0]


def select_with_values(x: Tensor, kept: int) -> _Selected:
    """Return the flat positions of `select_topk`, and the values there."""
    x = x.contiguous()
    if not x.numel() or not kept:
        return torch.empty(0, dtype=torch.int64, device=x.device), torch.empty(0, dtype=x.dtype, device=x.device)
    backend = kernels.backend("select", x)
    if backend:
        selected: _Selected = backend.select_rows(x, kept, _not_finite())
        return selected
    magnitudes = x.abs()
    greatest = magnitudes.topk(kept, dim=1, sorted=False).values
    if not torch.isfinite(greatest).all():  # NaN and infinity rank above all numbers
        raise _not_finite()
    threshold = greatest.amin(dim=1, keepdim=True)
    above, ties = magnitudes > threshold, magnitudes == threshold
    left = kept - above.sum(dim=1, keepdim=True)
    positions = (above | ties & (ties.cumsum(dim=1) <= left)).view(-1).nonzero().view(-1)
    return positions, x.view(-1)[positions]


def add_and_select(x: Tensor, memory: Tensor, kept: int, clear: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + memory, float32 (rows, length), and the result of `select_with_values` on it; for tensors with a kernel.

    With `clear` the selected values are set to zero in the sum.
    """
    result: tuple[Tensor, Tensor, Tensor] = kernels.backend("select", x).add_and_select(
        x.contiguous(), memory.contiguous(), kept, clear, _not_finite()
    )
    return result


def _not_finite() -> NonFiniteError:
    return NonFiniteError("A tensor to select from holds NaN or infinity.")


def select_at_least(x: Tensor, floor: float) -> _Selected:
    """Return increasing positions and values of flat `x`: magnitudes of at least `floor`, or non-zero values if `floor` is 0.

    NaN and infinity are included.
    """
    backend = kernels.backend("select", x)
    if backend:
        selected: _Selected = backend.select_at_least(x, _pattern(floor, x.dtype))
        return selected
    positions = _reaches(x, floor).nonzero().view(-1)
    return positions, x[positions]


def count_at_least(x: Tensor, floor: float) -> int:
    """Return the number of values that `select_at_least` selects."""
    backend = kernels.backend("select", x)
    if backend:
        count: int = backend.count_at_least(x, _pattern(floor, x.dtype))
        return count
    return int(_reaches(x, floor).sum())


def _reaches(x: Tensor, floor: float) -> Tensor:
    return (x.abs() >= floor) & (x != 0) | ~torch.isfinite(x)


def _pattern(floor: float, dtype: torch.dtype) -> int:
    """Return the bit pattern of a magnitude, at least the smallest above zero; patterns of positive numbers have their order."""
    return max(1, int(kernels.bits_of(torch.tensor([floor]).to(dtype))[0]))
