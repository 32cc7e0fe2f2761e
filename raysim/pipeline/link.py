"""One end of a tensor's link; holds the compressor's state and counts bytes, seconds and errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple, Self

import torch
from torch import Tensor

from raysim.codecs import Identity, Packet, transfers
from raysim.codecs.codec import Support, work_bytes
from raysim.codecs.message import Message, wire_bytes
from raysim.compressors import Compressor, Context, Decision, State, StepFacts
from raysim.pipeline.device import DeviceClock, Moment
from raysim.values import UNNAMED

DIRECTIONS = ("forward", "backward")
EVALUATION_MODES = ("off", "on", "on_direct")
CPU = torch.device("cpu")


@dataclass(slots=True)
class LinkAccount:
    """Totals of one end of a link, in one step or several; squared norms are sums over the measured packets."""

    boundary: int
    direction: str
    sender: bool
    packets: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    codec_s: float = 0.0  # encoding at the sender, decoding at the receiver
    coded_bytes: int = 0  # the amount of work in `codec_s`, see `raysim.codecs.codec`
    sent_norm2: float | None = None  # of the tensors to send
    received_norm2: float | None = None  # of the received tensors
    error_norm2: float | None = None  # of their difference
    peak: float | None = None  # highest of the tensors to send: largest magnitude over root mean square
    memory_norm2: float | None = None  # of the memories of messages, at the end of the step
    decisions: tuple[Decision, ...] = ()  # of an adaptive compressor, at the sender
    tensor: str = UNNAMED  # its name, if several tensors cross the boundary
    exact: bool = False  # whether it holds integers or booleans, which are never compressed

    @property
    def fidelity(self) -> float | None:
        """1 - (squared norm of the errors) / (squared norm of the tensors); None if not measured."""
        return 1 - self.error_norm2 / self.sent_norm2 if self.sent_norm2 and self.error_norm2 is not None else None

    def add(self, other: LinkAccount) -> None:
        """Add the messages, bytes, seconds and norms of another step."""
        self.packets += other.packets
        self.wire_bytes += other.wire_bytes
        self.dense_bytes += other.dense_bytes
        self.codec_s += other.codec_s
        self.add_norms(other.sent_norm2 or 0.0, other.received_norm2 or 0.0, other.error_norm2 or 0.0)

    def add_norms(self, sent: float, received: float, error: float) -> None:
        self.sent_norm2 = (self.sent_norm2 or 0.0) + sent
        self.received_norm2 = (self.received_norm2 or 0.0) + received
        self.error_norm2 = (self.error_norm2 or 0.0) + error


class CodedMessage(NamedTuple):
    """Start and end of the encoding or decoding of a message, and its bytes with and without compression."""

    start: Moment = 0.0
    end: Moment = 0.0
    wire_bytes: int = 0
    dense_bytes: int = 0

    @property
    def codec_s(self) -> float:
        """Seconds of the codec; waits until the GPU has finished."""
        return DeviceClock.between(self.start, self.end)


@dataclass(eq=False)
class Link:
    """The sending or receiving end of a tensor's activations ("forward") or gradients ("backward") at one boundary."""

    compressor: Compressor
    boundary: int
    direction: str
    _: KW_ONLY
    sender: bool
    device: torch.device = CPU
    max_values: int = 1 << 32  # of the largest message; larger ones are refused
    tensor: str = UNNAMED  # its name, if several tensors cross the boundary, see `raysim.values`
    dense_before: int = 0  # before this step tensors are sent uncompressed
    clock: DeviceClock = field(default_factory=lambda: DeviceClock(CPU))  # of the worker, or the link's own

    def __post_init__(self) -> None:
        self.table = self.compressor.table
        self.load({})

    def load(self, state: State) -> None:
        """Load a state, and discard an aborted step."""
        self.state = state
        self._pending: list[State] = []
        self._last_context: Context | None = None  # of the last sent message
        self._last_sparse: Packet | None = None  # of an activation, whose gradient may be sent at its positions
        self._begin()

    def _begin(self) -> None:
        self.account = LinkAccount(self.boundary, self.direction, self.sender, tensor=self.tensor)  # of this step
        self.messages: list[CodedMessage] = []  # of this step

    @contextmanager
    def on(self, device: torch.device) -> Iterator[Self]:
        """Work on a device of the user's training, outside of its autocast, and time on that device."""
        if device != self.device:
            self.device, self.clock = device, DeviceClock(device)
        with torch.autocast(device.type, enabled=False):
            yield self

    def send(self, x: Tensor, context: Context, *, measure: bool = False) -> Message:
        """Return the message of a tensor and update the memory; with `measure`, also measure its peak and the error at the receiver.

        Raises NonFiniteError, without changing the memory, if the tensor holds NaN or infinity.
        """
        start, work = self.clock.mark(), work_bytes()
        dense = context.step < self.dense_before
        packet, changes = (Identity().encode(x), {}) if dense else self.compressor.encode(x, self.state, context)
        message = self.table.pack(self._seen(packet))
        self._count(message, x, start, work)
        if measure and x.numel():
            self.account.peak = max(self.account.peak or 0.0, peak_of(x))
        if dense:
            return message
        if measure and not self.compressor.exact:
            received, _ = self.compressor.decode(packet, self.state, context, self.device)
            arrived, sent = received.double(), x.detach().double()
            self.account.add_norms(*(float(each.square().sum()) for each in (sent, arrived, sent - arrived)))
        self._commit(changes)
        self._last_context = context
        return message

    def receive(self, message: Message, context: Context) -> Tensor:
        """Decode a message, possibly as a read-only view of it, and update the memory; raises ValueError if it is malformed."""
        start, work = self.clock.mark(), work_bytes()
        packet = self._seen(self.unpack(message))
        changes: State = {}
        if context.step < self.dense_before:
            x = packet.decode(self.device)
        else:
            x, changes = self.compressor.decode(packet, self.state, context, self.device)
        self._count(message, x, start, work)
        self._commit(changes)
        return x

    def _count(self, message: Message, x: Tensor, start: Moment, work: int) -> None:
        """Count a message whose coding began at `start`, after `work` bytes of other messages."""
        coded = CodedMessage(start, self.clock.mark(), wire_bytes(message), x.nbytes)
        self.messages.append(coded)
        self.account.packets += 1
        self.account.wire_bytes += coded.wire_bytes
        self.account.dense_bytes += coded.dense_bytes
        self.account.coded_bytes += work_bytes() - work

    def _commit(self, changes: State) -> None:
        if self.compressor.commits_at == "step":
            self._pending.append(changes)
        else:
            self.compressor.commit(self.state, changes)

    def _seen(self, packet: Packet) -> Packet:
        self._last_sparse = packet if packet.codec.selects and self.direction == "forward" else None
        return packet

    def support(self) -> Support:
        """Return the positions in the last message, of a compressor that `selects`."""
        assert self._last_sparse is not None, "the last message had no positions"
        transfers.land()  # a sender's packet may still be in transfer
        return self._last_sparse.codec.support(self._last_sparse, self.device)

    def unpack(self, message: Message) -> Packet:
        """Return the packet of a message; raises ValueError if it is malformed."""
        return self.table.unpack(message, self.max_values)

    def send_evaluation(self, x: Tensor, mode: str, key: int) -> Message:
        """Return the message of a tensor in an evaluation mode, without changing memories or accounts."""
        assert mode in EVALUATION_MODES, mode
        codec = Identity() if mode == "off" else self.compressor.evaluation(mode, self.state)
        return self.table.pack(self._seen(codec.encode(x, key)))

    def receive_evaluation(self, message: Message) -> Tensor:
        """Return the tensor of a message of `send_evaluation`."""
        return self.unpack(message).decode(self.device)

    def end_step(self, facts: StepFacts = StepFacts(), *, measure: bool = False) -> LinkAccount:  # noqa: B008
        """Commit pending changes of the memory, let the compressor adapt, and return the step's account.

        Waits until the GPU has finished.
        """
        account = self.account
        for changes in self._pending:
            self.compressor.commit(self.state, changes)
        self._pending.clear()
        if self._last_context is not None:
            changes, decisions = self.compressor.end_step(self.state, self._last_context, facts)
            self._last_context = None
            self.compressor.commit(self.state, changes)
            account.decisions = tuple(decisions)
        account.codec_s = sum(message.codec_s for message in self.messages)
        kept = [row for key, row in self.state.items() if key >= 0]
        if measure and self.sender and kept:
            account.memory_norm2 = sum(float(row.double().square().sum()) for row in kept)
        self._begin()
        return account


def peak_of(x: Tensor) -> float:
    """Return the largest magnitude of a tensor over its root mean square; 0 for zeros."""
    values = x.detach().double()
    rms = float(values.square().mean().sqrt())
    return float(values.abs().max()) / rms if rms else 0.0
