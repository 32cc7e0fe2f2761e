"""Unbiased quantisers of gradients by stochastic rounding: TernGrad and natural compression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs.bits import pack_bits, packed_bytes, unpack_bytes
from raysim.codecs.codec import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.draws import bits64
from raysim.codecs.groups import total
from raysim.codecs.quantize import Quantize
from raysim.notation import check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class TernGrad(Codec):
    """Stochastically rounds every value to -s, 0 or s, s the greatest magnitude after clipping (Wen et al. 2017,
    1705.07878): floor(x/s + u) s, u uniform in [0, 1).

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

    def relative_variance(self, numel: int) -> float | None:
        # the variance is s ||x||_1 - ||x||^2 with s the greatest magnitude
        return math.sqrt(numel) - 1 if self.clip is None else None

    def clipped(self, x: Tensor) -> Tensor:
        """Return `x` clipped, the tensor for which the codec is unbiased."""
        if self.clip is None or not x.numel():
            return x
        mean = total(x, "sum") / x.numel()
        spread = math.sqrt(total(x, "squares", mean) / x.numel())
        limit = self.clip * spread
        return x.clamp(-limit, limit) if 0 < limit < torch.finfo(x.dtype).max else x

    def array_names(self) -> tuple[str, ...]:
        return ("codes", "high")

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        return _TERNARY.encode(self.clipped(x), key).arrays

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        return packet._replace(codec=_TERNARY).decode(device)


_TERNARY = Quantize(2, range="absmax", rounding="stochastic")


@dataclass(frozen=True, repr=False)
class Natural(Codec):
    """Stochastically rounds every magnitude to a neighbouring power of two (natural compression, Horvath et al. 2019, 1905.10988).

    |x| in [2^a, 2^(a+1)) is rounded up with probability |x|/2^a - 1, so the mean is x; the variance is at most
    ||x||^2/8. 9 bits per value: sign and exponent. Magnitudes below 2^-126 become 0 or 2^-126, and magnitudes above
    2^127 become 2^127.

    >>> Natural().encode(torch.tensor([1.0, -0.5, 0.0]), key=1).decode()
    tensor([ 1.0000, -0.5000,  0.0000])
    """

    @property
    def random(self) -> bool:
        return True

    def relative_variance(self, numel: int) -> float:
        return 0.125

    def array_names(self) -> tuple[str, ...]:
        return ("signs", "exponents")

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        pattern = cast_saturating(x, torch.float32).contiguous().view(-1).view(torch.int32)
        draws = (bits64(key or 0, x.numel(), x.device) & 0x7FFFFF).to(torch.int32)
        # adding a random fraction to the fraction carries into the exponent with the right probability
        exponents = (draws.add_(pattern & 0x7FFFFFFF) >> 23).clamp_(max=254)
        return {"signs": to_bytes(pack_bits(pattern < 0)), "exponents": to_bytes(exponents.to(torch.uint8))}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        flags = to_tensor(packet.bytes_of("signs", packed_bytes(packet.numel, 1)), torch.uint8, device)
        exponents = to_tensor(packet.bytes_of("exponents", packet.numel), torch.uint8, device).int()
        if (exponents == 255).any():
            raise ValueError(f"A packet of {self!r} holds exponents out of bounds.")
        values = (exponents << 23 | unpack_bytes(flags, packet.numel, 1).int() << 31).view(torch.float32)
        return cast_saturating(values, DTYPES[packet.dtype]).view(packet.shape)
