"""One end of the link of a tensor: it holds the compressor's state and counts bytes, seconds and errors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raysim.codecs import Identity, Packet
from raysim.codecs.codec import work_bytes
from raysim.codecs.message import Message, wire_bytes
from raysim.compressors import Compressor, Context, Decision, State
from raysim.pipeline.device import DeviceClock, Moment
from raysim.values import UNNAMED

EVALUATION_MODES = ("off", "on", "on_direct")


class LinkAccount(NamedTuple):
    """Totals of one end of a link in one step; squared norms are sums over the measured packets."""

    boundary: int
    direction: str
    sender: bool
    packets: int = 0
    wire_bytes: int = 0
    dense_bytes: int = 0
    codec_s: float = 0.0  # encoding at the sender, decoding at the receiver
    coded_bytes: int = 0  # the work of that, see `raysim.codecs.codec`
    sent_norm2: float | None = None  # of the tensors to send
    received_norm2: float | None = None  # of the tensors that arrive
    error_norm2: float | None = None  # of their difference
    memory_norm2: float | None = None  # of the compressor's memories of messages, at the end of the step
    decisions: tuple[Decision, ...] = ()  # of an adaptive compressor, at the sender
    tensor: str = UNNAMED  # its name, if several tensors cross the boundary
    exact: bool = False  # whether it holds integers or booleans, which are never compressed


class Link:
    """The sending or receiving end of a tensor's activations ("forward") or gradients ("backward") at one boundary.

    `max_values`: of the largest message; larger ones are refused. `tensor`: its name, if several tensors cross the boundary, see
    `raysim.values`. `dense_before`: the step before which tensors are sent as they are. `clock`: of the worker; by default the link has
    its own.
    """

    def __init__(
        self,
        compressor: Compressor,
        boundary: int,
        direction: str,
        *,
        sender: bool,
        device: torch.device,
        max_values: int = 1 << 32,
        tensor: str = UNNAMED,
        dense_before: int = 0,
        clock: DeviceClock | None = None,
    ) -> None:
        self.compressor = compressor
        self.table = compressor.table
        self.max_values = max_values
        self.tensor = tensor
        self.dense_before = dense_before
        self.boundary = boundary
        self.direction = direction
        self.sender = sender
        self.state: State = {}
        self.clock = clock or DeviceClock(device)
        self._shares_clock = clock is not None
        self.device = device
        self.last_coded: tuple[Moment, Moment] = (0.0, 0.0)  # start and end of the codec, for the last message
        self.last_wire_bytes = 0
        self.last_dense_bytes = 0
        self._coded: list[tuple[Moment, Moment]] = []  # the same for all messages of the step
        self._pending: list[State] = []
        self._last_context: Context | None = None  # of the last sent message
        self._account = self._empty_account()

    @property
    def device(self) -> torch.device:
        """The device on which messages are decoded; a link with its own clock gets a new one for a new device."""
        return self._device

    @device.setter
    def device(self, device: torch.device) -> None:
        self._device = device
        if not self._shares_clock and device != self.clock.device:
            self.clock = DeviceClock(device)

    def send(self, x: Tensor, context: Context, *, measure: bool = False) -> Message:
        """Return the message of a tensor and update the memory; with `measure`, also measure the error at the receiver.

        Raises NonFiniteError if the tensor holds NaN or infinity; the memory does not change then.
        """
        start, work = self.clock.mark(), work_bytes()
        dense = context.step < self.dense_before
        packet, changes = (Identity().encode(x), {}) if dense else self.compressor.encode(x, self.state, context)
        message = self.table.pack(packet)
        self._add(wire_bytes(message), x.nbytes, start, work_bytes() - work)
        if dense:
            return message
        if measure and not self.compressor.exact:
            received, _ = self.compressor.decode(packet, self.state, context, self.device)
            self._measure(x.detach().double(), received.double())
        self._commit(changes)
        self._last_context = context
        return message

    def receive(self, message: Message, context: Context) -> Tensor:
        """Return the tensor of a message, which may be a read-only view of it, and update the memory.

        Raises ValueError if the message is malformed.
        """
        start, work = self.clock.mark(), work_bytes()
        packet = self.unpack(message)
        changes: State = {}
        if context.step < self.dense_before:
            x = packet.decode(self.device)
        else:
            x, changes = self.compressor.decode(packet, self.state, context, self.device)
        self._add(wire_bytes(message), x.nbytes, start, work_bytes() - work)
        self._commit(changes)
        return x

    def add_header(self, num_bytes: int) -> None:
        """Count the header of the bundle around the message, with and without compression."""
        account = self._account
        self._account = account._replace(
            wire_bytes=account.wire_bytes + num_bytes, dense_bytes=account.dense_bytes + num_bytes
        )

    @property
    def last_codec_s(self) -> float:
        """The codec's seconds for the last message; waits until the GPU has finished."""
        return DeviceClock.between(*self.last_coded)

    def unpack(self, message: Message) -> Packet:
        """Return the packet of a message; raises ValueError if it is malformed."""
        return self.table.unpack(message, self.max_values)

    def send_evaluation(self, x: Tensor, mode: str, key: int) -> Message:
        """Return the message of a tensor in an evaluation mode, without any change to memories and accounts."""
        assert mode in EVALUATION_MODES, mode
        codec = Identity() if mode == "off" else self.compressor.evaluation(mode, self.state)
        return self.table.pack(codec.encode(x, key))

    def receive_evaluation(self, message: Message) -> Tensor:
        """Return the tensor of a message of `send_evaluation`."""
        return self.unpack(message).decode(self.device)

    def load(self, state: State) -> None:
        """Load a state, and forget everything of a step that broke off."""
        self.state = state
        self._pending.clear()
        self._coded.clear()
        self._last_context = None
        self._account = self._empty_account()

    def end_step(
        self,
        *,
        measure: bool = False,
        step_s: float | None = None,
        floor: float | None = None,
        sensitivity: float | None = None,
        batch_size: int = 1,
    ) -> LinkAccount:
        """Commit the changes that wait for the end of the step, let the compressor decide, and return the step's account.

        Waits until the GPU has finished. `step_s`, `floor`, `sensitivity`: of the step before, see `Context`. `batch_size`: over all
        replicas.
        """
        for changes in self._pending:
            self.compressor.commit(self.state, changes)
        self._pending.clear()
        if self._last_context is not None:
            context = self._last_context._replace(
                step_s=step_s, floor=floor, sensitivity=sensitivity, batch_size=batch_size
            )
            self._last_context = None
            changes, decisions = self.compressor.end_step(self.state, context)
            self.compressor.commit(self.state, changes)
            self._account = self._account._replace(decisions=tuple(decisions))
        codec_s = sum(DeviceClock.between(*moments) for moments in self._coded)
        self._coded.clear()
        account, self._account = self._account._replace(codec_s=codec_s), self._empty_account()
        if measure and self.sender and self.state:
            account = account._replace(
                memory_norm2=sum(float(row.double().square().sum()) for key, row in self.state.items() if key >= 0)
            )
        return account

    def _commit(self, changes: State) -> None:
        if self.compressor.commits_at == "step":
            self._pending.append(changes)
        else:
            self.compressor.commit(self.state, changes)

    def _add(self, num_bytes: int, dense_bytes: int, start: Moment, work: int) -> None:
        self.last_coded = start, self.clock.mark()
        self._coded.append(self.last_coded)
        self.last_wire_bytes, self.last_dense_bytes = num_bytes, dense_bytes
        account = self._account
        self._account = account._replace(
            packets=account.packets + 1,
            wire_bytes=account.wire_bytes + num_bytes,
            dense_bytes=account.dense_bytes + dense_bytes,
            coded_bytes=account.coded_bytes + work,
        )

    def _measure(self, sent: Tensor, received: Tensor) -> None:
        account = self._account
        self._account = account._replace(
            sent_norm2=(account.sent_norm2 or 0.0) + float(sent.square().sum()),
            received_norm2=(account.received_norm2 or 0.0) + float(received.square().sum()),
            error_norm2=(account.error_norm2 or 0.0) + float((sent - received).square().sum()),
        )

    def _empty_account(self) -> LinkAccount:
        return LinkAccount(self.boundary, self.direction, self.sender, tensor=self.tensor)
