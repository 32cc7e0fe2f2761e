"""Coding of the kept positions of a sparse tensor: sorted integers below a known bound, in as few bytes as each form takes.

`bitmap`      one bit a value of the whole tensor
`elias_fano`  low bits packed, high bits in unary (Elias 1974, Fano 1971): about 2 + log2(total/kept) bits a position,
              half a bit a position above the lower bound log2 C(total, kept)
`int32`       four bytes a position, as published implementations send them
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs import kernels, transfers
from raysim.codecs.base import Packet, to_bytes, to_tensor
from raysim.codecs.bits import pack, pack_bits, packed_bytes, unpack, unpack_bits
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

FORMS = ("bitmap", "elias_fano", "int32")
INDEX_ARRAYS = ("bitmap", "int32", "low", "high")  # of any form


def index_bytes(form: str, kept: int, total: int) -> int:
    """Return the bytes that `form` takes for `kept` of `total` positions.

    >>> {form: index_bytes(form, 6554, 65536) for form in FORMS}
    {'bitmap': 8192, 'elias_fano': 4302, 'int32': 26216}
    """
    if form == "bitmap":
        return packed_bytes(total, 1)
    if form == "int32":
        return 4 * kept
    width = _low_bits(kept, total)
    return packed_bytes(kept, width) + packed_bytes(_high_length(kept, total, width), 1)


def smallest_form(kept: int, total: int) -> str:
    """Return the form that takes the fewest bytes; the first of `FORMS` on a tie."""
    return min(FORMS, key=lambda form: index_bytes(form, kept, total))


def encode_positions(positions: Tensor, total: int, form: str) -> dict[str, np.ndarray]:
    """Return the arrays that hold `positions`: strictly increasing int64 below `total`."""
    if form != "int32" and kernels.serve(positions):
        return _encode_native(positions.numpy(), total, form)
    if form == "bitmap":
        if kernels.gpu_serves(positions.device, total):
            from raysim.codecs.kernels.triton import positions as on_gpu

            return {"bitmap": to_bytes(on_gpu.set_bits(positions, total))}
        kept = torch.zeros(total, dtype=torch.bool, device=positions.device)
        return {"bitmap": to_bytes(pack_bits(kept.index_fill_(0, positions, True)))}
    if form == "int32":
        if total > 2**31:
            raise ValueError(f"`index='int32'` counts to {2**31}, but got a tensor of {total} values. Use 'auto'.")
        return {"int32": to_bytes(positions.to(torch.int32))}
    count = len(positions)
    width = _low_bits(count, total)
    if kernels.gpu_serves(positions.device, total):
        from raysim.codecs.kernels.triton import positions as on_gpu

        high = on_gpu.set_bits(positions, _high_length(count, total, width), width)
        return {"low": to_bytes(pack(positions & ((1 << width) - 1), width)), "high": to_bytes(high)}
    ones = (positions >> width) + torch.arange(count, device=positions.device)
    high = torch.zeros(_high_length(count, total, width), dtype=torch.bool, device=positions.device)
    return {
        "low": to_bytes(pack(positions & ((1 << width) - 1), width)),
        "high": to_bytes(pack_bits(high.index_fill_(0, ones, True))),
    }


def decode_positions(packet: Packet, kept: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the `kept` positions of a packet, strictly increasing int64; raises ValueError where they cannot be that."""
    total = packet.numel
    if "int32" not in packet.arrays and kernels.serves(device):
        return torch.from_numpy(_decode_native(packet, kept))
    if "int32" not in packet.arrays and kernels.gpu_serves(device, total):
        return _decode_on_gpu(packet, kept, device)
    if "bitmap" in packet.arrays:
        bitmap = to_tensor(packet.bytes_of("bitmap", packed_bytes(total, 1)), torch.uint8, device)
        positions = unpack_bits(bitmap, total).nonzero().view(-1)
    elif "int32" in packet.arrays:
        positions = to_tensor(packet.bytes_of("int32", 4 * kept), torch.int32, device).long()
    else:
        low_bits, high_bits, length, width = elias_fano(packet, kept)
        low, high = (to_tensor(part, torch.uint8, device) for part in (low_bits, high_bits))
        ones = unpack_bits(high, length).nonzero().view(-1)
        if len(ones) != kept:
            raise misplaced(packet, kept)
        positions = (ones - torch.arange(kept, device=device) << width) | unpack(low, kept, width)
    increasing = bool((positions[1:] > positions[:-1]).all()) if kept > 1 else True
    if len(positions) != kept or not increasing or (kept and not 0 <= int(positions[0]) <= int(positions[-1]) < total):
        raise misplaced(packet, kept)
    return positions


def _encode_native(positions: np.ndarray, total: int, form: str) -> dict[str, np.ndarray]:
    from raysim.codecs.kernels import indices

    if form == "bitmap":
        bitmap = np.zeros(packed_bytes(total, 1), np.uint8)
        indices.encode_bitmap(positions, bitmap)
        return {"bitmap": bitmap}
    width = _low_bits(len(positions), total)
    low = np.empty(packed_bytes(len(positions), width), np.uint8)
    high = np.zeros(packed_bytes(_high_length(len(positions), total, width), 1), np.uint8)
    indices.encode_elias_fano(positions, width, low, high)
    return {"low": low, "high": high}


def _decode_native(packet: Packet, kept: int) -> np.ndarray:
    from raysim.codecs.kernels import indices

    total, positions = packet.numel, kernels.empty(kept, np.int64)
    if "bitmap" in packet.arrays:
        bitmap = kernels.opened(packet.bytes_of("bitmap", packed_bytes(total, 1)))
        right = indices.decode_bitmap(bitmap, total, positions) == kept
    else:
        low, high, length, width = elias_fano(packet, kept)
        right = indices.decode_elias_fano(kernels.opened(low), kernels.opened(high), length, width, total, positions)
    if not right:
        raise misplaced(packet, kept)
    return positions


def _decode_on_gpu(packet: Packet, kept: int, device: torch.device | str) -> Tensor:
    from raysim.codecs.kernels.triton import positions as on_gpu

    total = packet.numel
    if "bitmap" in packet.arrays:
        bitmap = to_tensor(packet.bytes_of("bitmap", packed_bytes(total, 1)), torch.uint8, device)
        positions, bad = on_gpu.positions_of(bitmap, total, kept, total, bitmap, None)
    else:
        low_bits, high_bits, length, width = elias_fano(packet, kept)
        low, high = (to_tensor(part, torch.uint8, device) for part in (low_bits, high_bits))
        positions, bad = on_gpu.positions_of(high, length, kept, total, low, width)
    transfers.check(bad, misplaced(packet, kept))
    return positions


def elias_fano(packet: Packet, kept: int) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Return the bytes of low and of high bits, how many high bits there are, and how many low ones a position has."""
    width = _low_bits(kept, packet.numel)
    length = _high_length(kept, packet.numel, width)
    low, high = packet.bytes_of("low", packed_bytes(kept, width)), packet.bytes_of("high", packed_bytes(length, 1))
    return low, high, length, width


def misplaced(packet: Packet, kept: int) -> ValueError:
    """Return the error of a packet whose positions do not fit `kept` values."""
    return ValueError(
        f"A packet of {packet.codec!r} holds positions that are not {kept} increasing ones below {packet.numel}."
    )


def _low_bits(kept: int, total: int) -> int:
    return max(0, (total // kept).bit_length() - 1) if kept else 0


def _high_length(kept: int, total: int, width: int) -> int:
    return kept + ((total - 1) >> width) if kept else 0
