"""FixedPoint: the quantiser of AC-SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.codecs.quantize import Levels, UniformCodec
from raysim.notation import check_integer


@dataclass(frozen=True, repr=False)
class FixedPoint(UniformCodec):
    """Rounds x/s to a signed fixed-point number of `bits` bits, s the greatest magnitude of its group (AC-SGD, 2206.01299).

    z = clip(round(2^f x/s), -2^f, 2^f - 1) with f = bits - 1, decoded to s z/2^f: -s is kept exactly, +s becomes
    (1 - 2^-f) s. s is sent in float32, without the published code's float16 and epsilon, which shrink small gradients. `per`,
    `block` and `rounding` as in `Quantize`; the published group is the `channel`.

    Use: Comparison with AQ-SGD's published quantiser.

    >>> import torch
    >>> FixedPoint(2, per="tensor").encode(torch.tensor([-1, -0.6, -0.25, 0, 0.3, 0.6, 1])).decode()
    tensor([-1.0000, -0.5000,  0.0000,  0.0000,  0.5000,  0.5000,  0.5000])
    """

    variants: ClassVar[tuple[str, ...]] = ("FixedPoint(8)",)

    bits: int
    per: str = "channel"
    rounding: str = "nearest"
    block: int = 4096

    def __post_init__(self) -> None:
        self._check_groups()
        self._coerce(bits=check_integer("bits", self.bits, 1, 8))

    @property
    def expands(self) -> bool:
        return self.bits == 1  # which has no level above zero

    @property
    def levels(self) -> Levels:
        steps = 1 << (self.bits - 1)
        return Levels(self.bits, steps, middle=steps, last=2 * steps - 1)
