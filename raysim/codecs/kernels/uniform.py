"""Uniform quantisation in numba: ranges, quantise and pack, unpack and dequantise, with the arithmetic of the torch reference.

Values lie in groups as (outer, groups, inner), with the last group of a block layout cut short. Work goes in blocks that stay
in the first cache: codes are made a byte each, which vectorises, and packed from there.
"""

from __future__ import annotations

import numpy as np
from numba import njit

_BLOCK = 4096  # values; a multiple of 8, so that blocks end on whole bytes at every width
_SHORT = 24  # runs of a group shorter than this are done with one center and scale a value instead
_ROUND = 6755399441055744.0  # 1.5 * 2**52: adding it rounds to the nearest integer, half to even
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@njit(cache=True, nogil=True)
def ranges(bits, groups, inner, low, high):
    """Write the least and greatest value of each group, as integers that order like the floats they are made of.

    `bits` are the patterns of float32 as int32; `low` and `high` take `ordered` patterns: NaN and infinity are beyond all
    numbers. They are filled with the greatest and the least int32 before.
    """
    if inner >= _SHORT:
        start = 0
        segment = 0
        while start < len(bits):
            end = min(start + inner, len(bits))
            least, greatest = np.int32(2**31 - 1), np.int32(-(2**31))
            for i in range(start, end):
                pattern = bits[i] ^ ((bits[i] >> 31) & np.int32(0x7FFFFFFF))
                least = min(least, pattern)
                greatest = max(greatest, pattern)
            group = segment % groups
            low[group] = min(low[group], least)
            high[group] = max(high[group], greatest)
            start = end
            segment += 1
    elif inner == 1:
        for start in range(0, len(bits), groups):
            for i in range(min(groups, len(bits) - start)):
                pattern = bits[start + i] ^ ((bits[start + i] >> 31) & np.int32(0x7FFFFFFF))
                low[i] = min(low[i], pattern)
                high[i] = max(high[i], pattern)
    else:
        for i in range(len(bits)):
            group = (i // inner) % groups
            pattern = bits[i] ^ ((bits[i] >> 31) & np.int32(0x7FFFFFFF))
            low[group] = min(low[group], pattern)
            high[group] = max(high[group], pattern)


@njit(cache=True, nogil=True)
def _pack_block(codes, count, bits, out, at):
    """Pack `count` codes, most significant bit first, into `out` from byte `at` on; codes beyond are zero up to eight."""
    if bits == 8:
        for i in range(count):
            out[at + i] = codes[i]
    elif bits == 4:
        for i in range((count + 1) // 2):
            out[at + i] = (codes[2 * i] << 4) | codes[2 * i + 1]
    elif bits == 2:
        for i in range((count + 3) // 4):
            out[at + i] = (codes[4 * i] << 6) | (codes[4 * i + 1] << 4) | (codes[4 * i + 2] << 2) | codes[4 * i + 3]
    else:
        num_bytes = (count * bits + 7) // 8
        for i in range((count + 7) // 8):
            word = np.uint64(0)
            for j in range(8):
                word = (word << np.uint64(bits)) | np.uint64(codes[8 * i + j])
            first = at + i * bits
            shift = 8 * (bits - 1)
            for j in range(min(bits, num_bytes - i * bits)):
                out[first + j] = np.uint8((word >> np.uint64(shift)) & np.uint64(255))
                shift -= 8


@njit(cache=True, nogil=True)
def _unpack_block(packed, at, count, bits, codes):
    """Unpack `count` codes from byte `at` on; inverse of `_pack_block`."""
    if bits == 8:
        for i in range(count):
            codes[i] = packed[at + i]
    elif bits == 4:
        for i in range((count + 1) // 2):
            byte = packed[at + i]
            codes[2 * i] = byte >> 4
            codes[2 * i + 1] = byte & 15
    elif bits == 2:
        for i in range((count + 3) // 4):
            byte = packed[at + i]
            codes[4 * i] = byte >> 6
            codes[4 * i + 1] = (byte >> 4) & 3
            codes[4 * i + 2] = (byte >> 2) & 3
            codes[4 * i + 3] = byte & 3
    else:
        num_bytes = (count * bits + 7) // 8
        mask = np.uint64((1 << bits) - 1)
        for i in range((count + 7) // 8):
            word = np.uint64(0)
            for j in range(bits):
                byte = packed[at + i * bits + j] if i * bits + j < num_bytes else np.uint8(0)
                word = (word << np.uint64(8)) | np.uint64(byte)
            shift = 7 * bits
            for j in range(8):
                codes[8 * i + j] = np.uint8((word >> np.uint64(shift)) & mask)
                shift -= bits


@njit(cache=True, nogil=True)
def _uniform(key, index):
    """Return draw `index` of the stream of `raysim.codecs.random.uniform`."""
    z = np.uint64(index + 1) * _GAMMA + key
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z ^= z >> np.uint64(31)
    return np.float64(np.int64(z >> np.uint64(11))) * 2.0**-53


@njit(cache=True, nogil=True)
def quantize(x, groups, inner, center, scale, middle, last, bits, stochastic, key, out):
    """Write the packed codes: round((x - center) * scale) + middle, limited to 0..last, in float64.

    Stochastic rounding is floor(t + u), u the draw of the value's index.
    """
    codes = np.empty(_BLOCK + 8, np.uint8)
    top = np.float64(last)
    offset = np.float64(middle)
    row = groups * inner
    short = inner < _SHORT
    if short:
        centers, scales = np.empty(row), np.empty(row)
        for i in range(row):
            centers[i] = center[i // inner]
            scales[i] = scale[i // inner]
    else:
        centers, scales = center, scale
    for block in range(0, len(x), _BLOCK):
        stop = min(block + _BLOCK, len(x))
        at = block
        while at < stop:
            if short:
                place = at % row
                end = min(stop, at + row - place)
                for i in range(end - at):
                    t = (np.float64(x[at + i]) - centers[place + i]) * scales[place + i]
                    t = np.floor(t + _uniform(key, at + i)) if stochastic else (t + _ROUND) - _ROUND
                    codes[at - block + i] = np.uint8(np.int32(min(max(t + offset, 0.0), top)))
            else:
                segment = at // inner
                end = min(stop, (segment + 1) * inner)
                c, s = centers[segment % groups], scales[segment % groups]
                if stochastic:
                    for i in range(end - at):
                        t = np.floor((np.float64(x[at + i]) - c) * s + _uniform(key, at + i))
                        codes[at - block + i] = np.uint8(np.int32(min(max(t + offset, 0.0), top)))
                else:
                    for i in range(end - at):
                        t = ((np.float64(x[at + i]) - c) * s + _ROUND) - _ROUND
                        codes[at - block + i] = np.uint8(np.int32(min(max(t + offset, 0.0), top)))
            at = end
        codes[stop - block : stop - block + 8] = 0
        _pack_block(codes, stop - block, bits, out, block * bits // 8)


@njit(cache=True, nogil=True)
def dequantize(packed, groups, inner, center, span, quotients, last, bits, out, residual):
    """Write center + span * quotients[code] in float64, rounded to float32; return False where a code exceeds `last`.

    With `residual`, what is written is `out` less that value: what the packet withholds of `out`.
    """
    codes = np.empty(_BLOCK + 8, np.uint8)
    table = np.empty(256, np.float32)
    row = groups * inner
    short = inner < _SHORT
    tabled = inner >= 4 << bits  # a table of the values of a group pays
    shown = np.int64(-1)  # the group that the table holds
    if short:
        centers, spans = np.empty(row), np.empty(row)
        for i in range(row):
            centers[i] = center[i // inner]
            spans[i] = span[i // inner]
    else:
        centers, spans = center, span
    greatest = np.uint8(0)
    for block in range(0, len(out), _BLOCK):
        stop = min(block + _BLOCK, len(out))
        _unpack_block(packed, block * bits // 8, stop - block, bits, codes)
        for i in range(stop - block):
            greatest = max(greatest, codes[i])
        if greatest > last:
            return False
        at = block
        while at < stop:
            if short:
                place = at % row
                end = min(stop, at + row - place)
                for i in range(end - at):
                    value = np.float32(spans[place + i] * quotients[codes[at - block + i]] + centers[place + i])
                    out[at + i] = out[at + i] - value if residual else value
            else:
                segment = at // inner
                end = min(stop, (segment + 1) * inner)
                group = segment % groups
                c, s = centers[group], spans[group]
                if tabled:
                    if group != shown:
                        for code in range(1 << bits):
                            table[code] = np.float32(s * quotients[code] + c)
                        shown = group
                    if residual:
                        for i in range(end - at):
                            out[at + i] -= table[codes[at - block + i]]
                    else:
                        for i in range(end - at):
                            out[at + i] = table[codes[at - block + i]]
                else:
                    for i in range(end - at):
                        value = np.float32(s * quotients[codes[at - block + i]] + c)
                        out[at + i] = out[at + i] - value if residual else value
            at = end
    return True
