"""Delta methods: both ends keep a reference copy, and messages carry the compressed difference from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.codecs import Cast, Codec, Identity, Packet
from raysim.codecs.bits import pack_bits, packed_bytes, unpack_bits
from raysim.codecs.codec import DTYPES, check_codec, dtype_name, nest, nested_names, to_bytes, to_tensor
from raysim.codecs.message import Entry
from raysim.compressors.compressor import (
    KEYS,
    Compressor,
    Context,
    State,
    as_rows,
    memory_keys,
    recall,
    remember,
)
from raysim.compressors.feedback import Residual
from raysim.notation import check_choice, check_integer
from raysim.on_demand import torch


@dataclass(frozen=True, repr=False)
class LinkEF21(Residual):
    """Sends C(x - h) and adds it to h at both ends; the receiver uses h (Richtarik et al. 2021, 2106.05203).

    h starts at zero and is kept in float32 under `key`: microbatch `slot`, `sample` or `link`. The difference is sent
    in the dtype of x.

    >>> from raysim.codecs import TopK
    >>> method, x = LinkEF21(TopK(0.5)), torch.tensor([[4.0, 3.0]])
    >>> context = Context("forward", 0, step=0, epoch=0, microbatch=0, sample_ids=(7,))
    >>> sender, receiver = {}, {}
    >>> for _ in range(2):  # the same tensor again: the second packet holds the rest
    ...     packet, changes = method.encode(x, sender, context)
    ...     method.commit(sender, changes)
    ...     received, changes = method.decode(packet, receiver, context)
    ...     method.commit(receiver, changes)
    >>> received
    tensor([[4., 3.]])
    """

    notation: ClassVar[str] = "EF21"
    two_ended: ClassVar[bool] = True

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        reference = recall(state, self.key, context, x.detach())
        packet = self.codec.encode((x.detach() - reference).to(x.dtype), context.key)
        return packet, remember(self.key, context, reference + packet.decode(x.device))

    def decode(
        self, packet: Packet, state: State, context: Context, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, State]:
        delta = packet.decode(device)
        reference = recall(state, self.key, context, delta) + delta
        return reference.to(delta.dtype), remember(self.key, context, reference)


@dataclass(frozen=True, repr=False)
class AQSGD(Compressor):
    """Sends C(a - m) against a copy m of the same sample's last message (Wang et al. 2022, 2206.01299, AQ-SGD).

    All messages of the first `warmup` epochs are sent uncompressed, and so is a sample's first message after them. With
    `first="compressed"` that first message is C(a), to stay within a budget of bytes. The receiver uses the stored m,
    rounded to `dtype` ("float32" or "bfloat16") at both ends. `key="slot"` keeps a copy for each microbatch slot
    instead. Copies take effect when the step ends. `capacity` bounds the number of copies: both ends evict the least
    recently used, and the evicted sample's next message is a first one.

    >>> from raysim.codecs import Quantize
    >>> AQSGD(Quantize(4), capacity=1000)
    AQSGD(Quantize(4), capacity=1000)
    """

    two_ended: ClassVar[bool] = True
    commits_at: ClassVar[str] = "step"
    evaluation_modes: ClassVar[tuple[str, ...]] = ("on", "on_direct")

    codec: Codec
    key: str = "sample"
    warmup: int = 1
    first: str = "dense"
    dtype: str = "float32"
    capacity: int | None = None

    def __post_init__(self) -> None:
        check_choice("key", self.key, KEYS[:2])
        check_choice("first", self.first, ["dense", "compressed"])
        check_choice("dtype", self.dtype, ["float32", "bfloat16"])
        self._coerce(warmup=check_integer("warmup", self.warmup, 0))
        if self.capacity is not None:
            self._coerce(capacity=check_integer("capacity", self.capacity, 1))
        check_codec("codec", self.codec)

    @property
    def message_varies(self) -> bool:  # type: ignore[override]
        """True if some messages are sent dense."""
        return self.warmup > 0 or self.first == "dense"

    @property
    def warmup_epochs(self) -> int:  # type: ignore[override]
        """Epochs whose messages are all sent uncompressed."""
        return self.warmup

    def forgets(self, num_samples: int) -> bool:
        return self.key == "sample" and (self.capacity or num_samples) < num_samples

    def entries(self) -> tuple[Entry, ...]:
        mixed = (*nested_names("dense", self._dense), *nested_names("delta", self.codec), "first")
        return Entry(self.codec, mixed), Entry.of(self.codec), Entry.of(self._dense)  # the last two in evaluations

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        keys, rows = memory_keys(self.key, context), as_rows(x.detach(), self.key)
        first = self._first_visits(state, keys, context).to(x.device)
        row_shape = tuple(x.shape[1:])
        arrays: dict[str, np.ndarray] = {}
        if first.any():
            arrays |= nest("dense", self._dense.encode(rows[first].view(-1, *row_shape)))
        if not first.all():
            moved = as_rows(x.detach() - recall(state, self.key, context, x.detach()), self.key)
            delta = moved.to(x.dtype)[~first].view(-1, *row_shape)
            arrays |= nest("delta", self.codec.encode(delta, context.key))
            if first.any():
                arrays["first"] = to_bytes(pack_bits(first))
        packet = Packet(self.codec, arrays, tuple(x.shape), dtype_name(x))
        return packet, self.decode(packet, state, context, x.device)[1]

    def decode(
        self, packet: Packet, state: State, context: Context, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, State]:
        keys = memory_keys(self.key, context)
        row_shape = packet.shape[1:]
        dtype = DTYPES[self.dtype]
        copies = torch.zeros(packet.shape, device=device)
        rows = as_rows(copies, self.key)
        first = self._marked_first(packet, len(keys), device)
        if first.any():
            shape = (len(rows[first].view(-1, *row_shape)), *row_shape)
            rows[first] = packet.part("dense", self._dense, shape).decode(device).float().view_as(rows[first])
        if not first.all():
            moved = as_rows(recall(state, self.key, context, copies), self.key)[~first]
            delta = packet.part("delta", packet.codec, (len(moved.view(-1, *row_shape)), *row_shape)).decode(device)
            rows[~first] = moved + delta.view_as(moved)
        stored = copies.to(dtype)
        return stored.to(DTYPES[packet.dtype]), remember(self.key, context, stored, dtype)

    def commit(self, state: State, changes: State) -> None:
        for key, copy in changes.items():
            state.pop(key, None)  # the dict's order is the order of last use
            state[key] = copy
        while self.capacity is not None and len(state) > self.capacity:
            state.pop(next(iter(state)))

    def evaluation(self, mode: str, state: State) -> Codec:
        """For "on" return the codec of a first message, as test samples have no reference; for "on_direct" the codec itself."""
        return self._dense if mode == "on" and self.first == "dense" else self.codec

    def memory_values(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        copies, values = (
            (num_microbatches, math.prod(message)) if self.key == "slot" else (num_samples, math.prod(message[1:]))
        )
        return min(copies, self.capacity or copies) * values

    def memory_bytes(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        return DTYPES[self.dtype].itemsize * self.memory_values(message, num_microbatches, num_samples)

    @property
    def _dense(self) -> Codec:
        return Identity() if self.dtype == "float32" else Cast(self.dtype)

    def _first_visits(self, state: State, keys: list[int], context: Context) -> torch.Tensor:
        if context.epoch < self.warmup:
            return torch.ones(len(keys), dtype=torch.bool)
        return torch.tensor([key not in state and self.first == "dense" for key in keys], dtype=torch.bool)

    def _marked_first(self, packet: Packet, num_rows: int, device: torch.device | str) -> torch.Tensor:
        """Return which rows are first visits: by a bitmap if there are both kinds, else by the kind that is there."""
        if "first" in packet.arrays:
            bitmap = packet.bytes_of("first", packed_bytes(num_rows, 1))
            return unpack_bits(to_tensor(bitmap, torch.uint8, device), num_rows)
        dense = any(name.startswith("dense.") for name in packet.arrays)
        return torch.full((num_rows,), dense, device=device)
