"""Levels fitted to the tensor: NonUniform, and Mean with a single one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from raysim.codecs.bits import pack
from raysim.codecs.codec import (
    DTYPES,
    Codec,
    Key,
    Packet,
    cast_saturating,
    check_finite,
    to_bytes,
)
from raysim.codecs.groups import total
from raysim.notation import check_choice, check_integer
from raysim.on_demand import torch

_SAMPLE = 1 << 14  # values that the levels are fitted to
_SWEEPS = 30
_FEW = 31  # number of borders up to which comparing each is faster than a binary search


@dataclass(frozen=True, repr=False)
class NonUniform(Codec):
    """Rounds to one of 2**bits levels fitted to the tensor, which are sent in float32.

    `fit="lloyd"` (Lloyd 1957, Max 1960): the nearest level. Levels start at the quantiles of an evenly spaced sample of 16,384
    values and are refined in 30 iterations. The level nearest to zero is set to zero. The others send the mean of each of 2**bits
    buckets, as hivemind does with 8 bits: "quantile" buckets have equal counts, "deviation" buckets equal width within three
    standard deviations of the mean.

    >>> NonUniform(2).encode(torch.tensor([0.0, 1.0, 1.0, -7.0, 100.0, 1.0])).decode()
    tensor([  0.,   1.,   1.,  -7., 100.,   1.])
    >>> NonUniform(1, fit="quantile").encode(torch.tensor([1.0, 2.0, 5.0, 7.0])).decode()
    tensor([1.5000, 1.5000, 6.0000, 6.0000])
    """

    bits: int
    fit: str = "lloyd"

    def __post_init__(self) -> None:
        self._coerce(bits=check_integer("bits", self.bits, 1, 8))
        check_choice("fit", self.fit, ["lloyd", "quantile", "deviation"])

    def _sample(self, x: torch.Tensor) -> np.ndarray:
        """Return evenly spaced values of flat `x`, sorted, float64."""
        return np.sort(x[:: max(1, -(-x.numel() // _SAMPLE))].double().cpu().numpy())

    def _borders(self, x: torch.Tensor) -> torch.Tensor:
        """Return the increasing borders between buckets, float32, for the fits by buckets."""
        count = 1 << self.bits
        if self.fit == "quantile":
            sample = self._sample(x)
            last = sample[np.maximum(np.arange(1, count) * len(sample) // count - 1, 0)]  # of each bucket
            return cast_saturating(torch.from_numpy(last), torch.float32)
        mean = total(x, "sum") / x.numel()
        step = 6 * math.sqrt(total(x, "squares", mean) / max(1, x.numel() - 1)) / count
        return cast_saturating(
            mean + (torch.arange(1, count, dtype=torch.float64) - count / 2 - 0.5) * step, torch.float32
        )

    def _fitted(self, x: torch.Tensor) -> torch.Tensor:
        """Return the levels, increasing, float32."""
        sample = self._sample(x)
        sums = np.concatenate([[0.0], np.add.accumulate(sample)])
        count = 1 << self.bits
        distinct = np.unique(sample)
        # quantiles of the distinct values, so that many zeros do not take up all levels
        levels = distinct[np.linspace(0, len(distinct) - 1, count).round().astype(np.int64)]
        for _ in range(_SWEEPS):
            ends = np.searchsorted(sample, (levels[1:] + levels[:-1]) / 2)
            first, last = np.concatenate([[0], ends]), np.concatenate([ends, [len(sample)]])
            sizes = last - first
            levels = np.where(sizes > 0, (sums[last] - sums[first]) / np.maximum(sizes, 1), levels)
        levels[np.abs(levels).argmin()] = 0.0
        return cast_saturating(torch.from_numpy(np.sort(levels)), torch.float32)

    def array_names(self) -> tuple[str, ...]:
        return ("codes", "levels")

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        if not x.numel():
            return {"codes": np.empty(0, np.uint8), "levels": np.empty(0, np.uint8)}
        flat = x.reshape(-1)
        if self.fit == "lloyd":
            levels = self._fitted(flat).to(x.device)
            borders = ((levels[1:].double() + levels[:-1].double()) / 2).to(levels.dtype)
        else:
            borders = self._borders(flat).to(x.device)
        borders += 0.0  # turns -0.0 into +0.0
        codes = bucket_of(flat.to(borders.dtype), borders)
        if self.fit != "lloyd":
            levels = self._means(flat, codes)
        return {"codes": to_bytes(pack(codes, self.bits)), "levels": to_bytes(levels)}

    def _means(self, x: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
        """Return the mean of the values of each code, float32; zero for unused codes."""
        count = 1 << self.bits
        buckets = codes.cpu().numpy()
        sums = np.bincount(buckets, x.double().cpu().numpy(), count)  # adds the values in order
        means = sums / np.maximum(np.bincount(buckets, minlength=count), 1)
        return cast_saturating(torch.from_numpy(means), torch.float32)

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        codes = packet.fields_of("codes", packet.numel, self.bits, device)
        levels = packet.floats_of("levels", (1 << self.bits) if packet.numel else 0, device)
        return cast_saturating(levels, DTYPES[packet.dtype])[codes.int()].view(packet.shape)


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


def bucket_of(x: torch.Tensor, borders: torch.Tensor) -> torch.Tensor:
    """Return the number of `borders` below each value of flat `x`, uint8; at most 255 borders, sorted."""
    if len(borders) > _FEW:
        return torch.bucketize(x, borders).to(torch.uint8)
    codes = torch.zeros(len(x), dtype=torch.uint8, device=x.device)
    above = torch.empty(len(x), dtype=torch.bool, device=x.device)
    for border in borders.tolist():
        codes += torch.gt(x, border, out=above).view(torch.uint8)
    return codes
