"""Counter-based random numbers: a key gives the same numbers on every device, in every process, after every restart."""

from __future__ import annotations

import numpy as np

from raysim.codecs import kernels
from raysim.on_demand import torch

# SplitMix64 (Steele, Lea and Flood 2014), as signed 64-bit constants: torch has no shift on uint64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def bits64(key: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return `count` random int64 of the SplitMix64 stream with initial state `key`."""
    return _draw(key, count, device, np.dtype(np.int64))


def uniform(key: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return `count` float64 in [0, 1) with 53 random bits each."""
    return _draw(key, count, device, np.dtype(np.float64), shift=11).mul_(2.0**-53)


def ranks(key: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return `count` random non-negative float32 whose bit patterns are the lowest 30 bits of `bits64`."""
    return _draw(key, count, device, np.dtype(np.int32), mask=0x3FFFFFFF).view(torch.float32)


def _draw(
    key: int, count: int, device: torch.device | str, dtype: np.dtype, shift: int = 0, mask: int = -1
) -> torch.Tensor:
    """Return (number >> shift) & mask for `count` numbers of the stream, in `dtype`."""
    if fill := kernels.find_on("words.fill", device):
        filled = np.empty(count, dtype)
        fill(np.uint64(key % 2**64), np.uint64(shift), np.uint64(mask % 2**64), filled)
        return torch.from_numpy(filled)
    z = torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_GAMMA).add_(key)
    z = (z ^ _shift(z, 30)).mul_(_MIX_1)
    z = (z ^ _shift(z, 27)).mul_(_MIX_2)
    z ^= _shift(z, 31)
    return ((_shift(z, shift) if shift else z) & mask).to(getattr(torch, dtype.name))


def _shift(z: torch.Tensor, n: int) -> torch.Tensor:
    """Return the logical right shift, which does not repeat the sign bit."""
    return (z >> n) & ((1 << (64 - n)) - 1)
