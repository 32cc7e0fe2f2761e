"""Rotated: rows with massive activations or gradients, in few bits with levels for a normal distribution."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.bits import pack, packed_bytes, unpack
from raysim.codecs.codec import (
    DTYPES,
    Codec,
    Key,
    NonFiniteError,
    Packet,
    cast_float64,
    cast_saturating,
    check_finite,
    to_bytes,
    to_tensor,
)
from raysim.codecs.hadamard import hadamard
from raysim.notation import check_integer
from raysim.on_demand import torch

TILE = 64
_SAMPLED = 63  # rows whose median is the center
_FARTHEST = 2.0**63  # the largest magnitude of a center, so that no difference from it overflows
_SHARE = 8  # at most one value in this many is kept
FIXED = 1 << 22  # units of a rotated value of 1, which is an integer, so that sums do not depend on their order
UNIT = 1 << 10  # units of a level of 1
CELLS, CELL = 128, 32  # magnitudes are sorted into this many cells, each 1/CELL of the standard deviation
# the positive levels of least squared error for a standard normal distribution (Max 1960), in units of 1/UNIT
LEVELS = {
    2: (464, 1547),
    3: (251, 774, 1376, 2204),
    4: (131, 397, 673, 965, 1286, 1657, 2119, 2798),
    5: (67, 203, 339, 478, 619, 765, 916, 1074, 1241, 1420, 1614, 1830, 2077, 2373, 2756, 3339),
}


class Form(NamedTuple):
    """Rows of `width` values, of which `kept` are sent separately, and the others in `bits` bits."""

    rows: int
    width: int
    kept: int
    bits: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's codes; rows start at whole bytes."""
        return packed_bytes(self.width, self.bits)

    @property
    def centered(self) -> bool:
        """True if there are enough rows to send their median."""
        return self.rows > _SAMPLED

    @property
    def position_bits(self) -> int:
        """Bits of a position in a row."""
        return max(1, (self.width - 1).bit_length())


@dataclass(frozen=True, repr=False)
class Rotated(Codec):
    """Sends the `kept` largest values of a row in 16 bits, and the others rotated, with `bits` bits and one scale.

    A row, along the last axis, is a token. If there are at least 64, the median of 63 evenly spaced ones, in bfloat16, is first
    subtracted from all. The largest magnitudes of a row, at most one value in eight, are sent as bfloat16 with their positions. The
    others are multiplied by fixed signs and by the orthonormal Hadamard matrix of size 64, or of the powers of two that make up the
    rest of a width. They are rounded to s l, with l the 2^bits levels of least squared error for a normal distribution (Max 1960),
    and s fitted to the mean magnitude, then to the chosen levels, and sent in bfloat16.

    A row of n values takes ceil(bits n / 8) + 2 bytes, and 2 bytes and ceil(log2 n) bits for each kept value; the median takes 2 n
    bytes. After QuIP# (Tseng et al. 2024, 2402.04396), LLM.int8 (Dettmers et al. 2022, 2208.07339) and TAH-Quant (He et al. 2025,
    2506.01352).

    >>> x = torch.arange(576.0).sin(); x[[3, 70]] = torch.tensor([800.0, -500.0])
    >>> packet = Rotated(4).encode(x)
    >>> error = packet.decode() - x
    >>> 8 * packet.array_bytes / 576, error[[3, 70]].tolist(), bool(error.norm() < 0.11 * x.sin().norm())
    (4.347222222222222, [0.0, 0.0], True)
    """

    bits: int
    kept: int = 7

    def __post_init__(self) -> None:
        self._coerce(bits=check_integer("bits", self.bits, min(LEVELS), max(LEVELS)))
        self._coerce(kept=check_integer("kept", self.kept, 0, 256))

    @property
    def by_matrix(self) -> bool:
        return True

    def _form(self, shape: tuple[int, ...]) -> Form:
        width = shape[-1] if shape else 1
        rows = math.prod(shape) // width if width else 0
        return Form(rows, width, min(self.kept, width // _SHARE), self.bits)

    def array_names(self) -> tuple[str, ...]:
        return ("codes", "scales", "values", "positions", "center")

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        form = self._form(tuple(x.shape))
        if not form.rows:
            return dict.fromkeys(("codes", "scales", "values", "positions"), np.empty(0, np.uint8))
        rows = x.reshape(form.rows, form.width)
        center = _center(rows, form)
        encode = kernels.find("rotated.encode_rows", x) or encode_rows
        error = NonFiniteError(f"A tensor to send by {self!r} holds NaN or infinity.")
        codes, scales, values, positions = encode(rows, center.float(), form, error)
        packed = pack(positions.reshape(-1), form.position_bits)
        arrays = codes, scales, values, packed, *([center] if form.centered else [])
        return {name: to_bytes(array) for name, array in zip(self.array_names(), arrays, strict=False)}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        form, dtype = self._form(packet.shape), DTYPES[packet.dtype]
        count = form.rows * form.kept
        codes = packet.bytes_of("codes", form.rows * form.row_bytes)
        scales = to_tensor(packet.bytes_of("scales", 2 * form.rows), torch.bfloat16, device)
        values = to_tensor(packet.bytes_of("values", 2 * count), torch.bfloat16, device)
        positions = packet.fields_of("positions", count, form.position_bits, device)
        center = torch.zeros(form.width, device=device)
        if form.centered:
            center = to_tensor(packet.bytes_of("center", 2 * form.width), torch.bfloat16, device).float()
        error = ValueError(f"A packet of {self!r} holds scales, values or positions out of bounds.")
        decode = kernels.find_on("rotated.decode_rows", device, packet.numel, dtype) or decode_rows
        packed = to_tensor(codes, torch.uint8, device)
        x: torch.Tensor = decode(packed, scales, values, positions, center, form, dtype, error)
        return x.view(packet.shape)


@functools.cache
def tiles_of(width: int) -> tuple[int, ...]:
    """Return the sizes of the tiles of a row: as many of 64 as fit, then decreasing powers of two.

    >>> tiles_of(173)
    (64, 64, 32, 8, 4, 1)
    """
    left = width % TILE
    return (*(TILE,) * (width // TILE), *(1 << bit for bit in reversed(range(6)) if left >> bit & 1))


@functools.cache
def factors(width: int) -> np.ndarray:
    """Return the sign of each position of a row over the root of its tile's size, float32."""
    sizes = np.repeat(tiles_of(width), tiles_of(width))
    i = np.arange(width)
    odd = (i & i >> 1 ^ i >> 2 & i >> 3 ^ i >> 4 & i >> 5) & 1
    result: np.ndarray = ((1 - 2 * odd) / np.sqrt(sizes)).astype(np.float32)
    return result


@functools.cache
def code_of_cell(bits: int) -> np.ndarray:
    """Return the index of the nearest level of each cell of magnitudes, int64."""
    levels = np.array(LEVELS[bits])
    borders = (levels[1:] + levels[:-1]) * CELL / (2 * UNIT)
    return np.searchsorted(borders.round(), np.arange(CELLS), side="right")


def _center(rows: torch.Tensor, form: Form) -> torch.Tensor:
    """Return the median of evenly spaced rows, bfloat16, or zeros for few rows."""
    if not form.centered:
        return torch.zeros(form.width, dtype=torch.bfloat16, device=rows.device)
    sampled = rows[(2 * torch.arange(_SAMPLED) + 1) * form.rows // (2 * _SAMPLED)]
    columns = cast_saturating(sampled, torch.float32).T.contiguous()
    if columns.device.type == "cpu":  # much faster than torch's
        median = torch.from_numpy(np.partition(columns.numpy(), _SAMPLED // 2, axis=1)[:, _SAMPLED // 2])
    else:
        median = columns.median(dim=1).values
    return torch.where(median.abs() < _FARTHEST, median + 0.0, 0.0).bfloat16()


# The torch reference of the kernels `rotated`.


def _turn(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows with each tile multiplied by its unnormalised Hadamard matrix."""
    width = rows.shape[1]
    whole = width - width % TILE
    sizes = (whole, *tiles_of(width)[whole // TILE :])
    parts = torch.split(rows, list(sizes), dim=1)
    return torch.cat(
        [
            hadamard(part.reshape(-1, min(size, TILE))).view(len(rows), size)
            for part, size in zip(parts, sizes, strict=True)
            if size
        ],
        dim=1,
    )


def encode_rows(
    x: torch.Tensor, center: torch.Tensor, form: Form, error: Exception
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the packed codes, the scales (bfloat16), and the kept values (bfloat16) and their positions."""
    check_finite(x)
    x = cast_saturating(x, torch.float32) - center
    positions = x.abs().sort(dim=1, descending=True, stable=True).indices[:, : form.kept]
    values = cast_saturating(x.gather(1, positions), torch.bfloat16)
    rest = x.scatter(1, positions, 0.0)
    power = _power(rest)
    factor = torch.from_numpy(factors(form.width)).to(x.device)
    turned = _turn((rest * power[:, None] * factor * FIXED).int())
    magnitudes = turned.abs()
    total = magnitudes.sum(dim=1).double()
    cells_per_unit = torch.where(total > 0, torch.full_like(total, CELL * form.width / 1.25) / total, 0.0).float()
    cells = (magnitudes.float() * cells_per_unit[:, None]).clamp_max(CELLS - 1).long()
    indices = torch.from_numpy(code_of_cell(form.bits)).to(x.device)[cells]
    levels = torch.tensor(LEVELS[form.bits], device=x.device)[indices].sum(dim=1).double()
    scales = total / levels * (UNIT / FIXED / power.double())
    codes = (indices + (turned < 0) * (1 << (form.bits - 1))).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, -form.width % 8))
    packed = pack(codes.view(-1), form.bits).view(form.rows, -1)[:, : form.row_bytes]
    return packed, cast_float64(scales, torch.bfloat16), values, positions


def _power(rest: torch.Tensor) -> torch.Tensor:
    """Return the power of two that brings the largest magnitude of each row to between 1 and 2, or to 4 if it is huge."""
    exponents = rest.abs().amax(dim=1).view(torch.int32) >> 23
    return ((254 - exponents).clamp_min(1) << 23).view(torch.float32)


def decode_rows(
    codes: torch.Tensor,
    scales: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    center: torch.Tensor,
    form: Form,
    dtype: torch.dtype,
    error: Exception,
) -> torch.Tensor:
    """Return the flat tensor of a packet's arrays."""
    if (
        not torch.isfinite(scales).all()
        or (scales < 0).any()
        or not torch.isfinite(values).all()
        or not torch.isfinite(center).all()
        or (positions >= form.width).any()
    ):
        raise error
    if not form.rows:
        return torch.empty(0, dtype=dtype, device=codes.device)
    padded = torch.nn.functional.pad(
        codes.view(form.rows, -1), (0, packed_bytes(form.width + -form.width % 8, form.bits) - form.row_bytes)
    )
    unpacked = (
        unpack(padded.reshape(-1), 8 * padded.numel() // form.bits, form.bits)
        .view(form.rows, -1)[:, : form.width]
        .long()
    )
    levels = torch.tensor(LEVELS[form.bits], dtype=torch.float32, device=codes.device) / UNIT
    turned = _turn(torch.cat([levels, -levels])[unpacked])  # exact
    rows = turned * torch.from_numpy(factors(form.width)).to(codes.device) * scales.float()[:, None]
    rows.scatter_(1, positions.view(form.rows, form.kept).long(), values.float().view(form.rows, form.kept))
    limit = torch.finfo(torch.float32).max
    return cast_saturating((rows.clamp_(-limit, limit) + center).clamp_(-limit, limit), dtype)
