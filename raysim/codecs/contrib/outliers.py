"""Columns that stand out are sent apart, so that they do not widen the range of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.base import Codec, Key, Packet, check_finite, nest, nested_names
from raysim.codecs.dense import Cast
from raysim.codecs.layout import channel_axis
from raysim.codecs.positions import INDEX_ARRAYS, decode_positions, encode_positions, smallest_form
from raysim.codecs.selection import kept_of, select_topk
from raysim.notation import check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class Outliers(Codec):
    """Sends the channels of greatest magnitude by `kept`, in 16 bits, and the others by `codec` (after LLM.int8, Dettmers et al.
    2022, 2208.07339).

    A channel is a feature: a place along the last axis of (batch, length, width), along axis 1 of vectors and of images (B, C, H,
    W). The share `density` of them, at least one, is kept apart.

    >>> from raysim.codecs import Quantize
    >>> x = torch.tensor([[1.0, 2.0, 500.0, 4.0], [4.0, 3.0, -700.0, 1.0]])
    >>> Outliers(Quantize(2), density=0.25).encode(x).decode()
    tensor([[   1.,    2.,  500.,    4.],
            [   4.,    3., -700.,    1.]])
    """

    codec: Codec
    density: float = 0.01
    kept: Codec = Cast("bfloat16")  # noqa: RUF009  a frozen codec

    def __post_init__(self) -> None:
        self._coerce(density=check_real("density", self.density, 0, 1, open_low=True))
        for field, codec in (("codec", self.codec), ("kept", self.kept)):
            if not isinstance(codec, Codec):
                raise ValueError(f"`{field}` must be a codec, but got {codec!r}.")

    @property
    def random(self) -> bool:
        return self.codec.random or self.kept.random

    def _split(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the axis of channels, the number of channels, and the number that is kept apart."""
        axis = channel_axis(shape)
        return axis, shape[axis], kept_of(self.density, shape[axis]) if math.prod(shape) else 0

    def array_names(self) -> tuple[str, ...]:
        return (*nested_names("kept", self.kept), *nested_names("others", self.codec), *INDEX_ARRAYS)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        shape = tuple(x.shape) or (1,)
        axis, columns, count = self._split(shape)
        x = x.reshape(shape).contiguous()
        if not count:
            return dict(nest("others", self.codec.encode(x, key)))
        chosen = select_topk(_greatest(x, axis).view(1, -1), count)
        kept, others = _part(x, chosen, axis)
        arrays = dict(nest("kept", self.kept.encode(kept.view(_resized(shape, axis, count)), key)))
        arrays |= nest("others", self.codec.encode(others.view(_resized(shape, axis, columns - count)), key))
        return arrays | encode_positions(chosen, columns, smallest_form(count, columns))

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        shape = packet.shape or (1,)
        axis, columns, count = self._split(shape)
        if not count:
            return packet.part("others", self.codec, shape).decode(device).view(packet.shape)
        chosen = decode_positions(packet._replace(shape=(columns,)), count, device)
        kept = packet.part("kept", self.kept, _resized(shape, axis, count)).decode(device)
        others = packet.part("others", self.codec, _resized(shape, axis, columns - count)).decode(device)
        return _join(kept, others, chosen, axis).view(packet.shape)


def _resized(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _greatest(x: Tensor, axis: int) -> Tensor:
    """Return the greatest magnitude of each channel; raises NonFiniteError on NaN and infinity."""
    if not kernels.serve(x) or axis < x.ndim - 1:
        planes = x.reshape(math.prod(x.shape[:axis]), x.shape[axis], -1)
        magnitudes = torch.maximum(planes.amax((0, 2)), -planes.amin((0, 2)))
        check_finite(magnitudes)
        return magnitudes
    from raysim.codecs.kernels import columns

    bits = kernels.bits_of(x)
    found = np.empty(x.shape[axis], bits.dtype)
    columns.greatest(bits, bits.dtype.type(np.iinfo(bits.dtype).max), found)
    magnitudes = torch.from_numpy(found).view(x.dtype)
    check_finite(magnitudes)
    return magnitudes


def _part(x: Tensor, chosen: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the chosen channels, and the others."""
    if not kernels.serve(x) or axis < x.ndim - 1:
        return x.index_select(axis, chosen), x.index_select(axis, _complement(chosen, x.shape[axis]))
    from raysim.codecs.kernels import columns

    bits = kernels.bits_of(x)
    width = x.shape[axis]
    kept = np.empty(x.numel() // width * len(chosen), bits.dtype)
    others = kernels.empty(x.numel() - len(kept), bits.dtype)
    columns.part(kernels.opened(bits), width, chosen.numpy(), kept, others)
    return torch.from_numpy(kept).view(x.dtype), torch.from_numpy(others).view(x.dtype)


def _join(kept: Tensor, others: Tensor, chosen: Tensor, axis: int) -> Tensor:
    """Return the tensor of the chosen channels and the others."""
    columns = kept.shape[axis] + others.shape[axis]
    if kernels.serve(kept) and axis == kept.ndim - 1:
        from raysim.codecs.kernels.columns import join

        few, many = (kernels.opened(kernels.bits_of(part.contiguous())) for part in (kept, others))
        bits = kernels.empty(kept.numel() + others.numel(), few.dtype)
        join(few, many, columns, chosen.numpy(), bits)
        return torch.from_numpy(bits).view(kept.dtype)
    x = torch.empty(_resized(tuple(kept.shape), axis, columns), dtype=kept.dtype, device=kept.device)
    x.index_copy_(axis, chosen, kept)
    return x.index_copy_(axis, _complement(chosen, columns), others)


def _complement(chosen: Tensor, columns: int) -> Tensor:
    return torch.ones(columns, dtype=torch.bool, device=chosen.device).index_fill_(0, chosen, False).nonzero().view(-1)
