"""Levels that lie where the values lie, in place of evenly spaced ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raysim.codecs import kernels
from raysim.codecs.bits import pack, packed_bytes, unpack_bytes
from raysim.codecs.packet import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.signs import read_floats
from raysim.notation import check_integer

_SAMPLE = 1 << 14  # values that the levels are fitted to
_SWEEPS = 30


@dataclass(frozen=True, repr=False)
class NonUniform(Codec):
    """Rounds to the nearest of 2**bits levels fitted to the tensor (Lloyd 1957, Max 1960), which are sent in float32.

    What TinyScript (2020) and DAQ (2022) do by a fitted distribution is done on the values themselves: an evenly spaced sample
    of 16,384, 30 sweeps of Lloyd's from its quantiles. The level nearest to zero is zero, so that zero is kept; the least and the
    greatest value of the sample's ends are not.

    >>> NonUniform(2).encode(torch.tensor([0.0, 1.0, 1.0, -7.0, 100.0, 1.0])).decode()
    tensor([  0.,   1.,   1.,  -7., 100.,   1.])
    """

    bits: int

    def __post_init__(self) -> None:
        self._coerce(bits=check_integer("bits", self.bits, 1, 8))

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

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        if not x.numel():
            return {"codes": np.empty(0, np.uint8), "levels": np.empty(0, np.uint8)}
        flat = x.reshape(-1)
        levels = self._fitted(flat).to(x.device)
        borders = ((levels[1:].double() + levels[:-1].double()) / 2).to(levels.dtype)
        if kernels.serve(x):
            from raysim.codecs.kernels.levels import nearest

            found = np.empty(len(flat), np.uint8)
            nearest(flat.contiguous().float().numpy(), borders.numpy(), found)
            codes = torch.from_numpy(found)
        else:
            codes = torch.bucketize(flat.to(levels.dtype), borders)
        return {"codes": to_bytes(pack(codes.to(torch.uint8), self.bits)), "levels": to_bytes(levels)}

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
