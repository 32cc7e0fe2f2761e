"""Quantisers of gradients that round at random, so that the mean over draws is the tensor: QSGD, TernGrad, natural compression."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raysim.codecs.bits import pack, packed_bytes, unpack
from raysim.codecs.layout import layout_of
from raysim.codecs.packet import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.random import bits64, uniform
from raysim.codecs.signs import read_floats
from raysim.codecs.sums import group_sums
from raysim.notation import check_integer, check_real

_GREATEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, repr=False)
class QSGD(Codec):
    """Rounds |x|/N at random to a multiple of 1/s, N the Euclidean norm of a block of `block` values (Alistarh et al. 2017,
    1610.02132): y = s|x|/N, q = floor(y) + [u < y - floor(y)], decoded to N sign(x) q/s.

    s = 2^(bits-1) - 1 levels on either side of zero; N is sent in float32. Unbiased, with variance N^2/s^2 sum f(1 - f), f the
    fraction of y.

    >>> QSGD(4).encode(torch.tensor([3.0, -4.0]), key=1).wire_bytes
    5
    """

    bits: int
    block: int = 128

    def __post_init__(self) -> None:
        self._coerce(bits=check_integer("bits", self.bits, 2, 8), block=check_integer("block", self.block, 1))

    @property
    def random(self) -> bool:
        return True

    @property
    def _levels(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        layout = layout_of(tuple(x.shape), "block", self.block)
        if not layout.numel:
            return {"codes": np.empty(0, np.uint8), "norms": np.empty(0, np.uint8)}
        # a norm beyond float32 is no less than any value where it is cut to its end, and so still unbiased
        norms = group_sums(x, layout, 2).sqrt_().clamp_(max=_GREATEST).float()
        wide = layout.spread(norms.double())
        values = layout.view(x).double()
        share = torch.where(wide > 0, values.abs() / wide, 0.0).mul_(self._levels)
        draws = uniform(key or 0, layout.numel, x.device)
        levels = layout.flat(share).add(draws).floor_().clamp_(max=self._levels)
        codes = torch.where(layout.flat(values) < 0, -levels, levels).add_(self._levels)
        return {"codes": to_bytes(pack(codes.to(torch.uint8), self.bits)), "norms": to_bytes(norms)}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        layout = layout_of(packet.shape, "block", self.block)
        data = to_tensor(packet.bytes_of("codes", packed_bytes(layout.numel, self.bits)), torch.uint8, device)
        norms = read_floats(packet, "norms", layout.groups, device)
        levels = unpack(data, layout.numel, self.bits) - self._levels
        if (levels > self._levels).any() or (norms < 0).any():
            raise ValueError(f"A packet of {self!r} holds codes or norms out of bounds.")
        values = layout.view(levels).double().div_(self._levels).mul_(layout.spread(norms))
        return cast_saturating(layout.flat(values), DTYPES[packet.dtype]).view(packet.shape)


@dataclass(frozen=True, repr=False)
class TernGrad(Codec):
    """Rounds every value at random to -s, 0 or s, s the greatest magnitude after clipping (Wen et al. 2017, 1705.07878):
    s sign(x) [u < |x|/s].

    Values are clipped to `clip` standard deviations of the tensor first (None: not at all; a constant tensor never). Unbiased
    for the clipped tensor, with variance s ||x||_1 - ||x||^2. 2 bits a value, and s in float32.

    >>> TernGrad(clip=None).encode(torch.tensor([2.0, 0.0, -2.0]), key=1).decode()
    tensor([ 2.,  0., -2.])
    """

    clip: float | None = 2.5

    def __post_init__(self) -> None:
        if self.clip is not None:
            self._coerce(clip=check_real("clip", self.clip, 0, 1e6, open_low=True))

    @property
    def random(self) -> bool:
        return True

    def clipped(self, x: Tensor) -> Tensor:
        """Return what the codec is unbiased for: `x` clipped, flat and float64."""
        flat = x.reshape(-1).double()
        layout = layout_of((flat.numel(),), "tensor", 0)
        if self.clip is None or not flat.numel():
            return flat
        mean = group_sums(x, layout, 0) / flat.numel()
        # of float32 differences, so that the sum is the same whatever does it
        spread = (group_sums((flat - mean).float(), layout, 2) / flat.numel()).sqrt_()
        limit = self.clip * spread
        return torch.where(limit > 0, flat.clamp(-limit, limit), flat)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        flat = self.clipped(x)
        if not flat.numel():
            return {"codes": np.empty(0, np.uint8), "scale": np.empty(0, np.uint8)}
        scale = flat.abs().amax().clamp(max=_GREATEST).float().view(1)
        wide = scale.double()
        kept = uniform(key or 0, len(flat), x.device) < torch.where(wide > 0, flat.abs() / wide, 0.0)
        codes = torch.where(kept, flat.sign(), 0.0).add_(1)
        return {"codes": to_bytes(pack(codes.to(torch.uint8), 2)), "scale": to_bytes(scale)}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        data = to_tensor(packet.bytes_of("codes", packed_bytes(packet.numel, 2)), torch.uint8, device)
        scale = read_floats(packet, "scale", min(1, packet.numel), device)
        signs = unpack(data, packet.numel, 2) - 1
        if (signs > 1).any() or (scale < 0).any():
            raise ValueError(f"A packet of {self!r} holds codes or a scale out of bounds.")
        return cast_saturating(signs.double() * scale, DTYPES[packet.dtype]).view(packet.shape)


@dataclass(frozen=True, repr=False)
class Natural(Codec):
    """Rounds every magnitude at random to a power of two beside it (natural compression, Horvath et al. 2019, 1905.10988).

    |x| in [2^a, 2^(a+1)) goes up with probability |x|/2^a - 1, so the mean is x; the variance is at most ||x||^2/8. 9 bits a
    value: sign and exponent. Below 2^-126 it goes to 0 or 2^-126, and above 2^127 to 2^127.

    >>> Natural().encode(torch.tensor([1.0, -0.5, 0.0]), key=1).decode()
    tensor([ 1.0000, -0.5000,  0.0000])
    """

    @property
    def random(self) -> bool:
        return True

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        pattern = cast_saturating(x, torch.float32).contiguous().view(-1).view(torch.int32).long()
        draws = bits64(key or 0, x.numel(), x.device) & 0x7FFFFF
        # adding a random fraction to the fraction carries into the exponent with the right probability
        exponents = ((pattern & 0x7FFFFFFF) + draws >> 23).clamp_(max=254)
        flags = pack((pattern >> 31) & 1, 1)
        return {"signs": to_bytes(flags), "exponents": to_bytes(exponents.to(torch.uint8))}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        flags = to_tensor(packet.bytes_of("signs", packed_bytes(packet.numel, 1)), torch.uint8, device)
        exponents = to_tensor(packet.bytes_of("exponents", packet.numel), torch.uint8, device).int()
        if (exponents == 255).any():
            raise ValueError(f"A packet of {self!r} holds exponents out of bounds.")
        pattern = exponents << 23
        values = torch.where(
            unpack(flags, packet.numel, 1).bool(), -pattern.view(torch.float32), pattern.view(torch.float32)
        )
        return cast_saturating(values, DTYPES[packet.dtype]).view(packet.shape)
