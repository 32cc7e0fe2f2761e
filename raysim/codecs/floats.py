"""Floating-point codecs: Identity, Cast, MX with shared exponents, Natural with exponents only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.codecs.bits import pack
from raysim.codecs.codec import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.groups import layout_of
from raysim.notation import check_choice, check_integer
from raysim.on_demand import torch

_BIAS = 127  # exponent bias of the shared scales (E8M0)
# exponent of the largest power of two in each element format
_TOP = {"e2m1": 2, "e4m3": 8, "e5m2": 15}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# rounding borders between elements; ties go to the even code: up at some borders, down at others
_E2M1_DOWN = (0.25, 1.25, 2.5, 5.0)
_E2M1_UP = (0.75, 1.75, 3.5)


@dataclass(frozen=True, repr=False)
class Identity(Codec):
    """Sends the tensor uncompressed: the dense baseline.

    >>> Identity().encode(torch.ones(2, 3)).array_bytes
    24
    """

    copies: ClassVar[bool] = True

    def relative_variance(self, numel: int) -> float:
        return 0.0

    def array_names(self) -> tuple[str, ...]:
        return ("values",)

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        return {"values": to_bytes(x)}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        data = packet.bytes_of("values", packet.dense_bytes)
        return to_tensor(data, DTYPES[packet.dtype], device).view(packet.shape)


@dataclass(frozen=True, repr=False)
class Cast(Codec):
    """Sends a tensor in 16 bits: `Cast("bfloat16")` or `Cast("float16")`, rounded to nearest even.

    float16 saturates at 65504, so finite tensors stay finite.

    >>> Cast("float16").encode(torch.tensor([1.0, 1e6])).decode()
    tensor([1.0000e+00, 6.5504e+04])
    """

    target: str

    def __post_init__(self) -> None:
        check_choice("target", self.target, ["bfloat16", "float16"])

    def array_names(self) -> tuple[str, ...]:
        return ("values",)

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        return {"values": to_bytes(cast_saturating(x, DTYPES[self.target]))}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        dtype = DTYPES[self.target]
        data = packet.bytes_of("values", packet.numel * dtype.itemsize)
        return cast_saturating(to_tensor(data, dtype, device), DTYPES[packet.dtype]).view(packet.shape)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return exact powers of two in float64, exponents clamped to -1022..1023. (`ldexp` computes in float32.)

    >>> power_of_two(torch.tensor([-149, 0, 3]))
    tensor([1.4013e-45, 1.0000e+00, 8.0000e+00], dtype=torch.float64)
    """
    return ((exponents.long().clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


@dataclass(frozen=True, repr=False)
class MX(Codec):
    """Sends blocks of `block` values as 4- or 8-bit floats that share a power-of-two scale of one byte (OCP microscaling formats,
    2023).

    `element` is "e2m1" (MXFP4), "e4m3" or "e5m2" (MXFP8). The scale is 2^(floor(log2 a) - e), where a is the largest magnitude of
    the block and e the exponent of the largest element; elements are rounded to nearest even and saturate. MXFP4 takes 4.25 bits
    per value.

    >>> MX("e2m1").encode(torch.tensor([6.0, 5.0, -3.4, 0.2])).decode()
    tensor([ 6.,  4., -3.,  0.])
    """

    element: str
    block: int = 32

    def __post_init__(self) -> None:
        check_choice("element", self.element, _TOP)
        self._coerce(block=check_integer("block", self.block, 1))

    def array_names(self) -> tuple[str, ...]:
        return ("codes", "exponents")

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        layout = layout_of(tuple(x.shape), "block", self.block)
        if not layout.numel:
            return {"codes": np.empty(0, np.uint8), "exponents": np.empty(0, np.uint8)}
        values = layout.view(cast_saturating(x, torch.float32))
        exponents = torch.frexp(values.abs().amax((0, 2))).exponent - 1 - _TOP[self.element]
        exponents = torch.where(values.any(dim=2).view(-1), exponents.clamp(-_BIAS, _BIAS), -_BIAS)
        scaled = layout.flat(values.double() * layout.spread(power_of_two(-exponents))).float()
        arrays = {"exponents": to_bytes((exponents + _BIAS).to(torch.uint8))}
        if self.element != "e2m1":
            return arrays | {"codes": to_bytes(cast_saturating(scaled, _float8(self.element)).view(torch.uint8))}
        magnitudes, codes = scaled.abs(), torch.zeros_like(scaled, dtype=torch.uint8)
        for border in _E2M1_DOWN:
            codes += magnitudes > border
        for border in _E2M1_UP:
            codes += magnitudes >= border
        return arrays | {"codes": to_bytes(pack(codes | (scaled < 0).to(torch.uint8) << 3, 4))}

    def _elements(self) -> torch.Tensor:
        """Return the value of every code, float32."""
        if self.element == "e2m1":
            return torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        return torch.arange(256, dtype=torch.uint8).view(_float8(self.element)).float()

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        layout = layout_of(packet.shape, "block", self.block)
        width = 4 if self.element == "e2m1" else 8
        codes, table = packet.fields_of("codes", layout.numel, width, device), self._elements()
        exponents = packet.fields_of("exponents", layout.groups, 8, device).int() - _BIAS
        dtype = DTYPES[packet.dtype]
        wide = layout.view(table.to(device)[codes.long()]).double() * layout.spread(power_of_two(exponents))
        values = layout.flat(wide) if dtype == torch.float64 else cast_saturating(layout.flat(wide), torch.float32)
        if layout.numel and not torch.isfinite(torch.stack(torch.aminmax(values))).all():  # no encoder emits such codes
            raise ValueError(f"A packet of {self!r} holds elements that are not finite.")
        return cast_saturating(values, dtype).view(packet.shape)


def _float8(element: str) -> torch.dtype:
    return torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2
