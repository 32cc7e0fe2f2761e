"""Rows sent by `raysim.codecs.rotated` in numba, one row at a time in the L1 cache.

A transform of 64 values takes six equal steps: sums of neighbours to the first half, differences to the second. Magnitudes are
integers, so that sums do not depend on their order.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from raysim.codecs.codec import cast_saturating
from raysim.codecs.kernels import empty, in_parts, opened
from raysim.codecs.kernels.packing import copy, pack_block, unpack_block
from raysim.codecs.kernels.words import greater_64, trailing_zeros
from raysim.codecs.rotated import FIXED, LEVELS, UNIT, factors, steps

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_16, _23 = np.int32(16), np.int32(23)
_GREATEST = np.float32(3.4028234663852886e38)
_FIXED, _UNIT = np.float32(FIXED), np.float32(UNIT)


def encode(x, form, error):
    """Return the packed codes, the scales (bfloat16), and the kept values (bfloat16) and their positions; raises `error`."""
    codes = empty(form.rows * form.row_bytes, np.uint8)
    scales, values, positions = np.empty(form.rows, np.int16), *np.empty((2, form.rows, form.kept), np.int16)
    rows, tables = x.contiguous().float().numpy(), (factors(form.width), steps(form.bits), LEVELS[form.bits][0])

    def part(start, stop):
        span = slice(start // form.width, stop // form.width)
        target = codes[span.start * form.row_bytes : span.stop * form.row_bytes]
        return _encode(rows[span], form.bits, *tables, target, scales[span], values[span], positions[span])

    if not all(in_parts(part, form.rows * form.width, form.width)):
        raise error
    sent = torch.from_numpy(scales).view(torch.bfloat16), torch.from_numpy(values).view(torch.bfloat16)
    return torch.from_numpy(codes), *sent, torch.from_numpy(positions)


def decode(codes, scales, values, positions, form, dtype, error):
    """Return the flat tensor of a packet's arrays; raises `error`."""
    out = empty(form.rows * form.width, np.float32)
    arrays = opened(codes.numpy()), *(opened(array.view(torch.int16).numpy()) for array in (scales, values))
    levels = np.array(LEVELS[form.bits], np.float32) / _UNIT
    levels, at = np.concatenate([levels, -levels]), opened(positions.to(torch.int32).numpy())

    def part(start, stop):
        first, last = start // form.width, stop // form.width
        sent = arrays[0][first * form.row_bytes : last * form.row_bytes], arrays[1][first:last]
        kept = (array[first * form.kept : last * form.kept] for array in (arrays[2], at))
        return _decode(*sent, *kept, form.bits, form.kept, levels, factors(form.width), out[start:stop])

    if not all(in_parts(part, form.rows * form.width, form.width)):
        raise error
    return cast_saturating(torch.from_numpy(out), dtype)


@njit(cache=True, nogil=True)
def _turn(row, spare):
    """Multiply each tile of `row` by its unnormalised Hadamard matrix; `spare` has 64 elements."""
    whole = len(row) & ~63
    for start in range(0, whole, 64):
        tile = row[start : start + 64]
        for _ in range(3):
            for i in range(32):
                left, right = tile[2 * i], tile[2 * i + 1]
                spare[i] = left + right
                spare[i + 32] = left - right
            for i in range(32):
                left, right = spare[2 * i], spare[2 * i + 1]
                tile[i] = left + right
                tile[i + 32] = left - right
    half = 1
    while half < 64:
        for pair in range(whole, len(row) - 2 * half + 1, 2 * half):
            for i in range(pair, pair + half):
                left, right = row[i], row[i + half]
                row[i] = left + right
                row[i + half] = left - right
        half *= 2


@njit(cache=True, nogil=True)
def _insert(best, at, magnitude, position):
    """Insert a magnitude above the last into the decreasing `best`, after its equals."""
    i = len(best) - 1
    while i > 0 and best[i - 1] < magnitude:
        best[i] = best[i - 1]
        at[i] = at[i - 1]
        i -= 1
    best[i] = magnitude
    at[i] = position


@njit(cache=True, nogil=True)
def _find_largest(bits, best, at):
    """Write the largest magnitudes of `bits`, which has a multiple of 64 elements, and their positions."""
    best[:] = -1
    last = len(best) - 1
    for start in range(0, len(bits), 64):
        word = greater_64(bits, start, _MAGNITUDE, best[last])
        while word:
            i = start + np.int64(trailing_zeros(word))
            word &= word - np.uint64(1)
            magnitude = bits[i] & _MAGNITUDE
            if magnitude > best[last]:
                _insert(best, at, magnitude, i)


@njit(cache=True, nogil=True)
def _greatest(bits):
    greatest = np.int32(0)
    for i in range(len(bits)):
        greatest = max(greatest, bits[i] & _MAGNITUDE)
    return greatest


@njit(cache=True, nogil=True, inline="always")
def _bfloat16(value):
    """Return the pattern of a float32, rounded to nearest even and saturated."""
    bits = np.float32(value).view(np.int32)
    magnitude = bits & _MAGNITUDE
    rounded = min((magnitude + np.int32(0x7FFF) + ((magnitude >> _16) & np.int32(1))) >> _16, np.int32(0x7F7F))
    return np.int16(rounded | ((bits >> _16) & ~np.int32(0x7FFF)))


@njit(cache=True, nogil=True)
def _multiply(row, power, factors):
    for i in range(len(factors)):
        row[i] = row[i] * power * factors[i]


@njit(cache=True, nogil=True)
def _fix(row, sign, magnitudes, codes):
    """Write magnitudes as integers and the codes of their signs; return the sum of the magnitudes."""
    total = np.int32(0)
    for i in range(len(row)):
        magnitude = np.int32(abs(row[i]) * _FIXED)
        magnitudes[i] = magnitude
        codes[i] = sign if row[i] < 0 else np.int32(0)
        total += magnitude
    return total


@njit(cache=True, nogil=True)
def _raise(magnitudes, border, codes):
    """Raise the codes of magnitudes above a border by one; return their number and sum."""
    count, total = np.int32(0), np.int32(0)
    for i in range(len(magnitudes)):
        above = magnitudes[i] > border
        codes[i] += above
        count += above
        total += magnitudes[i] if above else np.int32(0)
    return count, total


@njit(cache=True, nogil=True)
def _narrow(codes, out):
    for i in range(len(codes)):
        out[i] = codes[i]


@njit(cache=True, nogil=True)
def _encode(x, bits, factors, steps, first, codes, scales, values, positions):
    """Write the codes, scales, and kept values and positions of rows; return whether all are finite."""
    width, kept = x.shape[1], values.shape[1]
    padded = (width + 63) // 64 * 64
    row, magnitudes, wide = np.zeros(padded, np.float32), np.zeros(padded, np.int32), np.zeros(padded, np.int32)
    narrow, spare, patterns = np.zeros(padded, np.uint8), np.empty(64, np.float32), row.view(np.int32)
    words, bytes_ = np.empty(padded // 8, np.uint64), np.empty(padded + 8, np.uint8)
    best, at = np.empty(kept, np.int32), np.empty(kept, np.int64)
    row_bytes, sign = (width * bits + 7) // 8, np.int32(1 << (bits - 1))
    for number in range(len(x)):
        copy(x[number], row[:width])
        row[width:] = 0
        if kept:
            _find_largest(patterns, best, at)
            if best[0] >= _INFINITY:
                return False
            for i in range(kept):
                values[number, i] = _bfloat16(row[at[i]])
                positions[number, i] = at[i]
            for i in range(kept):
                row[at[i]] = 0
        greatest = _greatest(patterns)
        if greatest >= _INFINITY:
            return False
        power = np.int32(max(np.int32(254) - (greatest >> _23), np.int32(1)) << _23).view(np.float32)
        _multiply(row, power, factors)
        _turn(row[:width], spare)
        total = 0
        for start in range(0, width, 64):
            part = slice(start, min(start + 64, width))
            total += np.int64(_fix(row[part], sign, magnitudes[part], wide[part]))
        unit = np.float64(total) * (1.25 / (2 * UNIT)) / np.float64(width)
        products, squares = total * first, width * first * first
        for start in range(0, width, 64):
            part = slice(start, min(start + 64, width))
            for i in range(steps.shape[1]):
                count, above = _raise(magnitudes[part], np.int32(unit * np.float64(steps[0, i])), wide[part])
                products += np.int64(above) * steps[1, i]
                squares += np.int64(count) * steps[2, i]
        scale = np.float64(products) / np.float64(squares) * (np.float64(UNIT / FIXED) / np.float64(power))
        scales[number] = _bfloat16(min(scale, np.float64(_GREATEST)))
        _narrow(wide[:width], narrow)
        pack_block(narrow, bits, words, bytes_, codes[number * row_bytes : (number + 1) * row_bytes])
    return True


@njit(cache=True, nogil=True)
def _look_up(codes, levels, row):
    for i in range(len(row)):
        row[i] = levels[codes[i]]


@njit(cache=True, nogil=True)
def _store(row, factors, scale, out):
    for i in range(len(out)):
        out[i] = min(max(row[i] * factors[i] * scale, -_GREATEST), _GREATEST)


@njit(cache=True, nogil=True, inline="always")
def _float(pattern):
    return np.int32(np.int32(pattern) << _16).view(np.float32)


@njit(cache=True, nogil=True)
def _decode(packed, scales, values, positions, bits, kept, levels, factors, out):
    """Write the values of rows; return whether the packet is valid."""
    width, row_bytes = len(factors), (len(factors) * bits + 7) // 8
    padded = (width + 63) // 64 * 64
    codes, row, spare = np.zeros(padded, np.uint8), np.empty(padded, np.float32), np.empty(64, np.float32)
    words, bytes_ = np.empty(padded // 8, np.uint64), np.empty(padded + 8, np.uint8)
    for number in range(len(scales)):
        scale = _float(scales[number])
        if not 0 <= scale <= _GREATEST:
            return False
        unpack_block(packed[number * row_bytes : (number + 1) * row_bytes], bits, words, bytes_, codes)
        _look_up(codes, levels, row[:width])
        _turn(row[:width], spare)
        target = out[number * width : (number + 1) * width]
        _store(row, factors, scale, target)
        for i in range(number * kept, (number + 1) * kept):
            value = _float(values[i])
            if positions[i] >= width or not abs(value) <= _GREATEST:
                return False
            target[positions[i]] = value
    return True
