"""Hadamard: another codec's input, rotated tile by tile."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.codec import (
    DTYPES,
    Codec,
    Key,
    Packet,
    cast_float64,
    cast_saturating,
    check_is_codec,
    nest,
    nested_names,
)
from raysim.notation import check_integer
from raysim.on_demand import torch

_GREATEST = float(np.finfo(np.float32).max)


def check_tile(tile: object) -> int:
    """Return the tile size; raises ValueError if Sylvester's construction has no matrix of that size."""
    size = check_integer("tile", tile, 2, 4096)
    if size & (size - 1):
        raise ValueError(f"`tile` must be a power of two, but got {size}.")
    return size


def hadamard(tiles: torch.Tensor) -> torch.Tensor:
    """Return the unnormalised Walsh-Hadamard transform of every row of float64 (count, tile).

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
    """Sends x H by another codec, with H the Hadamard matrix of size `tile`, and transforms the decoded tensor back.

    Spreads an outlier over its tile, which leaves more precision for the other values. Tiles are consecutive values of
    a sample, or of the whole zero-padded tensor if samples do not divide into tiles. The codec encodes x H/tile in
    float32, which is no larger than x, so nothing overflows.

    >>> from raysim.codecs import Quantize
    >>> x = torch.arange(32.0).sin(); x[5] = 20
    >>> [round(float((codec.encode(x).decode() - x).norm()), 2) for codec in (Quantize(4), Hadamard(Quantize(4)))]
    [2.22, 0.87]
    """

    codec: Codec
    tile: int = 32

    def __post_init__(self) -> None:
        check_is_codec("codec", self.codec)
        self._coerce(tile=check_tile(self.tile))

    def _turned(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the codec's input: the tensor's own if tiles fill its samples."""
        numel = math.prod(shape)
        whole = math.prod(shape[1:]) % self.tile == 0 if len(shape) > 1 else numel % self.tile == 0
        return shape if whole else (1, numel + -numel % self.tile)

    def array_names(self) -> tuple[str, ...]:
        return nested_names("turned", self.codec)

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        turned = self._turned(tuple(x.shape))
        if turn := kernels.find("linear.turn", x):
            mixed = turn(x.contiguous().view(-1), self.tile, 1 / self.tile, math.inf, math.prod(turned))
        else:
            flat = torch.nn.functional.pad(x.reshape(-1).double(), (0, math.prod(turned) - x.numel()))
            mixed = hadamard(flat.view(-1, self.tile)).div_(self.tile).float()
        return nest("turned", self.codec.encode(mixed.view(turned), key))

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        turned = self._turned(packet.shape)
        mixed = packet.part("turned", self.codec, turned)._replace(dtype="float32").decode(device)
        dtype = DTYPES[packet.dtype]
        if turn := kernels.find_on("linear.turn", device, packet.numel, dtype):
            x = turn(mixed.contiguous().view(-1), self.tile, 1.0, _GREATEST, mixed.numel())[: packet.numel]
            return cast_saturating(x, dtype).view(packet.shape)
        x = hadamard(mixed.double().reshape(-1, self.tile)).view(-1)[: packet.numel]
        return cast_float64(x, dtype).view(packet.shape)
