"""Codecs that send some values and their positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.base import Codec, Key, Packet, dtype_name, nest, nested_names
from raysim.codecs.bits import packed_bytes
from raysim.codecs.dense import Identity
from raysim.codecs.positions import (
    FORMS,
    INDEX_ARRAYS,
    decode_positions,
    encode_positions,
    smallest_form,
)
from raysim.codecs.selection import (
    Support,
    add_and_select,
    kept_of,
    place,
    select_at_least,
    select_with_values,
    subtract,
)
from raysim.codecs.work import count_work
from raysim.notation import check_choice, check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class TopK(Codec):
    """Keeps the share `density` of greatest magnitude and nothing else (Rudakov et al. 2023, 2401.07788).

    Values compete within a `sample` (all axes but the first), so that the result does not depend on how a batch is cut
    into microbatches, or within the whole `tensor`. Exactly `kept_of(density, n)` are kept; of equal magnitudes the lower
    index is. Kept values are sent by the codec `values`, as (batch, kept) or flat; positions in the smallest of the
    forms of `raysim.codecs.positions`, or as `index` says. Density 1 sends no positions.

    >>> packet = TopK(0.5).encode(torch.tensor([[1.0, -2.0, 3.0, -4.0]]))
    >>> packet.decode(), packet.array_bytes
    (tensor([[ 0.,  0.,  3., -4.]]), 9)
    """

    selects: ClassVar[bool] = True

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
            raise ValueError(
                f"`values` must be a codec of dense values, but got {self.values!r}. Lower `density` instead."
            )

    @property
    def random(self) -> bool:
        return self.values.random

    @property
    def kept_share(self) -> float:
        return self.density

    def array_names(self) -> tuple[str, ...]:
        return (*nested_names("values", self.values), *INDEX_ARRAYS)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        shape = tuple(x.shape)
        if self._num_kept(shape) == x.numel():
            return dict(nest("values", self.values.encode(x.reshape(self._kept_shape(shape)), key)))
        return self._encode_sparse(x, key)

    def _encode_sparse(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        """Return the arrays of a packet that keeps less than everything."""
        shape = tuple(x.shape)
        rows = x.reshape(self._rows(shape))
        return self._arrays(shape, *select_with_values(rows, self._num_kept(shape) // len(rows)), key)

    def _arrays(
        self, shape: tuple[int, ...], positions: Tensor, kept: Tensor, key: Key | None
    ) -> dict[str, np.ndarray]:
        arrays = dict(nest("values", self.values.encode(kept.view(self._kept_shape(shape)), key)))
        total = math.prod(shape)
        return arrays | encode_positions(positions, total, self._form(len(positions), total))

    def encode_with_residual(
        self, x: Tensor, dtype: torch.dtype, key: Key | None = None, memory: Tensor | None = None
    ) -> tuple[Packet, Tensor]:
        shape = tuple(x.shape)
        dense = self._num_kept(shape) == x.numel()
        if dense or dtype == torch.float64 or not (kernels.serve(x) or kernels.gpu_serve(x)):
            return super().encode_with_residual(x, dtype, key, memory)
        self._check(shape, key)
        exact = dtype == torch.float32 and self.values == Identity()  # sent values leave no residual
        rows = self._rows(shape)
        if memory is not None and x.dtype == torch.float32 and dtype == torch.float32:
            each = x.detach().reshape(rows), memory.reshape(rows)
            residual, positions, kept = add_and_select(*each, self._num_kept(shape) // rows[0], exact)
        else:
            x = x if memory is None else kernels.added(memory, x)
            if x.dtype != torch.float32:
                return super().encode_with_residual(x, dtype, key)
            residual = x.detach().contiguous().view(rows)  # only sent values change: no pass over the rest
            positions, kept = select_with_values(residual.to(dtype), self._num_kept(shape) // rows[0])
            exact = False
        count_work(2 * x.numel() * dtype.itemsize)  # encoded, and what it decodes to is withheld
        arrays = self._arrays(shape, positions, kept, key)
        packet = Packet(self, arrays, shape, dtype_name(kept))
        if not exact:
            values = packet.part("values", self.values, self._kept_shape(shape)).decode(x.device).float().reshape(-1)
            subtract(residual.view(-1), positions, values)
        return packet, residual.view(shape)

    def _form(self, kept: int, total: int) -> str:
        return smallest_form(kept, total) if self.index == "auto" else self.index

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        kept = self._num_kept(packet.shape)
        values = packet.part("values", self.values, self._kept_shape(packet.shape)).decode(device).reshape(-1)
        if kept == packet.numel:
            return values.view(packet.shape)
        return place(packet, values).view(packet.shape)

    def support(self, packet: Packet, device: torch.device | str = "cpu") -> Support:
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

    Shrinks tensors that are sparse already, such as activations after ReLU. The count is sent in 8 bytes.

    >>> packet = Nonzero().encode(torch.tensor([0.0, 2.0, 0.0, 0.0]))
    >>> packet.decode(), packet.array_bytes
    (tensor([0., 2., 0., 0.]), 13)
    """

    size_varies: ClassVar[bool] = True

    values: Codec = Identity()

    def __post_init__(self) -> None:
        if not isinstance(self.values, Codec):
            raise ValueError(f"`values` must be a codec, but got {self.values!r}.")

    @property
    def random(self) -> bool:
        return self.values.random

    def array_names(self) -> tuple[str, ...]:
        return (*nested_names("values", self.values), "count", *INDEX_ARRAYS)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        if kernels.serve(x) and x.numel():
            return self._encode_native(x.contiguous(), key)
        positions, kept = select_at_least(x.contiguous().view(-1), 0.0)
        packet = self.values.encode(kept, key)  # NaN is not zero, and is found there
        arrays = dict(nest("values", packet), count=np.array([len(positions)], dtype=np.int64).view(np.uint8))
        return arrays | encode_positions(positions, x.numel(), smallest_form(len(positions), x.numel()))

    def _encode_native(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        from raysim.codecs.kernels import select

        bits, total = kernels.bits_of(x), x.numel()
        mask, least = bits.dtype.type(np.iinfo(bits.dtype).max), np.int64(1)
        count = int(select.count_at_least(bits, mask, least))
        values = kernels.empty(count, bits.dtype)
        form = smallest_form(count, total)
        if form == "bitmap":
            bitmap = np.empty(packed_bytes(total, 1), np.uint8)
            select.mark_at_least(bits, mask, least, bitmap, values)
            index = {"bitmap": bitmap}
        else:
            positions = kernels.empty(count, np.int64)
            select.select_at_least(bits, mask, least, positions, values)
            index = encode_positions(torch.from_numpy(positions), total, form)
        packet = self.values.encode(torch.from_numpy(values).view(x.dtype), key)
        return dict(nest("values", packet), count=np.array([count], dtype=np.int64).view(np.uint8)) | index

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        kept = int(packet.bytes_of("count", 8).view(np.int64)[0])
        if not 0 <= kept <= packet.numel:
            raise ValueError(f"A packet of {self!r} holds {kept} of {packet.numel} values.")
        values = packet.part("values", self.values, (kept,)).decode(device)
        return place(packet, values).view(packet.shape)
