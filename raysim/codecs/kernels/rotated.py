"""Rows sent by `raysim.codecs.rotated` in numba, one row at a time in the L1 cache.

Rotated values and levels are integers, so that sums do not depend on their order.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numba import njit

from raysim.codecs.codec import cast_saturating
from raysim.codecs.kernels import empty, in_parts, opened
from raysim.codecs.kernels.packing import pack_block, unpack_block
from raysim.codecs.kernels.words import greater_64, hadamard_64, trailing_zeros
from raysim.codecs.rotated import CELL, CELLS, FIXED, LEVELS, TILE, UNIT, code_of_cell, factors

_MAGNITUDE = np.int32(0x7FFFFFFF)
_INFINITY = np.int32(0x7F800000)
_16, _23 = np.int32(16), np.int32(23)
_NONE, _HALVED = np.int32(-1), np.int32(1 << 23)  # below all magnitudes; what halves a magnitude if subtracted
_LOWER = np.int64(0x7FFFFFFF)
_GREATEST = np.float32(3.4028234663852886e38)
_FIXED, _LAST, _CELLS, _31 = np.float32(FIXED), np.float32(CELLS - 1), np.int32(CELLS), np.int32(31)


def encode_rows(x, center, form, error):
    """Return the packed codes, the scales (bfloat16), and the kept values (bfloat16) and their positions; raises `error`."""
    codes = empty(form.rows * form.row_bytes, np.uint8)
    scales, values = np.empty(form.rows, np.int16), np.empty((form.rows, form.kept), np.int16)
    positions = np.empty((form.rows, form.kept), np.int32)
    rows, tables = x.contiguous().float().numpy(), (center.numpy(), factors(form.width), _table(form.bits))

    def part(start, stop):
        span = slice(start // form.width, stop // form.width)
        target = codes[span.start * form.row_bytes : span.stop * form.row_bytes]
        return _encode(rows[span], form.bits, *tables, target, scales[span], values[span], positions[span])

    if not all(in_parts(part, form.rows * form.width, form.width)):
        raise error
    sent = torch.from_numpy(scales).view(torch.bfloat16), torch.from_numpy(values).view(torch.bfloat16)
    return torch.from_numpy(codes), *sent, torch.from_numpy(positions)


@functools.cache
def _table(bits):
    """Return level * 256 + code for the cells of positive values, then for those of negative ones."""
    codes = code_of_cell(bits)
    positive = np.array(LEVELS[bits])[codes] * 256 + codes
    return np.concatenate([positive, positive + (1 << (bits - 1))]).astype(np.int32)


def decode_rows(codes, scales, values, positions, center, form, dtype, error):
    """Return the flat tensor of a packet's arrays; raises `error`."""
    out = empty(form.rows * form.width, np.float32)
    arrays = opened(codes.numpy()), *(opened(array.view(torch.int16).numpy()) for array in (scales, values))
    levels = np.array(LEVELS[form.bits], np.int32)
    levels, at = np.concatenate([levels, -levels]), opened(positions.to(torch.int32).numpy())

    per_level = factors(form.width) / np.float32(UNIT)

    def part(start, stop):
        first, last = start // form.width, stop // form.width
        sent = arrays[0][first * form.row_bytes : last * form.row_bytes], arrays[1][first:last]
        kept = (array[first * form.kept : last * form.kept] for array in (arrays[2], at))
        return _decode(*sent, *kept, form.bits, form.kept, levels, per_level, center.numpy(), out[start:stop])

    if not all(in_parts(part, form.rows * form.width, form.width)):
        raise error
    return cast_saturating(torch.from_numpy(out), dtype)


@njit(cache=True, nogil=True)
def _turn(row):
    """Multiply each tile by its unnormalised Hadamard matrix."""
    whole = len(row) - len(row) % TILE
    for start in range(0, whole, TILE):
        hadamard_64(row, start)
    half = 1
    while half < TILE and whole < len(row):
        for pair in range(whole, len(row) - 2 * half + 1, 2 * half):
            for i in range(pair, pair + half):
                left, right = row[i], row[i + half]
                row[i] = left + right
                row[i + half] = left - right
        half *= 2


@njit(cache=True, nogil=True)
def _find_largest(bits, floor, best):
    """Write the largest magnitudes of `bits`, which has a multiple of 64 elements, in decreasing order: magnitude 2^32 + 2^31 - 1 - i.

    Returns whether all are above `floor`; with a high one few values have to be inserted.
    """
    best[:] = np.int64(floor) << 32
    last = len(best) - 1
    for start in range(0, len(bits), 64):
        word = greater_64(bits, start, _MAGNITUDE, np.int32(best[last] >> 32))
        while word:
            i = start + np.int64(trailing_zeros(word))
            word &= word - np.uint64(1)
            key = np.int64(bits[i] & _MAGNITUDE) << 32 | (_LOWER - i)
            if key > best[last]:
                for place in range(len(best)):
                    larger = max(best[place], key)
                    key = min(best[place], key)
                    best[place] = larger
    return best[last] >> 32 > floor


@njit(cache=True, nogil=True, inline="always")
def _bfloat16(value):
    """Return the pattern of a float32, rounded to nearest even and saturated."""
    bits = np.float32(value).view(np.int32)
    magnitude = bits & _MAGNITUDE
    rounded = min((magnitude + np.int32(0x7FFF) + ((magnitude >> _16) & np.int32(1))) >> _16, np.int32(0x7F7F))
    return np.int16(rounded | ((bits >> _16) & ~np.int32(0x7FFF)))


@njit(cache=True, nogil=True)
def _subtract(x, center, row):
    for i in range(len(x)):
        row[i] = x[i] - center[i]


@njit(cache=True, nogil=True)
def _fix(row, power, factors, fixed):
    for i in range(len(fixed)):
        fixed[i] = np.int32(row[i] * power * factors[i] * _FIXED)


@njit(cache=True, nogil=True)
def _total(fixed):
    total = np.int64(0)
    for i in range(len(fixed)):
        total += np.int64(abs(fixed[i]))
    return total


@njit(cache=True, nogil=True)
def _find_cells(fixed, cells_per_unit, cells):
    """Write the cell of each magnitude, with the highest bit set for a negative value."""
    for i in range(len(fixed)):
        cell = np.int32(min(np.float32(abs(fixed[i])) * cells_per_unit, _LAST))
        cells[i] = cell + ((fixed[i] >> _31) & _CELLS)


@njit(cache=True, nogil=True)
def _code(cells, table, codes):
    """Write the code of each cell; return the sum of their levels. An entry of `table` is level * 256 + code."""
    levels = np.int64(0)
    for i in range(len(cells)):
        entry = table[cells[i]]
        codes[i] = entry & 255
        levels += entry >> 8
    return levels


@njit(cache=True, nogil=True)
def _encode(x, bits, center, factors, table, codes, scales, values, positions):
    """Write the codes, scales, and kept values and positions of rows; return whether all are finite."""
    width, kept = x.shape[1], values.shape[1]
    padded = (width + 63) // 64 * 64
    row = np.zeros(padded, np.float32)
    patterns = row.view(np.int32)
    fixed, cells = np.empty(width, np.int32), np.empty(width, np.uint8)
    narrow, words, bytes_ = np.zeros(padded, np.uint8), np.empty(padded // 8, np.uint64), np.empty(padded + 8, np.uint8)
    best, least = np.empty(kept + 1, np.int64), _MAGNITUDE
    row_bytes = (width * bits + 7) // 8
    for number in range(len(x)):
        _subtract(x[number], center, row)
        row[width:] = 0
        if not _find_largest(patterns, least - _HALVED, best):  # a row mostly resembles the one before
            _find_largest(patterns, _NONE, best)
        if best[0] >> 32 >= _INFINITY:
            return False
        for i in range(kept):
            at = _LOWER - (best[i] & _LOWER)
            values[number, i] = _bfloat16(row[at])
            positions[number, i] = at
            row[at] = 0
        least = np.int32(best[kept] >> 32)
        power = np.int32(max(np.int32(254) - (least >> _23), np.int32(1)) << _23).view(np.float32)
        _fix(row, power, factors, fixed)
        _turn(fixed)
        total = np.float64(_total(fixed))
        cells_per_unit = np.float32(CELL * width / 1.25 / total) if total else np.float32(0)
        _find_cells(fixed, cells_per_unit, cells)
        levels = _code(cells, table, narrow)
        scale = total / np.float64(levels) * (np.float64(UNIT / FIXED) / np.float64(power))
        scales[number] = _bfloat16(min(scale, np.float64(_GREATEST)))
        pack_block(narrow, bits, words, bytes_, codes[number * row_bytes : (number + 1) * row_bytes])
    return True


@njit(cache=True, nogil=True)
def _look_up(codes, levels, row):
    """Write the levels of codes."""
    for i in range(len(row)):
        row[i] = levels[codes[i]]


@njit(cache=True, nogil=True)
def _store(row, factors, scale, center, out):
    for i in range(len(out)):
        value = min(max(np.float32(row[i]) * factors[i] * scale, -_GREATEST), _GREATEST)
        out[i] = min(max(value + center[i], -_GREATEST), _GREATEST)


@njit(cache=True, nogil=True, inline="always")
def _float(pattern):
    return np.int32(np.int32(pattern) << _16).view(np.float32)


@njit(cache=True, nogil=True)
def _decode(packed, scales, values, positions, bits, kept, levels, factors, center, out):
    """Write the values of rows; return whether the packet is valid."""
    width, row_bytes = len(factors), (len(factors) * bits + 7) // 8
    padded = (width + 63) // 64 * 64
    codes, row = np.zeros(padded, np.uint8), np.empty(width, np.int32)
    words, bytes_ = np.empty(padded // 8, np.uint64), np.empty(padded + 8, np.uint8)
    for i in range(width):
        if not abs(center[i]) <= _GREATEST:
            return False
    for number in range(len(scales)):
        scale = _float(scales[number])
        if not 0 <= scale <= _GREATEST:
            return False
        unpack_block(packed[number * row_bytes : (number + 1) * row_bytes], bits, words, bytes_, codes)
        _look_up(codes, levels, row)
        _turn(row)
        target = out[number * width : (number + 1) * width]
        _store(row, factors, scale, center, target)
        for i in range(number * kept, (number + 1) * kept):
            value = _float(values[i])
            if positions[i] >= width or not abs(value) <= _GREATEST:
                return False
            value += center[positions[i]]
            target[positions[i]] = min(max(value, -_GREATEST), _GREATEST)
    return True
