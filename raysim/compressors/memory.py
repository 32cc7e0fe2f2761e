"""Compressors with a memory of messages: error feedback keeps residuals at the sender, delta methods copies at both ends."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.codecs import Cast, Codec, Identity, Nonzero, Packet, TopK
from raysim.codecs.bits import pack_bits
from raysim.codecs.codec import DTYPES, check_is_codec, dtype_name, nest, nested_names, to_bytes
from raysim.codecs.draws import uniform
from raysim.codecs.message import Entry
from raysim.codecs.positions import select_topk
from raysim.compressors.compressor import Compressor, Context, State
from raysim.compressors.keyed import KEYS, as_rows, memory_keys, recall, recall_residual, remember, remember_residual
from raysim.notation import check_choice, check_flag, check_integer
from raysim.on_demand import torch
from raysim.random import derive_key


@dataclass(frozen=True, repr=False)
class Residual(Compressor):
    """A compressor with a float32 memory per key: the microbatch's `slot`, the `sample`, or the `link`.

    Gradients and activations need different keys. A gradient's residual may be added to another sample's gradient:
    only the sum over samples reaches the weights, so `key="slot"`, the published form, works. Activations belong to
    their sample. With shuffled data, `key="slot"` and `key="link"` add one sample's residual to another sample's
    activation, which acts as noise and may make training collapse. For activations use `key="sample"`, which adds the
    residual in the next epoch and needs memory for every sample, or no feedback at all. A sample that occurs twice in a message
    adds its residual to its first row, and keeps the sum of both rows' new residuals.
    """

    adds_residual: ClassVar[bool] = True

    codec: Codec
    key: str = "slot"

    def __post_init__(self) -> None:
        check_choice("key", self.key, KEYS)
        check_is_codec("codec", self.codec)
        self.codec.check_feedback()

    def remedy(self, direction: str) -> str:
        suited = "sample" if direction == "forward" else "slot"
        if self.key == suited:
            return "Try a milder codec."
        if direction == "forward":
            return "Try `key='sample'`, which keeps a memory for each sample, or no feedback on activations."
        return "Try `key='slot'`, or a milder codec."

    def memory_values(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        slots = {"slot": num_microbatches, "link": 1}.get(self.key, num_samples / max(1, message[0]))
        return round(slots * math.prod(message))


@dataclass(frozen=True, repr=False)
class ErrorFeedback(Residual):
    """Sends C(x + e) and keeps e = x + e - C(x + e) (Seide et al. 2014; on boundaries Rudakov et al. 2023, 2401.07788).

    `key`: the residual is added to the same microbatch `slot` of the next step (as published; with shuffled data row i
    is then another sample), to the next message of the `sample`, or to the next microbatch on the `link` (Optimus-CC's
    lazy propagation). Use "slot" for gradients and "sample" for activations; see `Residual` for the reason.

    >>> x, context = torch.tensor([[4.0, 3.0]]), Context("backward", step=0, epoch=0, microbatch=0, sample_ids=(7,))
    >>> packet, state = ErrorFeedback(TopK(0.5)).encode(x, {}, context)
    >>> packet.decode(), state
    (tensor([[4., 0.]]), {0: tensor([[0., 3.]])})
    """

    carries_support: ClassVar[bool] = True

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        memory = recall_residual(state, self.key, context, x.detach())
        packet, left = self.codec.encode_with_residual(x.detach(), x.dtype, context.key, memory)
        return packet, remember_residual(self.key, context, left)


@dataclass(frozen=True, repr=False)
class NoiseFeedback(Residual):
    """Sends C(x + n), with noise n of the same norm as the last residual: a control experiment for `ErrorFeedback`.

    It separates the effect of the residual's content from that of equally large noise. n is uniform, drawn from the
    message's key. The residual e = x + n - C(x + n) is kept under `key` as in `ErrorFeedback`.

    >>> NoiseFeedback(TopK(0.1), key="sample")
    NoiseFeedback(TopK(0.1), key='sample')
    """

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        withheld = recall_residual(state, self.key, context, x.detach())
        drawn = uniform(derive_key(context.key, "noise"), x.numel(), x.device).sub_(0.5).view(x.shape)
        scale = withheld.double().norm() / drawn.norm() if x.numel() else 0.0
        packet, left = self.codec.encode_with_residual(x.detach(), x.dtype, context.key, (drawn * scale).float())
        return packet, remember_residual(self.key, context, left)


@dataclass(frozen=True, repr=False)
class MixedErrorFeedback(Residual):
    """Splits TopK's budget between the message and the residual (named in Rudakov et al. 2023; our reading, not verified).

    I holds the positions of the ceil(k/2) largest values of x, and J of the floor(k/2) largest of e. Sends x at I plus e at J, or with
    `union` x + e at both. The new e is x + e minus the sent values. Shared positions are sent once, so packets hold up to k values.

    >>> MixedErrorFeedback(TopK(0.1), key="sample")
    MixedErrorFeedback(TopK(0.1), key='sample')
    """

    message_varies: ClassVar[bool] = True

    union: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.codec, TopK):
            raise ValueError(f"`codec` must be a TopK, to split its budget, but got {self.codec!r}.")
        if self.codec.index != "auto":
            raise ValueError(
                f"`index` of the TopK must be 'auto' here, as Nonzero sends positions, but got {self.codec.index!r}."
            )
        check_flag("union", self.union)

    def entries(self) -> tuple[Entry, ...]:
        assert isinstance(self.codec, TopK)
        return (*super().entries(), Entry.of(Nonzero(self.codec.values)))

    def encode(self, x: torch.Tensor, state: State, context: Context) -> tuple[Packet, State]:
        assert isinstance(self.codec, TopK)
        residual = recall_residual(state, self.key, context, x.detach())
        rows, length, kept = self.codec.rows(tuple(x.shape))
        message, held = x.detach().float().reshape(rows, length), residual.reshape(rows, length)
        of_message = select_topk(message, kept - kept // 2)
        of_residual = select_topk(held, kept // 2)
        wanted = message + held
        sent = torch.zeros_like(wanted).view(-1)
        if self.union:
            both = torch.cat([of_message, of_residual])
            sent[both] = wanted.view(-1)[both]
        else:
            sent[of_message] += message.view(-1)[of_message]
            sent[of_residual] += held.view(-1)[of_residual]
        packet = Nonzero(self.codec.values).encode(sent.view(x.shape).to(x.dtype), context.key)
        left = wanted.view(x.shape) - packet.decode(x.device)
        return packet, remember_residual(self.key, context, left)


@dataclass(frozen=True, repr=False)
class LinkEF21(Residual):
    """Sends C(x - h) and adds it to h at both ends; the receiver uses h (Richtarik et al. 2021, 2106.05203).

    h starts at zero and is kept in float32 under `key`: microbatch `slot`, `sample` or `link`. The difference is sent
    in the dtype of x.

    >>> from raysim.codecs import TopK
    >>> method, x = LinkEF21(TopK(0.5)), torch.tensor([[4.0, 3.0]])
    >>> context = Context("forward", step=0, epoch=0, microbatch=0, sample_ids=(7,))
    >>> sender, receiver = {}, {}
    >>> for _ in range(2):  # the same tensor twice: the second packet sends the remainder
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
        # a copy, since the receiver's layers may write to it
        return reference.to(delta.dtype, copy=True), remember(self.key, context, reference)


@dataclass(frozen=True, repr=False)
class AQSGD(Compressor):
    """Sends C(a - m), where m is a copy of the same sample's last message (Wang et al. 2022, 2206.01299, AQ-SGD).

    All messages of the first `warmup` epochs, and each sample's first message after them, are dense; with `first="compressed"` that
    first message is C(a). The receiver uses m, stored as `dtype` ("float32" or "bfloat16") at both ends. `key="slot"` keeps a copy
    per microbatch slot instead. Copies take effect at the end of the step. `capacity` limits the number of copies: both ends evict
    the least recently used one.

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
        check_is_codec("codec", self.codec)
        self.codec.check_feedback()

    @property
    def message_varies(self) -> bool:  # type: ignore[override]
        """True if some messages are sent uncompressed."""
        return self.warmup > 0 or self.first == "dense"

    @property
    def warmup_epochs(self) -> int:  # type: ignore[override]
        """Number of epochs in which all messages are sent uncompressed."""
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
        return packet, self._changes(self._copies(packet, state, context, x.device), context)

    def decode(
        self, packet: Packet, state: State, context: Context, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, State]:
        stored = self._copies(packet, state, context, device)
        return stored.to(DTYPES[packet.dtype], copy=True), self._changes(stored, context)

    def _copies(self, packet: Packet, state: State, context: Context, device: torch.device | str) -> torch.Tensor:
        """Return the copies of a message's rows after its packet, in the dtype in which they are stored."""
        keys = memory_keys(self.key, context)
        row_shape = packet.shape[1:]
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
        return copies.to(DTYPES[self.dtype])

    def _changes(self, stored: torch.Tensor, context: Context) -> State:
        return remember(self.key, context, stored, DTYPES[self.dtype])

    def commit(self, state: State, changes: State) -> None:
        for key, copy in changes.items():
            state.pop(key, None)  # keeps the dict in order of last use
            state[key] = copy
        while self.capacity is not None and len(state) > self.capacity:
            state.pop(next(iter(state)))

    def evaluation(self, mode: str, state: State) -> Codec:
        """Return for "on" the codec of first messages, as test samples have no reference, and for "on_direct" the codec."""
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
        """Return which rows are first visits, from the bitmap if rows are mixed, else from the arrays in the packet."""
        if "first" in packet.arrays:
            return packet.fields_of("first", num_rows, 1, device).bool()
        dense = any(name.startswith("dense.") for name in packet.arrays)
        return torch.full((num_rows,), dense, device=device)
