"""Selection by magnitude in Triton: the k-th largest of each row, and the compaction of the kept values.

Magnitudes are compared by their bit patterns as integers, which have the same order in float32, bfloat16 and float16. A short row is
processed by one program, which finds the threshold bit by bit; long rows use a radix histogram, eight bits per pass.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from raysim.codecs.kernels.triton import blocks, flag, launch, next_power_of_two
from raysim.codecs.transfers import check

_SHORT = 4096  # longest row processed by one program
_BLOCK = 4096
_STEPS = 4  # blocks counted by a program before it adds to the histogram


@triton.jit
def _loaded(x, memory, total, index, inside, MASK: tl.constexpr, ADD: tl.constexpr):
    """Return patterns and magnitudes at `index`, -1 outside; with ADD those of x + memory, also written to `total`."""
    if ADD:
        values = tl.load(memory + index, mask=inside, other=0.0) + tl.load(x + index, mask=inside, other=0.0)
        tl.store(total + index, values, mask=inside)
        bits = values.to(tl.int32, bitcast=True)
    else:
        bits = tl.load(x + index, mask=inside, other=0)
    return bits, tl.where(inside, bits.to(tl.int32) & MASK, -1)


@triton.jit
def _select_short(
    x, memory, total, positions, values, bad, rows, length, kept,
    MASK: tl.constexpr, INFINITY: tl.constexpr, TOP: tl.constexpr, ADD: tl.constexpr, CLEAR: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the kept values of whole rows, selected from the patterns `total`; with ADD, `total` is x + memory."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    index = row[:, None] * length + column[None, :]
    inside = (row < rows)[:, None] & (column < length)[None, :]
    bits, magnitude = _loaded(x, memory, total, index, inside, MASK, ADD)
    tl.store(bad + tl.zeros_like(index), 1, mask=magnitude >= INFINITY)
    threshold = tl.zeros([ROWS], tl.int32)
    for b in tl.static_range(TOP):
        trial = threshold | (1 << (TOP - 1 - b))
        count = tl.sum((magnitude >= trial[:, None]).to(tl.int32), axis=1)
        threshold = tl.where(count >= kept, trial, threshold)
    over = (magnitude > threshold[:, None]).to(tl.int32)
    equal = (inside & (magnitude == threshold[:, None])).to(tl.int32)
    ties = kept - tl.sum(over, axis=1)
    keep = (over > 0) | ((equal > 0) & (tl.cumsum(equal, axis=1) <= ties[:, None]))
    target = row[:, None] * kept + tl.cumsum(keep.to(tl.int32), axis=1) - 1
    tl.store(positions + target, index.to(tl.int64), mask=keep)
    tl.store(values + target, bits, mask=keep)
    if CLEAR:
        tl.debug_barrier()  # wait until other threads have stored the sum
        tl.store(total + index, tl.zeros([ROWS, BLOCK], total.dtype.element_ty), mask=keep)


@triton.jit
def _histogram(
    x, memory, total, prefix, bins, bad, length, across,
    SHIFT: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, INFINITY: tl.constexpr, ADD: tl.constexpr,
    FIRST: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the digits at SHIFT over a row's magnitudes that start with its `prefix`."""
    row = tl.program_id(0) // across
    start = (tl.program_id(0) % across) * (STEPS * BLOCK)
    wanted = tl.load(prefix + row) >> (SHIFT + WIDTH)
    counts = tl.zeros([256], tl.int32)
    for s in range(STEPS):
        column = start + s * BLOCK + tl.arange(0, BLOCK)
        _, magnitude = _loaded(x, memory, total, row * length + column, column < length, MASK, ADD)
        if FIRST:
            tl.store(bad + tl.zeros_like(column), 1, mask=magnitude >= INFINITY)
        alike = (magnitude >> (SHIFT + WIDTH)) == wanted
        counts += tl.histogram((magnitude >> SHIFT) & ((1 << WIDTH) - 1), 256, mask=alike & (magnitude >= 0))
    tl.atomic_add(bins + row * 256 + tl.arange(0, 256), counts, mask=counts > 0)


@triton.jit
def _narrow(bins, prefix, ranks, SHIFT: tl.constexpr):
    """Append the digit of a row's `ranks`-th largest magnitude to its prefix; `ranks` becomes the rank within that prefix."""
    row = tl.program_id(0)
    digit = tl.arange(0, 256)
    counts = tl.load(bins + row * 256 + digit)
    rank = tl.load(ranks + row)
    at_least = tl.cumsum(counts, axis=0, reverse=True)
    chosen = tl.sum((at_least >= rank).to(tl.int32), axis=0) - 1
    tl.store(ranks + row, rank - tl.sum(tl.where(digit > chosen, counts, 0), axis=0))
    tl.store(prefix + row, tl.load(prefix + row) | (chosen << SHIFT))
    tl.store(bins + row * 256 + digit, tl.zeros_like(counts))


@triton.jit
def _count(x, thresholds, over, equal, length, across, MASK: tl.constexpr, BLOCK: tl.constexpr):
    """Count a block's values above and equal to the row's threshold."""
    row = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    inside = column < length
    magnitude = tl.where(inside, tl.load(x + row * length + column, mask=inside, other=0).to(tl.int32) & MASK, -1)
    threshold = tl.load(thresholds + row)
    tl.store(over + tl.program_id(0), tl.sum((magnitude > threshold).to(tl.int32), axis=0))
    tl.store(equal + tl.program_id(0), tl.sum((magnitude == threshold).to(tl.int32), axis=0))


@triton.jit
def _compact(
    x, thresholds, ranks, over, equal, positions, values, length, across, kept,
    MASK: tl.constexpr, CLEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the values above the threshold and the first `ranks` equal to it; `over` and `equal` count those before the block."""
    row = tl.program_id(0) // across
    column = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    inside = column < length
    bits = tl.load(x + row * length + column, mask=inside, other=0)
    magnitude = tl.where(inside, bits.to(tl.int32) & MASK, -1)
    threshold = tl.load(thresholds + row)
    ties = tl.load(ranks + row)
    before = tl.load(equal + tl.program_id(0))
    same = magnitude == threshold
    keep = (magnitude > threshold) | (same & (before + tl.cumsum(same.to(tl.int32), axis=0) <= ties))
    start = row * kept + tl.load(over + tl.program_id(0)) + tl.minimum(before, ties)
    target = start + tl.cumsum(keep.to(tl.int32), axis=0) - 1
    tl.store(positions + target, (row * length + column).to(tl.int64), mask=keep)
    tl.store(values + target, bits, mask=keep)
    if CLEAR:
        tl.store(x + row * length + column, tl.zeros_like(bits), mask=keep)


class _Patterns(NamedTuple):
    """The bit patterns of a tensor, as integers, and their properties."""

    bits: Tensor
    mask: int
    infinity: int
    top: int

    @classmethod
    def of(cls, x: Tensor) -> "_Patterns":
        if x.dtype == torch.float32:
            return cls(x.view(torch.int32), 0x7FFFFFFF, 0x7F800000, 31)
        return cls(x.view(torch.int16), 0x7FFF, 0x7F80 if x.dtype == torch.bfloat16 else 0x7C00, 15)


def select_rows(
    x: Tensor, kept: int, error: Exception, terms: tuple[Tensor, Tensor] | None = None, clear: bool = False
) -> tuple[Tensor, Tensor]:
    """Return flat positions (int64, increasing) and values of the `kept` largest magnitudes of each row of contiguous (rows, length).

    Ties keep the first. NaN and infinity raise `error` when the open flight lands. If `terms` are given, their sum is first written
    to x. `clear` sets the selected values in x to zero.
    """
    rows, length = x.shape
    bits, mask, infinity, top = _Patterns.of(x)
    positions = torch.empty(rows * kept, dtype=torch.int64, device=x.device)
    values, bad = torch.empty(rows * kept, dtype=bits.dtype, device=x.device), flag(x.device)
    source = terms or (bits, bits)
    total = x if terms else bits
    if length <= _SHORT:
        width = next_power_of_two(length)
        height = min(_SHORT // width, next_power_of_two(rows))
        launch(
            _select_short, blocks(rows, height), *source, total, positions, values, bad, rows, length, kept,
            MASK=mask, INFINITY=infinity, TOP=top, ADD=terms is not None, CLEAR=clear, ROWS=height, BLOCK=width,
        )  # fmt: skip
    else:
        prefix = torch.zeros(rows, dtype=torch.int32, device=x.device)
        ranks = torch.full_like(prefix, kept)
        bins = torch.zeros(rows, 256, dtype=torch.int32, device=x.device)
        across = blocks(length, _STEPS * _BLOCK)
        for above, shift in pairwise((top, *range(top - 8, 0, -8), 0)):
            first = above == top
            launch(
                _histogram, rows * across, *(source if first else (bits, bits)), total if first else bits,
                prefix, bins, bad, length, across, SHIFT=shift, WIDTH=above - shift, MASK=mask, INFINITY=infinity,
                ADD=terms is not None and first, FIRST=first, STEPS=_STEPS, BLOCK=_BLOCK,
            )  # fmt: skip
            launch(_narrow, rows, bins, prefix, ranks, SHIFT=shift)
        _compacted(bits, mask, prefix, ranks, _counted(bits, mask, prefix), positions, values, kept, clear)
    check(bad, error)
    return positions, values.view(x.dtype)


def add_and_select(
    x: Tensor, memory: Tensor, kept: int, clear: bool, error: Exception
) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + memory in float32 and `select_rows` of the sum; `clear` sets the selected values to zero in it."""
    total = torch.empty_like(memory)
    return total, *select_rows(total, kept, error, (x, memory), clear)


def _counted(bits: Tensor, mask: int, thresholds: Tensor) -> Tensor:
    rows, length = bits.shape
    across = blocks(length, _BLOCK)
    counts = torch.empty(2, rows, across, dtype=torch.int32, device=bits.device)
    launch(_count, rows * across, bits, thresholds, counts[0], counts[1], length, across, MASK=mask, BLOCK=_BLOCK)
    return counts


def _compacted(
    bits: Tensor, mask: int, thresholds: Tensor, ranks: Tensor, counts: Tensor, positions: Tensor, values: Tensor, kept: int,
    clear: bool,
) -> None:  # fmt: skip
    over, equal = torch.cumsum(counts, dim=2, dtype=torch.int32) - counts
    rows, length = bits.shape
    across = counts.shape[2]
    launch(
        _compact, rows * across, bits, thresholds, ranks, over, equal, positions, values, length, across, kept,
        MASK=mask, CLEAR=clear, BLOCK=_BLOCK,
    )  # fmt: skip


def count_at_least(x: Tensor, floor: int) -> int:
    """Count the magnitudes of flat `x` with a bit pattern of at least `floor`; waits for the device."""
    bits, mask, _, _ = _Patterns.of(x.view(1, -1))
    return int(_counted(bits, mask, torch.full((1,), floor, dtype=torch.int32, device=x.device)).sum())


def select_at_least(x: Tensor, floor: int) -> tuple[Tensor, Tensor]:
    """Return the positions, increasing, and the values that `count_at_least` counts.

    Waits for the device to count them.
    """
    bits, mask, _, _ = _Patterns.of(x.view(1, -1))
    thresholds = torch.full((1,), floor, dtype=torch.int32, device=x.device)
    counts = _counted(bits, mask, thresholds)
    count = int(counts.sum())
    positions = torch.empty(count, dtype=torch.int64, device=x.device)
    values = torch.empty(count, dtype=bits.dtype, device=x.device)
    _compacted(bits, mask, thresholds, torch.full_like(thresholds, 2**31 - 1), counts, positions, values, count, False)
    return positions, values.view(x.dtype)
