"""Packing of small integers in Triton: fields most significant bit first, one stream; see `raysim.codecs.bits`."""

# mypy: ignore-errors
# Annotations of kernels are Triton's, and are evaluated.

import torch
import triton
import triton.language as tl
from torch import Tensor

from raysim.codecs.kernels.triton.launch import blocks, launch

_ROWS = 512
_BLOCK = 1024


@triton.jit
def _pack(values, packed, count, num_bytes, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write eight fields of at most 8 bits to `WIDTH` bytes a row."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 8)
    index = row[:, None] * 8 + column[None, :]
    field = tl.load(values + index, mask=index < count, other=0).to(tl.int64)
    word = tl.sum(field << (WIDTH * (7 - column))[None, :], axis=1)
    byte = (word[:, None] >> (8 * tl.maximum(WIDTH - 1 - column, 0))[None, :]) & 255
    target = row[:, None] * WIDTH + column[None, :]
    tl.store(packed + target, byte.to(tl.uint8), mask=(column < WIDTH)[None, :] & (target < num_bytes))


@triton.jit
def _pack_wide(values, packed, count, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Write a byte each, which overlaps two fields of more than 8 bits at most."""
    start = tl.program_id(0).to(tl.int64) * BLOCK  # of wide fields there are more bytes than 32 bits count
    target = start + tl.arange(0, BLOCK)
    offset = target * 8
    first = offset // WIDTH
    inside = target < num_bytes
    here = tl.load(values + first, mask=inside & (first < count), other=0)
    after = tl.load(values + first + 1, mask=inside & (first + 1 < count), other=0)
    spare = WIDTH - 8 - (offset % WIDTH).to(tl.int64)  # bits of the first field beyond the byte
    within = here >> tl.maximum(spare, 0)
    across = (here << tl.maximum(-spare, 0)) | (after >> (WIDTH - tl.maximum(-spare, 0)))
    byte = tl.where(spare >= 0, within, across) & 255
    tl.store(packed + target, byte.to(tl.uint8), mask=inside)


@triton.jit
def field_at(packed, index, inside, num_bytes, WIDTH: tl.constexpr):
    """Return the fields at `index` of a stream, int64, of at most 48 bits."""
    offset = index.to(tl.int64) * WIDTH
    first = offset >> 3
    word = tl.zeros_like(offset)
    for k in tl.static_range((WIDTH + 14) // 8):
        byte = tl.load(packed + first + k, mask=inside & (first + k < num_bytes), other=0)
        word = (word << 8) | byte.to(tl.int64)
    return (word >> (8 * ((WIDTH + 14) // 8) - WIDTH - (offset & 7))) & ((1 << WIDTH) - 1)


@triton.jit
def _unpack(packed, out, count, num_bytes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    tl.store(out + index, field_at(packed, index, inside, num_bytes, WIDTH).to(out.dtype.element_ty), mask=inside)


def pack(values: Tensor, width: int) -> Tensor:
    """Return flat non-negative integers, each below 2**width, as a uint8 stream; `width` is 1 to 32."""
    num_bytes = blocks(len(values) * width, 8)
    packed = torch.empty(num_bytes, dtype=torch.uint8, device=values.device)
    if not num_bytes:
        return packed
    values, sizes = values.contiguous(), (len(values), num_bytes)
    if width <= 8:
        launch(_pack, blocks(len(values), 8 * _ROWS), values, packed, *sizes, WIDTH=width, ROWS=_ROWS)
    else:
        launch(_pack_wide, blocks(num_bytes, _BLOCK), values.long(), packed, *sizes, WIDTH=width, BLOCK=_BLOCK)
    return packed


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """Return `count` fields, uint8 of at most 8 bits and int64 of more; `width` is 1 to 32."""
    out = torch.empty(count, dtype=torch.uint8 if width <= 8 else torch.int64, device=packed.device)
    if count:
        launch(_unpack, blocks(count, _BLOCK), packed, out, count, len(packed), WIDTH=width, BLOCK=_BLOCK)
    return out
