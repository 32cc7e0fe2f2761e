"""Rounding to levels of one's own in numba."""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

import numpy as np
from numba import njit

_FEW = 31  # borders that are faster counted one by one than searched
_BLOCK = 4096


@njit(cache=True, nogil=True)
def _count(x, border, codes):
    for i in range(len(x)):
        codes[i] += np.uint8(x[i] > border)


@njit(cache=True, nogil=True)
def nearest(x, borders, codes):
    """Write how many of `borders`, increasing and one less than a power of two, lie below each value."""
    if len(borders) <= _FEW:
        codes[:] = 0
        for start in range(0, len(x), _BLOCK):
            for border in borders:
                _count(x[start : start + _BLOCK], border, codes[start : start + _BLOCK])
        return
    top = (len(borders) + 1) // 2
    for i in range(len(x)):
        found = 0
        step = top
        while step:
            found += step if x[i] > borders[found + step - 1] else 0
            step //= 2
        codes[i] = np.uint8(found)


@njit(cache=True, nogil=True)
def look_up(codes, levels, out):
    """Write the level of each code."""
    for i in range(len(codes)):
        out[i] = levels[codes[i]]
