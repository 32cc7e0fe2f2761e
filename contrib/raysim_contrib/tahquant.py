"""TAH-Quant: tiles of a token, each with its own bits, and rotated if it has an outlier."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs.bits import pack
from raysim.codecs.codec import (
    DTYPES,
    Codec,
    Key,
    Packet,
    cast_float64,
    check_finite,
    to_bytes,
    to_tensor,
)
from raysim.codecs.floats import power_of_two
from raysim.codecs.groups import channel_axis, channels_last
from raysim.codecs.hadamard import check_tile, hadamard
from raysim.codecs.positions import select_topk
from raysim.notation import check_choice, check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_HIGH, _LOW = 4, 3  # bits of a tile with high entropy, and with low
_TINY = 1e-12
_WEIGHT_BITS, _FRACTION_BITS = 16, 18
# log2(1 + x) is x times this polynomial, to 9e-6 for 0 <= x <= 1 (a fit at Chebyshev points)
_LOG2 = (
    1.442683219909668,
    -0.7204423546791077,
    0.469301700592041,
    -0.30338966846466064,
    0.14643362164497375,
    -0.03459521010518074,
)


@dataclass(frozen=True, repr=False)
class TAHQuant(Codec):
    """Quantises tiles of `tile` channels of a token to 4 or 3 bits, rotating tiles with an outlier (He et al. 2025, 2506.01352).

    The share `high` of a token's tiles with the greatest Shannon entropy of |a|/||a||_1 gets 4 bits, the others 3.
    `allocate='token'`, the paper's first version, ranks whole tokens within their sample. If the greatest magnitude of a tile is
    more than `tau` times the second, it is swapped to the front and the tile is multiplied by the Hadamard matrix over sqrt(tile).
    Codes are min-max; scale and minimum are float16, relative to a power of two for the tensor. A tile takes 4 or 3 bits a value,
    32 for scale and minimum, 1 for the width (1 a token if tokens are ranked), 1 for the rotation and log2(tile) for the position
    of the swapped value. A token of (B, C, H, W) is a pixel with its C channels. Short tiles are padded with the last value.

    Unlike ours, the published code (heguangxin/TAH-Quant) rotates at `tau` itself, keeps plain float16, rounds the number of 3-bit
    tokens down, and sends positions of rotated tiles only. It sends gradients in 6 bits, in tiles of 32.

    Use: 3 to 4 bits for activations of language models with outliers.

    >>> packet = TAHQuant().encode(torch.arange(640.0).view(1, 640).sin())
    >>> 8 * packet.array_bytes / 640 < 5.1
    True
    """

    variants: ClassVar[tuple[str, ...]] = ("TAHQuant",)

    high: float = 0.8
    tile: int = 32
    tau: float = 2.0
    allocate: str = "tile"

    def __post_init__(self) -> None:
        self._coerce(high=check_real("high", self.high, 0, 1), tile=check_tile(self.tile))
        self._coerce(tau=check_real("tau", self.tau, 0, 1e30))
        check_choice("allocate", self.allocate, ["tile", "token"])

    def _layout(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the number of tokens, their length and how many tiles each has."""
        length = shape[-1] if shape else 1
        return (math.prod(shape) // length, length, -(-length // self.tile)) if math.prod(shape) else (0, 0, 0)

    def _fitted(self, shape: tuple[int, ...]) -> TAHQuant:
        """Return the codec for tokens along the last axis of `shape`, with a smaller tile if they are shorter."""
        length = shape[-1] if shape else 1
        return replace(self, tile=min(self.tile, max(2, 1 << (length - 1).bit_length()))) if length else self

    def array_names(self) -> tuple[str, ...]:
        return ("exponent", "wide", "turned", "pivots", "low", "scale", "high_codes", "low_codes")

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        x = x.movedim(channel_axis(tuple(x.shape)), -1) if x.ndim else x
        return self._fitted(tuple(x.shape))._encode_tokens(x)

    def _encode_tokens(self, x: Tensor) -> dict[str, np.ndarray]:
        tokens, _, per_token = self._layout(tuple(x.shape))
        if not tokens:
            return {}
        check_finite(x)
        exponent = int(torch.frexp(x.double().abs().amax()).exponent)
        tiles = self._tiles(x)
        wide = self._wide(x, tiles)
        tiles *= _power(-exponent, x.device)
        turned, pivots = self._pivots(tiles)
        tiles = _mixed(tiles, turned, pivots)
        low, high = tiles.amin(dim=1), tiles.amax(dim=1)
        sent_low = low.half()
        last = torch.where(wide, 2.0**_HIGH - 1, 2.0**_LOW - 1)  # greatest code of each tile
        sent_scale = ((high - sent_low.double()) / last).clamp_min(0).half()
        inverse = 1 / sent_scale.double().clamp_min(_TINY)
        codes = (tiles.sub_(sent_low.double()[:, None])).mul_(inverse[:, None]).round_().clamp_min_(0)
        codes = torch.minimum(codes, last[:, None]).to(torch.uint8)
        return {
            "exponent": np.array([exponent], np.int16).view(np.uint8),
            "wide": to_bytes(pack((wide if self.allocate == "tile" else wide[::per_token]).to(torch.uint8), 1)),
            "turned": to_bytes(pack(turned.to(torch.uint8), 1)),
            "pivots": to_bytes(pack(pivots, self._pivot_bits)),
            "low": to_bytes(sent_low),
            "scale": to_bytes(sent_scale),
            "high_codes": to_bytes(pack(codes[wide].view(-1), _HIGH)),
            "low_codes": to_bytes(pack(codes[~wide].view(-1), _LOW)),
        }

    def _wide(self, x: Tensor, tiles: Tensor) -> Tensor:
        """Return which tiles have the wider codes."""
        tokens, length, per_token = self._layout(tuple(x.shape))
        by_tile = self.allocate == "tile"
        entropy = _entropy(tiles.abs() if by_tile else x.reshape(tokens, length).abs())
        # integers above zero rank like the float32 of the same bits
        ranked = entropy.view(torch.float32).view(tokens if by_tile else x.shape[0] if x.ndim > 2 else 1, -1)
        wide = torch.zeros(len(entropy), dtype=torch.bool, device=x.device)
        wide[select_topk(ranked, round(self.high * ranked.shape[1]))] = True
        return wide if by_tile else wide.repeat_interleave(per_token)

    def _pivots(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Return which tiles are rotated, and the position of their greatest magnitude, 0 for other tiles."""
        magnitudes = tiles.abs()
        first = magnitudes.amax(dim=1)
        positions = torch.arange(self.tile, device=tiles.device).expand_as(tiles)
        pivots = torch.where(magnitudes == first[:, None], positions, self.tile).amin(dim=1)
        second = magnitudes.scatter(1, pivots[:, None], 0.0).amax(dim=1)
        turned = first / (second + _TINY) > self.tau
        return turned, torch.where(turned, pivots, 0)

    def _tiles(self, x: Tensor) -> Tensor:
        """Return the tiles as rows of float64, the last of each token padded with its last value."""
        tokens, length, per_token = self._layout(tuple(x.shape))
        rows = x.reshape(tokens, length).double()
        return torch.cat([rows, rows[:, -1:].expand(-1, per_token * self.tile - length)], dim=1).view(-1, self.tile)

    @property
    def _pivot_bits(self) -> int:
        return self.tile.bit_length() - 1

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        shape = channels_last(packet.shape)
        x = self._fitted(shape)._decode_tokens(packet._replace(shape=shape), device)
        return x.movedim(-1, channel_axis(packet.shape)).contiguous() if x.ndim else x

    def _decode_tokens(self, packet: Packet, device: torch.device | str) -> Tensor:
        dtype = DTYPES[packet.dtype]
        tokens, length, per_token = self._layout(packet.shape)
        if not tokens:
            return torch.empty(packet.shape, dtype=dtype, device=device)
        count = tokens * per_token
        exponent = int(packet.bytes_of("exponent", 2).copy().view(np.int16)[0])
        ranked = count if self.allocate == "tile" else tokens
        wide = (packet.fields_of("wide", ranked, 1, device) > 0).repeat_interleave(count // ranked)
        turned = packet.fields_of("turned", count, 1, device) > 0
        pivots = packet.fields_of("pivots", count, self._pivot_bits, device).long()
        low, scale = (
            to_tensor(packet.bytes_of(name, 2 * count), torch.float16, device).double() for name in ("low", "scale")
        )
        if not (torch.isfinite(low).all() and torch.isfinite(scale).all()):
            raise ValueError(f"A packet of {self!r} holds a scale or a least value that is not finite.")
        num_wide = int(wide.sum())
        codes = torch.empty(count, self.tile, dtype=torch.uint8, device=device)
        codes[wide] = packet.fields_of("high_codes", num_wide * self.tile, _HIGH, device).view(-1, self.tile)
        codes[~wide] = packet.fields_of("low_codes", (count - num_wide) * self.tile, _LOW, device).view(-1, self.tile)
        tiles = codes.double() * scale[:, None] + low[:, None]
        back = _swapped(hadamard(tiles) / math.sqrt(self.tile), pivots)
        tiles = torch.where(turned[:, None], back, tiles)
        rows = (tiles * _power(exponent, device)).view(tokens, -1)[:, :length].reshape(packet.shape)
        return cast_float64(rows, dtype)


def _power(exponent: int, device: torch.device | str) -> Tensor:
    return power_of_two(torch.tensor(exponent, device=device))


def _entropy(magnitudes: Tensor) -> Tensor:
    """Return the Shannon entropy of each row divided by its sum, int32 in units of 2^-18 bit, to about 2^-14 bit.

    Computed in integers, so that the order of summation does not matter: magnitudes to 17 bits, each -p log2(p) to 18.
    """
    exponents = (torch.frexp(magnitudes.amax(dim=1)).exponent - 1).clamp_min(-126)
    weights = (magnitudes * power_of_two(_WEIGHT_BITS - exponents)[:, None]).to(torch.int32)
    total = weights.sum(dim=1).float()
    shares = weights.float() * torch.where(total > 0, 1 / total, 0.0)[:, None]
    bits = shares.view(torch.int32)
    x = (bits & 0x7FFFFF | 0x3F800000).view(torch.float32) - 1
    logarithm = torch.zeros_like(x)
    for coefficient in reversed(_LOG2):
        logarithm = (logarithm + coefficient) * x
    logarithm += ((bits >> 23) - 127).float()
    return (shares * logarithm * -(2.0**_FRACTION_BITS)).to(torch.int32).sum(dim=1, dtype=torch.int32)


def _mixed(tiles: Tensor, turned: Tensor, pivots: Tensor) -> Tensor:
    mixed = hadamard(_swapped(tiles, pivots)) / math.sqrt(tiles.shape[1])
    return torch.where(turned[:, None], mixed, tiles)


def _swapped(tiles: Tensor, pivots: Tensor) -> Tensor:
    """Return the tiles with their first value and the value at the pivot swapped."""
    swapped = tiles.clone()
    swapped[:, 0] = tiles.gather(1, pivots[:, None])[:, 0]
    return swapped.scatter_(1, pivots[:, None], tiles[:, :1]) if tiles.numel() else swapped
