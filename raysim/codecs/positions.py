"""The positions of a sparse tensor: coding of sorted integers below a known bound, and tensors filled at them.

`bitmap`      one bit a value of the whole tensor
`elias_fano`  low bits packed, high bits in unary (Elias 1974, Fano 1971): about 2 + log2(total/kept) bits a position,
              half a bit a position above the lower bound log2 C(total, kept)
`int32`       four bytes a position, as published implementations send them
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.bits import pack, pack_bits, packed_bytes, unpack, unpack_bits
from raysim.codecs.codec import Packet, to_bytes, to_tensor
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
    width, length = elias_fano_sizes(kept, total)
    return packed_bytes(kept, width) + packed_bytes(length, 1)


def smallest_form(kept: int, total: int) -> str:
    """Return the form that takes the fewest bytes; the first of `FORMS` on a tie."""
    return min(FORMS, key=lambda form: index_bytes(form, kept, total))


def elias_fano_sizes(kept: int, total: int) -> tuple[int, int]:
    """Return the number of low bits of each position, and the number of high bits of all."""
    width = max(0, (total // kept).bit_length() - 1) if kept else 0
    return width, kept + ((total - 1) >> width) if kept else 0


def encode_positions(positions: Tensor, total: int, form: str) -> dict[str, np.ndarray]:
    """Return the arrays that hold `positions`: strictly increasing int64 below `total`."""
    if form == "int32":
        if total > 2**31:
            raise ValueError(f"`index='int32'` counts to {2**31}, but got a tensor of {total} values. Use 'auto'.")
        return {"int32": to_bytes(positions.to(torch.int32))}
    backend = kernels.backend_on("positions", positions.device, total)
    if backend:
        arrays: dict[str, np.ndarray] = backend.encode(positions, total, form)
        return arrays
    if form == "bitmap":
        return {"bitmap": to_bytes(pack_bits(_flags(positions, total)))}
    width, length = elias_fano_sizes(len(positions), total)
    ones = (positions >> width) + torch.arange(len(positions), device=positions.device)
    low = pack(positions & ((1 << width) - 1), width)
    return {"low": to_bytes(low), "high": to_bytes(pack_bits(_flags(ones, length)))}


def _flags(ones: Tensor, length: int) -> Tensor:
    return torch.zeros(length, dtype=torch.bool, device=ones.device).index_fill_(0, ones, True)


def decode_positions(packet: Packet, kept: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the `kept` positions of a packet, strictly increasing int64; raises ValueError if they are anything else."""
    total = packet.numel
    if "int32" not in packet.arrays and kernels.gpu_serves(device, total):
        decoded: Tensor = kernels.backend_on("positions", device, total).decode(packet, kept, device)
        return decoded
    if "bitmap" in packet.arrays:
        bitmap = to_tensor(packet.bytes_of("bitmap", packed_bytes(total, 1)), torch.uint8, device)
        positions = unpack_bits(bitmap, total).nonzero().view(-1)
    elif "int32" in packet.arrays:
        positions = to_tensor(packet.bytes_of("int32", 4 * kept), torch.int32, device).long()
    else:
        low_bits, high_bits, width, length = elias_fano(packet, kept)
        low, high = (to_tensor(part, torch.uint8, device) for part in (low_bits, high_bits))
        ones = unpack_bits(high, length).nonzero().view(-1)
        if len(ones) != kept:
            raise misplaced(packet, kept)
        positions = (ones - torch.arange(kept, device=device) << width) | unpack(low, kept, width)
    increasing = bool((positions[1:] > positions[:-1]).all()) if kept > 1 else True
    if len(positions) != kept or not increasing or (kept and not 0 <= int(positions[0]) <= int(positions[-1]) < total):
        raise misplaced(packet, kept)
    return positions


def elias_fano(packet: Packet, kept: int) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Return the bytes of the low bits, the bytes of the high bits, and the result of `elias_fano_sizes`."""
    width, length = elias_fano_sizes(kept, packet.numel)
    low, high = packet.bytes_of("low", packed_bytes(kept, width)), packet.bytes_of("high", packed_bytes(length, 1))
    return low, high, width, length


def misplaced(packet: Packet, kept: int) -> ValueError:
    """Return the error for a packet whose positions do not match `kept` values."""
    return ValueError(
        f"A packet of {packet.codec!r} holds positions that are not {kept} increasing ones below {packet.numel}."
    )


def expand(packet: Packet, values: Tensor) -> Tensor:
    """Return the flat tensor of a packet: `values` at the positions it sends, zeros elsewhere; raises ValueError if they do not fit."""
    backend = kernels.backend("positions", values) if "int32" not in packet.arrays else None
    if backend:
        x: Tensor = backend.expand(packet, values.contiguous())
        return x
    return scatter(decode_positions(packet, len(values), values.device), values, packet.numel)


def scatter(positions: Tensor, values: Tensor, numel: int) -> Tensor:
    """Return a flat tensor of zeros with `values` at distinct `positions`.

    On a GPU, an error about damaged positions may still be pending; even so, nothing is written outside the tensor.
    """
    backend = kernels.backend("positions", values)
    if backend:
        filled: Tensor = backend.scatter(positions, values.contiguous(), numel)
        return filled
    x = torch.zeros(numel, dtype=values.dtype, device=values.device)
    return x.index_copy_(0, positions, values)


def subtract(x: Tensor, positions: Tensor, values: Tensor) -> None:
    """Subtract `values` from flat float32 `x` at distinct `positions`, in place."""
    if kernels.serve(x):
        kernels.backend("positions", x).subtract(positions.numpy(), kernels.opened(values.numpy()), x.numpy())
    else:
        x.index_copy_(0, positions, x[positions] - values)
