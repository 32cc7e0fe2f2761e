"""TopK: the values of greatest magnitude, and their positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.codec import Codec, Key, Packet, Support, check_codec, count_work, dtype_name, nest, nested_names
from raysim.codecs.floats import Identity
from raysim.codecs.positions import (
    FORMS,
    INDEX_ARRAYS,
    decode_positions,
    encode_positions,
    expand,
    smallest_form,
    subtract,
)
from raysim.codecs.selection import add_and_select, kept_of, select_with_values
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
    values: Codec = Identity()  # noqa: RUF009  a frozen codec
    index: str = "auto"

    def __post_init__(self) -> None:
        self._coerce(density=check_real("density", self.density, 0, 1, open_low=True))
        check_choice("per", self.per, ["sample", "tensor"])
        check_choice("index", self.index, ["auto", *FORMS])
        check_codec("values", self.values)
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
        rows, length, kept = self._rows(tuple(x.shape))
        if kept == length:
            return dict(nest("values", self.values.encode(x.reshape(rows, kept), key)))
        return self._arrays(*select_with_values(x.reshape(rows, length), kept), tuple(x.shape), key)

    def _arrays(
        self, positions: Tensor, values: Tensor, shape: tuple[int, ...], key: Key | None
    ) -> dict[str, np.ndarray]:
        """Return the arrays of selected values and their positions."""
        rows, _, kept = self._rows(shape)
        sent = nest("values", self.values.encode(values.view(rows, kept), key))
        total = math.prod(shape)
        form = smallest_form(len(positions), total) if self.index == "auto" else self.index
        return {**sent, **encode_positions(positions, total, form)}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        rows, length, kept = self._rows(packet.shape)
        values = packet.part("values", self.values, (rows, kept)).decode(device)
        return (values if kept == length else expand(packet, values.reshape(-1))).view(packet.shape)

    def support(self, packet: Packet, device: torch.device | str = "cpu") -> Support:
        rows, length, kept = self._rows(packet.shape)
        all_sent = kept == length
        positions = (
            torch.arange(rows * kept, device=device) if all_sent else decode_positions(packet, rows * kept, device)
        )
        return Support(positions.view(rows, kept), packet.shape)

    def _rows(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the number of rows whose values compete, their length, and how many values each keeps."""
        rows = 1 if self.per == "tensor" or not shape else shape[0]
        length = math.prod(shape) // max(1, rows)
        return rows, length, kept_of(self.density, length) if rows * length else 0

    def encode_with_residual(
        self, x: Tensor, dtype: torch.dtype, key: Key | None = None, memory: Tensor | None = None
    ) -> tuple[Packet, Tensor]:
        """Like `Codec.encode_with_residual`, without its pass over unsent values."""
        shape = tuple(x.shape)
        rows, length, kept = self._rows(shape)
        if kept == length or dtype == torch.float64 or kernels.backend("select", x) is None:
            return super().encode_with_residual(x, dtype, key, memory)
        self._check(shape, key)
        float32 = x.dtype == dtype == torch.float32
        exact = float32 and memory is not None and self.values == Identity()  # sent values leave no residual
        if float32 and memory is not None:
            terms = x.detach().reshape(rows, length), memory.reshape(rows, length)
            residual, positions, values = add_and_select(*terms, kept, clear=exact)
        else:
            x = x if memory is None else kernels.added(memory, x)
            if x.dtype != torch.float32:
                return super().encode_with_residual(x, dtype, key)
            residual = x.detach().contiguous().view(rows, length)
            positions, values = select_with_values(residual.to(dtype), kept)
        count_work(2 * x.numel() * dtype.itemsize)  # encoded, and the decoded values are withheld
        packet = Packet(self, self._arrays(positions, values, shape, key), shape, dtype_name(values))
        if not exact:
            sent = packet.part("values", self.values, (rows, kept)).decode(x.device).float().reshape(-1)
            subtract(residual.view(-1), positions, sent)
        return packet, residual.view(shape)
