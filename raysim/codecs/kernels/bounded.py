"""Blocks of whole numbers, each packed to the bits that it needs, in numba (`raysim.codecs.bounded` is the reference)."""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

import numpy as np
from numba import njit

from raysim.codecs.kernels.fields import pack_block, unpack_block

BLOCK = 128
LIMIT = 1 << 30
RAW = 255
_LEAST, _MOST = np.int32(-(1 << 31)), np.int32((1 << 31) - 1)


@njit(cache=True, nogil=True)
def _round(x, scale, codes):
    beyond = np.float64(LIMIT + 1)
    for i in range(len(x)):
        codes[i] = np.int32(min(max(np.rint(np.float64(x[i]) * scale), -beyond), beyond))


@njit(cache=True, nogil=True)
def _fill(codes, count):
    for i in range(count, len(codes)):
        codes[i] = codes[count - 1]


@njit(cache=True, nogil=True)
def _ends(codes):
    least, most = _MOST, _LEAST
    for i in range(len(codes)):
        least = min(least, codes[i])
        most = max(most, codes[i])
    return least, most


@njit(cache=True, nogil=True)
def measure(x, scale, widths, offsets):
    """Write the bits that each block of round(x * scale) needs beyond its least, and that; RAW where codes pass LIMIT."""
    codes = np.empty(BLOCK, np.int32)
    for block in range(len(widths)):
        part = x[block * BLOCK : (block + 1) * BLOCK]
        _round(part, scale, codes)
        _fill(codes, len(part))
        least, most = _ends(codes)
        if least < -LIMIT or most > LIMIT:
            widths[block] = RAW
            continue
        offsets[block] = least
        span = np.int64(most) - np.int64(least)
        width = 0
        while span >> width:
            width += 1
        widths[block] = width


@njit(cache=True, nogil=True)
def _narrow(codes, least, narrow):
    for i in range(len(codes)):
        narrow[i] = np.uint8(codes[i] - least)


@njit(cache=True, nogil=True)
def _pack_wide(codes, least, bits, out):
    held, num_held, at = np.uint64(0), 0, 0
    for i in range(len(codes)):
        held = (held << np.uint64(bits)) | np.uint64(np.int64(codes[i]) - np.int64(least))
        num_held += bits
        while num_held >= 8:
            num_held -= 8
            out[at] = np.uint8((held >> np.uint64(num_held)) & np.uint64(255))
            at += 1


@njit(cache=True, nogil=True)
def _unpack_wide(packed, bits, codes):
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    held, num_held, at = np.uint64(0), 0, 0
    for i in range(len(codes)):
        while num_held < bits:
            held = (held << np.uint64(8)) | np.uint64(packed[at])
            at += 1
            num_held += 8
        num_held -= bits
        codes[i] = np.int32((held >> np.uint64(num_held)) & mask)


@njit(cache=True, nogil=True)
def pack(x, scale, widths, offsets, places, out):
    """Pack the codes of each block, from its place in `out` on; those of no width and those that are RAW have none."""
    codes, narrow = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.uint8)
    words, padded = np.empty(BLOCK // 8, np.uint64), np.empty(BLOCK + 8, np.uint8)
    for block in range(len(widths)):
        bits = np.int64(widths[block])
        if bits == 0 or bits == RAW:
            continue
        part = x[block * BLOCK : (block + 1) * BLOCK]
        _round(part, scale, codes)
        _fill(codes, len(part))
        target = out[places[block] : places[block] + bits * BLOCK // 8]
        if bits <= 8:
            _narrow(codes, offsets[block], narrow)
            pack_block(narrow, bits, words, padded, target)
        else:
            _pack_wide(codes, offsets[block], bits, target)


@njit(cache=True, nogil=True)
def _value(codes, offset, step, out):
    for i in range(len(out)):
        value = (np.float64(codes[i]) + offset) * step
        out[i] = np.float32(min(max(value, -3.4028234663852886e38), 3.4028234663852886e38))


@njit(cache=True, nogil=True)
def unpack(packed, step, widths, offsets, places, out):
    """Write (code + offset) * step of each block that is not RAW."""
    codes, narrow = np.empty(BLOCK, np.int32), np.empty(BLOCK, np.uint8)
    words, padded = np.empty(BLOCK // 8, np.uint64), np.empty(BLOCK + 8, np.uint8)
    for block in range(len(widths)):
        bits = np.int64(widths[block])
        if bits == RAW:
            continue
        part = out[block * BLOCK : (block + 1) * BLOCK]
        source = packed[places[block] : places[block] + bits * BLOCK // 8]
        offset = np.float64(offsets[block])
        if bits > 8:
            _unpack_wide(source, bits, codes)
            _value(codes, offset, step, part)
        else:
            if bits:
                unpack_block(source, bits, words, padded, narrow)
            else:
                narrow[:] = 0
            _value(narrow, offset, step, part)
