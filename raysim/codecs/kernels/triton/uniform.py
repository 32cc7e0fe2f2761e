"""Uniform quantisation in Triton: ranges of groups, quantise and pack, unpack and dequantise.

Values are laid out as (outer, groups, inner), and the last run may be shorter; see `raysim.codecs.groups.Layout`.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from raysim.codecs.codec import to_bytes, to_tensor
from raysim.codecs.groups import Layout
from raysim.codecs.kernels.triton import blocks, flag, launch, next_power_of_two, rows
from raysim.codecs.kernels.triton.arithmetic import code_of, ends_of, in_order, scale_of, start_of, store
from raysim.codecs.quantize import Coding, Ends, Levels
from raysim.codecs.transfers import check

_TILE = 4096  # values per program
_ROWS = 512  # runs of eight values per program for packing and unpacking
_LONG = 16  # runs of at least this length are reduced one by one


@triton.jit
def _find_ranges(
    x, memory, total, low, high, rows, columns, numel, groups, inner,
    ADD: tl.constexpr, BY_ROW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Update `low` and `high` (int32, ordered as float32) with a tile's minimum and maximum, of x or with ADD of x + memory."""
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    index = row[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :] & (index < numel)
    values = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values = tl.load(memory + index, mask=inside, other=0.0) + values
        tl.store(total + index, values, mask=inside)
    ordered = in_order(values)
    if BY_ROW:
        least = tl.min(tl.where(inside, ordered, 0x7FFFFFFF), axis=1)
        greatest = tl.max(tl.where(inside, ordered, -0x80000000), axis=1)
        group, held = row % groups, row < rows
    else:
        least = tl.min(tl.where(inside, ordered, 0x7FFFFFFF), axis=0)
        greatest = tl.max(tl.where(inside, ordered, -0x80000000), axis=0)
        group, held = column // inner, column < columns
    tl.atomic_min(low + group, least, mask=held)
    tl.atomic_max(high + group, greatest, mask=held)


@triton.jit
def _grid(
    low, high, center, scale, step, bad, groups,
    STEPS: tl.constexpr, ABSMAX: tl.constexpr, ORDERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the grid of each group; set the flag if an end is not finite or the minimum exceeds the maximum.

    With ORDERED the ends are integers ordered as float32, and are replaced by the float32 patterns to send, -0 as +0. Otherwise they
    are float32 patterns from a packet.
    """
    group = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    greatest = tl.load(high + group, mask=inside, other=0)
    least = tl.load(low + group, mask=inside, other=0)
    if ORDERED:
        greatest = greatest ^ ((greatest >> 31) & 0x7FFFFFFF)
        least = least ^ ((least >> 31) & 0x7FFFFFFF)
    top, bottom, middle, span, finite = ends_of(least, greatest, ABSMAX, ORDERED)
    if ORDERED:
        tl.store(high + group, tl.where(top == 0, 0.0, top).to(tl.int32, bitcast=True), mask=inside)
        tl.store(low + group, tl.where(bottom == 0, 0.0, bottom).to(tl.int32, bitcast=True), mask=inside)
    tl.store(center + group, middle, mask=inside)
    tl.store(scale + group, scale_of(span, STEPS), mask=inside)
    tl.store(step + group, span / tl.full([BLOCK], STEPS, tl.float64), mask=inside)
    tl.store(bad + tl.zeros([BLOCK], tl.int32), 1, mask=inside & (finite == 0))


@triton.jit
def _levels(per_group, index, inside, groups, inner, ONE: tl.constexpr):
    if ONE:
        return tl.load(per_group)
    else:
        return tl.load(per_group + (index // inner) % groups, mask=inside, other=0.0)


@triton.jit
def _quantize(
    x, center, scale, step, key, packed, left, numel, num_bytes, groups, inner, middle, last,
    BITS: tl.constexpr, STOCHASTIC: tl.constexpr, LEFT: tl.constexpr, ONE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the codes of x, eight per `BITS` bytes; with LEFT also write the coding error to `left`, which may be x."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 8)
    index = row[:, None] * 8 + column[None, :]
    inside = index < numel
    values = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    at = _levels(center, index, inside, groups, inner, ONE)
    level = (values.to(tl.float64) - at) * _levels(scale, index, inside, groups, inner, ONE)
    code = code_of(level, key, index, middle, last, STOCHASTIC)
    if LEFT:
        decoded = (code - middle).to(tl.float64) * _levels(step, index, inside, groups, inner, ONE) + at
        tl.store(left + index, values - decoded.to(tl.float32), mask=inside)
    code = tl.where(inside, code, 0).to(tl.int64)
    word = tl.sum(code << (BITS * (7 - column))[None, :], axis=1)
    byte = (word[:, None] >> (8 * tl.maximum(BITS - 1 - column, 0))[None, :]) & 255
    target = row[:, None] * BITS + column[None, :]
    tl.store(packed + target, byte.to(tl.uint8), mask=(column < BITS)[None, :] & (target < num_bytes))


@triton.jit
def _dequantize(
    packed, center, step, out, bad, numel, num_bytes, groups, inner, middle, last,
    BITS: tl.constexpr, ONE: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write center + step * (code - middle) as float32, or as 16 bits clamped to +-LIMIT; flag codes above `last`."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 8)
    source = row[:, None] * BITS + column[None, :]
    held = (column < BITS)[None, :] & (source < num_bytes)
    byte = tl.load(packed + source, mask=held, other=0).to(tl.int64)
    word = tl.sum(byte << (8 * tl.maximum(BITS - 1 - column, 0))[None, :], axis=1)
    index = row[:, None] * 8 + column[None, :]
    inside = index < numel
    code = ((word[:, None] >> (BITS * (7 - column))[None, :]) & ((1 << BITS) - 1)).to(tl.int32)
    tl.store(bad + tl.zeros_like(index), 1, mask=inside & (code > last))
    level = (code - middle).to(tl.float64) * _levels(step, index, inside, groups, inner, ONE)
    value = (level + _levels(center, index, inside, groups, inner, ONE)).to(tl.float32)
    store(out, index, value, inside, LIMIT)


def quantize(
    x: Tensor,
    coding: Coding,
    key: int | None,
    ends: Ends | None = None,
    memory: Tensor | None = None,
    residual: Tensor | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the packed codes of x, or of x + `memory`, and the ends of each group's range as sent; rounds stochastically if `key`.

    The coding error is written to `residual` (float32), which is x if there is no memory. NaN and infinity raise `error`
    when the open flight lands.
    """
    layout, levels, error = coding
    if ends is None and rows.fits(layout):
        return rows.quantize_rows(x, coding, key, memory, residual)
    if ends is None:
        low, high = _ranges(x, layout, None if memory is None else memory.contiguous(), residual)
    else:
        low, high = (end.view(torch.int32) for end in ends)
    if memory is not None:
        x = residual  # the sum
    grid, bad = _make_grid(low, high, levels, ordered=ends is None)
    num_bytes = blocks(layout.numel * levels.bits, 8)
    packed = torch.empty(num_bytes, dtype=torch.uint8, device=x.device)
    launch(
        _quantize, blocks(layout.numel, 8 * _ROWS), x, *grid, start_of(key, x.device), packed, x if residual is None else residual,
        layout.numel, num_bytes, layout.groups, layout.inner, levels.middle, levels.last,
        BITS=levels.bits, STOCHASTIC=key is not None, LEFT=residual is not None, ONE=layout.groups == 1, ROWS=_ROWS,
    )  # fmt: skip
    check(bad, error())
    return to_bytes(packed), to_bytes(low), to_bytes(high)


def dequantize(
    codes: np.ndarray, low: np.ndarray, high: np.ndarray, coding: Coding, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return the flat values of packed codes, saturating for 16-bit dtypes; raises `error` when the pending transfers complete."""
    layout, levels, error = coding
    packed, out = to_tensor(codes, torch.uint8, device), torch.empty(layout.numel, dtype=dtype, device=device)
    least, greatest = (to_tensor(end, torch.int32, device) for end in (low, high))
    target, limit = (
        out.view(torch.int16) if dtype == torch.bfloat16 else out,
        0 if dtype == torch.float32 else torch.finfo(dtype).max,
    )
    if rows.fits(layout) and 8 % levels.bits == 0:
        bad = rows.dequantize_rows(packed, least, greatest, target, coding, limit)
    else:
        (center, _, step), bad = _make_grid(least, greatest, levels, ordered=False)
        launch(
            _dequantize, blocks(layout.numel, 8 * _ROWS), packed, center, step, target, bad,
            layout.numel, len(packed), layout.groups, layout.inner, levels.middle, levels.last,
            BITS=levels.bits, ONE=layout.groups == 1, LIMIT=limit, ROWS=_ROWS,
        )  # fmt: skip
    check(bad, error())
    return out


def _ranges(x: Tensor, layout: Layout, memory: Tensor | None, total: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum of each group, int32 ordered as float32.

    With `memory`, x + memory is written to `total`, and the ends are those of the sum.
    """
    low = torch.full((layout.groups,), 0x7FFFFFFF, dtype=torch.int32, device=x.device)
    high = torch.full((layout.groups,), -0x80000000, dtype=torch.int32, device=x.device)
    by_row = layout.inner >= _LONG
    columns = layout.inner if by_row else layout.groups * layout.inner
    count = blocks(layout.numel, columns)
    width = min(_TILE, next_power_of_two(columns))
    height = min(_TILE // width, next_power_of_two(count))
    launch(
        _find_ranges, blocks(count, height) * blocks(columns, width),
        x, x if memory is None else memory, x if memory is None else total,
        low, high, count, columns, layout.numel, layout.groups, layout.inner,
        ADD=memory is not None, BY_ROW=by_row, ROWS=height, COLUMNS=width,
    )  # fmt: skip
    return low, high


def _make_grid(low: Tensor, high: Tensor, levels: Levels, ordered: bool) -> tuple[Tensor, Tensor]:
    """Return each group's center, codes per unit and units per code, float64, and a flag.

    The ends are those of `_ranges` if `ordered`, and are replaced by float32 patterns; otherwise they are such patterns.
    """
    groups, bad = len(high), flag(high.device)
    grid = torch.empty(3, groups, dtype=torch.float64, device=high.device)
    size = min(1024, next_power_of_two(groups))
    launch(
        _grid, blocks(groups, size), low, high, *grid, bad, groups,
        STEPS=levels.steps, ABSMAX=levels.absmax, ORDERED=ordered, BLOCK=size,
    )  # fmt: skip
    return grid, bad
