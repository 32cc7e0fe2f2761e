"""Packing of integers in numba: fields most significant bit first, and positions as set bits, see `raysim.codecs.bits` and
`raysim.codecs.positions`.

Three merges of neighbours turn eight codes into one 64-bit word, vectorised over many words. Each word holds `bits` bytes, so words
are stored at overlapping addresses. Decoders validate positions, so that a damaged packet is rejected and nothing is written out of
bounds.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from raysim.codecs.bits import packed_bytes
from raysim.codecs.kernels import bits_of, empty, opened
from raysim.codecs.kernels.words import leading_zeros, load_word, ones, reversed_bits, store_word, trailing_zeros
from raysim.codecs.positions import Marks, elias_fano_sizes, misplaced

BLOCK = 4096  # codes; a multiple of 64, so that every block except the last is whole words

_8 = np.uint64(8)
_16 = np.uint64(16)
_32 = np.uint64(32)
_64 = np.uint64(64)
_BYTES = np.uint64(0x00FF00FF00FF00FF)
_PAIRS = np.uint64(0x0000FFFF0000FFFF)
_QUADS = np.uint64(0x00000000FFFFFFFF)
_TOP = np.uint64(1 << 63)
_PIECE = 4096  # values cleared at a time


def pack(values, width):
    """Pack flat integers in [0, 2**width) into a uint8 stream; `width` is 1 to 32."""
    packed = np.empty((len(values) * width + 7) // 8, np.uint8)
    if width <= 8:
        _pack_codes(values.to(torch.uint8).contiguous().numpy(), width, packed)
    else:
        _pack_wide(values.long().contiguous().numpy(), width, packed)
    return torch.from_numpy(packed)


def unpack(packed, count, width):
    """Return `count` fields, uint8 up to 8 bits and int64 above; `width` is 1 to 32."""
    values = np.empty(count, np.uint8 if width <= 8 else np.int64)
    if width <= 8:
        _unpack_codes(opened(packed.numpy()), width, values)
    else:
        _unpack_wide(_padded(packed.numpy()), width, values)
    return torch.from_numpy(values)


def _padded(data):
    """Return a copy with eight more bytes of any content."""
    padded = np.empty(len(data) + 8, np.uint8)
    padded[: len(data)] = data
    return padded


@njit(cache=True, nogil=True)
def copy(source, target):
    """Fill `target` from `source` by whole words; numba's slice assignment copies byte by byte."""
    for i in range(len(target)):
        target[i] = source[i]


@njit(cache=True, nogil=True)
def add(x, memory, out):
    """Write memory + x to `out`."""
    for i in range(len(out)):
        out[i] = memory[i] + x[i]


@njit(cache=True, nogil=True)
def pack_block(codes, bits, words, padded, out):
    """Pack len(out) * 8 / bits codes into `out`; `codes` has BLOCK elements, `words` BLOCK / 8, `padded` BLOCK + 8.

    Codes after the last must be zero up to a multiple of eight.
    """
    if bits == 8:
        copy(codes, out)
    elif bits == 4:
        for i in range(len(out)):
            out[i] = (codes[2 * i] << 4) | codes[2 * i + 1]
    else:
        b = np.uint64(bits)
        groups = (len(out) + bits - 1) // bits
        source = codes.view(np.uint64)[:groups]
        for i in range(groups):  # the first code moves from the lowest to the highest byte of its word
            x = source[i]
            x = ((x & _BYTES) << b) | ((x >> _8) & _BYTES)
            x = ((x & _PAIRS) << (b + b)) | ((x >> _16) & _PAIRS)
            words[i] = (((x & _QUADS) << (np.uint64(4) * b)) | (x >> _32)) << (_64 - _8 * b)
        for i in range(groups):
            store_word(padded, i * bits, words[i])
        copy(padded, out)


@njit(cache=True, nogil=True)
def unpack_block(packed, bits, words, padded, codes):
    """Unpack the codes of `packed` into `codes`; inverse of `pack_block`."""
    if bits == 8:
        copy(packed, codes[: len(packed)])
    elif bits == 4:
        for i in range(len(packed)):
            codes[2 * i] = packed[i] >> np.uint8(4)
            codes[2 * i + 1] = packed[i] & np.uint8(15)
    else:
        b = np.uint64(bits)
        groups = (len(packed) + bits - 1) // bits
        copy(packed, padded[: len(packed)])
        padded[len(packed) : groups * bits] = 0
        for i in range(groups):
            words[i] = load_word(padded, i * bits)
        low = (np.uint64(1) << b) - np.uint64(1)
        bytes_ = low | (low << _16) | (low << _32) | (low << np.uint64(48))
        pair = (np.uint64(1) << (b + b)) - np.uint64(1)
        pairs = pair | (pair << _32)
        quad = (np.uint64(1) << (np.uint64(4) * b)) - np.uint64(1)
        target = codes.view(np.uint64)[:groups]
        for i in range(groups):
            x = words[i] >> (_64 - _8 * b)
            x = (x >> (np.uint64(4) * b)) | ((x & quad) << _32)
            x = ((x >> (b + b)) & pairs) | ((x & pairs) << _16)
            target[i] = ((x >> b) & bytes_) | ((x & bytes_) << _8)


@njit(cache=True, nogil=True)
def _pack_codes(codes, bits, out):
    """Pack codes of 1..8 bits, one per byte, into `out`."""
    block = np.zeros(BLOCK, np.uint8)
    words, padded = np.empty(BLOCK // 8, np.uint64), np.empty(BLOCK + 8, np.uint8)
    for first in range(0, len(codes), BLOCK):
        part = codes[first : first + BLOCK]
        copy(part, block[: len(part)])
        block[len(part) :] = 0
        pack_block(block, bits, words, padded, out[first * bits // 8 : ((first + len(part)) * bits + 7) // 8])


@njit(cache=True, nogil=True)
def _unpack_codes(packed, bits, codes):
    """Unpack codes of 1..8 bits to one per byte; inverse of `_pack_codes`."""
    block = np.empty(BLOCK, np.uint8)
    words, padded = np.empty(BLOCK // 8, np.uint64), np.empty(BLOCK + 8, np.uint8)
    for first in range(0, len(codes), BLOCK):
        part = codes[first : first + BLOCK]
        unpack_block(packed[first * bits // 8 : ((first + len(part)) * bits + 7) // 8], bits, words, padded, block)
        copy(block, part)


@njit(cache=True, nogil=True)
def _pack_wide(values, bits, out):
    """Pack the lowest `bits` bits (at most 56) of each int64 into `out`."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    held = np.uint64(0)
    num_held = 0
    at = 0
    for i in range(len(values)):
        held = (held << np.uint64(bits)) | (np.uint64(values[i]) & mask)
        num_held += bits
        while num_held >= 8:
            num_held -= 8
            out[at] = np.uint8((held >> np.uint64(num_held)) & np.uint64(255))
            at += 1
    if num_held:
        out[at] = np.uint8((held << np.uint64(8 - num_held)) & np.uint64(255))


@njit(cache=True, nogil=True, inline="always")
def _field(packed, index, bits):
    """Return the field at `index`, of 1..56 bits; eight bytes of any content must follow the fields."""
    bit = index * bits
    return (load_word(packed, bit >> 3) << np.uint64(bit & 7)) >> np.uint64(64 - bits)


@njit(cache=True, nogil=True)
def _unpack_wide(packed, bits, values):
    """Unpack int64; inverse of `_pack_wide`. Eight bytes of any content must follow the fields."""
    for i in range(len(values)):
        values[i] = np.int64(_field(packed, i, bits))


def encode_positions(positions, total, form):
    """Return the arrays of `raysim.codecs.positions.encode_positions` for a bitmap or Elias-Fano code."""
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
    """Return a flat tensor with `values` at the packet's positions and zeros elsewhere."""
    values_bits, marks = opened(bits_of(values)), Marks.of(packet, len(values))
    out, bits = empty(packet.numel, values_bits.dtype), opened(marks.bits)
    if marks.width is None:
        fits = _count_bits(bits, marks.length) == len(values)
        if fits:
            _expand_bitmap(bits, values_bits, out)
    else:
        fits = _expand_elias_fano(_padded(marks.low), bits, marks.length, marks.width, values_bits, out)
    if not fits:
        raise misplaced(packet, len(values))
    return torch.from_numpy(out).view(values.dtype)


def scatter(positions, values, total):
    """Return `total` zeros with `values` written at `positions`."""
    bits = bits_of(values)
    out = empty(total, bits.dtype)
    out.fill(0)
    _scatter(positions.numpy(), opened(bits), out)
    return torch.from_numpy(out).view(values.dtype)


def subtract(positions, values, out):
    """Subtract `values` from `out` at `positions`."""
    _subtract(positions.numpy(), opened(values.numpy()), out.numpy())


@njit(cache=True, nogil=True)
def _encode_bitmap(positions, bitmap):
    """Set the bit of every position in a zeroed `bitmap`."""
    for i in range(len(positions)):
        position = positions[i]
        bitmap[position >> 3] |= np.uint8(128 >> (position & 7))


@njit(cache=True, nogil=True)
def _encode_elias_fano(positions, width, low, high):
    """Write the `width` low bits of every position to `low`, and the rest in unary to a zeroed `high`."""
    for i in range(len(positions)):
        bit = (positions[i] >> width) + i
        high[bit >> 3] |= np.uint8(128 >> (bit & 7))
    _pack_wide(positions, width, low)


@njit(cache=True, nogil=True, inline="always")
def _word(bits, index, length):
    """Return the 64 bits from 64 * index on, the first most significant; zeros beyond `length`."""
    start = 8 * index
    if 8 * start + 64 <= length:
        return load_word(bits, start)
    word = np.uint64(0)
    for i in range(start, start + 8):
        word = (word << _8) | np.uint64(bits[i] if i < len(bits) else 0)
    return word & ~((np.uint64(1) << np.uint64(8 * start + 64 - length)) - np.uint64(1))


@njit(cache=True, nogil=True)
def _count_bits(bitmap, length):
    """Return how many of the first `length` bits are set."""
    written = np.int64(0)
    for block in range((length + 63) // 64):
        written += np.int64(ones(_word(bitmap, block, length)))
    return written


@njit(cache=True, nogil=True)
def _expand_bitmap(bitmap, values, out):
    """Write the values in order to the set bits' positions in `out`, and zeros elsewhere; needs one value per set bit."""
    written = 0
    for block in range((len(out) + 63) // 64):
        word = _word(bitmap, block, len(out))
        part = out[64 * block : 64 * block + 64]
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
def _clear(out):
    for i in range(len(out)):
        out[i] = 0


@njit(cache=True, nogil=True)
def _expand_elias_fano(low, high, length, width, values, out):
    """Write every value to its position in `out` and zeros elsewhere; return whether the positions are valid.

    `out` is cleared piece by piece, just before its values are written. `low` has eight bytes of any content after the low bits.
    """
    total = len(out)
    cleared = 0
    written = 0
    last = np.int64(-1)
    for block in range((length + 63) // 64):
        word = _word(high, block, length)
        if written + np.int64(ones(word)) > len(values):
            return False
        word = reversed_bits(word)
        while word:
            position = 64 * block + np.int64(trailing_zeros(word)) - written
            word &= word - np.uint64(1)
            if width:
                position = (position << width) | np.int64(_field(low, written, width))
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
    """Write `values` to `out` at `positions`."""
    for i in range(len(positions)):
        out[positions[i]] = values[i]


@njit(cache=True, nogil=True)
def _subtract(positions, values, out):
    """Subtract `values` from `out` at `positions`."""
    for i in range(len(positions)):
        out[positions[i]] -= values[i]
