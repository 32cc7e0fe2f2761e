"""Block floating point in numba: shared exponents, scaled values, and the elements of four bits."""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

import numpy as np
from numba import njit

_BIAS = 127


@njit(cache=True, nogil=True)
def _greatest(bits):
    greatest = np.int32(0)
    for i in range(len(bits)):
        greatest = max(greatest, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return greatest


@njit(cache=True, nogil=True)
def _exponent(pattern):
    """Return floor(log2) of the float32 of a pattern above zero."""
    exponent = pattern >> 23
    if exponent:
        return exponent - 127
    exponent = -127
    while pattern < 1 << 22:  # a denormal
        pattern <<= 1
        exponent -= 1
    return exponent


@njit(cache=True, nogil=True)
def _scale(x, factor, out):
    for i in range(len(x)):
        out[i] = np.float32(np.float64(x[i]) * factor)


@njit(cache=True, nogil=True)
def share_exponents(bits, x, block, top, exponents, scaled):
    """Write the biased shared exponent of each block of float32 `x`, whose patterns are `bits`, and x over its power of two."""
    for group in range(len(exponents)):
        start = group * block
        greatest = _greatest(bits[start : start + block])
        exponent = -_BIAS
        if greatest:
            exponent = min(max(_exponent(np.int64(greatest)) - top, -_BIAS), _BIAS)
        exponents[group] = exponent + _BIAS
        _scale(x[start : start + block], 2.0**-exponent, scaled[start : start + block])


@njit(cache=True, nogil=True)
def round_e2m1(scaled, codes):
    """Write the codes of the nearest elements of E2M1, ties to the even code, the sign in bit 3."""
    for i in range(len(scaled)):
        m = abs(scaled[i])
        code = np.uint8(m > 0.25) + np.uint8(m >= 0.75) + np.uint8(m > 1.25) + np.uint8(m >= 1.75)
        code += np.uint8(m > 2.5) + np.uint8(m >= 3.5) + np.uint8(m > 5.0)
        codes[i] = code | (np.uint8(scaled[i] < 0) << np.uint8(3))


@njit(cache=True, nogil=True)
def _look_up(codes, table, out):
    for i in range(len(codes)):
        out[i] = table[codes[i]]


@njit(cache=True, nogil=True)
def spread_exponents(codes, elements, block, exponents, out):
    """Write elements[code] times the power of two of the block."""
    table = np.empty(len(elements), np.float32)
    for group in range(len(exponents)):
        factor = 2.0 ** (np.int64(exponents[group]) - _BIAS)
        start = group * block
        if block >= len(elements):
            for code in range(len(elements)):
                table[code] = np.float32(
                    min(max(np.float64(elements[code]) * factor, -3.4028234663852886e38), 3.4028234663852886e38)
                )
            _look_up(codes[start : start + block], table, out[start : start + block])
        else:
            for i in range(start, min(start + block, len(codes))):
                value = np.float64(elements[codes[i]]) * factor
                out[i] = np.float32(min(max(value, -3.4028234663852886e38), 3.4028234663852886e38))
