"""Levels that lie where the values lie, in place of evenly spaced ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.base import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.bits import pack, packed_bytes, unpack_bytes
from raysim.codecs.layout import layout_of
from raysim.codecs.signs import read_floats
from raysim.codecs.sums import group_sums
from raysim.notation import check_choice, check_integer
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_SAMPLE = 1 << 14  # values that the levels are fitted to
_SWEEPS = 30


@dataclass(frozen=True, repr=False)
class NonUniform(Codec):
    """Rounds to one of 2**bits levels fitted to the tensor, which are sent in float32.

    `fit="lloyd"` (Lloyd 1957, Max 1960): to the nearest, after 30 sweeps from the quantiles of an evenly spaced sample of 16,384.
    The level nearest to zero is zero, so that
    zero is kept; the least and the greatest value of the sample's ends are not.

    The others cut the line into 2**bits buckets and send the mean of each bucket's values, with 8 bits as hivemind does:
    "quantile" into as many values each, by the quantiles of such a sample, and "deviation" evenly, within three standard
    deviations of the mean.

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

    def _borders(self, x: Tensor) -> Tensor:
        """Return where buckets end, one less than there are, float32; of a fit by buckets."""
        count = 1 << self.bits
        if self.fit == "quantile":
            sample = np.sort(x[:: max(1, -(-x.numel() // _SAMPLE))].double().cpu().numpy())
            last = sample[np.maximum(np.arange(1, count) * len(sample) // count - 1, 0)]  # of each bucket
            return cast_saturating(torch.from_numpy(last), torch.float32)
        whole = layout_of((x.numel(),), "tensor", 0)
        mean = float(group_sums(x, whole, "sum")) / x.numel()
        squares = float(group_sums(x, whole, "squares", mean))
        step = 6 * math.sqrt(squares / max(1, x.numel() - 1)) / count
        return cast_saturating(
            mean + (torch.arange(1, count, dtype=torch.float64) - count / 2 - 0.5) * step, torch.float32
        )

    def _fitted(self, x: Tensor) -> Tensor:
        """Return the levels, increasing, float32."""
        step = max(1, -(-x.numel() // _SAMPLE))
        sample = np.sort(x[::step].double().cpu().numpy())
        sums = np.concatenate([[0.0], np.add.accumulate(sample)])
        count = 1 << self.bits
        distinct = np.unique(sample)
        places = np.linspace(0, len(distinct) - 1, count).round().astype(np.int64)
        levels = distinct[places]  # of the distinct values, so that a heap of zeros does not take all levels
        for _ in range(_SWEEPS):
            ends = np.searchsorted(sample, (levels[1:] + levels[:-1]) / 2)
            first, last = np.concatenate([[0], ends]), np.concatenate([ends, [len(sample)]])
            sizes = last - first
            levels = np.where(sizes > 0, (sums[last] - sums[first]) / np.maximum(sizes, 1), levels)
        levels[np.abs(levels).argmin()] = 0.0
        return cast_saturating(torch.from_numpy(np.sort(levels)), torch.float32)

    def array_names(self) -> tuple[str, ...]:
        return ("codes", "levels")

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        if not x.numel():
            return {"codes": np.empty(0, np.uint8), "levels": np.empty(0, np.uint8)}
        flat = x.reshape(-1)
        if self.fit == "lloyd":
            levels = self._fitted(flat).to(x.device)
            borders = ((levels[1:].double() + levels[:-1].double()) / 2).to(levels.dtype)
        else:
            borders = self._borders(flat).to(x.device)
        borders += 0.0  # of the two zeros the positive one
        if kernels.serve(x):
            from raysim.codecs.kernels.levels import nearest

            found = np.empty(len(flat), np.uint8)
            nearest(flat.contiguous().float().numpy(), borders.numpy(), found)
            codes = torch.from_numpy(found)
        else:
            codes = torch.bucketize(flat.to(borders.dtype), borders)
        if self.fit != "lloyd":
            levels = self._means(flat, codes)
        return {"codes": to_bytes(pack(codes.to(torch.uint8), self.bits)), "levels": to_bytes(levels)}

    def _means(self, x: Tensor, codes: Tensor) -> Tensor:
        """Return the mean of the values of each code, float32; zero where there are none."""
        count = 1 << self.bits
        if kernels.serve(x):
            from raysim.codecs.kernels.levels import add_up

            sums, sizes = np.zeros(count), np.zeros(count)
            add_up(x.contiguous().float().numpy(), codes.numpy(), sums, sizes)
            return cast_saturating(torch.from_numpy(sums / np.maximum(sizes, 1)), torch.float32)
        places = codes.cpu().numpy()
        totals = np.bincount(places, x.double().cpu().numpy(), count)  # one value after the other, as the kernel does
        means = totals / np.maximum(np.bincount(places, minlength=count), 1)
        return cast_saturating(torch.from_numpy(means), torch.float32)

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        data = to_tensor(packet.bytes_of("codes", packed_bytes(packet.numel, self.bits)), torch.uint8, device)
        levels = read_floats(packet, "levels", (1 << self.bits) if packet.numel else 0, device)
        if not packet.numel:
            return torch.empty(packet.shape, dtype=DTYPES[packet.dtype], device=device)
        codes, dtype = unpack_bytes(data, packet.numel, self.bits), DTYPES[packet.dtype]
        if dtype != torch.float64 and kernels.serves(device):
            from raysim.codecs.kernels.levels import look_up

            out = kernels.empty(packet.numel, np.float32)
            look_up(kernels.opened(codes.numpy()), levels.float().numpy(), out)
            return cast_saturating(torch.from_numpy(out), dtype).view(packet.shape)
        return cast_saturating(levels[codes.long()], dtype).view(packet.shape)
