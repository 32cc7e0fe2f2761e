"""Sign and OneBit: two levels for each group of values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.codecs.bits import pack_bits
from raysim.codecs.codec import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes
from raysim.codecs.groups import BLOCK, Layout, check_groups, group_sums, layout_of
from raysim.notation import check_flag
from raysim.on_demand import torch


def _two_levels(packet: Packet, layout: Layout, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the value `low` or `high` (float64) of each group, chosen by the bitmap `signs`."""
    dtype = DTYPES[packet.dtype]
    signs = layout.view(packet.fields_of("signs", packet.numel, 1, low.device)).double()
    values = signs.mul_(layout.spread(high - low)).add_(layout.spread(low))
    return cast_saturating(layout.flat(values if dtype == torch.float64 else values.float()), dtype).view(packet.shape)


def _sizes(layout: Layout, device: torch.device) -> torch.Tensor:
    """Return the number of values of each group, float64; only the last block may have fewer."""
    sizes = torch.full(
        (layout.groups,), float(layout.numel // max(1, layout.groups)), dtype=torch.float64, device=device
    )
    if layout.numel % max(1, layout.groups * layout.inner):
        sizes.fill_(layout.inner)
        sizes[-1] = layout.numel - layout.inner * (layout.groups - 1)
    return sizes


@dataclass(frozen=True, repr=False)
class Sign(Codec):
    """Sends the sign, and the mean magnitude of each group: C(x) = (||x||_1/n) sign(x) (EF-signSGD, Karimireddy et al. 2019,
    1901.09847). sign(0) = +1.

    `scaled=False` is the plain sign of signSGD (Bernstein et al. 2018, 1802.04434): +1 or -1 for any magnitude, for majority
    votes over replicas. Groups as in `Quantize`.

    Use: Gradients in 1 bit, under error feedback.

    >>> Sign().encode(torch.tensor([1.0, -3.0])).decode()
    tensor([ 2., -2.])
    """

    variants: ClassVar[tuple[str, ...]] = ("Sign",)

    per: str = "tensor"
    block: int = BLOCK
    scaled: bool = True

    def __post_init__(self) -> None:
        self._coerce(block=check_groups(self.per, self.block))
        check_flag("scaled", self.scaled)
        if not self.scaled and self.per != "tensor":
            raise ValueError(
                f"`per` has no effect with `scaled=False`, which sends no scales, but got {self.per!r}. Leave it out."
            )

    def array_names(self) -> tuple[str, ...]:
        return ("signs", "scales") if self.scaled else ("signs",)

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        signs = {"signs": to_bytes(pack_bits(x.reshape(-1) >= 0))}
        if not self.scaled:
            return signs
        layout = layout_of(tuple(x.shape), self.per, self.block)
        means = group_sums(x, layout, "magnitudes") / _sizes(layout, x.device)
        return signs | {"scales": to_bytes(cast_saturating(means, torch.float32))}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        layout = layout_of(packet.shape, self.per, self.block)
        if self.scaled:
            scales = packet.floats_of("scales", layout.groups, device)
        else:
            scales = torch.ones(layout.groups, dtype=torch.float64, device=device)
        return _two_levels(packet, layout, -scales, scales)


@dataclass(frozen=True, repr=False)
class OneBit(Codec):
    """Sends a sign bit per value, and each group's means of the negative and of the other values (1-bit SGD, Seide et al. 2014).

    With error feedback the residuals of each sign sum to zero. Groups as in `Quantize`; the original groups by column.

    Use: Gradients in 1 bit, under error feedback.

    >>> OneBit().encode(torch.tensor([-1.0, -3.0, 2.0, 4.0])).decode()
    tensor([-2., -2.,  3.,  3.])
    """

    variants: ClassVar[tuple[str, ...]] = ("OneBit",)

    per: str = "tensor"
    block: int = BLOCK

    def __post_init__(self) -> None:
        self._coerce(block=check_groups(self.per, self.block))

    def array_names(self) -> tuple[str, ...]:
        return ("signs", "low", "high")

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        layout = layout_of(tuple(x.shape), self.per, self.block)
        counts = group_sums((x >= 0).float(), layout, "sum")
        others = _sizes(layout, x.device) - counts
        high = group_sums(x.clamp_min(0), layout, "sum") / counts.clamp_min(1)  # no values: mean 0
        low = group_sums(x.clamp_max(0), layout, "sum") / others.clamp_min(1)
        return {
            "signs": to_bytes(pack_bits(x.reshape(-1) >= 0)),
            "low": to_bytes(cast_saturating(low, torch.float32) + 0.0),
            "high": to_bytes(cast_saturating(high, torch.float32) + 0.0),
        }

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        layout = layout_of(packet.shape, self.per, self.block)
        low = packet.floats_of("low", layout.groups, device)
        return _two_levels(packet, layout, low, packet.floats_of("high", layout.groups, device))
