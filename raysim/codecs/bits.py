"""Pack small integers into one bit stream: fields most significant bit first, padded with zeros at the end.

Everything runs on the tensor's own device, so only packed bytes are copied to the host.
"""

from __future__ import annotations

import numpy as np

from raysim.codecs import kernels
from raysim.on_demand import torch


def packed_bytes(count: int, width: int) -> int:
    """Return the number of bytes of `count` packed fields of `width` bits.

    >>> packed_bytes(10, 3), packed_bytes(1000, 6)
    (4, 750)
    """
    return (count * width + 7) // 8


def pack_bits(flags: torch.Tensor) -> torch.Tensor:
    """Return the bitmap of a flat bool tensor, uint8."""
    if flags.device.type != "cpu" or kernels.gpu_serves(flags.device, flags.numel()):
        return pack(flags.view(torch.uint8), 1)
    return torch.from_numpy(np.packbits(flags.numpy()))


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Return the first `count` bits of a bitmap, as bool; inverse of `pack_bits`."""
    if packed.device.type != "cpu" or kernels.gpu_serves(packed.device, count):
        return unpack_bytes(packed, count, 1).bool()
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).view(torch.bool)


def pack(values: torch.Tensor, width: int) -> torch.Tensor:
    """Pack flat integers in [0, 2**width) into a uint8 stream; `width` is 0 to 32.

    >>> pack(torch.tensor([5, 2, 7]), 3)
    tensor([171, 128], dtype=torch.uint8)
    """
    if width == 0:
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    if width == 8:
        return values.to(torch.uint8)
    if kernel := kernels.find("packing.pack", values):
        packed: torch.Tensor = kernel(values, width)
        return packed
    if width > 8:
        shifts = torch.arange(width - 1, -1, -1, device=values.device)
        return pack_bits((values.long()[:, None] >> shifts & 1).view(-1).bool())
    words = torch.zeros(-(-len(values) // 8), dtype=torch.int64, device=values.device)
    for column in _padded(values.long(), 8).view(-1, 8).unbind(dim=1):  # eight fields fill exactly `width` bytes
        words = (words << width) | column
    shifts = torch.arange(8 * (width - 1), -1, -8, device=values.device)
    return ((words[:, None] >> shifts) & 255).to(torch.uint8).view(-1)[: packed_bytes(len(values), width)]


def unpack(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Return `count` integers as int64; inverse of `pack`.

    >>> unpack(torch.tensor([171, 128], dtype=torch.uint8), 3, 3)
    tensor([5, 2, 7])
    """
    return unpack_bytes(packed, count, width).long()


def unpack_bytes(packed: torch.Tensor, count: int, width: int) -> torch.Tensor:
    """Return `count` integers as uint8, or as int64 if they have more than 8 bits; inverse of `pack`."""
    if width == 0:
        return torch.zeros(count, dtype=torch.uint8, device=packed.device)
    if width == 8:
        return packed
    if kernel := kernels.find_on("packing.unpack", packed.device, count):
        values: torch.Tensor = kernel(packed, count, width)
        return values
    if width > 8:
        shifts = torch.arange(width - 1, -1, -1, device=packed.device)
        bits = unpack_bits(packed, count * width).view(count, width).long()
        return (bits << shifts).sum(dim=1)
    words = torch.zeros(-(-len(packed) // width), dtype=torch.int64, device=packed.device)
    for column in _padded(packed.long(), width).view(-1, width).unbind(dim=1):
        words = (words << 8) | column
    shifts = torch.arange(7 * width, -1, -width, device=packed.device)
    return ((words[:, None] >> shifts) & ((1 << width) - 1)).view(-1)[:count].to(torch.uint8)


def _padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -len(x) % multiple
    return torch.nn.functional.pad(x, (0, missing)) if missing else x
