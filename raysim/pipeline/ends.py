"""One end of one direction of a boundary: a link for each of its tensors, whose packets share a message."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from raysim.codecs import derive_key
from raysim.codecs.bundle import bundle, unbundle
from raysim.codecs.message import Message, wire_bytes
from raysim.compressors import Compressor, Context
from raysim.pipeline.device import DeviceClock, Moment
from raysim.pipeline.link import Link, LinkAccount
from raysim.values import UNNAMED, Boundary, Value, join, sent_bytes, split


class BoundaryEnd:
    """The sending or receiving end of the activations ("forward") or gradients ("backward") at one boundary.

    `compressors`: of the tensors of floating-point numbers, by name. `crossing`: the tensors of a microbatch. `microbatches`: in
    the largest message; one that claims more values is refused.
    """

    def __init__(
        self,
        compressors: Mapping[str, Compressor],
        boundary: int,
        direction: str,
        crossing: Boundary,
        *,
        sender: bool,
        device: torch.device,
        microbatches: int,
        clock: DeviceClock | None = None,
    ) -> None:
        self.boundary = boundary
        self.direction = direction
        self.sender = sender
        self.device = device
        self.clock = clock or DeviceClock(device)
        self.links = {
            name: Link(
                compressors[name],
                boundary,
                direction,
                sender=sender,
                device=device,
                max_values=microbatches * math.prod(shape),
                tensor=name,
                clock=self.clock,
            )
            for name, shape in crossing.shapes.items()
        }
        self._named = UNNAMED not in self.links
        self._exact = list(crossing.exact_bytes) if direction == "forward" else []
        self._most_exact = microbatches * 8 * max(crossing.exact_bytes.values(), default=0)
        self.last_coded: tuple[Moment, Moment] = (0.0, 0.0)  # when the last message was begun and done
        self.last_wire_bytes = 0
        self.last_dense_bytes = 0
        self._beside = self._empty_accounts()
        self._coded: list[tuple[Moment, Moment]] = []  # of the exact tensors of the step

    def send(self, value: Value, context_of: Callable[[Link], Context], *, measure: bool = False) -> Message:
        """Return the message of a value; see `Link.send`."""
        floats, exact = split(value)
        start = self.clock.mark()
        messages = {
            name: self.links[name].send(x, context_of(self.links[name]), measure=measure) for name, x in floats.items()
        }
        middle = self.clock.mark() if exact else start
        message = bundle(messages, exact)
        end = self.clock.mark()
        self._add(message, messages, exact, (start, end), (middle, end))
        return message

    def receive(self, message: Message, context_of: Callable[[Link], Context]) -> Value:
        """Return the value of a message; see `Link.receive`."""
        start = self.clock.mark()
        messages, exact = self.messages(message)
        middle = self.clock.mark() if exact else start
        floats = {
            name: self.links[name].receive(inner, context_of(self.links[name])) for name, inner in messages.items()
        }
        self._add(message, messages, exact, (start, self.clock.mark()), (start, middle))
        return join(floats, exact)

    def messages(self, message: Message) -> tuple[dict[str, Message], dict[str, Tensor]]:
        """Return the messages of the packets and the exact tensors of a message, by name; raises ValueError for others."""
        if not self._named:
            return {UNNAMED: message}, {}
        messages, exact = unbundle(message, self._most_exact, self.device)
        if messages.keys() != self.links.keys() or exact.keys() != set(self._exact):
            raise ValueError(
                f"A message at boundary {self.boundary}, {self.direction}, must hold {', '.join([*self.links, *self._exact])}, "
                f"but holds {', '.join([*messages, *exact])}."
            )
        return messages, exact

    def send_evaluation(self, value: Value, mode: str, key: int) -> Message:
        """Return the message of a value in an evaluation mode; see `Link.send_evaluation`."""
        floats, exact = split(value)
        keys = {name: derive_key(key, name) if name else key for name in floats}
        return bundle(
            {name: self.links[name].send_evaluation(x, mode, keys[name]) for name, x in floats.items()}, exact
        )

    def receive_evaluation(self, message: Message) -> Value:
        """Return the value of a message of `send_evaluation`."""
        messages, exact = self.messages(message)
        return join({name: self.links[name].receive_evaluation(inner) for name, inner in messages.items()}, exact)

    def take_accounts(self, of_links: Iterable[LinkAccount]) -> list[LinkAccount]:
        """Return the accounts of the step, of links and of exact tensors."""
        codec_s = sum(DeviceClock.between(*moments) for moments in self._coded)
        beside = list(self._beside.values())
        if beside:  # bits are packed for all of them together
            beside[0] = beside[0]._replace(codec_s=codec_s)
        self.begin()
        return [*of_links, *beside]

    def begin(self) -> None:
        """Forget the exact tensors of a step that ended or broke off."""
        self._beside = self._empty_accounts()
        self._coded.clear()

    def _add(
        self,
        message: Message,
        messages: Mapping[str, Message],
        exact: Mapping[str, Tensor],
        coded: tuple[Moment, Moment],
        coded_exact: tuple[Moment, Moment],
    ) -> None:
        sizes = {name: sent_bytes(x) for name, x in exact.items()}
        header_bytes = wire_bytes(message) - sum(map(wire_bytes, messages.values())) - sum(sizes.values())
        next(iter(self.links.values())).add_header(header_bytes)
        for name, size in sizes.items():
            account = self._beside[name]
            self._beside[name] = account._replace(
                packets=account.packets + 1,
                wire_bytes=account.wire_bytes + size,
                dense_bytes=account.dense_bytes + size,
            )
        if exact:
            self._coded.append(coded_exact)
        self.last_coded = coded
        self.last_wire_bytes = wire_bytes(message)
        self.last_dense_bytes = (
            sum(link.last_dense_bytes for link in self.links.values()) + sum(sizes.values()) + header_bytes
        )

    def _empty_accounts(self) -> dict[str, LinkAccount]:
        return {
            name: LinkAccount(self.boundary, self.direction, self.sender, tensor=name, exact=True)
            for name in self._exact
        }
