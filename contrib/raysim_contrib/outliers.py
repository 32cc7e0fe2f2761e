"""Outlier channels sent separately, so that they do not widen the range of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs import Cast
from raysim.codecs.codec import Codec, Key, Packet, check_finite, check_is_codec, nest, nested_names
from raysim.codecs.groups import channel_axis
from raysim.codecs.positions import (
    INDEX_ARRAYS,
    decode_positions,
    encode_positions,
    kept_of,
    select_topk,
    smallest_form,
)
from raysim.notation import check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class Outliers(Codec):
    """Sends the largest channels by `kept`, in 16 bits, and the others by `codec` (after LLM.int8, Dettmers et al. 2022, 2208.07339).

    A channel is a feature: an index along the last axis of (batch, length, width), or along axis 1 of vectors and of images (B, C,
    H, W). The share `density` of channels, at least one, with the greatest magnitudes is sent by `kept`.

    Use: Few bits if whole channels are outliers.

    >>> from raysim.codecs import Quantize
    >>> x = torch.tensor([[1.0, 2.0, 500.0, 4.0], [4.0, 3.0, -700.0, 1.0]])
    >>> Outliers(Quantize(2), density=0.25).encode(x).decode()
    tensor([[   1.,    2.,  500.,    4.],
            [   4.,    3., -700.,    1.]])
    """

    variants: ClassVar[tuple[str, ...]] = ("Outliers(Quantize(4))",)

    codec: Codec
    density: float = 0.01
    kept: Codec = Cast("bfloat16")  # noqa: RUF009  a frozen codec

    def __post_init__(self) -> None:
        self._coerce(density=check_real("density", self.density, 0, 1, open_low=True))
        check_is_codec("codec", self.codec)
        check_is_codec("kept", self.kept)

    def _split(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the axis of channels, the number of channels, and the number sent by `kept`."""
        axis = channel_axis(shape)
        return axis, shape[axis], kept_of(self.density, shape[axis]) if math.prod(shape) else 0

    def array_names(self) -> tuple[str, ...]:
        return (*nested_names("kept", self.kept), *nested_names("others", self.codec), *INDEX_ARRAYS)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        shape = tuple(x.shape) or (1,)
        axis, channels, count = self._split(shape)
        x = x.reshape(shape).contiguous()
        if not count:
            return nest("others", self.codec.encode(x, key))
        planes = x.reshape(math.prod(shape[:axis]), channels, -1)
        magnitudes = torch.maximum(planes.amax((0, 2)), -planes.amin((0, 2)))
        check_finite(magnitudes)
        chosen = select_topk(magnitudes.view(1, -1), count)
        others = x.index_select(axis, _complement(chosen, channels))
        arrays = nest("kept", self.kept.encode(x.index_select(axis, chosen), key))
        arrays |= nest("others", self.codec.encode(others, key))
        return arrays | encode_positions(chosen, channels, smallest_form(count, channels))

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        shape = packet.shape or (1,)
        axis, channels, count = self._split(shape)
        if not count:
            return packet.part("others", self.codec, shape).decode(device).view(packet.shape)
        before, after = shape[:axis], shape[axis + 1 :]
        chosen = decode_positions(packet._replace(shape=(channels,)), count, device)
        kept = packet.part("kept", self.kept, (*before, count, *after)).decode(device)
        others = packet.part("others", self.codec, (*before, channels - count, *after)).decode(device)
        x = torch.empty(shape, dtype=kept.dtype, device=kept.device)
        x.index_copy_(axis, chosen, kept)
        return x.index_copy_(axis, _complement(chosen, channels), others).view(packet.shape)


def _complement(chosen: Tensor, channels: int) -> Tensor:
    """Return the channels that are not `chosen`."""
    others = torch.ones(channels, dtype=torch.bool, device=chosen.device).index_fill_(0, chosen, False)
    return others.nonzero().view(-1)
