"""Selection of values by magnitude, and tensors that are filled from selected values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from raysim.codecs import kernels, transfers
from raysim.codecs.base import NonFiniteError, Packet, to_tensor
from raysim.codecs.bits import packed_bytes
from raysim.codecs.positions import (
    decode_positions,
    elias_fano,
    misplaced,
)
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


def kept_of(density: float, count: int) -> int:
    """Return the number of values that a density keeps of `count`, as in Rudakov et al.: at least one, rounded up.

    >>> kept_of(0.1, 65536), kept_of(0.07, 100), kept_of(0.5, 1)
    (6554, 7, 1)
    """
    return min(count, max(1, math.ceil(density * count - 1e-6)))


class Support(NamedTuple):
    """The positions that a sparse packet sends: flat and increasing, as (rows, kept), in a tensor of `shape`."""

    positions: Tensor
    shape: tuple[int, ...]


def select_topk(x: Tensor, kept: int) -> Tensor:
    """Return the flat positions of the `kept` greatest magnitudes of each row of (rows, length), increasing.

    Of equal magnitudes the lower index is kept. Raises NonFiniteError on NaN or infinity.
    """
    return select_with_values(x, kept)[0]


def select_with_values(x: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Return the flat positions of `select_topk`, and the values there."""
    x = x.contiguous()
    if not x.numel() or not kept:
        return torch.empty(0, dtype=torch.int64, device=x.device), torch.empty(0, dtype=x.dtype, device=x.device)
    if kernels.serve(x):
        return _select_native(x, kept)
    if kernels.gpu_serve(x):
        from raysim.codecs.kernels.triton import select as on_gpu

        return _checked(on_gpu.select_rows(x, kept))
    magnitudes = x.abs()
    greatest = magnitudes.topk(kept, dim=1, sorted=False).values
    if not torch.isfinite(greatest).all():  # NaN and infinity rank above all numbers
        raise NonFiniteError("A tensor to select from holds NaN or infinity.")
    threshold = greatest.amin(dim=1, keepdim=True)
    selected = magnitudes > threshold
    ties = magnitudes == threshold
    room = kept - selected.sum(dim=1, keepdim=True)
    selected |= ties & (ties.cumsum(dim=1) <= room)
    positions = selected.view(-1).nonzero().view(-1)
    return positions, x.view(-1)[positions]


def add_and_select(x: Tensor, memory: Tensor, kept: int, clear: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + memory, float32 (rows, length) that kernels serve, and the result of `select_with_values` on it.

    With `clear` the selected values are zero in the sum.
    """
    if not kernels.serve(x):
        from raysim.codecs.kernels.triton import select as on_gpu

        added, selection = on_gpu.add_and_select(x.contiguous(), memory.contiguous(), kept, clear)
        return (added, *_checked(selection))
    total = torch.from_numpy(kernels.empty(x.numel(), np.float32)).view(x.shape)
    return (total, *_select_native(total, kept, (x.contiguous(), memory.contiguous()), clear))


def _checked(selection: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return positions and values of a selection on a GPU, whose flag is set by NaN and infinity."""
    positions, values, bad = selection
    transfers.check(bad, NonFiniteError("A tensor to select from holds NaN or infinity."))
    return positions, values


def _select_native(
    x: Tensor, kept: int, terms: tuple[Tensor, Tensor] | None = None, clear: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the result of `select_with_values` on `x`; with `terms`, their sum is written to `x` first."""
    from raysim.codecs.kernels.select import select_rows

    num_rows, length = x.shape
    bits = kernels.bits_of(x)
    positions, values = kernels.empty(num_rows * kept, np.int64), kernels.empty(num_rows * kept, bits.dtype)
    infinity = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[x.dtype]
    mask = np.iinfo(bits.dtype).max
    parts = [kernels.opened(part.view(-1).numpy()) for part in (*terms, x)] if terms else [np.empty(0, np.float32)] * 3

    def select(start: int, stop: int) -> bool:
        first, last = start // length, stop // length
        out = slice(first * kept, last * kept)
        shape, limits = (last - first, length, kept), (bits.dtype.type(mask), np.int64(infinity))
        added = parts[0][start:stop], parts[1][start:stop], parts[2][start:stop]
        return bool(select_rows(bits[start:stop], start, *shape, *limits, positions[out], values[out], *added, clear))

    if not all(kernels.in_parts(select, num_rows * length, length)):
        raise NonFiniteError("A tensor to select from holds NaN or infinity.")
    return torch.from_numpy(positions), torch.from_numpy(values).view(x.dtype)


def select_at_least(x: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return the positions, increasing, and the values of flat `x` whose magnitude is at least `floor`; 0 is: above zero.

    NaN and infinity are among them.
    """
    if kernels.serve(x):
        from raysim.codecs.kernels import select

        bits, bound = kernels.bits_of(x), _pattern(floor, x.dtype)
        mask = bits.dtype.type(np.iinfo(bits.dtype).max)
        kept = select.count_at_least(bits, mask, np.int64(bound))
        found, values = kernels.empty(kept, np.int64), kernels.empty(kept, bits.dtype)
        select.select_at_least(bits, mask, np.int64(bound), found, values)
        return torch.from_numpy(found), torch.from_numpy(values).view(x.dtype)
    if kernels.gpu_serve(x):
        from raysim.codecs.kernels.triton import select as on_gpu

        return on_gpu.select_at_least(x, _pattern(floor, x.dtype))
    positions = ((x.abs() >= floor) & (x != 0) | ~torch.isfinite(x)).nonzero().view(-1)
    return positions, x[positions]


def count_at_least(x: Tensor, floor: float) -> int:
    """Return the number of values that `select_at_least` selects."""
    if kernels.serve(x):
        from raysim.codecs.kernels import select

        bits, bound = kernels.bits_of(x), _pattern(floor, x.dtype)
        return int(select.count_at_least(bits, bits.dtype.type(np.iinfo(bits.dtype).max), np.int64(bound)))
    if kernels.gpu_serve(x):
        from raysim.codecs.kernels.triton import select as on_gpu

        return transfers.integer(on_gpu.count_at_least(x, _pattern(floor, x.dtype)))
    return int(((x.abs() >= floor) & (x != 0) | ~torch.isfinite(x)).sum())


def _pattern(floor: float, dtype: torch.dtype) -> int:
    """Return the bit pattern of a magnitude, at least the smallest above zero; patterns of positive numbers have their order."""
    return max(1, int(kernels.bits_of(torch.tensor([floor]).to(dtype))[0]))


def place(packet: Packet, values: Tensor) -> Tensor:
    """Return the flat tensor of a packet whose index says where `values` lie, zeros elsewhere; raises ValueError."""
    if "bitmap" in packet.arrays and kernels.gpu_serve(values):
        return _expand_on_gpu(packet, values.contiguous())
    if "int32" in packet.arrays or not kernels.serve(values):
        return scatter(decode_positions(packet, len(values), values.device), values, packet.numel)
    from raysim.codecs.kernels import indices

    bits = kernels.opened(kernels.bits_of(values.contiguous()))
    out = kernels.empty(packet.numel, bits.dtype)
    if "bitmap" in packet.arrays:
        bitmap = kernels.opened(packet.bytes_of("bitmap", packed_bytes(packet.numel, 1)))
        right = indices.count_bits(bitmap, packet.numel) == len(values)
        if right:
            indices.expand_bitmap(bitmap, bits, out)
    else:
        low, high, length, width = elias_fano(packet, len(values))
        padded = np.empty(len(low) + 8, np.uint8)
        padded[: len(low)] = low
        right = indices.expand_elias_fano(padded, kernels.opened(high), length, width, bits, out)
    if not right:
        raise misplaced(packet, len(values))
    return torch.from_numpy(out).view(values.dtype)


def _expand_on_gpu(packet: Packet, values: Tensor) -> Tensor:
    from raysim.codecs.kernels.triton import positions as on_gpu

    bitmap = to_tensor(packet.bytes_of("bitmap", packed_bytes(packet.numel, 1)), torch.uint8, values.device)
    out, bad = on_gpu.expand_bitmap(bitmap, values, packet.numel)
    transfers.check(bad, misplaced(packet, len(values)))
    return out


def scatter(positions: Tensor, values: Tensor, numel: int) -> Tensor:
    """Return a flat tensor of zeros with `values` at `positions`, which are distinct and within it.

    On a GPU they may be damaged ones, whose error is still to be raised: nothing is written outside.
    """
    if kernels.serve(values) and values.is_contiguous():
        from raysim.codecs.kernels import indices

        bits = kernels.bits_of(values)
        out = kernels.empty(numel, bits.dtype)
        out.fill(0)
        indices.scatter(positions.numpy(), kernels.opened(bits), out)
        return torch.from_numpy(out).view(values.dtype)
    if kernels.gpu_serve(values):
        from raysim.codecs.kernels.triton import positions as on_gpu

        return on_gpu.scatter(positions, values.contiguous(), numel)
    x = torch.zeros(numel, dtype=values.dtype, device=values.device)
    return x.index_copy_(0, positions, values)


def subtract(x: Tensor, positions: Tensor, values: Tensor) -> None:
    """Subtract `values` from flat float32 `x` at `positions`, which are distinct."""
    if kernels.serve(x):
        from raysim.codecs.kernels import indices

        indices.subtract(positions.numpy(), kernels.opened(values.numpy()), x.numpy())
    else:
        x.index_copy_(0, positions, x[positions] - values)
