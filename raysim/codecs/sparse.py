"""TopK and RandomK: keep the largest magnitudes, or random positions drawn at both ends."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.codec import (
    Codec,
    Key,
    Packet,
    Support,
    cast_saturating,
    check_finite,
    check_is_codec,
    count_work,
    dtype_name,
    integer_bytes,
    nest,
    nested_names,
)
from raysim.codecs.draws import ranks
from raysim.codecs.floats import Identity
from raysim.codecs.positions import (
    FORMS,
    INDEX_ARRAYS,
    decode_positions,
    encode_positions,
    expand,
    kept_of,
    not_finite,
    scatter,
    select_topk,
    select_with_values,
    smallest_form,
    subtract,
)
from raysim.notation import check_choice, check_flag, check_real
from raysim.on_demand import torch


@dataclass(frozen=True, repr=False)
class ByRow(Codec):
    """Base of codecs that keep the share `density` of each row: of a `sample` (all axes but the first), or of the `tensor`."""

    selects: ClassVar[bool] = True

    density: float
    per: str = "sample"
    values: Codec = Identity()  # noqa: RUF009  a frozen codec

    def __post_init__(self) -> None:
        self._coerce(density=check_real("density", self.density, 0, 1, open_low=True))
        check_choice("per", self.per, ["sample", "tensor"])
        check_is_codec("values", self.values)

    @property
    def kept_share(self) -> float:
        return self.density

    def rows(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the number of rows, their length, and the number of values kept per row."""
        rows = 1 if self.per == "tensor" or not shape else shape[0]
        length = math.prod(shape) // max(1, rows)
        return rows, length, kept_of(self.density, length) if rows * length else 0


@dataclass(frozen=True, repr=False)
class TopK(ByRow):
    """Keeps the share `density` of values with the largest magnitudes (Rudakov et al. 2023, 2401.07788).

    Values compete within a `sample` (all axes but the first), so the result does not depend on how a batch is split
    into microbatches, or within the whole `tensor`. Exactly `kept_of(density, n)` are kept; ties keep the lower index.
    Kept values are sent by the codec `values`, as (batch, kept) or flat, and positions in the form `index`, by default
    the smallest form of `raysim.codecs.positions`. Density 1 sends no positions.

    >>> packet = TopK(0.5).encode(torch.tensor([[1.0, -2.0, 3.0, -4.0]]))
    >>> packet.decode(), packet.array_bytes
    (tensor([[ 0.,  0.,  3., -4.]]), 9)
    """

    index: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("index", self.index, ["auto", *FORMS])
        if isinstance(self.values, TopK):
            raise ValueError(
                f"`values` must be a codec of dense values, but got {self.values!r}. Lower `density` instead."
            )

    def rehearsed(self) -> tuple[Codec, ...]:
        forms = FORMS if self.index == "auto" else (self.index,)
        return tuple(replace(self, density=0.5, index=form) for form in forms)

    def array_names(self) -> tuple[str, ...]:
        return (*nested_names("values", self.values), *INDEX_ARRAYS)

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        rows, length, kept = self.rows(tuple(x.shape))
        if kept == length:
            return nest("values", self.values.encode(x.reshape(rows, kept), key))
        return self._arrays(*select_with_values(x.reshape(rows, length), kept), tuple(x.shape), key)

    def _arrays(
        self, positions: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...], key: Key | None
    ) -> dict[str, np.ndarray]:
        """Return the arrays of selected values and their positions."""
        rows, length, kept = self.rows(shape)
        form = smallest_form(rows * kept, rows * length) if self.index == "auto" else self.index
        sent = nest("values", self.values.encode(values.view(rows, kept), key))
        return sent | encode_positions(positions, rows * length, form)

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        rows, length, kept = self.rows(packet.shape)
        values = packet.part("values", self.values, (rows, kept)).decode(device)
        return (values if kept == length else expand(packet, values.reshape(-1))).view(packet.shape)

    def support(self, packet: Packet, device: torch.device | str = "cpu") -> Support:
        rows, length, kept = self.rows(packet.shape)
        count = rows * kept
        positions = torch.arange(count, device=device) if kept == length else decode_positions(packet, count, device)
        return Support(positions.view(rows, kept), packet.shape)

    def encode_with_residual(
        self, x: torch.Tensor, dtype: torch.dtype, key: Key | None = None, memory: torch.Tensor | None = None
    ) -> tuple[Packet, torch.Tensor]:
        """Like `Codec.encode_with_residual`, but without a pass over unsent values."""
        shape = tuple(x.shape)
        rows, length, kept = self.rows(shape)
        if kept == length or dtype == torch.float64 or kernels.find("select.select_rows", x) is None:
            return super().encode_with_residual(x, dtype, key, memory)
        self._check(shape, key)
        float32 = x.dtype == dtype == torch.float32
        exact = float32 and memory is not None and self.values == Identity()  # sent values leave no residual
        if float32 and memory is not None:
            terms = x.detach().reshape(rows, length).contiguous(), memory.reshape(rows, length).contiguous()
            residual, positions, values = kernels.find("select.add_and_select", x)(*terms, kept, exact, not_finite())
        else:
            x = x if memory is None else kernels.added(memory, x)
            if x.dtype != torch.float32:
                return super().encode_with_residual(x, dtype, key)
            residual = x.detach().contiguous().view(rows, length)
            positions, values = select_with_values(residual.to(dtype), kept)
        count_work(2 * x.numel() * dtype.itemsize)  # one pass to encode, one to subtract the decoded values
        packet = Packet(self, self._arrays(positions, values, shape, key), shape, dtype_name(values))
        if not exact:
            sent = packet.part("values", self.values, (rows, kept)).decode(x.device).float().reshape(-1)
            subtract(residual.view(-1), positions, sent)
        return packet, residual.view(shape)


@dataclass(frozen=True, repr=False)
class RandomK(ByRow):
    """Keeps the share `density` of values at random positions, drawn from each key without replacement (Stich et al. 2018,
    1809.07599).

    The packet carries the key in 8 bytes in place of indices. Positions are drawn within each `sample`, or the whole `tensor`.
    C contracts, as error feedback requires: E||x - C(x)||^2 = (1 - k/n)||x||^2. `unbiased=True` multiplies by n/k, so that the
    mean over keys is x, with variance (n/k - 1)||x||^2; residuals of error feedback would then grow without bound.

    >>> packet = RandomK(0.25).encode(torch.arange(1.0, 9.0).view(2, 4), key=3)
    >>> packet.decode().count_nonzero(dim=1), packet.array_bytes
    (tensor([1, 1]), 16)
    """

    unbiased: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("unbiased", self.unbiased)

    @property
    def random(self) -> bool:
        return True

    @property
    def scales(self) -> bool:
        return self.unbiased

    @property
    def linear(self) -> bool:
        return self.values == Identity()

    def relative_variance(self, numel: int) -> float | None:
        if not self.unbiased or self.values != Identity():
            return None
        return numel / kept_of(self.density, numel) - 1

    @property
    def expands(self) -> bool:
        return self.unbiased and self.density <= 0.5

    def draw(self, key: Key, shape: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
        """Return the flat positions kept under a key; a lower density keeps a subset of those of a higher density."""
        rows, length, kept = self.rows(shape)
        # the positions of the largest random numbers are a uniform subset; ties keep the first
        return select_topk(ranks(key, rows * length, device).view(rows, length), kept)

    def array_names(self) -> tuple[str, ...]:
        return (*nested_names("values", self.values), "key")

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        rows, _, kept = self.rows(tuple(x.shape))
        values = x.reshape(-1)[self.draw(key or 0, tuple(x.shape), x.device)].view(rows, kept)
        return nest("values", self.values.encode(values, key)) | {"key": integer_bytes(key or 0)}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        rows, length, kept = self.rows(packet.shape)
        positions = self.support(packet, device).positions.view(-1)
        values = packet.part("values", self.values, (rows, kept)).decode(device).reshape(-1)
        if self.unbiased and kept:
            values = cast_saturating(values.double() * (length / kept), values.dtype)
        return scatter(positions, values, packet.numel).view(packet.shape)

    def support(self, packet: Packet, device: torch.device | str = "cpu") -> Support:
        rows, _, kept = self.rows(packet.shape)
        return Support(self.draw(packet.integer_of("key"), packet.shape, device).view(rows, kept), packet.shape)
