"""The blocks of ZFP in numba: transform, negabinary and embedded coding of 4 x 4 values."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from raysim.codecs.kernels.words import trailing_zeros

_PRECISION = 32  # bit planes of a coefficient
_NEGABINARY = 0xAAAAAAAA
_ORDER = np.array([0, 1, 4, 5, 2, 8, 6, 9, 3, 12, 10, 7, 13, 11, 14, 15])  # of coefficients, by frequency
_ONE, _32 = np.uint64(1), np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)


@njit(cache=True, nogil=True)
def _gather(x, top, left, block):
    """Fill a block; beyond the edges of the plane, with values that ZFP repeats."""
    height, width = min(4, x.shape[0] - top), min(4, x.shape[1] - left)
    for i in range(height):
        for j in range(width):
            block[4 * i + j] = x[top + i, left + j]
        for j in range(width, 4):
            block[4 * i + j] = block[4 * i + (0 if j == 3 else j - 1)]
    for i in range(height, 4):
        for j in range(4):
            block[4 * i + j] = block[(0 if i == 3 else 4 * (i - 1)) + j]


@njit(cache=True, nogil=True)
def _lift(p, at, step):
    x, y, z, w = p[at], p[at + step], p[at + 2 * step], p[at + 3 * step]
    x = (x + w) >> 1
    w -= x
    z = (z + y) >> 1
    y -= z
    x = (x + z) >> 1
    z -= x
    w = (w + y) >> 1
    y -= w
    w += y >> 1
    y -= w >> 1
    p[at], p[at + step], p[at + 2 * step], p[at + 3 * step] = x, y, z, w


@njit(cache=True, nogil=True)
def _unlift(p, at, step):
    x, y, z, w = p[at], p[at + step], p[at + 2 * step], p[at + 3 * step]
    y += w >> 1
    w -= y >> 1
    y += w
    w = (w << 1) - y
    z += x
    x = (x << 1) - z
    y += z
    z = (z << 1) - y
    w += x
    x = (x << 1) - w
    p[at], p[at + step], p[at + 2 * step], p[at + 3 * step] = x, y, z, w


@njit(cache=True, nogil=True)
def _put(out, held, num_held, at, value, count):
    """Append at most 32 bits to a stream of 32-bit words, the least significant bit first."""
    held |= value << np.uint64(num_held)
    num_held += count
    if num_held >= 32:
        out[at] = np.uint32(held & _LOW)
        held >>= _32
        num_held -= 32
        at += 1
    return held, num_held, at


@njit(cache=True, nogil=True)
def encode(x, minexp, least, most_planes, bias, exponent_bits, out, raw):
    """Write the stream of all blocks of the 3-D planes `x` and mark the raw ones; return the bits written.

    Blocks that would need more than `most_planes` bit planes are sent raw. `minexp`: exponent of the tolerance.
    """
    block, whole, words = np.empty(16, x.dtype), np.empty(16, np.int64), np.empty(16, np.uint64)
    held, num_held, at = np.uint64(0), 0, 0
    number = -1
    for plane in range(x.shape[0]):
        for top in range(0, x.shape[1], 4):
            for left in range(0, x.shape[2], 4):
                number += 1
                _gather(x[plane], top, left, block)
                greatest = np.float64(0)
                for i in range(16):
                    greatest = max(greatest, abs(np.float64(block[i])))
                emax = max(math.frexp(greatest)[1], least)
                planes = emax - minexp + 6 if greatest > 0 else 0
                raw[number] = planes > most_planes
                if planes <= 0:
                    held, num_held, at = _put(out, held, num_held, at, np.uint64(0), 1)
                    continue
                exponent = 0 if raw[number] else emax + bias
                held, num_held, at = _put(out, held, num_held, at, np.uint64(2 * exponent + 1), 1 + exponent_bits)
                if raw[number]:
                    continue
                scale = math.ldexp(1.0, _PRECISION - 2 - emax) if _PRECISION - 2 - emax < 1024 else np.inf
                if scale < np.inf:
                    for i in range(16):
                        whole[i] = np.int64(np.float64(block[i]) * scale)
                else:  # for the smallest float64 numbers the scale itself would overflow
                    for i in range(16):
                        whole[i] = np.int64(
                            np.float64(block[i]) * math.ldexp(1.0, 1000) * math.ldexp(1.0, _PRECISION - 1002 - emax)
                        )
                for i in range(4):
                    _lift(whole, 4 * i, 1)
                for i in range(4):
                    _lift(whole, i, 4)
                for i in range(16):
                    words[i] = np.uint64(((whole[_ORDER[i]] + _NEGABINARY) ^ _NEGABINARY) & 0xFFFFFFFF)
                known = 0
                for k in range(_PRECISION - 1, _PRECISION - 1 - planes, -1):
                    bits = np.uint64(0)
                    for i in range(16):
                        bits |= ((words[i] >> np.uint64(k)) & _ONE) << np.uint64(i)
                    verbatim = bits & ((_ONE << np.uint64(known)) - _ONE)
                    held, num_held, at = _put(out, held, num_held, at, verbatim, known)
                    bits >>= np.uint64(known)
                    while bits and known < 16:
                        zeros = np.int64(trailing_zeros(bits))
                        last = known + zeros == 15  # its 1 is implied
                        run = _ONE if last else _ONE | (_ONE << np.uint64(zeros + 1))
                        held, num_held, at = _put(out, held, num_held, at, run, zeros + (1 if last else 2))
                        bits >>= np.uint64(zeros + 1)
                        known += zeros + 1
                    if known < 16:
                        held, num_held, at = _put(out, held, num_held, at, np.uint64(0), 1)
    if num_held:
        out[at] = np.uint32(held & _LOW)
    return 32 * at + num_held


@njit(cache=True, nogil=True)
def _peek(data, at):
    """Return 32 bits of a byte stream from bit `at` on, zeros beyond its end."""
    first, word = at >> 3, np.uint64(0)
    for i in range(min(5, len(data) - first)):
        word |= np.uint64(data[first + i]) << np.uint64(8 * i)
    return (word >> np.uint64(at & 7)) & _LOW


@njit(cache=True, nogil=True)
def decode(data, minexp, most_planes, bias, exponent_bits, out, raw):
    """Write the values of the 3-D float64 planes `out` and mark the raw blocks; return the bits read."""
    whole, words = np.empty(16, np.int64), np.empty(16, np.uint64)
    at, end, number = 0, 8 * len(data), -1
    for plane in range(out.shape[0]):
        for top in range(0, out.shape[1], 4):
            for left in range(0, out.shape[2], 4):
                number += 1
                if at >= end:
                    return -1
                height, width = min(4, out.shape[1] - top), min(4, out.shape[2] - left)
                if not _peek(data, at) & _ONE:
                    at += 1
                    out[plane, top : top + height, left : left + width] = 0.0
                    continue
                exponent = np.int64((_peek(data, at) >> _ONE) & ((_ONE << np.uint64(exponent_bits)) - _ONE))
                at += 1 + exponent_bits
                raw[number] = exponent == 0
                if exponent == 0:
                    continue
                emax = exponent - bias
                planes = emax - minexp + 6
                if planes <= 0 or planes > most_planes:
                    return -1
                words[:] = 0
                known = 0
                for k in range(_PRECISION - 1, _PRECISION - 1 - planes, -1):
                    if at > end:
                        return -1
                    bits = _peek(data, at) & ((_ONE << np.uint64(known)) - _ONE)
                    at += known
                    while known < 16:
                        ahead = _peek(data, at)
                        at += 1
                        if not ahead & _ONE:
                            break
                        ahead = (ahead >> _ONE) | (_ONE << np.uint64(15 - known))  # the last 1 is implied
                        zeros = np.int64(trailing_zeros(ahead))
                        at += zeros + (0 if known + zeros == 15 else 1)
                        bits |= _ONE << np.uint64(known + zeros)
                        known += zeros + 1
                    for i in range(16):
                        words[i] |= ((bits >> np.uint64(i)) & _ONE) << np.uint64(k)
                for i in range(16):
                    pattern = np.int64(words[i] ^ np.uint64(_NEGABINARY)) - _NEGABINARY
                    whole[_ORDER[i]] = pattern
                for i in range(4):
                    _unlift(whole, i, 4)
                for i in range(4):
                    _unlift(whole, 4 * i, 1)
                for i in range(height):
                    for j in range(width):
                        out[plane, top + i, left + j] = math.ldexp(np.float64(whole[4 * i + j]), emax - _PRECISION + 2)
    return at if at <= end else -1
