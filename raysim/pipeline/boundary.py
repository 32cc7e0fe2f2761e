"""One side of the boundary between two stages; sends and receives the messages across it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from raysim.codecs import NonFiniteError, derive_key
from raysim.codecs.codec import DTYPES, Support
from raysim.codecs.message import Message, bundle, unbundle, wire_bytes
from raysim.compressors import Context, StepFacts
from raysim.pipeline.device import DeviceClock
from raysim.pipeline.errors import DivergedError
from raysim.pipeline.link import DIRECTIONS, CodedMessage, Link, LinkAccount
from raysim.pipeline.plan import Plan
from raysim.pipeline.reports import StepFeedback, link_name
from raysim.pipeline.state import pack_state, under, unpack_state
from raysim.schedules.actions import Action, phase
from raysim.values import UNNAMED, Value, exact, floats, sent_bytes


class Boundary:
    """One side of boundary `index`, between stages `index` and `index + 1`; `stage` is the stage on this side.

    The earlier stage sends activations and receives gradients, the later stage does the reverse. Each floating-point tensor has
    a link in each direction: `outgoing` and `incoming`, by the tensor's name. All tensors of a microbatch share one message.
    """

    def __init__(
        self,
        plan: Plan,
        replica: int,
        index: int,
        stage: int,
        device: torch.device,
        clock: DeviceClock,
    ) -> None:
        self.plan = plan
        self.replica = replica
        self.index = index
        self.device = device
        self.clock = clock
        self._tensors = plan.boundaries[index]
        self.sends, self.receives = DIRECTIONS if stage == index else DIRECTIONS[::-1]
        # of the largest message: in an evaluation, or of stages that send several `copies`
        microbatches = 2 * plan.config.batch_size // plan.config.microbatch_size
        by_direction = {
            direction: {
                name: Link(
                    plan.compressors[replica][index][name][i],
                    index,
                    direction,
                    sender=direction == self.sends,
                    device=device,
                    max_values=microbatches * math.prod(shape),
                    tensor=name,
                    dense_before=plan.config.compress_from,
                    clock=clock,
                )
                for name, shape in self._tensors.shapes.items()
            }
            for i, direction in enumerate(DIRECTIONS)
        }
        self.outgoing, self.incoming = by_direction[self.sends], by_direction[self.receives]
        self.links = [link for links in by_direction.values() for link in links.values()]
        self._most_exact = microbatches * 8 * max(self._tensors.exact_bytes.values(), default=0)
        self._sending = {"forward": (index, "F"), "backward": (index + 1, "B")}  # stage and op of the sending actions
        self._phases = {
            action: phase(row, i)
            for row in plan.rows
            for i, action in enumerate(row)
            if action[:2] in self._sending.values()
        }
        self.last_sent = CodedMessage()

    def begin(self) -> None:
        """Begin a step: discard the positions and accounts of a finished or aborted step."""
        self._supports: dict[tuple[int, str], Support] = {}  # by microbatch and tensor
        self._exact_accounts = {
            name: LinkAccount(self.index, "forward", self.sends == "forward", tensor=name, exact=True)
            for name in self._tensors.exact_bytes
        }
        self._exact_coded: list[CodedMessage] = []

    def warm(self) -> None:
        """Compile the GPU kernels for the shapes of messages, before a step is timed."""
        dtype = DTYPES[self.plan.config.dtype]
        for link in self.links:
            shape = self._tensors.shapes[link.tensor]
            x = torch.linspace(-1, 1, math.prod(shape), device=self.device).view(shape).to(dtype)
            for codec in dict.fromkeys(entry.codec for entry in link.compressor.entries()):
                packet = codec.encode(x, key=1)
                if link.sender:
                    for memory in (None, torch.zeros(shape, device=self.device)):
                        codec.encode_with_residual(x.clone(), dtype, key=1, memory=memory)
                else:
                    packet.decode(self.device)

    def send(self, value: Value, step: int, microbatch: int) -> Message:
        """Return the message of an activation or a gradient; raises DivergedError if it holds NaN or infinity."""
        measure = self.plan.measures(step)
        start = self.clock.mark()
        try:
            messages = {
                name: self.outgoing[name].send(x, self._context(self.outgoing[name], step, microbatch), measure=measure)
                for name, x in floats(value).items()
            }
        except NonFiniteError:
            raise self.diverged(step, microbatch) from None
        unchanged = exact(value)
        middle = self.clock.mark() if unchanged else start
        message = bundle(messages, unchanged)
        end = self.clock.mark()
        extra_bytes = self._account(self.outgoing, message, messages, unchanged, CodedMessage(middle, end))
        dense_bytes = extra_bytes + sum(link.messages[-1].dense_bytes for link in self.outgoing.values())
        self.last_sent = CodedMessage(start, end, wire_bytes(message), dense_bytes)
        self._keep_supports(self.outgoing, step, microbatch)
        return message

    def receive(self, message: Message, step: int, microbatch: int) -> Value:
        """Return the activation or gradient of a message; raises ValueError if the message is malformed."""
        start = self.clock.mark()
        messages, unchanged = self._unbundle(message, self.receives)
        middle = self.clock.mark() if unchanged else start
        decoded = {
            name: self.incoming[name].receive(inner, self._context(self.incoming[name], step, microbatch))
            for name, inner in messages.items()
        }
        self._account(self.incoming, message, messages, unchanged, CodedMessage(start, middle))
        self._keep_supports(self.incoming, step, microbatch)
        return {**decoded, **unchanged}

    def diverged(self, step: int, microbatch: int) -> DivergedError:
        """Return the error for a message to send that holds NaN or infinity."""
        kind = "activation" if self.sends == "forward" else "gradient"
        action = Action(*self._sending[self.sends], microbatch)
        return DivergedError(step, str(action), f"{kind} at boundary {self.index}, {self.sends}")

    def send_evaluation(self, value: Value, mode: str, key: int) -> Message:
        """Return the message of an activation in an evaluation mode; see `Link.send_evaluation`."""
        messages = {
            name: self.outgoing[name].send_evaluation(x, mode, derive_key(key, name) if name else key)
            for name, x in floats(value).items()
        }
        return bundle(messages, exact(value))

    def receive_evaluation(self, message: Message) -> Value:
        """Return the activation of a message of `send_evaluation`."""
        messages, unchanged = self._unbundle(message, "forward")
        return {name: self.incoming[name].receive_evaluation(inner) for name, inner in messages.items()} | unchanged

    def end_step(self, step: int, feedback: StepFeedback) -> list[LinkAccount]:
        """Let the compressors adapt to the feedback of the last step; return the accounts of this step."""
        accounts = [
            link.end_step(
                StepFacts(
                    feedback.step_s,
                    feedback.sensitivities.get(link_name(self.replica, self.index, link.direction)),
                    self.plan.config.batch_size,
                ),
                measure=self.plan.measures(step),
            )
            for link in self.links
        ]
        of_exact = list(self._exact_accounts.values())
        if of_exact:  # packed together, so the first account gets the time of all
            of_exact[0].codec_s = sum(coded.codec_s for coded in self._exact_coded)
        return [*accounts, *of_exact]

    def state(self) -> dict[str, Tensor]:
        """Return the memories of the outgoing links, by direction, tensor and flat names."""
        return {
            _prefix(link) + name: x
            for link in self.outgoing.values()
            if link.state
            for name, x in pack_state(link.state).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the memories from both sides' `state`, and discard the messages of an aborted step."""
        for link in self.links:
            held = under(_prefix(link), tensors)
            link.load(unpack_state(held, self.device) if link.sender or link.compressor.two_ended else {})

    def _context(self, link: Link, step: int, microbatch: int) -> Context:
        config = self.plan.config
        epoch, ids = self.plan.microbatch(step, microbatch, self.replica)
        key = (config.seed, self.replica, self.index, link.direction, step, microbatch)
        return Context(
            direction=link.direction,
            step=step,
            epoch=epoch,
            microbatch=microbatch,
            sample_ids=tuple(ids.tolist()),
            phase=self._phases[Action(*self._sending[link.direction], microbatch)],
            key=derive_key(*key, link.tensor) if link.tensor else derive_key(*key),
            support=self._supports.get((microbatch, link.tensor)) if link.direction == "backward" else None,
        )

    def _keep_supports(self, links: Mapping[str, Link], step: int, microbatch: int) -> None:
        """Keep the positions of an activation's message, at which its gradient will be sent."""
        if not self.plan.config.shared_indices or step < self.plan.config.compress_from:
            return
        for name, link in links.items():
            if link.direction == "forward" and link.compressor.codec.selects:
                self._supports[microbatch, name] = link.support()

    def _unbundle(self, message: Message, direction: str) -> tuple[dict[str, Message], dict[str, Tensor]]:
        """Return the messages of the links and the exact tensors, by name; raises ValueError if the names do not match."""
        if UNNAMED in self._tensors.shapes:
            return {UNNAMED: message}, {}
        messages, unchanged = unbundle(message, self._most_exact, self.device)
        expected = self._tensors.exact_bytes if direction == "forward" else {}
        if messages.keys() != self._tensors.shapes.keys() or unchanged.keys() != expected.keys():
            raise ValueError(
                f"A message at boundary {self.index}, {direction}, must hold {_names(self._tensors.shapes, expected)}, but holds "
                f"{_names(messages, unchanged)}."
            )
        return messages, unchanged

    def _account(
        self,
        links: Mapping[str, Link],
        message: Message,
        messages: Mapping[str, Message],
        unchanged: Mapping[str, Tensor],
        coded: CodedMessage,
    ) -> int:
        """Account for a message's header and its `unchanged` tensors, which were coded together; return their bytes."""
        sizes = {name: sent_bytes(x) for name, x in unchanged.items()}
        header_bytes = wire_bytes(message) - sum(map(wire_bytes, messages.values())) - sum(sizes.values())
        accounts = [(next(iter(links.values())).account, header_bytes)]
        for name, size in sizes.items():
            self._exact_accounts[name].packets += 1
            accounts.append((self._exact_accounts[name], size))
        for account, size in accounts:
            account.wire_bytes += size
            account.dense_bytes += size
        if unchanged:
            self._exact_coded.append(coded)
        return header_bytes + sum(sizes.values())


def _names(*names: Iterable[str]) -> str:
    return ", ".join(name for each in names for name in each)


def _prefix(link: Link) -> str:
    """Return the prefix of a link's names in a state; tensor names are quoted, so that no prefix starts another."""
    return f"{link.boundary}.{link.direction}." + (f"{link.tensor!r}." if link.tensor else "")
