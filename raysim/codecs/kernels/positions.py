"""Coding of increasing positions as bitmaps and by Elias and Fano, and scattering of values to them, in numba.

Decoders check what they read, so that a damaged packet is refused and nothing is written out of bounds.
"""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from raysim.codecs.bits import packed_bytes
from raysim.codecs.kernels import bits_of, empty, opened
from raysim.codecs.kernels.words import leading_zeros, load_word, ones, reversed_bits, trailing_zeros
from raysim.codecs.positions import elias_fano, elias_fano_sizes, misplaced

_TOP = np.uint64(1 << 63)
_BYTE = np.uint64(255)
_PIECE = 4096  # values that are cleared at a time


def encode(positions, total, form):
    """Return the arrays of `raysim.codecs.positions.encode_positions`, of a bitmap or by Elias and Fano."""
    positions = positions.numpy()
    if form == "bitmap":
        bitmap = np.zeros(packed_bytes(total, 1), np.uint8)
        _encode_bitmap(positions, bitmap)
        return {"bitmap": bitmap}
    width, length = elias_fano_sizes(len(positions), total)
    low, high = np.empty(packed_bytes(len(positions), width), np.uint8), np.zeros(packed_bytes(length, 1), np.uint8)
    _encode_elias_fano(positions, width, low, high)
    return {"low": low, "high": high}


def expand(packet, values):
    """Return the flat tensor with `values` at the positions of a packet, zeros elsewhere."""
    bits = opened(bits_of(values))
    out = empty(packet.numel, bits.dtype)
    if "bitmap" in packet.arrays:
        bitmap = opened(packet.bytes_of("bitmap", packed_bytes(packet.numel, 1)))
        fits = _count_bits(bitmap, packet.numel) == len(values)
        if fits:
            _expand_bitmap(bitmap, bits, out)
    else:
        low, high, width, length = elias_fano(packet, len(values))
        padded = np.empty(len(low) + 8, np.uint8)
        padded[: len(low)] = low
        fits = _expand_elias_fano(padded, opened(high), length, width, bits, out)
    if not fits:
        raise misplaced(packet, len(values))
    return torch.from_numpy(out).view(values.dtype)


def scatter(positions, values, total):
    """Return `total` zeros with every value at its position."""
    bits = bits_of(values)
    out = empty(total, bits.dtype)
    out.fill(0)
    _scatter(positions.numpy(), opened(bits), out)
    return torch.from_numpy(out).view(values.dtype)


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
def _encode_bitmap(positions, bitmap):
    """Set the bit of every position in `bitmap`, which is zero."""
    for i in range(len(positions)):
        position = positions[i]
        bitmap[position >> 3] |= np.uint8(128 >> (position & 7))


@njit(cache=True, nogil=True)
def _count_bits(bitmap, total):
    """Return how many of the first `total` bits are set."""
    written = np.int64(0)
    for block in range((total + 63) // 64):
        word = _big_endian(bitmap, block)
        beyond = 64 * (block + 1) - total
        if beyond > 0:
            word &= ~((np.uint64(1) << np.uint64(beyond)) - np.uint64(1))
        written += np.int64(ones(word))
    return written


@njit(cache=True, nogil=True)
def _expand_bitmap(bitmap, values, out):
    """Write to `out` the values in order at set bits, and zero elsewhere; there are as many values as set bits."""
    written = 0
    for block in range((len(out) + 63) // 64):
        word = _big_endian(bitmap, block)
        part = out[64 * block : 64 * block + 64]
        if len(part) < 64:
            word &= ~((np.uint64(1) << np.uint64(64 - len(part))) - np.uint64(1))
        if not ~word:
            for i in range(64):
                part[i] = values[written + i]
            written += 64
            continue
        for i in range(len(part)):
            part[i] = 0
        while word:
            bit_index = leading_zeros(word)
            part[np.int64(bit_index)] = values[written]
            written += 1
            word &= ~(_TOP >> bit_index)


@njit(cache=True, nogil=True)
def _encode_elias_fano(positions, width, low, high):
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
def _clear(out):
    for i in range(len(out)):
        out[i] = 0


@njit(cache=True, nogil=True)
def _expand_elias_fano(low, high, length, width, values, out):
    """Write every value to its position in `out`, and zero elsewhere; return whether the positions are right.

    `out` is cleared a piece at a time, just before values go there. Eight bytes follow the low bits in `low`, of any content.
    """
    total = len(out)
    cleared = 0
    written = 0
    last = np.int64(-1)
    for block in range((length + 63) // 64):
        word = _big_endian(high, block)
        beyond = 64 * (block + 1) - length
        if beyond > 0:
            word &= ~((np.uint64(1) << np.uint64(beyond)) - np.uint64(1))
        if written + np.int64(ones(word)) > len(values):
            return False
        word = reversed_bits(word)
        while word:
            position = 64 * block + np.int64(trailing_zeros(word)) - written
            word &= word - np.uint64(1)
            if width:
                bit = written * width
                field = (load_word(low, bit >> 3) << np.uint64(bit & 7)) >> np.uint64(64 - width)
                position = (position << width) | np.int64(field)
            if position <= last or position >= total:
                return False
            last = position
            while position >= cleared:
                _clear(out[cleared : min(cleared + _PIECE, total)])
                cleared += _PIECE
            out[np.uint64(position)] = values[written]
            written += 1
    if cleared < total:
        _clear(out[cleared:])
    return written == len(values)


@njit(cache=True, nogil=True)
def _scatter(positions, values, out):
    """Write every value to its position."""
    for i in range(len(positions)):
        out[positions[i]] = values[i]


@njit(cache=True, nogil=True)
def subtract(positions, values, out):
    """Subtract every value at its position."""
    for i in range(len(positions)):
        out[positions[i]] -= values[i]
