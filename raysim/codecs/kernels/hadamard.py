"""The fast Walsh-Hadamard transform in numba."""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

from numba import njit


@njit(cache=True, nogil=True)
def _cross(left, right):
    for i in range(len(left)):
        total, difference = left[i] + right[i], left[i] - right[i]
        left[i] = total
        right[i] = difference


@njit(cache=True, nogil=True)
def butterflies(values, tile):
    """Multiply every `tile` consecutive float64 by Sylvester's matrix, in place."""
    for start in range(0, len(values), tile):
        part = values[start : start + tile]
        half = 1
        while half < tile:
            for pair in range(0, tile, 2 * half):
                _cross(part[pair : pair + half], part[pair + half : pair + 2 * half])
            half *= 2
