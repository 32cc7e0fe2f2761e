"""Positions of sparse tensors: select them by magnitude, code them as sorted integers below a known bound, scatter values.

`bitmap`      one bit per value of the whole tensor
`elias_fano`  low bits packed, high bits in unary (Elias 1974, Fano 1971): about 2 + log2(total/kept) bits a position,
              half a bit a position above the lower bound log2 C(total, kept)
`int32`       four bytes a position, as published implementations send them
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from raysim.codecs import kernels, transfers
from raysim.codecs.bits import pack, pack_bits, packed_bytes, unpack, unpack_bits
from raysim.codecs.codec import NonFiniteError, Packet, to_bytes, to_tensor
from raysim.on_demand import torch

FORMS = ("bitmap", "elias_fano", "int32")
INDEX_ARRAYS = ("bitmap", "int32", "low", "high")  # array names of all forms

_Selected = tuple["torch.Tensor", "torch.Tensor"]  # flat increasing positions, and the values there


def kept_of(density: float, count: int) -> int:
    """Return how many of `count` values are kept at a density, as in Rudakov et al.: rounded up, at least one.

    >>> kept_of(0.1, 65536), kept_of(0.07, 100), kept_of(0.5, 1)
    (6554, 7, 1)
    """
    return min(count, max(1, math.ceil(density * count - 1e-6)))


def select_topk(x: torch.Tensor, kept: int) -> torch.Tensor:
    """Return the increasing flat positions of the `kept` largest magnitudes of each row of (rows, length).

    Ties keep the lower index. Raises NonFiniteError on NaN or infinity.
    """
    return select_with_values(x, kept)[0]


def select_with_values(x: torch.Tensor, kept: int) -> _Selected:
    """Return the flat positions of `select_topk`, and the values there."""
    x = x.contiguous()
    if not x.numel() or not kept:
        return torch.empty(0, dtype=torch.int64, device=x.device), torch.empty(0, dtype=x.dtype, device=x.device)
    if select := kernels.find("select.select_rows", x):
        selected: _Selected = select(x, kept, not_finite())
        return selected
    magnitudes = x.abs()
    greatest = magnitudes.topk(kept, dim=1, sorted=False).values
    if not torch.isfinite(greatest).all():  # NaN and infinity rank above all numbers
        raise not_finite()
    threshold = greatest.amin(dim=1, keepdim=True)
    above, ties = magnitudes > threshold, magnitudes == threshold
    left = kept - above.sum(dim=1, keepdim=True)
    positions = (above | ties & (ties.cumsum(dim=1) <= left)).view(-1).nonzero().view(-1)
    return positions, x.view(-1)[positions]


def not_finite() -> NonFiniteError:
    """Return the error for a tensor that holds NaN or infinity."""
    return NonFiniteError("A tensor to select from holds NaN or infinity.")


def select_at_least(x: torch.Tensor, floor: float) -> _Selected:
    """Return increasing positions and values of magnitudes of at least `floor` in flat `x`; if `floor` is 0, of non-zero values.

    NaN and infinity are included.
    """
    if select := kernels.find("select.select_at_least", x):
        selected: _Selected = select(x, _pattern(floor, x.dtype))
        return selected
    positions = _reaches(x, floor).nonzero().view(-1)
    return positions, x[positions]


def count_at_least(x: torch.Tensor, floor: float) -> int:
    """Return the number of values selected by `select_at_least`."""
    count = kernels.find("select.count_at_least", x)
    return int(count(x, _pattern(floor, x.dtype)) if count else _reaches(x, floor).sum())


def _reaches(x: torch.Tensor, floor: float) -> torch.Tensor:
    return (x.abs() >= floor) & (x != 0) | ~torch.isfinite(x)


def _pattern(floor: float, dtype: torch.dtype) -> int:
    """Return a magnitude's bit pattern, at least 1, so that zero is excluded; patterns order like positive numbers."""
    return max(1, int(kernels.bits_of(torch.tensor([floor]).to(dtype))[0]))


def index_bytes(form: str, kept: int, total: int) -> int:
    """Return the size of `kept` of `total` positions in `form`, in bytes.

    >>> {form: index_bytes(form, 6554, 65536) for form in FORMS}
    {'bitmap': 8192, 'elias_fano': 4302, 'int32': 26216}
    """
    if form == "bitmap":
        return packed_bytes(total, 1)
    if form == "int32":
        return 4 * kept
    width, length = elias_fano_sizes(kept, total)
    return packed_bytes(kept, width) + packed_bytes(length, 1)


def smallest_form(kept: int, total: int) -> str:
    """Return the smallest form; the first of `FORMS` on a tie."""
    return min(FORMS, key=lambda form: index_bytes(form, kept, total))


def elias_fano_sizes(kept: int, total: int) -> tuple[int, int]:
    """Return the number of low bits per position, and the total number of high bits."""
    width = max(0, (total // kept).bit_length() - 1) if kept else 0
    return width, kept + ((total - 1) >> width) if kept else 0


def encode_positions(positions: torch.Tensor, total: int, form: str) -> dict[str, np.ndarray]:
    """Return the arrays that code `positions`, strictly increasing int64 below `total`."""
    if form == "int32":
        if total > 2**31:
            raise ValueError(
                f"`index='int32'` supports up to {2**31} values, but got a tensor of {total} values. Use 'auto'."
            )
        return {"int32": to_bytes(positions.to(torch.int32))}
    if kernel := kernels.find_on("packing.encode_positions", positions.device, total):  # on the CPU
        arrays: dict[str, np.ndarray] = kernel(positions, total, form)
        return arrays
    if form == "bitmap":
        return {"bitmap": to_bytes(_set_bits(positions, total))}
    width, length = elias_fano_sizes(len(positions), total)
    low = pack(positions & ((1 << width) - 1), width)
    return {"low": to_bytes(low), "high": to_bytes(_set_bits(positions, length, width))}


def _set_bits(positions: torch.Tensor, length: int, width: int | None = None) -> torch.Tensor:
    """Return a bitmap of `length` bits with those at `positions` set; with `width` those at (position >> width) + index."""
    if set_bits := kernels.find_on("packing.set_bits", positions.device, length):
        bitmap: torch.Tensor = set_bits(positions, length, width)
        return bitmap
    if width is not None:
        positions = (positions >> width) + torch.arange(len(positions), device=positions.device)
    return pack_bits(torch.zeros(length, dtype=torch.bool, device=positions.device).index_fill_(0, positions, True))


class Marks(NamedTuple):
    """The bits that code the positions of a packet's values, one set bit each: a bitmap or Elias-Fano high bits."""

    bits: np.ndarray
    length: int  # bits
    low: np.ndarray = np.empty(0, np.uint8)
    width: int | None = None  # number of low bits per position; None for a bitmap

    @classmethod
    def of(cls, packet: Packet, kept: int) -> Marks:
        """Return the marks stored in a packet; raises ValueError if its arrays do not fit `kept` positions."""
        if "bitmap" in packet.arrays:
            return cls(packet.bytes_of("bitmap", packed_bytes(packet.numel, 1)), packet.numel)
        width, length = elias_fano_sizes(kept, packet.numel)
        low = packet.bytes_of("low", packed_bytes(kept, width))
        return cls(packet.bytes_of("high", packed_bytes(length, 1)), length, low, width)


def decode_positions(packet: Packet, kept: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the `kept` positions of a packet, int64; raises ValueError unless they strictly increase and fit the shape."""
    total = packet.numel
    if "int32" in packet.arrays:
        positions = to_tensor(packet.bytes_of("int32", 4 * kept), torch.int32, device).long()
    else:
        marks = Marks.of(packet, kept)
        bits, low = (to_tensor(part, torch.uint8, device) for part in (marks.bits, marks.low))
        if positions_of := kernels.find_on("packing.positions_of", device, total):  # on a GPU
            decoded: tuple[torch.Tensor, torch.Tensor] = positions_of(bits, marks.length, kept, total, low, marks.width)
            transfers.check(decoded[1], misplaced(packet, kept))
            return decoded[0]
        positions = unpack_bits(bits, marks.length).nonzero().view(-1)
        if marks.width is not None and len(positions) == kept:
            positions = (positions - torch.arange(kept, device=device) << marks.width) | unpack(low, kept, marks.width)
    increasing = bool((positions[1:] > positions[:-1]).all()) if kept > 1 else True
    if len(positions) != kept or not increasing or (kept and not 0 <= int(positions[0]) <= int(positions[-1]) < total):
        raise misplaced(packet, kept)
    return positions


def misplaced(packet: Packet, kept: int) -> ValueError:
    """Return the error for a packet with invalid positions for `kept` values."""
    return ValueError(
        f"A packet of {packet.codec!r} must hold {kept} increasing positions below {packet.numel}, but does not."
    )


def expand(packet: Packet, values: torch.Tensor) -> torch.Tensor:
    """Return the flat tensor of a packet: `values` at its positions, zeros elsewhere; raises ValueError on a mismatch."""
    if "int32" not in packet.arrays and (kernel := kernels.find("packing.expand", values)):
        x: torch.Tensor = kernel(packet, values.contiguous())
        return x
    return scatter(decode_positions(packet, len(values), values.device), values, packet.numel)


def scatter(positions: torch.Tensor, values: torch.Tensor, numel: int) -> torch.Tensor:
    """Return a flat tensor of zeros with `values` at distinct `positions`.

    On a GPU, a pending error may still report damaged positions; nothing is written outside the tensor even then.
    """
    if fill := kernels.find("packing.scatter", values):
        filled: torch.Tensor = fill(positions, values.contiguous(), numel)
        return filled
    x = torch.zeros(numel, dtype=values.dtype, device=values.device)
    return x.index_copy_(0, positions, values)


def subtract(x: torch.Tensor, positions: torch.Tensor, values: torch.Tensor) -> None:
    """Subtract `values` from flat float32 `x` at distinct `positions`, in place."""
    if kernel := kernels.find("packing.subtract", x):
        kernel(positions, values, x)
    else:
        x.index_copy_(0, positions, x[positions] - values)
