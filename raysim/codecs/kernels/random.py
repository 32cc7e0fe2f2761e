"""The random numbers of `raysim.codecs.draws` in numba."""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

import numpy as np
from numba import njit

GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@njit(cache=True, nogil=True, inline="always")
def mixed(state):
    """Return the 64 bits at a state of the stream."""
    z = (state ^ (state >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))


@njit(cache=True, nogil=True, inline="always")
def uniform_at(state):
    """Return the number in [0, 1) at a state of the stream."""
    return np.float64(np.int64(mixed(state) >> np.uint64(11))) * 2.0**-53


@njit(cache=True, nogil=True)
def fill_bits(key, out):
    """Write the stream that starts at `key` to an array of uint64."""
    state = np.uint64(key)
    for i in range(len(out)):
        state += GAMMA
        out[i] = mixed(state)


@njit(cache=True, nogil=True)
def fill_uniform(key, out):
    """Write the stream that starts at `key` as numbers in [0, 1)."""
    state = np.uint64(key)
    for i in range(len(out)):
        state += GAMMA
        out[i] = uniform_at(state)


@njit(cache=True, nogil=True)
def fill_ranks(key, out):
    """Write the lowest 30 bits of each number of the stream to an array of int32."""
    state = np.uint64(key)
    for i in range(len(out)):
        state += GAMMA
        out[i] = np.int32(mixed(state) & np.uint64(0x3FFFFFFF))
