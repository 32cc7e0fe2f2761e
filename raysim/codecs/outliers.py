"""Columns that stand out are sent apart, so that they do not widen the range of the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.dense import Cast
from raysim.codecs.on_demand import torch
from raysim.codecs.packet import Codec, Key, Packet, check_finite, nest, nested_names
from raysim.codecs.positions import INDEX_ARRAYS, decode_positions, encode_positions, smallest_form
from raysim.codecs.sparse import kept_of, select_topk
from raysim.notation import check_real

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class Outliers(Codec):
    """Sends the columns of greatest magnitude by `kept`, in 16 bits, and the others by `codec` (after LLM.int8, Dettmers et al.
    2022, 2208.07339).

    A column is a place along the last axis, a feature of tokens; the share `density` of them, at least one, is kept apart.

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

    def _split(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of columns and how many of them are kept apart."""
        columns = shape[-1] if shape else 1
        return columns, kept_of(self.density, columns) if math.prod(shape) else 0

    def array_names(self) -> tuple[str, ...]:
        return (*nested_names("kept", self.kept), *nested_names("others", self.codec), *INDEX_ARRAYS)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        shape = tuple(x.shape) or (1,)
        columns, count = self._split(shape)
        x = x.reshape(-1, columns).contiguous() if x.numel() else x
        if not count:
            return dict(nest("others", self.codec.encode(x.view(shape), key)))
        chosen = select_topk(_greatest(x).view(1, -1), count)
        kept, others = _part(x, chosen)
        arrays = dict(nest("kept", self.kept.encode(kept.view(*shape[:-1], count), key)))
        arrays |= nest("others", self.codec.encode(others.view(*shape[:-1], columns - count), key))
        return arrays | encode_positions(chosen, columns, smallest_form(count, columns))

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        shape = packet.shape or (1,)
        columns, count = self._split(shape)
        if not count:
            return packet.part("others", self.codec, shape).decode(device).view(packet.shape)
        chosen = decode_positions(packet._replace(shape=(columns,)), count, device)
        kept = packet.part("kept", self.kept, (*shape[:-1], count)).decode(device)
        others = packet.part("others", self.codec, (*shape[:-1], columns - count)).decode(device)
        return _join(kept, others, chosen, columns).view(packet.shape)


def _greatest(x: Tensor) -> Tensor:
    """Return the greatest magnitude of each column; raises NonFiniteError on NaN and infinity."""
    if not kernels.serve(x):
        check_finite(x)
        return x.abs().amax(dim=0)
    from raysim.codecs.kernels import columns

    bits = kernels.bits_of(x)
    found = np.empty(x.shape[1], bits.dtype)
    columns.greatest(bits, bits.dtype.type(np.iinfo(bits.dtype).max), found)
    magnitudes = torch.from_numpy(found).view(x.dtype)
    check_finite(magnitudes)
    return magnitudes


def _part(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chosen columns of a matrix, and the others."""
    if not kernels.serve(x):
        return x[:, chosen], x[:, _complement(chosen, x.shape[1])]
    from raysim.codecs.kernels import columns

    bits = kernels.bits_of(x)
    kept = np.empty(len(x) * len(chosen), bits.dtype)
    others = kernels.empty(x.numel() - len(kept), bits.dtype)
    columns.part(kernels.opened(bits), x.shape[1], chosen.numpy(), kept, others)
    return torch.from_numpy(kept).view(x.dtype), torch.from_numpy(others).view(x.dtype)


def _join(kept: Tensor, others: Tensor, chosen: Tensor, columns: int) -> Tensor:
    """Return the tensor of the chosen columns and the others, both of shape (..., columns of theirs)."""
    if kernels.serve(kept):
        from raysim.codecs.kernels.columns import join

        few, many = (kernels.opened(kernels.bits_of(part.contiguous())) for part in (kept, others))
        bits = kernels.empty(kept.numel() + others.numel(), few.dtype)
        join(few, many, columns, chosen.numpy(), bits)
        return torch.from_numpy(bits).view(kept.dtype)
    x = torch.empty(*kept.shape[:-1], columns, dtype=kept.dtype, device=kept.device)
    x[..., chosen] = kept
    x[..., _complement(chosen, columns)] = others
    return x


def _complement(chosen: Tensor, columns: int) -> Tensor:
    return torch.ones(columns, dtype=torch.bool, device=chosen.device).index_fill_(0, chosen, False).nonzero().view(-1)
