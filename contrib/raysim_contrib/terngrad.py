"""TernGrad: three levels, rounded at random."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.codecs import Quantize
from raysim.codecs.codec import Codec, Key, Packet, check_finite
from raysim.codecs.groups import total
from raysim.notation import check_real
from raysim.on_demand import torch

_TERNARY = Quantize(2, range="absmax", rounding="stochastic")


@dataclass(frozen=True, repr=False)
class TernGrad(Codec):
    """Stochastically rounds every value to -s, 0 or s, with s the largest magnitude after clipping (Wen et al. 2017,
    1705.07878): floor(x/s + u) s, u uniform in [0, 1).

    Values are first clipped to `clip` standard deviations of the tensor (None: no clipping; constant tensors are never
    clipped). Unbiased for the clipped tensor, with variance s ||x||_1 - ||x||^2. Sends 2 bits per value, and s in float32.

    Use: Gradients in 2 bits, unbiased after clipping.

    >>> TernGrad(clip=None).encode(torch.tensor([2.0, 0.0, -2.0]), key=1).decode()
    tensor([ 2.,  0., -2.])
    """

    variants: ClassVar[tuple[str, ...]] = ("TernGrad",)

    clip: float | None = 2.5

    def __post_init__(self) -> None:
        if self.clip is not None:
            self._coerce(clip=check_real("clip", self.clip, 0, 1e6, open_low=True))

    @property
    def random(self) -> bool:
        return True

    def relative_variance(self, numel: int) -> float | None:
        # the variance is s ||x||_1 - ||x||^2 with s the largest magnitude
        return math.sqrt(numel) - 1 if self.clip is None else None

    @property
    def expands(self) -> bool:
        return self.clip is None or self.clip >= 2  # clipped values have a variance of up to clip - 1

    def clipped(self, x: torch.Tensor) -> torch.Tensor:
        """Return the clipped `x`, for which the codec is unbiased."""
        if self.clip is None or not x.numel():
            return x
        mean = total(x, "sum") / x.numel()
        spread = math.sqrt(total(x, "squares", mean) / x.numel())
        limit = self.clip * spread
        return x.clamp(-limit, limit) if 0 < limit < torch.finfo(x.dtype).max else x

    def array_names(self) -> tuple[str, ...]:
        return ("codes", "high")

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        return _TERNARY.encode(self.clipped(x), key).arrays

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        return packet._replace(codec=_TERNARY).decode(device)
