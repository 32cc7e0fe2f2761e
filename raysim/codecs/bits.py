"""Packing of small integers: fields most significant bit first, one stream, zeros at the end.

Everything runs on the tensor's own device, so that only packed bytes cross to the host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs import kernels
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_WIDEST = 32  # bits of a field that the kernels on GPUs pack


def packed_bytes(count: int, width: int) -> int:
    """Return the bytes that `count` fields of `width` bits take.

    >>> packed_bytes(10, 3), packed_bytes(1000, 6)
    (4, 750)
    """
    return (count * width + 7) // 8


def pack_bits(flags: Tensor) -> Tensor:
    """Return the bitmap of a flat bool tensor, uint8."""
    if kernels.gpu_serve(flags):
        from raysim.codecs.kernels.triton import fields as on_gpu

        return on_gpu.pack(flags.view(torch.uint8), 1)
    rows = _padded(flags.to(torch.uint8), 8).view(-1, 8)
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=flags.device)
    return (rows * weights).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` bits of a bitmap, as bool; inverse of `pack_bits`."""
    if kernels.gpu_serves(packed.device, count):
        from raysim.codecs.kernels.triton import fields as on_gpu

        return on_gpu.unpack(packed, count, 1).bool()
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 1).view(-1)[:count].bool()


def pack(values: Tensor, width: int) -> Tensor:
    """Return flat non-negative integers, each below 2**width, as a uint8 stream.

    >>> pack(torch.tensor([5, 2, 7]), 3)
    tensor([171, 128], dtype=torch.uint8)
    """
    if width == 0:
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    if width == 8:
        return values.to(torch.uint8)
    count = packed_bytes(len(values), width)
    if kernels.serves(values.device):
        from raysim.codecs.kernels import fields

        packed = np.empty(count, np.uint8)
        if width < 8:
            fields.pack_stream(values.to(torch.uint8).contiguous().numpy(), width, packed)
        else:
            fields.pack_wide(values.long().contiguous().numpy(), width, packed)
        return torch.from_numpy(packed)
    if width <= _WIDEST and kernels.gpu_serve(values):
        from raysim.codecs.kernels.triton import fields as on_gpu

        return on_gpu.pack(values, width)
    if width > 8:
        shifts = torch.arange(width - 1, -1, -1, device=values.device)
        return pack_bits((values.long()[:, None] >> shifts & 1).view(-1).bool())
    words = torch.zeros(-(-len(values) // 8), dtype=torch.int64, device=values.device)
    for column in _padded(values.long(), 8).view(-1, 8).unbind(dim=1):  # eight fields are `width` whole bytes
        words = (words << width) | column
    shifts = torch.arange(8 * (width - 1), -1, -8, device=values.device)
    return ((words[:, None] >> shifts) & 255).to(torch.uint8).view(-1)[:count]


def unpack(packed: Tensor, count: int, width: int) -> Tensor:
    """Return `count` integers as int64; inverse of `pack`.

    >>> unpack(torch.tensor([171, 128], dtype=torch.uint8), 3, 3)
    tensor([5, 2, 7])
    """
    if width == 0:
        return torch.zeros(count, dtype=torch.int64, device=packed.device)
    if width <= 8 and kernels.serves(packed.device):
        return unpack_bytes(packed, count, width).long()
    if width == 8:
        return packed.long()
    if kernels.serves(packed.device):
        from raysim.codecs.kernels import fields

        values = np.empty(count, np.int64)
        fields.unpack_wide(kernels.opened(packed.numpy()), width, values)
        return torch.from_numpy(values)
    if width <= _WIDEST and kernels.gpu_serves(packed.device, count):
        from raysim.codecs.kernels.triton import fields as on_gpu

        return on_gpu.unpack(packed, count, width).long()
    if width > 8:
        shifts = torch.arange(width - 1, -1, -1, device=packed.device)
        bits = unpack_bits(packed, count * width).view(count, width).long()
        return (bits << shifts).sum(dim=1)
    words = torch.zeros(-(-len(packed) // width), dtype=torch.int64, device=packed.device)
    for column in _padded(packed.long(), width).view(-1, width).unbind(dim=1):
        words = (words << 8) | column
    shifts = torch.arange(7 * width, -1, -width, device=packed.device)
    return ((words[:, None] >> shifts) & ((1 << width) - 1)).view(-1)[:count]


def unpack_bytes(packed: Tensor, count: int, width: int) -> Tensor:
    """Return `count` integers of at most 8 bits as uint8; inverse of `pack`."""
    if width == 8:
        return packed
    if kernels.gpu_serves(packed.device, count):
        from raysim.codecs.kernels.triton import fields as on_gpu

        return on_gpu.unpack(packed, count, width)
    if not kernels.serves(packed.device):
        return unpack(packed, count, width).to(torch.uint8)
    from raysim.codecs.kernels import fields

    codes = np.empty(count, np.uint8)
    fields.unpack_stream(kernels.opened(packed.numpy()), width, codes)
    return torch.from_numpy(codes)


def _padded(x: Tensor, multiple: int) -> Tensor:
    missing = -len(x) % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
