"""Hadamard: a rotation before another codec, so that no value stands out."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.codec import (
    DTYPES,
    Codec,
    Key,
    Packet,
    cast_float64,
    cast_saturating,
    check_codec,
    nest,
    nested_names,
)
from raysim.notation import check_integer
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_GREATEST = float(np.finfo(np.float32).max)


def check_tile(tile: object) -> int:
    """Return the size of a tile; raises ValueError if Sylvester has no Hadamard matrix of that size."""
    size = check_integer("tile", tile, 2, 4096)
    if size & (size - 1):
        raise ValueError(f"`tile` must be a power of two, but got {size}.")
    return size


def hadamard(tiles: Tensor) -> Tensor:
    """Return the Walsh-Hadamard transform of every row of float64 (count, tile), not normalised.

    >>> hadamard(torch.tensor([[1.0, 2.0]], dtype=torch.float64))
    tensor([[ 3., -1.]], dtype=torch.float64)
    """
    tile = tiles.shape[1]
    half = 1
    while half < tile:
        pairs = tiles.reshape(-1, tile // (2 * half), 2, half)
        left, right = pairs[:, :, 0], pairs[:, :, 1]
        tiles = torch.stack([left + right, left - right], dim=2).view(-1, tile)
        half *= 2
    return tiles


@dataclass(frozen=True, repr=False)
class Hadamard(Codec):
    """Sends x H by another codec, H the Hadamard matrix of `tile` values, and transforms the decoded tensor back.

    Spreads an outlier over its tile, which leaves more precision for the other values. Tiles are consecutive values of
    a sample, or of the whole tensor padded with zeros if samples do not divide into tiles. The codec encodes x H/tile,
    in float32, which is no larger than x, so nothing overflows.

    >>> from raysim.codecs import Quantize
    >>> x = torch.arange(32.0).sin(); x[5] = 20
    >>> [round(float((codec.encode(x).decode() - x).norm()), 2) for codec in (Quantize(4), Hadamard(Quantize(4)))]
    [2.22, 0.87]
    """

    codec: Codec
    tile: int = 32

    def __post_init__(self) -> None:
        check_codec("codec", self.codec)
        self._coerce(tile=check_tile(self.tile))

    @property
    def random(self) -> bool:
        return self.codec.random

    def _turned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the codec's input: the tensor's own if tiles fill its samples."""
        numel = math.prod(shape)
        whole = math.prod(shape[1:]) % self.tile == 0 if len(shape) > 1 else numel % self.tile == 0
        return shape if whole else (1, numel + -numel % self.tile)

    def array_names(self) -> tuple[str, ...]:
        return nested_names("turned", self.codec)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        turned = self._turned(tuple(x.shape))
        backend = kernels.backend("hadamard", x) if x.numel() else None
        if backend:
            mixed = backend.turn(x.contiguous().view(-1), self.tile, 1 / self.tile, math.inf, math.prod(turned))
            return dict(nest("turned", self.codec.encode(mixed.view(turned), key)))
        flat = torch.nn.functional.pad(x.reshape(-1).double(), (0, math.prod(turned) - x.numel()))
        mixed = hadamard(flat.view(-1, self.tile)).div_(self.tile)
        return dict(nest("turned", self.codec.encode(mixed.float().view(turned), key)))

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        turned = self._turned(packet.shape)
        mixed = packet.part("turned", self.codec, turned)._replace(dtype="float32").decode(device)
        dtype = DTYPES[packet.dtype]
        served = dtype != torch.float64 and packet.numel
        backend = kernels.backend_on("hadamard", device, packet.numel) if served else None
        if backend:
            x = backend.turn(mixed.contiguous().view(-1), self.tile, 1.0, _GREATEST, mixed.numel())[: packet.numel]
            return cast_saturating(x, dtype).view(packet.shape)
        x = hadamard(mixed.double().reshape(-1, self.tile)).view(-1)[: packet.numel]
        return cast_float64(x, dtype).view(packet.shape)
