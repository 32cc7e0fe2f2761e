"""The fast Walsh-Hadamard transform in numba."""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from raysim.codecs.kernels import empty, opened

_LANES = 16  # tiles that are turned together: enough to fill vector registers from the first butterfly on


def turn(x, tile, factor, limit, count):
    """Return `count` float32: the tiles of flat `x`, filled up with zeros, times the matrix and `factor`, within `limit`."""
    out = empty(count, np.float32)
    _turn(opened(x.float().numpy()), tile, factor, limit, out)
    return torch.from_numpy(out)


@njit(cache=True, nogil=True)
def _cross(left, right):
    for i in range(len(left)):
        total, difference = left[i] + right[i], left[i] - right[i]
        left[i] = total
        right[i] = difference


@njit(cache=True, nogil=True)
def _load(x, tile, part):
    """Write tiles side by side: value i of tile j to i * _LANES + j, zeros beyond the end of x."""
    part[:] = 0
    for lane in range((len(x) + tile - 1) // tile):
        values, lanes = x[lane * tile : (lane + 1) * tile], part[lane:]
        for i in range(len(values)):
            lanes[i * _LANES] = values[i]


@njit(cache=True, nogil=True)
def _store(part, tile, factor, limit, out):
    for lane in range((len(out) + tile - 1) // tile):
        values, lanes = out[lane * tile : (lane + 1) * tile], part[lane:]
        for i in range(len(values)):
            values[i] = np.float32(min(max(lanes[i * _LANES] * factor, -limit), limit))


@njit(cache=True, nogil=True)
def _turn(x, tile, factor, limit, out):
    """Write every `tile` consecutive values times Sylvester's matrix and `factor`, by way of float64 and within +-`limit`.

    Zeros lie beyond x.
    """
    part = np.empty(tile * _LANES, np.float64)
    for start in range(0, len(out), tile * _LANES):
        _load(x[start : start + tile * _LANES], tile, part)
        half = 1
        while half < tile:
            for pair in range(0, tile, 2 * half):
                first, middle, last = pair * _LANES, (pair + half) * _LANES, (pair + 2 * half) * _LANES
                _cross(part[first:middle], part[middle:last])
            half *= 2
        _store(part, tile, factor, limit, out[start : start + tile * _LANES])
