"""Packing of integers in Triton: fields most significant bit first, and positions as set bits, see `raysim.codecs.bits` and
`raysim.codecs.positions`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from raysim.codecs.bits import packed_bytes
from raysim.codecs.codec import Packet, to_tensor
from raysim.codecs.kernels.triton import blocks, flag, launch
from raysim.codecs.positions import decode_positions, misplaced
from raysim.codecs.transfers import check

_ROWS = 512  # runs of eight fields per program
_BYTES = 1024  # bytes of wide fields per program
_BLOCK = 4096  # positions per program


@triton.jit
def _pack(values, packed, count, num_bytes, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Write eight fields of at most 8 bits to `WIDTH` bytes per row."""
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
    """Write one byte each; with more than 8 bits a field, a byte overlaps at most two fields."""
    start = tl.program_id(0).to(tl.int64) * BLOCK  # the byte offset may exceed 32 bits
    target = start + tl.arange(0, BLOCK)
    offset = target * 8
    first = offset // WIDTH
    inside = target < num_bytes
    here = tl.load(values + first, mask=inside & (first < count), other=0)
    after = tl.load(values + first + 1, mask=inside & (first + 1 < count), other=0)
    spare = WIDTH - 8 - (offset % WIDTH).to(tl.int64)  # bits of the first field after this byte
    within = here >> tl.maximum(spare, 0)
    across = (here << tl.maximum(-spare, 0)) | (after >> (WIDTH - tl.maximum(-spare, 0)))
    byte = tl.where(spare >= 0, within, across) & 255
    tl.store(packed + target, byte.to(tl.uint8), mask=inside)


@triton.jit
def field_at(packed, index, inside, num_bytes, WIDTH: tl.constexpr):
    """Return the fields of at most 48 bits at `index` of a stream, int64."""
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
    """Pack flat integers in [0, 2**width) into a uint8 stream; `width` is 1 to 32."""
    num_bytes = blocks(len(values) * width, 8)
    packed = torch.empty(num_bytes, dtype=torch.uint8, device=values.device)
    if not num_bytes:
        return packed
    values, sizes = values.contiguous(), (len(values), num_bytes)
    if width <= 8:
        launch(_pack, blocks(len(values), 8 * _ROWS), values, packed, *sizes, WIDTH=width, ROWS=_ROWS)
    else:
        launch(_pack_wide, blocks(num_bytes, _BYTES), values.long(), packed, *sizes, WIDTH=width, BLOCK=_BYTES)
    return packed


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """Return `count` fields, uint8 up to 8 bits and int64 above; `width` is 1 to 32."""
    out = torch.empty(count, dtype=torch.uint8 if width <= 8 else torch.int64, device=packed.device)
    if count:
        launch(_unpack, blocks(count, _BYTES), packed, out, count, len(packed), WIDTH=width, BLOCK=_BYTES)
    return out


@triton.jit
def _set_bits(positions, words, count, WIDTH: tl.constexpr, UNARY: tl.constexpr, BLOCK: tl.constexpr):
    """Set the bit of every position in `words`, an int32 view of a bitmap; UNARY: of (position >> WIDTH) + index."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    position = tl.load(positions + index, mask=inside, other=0)
    if UNARY:
        position = (position >> WIDTH) + index
    bit = (((position >> 3) & 3) << 3) + 7 - (position & 7)  # words are little-endian
    word = tl.full([BLOCK], 1, tl.int32) << bit.to(tl.int32)
    tl.atomic_or(words + (position >> 5), word, mask=inside)


@triton.jit
def _bits_of(bitmap, index, inside):
    byte = tl.load(bitmap + (index >> 3), mask=inside, other=0).to(tl.int32)
    return tl.where(inside, (byte >> (7 - (index & 7))) & 1, 0)


@triton.jit
def _count_bits(bitmap, counts, length, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(counts + tl.program_id(0), tl.sum(_bits_of(bitmap, index, index < length), axis=0))


@triton.jit
def _expand(bitmap, starts, values, out, length, count, BLOCK: tl.constexpr):
    """Write the values in order at set bits, and zeros elsewhere."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < length
    bit = _bits_of(bitmap, index, inside)
    rank = tl.load(starts + tl.program_id(0)) + tl.cumsum(bit, axis=0) - 1
    value = tl.load(values + rank, mask=(bit > 0) & (rank < count), other=0)
    tl.store(out + index, value, mask=inside)


@triton.jit
def _positions(
    bitmap,
    low,
    starts,
    positions,
    length,
    count,
    low_bytes,
    WIDTH: tl.constexpr,
    UNARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the positions of set bits; with UNARY those coded by the bits and the fields of `low`."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bit = _bits_of(bitmap, index, index < length)
    rank = tl.load(starts + tl.program_id(0)) + tl.cumsum(bit, axis=0) - 1
    kept = (bit > 0) & (rank < count)
    position = index.to(tl.int64)
    if UNARY:
        position = (position - rank) << WIDTH
        if WIDTH > 0:
            position = position | field_at(low, rank, kept, low_bytes, WIDTH)
    tl.store(positions + rank, position, mask=kept)


@triton.jit
def _scatter(positions, values, out, count, total, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    position = tl.load(positions + index, mask=inside, other=-1)
    value = tl.load(values + index, mask=inside, other=0)
    tl.store(out + position, value, mask=(position >= 0) & (position < total))


def set_bits(positions: Tensor, num_bits: int, width: int | None = None) -> Tensor:
    """Return the bitmap of `positions`, uint8; with `width` the Elias-Fano high bits (position >> width) + index."""
    words = torch.zeros(blocks(num_bits, 32), dtype=torch.int32, device=positions.device)
    if len(positions):
        launch(
            _set_bits, blocks(len(positions), _BLOCK), positions, words, len(positions),
            WIDTH=width or 0, UNARY=width is not None, BLOCK=_BLOCK,
        )  # fmt: skip
    return words.view(torch.uint8)[: blocks(num_bits, 8)]


def expand(packet: Packet, values: Tensor) -> Tensor:
    """Return a flat tensor with `values` at the packet's positions and zeros elsewhere."""
    if "bitmap" not in packet.arrays:
        return scatter(decode_positions(packet, len(values), values.device), values, packet.numel)
    bitmap = to_tensor(packet.bytes_of("bitmap", packed_bytes(packet.numel, 1)), torch.uint8, values.device)
    out, bad = expand_bitmap(bitmap, values, packet.numel)
    check(bad, misplaced(packet, len(values)))
    return out


def _starts(bitmap: Tensor, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Return the number of set bits before each block, and a flag set if the total is not `count`."""
    counts = torch.empty(blocks(length, _BLOCK), dtype=torch.int32, device=bitmap.device)
    launch(_count_bits, len(counts), bitmap, counts, length, BLOCK=_BLOCK)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    return ends - counts, (ends[-1:] != count).to(torch.int32)


def expand_bitmap(bitmap: Tensor, values: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Return `total` values, zero at unset bits, and a flag set if there are not as many set bits as values."""
    starts, bad = _starts(bitmap, total, len(values))
    patterns = values.view(torch.int16 if values.dtype.itemsize == 2 else torch.int32)
    out = torch.empty(total, dtype=patterns.dtype, device=values.device)
    launch(_expand, len(starts), bitmap, starts, patterns, out, total, len(values), BLOCK=_BLOCK)
    return out.view(values.dtype), bad


def positions_of(
    bitmap: Tensor, length: int, count: int, total: int, low: Tensor, width: int | None
) -> tuple[Tensor, Tensor]:
    """Return `count` positions (int64) of set bits, or with `width` of an Elias-Fano code, and a flag.

    The flag is set if their number is not `count`, or they do not increase or reach `total`.
    """
    if not count:
        return torch.empty(0, dtype=torch.int64, device=bitmap.device), flag(bitmap.device)
    starts, bad = _starts(bitmap, length, count)
    positions = torch.zeros(count, dtype=torch.int64, device=bitmap.device)
    launch(
        _positions, len(starts), bitmap, low, starts, positions, length, count, len(low),
        WIDTH=width or 0, UNARY=width is not None, BLOCK=_BLOCK,
    )  # fmt: skip
    wrong = (positions[1:] <= positions[:-1]).any() | (positions[-1] >= total)
    return positions, bad | wrong.to(torch.int32)


def scatter(positions: Tensor, values: Tensor, total: int) -> Tensor:
    """Return `total` zeros with `values` written at `positions`; positions out of range are ignored."""
    patterns = values.view(torch.int16 if values.dtype.itemsize == 2 else torch.int32)
    out = torch.zeros(total, dtype=patterns.dtype, device=values.device)
    if len(positions):
        launch(_scatter, blocks(len(positions), _BLOCK), positions, patterns, out, len(positions), total, BLOCK=_BLOCK)
    return out.view(values.dtype)
