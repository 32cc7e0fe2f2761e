"""Uniform quantisation in numba: ranges, quantise and pack, unpack and dequantise, with the arithmetic of `raysim.codecs.quantize`.

Values are laid out as (outer, groups, inner), and the last run may be shorter. Blocks fit in the L1 cache: codes are computed one
per byte, which vectorises, and then packed. Inner loops are functions over slices, since numba vectorises only if it can prove that
indices are not negative.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from raysim.codecs.bits import packed_bytes
from raysim.codecs.codec import cast_saturating
from raysim.codecs.kernels import empty, in_parts, opened
from raysim.codecs.kernels.packing import BLOCK, add, copy, pack_block, unpack_block
from raysim.codecs.kernels.words import GAMMA, uniform_at

_STRETCH = 256  # values of short runs whose ranges are computed together
_SHORT = 24  # runs shorter than this use a center and a scale per value
_31 = np.int32(31)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_EMPTY = np.empty(0, np.float32)


def quantize(x, coding, key, ends=None, memory=None, residual=None):
    """Return the packed codes of x, or of x + `memory`, and the ends of each group's range as sent; rounds stochastically if `key`.

    The coding error is written to `residual`, which is x if there is no memory. Raises `error` on NaN and infinity.
    """
    layout, levels, error = coding
    values, held, left = (
        _EMPTY if part is None else part.contiguous().float().view(-1).numpy() for part in (x, memory, residual)
    )
    if ends is None:
        low, high = _ranges(values, held, left, layout)
    else:
        low, high = (end.numpy().copy() for end in ends)
    if memory is not None:
        values = left  # the sum
    fits, inner, grid = _grid_of(low, high, coding)
    if not fits:
        raise error()
    packed = empty(packed_bytes(layout.numel, levels.bits), np.uint8)
    codes = levels.middle, levels.last, levels.bits, key is not None, np.uint64((key or 0) % 2**64)

    def part(start, stop):
        out = packed[start * levels.bits // 8 : packed_bytes(stop, levels.bits)]
        _quantize(values[start:stop], start, layout.groups, inner, *grid, *codes, out, left[start:stop])

    in_parts(part, layout.numel, BLOCK)
    return packed, low.view(np.uint8), high.view(np.uint8)


def _ranges(x, memory, total, layout):
    """Return the minimum and maximum of each group of x, or with a memory of x + memory, which is written to `total`."""
    bits = (total if len(memory) else x).view(np.int32)

    def part(start, stop):
        ends, added = np.empty((2, layout.groups), np.int32), (x[start:stop], memory[start:stop], total[start:stop])
        _find_ranges(bits[start:stop], *added, layout.groups, layout.inner, *ends)
        return ends.view(np.float32)

    ends = np.stack(in_parts(part, layout.numel, BLOCK) if layout.groups == 1 else [part(0, layout.numel)])
    return ends[:, 0].min(axis=0), ends[:, 1].max(axis=0)  # NaN in any part propagates


def dequantize(codes, low, high, coding, dtype, device):
    """Return the flat values of packed codes; raises `coding.error` if a code or a range is out of bounds."""
    layout, levels, error = coding
    high = high.copy().view(np.float32)
    low = -high if levels.absmax else low.copy().view(np.float32)
    fits, inner, (center, _, step) = _grid_of(low, high, coding)
    data, out = opened(codes), empty(layout.numel, np.float32)
    shape, limits = (layout.groups, inner), (levels.middle, levels.last, levels.bits)

    def part(start, stop):
        source = data[start * levels.bits // 8 : packed_bytes(stop, levels.bits)]
        return _dequantize(source, start, *shape, center, step, *limits, out[start:stop])

    if not (fits and all(in_parts(part, layout.numel, BLOCK))):
        raise error()
    return cast_saturating(torch.from_numpy(out), dtype)


def _grid_of(low, high, coding):
    """Return whether the ranges are valid, and length, centers, scales and steps of runs; short runs: 0, and one each per value."""
    layout, levels, _ = coding
    grid = np.empty((3, layout.groups))
    fits = _make_grid(low, high, levels.absmax, levels.steps, *grid)
    return (fits, layout.inner, grid) if layout.inner >= _SHORT else (fits, 0, grid.repeat(layout.inner, axis=1))


@njit(cache=True, nogil=True)
def _range(bits):
    least, greatest = _MAGNITUDE, ~_MAGNITUDE
    for i in range(len(bits)):
        ordered = np.int32(bits[i] ^ ((bits[i] >> _31) & _MAGNITUDE))
        least = min(least, ordered)
        greatest = max(greatest, ordered)
    return least, greatest


@njit(cache=True, nogil=True)
def _widen(bits, low, high):
    for i in range(len(bits)):
        ordered = np.int32(bits[i] ^ ((bits[i] >> _31) & _MAGNITUDE))
        low[i] = min(low[i], ordered)
        high[i] = max(high[i], ordered)


@njit(cache=True, nogil=True)
def _add_range(x, memory, out):
    least, greatest = _MAGNITUDE, ~_MAGNITUDE
    for i in range(len(out)):
        total = np.float32(memory[i] + x[i])
        out[i] = total
        bits = total.view(np.int32)
        ordered = np.int32(bits ^ ((bits >> _31) & _MAGNITUDE))
        least = min(least, ordered)
        greatest = max(greatest, ordered)
    return least, greatest


@njit(cache=True, nogil=True)
def _find_ranges(bits, x, memory, total, groups, inner, lowest, highest):
    """Write the bits of the minimum and maximum of each group of x, or if `memory` is not empty of x + memory, written to `total`.

    `bits` are those of x or `total`, compared as integers of the same order. NaN ranks beyond infinity, so it becomes a minimum or
    maximum.
    """
    adds = len(memory) > 0
    short = inner < _SHORT
    run = groups * inner * max(1, _STRETCH // (groups * inner)) if short else inner
    count = run if short else groups
    lows, highs = np.empty(count, np.int32), np.empty(count, np.int32)
    lows[:] = _MAGNITUDE
    highs[:] = ~_MAGNITUDE
    for start in range(0, len(x), run):
        stop = min(start + run, len(x))
        if short:
            if adds:
                add(x[start:stop], memory[start:stop], total[start:stop])
            _widen(bits[start:stop], lows, highs)
            continue
        group = start // run % groups
        if adds:
            least, greatest = _add_range(x[start:stop], memory[start:stop], total[start:stop])
        else:
            least, greatest = _range(bits[start:stop])
        lows[group] = min(lows[group], least)
        highs[group] = max(highs[group], greatest)
    lowest[:] = _MAGNITUDE
    highest[:] = ~_MAGNITUDE
    for i in range(count):
        group = i // inner % groups if short else i
        lowest[group] = min(lowest[group], lows[i])
        highest[group] = max(highest[group], highs[i])
    for group in range(groups):  # back from ordered integers to float32
        lowest[group] ^= (lowest[group] >> _31) & _MAGNITUDE
        highest[group] ^= (highest[group] >> _31) & _MAGNITUDE


@njit(cache=True, nogil=True)
def _make_grid(low, high, absmax, steps, center, scale, step):
    """Write center, scale and step of each group for `_quantize` and `_dequantize`, float64; return whether the ranges are valid.

    The minimum and maximum are float32; with `absmax` they are replaced by the values to send, -0 as +0. A constant group has one
    level, the center.
    """
    for i in range(len(high)):
        if not (np.isfinite(low[i]) and np.isfinite(high[i]) and low[i] <= high[i]):
            return False
        if absmax:
            high[i] = max(abs(low[i]), abs(high[i])) + np.float32(0)
            center[i] = 0.0
            span = np.float64(high[i])
        else:
            low[i] += np.float32(0)
            high[i] += np.float32(0)
            center[i] = low[i]
            span = np.float64(high[i]) - np.float64(low[i])
        scale[i] = steps / span if span > 0 else 0.0
        step[i] = span / steps
    return True


@njit(cache=True, nogil=True)
def _code_run(x, center, scale, middle, last, stochastic, state, codes):
    least = -np.float64(middle)
    for i in range(len(x)):
        state += GAMMA
        t = (np.float64(x[i]) - center) * scale
        whole = max(np.floor(t + uniform_at(state)), least) if stochastic else np.rint(t)
        codes[i] = min(np.int32(whole) + middle, last)  # t + u may round up to the next integer


@njit(cache=True, nogil=True)
def _code_each(x, center, scale, middle, last, stochastic, state, codes):
    least = -np.float64(middle)
    for i in range(len(x)):
        state += GAMMA
        t = (np.float64(x[i]) - center[i]) * scale[i]
        whole = max(np.floor(t + uniform_at(state)), least) if stochastic else np.rint(t)
        codes[i] = min(np.int32(whole) + middle, last)


@njit(cache=True, nogil=True)
def _round_run_left(x, center, scale, step, middle, last, codes, left):
    """Code a run like `_code_run` without `stochastic`, and write each value's coding error."""
    most = np.float64(last - middle)
    for i in range(len(x)):
        steps = min(np.rint((np.float64(x[i]) - center) * scale), most)
        codes[i] = np.int32(steps) + middle
        left[i] = x[i] - np.float32(steps * step + center)


@njit(cache=True, nogil=True)
def _value_run(codes, center, step, middle, out):
    for i in range(len(out)):
        out[i] = np.float32(np.float64(np.int32(codes[i]) - middle) * step + center)


@njit(cache=True, nogil=True)
def _value_each(codes, center, step, middle, out):
    for i in range(len(out)):
        out[i] = np.float32(np.float64(np.int32(codes[i]) - middle) * step[i] + center[i])


@njit(cache=True, nogil=True)
def _withhold(values, residual):
    for i in range(len(residual)):
        residual[i] -= values[i]


@njit(cache=True, nogil=True)
def _dequantize_block(codes, first, out, groups, inner, center, step, middle):
    """Write the values of one block of codes starting at value `first`; `inner` 0 means one center per value."""
    at = 0
    while at < len(out):
        if inner:
            segment = (first + at) // inner
            end = min(len(out), (segment + 1) * inner - first)
            group = segment % groups
            _value_run(codes[at:end], center[group], step[group], middle, out[at:end])
        else:
            column = (first + at) % len(center)
            end = min(len(out), at + len(center) - column)
            _value_each(codes[at:end], center[column:], step[column:], middle, out[at:end])
        at = end


@njit(cache=True, nogil=True)
def _quantize(x, offset, groups, inner, center, scale, step, middle, last, bits, stochastic, key, out, residual):
    """Write the packed codes round((x - center) * scale) + middle, each within 0..last, computed in float64.

    `x` starts at value `offset` of the tensor, a multiple of BLOCK. `inner` 0 means one center per value.

    Stochastic rounding is floor(t + u), with u the random number at the value's index. If `residual` is not empty, the decoded
    values are subtracted from it.
    """
    codes = np.empty(BLOCK, np.uint8)
    values = np.empty(BLOCK, np.float32)
    words, padded = np.empty(BLOCK // 8, np.uint64), np.empty(BLOCK + 8, np.uint8)
    middle, last = np.int32(middle), np.int32(last)
    fused = len(residual) > 0 and not stochastic and inner > 0
    for first in range(0, len(x), BLOCK):
        block = x[first : first + BLOCK]
        codes[len(block) & ~7 :] = 0
        at = 0
        while at < len(block):
            state = np.uint64(key) + np.uint64(offset + first + at) * GAMMA
            if inner:
                segment = (offset + first + at) // inner
                end = min(len(block), (segment + 1) * inner - offset - first)
                group = segment % groups
                run, levels = block[at:end], (center[group], scale[group])
                if fused:
                    _round_run_left(run, *levels, step[group], middle, last, codes[at:end], values[at:end])
                else:
                    _code_run(run, *levels, middle, last, stochastic, state, codes[at:end])
            else:
                column = (offset + first + at) % len(center)
                end = min(len(block), at + len(center) - column)
                levels_of_each = center[column:], scale[column:]
                _code_each(block[at:end], *levels_of_each, middle, last, stochastic, state, codes[at:end])
            at = end
        pack_block(codes, bits, words, padded, out[first * bits // 8 : ((first + len(block)) * bits + 7) // 8])
        if fused:
            copy(values, residual[first : first + len(block)])
        elif len(residual):
            _dequantize_block(codes, offset + first, values[: len(block)], groups, inner, center, step, middle)
            _withhold(values, residual[first : first + len(block)])


@njit(cache=True, nogil=True)
def _greatest(codes):
    greatest = codes[0]
    for i in range(len(codes)):
        greatest = max(greatest, codes[i])
    return greatest


@njit(cache=True, nogil=True)
def _dequantize(packed, offset, groups, inner, center, step, middle, last, bits, out):
    """Write center + step * (code - middle), computed in float64; return False if a code exceeds `last`.

    `out` starts at value `offset` of the tensor, a multiple of BLOCK, and `packed` are the codes of its values.
    """
    codes = np.empty(BLOCK, np.uint8)
    words, padded = np.empty(BLOCK // 8, np.uint64), np.empty(BLOCK + 8, np.uint8)
    middle = np.int32(middle)
    for first in range(0, len(out), BLOCK):
        block = out[first : first + BLOCK]
        unpack_block(packed[first * bits // 8 : ((first + len(block)) * bits + 7) // 8], bits, words, padded, codes)
        if last < (1 << bits) - 1 and _greatest(codes[: len(block)]) > last:
            return False
        _dequantize_block(codes, offset + first, block, groups, inner, center, step, middle)
    return True
