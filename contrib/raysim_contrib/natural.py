"""Natural: powers of two, rounded at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.codecs.bits import pack_bits
from raysim.codecs.codec import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes
from raysim.codecs.draws import bits64
from raysim.on_demand import torch


@dataclass(frozen=True, repr=False)
class Natural(Codec):
    """Stochastically rounds every magnitude to a neighbouring power of two (natural compression, Horvath et al. 2019, 1905.10988).

    |x| in [2^a, 2^(a+1)) is rounded up with probability |x|/2^a - 1, so the mean is x; the variance is at most
    ||x||^2/8. 9 bits per value: sign and exponent. Magnitudes below 2^-126 become 0 or 2^-126, and magnitudes above
    2^127 become 2^127.

    Use: An unbiased codec for DIANA and MARINA: 9 bits.

    >>> Natural().encode(torch.tensor([1.0, -0.5, 0.0]), key=1).decode()
    tensor([ 1.0000, -0.5000,  0.0000])
    """

    variants: ClassVar[tuple[str, ...]] = ("Natural",)

    @property
    def random(self) -> bool:
        return True

    def relative_variance(self, numel: int) -> float:
        return 0.125

    def array_names(self) -> tuple[str, ...]:
        return ("signs", "exponents")

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        pattern = cast_saturating(x, torch.float32).contiguous().view(-1).view(torch.int32)
        draws = (bits64(key or 0, x.numel(), x.device) & 0x7FFFFF).to(torch.int32)
        # adding random bits to the mantissa carries into the exponent with the right probability
        exponents = (draws.add_(pattern & 0x7FFFFFFF) >> 23).clamp_(max=254)
        return {"signs": to_bytes(pack_bits(pattern < 0)), "exponents": to_bytes(exponents.to(torch.uint8))}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        signs = packet.fields_of("signs", packet.numel, 1, device).int()
        exponents = packet.fields_of("exponents", packet.numel, 8, device).int()
        if (exponents == 255).any():
            raise ValueError(f"A packet of {self!r} holds exponents out of bounds.")
        values = (exponents << 23 | signs << 31).view(torch.float32)
        return cast_saturating(values, DTYPES[packet.dtype]).view(packet.shape)
