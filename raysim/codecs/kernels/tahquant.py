"""Tiles of TAH-Quant in numba: what each needs, its codes, and the way back (`raysim.codecs.contrib.tahquant` is the reference)."""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

import math

import numpy as np
from numba import njit

_MAGNITUDE = np.int32(0x7FFFFFFF)
_23 = np.int32(23)
_31 = np.int32(31)
_TINY = 1e-12
_GREATEST = 3.4028234663852886e38


@njit(cache=True, nogil=True)
def greatest(bits):
    """Return the greatest magnitude of float32 patterns, as a pattern."""
    found = np.int32(0)
    for i in range(len(bits)):
        found = max(found, bits[i] & _MAGNITUDE)
    return found


@njit(cache=True, nogil=True)
def _load(values, tile):
    """Copy a tile of a token, filled up with the last value."""
    for i in range(len(values)):
        tile[i] = values[i]
    for i in range(len(values), len(tile)):
        tile[i] = values[-1]


@njit(cache=True, nogil=True)
def _ends(bits):
    least, most = _MAGNITUDE, ~_MAGNITUDE
    for i in range(len(bits)):
        ordered = np.int32(bits[i] ^ ((bits[i] >> _31) & _MAGNITUDE))
        least = min(least, ordered)
        most = max(most, ordered)
    return least ^ ((least >> _31) & _MAGNITUDE), most ^ ((most >> _31) & _MAGNITUDE)


@njit(cache=True, nogil=True)
def _greatest_two(bits):
    """Return the place of the greatest magnitude, the first of equal ones, and the two greatest, as patterns."""
    first = greatest(bits)
    place = 0
    while bits[place] & _MAGNITUDE != first:
        place += 1
    return place, first, max(greatest(bits[:place]), greatest(bits[place + 1 :]))


@njit(cache=True, nogil=True)
def _weigh(tile, factor, weights):
    for i in range(len(tile)):
        weights[i] = np.int32(abs(np.float64(tile[i])) * factor)


@njit(cache=True, nogil=True)
def _sum(values):
    total = np.int32(0)
    for i in range(len(values)):
        total += values[i]
    return total


@njit(cache=True, nogil=True)
def _share(weights, scale, shares):
    for i in range(len(shares)):
        shares[i] = np.float32(weights[i]) * scale


@njit(cache=True, nogil=True)
def _mantissas(bits, mantissas):
    for i in range(len(bits)):
        mantissas[i] = (bits[i] & np.int32(0x7FFFFF)) | np.int32(0x3F800000)


@njit(cache=True, nogil=True)
def _surprise(shares, bits, mantissas, c, terms):
    c0, c1, c2, c3, c4, c5, unit = c[0], c[1], c[2], c[3], c[4], c[5], c[6]
    for i in range(len(terms)):
        x = mantissas[i] - np.float32(1)
        logarithm = (((((c5 * x + c4) * x + c3) * x + c2) * x + c1) * x + c0) * x
        logarithm += np.float32((bits[i] >> _23) - np.int32(127))
        terms[i] = np.int32(shares[i] * logarithm * unit)


@njit(cache=True, nogil=True)
def _turn(tile, pivot, factor, mixed):
    """Write the tile times `factor`, its first value and the one at `pivot` exchanged, times the Hadamard matrix."""
    for i in range(len(tile)):
        mixed[i] = np.float64(tile[i]) * factor
    mixed[0], mixed[pivot] = mixed[pivot], mixed[0]
    _mix(mixed)


@njit(cache=True, nogil=True)
def _mix(mixed):
    half = 1
    while half < len(mixed):
        for pair in range(0, len(mixed), 2 * half):
            for i in range(pair, pair + half):
                total, difference = mixed[i] + mixed[i + half], mixed[i] - mixed[i + half]
                mixed[i] = total
                mixed[i + half] = difference
        half *= 2
    root = math.sqrt(len(mixed))
    for i in range(len(mixed)):
        mixed[i] /= root


@njit(cache=True, nogil=True)
def describe(x, length, size, weight_bits, factor, tau, coefficients, entropy, turned, pivots, low, high):
    """Write of each tile of tokens of `length`: entropy, whether it is turned and about which place, and its range.

    Values are x times `factor`, a power of two.
    """
    tile, weights, shares = np.empty(size, np.float32), np.empty(size, np.int32), np.empty(size, np.float32)
    mantissas, terms, mixed = np.empty(size, np.float32), np.empty(size, np.int32), np.empty(size, np.float64)
    bits, share_bits = tile.view(np.int32), shares.view(np.int32)
    ends = np.empty(2, np.int32)
    at = 0
    for token in range(len(x) // length):
        for start in range(token * length, (token + 1) * length, size):
            _load(x[start : min(start + size, (token + 1) * length)], tile)
            place, first, second = _greatest_two(bits)
            exponent = np.int64(max(first >> _23, np.int32(1))) - 127
            _weigh(tile, 2.0 ** (weight_bits - exponent), weights)
            total = _sum(weights)
            _share(weights, np.float32(1) / np.float32(total) if total else np.float32(0), shares)
            _mantissas(share_bits, mantissas.view(np.int32))
            _surprise(shares, share_bits, mantissas, coefficients, terms)
            entropy[at] = _sum(terms)
            ends[0], ends[1] = first, second
            magnitudes = ends.view(np.float32)
            if np.float64(magnitudes[0]) * factor / (np.float64(magnitudes[1]) * factor + _TINY) > tau:
                turned[at] = 1
                pivots[at] = place
                _turn(tile, place, factor, mixed)
                low[at], high[at] = mixed.min(), mixed.max()
            else:
                turned[at] = 0
                pivots[at] = 0
                ends[0], ends[1] = _ends(bits)
                low[at], high[at] = np.float64(magnitudes[0]) * factor, np.float64(magnitudes[1]) * factor
            at += 1


@njit(cache=True, nogil=True)
def _round(values, factor, low, scale, last, codes):
    for i in range(len(values)):
        code = np.rint((np.float64(values[i]) * factor - low) * scale)
        codes[i] = np.int32(min(max(code, 0.0), last))


@njit(cache=True, nogil=True)
def quantise(x, length, size, factor, wide, turned, pivots, low, scale, lasts, wide_codes, narrow_codes):
    """Write the codes of each tile, round((value - low) * scale), to those of its width."""
    tile, mixed = np.empty(size, np.float32), np.empty(size, np.float64)
    at = to_wide = to_narrow = 0
    for token in range(len(x) // length):
        for start in range(token * length, (token + 1) * length, size):
            _load(x[start : min(start + size, (token + 1) * length)], tile)
            if wide[at]:
                codes, last = wide_codes[to_wide : to_wide + size], lasts[0]
                to_wide += size
            else:
                codes, last = narrow_codes[to_narrow : to_narrow + size], lasts[1]
                to_narrow += size
            if turned[at]:
                _turn(tile, pivots[at], factor, mixed)
                _round(mixed, 1.0, low[at], scale[at], last, codes)
            else:
                _round(tile, factor, low[at], scale[at], last, codes)
            at += 1


@njit(cache=True, nogil=True)
def _value(codes, low, scale, factor, out):
    for i in range(len(out)):
        value = (np.float64(codes[i]) * scale + low) * factor
        out[i] = np.float32(min(max(value, -_GREATEST), _GREATEST))


@njit(cache=True, nogil=True)
def dequantise(wide_codes, narrow_codes, length, size, factor, wide, turned, pivots, low, scale, out):
    """Write the values of the codes times `factor`, within float32."""
    mixed = np.empty(size, np.float64)
    at = from_wide = from_narrow = 0
    for token in range(len(out) // length):
        for start in range(token * length, (token + 1) * length, size):
            if wide[at]:
                codes = wide_codes[from_wide : from_wide + size]
                from_wide += size
            else:
                codes = narrow_codes[from_narrow : from_narrow + size]
                from_narrow += size
            part = out[start : min(start + size, (token + 1) * length)]
            if turned[at]:
                for i in range(size):
                    mixed[i] = np.float64(codes[i]) * scale[at] + low[at]
                _mix(mixed)
                mixed[0], mixed[pivots[at]] = mixed[pivots[at]], mixed[0]
                _value(mixed, 0.0, 1.0, factor, part)
            else:
                _value(codes, low[at], scale[at], factor, part)
            at += 1
