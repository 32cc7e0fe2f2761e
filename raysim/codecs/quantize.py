"""Uniform quantisation to 1..8 bits, packed at every width."""

from __future__ import annotations

from dataclasses import dataclass

from raysim.codecs.uniform import UniformCodec
from raysim.notation import check_choice, check_integer


@dataclass(frozen=True, repr=False)
class Quantize(UniformCodec):
    """Rounds every value to one of 2**bits levels, evenly spaced over the range of its group.

    `range="minmax"` (Rudakov et al. 2023, 2401.07788): code = round((2^b - 1)(x - m)/(M - m)), decoded to
    m + (M - m) code/(2^b - 1); the least value m and the greatest M are sent in float32. `range="absmax"`: 2^b - 1 levels
    around zero, code = round((2^(b-1) - 1) x/a), decoded to a code/(2^(b-1) - 1); zero stays zero, and a is sent.

    A group is the `tensor`, a `sample` (first axis), a `channel` (axis 1 of images, the last axis of (batch, length, width)),
    a `row` (along the last axis: a token) or a `block` of consecutive values; `Quantize(8, range="absmax", per="block")` is
    blockwise int8, as hivemind and Petals send tensors (without their codebook). `rounding` is to the nearest level, half to
    even, or `stochastic`: unbiased between the levels, with a key.

    >>> import torch
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
    def _absmax(self) -> bool:
        return self.range == "absmax"

    @property
    def _steps(self) -> int:
        return (1 << self.bits) - 1 if self.range == "minmax" else (1 << (self.bits - 1)) - 1

    @property
    def _center_code(self) -> int:
        return 0 if self.range == "minmax" else self._steps

    @property
    def _last_code(self) -> int:
        return self._steps + self._center_code


@dataclass(frozen=True, repr=False)
class FixedPoint(UniformCodec):
    """Rounds x/s to a signed fixed-point number of `bits` bits, s the greatest magnitude of its group (AC-SGD, 2206.01299).

    z = clip(round(2^f x/s), -2^f, 2^f - 1) with f = bits - 1, decoded to s z/2^f: -s is kept exactly, +s becomes
    (1 - 2^-f) s. s is sent in float32, without the published code's float16 and epsilon, which shrink small gradients. `per`,
    `block` and `rounding` as of `Quantize`; the published group is the `channel`.

    >>> import torch
    >>> FixedPoint(2, per="tensor").encode(torch.tensor([-1, -0.6, -0.25, 0, 0.3, 0.6, 1])).decode()
    tensor([-1.0000, -0.5000,  0.0000,  0.0000,  0.5000,  0.5000,  0.5000])
    """

    bits: int
    per: str = "channel"
    rounding: str = "nearest"
    block: int = 4096

    def __post_init__(self) -> None:
        self._check_groups()
        self._coerce(bits=check_integer("bits", self.bits, 1, 8))

    @property
    def _absmax(self) -> bool:
        return True

    @property
    def _steps(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def _center_code(self) -> int:
        return self._steps

    @property
    def _last_code(self) -> int:
        return 2 * self._steps - 1
