"""Codecs that send some values and their positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np

from raysim.codecs import kernels, transfers
from raysim.codecs.base import Codec, Key, NonFiniteError, Packet, dtype_name, nest, nested_names, to_tensor
from raysim.codecs.bits import packed_bytes
from raysim.codecs.dense import Identity
from raysim.codecs.positions import (
    FORMS,
    INDEX_ARRAYS,
    decode_positions,
    elias_fano,
    encode_positions,
    misplaced,
    smallest_form,
)
from raysim.codecs.work import count_work
from raysim.notation import check_choice, check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


def kept_of(density: float, count: int) -> int:
    """Return the number of values that a density keeps of `count`, as in Rudakov et al.: at least one, rounded up.

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

    Of equal magnitudes the lower index is kept. Raises NonFiniteError on NaN or infinity.
    """
    return select_with_values(x, kept)[0]


def select_with_values(x: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Return the flat positions of `select_topk`, and the values there."""
    x = x.contiguous()
    if not x.numel() or not kept:
        return torch.empty(0, dtype=torch.int64, device=x.device), torch.empty(0, dtype=x.dtype, device=x.device)
    if kernels.serve(x):
        return _select_native(x, kept)
    if kernels.gpu_serve(x):
        from raysim.codecs.kernels.triton import select as on_gpu

        return _checked(on_gpu.select_rows(x, kept))
    magnitudes = x.abs()
    greatest = magnitudes.topk(kept, dim=1, sorted=False).values
    if not torch.isfinite(greatest).all():  # NaN and infinity rank above all numbers
        raise NonFiniteError("A tensor to select from holds NaN or infinity.")
    threshold = greatest.amin(dim=1, keepdim=True)
    selected = magnitudes > threshold
    ties = magnitudes == threshold
    room = kept - selected.sum(dim=1, keepdim=True)
    selected |= ties & (ties.cumsum(dim=1) <= room)
    positions = selected.view(-1).nonzero().view(-1)
    return positions, x.view(-1)[positions]


def add_and_select(x: Tensor, memory: Tensor, kept: int, clear: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return x + memory, float32 (rows, length) that kernels serve, and the result of `select_with_values` on it.

    With `clear` the selected values are zero in the sum.
    """
    if not kernels.serve(x):
        from raysim.codecs.kernels.triton import select as on_gpu

        added, selection = on_gpu.add_and_select(x.contiguous(), memory.contiguous(), kept, clear)
        return (added, *_checked(selection))
    total = torch.from_numpy(kernels.empty(x.numel(), np.float32)).view(x.shape)
    return (total, *_select_native(total, kept, (x.contiguous(), memory.contiguous()), clear))


def _checked(selection: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return positions and values of a selection on a GPU, whose flag is set by NaN and infinity."""
    positions, values, bad = selection
    transfers.check(bad, NonFiniteError("A tensor to select from holds NaN or infinity."))
    return positions, values


def _select_native(
    x: Tensor, kept: int, terms: tuple[Tensor, Tensor] | None = None, clear: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the result of `select_with_values` on `x`; with `terms`, their sum is written to `x` first."""
    from raysim.codecs.kernels.select import select_rows

    num_rows, length = x.shape
    bits = kernels.bits_of(x)
    positions, values = kernels.empty(num_rows * kept, np.int64), kernels.empty(num_rows * kept, bits.dtype)
    infinity = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}[x.dtype]
    mask = np.iinfo(bits.dtype).max
    parts = [kernels.opened(part.view(-1).numpy()) for part in (*terms, x)] if terms else [np.empty(0, np.float32)] * 3

    def select(start: int, stop: int) -> bool:
        first, last = start // length, stop // length
        out = slice(first * kept, last * kept)
        shape, limits = (last - first, length, kept), (bits.dtype.type(mask), np.int64(infinity))
        added = parts[0][start:stop], parts[1][start:stop], parts[2][start:stop]
        return bool(select_rows(bits[start:stop], start, *shape, *limits, positions[out], values[out], *added, clear))

    if not all(kernels.in_parts(select, num_rows * length, length)):
        raise NonFiniteError("A tensor to select from holds NaN or infinity.")
    return torch.from_numpy(positions), torch.from_numpy(values).view(x.dtype)


def select_at_least(x: Tensor, floor: float) -> tuple[Tensor, Tensor]:
    """Return the positions, increasing, and the values of flat `x` whose magnitude is at least `floor`; 0 is: above zero.

    NaN and infinity are among them.
    """
    if kernels.serve(x):
        from raysim.codecs.kernels import select

        bits, bound = kernels.bits_of(x), _pattern(floor, x.dtype)
        mask = bits.dtype.type(np.iinfo(bits.dtype).max)
        kept = select.count_at_least(bits, mask, np.int64(bound))
        found, values = kernels.empty(kept, np.int64), kernels.empty(kept, bits.dtype)
        select.select_at_least(bits, mask, np.int64(bound), found, values)
        return torch.from_numpy(found), torch.from_numpy(values).view(x.dtype)
    if kernels.gpu_serve(x):
        from raysim.codecs.kernels.triton import select as on_gpu

        return on_gpu.select_at_least(x, _pattern(floor, x.dtype))
    positions = ((x.abs() >= floor) & (x != 0) | ~torch.isfinite(x)).nonzero().view(-1)
    return positions, x[positions]


def count_at_least(x: Tensor, floor: float) -> int:
    """Return the number of values that `select_at_least` selects."""
    if kernels.serve(x):
        from raysim.codecs.kernels import select

        bits, bound = kernels.bits_of(x), _pattern(floor, x.dtype)
        return int(select.count_at_least(bits, bits.dtype.type(np.iinfo(bits.dtype).max), np.int64(bound)))
    if kernels.gpu_serve(x):
        from raysim.codecs.kernels.triton import select as on_gpu

        return int(on_gpu.count_at_least(x, _pattern(floor, x.dtype)))
    return int(((x.abs() >= floor) & (x != 0) | ~torch.isfinite(x)).sum())


def _pattern(floor: float, dtype: torch.dtype) -> int:
    """Return the bit pattern of a magnitude, at least the smallest above zero; patterns of positive numbers have their order."""
    return max(1, int(kernels.bits_of(torch.tensor([floor]).to(dtype))[0]))


def place(packet: Packet, values: Tensor) -> Tensor:
    """Return the flat tensor of a packet whose index says where `values` lie, zeros elsewhere; raises ValueError."""
    if "bitmap" in packet.arrays and kernels.gpu_serve(values):
        return _expand_on_gpu(packet, values.contiguous())
    if "int32" in packet.arrays or not kernels.serve(values):
        return scatter(decode_positions(packet, len(values), values.device), values, packet.numel)
    from raysim.codecs.kernels import indices

    bits = kernels.opened(kernels.bits_of(values.contiguous()))
    out = kernels.empty(packet.numel, bits.dtype)
    if "bitmap" in packet.arrays:
        bitmap = kernels.opened(packet.bytes_of("bitmap", packed_bytes(packet.numel, 1)))
        right = indices.count_bits(bitmap, packet.numel) == len(values)
        if right:
            indices.expand_bitmap(bitmap, bits, out)
    else:
        low, high, length, width = elias_fano(packet, len(values))
        padded = np.empty(len(low) + 8, np.uint8)
        padded[: len(low)] = low
        right = indices.expand_elias_fano(padded, kernels.opened(high), length, width, bits, out)
    if not right:
        raise misplaced(packet, len(values))
    return torch.from_numpy(out).view(values.dtype)


def _expand_on_gpu(packet: Packet, values: Tensor) -> Tensor:
    from raysim.codecs.kernels.triton import positions as on_gpu

    bitmap = to_tensor(packet.bytes_of("bitmap", packed_bytes(packet.numel, 1)), torch.uint8, values.device)
    out, bad = on_gpu.expand_bitmap(bitmap, values, packet.numel)
    transfers.check(bad, misplaced(packet, len(values)))
    return out


def scatter(positions: Tensor, values: Tensor, numel: int) -> Tensor:
    """Return a flat tensor of zeros with `values` at `positions`, which are distinct and within it.

    On a GPU they may be damaged ones, whose error is still to be raised: nothing is written outside.
    """
    if kernels.serve(values) and values.is_contiguous():
        from raysim.codecs.kernels import indices

        bits = kernels.bits_of(values)
        out = kernels.empty(numel, bits.dtype)
        out.fill(0)
        indices.scatter(positions.numpy(), kernels.opened(bits), out)
        return torch.from_numpy(out).view(values.dtype)
    if kernels.gpu_serve(values):
        from raysim.codecs.kernels.triton import positions as on_gpu

        return on_gpu.scatter(positions, values.contiguous(), numel)
    x = torch.zeros(numel, dtype=values.dtype, device=values.device)
    return x.index_copy_(0, positions, values)


def subtract(x: Tensor, positions: Tensor, values: Tensor) -> None:
    """Subtract `values` from flat float32 `x` at `positions`, which are distinct."""
    if kernels.serve(x):
        from raysim.codecs.kernels import indices

        indices.subtract(positions.numpy(), kernels.opened(values.numpy()), x.numpy())
    else:
        x.index_copy_(0, positions, x[positions] - values)


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
