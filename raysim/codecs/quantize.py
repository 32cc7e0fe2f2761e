"""Uniform quantisation to 1..8 bits, packed at every width."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raysim.codecs.bits import pack, packed_bytes, unpack
from raysim.codecs.packet import DTYPES, Codec, Key, NonFiniteError, Packet, to_bytes, to_tensor
from raysim.codecs.random import uniform
from raysim.notation import check_choice, check_integer


@dataclass(frozen=True, repr=False)
class Quantize(Codec):
    """Rounds every value to one of 2**bits levels, evenly spaced over the range of its group.

    `range="minmax"` (Rudakov et al. 2023, 2401.07788): code = round((2^b - 1)(x - m)/(M - m)), decoded to
    m + (M - m) code/(2^b - 1); the least value m and the greatest M are sent in float32. `range="absmax"`: 2^b - 1 levels
    around zero, code = round((2^(b-1) - 1) x/a), decoded to a code/(2^(b-1) - 1); zero stays zero, and a is sent.

    A group is the `tensor`, a `sample` (first axis) or a `channel` (axis 1 of images, the last axis of (batch, length,
    width)). `rounding` is to the nearest level, half to even, or `stochastic`: unbiased between the levels, with a key.
    Codes are computed in float64, so neither tiny nor huge ranges overflow.

    >>> packet = Quantize(2).encode(torch.tensor([-1.0, 0.0, 1.0]))
    >>> packet.decode(), packet.wire_bytes
    (tensor([-1.0000,  0.3333,  1.0000]), 9)
    >>> Quantize(2, range="absmax").encode(torch.tensor([-1.0, 0.0, 1.0])).decode()
    tensor([-1.,  0.,  1.])
    """

    bits: int
    range: str = "minmax"
    per: str = "tensor"
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        check_choice("range", self.range, ["minmax", "absmax"])
        check_choice("per", self.per, ["tensor", "sample", "channel"])
        check_choice("rounding", self.rounding, ["nearest", "stochastic"])
        self._coerce(bits=check_integer("bits", self.bits, 1, 8))
        if self.range == "absmax" and self.bits < 2:
            raise ValueError("`bits` must be at least 2 with `range='absmax'`, which keeps a level for zero, but got 1.")

    @property
    def random(self) -> bool:
        return self.rounding == "stochastic"

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        shape = tuple(x.shape)
        low, high = self._ranges(x)
        if not torch.isfinite(low).all() or not torch.isfinite(high).all():
            raise NonFiniteError(f"A tensor to send by {self!r} holds NaN or infinity.")
        center, span = self._grid(low, high)
        scale = torch.where(span > 0, self._steps / span, 0.0)  # a constant group has one level: the center
        codes = (x.double() - self._spread(center, shape)).mul_(self._spread(scale, shape))
        if key is not None and self.random:
            codes.add_(uniform(key, x.numel(), x.device).view(shape)).floor_()
        else:
            codes.round_()
        codes.add_(self._center_code).clamp_(0, self._last_code)  # float64 input may pass its float32 range by a hair
        arrays = {"codes": to_bytes(pack(codes.reshape(-1).to(torch.uint8), self.bits)), "high": to_bytes(high)}
        return arrays | ({"low": to_bytes(low)} if self.range == "minmax" else {})

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        shape, groups = packet.shape, self._num_groups(packet.shape)
        data = to_tensor(packet.bytes_of("codes", packed_bytes(packet.numel, self.bits)), torch.uint8, device)
        high = to_tensor(packet.bytes_of("high", 4 * groups), torch.float32, device)
        low = -high
        if self.range == "minmax":
            low = to_tensor(packet.bytes_of("low", 4 * groups), torch.float32, device)
        center, span = self._grid(low, high)
        codes = unpack(data, packet.numel, self.bits)
        if not torch.isfinite(span).all() or (span < 0).any() or (codes > self._last_code).any():
            raise ValueError(f"A packet of {self!r} holds codes or ranges out of bounds.")
        # center + span * (code / steps), the quotient first: it is exactly 1 at the end of the range, so the ends are exact
        values = (codes - self._center_code).double().div_(self._steps).view(shape)
        values.mul_(self._spread(span, shape)).add_(self._spread(center, shape))
        return values.to(DTYPES[packet.dtype])

    @property
    def _steps(self) -> int:
        """Steps from the center to the end of the range."""
        return (1 << self.bits) - 1 if self.range == "minmax" else (1 << (self.bits - 1)) - 1

    @property
    def _center_code(self) -> int:
        return 0 if self.range == "minmax" else self._steps

    @property
    def _last_code(self) -> int:
        return self._steps + self._center_code

    def _num_groups(self, shape: tuple[int, ...]) -> int:
        if math.prod(shape) == 0:
            return 0
        return 1 if self.per == "tensor" or not shape else shape[self._axis(shape)]

    def _axis(self, shape: tuple[int, ...]) -> int:
        if self.per == "sample":
            return 0
        return 2 if len(shape) == 3 else min(1, len(shape) - 1)

    def _spread(self, per_group: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return one value a group in a shape that broadcasts over a tensor of `shape`."""
        if per_group.numel() <= 1:  # none for an empty tensor, which broadcasts with one but not with zero
            return per_group.view(()) if per_group.numel() else torch.zeros((), dtype=per_group.dtype, device=per_group.device)
        axis = self._axis(shape)
        return per_group.view([-1 if index == axis else 1 for index in range(len(shape))])

    def _ranges(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return least and greatest value of each group, flat float32 (absmax: -a and a); NaN and infinity pass through."""
        shape = tuple(x.shape)
        if x.numel() == 0:
            return torch.empty(0, device=x.device), torch.empty(0, device=x.device)
        if self.per == "tensor" or not shape:
            low, high = torch.aminmax(x)
        else:
            others = [index for index in range(len(shape)) if index != self._axis(shape)]
            low, high = (x.amin(others), x.amax(others)) if others else (x, x)
        low, high = low.float().view(-1) + 0.0, high.float().view(-1) + 0.0  # of the two zeros always the positive one
        if self.range == "absmax":
            high = torch.maximum(low.abs(), high.abs())
            low = -high
        return low, high

    def _grid(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the center of the grid (the least value, or zero) and its span up to the greatest, float64 a group."""
        low, high = low.double(), high.double()
        return (low, high - low) if self.range == "minmax" else (torch.zeros_like(high), high)
