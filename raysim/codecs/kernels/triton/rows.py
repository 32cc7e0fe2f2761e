"""Uniform quantisation in Triton for groups of consecutive values, such as rows and blocks, in one pass over memory."""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from raysim.codecs.codec import to_bytes
from raysim.codecs.groups import Layout
from raysim.codecs.kernels.triton import blocks, flag, launch, next_power_of_two
from raysim.codecs.kernels.triton.arithmetic import code_of, ends_of, in_order, scale_of, start_of, store
from raysim.codecs.quantize import Coding
from raysim.codecs.transfers import check

_LONGEST = 4096  # values of a group that one program holds
_VALUES = 2048  # values per program


@triton.jit
def _quantize_rows(
    x, memory, key, packed, low, high, left, bad, numel, groups, inner, middle, last,
    BITS: tl.constexpr, STEPS: tl.constexpr, ABSMAX: tl.constexpr, STOCHASTIC: tl.constexpr, ADD: tl.constexpr,
    LEFT: tl.constexpr, GROUPS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """`_find_ranges`, `_grid` and `_quantize` in one pass, for groups of consecutive values; `inner` is a multiple of 8."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    column = tl.arange(0, INNER)
    index = group[:, None] * inner + column[None, :]
    inside = (column < inner)[None, :] & (index < numel)
    values = tl.load(x + index, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values = tl.load(memory + index, mask=inside, other=0.0) + values
    ordered = in_order(values)
    least = tl.min(tl.where(inside, ordered, 0x7FFFFFFF), axis=1)
    greatest = tl.max(tl.where(inside, ordered, -0x80000000), axis=1)
    top, bottom, center, span, finite = ends_of(
        least ^ ((least >> 31) & 0x7FFFFFFF), greatest ^ ((greatest >> 31) & 0x7FFFFFFF), ABSMAX, True
    )
    held = group < groups
    tl.store(high + group, tl.where(top == 0, 0.0, top).to(tl.int32, bitcast=True), mask=held)
    tl.store(low + group, tl.where(bottom == 0, 0.0, bottom).to(tl.int32, bitcast=True), mask=held)
    tl.store(bad + tl.zeros([GROUPS], tl.int32), 1, mask=held & (finite == 0))
    level = (values.to(tl.float64) - center[:, None]) * scale_of(span, STEPS)[:, None]
    code = code_of(level, key, index, middle, last, STOCHASTIC)
    if LEFT:
        step = span / (tl.zeros([GROUPS], tl.float64) + STEPS)
        decoded = (code - middle).to(tl.float64) * step[:, None] + center[:, None]
        tl.store(left + index, values - decoded.to(tl.float32), mask=inside)
    code = tl.where(inside, code, 0)
    if 8 % BITS == 0:
        place = tl.arange(0, 8 // BITS)
        fields = (
            tl.reshape(code, [GROUPS, INNER * BITS // 8, 8 // BITS]) << (BITS * (8 // BITS - 1 - place))[None, None, :]
        )
        offset = tl.arange(0, INNER * BITS // 8)
        target = (group * (inner // 8) * BITS)[:, None] + offset[None, :]
        first = group[:, None] * inner + (offset * (8 // BITS))[None, :]
        kept = (offset * 8 < inner * BITS)[None, :] & (first < numel)
        tl.store(packed + target, tl.sum(fields, axis=2).to(tl.uint8), mask=kept)
    else:
        place = tl.arange(0, 8)
        fields = tl.reshape(code.to(tl.int64), [GROUPS, INNER // 8, 8]) << (BITS * (7 - place))[None, None, :]
        word = tl.sum(fields, axis=2)
        byte = (word[:, :, None] >> (8 * tl.maximum(BITS - 1 - place, 0))[None, None, :]) & 255
        run = tl.arange(0, INNER // 8)
        target = ((group * (inner // 8))[:, None] + run[None, :])[:, :, None] * BITS + place[None, None, :]
        kept = (run * 8 < inner)[None, :, None] & (target * 8 < numel * BITS) & (place < BITS)[None, None, :]
        tl.store(packed + target, byte.to(tl.uint8), mask=kept)


@triton.jit
def _dequantize_rows(
    packed, low, high, out, bad, numel, num_bytes, groups, inner, middle, last,
    BITS: tl.constexpr, STEPS: tl.constexpr, ABSMAX: tl.constexpr, LIMIT: tl.constexpr, GROUPS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """`_grid` and `_dequantize` in one pass, for groups of consecutive values; BITS divides 8, `inner` is a multiple of 8."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    held = group < groups
    least, greatest = tl.load(low + group, mask=held, other=0), tl.load(high + group, mask=held, other=0)
    _, _, center, span, finite = ends_of(least, greatest, ABSMAX, False)
    tl.store(bad + tl.zeros([GROUPS], tl.int32), 1, mask=held & (finite == 0))
    offset = tl.arange(0, INNER * BITS // 8)
    source = (group * (inner // 8) * BITS)[:, None] + offset[None, :]
    byte = tl.load(packed + source, mask=(offset * 8 < inner * BITS)[None, :] & (source < num_bytes), other=0).to(
        tl.int32
    )
    place = tl.arange(0, 8 // BITS)
    code = tl.reshape(
        (byte[:, :, None] >> (BITS * (8 // BITS - 1 - place))[None, None, :]) & ((1 << BITS) - 1), [GROUPS, INNER]
    )
    column = tl.arange(0, INNER)
    index = group[:, None] * inner + column[None, :]
    inside = (column < inner)[None, :] & (index < numel)
    tl.store(bad + tl.zeros_like(index), 1, mask=inside & (code > last))
    step = span / (tl.zeros([GROUPS], tl.float64) + STEPS)
    value = ((code - middle).to(tl.float64) * step[:, None] + center[:, None]).to(tl.float32)
    store(out, index, value, inside, LIMIT)


def fits(layout: Layout) -> bool:
    """Return whether one program can hold whole groups: consecutive values, in whole runs of eight."""
    return layout.groups * layout.inner >= layout.numel and layout.inner % 8 == 0 and layout.inner <= _LONGEST


def quantize_rows(
    x: Tensor, coding: Coding, key: int | None, memory: Tensor | None, residual: Tensor | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the packed codes of x, or of x + `memory`, and the ends of each group's range; see `uniform.quantize`."""
    layout, levels, error = coding
    low, high = (torch.empty(layout.groups, dtype=torch.int32, device=x.device) for _ in range(2))
    packed = torch.empty(blocks(layout.numel * levels.bits, 8), dtype=torch.uint8, device=x.device)
    bad, width = flag(x.device), next_power_of_two(layout.inner)
    height = max(1, _VALUES // width)
    memory = x if memory is None else memory.contiguous()
    launch(
        _quantize_rows, blocks(layout.groups, height), x, memory, start_of(key, x.device), packed, low, high,
        x if residual is None else residual, bad, layout.numel, layout.groups, layout.inner, levels.middle, levels.last,
        BITS=levels.bits, STEPS=levels.steps, ABSMAX=levels.absmax, STOCHASTIC=key is not None, ADD=memory is not x,
        LEFT=residual is not None, GROUPS=height, INNER=width,
    )  # fmt: skip
    check(bad, error())
    return to_bytes(packed), to_bytes(low), to_bytes(high)


def dequantize_rows(packed: Tensor, low: Tensor, high: Tensor, out: Tensor, coding: Coding, limit: float) -> Tensor:
    """Write the values of packed codes, clamped to +-`limit` unless it is 0; return a flag for invalid packets."""
    layout, levels, _ = coding
    bad, width = flag(out.device), next_power_of_two(layout.inner)
    height = max(1, _VALUES // width)
    launch(
        _dequantize_rows, blocks(layout.groups, height), packed, low, high, out, bad,
        layout.numel, len(packed), layout.groups, layout.inner, levels.middle, levels.last,
        BITS=levels.bits, STEPS=levels.steps, ABSMAX=levels.absmax, LIMIT=limit, GROUPS=height, INNER=width,
    )  # fmt: skip
    return bad
