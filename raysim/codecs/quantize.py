"""Uniform quantisation: evenly spaced levels over the range of each group of values, packed at 1 to 8 bits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.bits import pack, packed_bytes, unpack
from raysim.codecs.codec import (
    DTYPES,
    Codec,
    Key,
    NonFiniteError,
    Packet,
    cast_saturating,
    count_work,
    to_bytes,
    to_tensor,
)
from raysim.codecs.draws import uniform
from raysim.codecs.groups import Layout, check_groups, group_sums, layout_of
from raysim.notation import check_choice, check_integer
from raysim.on_demand import torch

Ends = tuple["torch.Tensor", "torch.Tensor"]  # the minimum and the maximum of each group, float32


class Levels(NamedTuple):
    """The codes of a uniform codec: 0 to `last`, in `bits` bits."""

    bits: int
    steps: int  # from the center of a group's range to its maximum
    middle: int  # the code of the center, which is zero, or the minimum if `middle` is 0
    last: int

    @property
    def absmax(self) -> bool:
        """True if the range is -a to a, and only a is sent."""
        return self.middle > 0


class Coding(NamedTuple):
    """The groups, the levels of each group, and the error for invalid values or packets."""

    layout: Layout
    levels: Levels
    error: Callable[[], Exception]


class UniformCodec(Codec):
    """Sends code = round((x - c)/step) + middle, decoded to c + step (code - middle), with step = (greatest - c)/steps.

    c and the greatest value are those of the value's group. Codes are computed in float64, so neither tiny nor huge ranges overflow.
    """

    own_ends: ClassVar[bool] = False

    bits: int
    per: str
    rounding: str
    block: int

    @property
    @abstractmethod
    def levels(self) -> Levels:
        """The codes and their levels."""

    def _ends(self, x: torch.Tensor, layout: Layout) -> Ends | None:
        """Return the ends of each group's range for a class with `own_ends`; by default they are minimum and maximum."""
        return None

    @property
    def random(self) -> bool:
        return self.rounding == "stochastic"

    @property
    def whole_range(self) -> bool:
        return self.per == "tensor"

    @property
    def expands(self) -> bool:
        return self.random and self.levels.steps == 1  # rounding moves a value by up to the whole range

    def _check_groups(self) -> None:
        self._coerce(block=check_groups(self.per, self.block))
        check_choice("rounding", self.rounding, ["nearest", "stochastic"])

    def array_names(self) -> tuple[str, ...]:
        return ("codes", "high") if self.levels.absmax else ("codes", "high", "low")

    def encode_with_residual(
        self, x: torch.Tensor, dtype: torch.dtype, key: Key | None = None, memory: torch.Tensor | None = None
    ) -> tuple[Packet, torch.Tensor]:
        fused = x.dtype == dtype == torch.float32 and kernels.find("uniform.quantize", x) is not None
        if not fused:
            return super().encode_with_residual(x, dtype, key, memory)
        self._check(tuple(x.shape), key)
        count_work(2 * x.nbytes)  # one pass to encode, one to subtract the decoded values
        x = x.detach().contiguous()
        if memory is not None and self.own_ends:
            x, memory = kernels.added(memory, x), None
        residual = x if memory is None else kernels.empty_like(x)
        packet = Packet(self, self._encode(x, key, memory, residual), tuple(x.shape), "float32")
        return packet, residual

    def _encode(
        self, x: torch.Tensor, key: Key | None, memory: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> dict[str, np.ndarray]:
        """Return the arrays of `x`, or of x + `memory`; the kernel writes the coding error to `residual`."""
        x, layout = x.contiguous(), layout_of(tuple(x.shape), self.per, self.block)
        coding, draw = Coding(layout, self.levels, self._not_finite), (key or 0) if self.random else None
        ends, kernel = self._ends(x, layout), kernels.find("uniform.quantize", x)
        codes, low, high = (
            kernel(x, coding, draw, ends, memory, residual) if kernel else _quantize(x, coding, draw, ends)
        )
        return {"codes": codes, "high": high} | ({} if self.levels.absmax else {"low": low})

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        layout, levels, dtype = layout_of(packet.shape, self.per, self.block), self.levels, DTYPES[packet.dtype]
        codes = packet.bytes_of("codes", packed_bytes(packet.numel, self.bits))
        high = packet.bytes_of("high", 4 * layout.groups)
        low = high if levels.absmax else packet.bytes_of("low", 4 * layout.groups)
        dequantize = kernels.find_on("uniform.dequantize", device, layout.numel, dtype) or _dequantize
        x: torch.Tensor = dequantize(codes, low, high, Coding(layout, levels, self._out_of_bounds), dtype, device)
        return x.view(packet.shape)

    def _not_finite(self) -> NonFiniteError:
        return NonFiniteError(f"A tensor to send by {self!r} holds NaN or infinity.")

    def _out_of_bounds(self) -> ValueError:
        return ValueError(f"A packet of {self!r} holds codes or ranges out of bounds.")


@dataclass(frozen=True, repr=False)
class Quantize(UniformCodec):
    """Rounds every value to one of 2**bits levels, evenly spaced over the range of its group.

    `range="minmax"` (Rudakov et al. 2023, 2401.07788): code = round((2^b - 1)(x - m)/(M - m)), decoded to
    m + (M - m) code/(2^b - 1); the least value m and the greatest M are sent in float32. `range="absmax"`: 2^b - 1 levels
    around zero, code = round((2^(b-1) - 1) x/a), decoded to a code/(2^(b-1) - 1); zero stays zero, and a is sent.

    A group is the `tensor`, a `sample` (first axis), a `channel` (axis 1 of images, the last axis of (batch, length, width)),
    a `row` (along the last axis: a token) or a `block` of consecutive values. `rounding` is to the nearest level, half to even, or
    `stochastic`: unbiased between the levels, with a key.

    Trained transformers need a range for each `row` or `block`, since a few activations are very large (Sun et al. 2024,
    2402.17762).

    >>> packet = Quantize(2).encode(torch.tensor([-1.0, 0.0, 1.0]))
    >>> packet.decode(), packet.array_bytes
    (tensor([-1.0000,  0.3333,  1.0000]), 9)
    >>> Quantize(2, range="absmax").encode(torch.tensor([-1.0, 0.0, 1.0])).decode()
    tensor([-1.,  0.,  1.])
    """

    bits: int
    range: str = "minmax"
    per: str = "tensor"
    rounding: str = "nearest"
    block: int = 4096

    def __post_init__(self) -> None:
        self._check_groups()
        check_choice("range", self.range, ["minmax", "absmax"])
        self._coerce(bits=check_integer("bits", self.bits, 1, 8))
        if self.range == "absmax" and self.bits < 2:
            raise ValueError(
                "`bits` must be at least 2 with `range='absmax'`, which keeps a level for zero, but got 1."
            )

    @property
    def levels(self) -> Levels:
        if self.range == "minmax":
            steps = (1 << self.bits) - 1
            return Levels(self.bits, steps, middle=0, last=steps)
        steps = (1 << (self.bits - 1)) - 1
        return Levels(self.bits, steps, middle=steps, last=2 * steps)


@dataclass(frozen=True, repr=False)
class QSGD(UniformCodec):
    """Stochastically rounds s x/N to a neighbouring integer, N the Euclidean norm of a block of `block` values
    (Alistarh et al. 2017, 1610.02132): k = floor(s x/N + u), u uniform in [0, 1), decoded to k N/s.

    s = 2^(bits-1) - 1 levels on either side of zero; N is sent in float32. Unbiased, with variance N^2/s^2 sum f(1 - f), f the
    fraction of s|x|/N. The paper rounds magnitudes, which is the same in distribution.

    >>> QSGD(4).encode(torch.tensor([3.0, -4.0]), key=1).array_bytes
    5
    """

    own_ends: ClassVar[bool] = True

    bits: int
    block: int = 128

    per: ClassVar[str] = "block"  # type: ignore[misc]
    rounding: ClassVar[str] = "stochastic"  # type: ignore[misc]

    def __post_init__(self) -> None:
        self._coerce(bits=check_integer("bits", self.bits, 2, 8), block=check_integer("block", self.block, 1))

    @property
    def levels(self) -> Levels:
        steps = (1 << (self.bits - 1)) - 1
        return Levels(self.bits, steps, middle=steps, last=2 * steps)

    def relative_variance(self, numel: int) -> float:
        length, steps = min(self.block, numel), self.levels.steps
        return min(length / steps**2, math.sqrt(length) / steps)

    @property
    def expands(self) -> bool:
        return self.block >= 4 * self.levels.steps**2  # as f(1 - f) <= 1/4

    def _ends(self, x: torch.Tensor, layout: Layout) -> Ends | None:
        if not layout.numel:
            return None
        _, greatest = _ranges(x, layout, absmax=True)
        with np.errstate(invalid="ignore"):  # NaN and infinity are rejected later
            norms = torch.from_numpy(np.sqrt(group_sums(x, layout, "squares").cpu().numpy())).to(x.device)
        # any end above all values is unbiased, so beyond float32's range its maximum will do
        norms = norms.clamp_max(torch.finfo(torch.float32).max).float()
        high = torch.where(torch.isfinite(greatest), torch.maximum(norms, greatest), greatest)
        return -high, high


# The torch reference of the kernels `uniform`.


def _quantize(
    x: torch.Tensor, coding: Coding, key: Key | None, ends: Ends | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the packed codes and the ends of each group's range as sent; rounds stochastically if `key` is given."""
    layout, levels, error = coding
    low, high = _ranges(x, layout, levels.absmax) if ends is None else ends
    if not torch.isfinite(low).all() or not torch.isfinite(high).all():
        raise error()
    center, span = _center_and_span(low, high, levels)
    scale = torch.where(span > 0, _steps(span, levels) / span, 0.0)  # a constant group has one level: the center
    codes = (layout.view(x).double() - layout.spread(center)).mul_(layout.spread(scale))
    codes = layout.flat(codes if key is not None else codes.round_())
    if key is not None:
        codes = codes.add_(uniform(key, x.numel(), x.device)).floor_()
    codes.add_(levels.middle).clamp_(0, levels.last)  # float64 input may slightly exceed its float32 range
    return to_bytes(pack(codes.to(torch.uint8), levels.bits)), to_bytes(low), to_bytes(high)


def _dequantize(
    codes: np.ndarray, low: np.ndarray, high: np.ndarray, coding: Coding, dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Return the flat values of packed codes."""
    layout, levels, error = coding
    least, greatest = (to_tensor(end, torch.float32, device) for end in (low, high))
    center, span = _center_and_span(least, greatest, levels)
    unpacked = unpack(to_tensor(codes, torch.uint8, device), layout.numel, levels.bits)
    if not torch.isfinite(span).all() or (span < 0).any() or (unpacked > levels.last).any():
        raise error()
    step = span / _steps(span, levels)
    steps = layout.view(unpacked - levels.middle).double()
    values = layout.flat(steps.mul_(layout.spread(step)).add_(layout.spread(center)))
    # to 16 bits via float32, as in the kernels
    return cast_saturating(values if dtype == torch.float64 else values.float(), dtype)


def _ranges(x: torch.Tensor, layout: Layout, absmax: bool) -> Ends:
    """Return the minimum and maximum of each group (absmax: -a and a); NaN and infinity pass through."""
    if not layout.numel:
        return torch.empty(0, device=x.device), torch.empty(0, device=x.device)
    viewed = layout.view(x)
    low, high = viewed.amin((0, 2)).float(), viewed.amax((0, 2)).float()
    if absmax:
        high = torch.maximum(low.abs(), high.abs())
        low = -high
    return low + 0.0, high + 0.0  # turns -0.0 into +0.0


def _center_and_span(low: torch.Tensor, high: torch.Tensor, levels: Levels) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the center of each group's range and its span up to the greatest value, float64."""
    low, high = low.double(), high.double()
    return (torch.zeros_like(high), high) if levels.absmax else (low, high - low)


def _steps(span: torch.Tensor, levels: Levels) -> torch.Tensor:
    """Return the number of steps as a tensor, since torch multiplies by the reciprocal when dividing by a Python number."""
    return torch.full_like(span, levels.steps)
