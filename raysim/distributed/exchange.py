"""Rounds of a replica method over a torch process group: messages of any size between all pairs of ranks.

Gloo and NCCL need to know the size of a tensor before they receive it. So a message's first part has a size that both ends
know: 8 bytes for its length, and as many bytes as the previous message in its slot had. Any rest follows in a second part. If
sizes do not change from step to step, a round costs one message to each rank and no padding.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist

from raysim.codecs import NonFiniteError
from raysim.codecs.message import CodecTable, Message
from raysim.pipeline.groups import Group, MemberRounds
from raysim.pipeline.messages import Parts
from raysim.replication.method import Rounds

T = TypeVar("T")

_LENGTH = struct.Struct("<q")  # negative if an error sentence replaces the messages
_COUNTS = struct.Struct("<IH")  # header bytes and number of arrays of a message
_ARRAY = np.dtype("<u4")  # bytes of an array
_FIRST = 64  # initial size of first parts in bytes


class ReplicaError(RuntimeError):
    """A replica could not average its gradients; raised identically on all replicas."""


class Channel:
    """Sends bytes between all ranks of a group, and counts the bytes sent by this rank."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes = 0
        self._global = [dist.get_global_rank(group, rank) for rank in range(self.size)]
        self._parts: dict[tuple[Hashable, int, bool], int] = {}  # bytes of first parts, by slot, peer and whether sent

    def swap(self, slot: Hashable, outgoing: Mapping[int, bytes], *, failed: bool = False) -> dict[int, bytes]:
        """Send bytes to every other rank and return the bytes received from each; all ranks call it in the same order.

        `slot` identifies the exchange within a step, so that both ends know its last message sizes. `failed`: the bytes are an
        error sentence. Raises ReplicaError with the sentence of a failed rank.
        """
        others = [rank for rank in range(self.size) if rank != self.rank]
        received, lengths = self._first_parts(slot, outgoing, others, failed)
        rest_out, rest_in = {}, {}
        for other in others:
            rest = outgoing[other][self._part(slot, other, sent=True) :]
            if rest:
                rest_out[other] = np.frombuffer(rest, np.uint8)
            missing = abs(lengths[other]) - len(received[other])
            if missing > 0:
                rest_in[other] = missing
        arrived = self._transfer(rest_out, rest_in)
        for other in others:
            received[other] += arrived.get(other, b"")
            self._parts[slot, other, True] = len(outgoing[other])
            self._parts[slot, other, False] = abs(lengths[other])
        for other in others:
            if lengths[other] < 0:
                raise ReplicaError(received[other].decode())
        return received

    def gather(self, slot: Hashable, values: np.ndarray) -> np.ndarray:
        """Return the values of all ranks, of equal shape, one row each; all ranks call it in the same order, see `swap`.

        A collective of torch would do, but DDP has its own under way, in another order on each rank.
        """
        received = self.swap(slot, {rank: values.tobytes() for rank in range(self.size) if rank != self.rank})
        rows = [received.get(rank, values.tobytes()) for rank in range(self.size)]
        return np.stack([np.frombuffer(row, values.dtype) for row in rows])

    def _first_parts(
        self, slot: Hashable, outgoing: Mapping[int, bytes], others: list[int], failed: bool
    ) -> tuple[dict[int, bytes], dict[int, int]]:
        sending = {}
        for other in others:
            part, data = self._part(slot, other, sent=True), outgoing[other]
            length = _LENGTH.pack(-len(data) if failed else len(data))
            sending[other] = np.frombuffer(length + data[:part].ljust(part, b"\0"), np.uint8)
        sizes = {other: _LENGTH.size + self._part(slot, other, sent=False) for other in others}
        received = self._transfer(sending, sizes)
        lengths = {other: int(_LENGTH.unpack_from(received[other])[0]) for other in others}
        content = {other: received[other][_LENGTH.size :][: abs(lengths[other])] for other in others}
        return content, lengths

    def _part(self, slot: Hashable, other: int, *, sent: bool) -> int:
        return self._parts.get((slot, other, sent), _FIRST)

    def _transfer(self, sending: Mapping[int, np.ndarray], sizes: Mapping[int, int]) -> dict[int, bytes]:
        """Exchange bytes with other ranks; `sizes`: the bytes to receive from each."""
        operations = []
        arriving = {other: torch.empty(size, dtype=torch.uint8, device=self.device) for other, size in sizes.items()}
        for other, buffer in arriving.items():  # posted first: gloo receives only after earlier sends
            operations.append(dist.P2POp(dist.irecv, buffer, self._global[other], self.group))
        for other, data in sending.items():
            outgoing = torch.from_numpy(data.copy()).to(self.device)
            operations.append(dist.P2POp(dist.isend, outgoing, self._global[other], self.group))
            self.sent_bytes += outgoing.numel()
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return {other: data.cpu().numpy().tobytes() for other, data in arriving.items()}


def build_alike(group: dist.ProcessGroup | None, verb: str, build: Callable[[], T], settings: Mapping[str, Any]) -> T:
    """Return the result of `build` on every rank of a group, or in a single process without a group.

    Raises the same ValueError on every rank if `build` raises one on any rank, or if their `settings` differ. `verb` says in
    the error what all ranks must do alike. The error shows the differing values, unless they are mappings.
    """
    if group is None:
        return build()
    built: list[T] = []
    error = None
    try:
        built.append(build())
    except ValueError as refusal:
        error = str(refusal)
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, (error, dict(settings)), group=group)
    for first_error, _ in gathered:
        if first_error is not None:
            raise ValueError(first_error)
    for rank, (_, rank_settings) in enumerate(gathered):
        for field, value in rank_settings.items():
            first = gathered[0][1][field]
            if value != first:
                values = "" if isinstance(value, Mapping) else f": {value} and {first}"
                raise ValueError(
                    f"All ranks must {verb} alike, but {field} differs between ranks {rank} and 0{values}."
                )
    return built[0]


Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of parameters by plain name, in the model's order."""
_WRAPPERS = {"_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_names(names: Iterable[str]) -> dict[str, str]:
    """Map parameter names to those without the modules that torch wraps around others, as in `torch.compile`.

    >>> plain_names(["_orig_mod.layers.0.module.weight"])
    {'_orig_mod.layers.0.module.weight': 'layers.0.weight'}
    """
    plain = {name: ".".join(part for part in name.split(".") if part not in _WRAPPERS) for name in names}
    return plain if len(set(plain.values())) == len(plain) else {name: name for name in plain}


def check_parameters(saved: Shapes, own: Shapes) -> None:
    """Raise ValueError, naming a parameter, if a checkpoint belongs to another model."""
    for name in {**own, **saved}:
        if own.get(name) != saved.get(name):
            here, there = (f"the shape {side[name]}" if name in side else "none" for side in (own, saved))
            raise ValueError(
                f"`model` must have the checkpoint's parameters, but `{name}` has {here} in the model and {there} in the checkpoint."
            )
    if list(saved) != list(own):
        raise ValueError("`model` must have its parameters in the order of the checkpoint.")


def check_same_rank(saved: int | None, own: int) -> None:
    """Raise ValueError if a memory is another rank's; `saved`: its rank, None if there is no memory."""
    if saved not in (None, own):
        raise ValueError(
            f"The state to load must be that of this rank ({own}), whose memory is its own, but is that of rank {saved}."
        )


def overflowed(error: ReplicaError, channel: Channel, parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether only NaN or infinity in gradients made an exchange fail, as before a GradScaler skips a step.

    Called on every rank after an exchange has failed. `parameters`: this rank's, finite unless training has diverged.
    """
    own = error.__context__  # None if another rank failed
    excused = own is None or isinstance(own, NonFiniteError)
    excused = excused and all(bool(parameter.isfinite().all()) for parameter in parameters)
    return bool(channel.gather("overflowed", np.array([excused])).all())


def run_rounds(
    rounds: Rounds[Any], channel: Channel, table: CodecTable, name: Hashable, *, stage: int, num_values: int
) -> MemberRounds:
    """Run all rounds of a method over a channel, and return them with their result.

    `name`, `num_values` and `stage`: name, total number of values and recorded stage of the averaged tensors. Raises
    ReplicaError if the method fails on any rank.
    """
    group = Group(tuple((rank, stage) for rank in range(channel.size)))
    exchange = MemberRounds(group, channel.rank, rounds, table, num_values=num_values)
    others = group.others(channel.rank)
    received: list[Parts] = []
    while True:
        slot = (name, exchange.account.num_rounds)
        try:
            everyone, *each = exchange.advance(received)
        except Exception as error:
            sentence = f"Replica {channel.rank} could not average its gradients: {error}"
            channel.swap(slot, dict.fromkeys(others, sentence.encode()), failed=True)
            raise ReplicaError(sentence) from error
        if exchange.over:
            return exchange
        packed = _packed(everyone)
        arrived = channel.swap(
            slot, {other: packed + _packed(message) for other, message in zip(others, each, strict=True)}
        )
        received = [_unpacked(arrived[other]) for other in others]


def _packed(message: Message | None) -> bytes:
    """Serialise a message: its lengths, then its content; without a message, lengths of 0."""
    header, *arrays = message if message is not None else (b"",)
    lengths = np.array([array.nbytes for array in arrays], _ARRAY).tobytes()
    return b"".join([_COUNTS.pack(len(header), len(arrays)), lengths, header, *(array.data for array in arrays)])


def _unpacked(data: bytes) -> Parts:
    """Parse another rank's message to this rank alone and its message to everyone; None if not sent."""
    messages: list[Message | None] = []
    rest = np.frombuffer(data, np.uint8)
    for _ in range(2):
        header_bytes, count = _COUNTS.unpack_from(rest.data)
        lengths = np.frombuffer(rest, _ARRAY, count, _COUNTS.size)
        content = rest[_COUNTS.size + lengths.nbytes :]
        header, *arrays, rest = np.split(content, np.cumsum([header_bytes, *lengths]))
        messages.append((header.tobytes(), *arrays) if header_bytes else None)
    everyone, own = messages
    return own, everyone
