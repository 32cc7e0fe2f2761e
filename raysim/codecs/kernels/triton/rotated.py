"""Rows sent by `raysim.codecs.rotated` in Triton: a program reads a few whole rows once, and writes their arrays."""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from raysim.codecs import rotated
from raysim.codecs.kernels.triton import blocks, flag, launch, next_power_of_two
from raysim.codecs.rotated import CELL, CELLS, FIXED, LEVELS, UNIT, Form
from raysim.codecs.transfers import check

_VALUES = 2048  # per program, unless a row has more
_WIDEST = 16384  # values of the longest row that a program holds


@triton.jit
def _bfloat16(values):
    """Return the patterns of float32 values, rounded to nearest even and saturated."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    rounded = tl.minimum((magnitude + 0x7FFF + ((magnitude >> 16) & 1)) >> 16, 0x7F7F)
    return (rounded | ((bits >> 16) & -0x8000)).to(tl.int16)


@triton.jit
def _float32(patterns):
    """Return the float32 values of bfloat16 patterns."""
    return (patterns.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _turned(values, column, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the rows with each tile of 64, or of the powers of two after the last, multiplied by its Hadamard matrix."""
    for s in tl.static_range(6):
        if (2 << s) <= BLOCK:
            pairs = tl.permute(tl.reshape(values, [ROWS, BLOCK // (2 << s), 2, 1 << s]), (0, 1, 3, 2))
            left, right = tl.split(pairs)
            crossed = tl.reshape(tl.permute(tl.join(left + right, left - right), (0, 1, 3, 2)), [ROWS, BLOCK])
            values = tl.where(((column | ((2 << s) - 1)) < width)[None, :], crossed, values)
    return values


@triton.jit
def _encode(
    x, center, factors, table, codes, scales, values, positions, bad, rows, width, kept, row_bytes,
    BITS: tl.constexpr, CELL: tl.constexpr, CELLS: tl.constexpr, FIXED: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the codes, the scales, and the kept values and their positions of rows; flag non-finite rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    held, within = row < rows, column < width
    inside = held[:, None] & within[None, :]
    rest = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    rest = rest - tl.load(center + column, mask=within, other=0.0)[None, :]
    bits = rest.to(tl.int32, bitcast=True)
    magnitude = tl.where(inside, bits & 0x7FFFFFFF, -1)
    greatest = tl.max(magnitude, axis=1)
    tl.store(bad + tl.zeros_like(row), 1, mask=greatest >= 0x7F800000)
    for k in range(kept):
        position = tl.min(tl.where(magnitude == greatest[:, None], column[None, :], BLOCK), axis=1)
        chosen = column[None, :] == position[:, None]
        value = tl.sum(tl.where(chosen, bits, 0), axis=1)
        tl.store(values + row * kept + k, _bfloat16(value.to(tl.float32, bitcast=True)), mask=held)
        tl.store(positions + row * kept + k, position, mask=held)
        magnitude = tl.where(chosen, -1, magnitude)
        greatest = tl.max(magnitude, axis=1)
    power = (tl.maximum(254 - (tl.maximum(greatest, 0) >> 23), 1) << 23).to(tl.float32, bitcast=True)
    rest = tl.where(magnitude < 0, 0.0, rest) * power[:, None]
    fixed = (rest * tl.load(factors + column, mask=within, other=0.0)[None, :] * FIXED).to(tl.int32)
    fixed = _turned(fixed, column, width, ROWS, BLOCK)
    magnitude = tl.abs(fixed)
    total = tl.sum(magnitude.to(tl.int64), axis=1).to(tl.float64)
    varied = total > 0
    most = (tl.zeros([ROWS], tl.float64) + width) * CELL / 1.25
    cells_per_unit = tl.where(varied, most / tl.where(varied, total, 1.0), 0.0).to(tl.float32)
    cell = tl.minimum(magnitude.to(tl.float32) * cells_per_unit[:, None], CELLS - 1).to(tl.int32)
    entry = tl.where(inside, tl.load(table + tl.maximum(cell, 0)), 0)
    levels = tl.maximum(tl.sum(entry >> 8, axis=1), 1).to(tl.float64)
    scale = total / levels * ((tl.zeros([ROWS], tl.float64) + UNIT) / FIXED / power.to(tl.float64))
    scale = tl.minimum(scale, 3.4028234663852886e38)
    tl.store(scales + row, _bfloat16(scale.to(tl.float32)), mask=held)
    code = (entry & 255) + ((fixed < 0) & inside).to(tl.int32) * (1 << (BITS - 1))
    eighth = tl.arange(0, 8)
    word = tl.sum(tl.reshape(code, [ROWS, BLOCK // 8, 8]).to(tl.int64) << (BITS * (7 - eighth))[None, None, :], axis=2)
    byte = (word[:, :, None] >> (8 * tl.maximum(BITS - 1 - eighth, 0))[None, None, :]) & 255
    offset = (tl.arange(0, BLOCK // 8) * BITS)[:, None] + eighth[None, :]
    sent = (eighth < BITS)[None, :] & (offset < row_bytes)
    target = row[:, None, None] * row_bytes + offset[None, :, :]
    tl.store(codes + target, byte.to(tl.uint8), mask=held[:, None, None] & sent[None, :, :])


@triton.jit
def _decode(
    codes, scales, values, positions, center, factors, levels, out, bad, rows, width, kept, row_bytes,
    BITS: tl.constexpr, UNIT: tl.constexpr, LIMIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the values of rows as float32, or as 16 bits clamped to +-LIMIT; flag invalid packets."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    held, within = row < rows, column < width
    inside = held[:, None] & within[None, :]
    eighth = tl.arange(0, 8)
    offset = (tl.arange(0, BLOCK // 8) * BITS)[:, None] + eighth[None, :]
    sent = (eighth < BITS)[None, :] & (offset < row_bytes)
    source = row[:, None, None] * row_bytes + offset[None, :, :]
    byte = tl.load(codes + source, mask=held[:, None, None] & sent[None, :, :], other=0).to(tl.int64)
    word = tl.sum(byte << (8 * tl.maximum(BITS - 1 - eighth, 0))[None, None, :], axis=2)
    code = (word[:, :, None] >> (BITS * (7 - eighth))[None, None, :]) & ((1 << BITS) - 1)
    level = tl.load(levels + tl.reshape(code, [ROWS, BLOCK]).to(tl.int32))
    level = _turned(tl.where(inside, level, 0), column, width, ROWS, BLOCK).to(tl.float32)
    scale = _float32(tl.load(scales + row, mask=held, other=0))
    middle = tl.load(center + column, mask=within, other=0.0)
    infinite = 0x7F800000
    pattern = scale.to(tl.int32, bitcast=True)
    tl.store(bad + tl.zeros_like(row), 1, mask=(scale < 0) | ((pattern & 0x7FFFFFFF) >= infinite))
    tl.store(bad + tl.zeros_like(column), 1, mask=(middle.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= infinite)
    result = level / UNIT * tl.load(factors + column, mask=within, other=0.0)[None, :] * scale[:, None]
    result = tl.minimum(tl.maximum(result, -3.4028234663852886e38), 3.4028234663852886e38)
    for k in range(kept):
        position = tl.load(positions + row * kept + k, mask=held, other=0)
        value = _float32(tl.load(values + row * kept + k, mask=held, other=0))
        wrong = (position >= width) | ((value.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= infinite)
        tl.store(bad + tl.zeros_like(row), 1, mask=held & wrong)
        result = tl.where(column[None, :] == position[:, None], value[:, None], result)
    result = result + middle[None, :]
    target = row[:, None] * width + column[None, :]
    if LIMIT == 0:
        result = tl.minimum(tl.maximum(result, -3.4028234663852886e38), 3.4028234663852886e38)
        tl.store(out + target, result, mask=inside)
    else:
        result = tl.minimum(tl.maximum(result, -LIMIT), LIMIT)
        if out.dtype.element_ty == tl.float16:
            tl.store(out + target, result.to(tl.float16), mask=inside)
        else:
            tl.store(out + target, _bfloat16(result), mask=inside)


@functools.cache
def _tables(bits: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the factors, what a cell means (level * 256 + code), and the levels of codes, on the device."""
    codes = torch.from_numpy(rotated.code_of_cell(bits))
    levels = torch.tensor(LEVELS[bits])
    cells, signed = (table.int().to(device) for table in (levels[codes] * 256 + codes, torch.cat([levels, -levels])))
    return torch.from_numpy(rotated.factors(width)).to(device), cells, signed


def _shape(form: Form) -> dict[str, int]:
    """Return the rows and columns of a program."""
    width = max(8, next_power_of_two(form.width))
    return {"ROWS": min(max(1, _VALUES // width), next_power_of_two(form.rows)), "BLOCK": width}


def encode_rows(x: Tensor, center: Tensor, form: Form, error: Exception) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the packed codes, the scales (bfloat16), and the kept values (bfloat16) and their positions.

    NaN and infinity raise `error` when the open flight lands.
    """
    if form.width > _WIDEST:
        return rotated.encode_rows(x, center, form, error)
    kept = form.rows, form.kept
    codes = torch.empty(form.rows * form.row_bytes, dtype=torch.uint8, device=x.device)
    scales, values = (torch.empty(size, dtype=torch.int16, device=x.device) for size in (form.rows, kept))
    positions, bad, shape = torch.empty(kept, dtype=torch.int32, device=x.device), flag(x.device), _shape(form)
    factors, table, _ = _tables(form.bits, form.width, x.device)
    launch(
        _encode, blocks(form.rows, shape["ROWS"]), x.contiguous(), center, factors, table, codes, scales, values, positions, bad,
        form.rows, form.width, form.kept, form.row_bytes, BITS=form.bits, CELL=CELL, CELLS=CELLS, FIXED=FIXED, UNIT=UNIT, **shape,
    )  # fmt: skip
    check(bad, error)
    return codes, scales.view(torch.bfloat16), values.view(torch.bfloat16), positions


def decode_rows(
    codes: Tensor, scales: Tensor, values: Tensor, positions: Tensor, center: Tensor, form: Form, dtype: torch.dtype,
    error: Exception,
) -> Tensor:  # fmt: skip
    """Return the flat tensor of a packet's arrays; raises `error` when the pending transfers complete."""
    if form.width > _WIDEST:
        return rotated.decode_rows(codes, scales, values, positions, center, form, dtype, error)
    out, bad = torch.empty(form.rows * form.width, dtype=dtype, device=codes.device), flag(codes.device)
    factors, _, levels = _tables(form.bits, form.width, codes.device)
    shape = _shape(form)
    launch(
        _decode, blocks(form.rows, shape["ROWS"]), codes, scales.view(torch.int16), values.view(torch.int16),
        positions.to(torch.int32), center, factors, levels, out.view(torch.int16) if dtype == torch.bfloat16 else out, bad,
        form.rows, form.width, form.kept, form.row_bytes,
        BITS=form.bits, UNIT=UNIT, LIMIT=0 if dtype == torch.float32 else torch.finfo(dtype).max, **shape,
    )  # fmt: skip
    check(bad, error)
    return out
