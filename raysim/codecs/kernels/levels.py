"""Rounding to levels of one's own in numba."""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

import numpy as np
from numba import njit

_FEW = 31  # borders that are faster counted one by one than searched
_BLOCK = 4096
_SHIFT = 18
_SLOTS = 1 << (32 - _SHIFT)


@njit(cache=True, nogil=True)
def _count(x, border, codes):
    for i in range(len(x)):
        codes[i] += np.uint8(x[i] > border)


@njit(cache=True, nogil=True, inline="always")
def _slot(bits):
    """Return the first 14 bits of a float32 pattern in the order of numbers, from 0 on: 32 slots an octave."""
    return np.int64((bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF))) >> np.int32(_SHIFT)) + _SLOTS // 2


@njit(cache=True, nogil=True)
def _first_of_slots(borders):
    """Return how many of at most 255 borders, not decreasing, are of a slot before each: seldom is there more than one in it."""
    first = np.empty(_SLOTS + 1, np.uint8)
    bits = borders.view(np.int32)
    filled = 0
    for i in range(len(borders)):
        slot = _slot(bits[i])
        if slot >= filled:
            first[filled : slot + 1] = i
            filled = slot + 1
    first[filled:] = len(borders)
    return first


@njit(cache=True, nogil=True)
def nearest(x, borders, codes):
    """Write how many of `borders`, not decreasing, at most 255 and none of them -0, lie below each value."""
    if len(borders) <= _FEW:
        codes[:] = 0
        for start in range(0, len(x), _BLOCK):
            for border in borders:
                _count(x[start : start + _BLOCK], border, codes[start : start + _BLOCK])
        return
    first = _first_of_slots(borders)
    bits = x.view(np.int32)
    for i in range(len(x)):
        slot = _slot(bits[i])
        found, last = np.int64(first[slot]), np.int64(first[slot + 1])
        while found < last and x[i] > borders[found]:
            found += 1
        codes[i] = np.uint8(found)


@njit(cache=True, nogil=True)
def look_up(codes, levels, out):
    """Write the level of each code."""
    for i in range(len(codes)):
        out[i] = levels[codes[i]]


@njit(cache=True, nogil=True)
def add_up(x, codes, sums, sizes):
    """Add every value to the sum of its code, in order, and count them."""
    for i in range(len(x)):
        sums[codes[i]] += np.float64(x[i])
        sizes[codes[i]] += 1.0
