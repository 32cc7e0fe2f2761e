"""Quantisers of gradients that round at random, so that the mean over draws is the tensor: QSGD, TernGrad, natural compression."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.base import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.bits import pack, packed_bytes, unpack_bytes
from raysim.codecs.layout import Layout, layout_of
from raysim.codecs.quantize import Quantize
from raysim.codecs.random import bits64
from raysim.codecs.sums import group_sums
from raysim.codecs.uniform import UniformCodec
from raysim.notation import check_integer, check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_GREATEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, repr=False)
class QSGD(UniformCodec):
    """Rounds s x/N at random to a whole number beside it, N the Euclidean norm of a block of `block` values (Alistarh et al.
    2017, 1610.02132): floor(s x/N + u), decoded to N/s times that.

    s = 2^(bits-1) - 1 levels on either side of zero; N is sent in float32. Unbiased, with variance N^2/s^2 sum f(1 - f), f the
    fraction of s|x|/N. The paper rounds magnitudes, which is the same in distribution.

    >>> import torch
    >>> QSGD(4).encode(torch.tensor([3.0, -4.0]), key=1).array_bytes
    5
    """

    bits: int
    block: int = 128

    def __post_init__(self) -> None:
        self._coerce(bits=check_integer("bits", self.bits, 2, 8), block=check_integer("block", self.block, 1))

    per: ClassVar[str] = "block"  # type: ignore[misc]
    rounding: ClassVar[str] = "stochastic"  # type: ignore[misc]

    @property
    def _absmax(self) -> bool:
        return True

    @property
    def _steps(self) -> int:
        return (1 << (self.bits - 1)) - 1

    @property
    def _center_code(self) -> int:
        return self._steps

    @property
    def _last_code(self) -> int:
        return 2 * self._steps

    def relative_variance(self, numel: int) -> float:
        length = min(self.block, numel)
        return min(length / self._steps**2, math.sqrt(length) / self._steps)

    def _widened(self, x: Tensor, layout: Layout, low: np.ndarray, high: np.ndarray) -> None:
        greatest = np.maximum(-low, high)
        with np.errstate(invalid="ignore"):  # of NaN and infinity, which are refused after this
            # beyond float32 its end will do: whatever is no less than any value is unbiased
            norms = np.minimum(np.sqrt(group_sums(x, layout, "squares").cpu().numpy()), _GREATEST).astype(np.float32)
            high[:] = np.where(np.isfinite(greatest), np.maximum(norms, greatest), greatest)
        low[:] = -high


@dataclass(frozen=True, repr=False)
class TernGrad(Codec):
    """Rounds every value at random to -s, 0 or s, s the greatest magnitude after clipping (Wen et al. 2017, 1705.07878):
    floor(x/s + u) s.

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
        whole = layout_of((x.numel(),), "tensor", 0)
        mean = float(group_sums(x, whole, "sum")) / x.numel()
        spread = math.sqrt(float(group_sums(x, whole, "squares", mean)) / x.numel())
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
    """Rounds every magnitude at random to a power of two beside it (natural compression, Horvath et al. 2019, 1905.10988).

    |x| in [2^a, 2^(a+1)) goes up with probability |x|/2^a - 1, so the mean is x; the variance is at most ||x||^2/8. 9 bits a
    value: sign and exponent. Below 2^-126 it goes to 0 or 2^-126, and above 2^127 to 2^127.

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
        if kernels.serve(x) and x.numel():
            from raysim.codecs.kernels.random import round_to_powers

            bits, rounded = kernels.bits_of(x.contiguous().float()), np.empty(x.numel(), np.uint8)
            round_to_powers(bits, np.uint64((key or 0) % 2**64), rounded)
            return {"signs": np.packbits(bits < 0), "exponents": rounded}
        pattern = cast_saturating(x, torch.float32).contiguous().view(-1).view(torch.int32).long()
        draws = bits64(key or 0, x.numel(), x.device) & 0x7FFFFF
        # adding a random fraction to the fraction carries into the exponent with the right probability
        exponents = ((pattern & 0x7FFFFFFF) + draws >> 23).clamp_(max=254)
        flags = pack((pattern >> 31) & 1, 1)
        return {"signs": to_bytes(flags), "exponents": to_bytes(exponents.to(torch.uint8))}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        flags = to_tensor(packet.bytes_of("signs", packed_bytes(packet.numel, 1)), torch.uint8, device)
        sent, dtype = packet.bytes_of("exponents", packet.numel), DTYPES[packet.dtype]
        if kernels.serves(device):
            from raysim.codecs.kernels.random import join_powers

            pattern = kernels.empty(packet.numel, np.int32)
            if not join_powers(kernels.opened(sent), unpack_bytes(flags, packet.numel, 1).numpy(), pattern):
                raise self._out_of_bounds()
            return cast_saturating(torch.from_numpy(pattern).view(torch.float32), dtype).view(packet.shape)
        exponents = to_tensor(sent, torch.uint8, device).int()
        if (exponents == 255).any():
            raise self._out_of_bounds()
        values = (exponents << 23 | unpack_bytes(flags, packet.numel, 1).int() << 31).view(torch.float32)
        return cast_saturating(values, dtype).view(packet.shape)

    def _out_of_bounds(self) -> ValueError:
        return ValueError(f"A packet of {self!r} holds exponents out of bounds.")
