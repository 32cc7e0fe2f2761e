"""Packing of small integers in numba: fields most significant bit first, one stream; see `raysim.codecs.bits`.

Eight codes make one 64-bit word by three merges of neighbours, which works on many words at once if there are vector
registers; the words are then written over one another, since each holds `bits` bytes.
"""

# mypy: ignore-errors
# What numba compiles has the types that it infers, which mypy cannot follow.

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from raysim.codecs.kernels import opened
from raysim.codecs.kernels.words import load_word, store_word

BLOCK = 4096  # codes; a multiple of 64, so that every block but the last ends on whole words

_8 = np.uint64(8)
_16 = np.uint64(16)
_32 = np.uint64(32)
_64 = np.uint64(64)
_BYTES = np.uint64(0x00FF00FF00FF00FF)
_PAIRS = np.uint64(0x0000FFFF0000FFFF)
_QUADS = np.uint64(0x00000000FFFFFFFF)


def pack(values, width):
    """Return flat non-negative integers, each below 2**width, as a uint8 stream; `width` is 1 to 32."""
    packed = np.empty((len(values) * width + 7) // 8, np.uint8)
    if width <= 8:
        _pack_codes(values.to(torch.uint8).contiguous().numpy(), width, packed)
    else:
        _pack_wide(values.long().contiguous().numpy(), width, packed)
    return torch.from_numpy(packed)


def unpack(packed, count, width):
    """Return `count` fields, uint8 of at most 8 bits and int64 of more; `width` is 1 to 32."""
    values = np.empty(count, np.uint8 if width <= 8 else np.int64)
    (_unpack_codes if width <= 8 else _unpack_wide)(opened(packed.numpy()), width, values)
    return torch.from_numpy(values)


@njit(cache=True, nogil=True)
def copy(source, target):
    """Copy to all of `target`, in whole words: assigning a slice goes byte by byte."""
    for i in range(len(target)):
        target[i] = source[i]


@njit(cache=True, nogil=True)
def pack_block(codes, bits, words, padded, out):
    """Pack len(out) * 8 / bits codes into `out`; `codes` has BLOCK elements, `words` BLOCK / 8, `padded` BLOCK + 8.

    Codes beyond the last must be zero up to a multiple of eight.
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
        for i in range(groups):  # the first code is the lowest byte of its word, and goes to the top
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
    """Pack codes of 1..8 bits, a byte each, into `out`."""
    block = np.zeros(BLOCK, np.uint8)
    words, padded = np.empty(BLOCK // 8, np.uint64), np.empty(BLOCK + 8, np.uint8)
    for first in range(0, len(codes), BLOCK):
        part = codes[first : first + BLOCK]
        copy(part, block[: len(part)])
        block[len(part) :] = 0
        pack_block(block, bits, words, padded, out[first * bits // 8 : ((first + len(part)) * bits + 7) // 8])


@njit(cache=True, nogil=True)
def _unpack_codes(packed, bits, codes):
    """Unpack codes of 1..8 bits, a byte each; inverse of `_pack_codes`."""
    block = np.empty(BLOCK, np.uint8)
    words, padded = np.empty(BLOCK // 8, np.uint64), np.empty(BLOCK + 8, np.uint8)
    for first in range(0, len(codes), BLOCK):
        part = codes[first : first + BLOCK]
        unpack_block(packed[first * bits // 8 : ((first + len(part)) * bits + 7) // 8], bits, words, padded, block)
        copy(block, part)


@njit(cache=True, nogil=True)
def _pack_wide(values, bits, out):
    """Pack int64 of 9..56 bits into `out`."""
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


@njit(cache=True, nogil=True)
def _unpack_wide(packed, bits, values):
    """Unpack int64 of 9..56 bits; inverse of `_pack_wide`."""
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    held = np.uint64(0)
    num_held = 0
    at = 0
    for i in range(len(values)):
        while num_held < bits:
            held = (held << np.uint64(8)) | np.uint64(packed[at])
            at += 1
            num_held += 8
        num_held -= bits
        values[i] = np.int64((held >> np.uint64(num_held)) & mask)
