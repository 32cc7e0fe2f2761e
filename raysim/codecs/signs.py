"""Codecs of at most two bits per value: its sign, two or three levels per group, or only the mean."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.bits import pack_bits, packed_bytes, unpack_bits
from raysim.codecs.codec import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.groups import BLOCK, Layout, check_groups, group_sizes, group_sums, layout_of, total
from raysim.codecs.quantize import Levels, Quantize
from raysim.notation import check_flag
from raysim.on_demand import torch


def _two_levels(packet: Packet, layout: Layout, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the value `low` or `high` (float64) of each group, chosen by the bitmap `signs`."""
    data = packet.bytes_of("signs", packed_bytes(packet.numel, 1))
    dtype = DTYPES[packet.dtype]
    if expand := kernels.find_on("uniform.expand", low.device, layout.numel, dtype):
        levels = Levels(bits=1, steps=1, middle=0, last=1)
        x: torch.Tensor = expand(data, layout, levels, low.numpy(), (high - low).numpy())
        return cast_saturating(x, dtype).view(packet.shape)
    signs = layout.view(unpack_bits(to_tensor(data, torch.uint8, low.device), packet.numel)).double()
    values = signs.mul_(layout.spread(high - low)).add_(layout.spread(low))
    return cast_saturating(layout.flat(values if dtype == torch.float64 else values.float()), dtype).view(packet.shape)


@dataclass(frozen=True, repr=False)
class Sign(Codec):
    """Sends the sign, and the mean magnitude of each group: C(x) = (||x||_1/n) sign(x) (EF-signSGD, Karimireddy et al. 2019,
    1901.09847). sign(0) = +1.

    `scaled=False` is the plain sign of signSGD (Bernstein et al. 2018, 1802.04434): +1 or -1 for any magnitude, for majority
    votes over replicas. Groups as in `Quantize`.

    >>> Sign().encode(torch.tensor([1.0, -3.0])).decode()
    tensor([ 2., -2.])
    """

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
        means = group_sums(x, layout, "magnitudes") / group_sizes(layout, x.device)
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

    >>> OneBit().encode(torch.tensor([-1.0, -3.0, 2.0, 4.0])).decode()
    tensor([-2., -2.,  3.,  3.])
    """

    per: str = "tensor"
    block: int = BLOCK

    def __post_init__(self) -> None:
        self._coerce(block=check_groups(self.per, self.block))

    def array_names(self) -> tuple[str, ...]:
        return ("signs", "low", "high")

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        layout = layout_of(tuple(x.shape), self.per, self.block)
        counts = group_sums(x, layout, "count")
        others = group_sizes(layout, x.device) - counts
        high = group_sums(x, layout, "positive") / counts.clamp_min(1)  # no values: mean 0
        low = group_sums(x, layout, "negative") / others.clamp_min(1)
        return {
            "signs": to_bytes(pack_bits(x.reshape(-1) >= 0)),
            "low": to_bytes(cast_saturating(low, torch.float32) + 0.0),
            "high": to_bytes(cast_saturating(high, torch.float32) + 0.0),
        }

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        layout = layout_of(packet.shape, self.per, self.block)
        low = packet.floats_of("low", layout.groups, device)
        return _two_levels(packet, layout, low, packet.floats_of("high", layout.groups, device))


_TERNARY = Quantize(2, range="absmax", rounding="stochastic")


@dataclass(frozen=True, repr=False)
class Mean(Codec):
    """Sends only the mean of all values, in 4 bytes: for sparse codecs whose kept values share a sign (RedSync).

    >>> Mean().encode(torch.tensor([1.0, 2.0, 6.0])).decode()
    tensor([3., 3., 3.])
    """

    def array_names(self) -> tuple[str, ...]:
        return ("mean",)

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        if not x.numel():
            return {"mean": np.empty(0, np.uint8)}
        mean = total(x, "sum") / x.numel() + 0.0  # turns -0.0 into +0.0
        return {"mean": to_bytes(cast_saturating(torch.tensor([mean], dtype=torch.float64), torch.float32))}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        mean = packet.floats_of("mean", 1 if packet.numel else 0, device)
        return cast_saturating(mean, DTYPES[packet.dtype]).expand(packet.numel).reshape(packet.shape)
