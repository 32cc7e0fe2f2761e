"""Top-k selection by magnitude, in numba.

Magnitudes are compared by their bit patterns as integers, which have the same order in float32, bfloat16 and float16. A guess from
earlier rows, or from a sample of the row, brackets the threshold. One pass counts the values above the bracket and gathers the few
inside it, which include the exact threshold; a second pass writes the kept values. A wrong guess costs time but never changes the
result.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from raysim.codecs.kernels import bits_of, empty, empty_like, in_parts
from raysim.codecs.kernels.packing import add
from raysim.codecs.kernels.words import at_least_64, greater_64, ones, trailing_zeros

_SAMPLE = 2048  # sample size for guessing the threshold of a long row
_BINS = 2048
_INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}
_NONE = np.empty(0, np.float32)


def select_rows(x, kept, error, term=_NONE, memory=_NONE, total=_NONE, clear=False):
    """Return flat positions (int64, increasing) and values of the `kept` largest magnitudes per row of contiguous (rows, length).
    Ties keep the first. Raises `error` on NaN or infinity. See `_select_rows` for the last arguments."""
    num_rows, length = x.shape
    bits = bits_of(x)
    positions, values = empty(num_rows * kept, np.int64), empty(num_rows * kept, bits.dtype)
    limits = bits.dtype.type(np.iinfo(bits.dtype).max), np.int64(_INFINITY[x.dtype])

    def select(start, stop):
        first, last = start // length, stop // length
        out = slice(first * kept, last * kept)
        shape, added = (last - first, length, kept), (term[start:stop], memory[start:stop], total[start:stop])
        return _select_rows(bits[start:stop], start, *shape, *limits, positions[out], values[out], *added, clear)

    if not all(in_parts(select, num_rows * length, length)):
        raise error
    return torch.from_numpy(positions), torch.from_numpy(values).view(x.dtype)


def add_and_select(x, memory, kept, clear, error):
    """Return x + memory in float32 and `select_rows` of the sum; `clear` sets the selected values to zero in it."""
    total = empty_like(memory)
    terms = (part.view(-1).numpy() for part in (x, memory, total))
    return total, *select_rows(total, kept, error, *terms, clear)


def count_at_least(x, floor):
    """Count the magnitudes of flat `x` with a bit pattern of at least `floor`."""
    bits = bits_of(x)
    return int(_count_at_least(bits, bits.dtype.type(np.iinfo(bits.dtype).max), np.int64(floor)))


def select_at_least(x, floor):
    """Return the increasing positions and the values counted by `count_at_least`."""
    bits, count = bits_of(x), count_at_least(x, floor)
    positions, values = empty(count, np.int64), empty(count, bits.dtype)
    _select_at_least(bits, bits.dtype.type(np.iinfo(bits.dtype).max), np.int64(floor), positions, values)
    return torch.from_numpy(positions), torch.from_numpy(values).view(x.dtype)


@njit(cache=True, nogil=True)
def _ranked(magnitudes, count, rank, bins, scratch):
    """Return the `rank`-th largest of the first `count` magnitudes by successively finer histograms; overwrites `scratch`."""
    source = magnitudes
    while True:
        low, high = source[0], source[0]
        for i in range(count):
            low = min(low, source[i])
            high = max(high, source[i])
        if low == high:
            return low
        used = min(_BINS, max(16, 2 * count))
        shift = 0
        while ((high - low) >> shift) >= used:
            shift += 1
        last = (high - low) >> shift
        bins[: last + 1] = 0
        for i in range(count):
            bins[(source[i] - low) >> shift] += 1
        b = last
        while bins[b] < rank:
            rank -= bins[b]
            b -= 1
        first = low + (b << shift)
        if shift == 0:
            return first
        gathered = 0
        for i in range(count):
            scratch[gathered] = source[i]
            gathered += (source[i] - low) >> shift == b
        source = scratch
        count = gathered


@njit(cache=True, nogil=True)
def _sampled_bracket(bits, start, length, kept, mask, none, magnitudes, bins, scratch):
    """Return a bracket [low, high) that almost certainly contains a long row's threshold."""
    step = length // _SAMPLE
    for i in range(_SAMPLE):
        magnitudes[i] = bits[start + i * step] & mask
    share = kept / length
    spread = 4 * np.sqrt(_SAMPLE * share * (1 - share)) + 2
    rank = int(_SAMPLE * share - spread)
    high = np.int64(_ranked(magnitudes, _SAMPLE, rank, bins, scratch)) + 1 if rank >= 1 else none
    rank = int(_SAMPLE * share + spread)
    low = np.int64(_ranked(magnitudes, _SAMPLE, rank, bins, scratch)) if rank <= _SAMPLE else np.int64(0)
    return low, high


@njit(cache=True, nogil=True)
def _gather(bits, start, length, mask, low, high, inside):
    """Write the magnitudes in [low, high) to `inside`; return their number and the number at or above `high`."""
    gathered = np.int64(0)
    above = np.int64(0)
    whole = length & ~63
    for i in range(0, whole, 64):
        over = at_least_64(bits, start + i, mask, high)
        word = at_least_64(bits, start + i, mask, low) & ~over
        above += np.int64(ones(over))
        while word:
            inside[gathered] = bits[start + i + np.int64(trailing_zeros(word))] & mask
            gathered += 1
            word &= word - np.uint64(1)
    for i in range(whole, length):
        magnitude = bits[start + i] & mask
        above += magnitude >= high
        if low <= magnitude < high:
            inside[gathered] = magnitude
            gathered += 1
    return gathered, above


@njit(cache=True, nogil=True, inline="always")
def _keep(word, bits, start, offset, positions, values, out):
    """Write positions and patterns of the values at the set bits of `word`, 64 values from `start` on; return the next `out`."""
    while word:
        position = start + np.int64(trailing_zeros(word))
        positions[out] = offset + position
        values[out] = bits[position]
        out += 1
        word &= word - np.uint64(1)
    return out


@njit(cache=True, nogil=True)
def _select_rows(bits, offset, num_rows, length, kept, mask, infinity, positions, values, x, memory, total, clear):
    """Write the flat positions and bit patterns of the `kept` largest magnitudes of each row, in order of position.

    `bits` are the signed bit patterns from flat position `offset` on, `mask` selects all bits except the sign, and `infinity` is the
    pattern of infinity. Ties keep the first. Returns False if a row contains infinity or NaN, which rank above all numbers.

    If `memory` is not empty, x + memory is first written to `total`, row by row, and `bits` must be a view of `total`. `clear` sets
    the selected values in `bits` to zero.
    """
    inside = np.empty(length + 64, np.int32)
    scratch = np.empty(length + 64, np.int32)
    bins = np.empty(_BINS + 1, np.int32)
    none = np.int64(mask)  # the largest pattern, a NaN: above every number
    center = np.int64(-1)  # moving average of recent thresholds; -1 until the first is known
    margin = np.int64(infinity >> 9)
    out = np.int64(0)
    for row in range(num_rows):
        start = np.int64(row * length)
        if len(memory):
            add(x[start : start + length], memory[start : start + length], total[start : start + length])
        low, high = np.int64(0), none
        sampled = length < 4 * _SAMPLE  # whether sampling is useless or was tried
        if center >= 0:
            low, high = max(center - margin, 0), min(center + margin, none)
        elif not sampled:
            low, high = _sampled_bracket(bits, start, length, kept, mask, none, inside, bins, scratch)
            sampled = True
        while True:
            gathered, above = _gather(bits, start, length, mask, low, high, inside)
            if above < kept <= above + gathered:
                break
            if high == none and above:  # a NaN of all ones, above the widest bracket
                return False
            if sampled:
                low, high = (high, none) if above >= kept else (np.int64(0), low)
            else:
                low, high = _sampled_bracket(bits, start, length, kept, mask, none, inside, bins, scratch)
                sampled = True
            margin = min(2 * margin, none)
        threshold = np.int64(_ranked(inside, gathered, kept - above, bins, scratch))
        center = threshold if center < 0 else center + ((threshold - center) >> 3)
        margin -= margin >> 6  # it doubles on a miss: about one row in forty is gathered twice
        if sampled and length >= 4 * _SAMPLE and high < none:  # a sample varies far more than whole rows do
            margin = min(margin, (high - low) >> 2)
        if threshold >= infinity:
            return False
        end = out + kept
        ties = kept - above  # number of values kept among those equal to the threshold
        for i in range(gathered):
            ties -= inside[i] > threshold
        whole = length & ~63
        i = np.int64(0)
        while i < whole:
            word = at_least_64(bits, start + i, mask, threshold)
            over = greater_64(bits, start + i, mask, threshold)
            equal = word ^ over
            if equal:
                count = np.int64(ones(equal))
                if count > ties:  # keep the first
                    count = ties
                    word = over
                    for _ in range(ties):
                        word |= equal & ~(equal - np.uint64(1))
                        equal &= equal - np.uint64(1)
                ties -= count
            out = _keep(word, bits, start + i, offset, positions, values, out)
            i += 64
        for position in range(start + whole, start + length):
            magnitude = bits[position] & mask
            if magnitude > threshold or (magnitude == threshold and ties > 0):
                ties -= magnitude == threshold
                positions[out] = offset + position
                values[out] = bits[position]
                out += 1
        assert out == end
        for i in range(end - kept, end):
            if values[i] & mask >= infinity:
                return False
        if clear:
            for i in range(end - kept, end):
                bits[positions[i] - offset] = 0
    return True


@njit(cache=True, nogil=True)
def _count_at_least(bits, mask, floor):
    """Count the magnitudes of at least `floor`."""
    gathered = np.int64(0)
    whole = len(bits) & ~63
    for i in range(0, whole, 64):
        gathered += np.int64(ones(at_least_64(bits, i, mask, floor)))
    for i in range(whole, len(bits)):
        gathered += bits[i] & mask >= floor
    return gathered


@njit(cache=True, nogil=True)
def _select_at_least(bits, mask, floor, positions, values):
    """Write the positions and bit patterns of magnitudes of at least `floor`, in order of position."""
    out = 0
    whole = len(bits) & ~63
    for i in range(0, whole, 64):
        out = _keep(at_least_64(bits, i, mask, floor), bits, i, 0, positions, values, out)
    for position in range(whole, len(bits)):
        if bits[position] & mask >= floor:
            positions[out] = position
            values[out] = bits[position]
            out += 1
