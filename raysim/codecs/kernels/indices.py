"""Coding of increasing positions as bitmaps and by Elias and Fano, and scattering of values to them, in numba.

Decoders check what they read, so that a damaged packet is refused and nothing is written out of bounds.
"""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

import numpy as np
from numba import njit

from raysim.codecs.kernels.words import leading_zeros, load_word, ones, reversed_bits, trailing_zeros

_TOP = np.uint64(1 << 63)
_BYTE = np.uint64(255)
_PIECE = 4096  # values that are cleared at a time


@njit(cache=True, nogil=True, inline="always")
def _big_endian(data, index):
    """Return the eight bytes from 8 * index on as one word, zeros beyond the end."""
    start = 8 * index
    word = np.uint64(0)
    if start + 8 <= len(data):
        for i in range(8):
            word = (word << np.uint64(8)) | np.uint64(data[start + i])
    else:
        for i in range(8):
            word = (word << np.uint64(8)) | np.uint64(data[start + i] if start + i < len(data) else 0)
    return word


@njit(cache=True, nogil=True)
def encode_bitmap(positions, bitmap):
    """Set the bit of every position in `bitmap`, which is zero."""
    for i in range(len(positions)):
        position = positions[i]
        bitmap[position >> 3] |= np.uint8(128 >> (position & 7))


@njit(cache=True, nogil=True)
def decode_bitmap(bitmap, total, positions):
    """Write the positions of the set bits below `total`; return their number, or len(positions) + 1 where there are more."""
    found = 0
    for block in range((total + 63) // 64):
        word = _big_endian(bitmap, block)
        beyond = 64 * (block + 1) - total
        if beyond > 0:
            word &= ~((np.uint64(1) << np.uint64(beyond)) - np.uint64(1))
        while word:
            if found == len(positions):
                return found + 1
            place = leading_zeros(word)
            positions[found] = 64 * block + np.int64(place)
            found += 1
            word &= ~(_TOP >> place)
    return found


@njit(cache=True, nogil=True)
def count_bits(bitmap, total):
    """Return how many of the first `total` bits are set."""
    found = np.int64(0)
    for block in range((total + 63) // 64):
        word = _big_endian(bitmap, block)
        beyond = 64 * (block + 1) - total
        if beyond > 0:
            word &= ~((np.uint64(1) << np.uint64(beyond)) - np.uint64(1))
        found += np.int64(ones(word))
    return found


@njit(cache=True, nogil=True)
def expand_bitmap(bitmap, values, out):
    """Write to `out` the values in order where bits are set, and zero elsewhere; there are as many values as set bits."""
    found = 0
    for block in range((len(out) + 63) // 64):
        word = _big_endian(bitmap, block)
        part = out[64 * block : 64 * block + 64]
        if len(part) < 64:
            word &= ~((np.uint64(1) << np.uint64(64 - len(part))) - np.uint64(1))
        if not ~word:
            for i in range(64):
                part[i] = values[found + i]
            found += 64
            continue
        for i in range(len(part)):
            part[i] = 0
        while word:
            place = leading_zeros(word)
            part[np.int64(place)] = values[found]
            found += 1
            word &= ~(_TOP >> place)


@njit(cache=True, nogil=True)
def encode_elias_fano(positions, width, low, high):
    """Write the `width` low bits of every position to `low`, and the rest in unary to `high`, which is zero."""
    mask = np.uint64((1 << width) - 1)
    held = np.uint64(0)
    num_held = 0
    out = 0
    for i in range(len(positions)):
        position = positions[i]
        one = (position >> width) + i
        high[one >> 3] |= np.uint8(128 >> (one & 7))
        held = (held << np.uint64(width)) | (np.uint64(position) & mask)
        num_held += width
        while num_held >= 8:
            num_held -= 8
            low[out] = np.uint8((held >> np.uint64(num_held)) & _BYTE)
            out += 1
    if num_held:
        low[out] = np.uint8((held << np.uint64(8 - num_held)) & _BYTE)


@njit(cache=True, nogil=True)
def decode_elias_fano(low, high, length, width, total, positions):
    """Write the positions; return whether they are as many as `positions` has room for, increasing, and below `total`."""
    mask = np.uint64((1 << width) - 1)
    held = np.uint64(0)
    num_held = 0
    read = 0
    found = 0
    last = np.int64(-1)
    for block in range((length + 63) // 64):
        word = _big_endian(high, block)
        beyond = 64 * (block + 1) - length
        if beyond > 0:
            word &= ~((np.uint64(1) << np.uint64(beyond)) - np.uint64(1))
        while word:
            if found == len(positions):
                return False
            place = leading_zeros(word)
            word &= ~(_TOP >> place)
            while num_held < width:
                held = (held << np.uint64(8)) | np.uint64(low[read])
                read += 1
                num_held += 8
            num_held -= width
            field = np.int64((held >> np.uint64(num_held)) & mask)
            position = ((64 * block + np.int64(place) - found) << width) | field
            if position <= last:
                return False
            last = position
            positions[found] = position
            found += 1
    return found == len(positions) and last < total


@njit(cache=True, nogil=True)
def _clear(out):
    for i in range(len(out)):
        out[i] = 0


@njit(cache=True, nogil=True)
def expand_elias_fano(low, high, length, width, values, out):
    """Write every value to its position in `out`, and zero elsewhere; return whether the positions are right.

    That is what `decode_elias_fano` and `scatter` do, but in one pass: `out` is cleared a piece at a time, just before values go
    there. Eight bytes follow the low bits in `low`, of any content.
    """
    total = len(out)
    cleared = 0
    found = 0
    last = np.int64(-1)
    for block in range((length + 63) // 64):
        word = _big_endian(high, block)
        beyond = 64 * (block + 1) - length
        if beyond > 0:
            word &= ~((np.uint64(1) << np.uint64(beyond)) - np.uint64(1))
        if found + np.int64(ones(word)) > len(values):
            return False
        word = reversed_bits(word)
        while word:
            position = 64 * block + np.int64(trailing_zeros(word)) - found
            word &= word - np.uint64(1)
            if width:
                bit = found * width
                field = (load_word(low, bit >> 3) << np.uint64(bit & 7)) >> np.uint64(64 - width)
                position = (position << width) | np.int64(field)
            if position <= last or position >= total:
                return False
            last = position
            while position >= cleared:
                _clear(out[cleared : min(cleared + _PIECE, total)])
                cleared += _PIECE
            out[np.uint64(position)] = values[found]
            found += 1
    if cleared < total:
        _clear(out[cleared:])
    return found == len(values)


@njit(cache=True, nogil=True)
def scatter(positions, values, out):
    """Write every value to its position."""
    for i in range(len(positions)):
        out[positions[i]] = values[i]


@njit(cache=True, nogil=True)
def gather(source, positions, out):
    """Read the value at every position."""
    for i in range(len(positions)):
        out[i] = source[positions[i]]


@njit(cache=True, nogil=True)
def clear(positions, out):
    """Write zero to every position."""
    for i in range(len(positions)):
        out[positions[i]] = 0


@njit(cache=True, nogil=True)
def subtract(positions, values, out):
    """Subtract every value at its position."""
    for i in range(len(positions)):
        out[positions[i]] -= values[i]
