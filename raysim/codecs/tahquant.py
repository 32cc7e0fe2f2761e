"""TAH-Quant: tiles of a token, each with its own width and, where a value stands out, a rotation."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raysim.codecs.bits import pack, packed_bytes, unpack
from raysim.codecs.blockfloat import power_of_two
from raysim.codecs.packet import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.transform import check_tile, hadamard
from raysim.notation import check_real

_HIGH, _LOW = 4, 3  # bits of a tile with much entropy, and with little
_TINY = 1e-12


@dataclass(frozen=True, repr=False)
class TAHQuant(Codec):
    """Quantises each tile of `tile` channels of a token to 4 or 3 bits, rotated where one value stands out (He et al. 2025,
    2506.01352; steps as secondary texts give them, unverified).

    The share `high` of a token's tiles with the greatest Shannon entropy of |a|/||a||_1 gets 4 bits, the others 3. Where the
    greatest magnitude of a tile is more than `tau` times the second, it is swapped to the front and the tile multiplied by the
    Hadamard matrix over sqrt(tile). Codes are min-max; scale and least value are float16, relative to a power of two of the whole
    tensor, which is sent in 2 bytes so that small gradients keep their digits. The last tile of a token is filled up with its
    last value. Of a tile are sent 4 or 3 bits a value, 32 for scale and least value, 1 for the width, 1 for the rotation and
    log2(tile) for the place of the swapped value.

    >>> packet = TAHQuant().encode(torch.arange(640.0).view(1, 640).sin())
    >>> 8 * packet.wire_bytes / 640 < 5.1
    True
    """

    high: float = 0.8
    tile: int = 32
    tau: float = 2.0

    def __post_init__(self) -> None:
        self._coerce(high=check_real("high", self.high, 0, 1), tile=check_tile(self.tile))
        self._coerce(tau=check_real("tau", self.tau, 0, 1e30))

    def _layout(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the number of tokens, their length and how many tiles each has."""
        length = shape[-1] if shape else 1
        return (math.prod(shape) // length, length, -(-length // self.tile)) if math.prod(shape) else (0, 0, 0)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        tokens, length, per_token = self._layout(tuple(x.shape))
        if not tokens:
            return {}
        rows = x.reshape(tokens, length).double()
        exponent = int(torch.frexp(rows.abs().amax()).exponent)
        rows = torch.cat([rows, rows[:, -1:].expand(-1, per_token * self.tile - length)], dim=1)
        tiles = (rows * power_of_two(torch.tensor(-exponent, device=x.device))).view(-1, self.tile)  # within -1..1
        magnitudes = tiles.abs()
        share = magnitudes / (magnitudes.sum(dim=1, keepdim=True) + _TINY)
        entropy = -(share * (share + _TINY).log()).sum(dim=1).view(tokens, per_token)
        wide = torch.zeros_like(entropy, dtype=torch.bool)
        order = entropy.argsort(dim=1, descending=True, stable=True)
        wide = wide.scatter_(1, order[:, : round(self.high * per_token)], True).view(-1)
        first, second = magnitudes.topk(2, dim=1).values.unbind(dim=1)
        turned = first / (second + _TINY) > self.tau
        pivots = torch.where(turned, magnitudes.argmax(dim=1), 0)
        mixed = hadamard(_swapped(tiles, pivots)) / math.sqrt(self.tile)
        tiles = torch.where(turned[:, None], mixed, tiles)
        low = tiles.amin(dim=1).half()
        steps = torch.where(wide, 2**_HIGH - 1, 2**_LOW - 1)
        scale = ((tiles.amax(dim=1) - low.double()) / steps).clamp_min(0).half()
        codes = ((tiles - low.double()[:, None]) / scale.double().clamp_min(_TINY)[:, None]).round_()
        codes = torch.minimum(codes.clamp_min_(0), steps[:, None]).to(torch.uint8)
        return {
            "exponent": np.array([exponent], np.int16).view(np.uint8),
            "wide": to_bytes(pack(wide.long(), 1)),
            "turned": to_bytes(pack(turned.long(), 1)),
            "pivots": to_bytes(pack(pivots, self._pivot_bits)),
            "low": to_bytes(low),
            "scale": to_bytes(scale),
            "high_codes": to_bytes(pack(codes[wide].view(-1), _HIGH)),
            "low_codes": to_bytes(pack(codes[~wide].view(-1), _LOW)),
        }

    @property
    def _pivot_bits(self) -> int:
        return self.tile.bit_length() - 1

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        dtype = DTYPES[packet.dtype]
        tokens, length, per_token = self._layout(packet.shape)
        if not tokens:
            return torch.empty(packet.shape, dtype=dtype, device=device)
        count = tokens * per_token

        def field(name: str, number: int, bits: int) -> Tensor:
            return unpack(
                to_tensor(packet.bytes_of(name, packed_bytes(number, bits)), torch.uint8, device), number, bits
            )

        exponent = int(packet.bytes_of("exponent", 2).copy().view(np.int16)[0])
        wide, turned = field("wide", count, 1).bool(), field("turned", count, 1).bool()
        pivots = field("pivots", count, self._pivot_bits)
        low, scale = (to_tensor(packet.bytes_of(name, 2 * count), torch.float16, device) for name in ("low", "scale"))
        if not (torch.isfinite(low).all() and torch.isfinite(scale).all()):
            raise ValueError(f"A packet of {self!r} holds a scale or a least value that is not finite.")
        num_wide = int(wide.sum())
        codes = torch.empty(count, self.tile, dtype=torch.int64, device=device)
        codes[wide] = field("high_codes", num_wide * self.tile, _HIGH).view(-1, self.tile)
        codes[~wide] = field("low_codes", (count - num_wide) * self.tile, _LOW).view(-1, self.tile)
        tiles = codes.double() * scale.double()[:, None] + low.double()[:, None]
        back = _swapped(hadamard(tiles) / math.sqrt(self.tile), pivots)
        tiles = torch.where(turned[:, None], back, tiles)
        rows = (tiles * power_of_two(torch.tensor(exponent, device=device))).view(tokens, -1)[:, :length]
        return cast_saturating(rows.reshape(packet.shape), dtype)


def _swapped(tiles: Tensor, pivots: Tensor) -> Tensor:
    """Return the tiles with their first value and the one at the pivot in each other's place."""
    swapped = tiles.clone()
    swapped[:, 0] = tiles.gather(1, pivots[:, None])[:, 0]
    return swapped.scatter_(1, pivots[:, None], tiles[:, :1]) if tiles.numel() else swapped
