"""Codecs that send some values and their positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from raysim.codecs.dense import Identity
from raysim.codecs.packet import DTYPES, Codec, Key, NonFiniteError, Packet, nest
from raysim.codecs.positions import FORMS, decode_positions, encode_positions, smallest_form
from raysim.notation import check_choice, check_real


def kept_of(density: float, count: int) -> int:
    """Return how many of `count` values a density keeps, as in Rudakov et al.: at least one, rounded up.

    >>> kept_of(0.1, 65536), kept_of(0.07, 100), kept_of(0.5, 1)
    (6554, 7, 1)
    """
    return min(count, max(1, math.ceil(density * count - 1e-6)))


class Support(NamedTuple):
    """The positions that a sparse packet sends: flat and increasing, as (rows, kept), in a tensor of `shape`."""

    positions: Tensor
    shape: tuple[int, ...]


def select_topk(x: Tensor, kept: int) -> Tensor:
    """Return the flat positions of the `kept` greatest magnitudes of each row of (rows, length), increasing.

    Of equal magnitudes those of lower index are kept. Raises NonFiniteError on NaN or infinity.
    """
    if not x.numel() or not kept:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    magnitudes = x.abs()
    greatest = magnitudes.topk(kept, dim=1, sorted=False).values
    if not torch.isfinite(greatest).all():  # NaN and infinity rank above all numbers
        raise NonFiniteError("A tensor to select from holds NaN or infinity.")
    threshold = greatest.amin(dim=1, keepdim=True)
    selected = magnitudes > threshold
    ties = magnitudes == threshold
    room = kept - selected.sum(dim=1, keepdim=True)
    selected |= ties & (ties.cumsum(dim=1) <= room)
    return selected.reshape(-1).nonzero().view(-1)


@dataclass(frozen=True, repr=False)
class TopK(Codec):
    """Keeps the share `density` of greatest magnitude and nothing else (Rudakov et al. 2023, 2401.07788).

    Values compete within a `sample` (all axes but the first), so that the result does not depend on how a batch is cut
    into microbatches, or within the whole `tensor`. Exactly `kept_of(density, n)` are kept; of equal magnitudes those of
    lower index. Kept values are sent by the codec `values`, as (batch, kept) or flat; positions in the smallest of the
    forms of `raysim.codecs.positions`, or as `index` says. Density 1 sends no positions.

    >>> packet = TopK(0.5).encode(torch.tensor([[1.0, -2.0, 3.0, -4.0]]))
    >>> packet.decode(), packet.wire_bytes
    (tensor([[ 0.,  0.,  3., -4.]]), 9)
    """

    density: float
    per: str = "sample"
    values: Codec = Identity()
    index: str = "auto"

    def __post_init__(self) -> None:
        self._coerce(density=check_real("density", self.density, 0, 1, open_low=True))
        check_choice("per", self.per, ["sample", "tensor"])
        check_choice("index", self.index, ["auto", *FORMS])
        if not isinstance(self.values, Codec):
            raise ValueError(f"`values` must be a codec, but got {self.values!r}.")
        if isinstance(self.values, TopK):
            raise ValueError(f"`values` must be a codec of dense values, but got {self.values!r}. Lower `density` instead.")

    @property
    def random(self) -> bool:
        return self.values.random

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        shape = tuple(x.shape)
        rows = x.reshape(self._rows(shape))
        positions = select_topk(rows, self._num_kept(shape) // max(1, len(rows)))
        kept = rows.reshape(-1)[positions] if len(positions) < x.numel() else rows
        arrays = dict(nest("values", self.values.encode(kept.reshape(self._kept_shape(shape)), key)))
        if len(positions) < x.numel():
            arrays |= encode_positions(positions, x.numel(), self._form(len(positions), x.numel()))
        return arrays

    def _form(self, kept: int, total: int) -> str:
        return smallest_form(kept, total) if self.index == "auto" else self.index

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        kept = self._num_kept(packet.shape)
        values = packet.part("values", self.values, self._kept_shape(packet.shape)).decode(device).reshape(-1)
        if kept == packet.numel:
            return values.view(packet.shape)
        positions = decode_positions(packet, kept, device)
        x = torch.zeros(packet.numel, dtype=DTYPES[packet.dtype], device=device)
        return x.index_copy_(0, positions, values).view(packet.shape)

    def support(self, packet: Packet, device: torch.device | str = "cpu") -> Support:
        """Return the positions that a packet of this codec sends."""
        kept = self._num_kept(packet.shape)
        everything = kept == packet.numel
        positions = torch.arange(kept, device=device) if everything else decode_positions(packet, kept, device)
        return Support(positions.view(self._kept_shape(packet.shape)), packet.shape)

    def _rows(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Return the number of rows that compete on their own, and their length."""
        if self.per == "tensor" or not shape:
            return 1, math.prod(shape)
        return shape[0], math.prod(shape[1:])

    def _num_kept(self, shape: tuple[int, ...]) -> int:
        num_rows, length = self._rows(shape)
        return num_rows * kept_of(self.density, length) if num_rows * length else 0

    def _kept_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        num_rows = self._rows(shape)[0]
        return num_rows, self._num_kept(shape) // max(1, num_rows)


@dataclass(frozen=True, repr=False)
class Nonzero(Codec):
    """Sends the values that are not zero, however many, and their positions: lossless where `values` is.

    Shrinks what is sparse by itself, such as activations after ReLU. The count is sent in 8 bytes.

    >>> packet = Nonzero().encode(torch.tensor([0.0, 2.0, 0.0, 0.0]))
    >>> packet.decode(), packet.wire_bytes
    (tensor([0., 2., 0., 0.]), 13)
    """

    values: Codec = Identity()

    def __post_init__(self) -> None:
        if not isinstance(self.values, Codec):
            raise ValueError(f"`values` must be a codec, but got {self.values!r}.")

    @property
    def random(self) -> bool:
        return self.values.random

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        flat = x.reshape(-1)
        positions = flat.nonzero().view(-1)
        packet = self.values.encode(flat[positions], key)  # NaN is not zero, and is found there
        arrays = dict(nest("values", packet), count=np.array([len(positions)], dtype=np.int64))
        return arrays | encode_positions(positions, x.numel(), smallest_form(len(positions), x.numel()))

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        kept = int(packet.bytes_of("count", 8).view(np.int64)[0])
        if not 0 <= kept <= packet.numel:
            raise ValueError(f"A packet of {self!r} holds {kept} of {packet.numel} values.")
        values = packet.part("values", self.values, (kept,)).decode(device)
        x = torch.zeros(packet.numel, dtype=DTYPES[packet.dtype], device=device)
        return x.index_copy_(0, decode_positions(packet, kept, device), values).view(packet.shape)
