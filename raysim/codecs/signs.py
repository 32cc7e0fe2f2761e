"""Codecs of one bit a value: the sign, and the magnitudes that it decodes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.base import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.bits import pack_bits, packed_bytes, unpack_bits
from raysim.codecs.layout import BLOCK, PER, Layout, check_block, layout_of
from raysim.codecs.sums import group_sums
from raysim.notation import check_choice
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


def sign_bits(x: Tensor) -> np.ndarray:
    """Return the bitmap of x >= 0, flat."""
    if kernels.serve(x) and x.numel():
        return np.packbits(x.contiguous().view(-1).ge(0).numpy())
    return to_bytes(pack_bits(x.reshape(-1) >= 0))


def two_levels(packet: Packet, layout: Layout, low: Tensor, high: Tensor) -> Tensor:
    """Return the tensor whose values are `low` or `high` of their group (float64), as the bitmap `signs` says."""
    data = packet.bytes_of("signs", packed_bytes(packet.numel, 1))
    dtype = DTYPES[packet.dtype]
    if layout.numel and dtype != torch.float64 and kernels.serves(low.device):
        from raysim.codecs.kernels.uniform import dequantize

        out = kernels.empty(layout.numel, np.float32)
        step = (high - low).numpy()
        dequantize(kernels.opened(data), 0, layout.groups, layout.inner, low.numpy(), step, 0, 1, 1, out)
        return cast_saturating(torch.from_numpy(out), dtype).view(packet.shape)
    signs = layout.view(unpack_bits(to_tensor(data, torch.uint8, low.device), packet.numel)).double()
    values = signs.mul_(layout.spread(high - low)).add_(layout.spread(low))
    return cast_saturating(layout.flat(values if dtype == torch.float64 else values.float()), dtype).view(packet.shape)


def group_sizes(layout: Layout, device: torch.device) -> Tensor:
    """Return the number of values of each group, float64; only the last block may have fewer."""
    sizes = torch.full(
        (layout.groups,), float(layout.numel // max(1, layout.groups)), dtype=torch.float64, device=device
    )
    if layout.numel % max(1, layout.groups * layout.inner):
        sizes.fill_(layout.inner)
        sizes[-1] = layout.numel - layout.inner * (layout.groups - 1)
    return sizes


def read_floats(packet: Packet, name: str, count: int, device: torch.device | str) -> Tensor:
    """Return `count` finite float32 of a packet as float64; raises ValueError on others."""
    values = to_tensor(packet.bytes_of(name, 4 * count), torch.float32, device)
    if not torch.isfinite(values).all():
        raise ValueError(f"A packet of {packet.codec!r} holds `{name}` that are not finite.")
    return values.double()


@dataclass(frozen=True, repr=False)
class Sign(Codec):
    """Sends the sign, and the mean magnitude of each group: C(x) = (||x||_1/n) sign(x) (EF-signSGD, Karimireddy et al. 2019,
    1901.09847). sign(0) = +1.

    `scaled=False` is the plain sign of signSGD (Bernstein et al. 2018, 1802.04434): +1 or -1 whatever the magnitude, for
    majority votes over replicas. Groups as of `Quantize`.

    >>> Sign().encode(torch.tensor([1.0, -3.0])).decode()
    tensor([ 2., -2.])
    """

    per: str = "tensor"
    block: int = BLOCK
    scaled: bool = True

    def __post_init__(self) -> None:
        check_choice("per", self.per, PER)
        self._coerce(block=check_block(self.per, self.block))
        if not isinstance(self.scaled, bool):
            raise ValueError(f"`scaled` must be True or False, but got {self.scaled!r}.")
        if not self.scaled and self.per != "tensor":
            raise ValueError(f"`per` groups the scales that `scaled=False` leaves out, but got {self.per!r}.")

    def array_names(self) -> tuple[str, ...]:
        return ("signs", "scales") if self.scaled else ("signs",)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        signs = {"signs": sign_bits(x)}
        if not self.scaled:
            return signs
        layout = layout_of(tuple(x.shape), self.per, self.block)
        means = group_sums(x, layout, "magnitudes") / group_sizes(layout, x.device)
        return signs | {"scales": to_bytes(means.float())}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        layout = layout_of(packet.shape, self.per, self.block)
        if self.scaled:
            scales = read_floats(packet, "scales", layout.groups, device)
        else:
            scales = torch.ones(layout.groups, dtype=torch.float64, device=device)
        return two_levels(packet, layout, -scales, scales)


@dataclass(frozen=True, repr=False)
class OneBit(Codec):
    """Sends a bit for the sign of each value, and the means of negative and other values by group (1-bit SGD, Seide et al. 2014).

    With error feedback the residual of either kind sums to zero. Groups as of `Quantize`; the original groups by column.

    >>> OneBit().encode(torch.tensor([-1.0, -3.0, 2.0, 4.0])).decode()
    tensor([-2., -2.,  3.,  3.])
    """

    per: str = "tensor"
    block: int = BLOCK

    def __post_init__(self) -> None:
        check_choice("per", self.per, PER)
        self._coerce(block=check_block(self.per, self.block))

    def array_names(self) -> tuple[str, ...]:
        return ("signs", "low", "high")

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        layout = layout_of(tuple(x.shape), self.per, self.block)
        counts = group_sums(x, layout, "count")
        others = group_sizes(layout, x.device) - counts
        high = group_sums(x, layout, "positive") / counts.clamp_min(1)  # an empty kind has mean 0
        low = group_sums(x, layout, "negative") / others.clamp_min(1)
        return {"signs": sign_bits(x), "low": to_bytes(low.float() + 0.0), "high": to_bytes(high.float() + 0.0)}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        layout = layout_of(packet.shape, self.per, self.block)
        low = read_floats(packet, "low", layout.groups, device)
        return two_levels(packet, layout, low, read_floats(packet, "high", layout.groups, device))
