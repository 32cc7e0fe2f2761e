"""Block floating point: small floats that share a power of two (OCP microscaling formats, MX, 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.base import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.bits import pack, packed_bytes, unpack_bytes
from raysim.codecs.layout import Layout, layout_of
from raysim.notation import check_choice, check_integer
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_BIAS = 127  # of the shared exponents (E8M0)
# exponent of the greatest power of two of each element format
_TOP = {"e2m1": 2, "e4m3": 8, "e5m2": 15}
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# between which elements a value lies; ties go to the even code: up at some of the borders, down at the others
_E2M1_DOWN = (0.25, 1.25, 2.5, 5.0)
_E2M1_UP = (0.75, 1.75, 3.5)


def power_of_two(exponents: Tensor) -> Tensor:
    """Return 2 to whole exponents, exactly, float64; they are limited to -1022..1023. (`ldexp` goes by way of float32.)

    >>> power_of_two(torch.tensor([-149, 0, 3]))
    tensor([1.4013e-45, 1.0000e+00, 8.0000e+00], dtype=torch.float64)
    """
    return ((exponents.long().clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


@dataclass(frozen=True, repr=False)
class MX(Codec):
    """Sends each block of `block` values as elements of 4 or 8 bits with one shared power of two, in one byte.

    `element` is "e2m1" (MXFP4), "e4m3" or "e5m2" (MXFP8). The scale is 2^(floor(log2 a) - e), a the greatest magnitude of the
    block and e the exponent of the greatest element; elements are rounded to nearest even and saturate. MXFP4 costs 4.25 bits
    a value.

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

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        layout = layout_of(tuple(x.shape), "block", self.block)
        if not layout.numel:
            return {"codes": np.empty(0, np.uint8), "exponents": np.empty(0, np.uint8)}
        if kernels.serve(x):
            return self._encode_native(x.contiguous().float().view(-1), layout)
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

    def _encode_native(self, x: Tensor, layout: Layout) -> dict[str, np.ndarray]:
        from raysim.codecs.kernels import blockfloat as native

        exponents, scaled = np.empty(layout.groups, np.uint8), np.empty(layout.numel, np.float32)
        native.share_exponents(kernels.bits_of(x), x.numpy(), self.block, _TOP[self.element], exponents, scaled)
        if self.element != "e2m1":
            small = cast_saturating(torch.from_numpy(scaled), _float8(self.element))
            return {"exponents": exponents, "codes": to_bytes(small.view(torch.uint8))}
        codes = np.empty(layout.numel, np.uint8)
        native.round_e2m1(scaled, codes)
        return {"exponents": exponents, "codes": to_bytes(pack(torch.from_numpy(codes), 4))}

    def _elements(self) -> Tensor:
        """Return the value of every code, float32."""
        if self.element == "e2m1":
            return torch.tensor([*_E2M1, *(-value for value in _E2M1)])
        return torch.arange(256, dtype=torch.uint8).view(_float8(self.element)).float()

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        layout = layout_of(packet.shape, "block", self.block)
        width = 4 if self.element == "e2m1" else 8
        data = to_tensor(packet.bytes_of("codes", packed_bytes(layout.numel, width)), torch.uint8, device)
        shared, dtype = packet.bytes_of("exponents", layout.groups), DTYPES[packet.dtype]
        codes, table = unpack_bytes(data, layout.numel, width), self._elements()
        if layout.numel and dtype != torch.float64 and kernels.serves(device):
            from raysim.codecs.kernels.blockfloat import spread_exponents

            out = kernels.empty(layout.numel, np.float32)
            spread_exponents(kernels.opened(codes.numpy()), table.numpy(), self.block, kernels.opened(shared), out)
            values = torch.from_numpy(out)
        else:
            exponents = to_tensor(shared, torch.uint8, device).int() - _BIAS
            wide = layout.view(table.to(device)[codes.long()]).double() * layout.spread(power_of_two(exponents))
            values = layout.flat(wide) if dtype == torch.float64 else cast_saturating(layout.flat(wide), torch.float32)
        if (
            layout.numel and not torch.isfinite(torch.stack(torch.aminmax(values))).all()
        ):  # of codes that no encoder makes
            raise ValueError(f"A packet of {self!r} holds elements that are not finite.")
        return cast_saturating(values, dtype).view(packet.shape)


def _float8(element: str) -> torch.dtype:
    return torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2
