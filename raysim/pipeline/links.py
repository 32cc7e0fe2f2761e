"""The ends of links that a worker holds: the end that each action uses, and the context of each message."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from raysim.codecs import NonFiniteError, derive_key, transfers
from raysim.codecs.codec import DTYPES, Support
from raysim.codecs.message import Message
from raysim.compressors import Context
from raysim.pipeline.device import DeviceClock
from raysim.pipeline.ends import BoundaryEnd
from raysim.pipeline.errors import DivergedError
from raysim.pipeline.link import Link, LinkAccount
from raysim.pipeline.optimizer import learning_rate
from raysim.pipeline.plan import Plan
from raysim.pipeline.reports import StepFeedback
from raysim.pipeline.state import pack_state, under, unpack_state
from raysim.schedules.actions import Action, dependency, phase
from raysim.values import Value


class Links:
    """Sends and receives the messages of one row's actions, and holds the memories of their compressors."""

    def __init__(
        self, plan: Plan, replica: int, stages: Sequence[int], device: torch.device, clock: DeviceClock | None = None
    ) -> None:
        self.plan = plan
        self.replica = replica
        self.device = device
        rows = 2 * plan.config.batch_size // plan.config.microbatch_size  # of evaluations, or of steps that look back
        self.ends: dict[tuple[int, str, bool], BoundaryEnd] = {}  # by boundary, direction and whether it sends
        for boundary, pairs in enumerate(plan.compressors[replica]):
            ways = (("forward", boundary, boundary + 1), ("backward", boundary + 1, boundary))
            for place, (direction, source, target) in enumerate(ways):
                for stage, sender in ((source, True), (target, False)):
                    if stage in stages:
                        self.ends[boundary, direction, sender] = BoundaryEnd(
                            {name: pair[place] for name, pair in pairs.items()},
                            boundary,
                            direction,
                            plan.boundaries[boundary],
                            sender=sender,
                            device=device,
                            microbatches=rows,
                            clock=clock,
                        )
        self._phases = {
            action: phase(row, place)
            for row in plan.rows
            for place, action in enumerate(row)
            if any(abs(action.stage - stage) <= 1 for stage in stages)
        }
        self.begin()

    def warm(self) -> None:
        """Compile the kernels of a GPU, which are made for the shapes of messages, before a step is timed."""
        dtype = DTYPES[self.plan.config.dtype]
        links = [
            (self.plan.boundaries[end.boundary], link) for end in self.ends.values() for link in end.links.values()
        ]
        for crossing, link in links:
            shape = crossing.shapes[link.tensor]
            x = torch.linspace(-1, 1, math.prod(shape), device=self.device).view(shape).to(dtype)
            for codec in dict.fromkeys(entry.codec for entry in link.compressor.entries()):
                packet = codec.encode(x, key=1)
                if link.sender:
                    for memory in (None, torch.zeros(shape, device=self.device)):
                        codec.encode_with_residual(x.clone(), dtype, key=1, memory=memory)
                else:
                    packet.decode(self.device)

    def begin(self) -> None:
        """Begin a step."""
        self._supports: dict[tuple[int, int, str], Support] = {}  # by boundary, microbatch and tensor

    def end(self, action: Action, *, sender: bool) -> BoundaryEnd:
        """Return the end by which an action sends or receives."""
        if action.op == "F":
            return self.ends[action.stage if sender else action.stage - 1, "forward", sender]
        return self.ends[action.stage - 1 if sender else action.stage, "backward", sender]

    def send(self, action: Action, step: int, y: Value) -> Message:
        """Return the message of an action's result; raises DivergedError where the result holds NaN or infinity."""
        end = self.end(action, sender=True)
        try:
            message = end.send(y, partial(self._context, action, step), measure=self.plan.measures(step))
        except NonFiniteError:
            raise self.diverged(action, step) from None
        self._remember_supports(end, action.microbatch, message)
        return message

    def diverged(self, action: Action, step: int) -> DivergedError:
        """Return the error of an action that sends NaN or infinity."""
        end = self.end(action, sender=True)
        what = "activation" if action.op == "F" else "gradient"
        return DivergedError(step, str(action), f"{what} at boundary {end.boundary}, {end.direction}")

    def receive(self, action: Action, step: int, message: Message) -> Value:
        """Return the value that an action works on."""
        end = self.end(action, sender=False)
        x = end.receive(message, partial(self._context, action, step))
        self._remember_supports(end, action.microbatch, message)
        return x

    def end_step(self, step: int, signals: StepFeedback) -> list[LinkAccount]:
        """Let the compressors decide by the signals of the last step, and return the accounts of this step."""
        accounts: list[LinkAccount] = []
        for (boundary, direction, _), end in self.ends.items():
            of_links = [
                link.end_step(
                    measure=self.plan.measures(step),
                    step_s=signals.step_s,
                    floor=signals.floor(self.replica, boundary, direction, tensor),
                    sensitivity=signals.sensitivity(self.replica, boundary, direction),
                    batch_size=self.plan.config.batch_size,
                )
                for tensor, link in end.links.items()
            ]
            accounts += end.take_accounts(of_links)
        return accounts

    def state(self) -> dict[str, Tensor]:
        """Return one end's copy of every memory, by boundary, direction, tensor and flat names."""
        return {
            _prefix(link) + name: x
            for end in self.ends.values()
            for link in end.links.values()
            if link.sender and link.state
            for name, x in pack_state(link.state).items()
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the tensors of `state` of this worker and its neighbours, and forget everything of a step that broke off."""
        for end in self.ends.values():
            end.begin()
            for link in end.links.values():
                held = under(_prefix(link), tensors)
                link.load(unpack_state(held, self.device) if link.sender or link.compressor.two_ended else {})

    def _context(self, action: Action, step: int, link: Link) -> Context:
        config, microbatch = self.plan.config, action.microbatch
        epoch, ids = self.plan.microbatch(step, microbatch, self.replica)
        sends = action if link.sender else dependency(action, self.plan.num_stages)
        assert sends is not None, f"{action} receives nothing"
        drawn = (config.seed, self.replica, link.boundary, link.direction, step, microbatch)
        return Context(
            direction=link.direction,
            boundary=link.boundary,
            step=step,
            epoch=epoch,
            microbatch=microbatch,
            sample_ids=tuple(ids.tolist()),
            replica=self.replica,
            num_stages=self.plan.num_stages,
            num_microbatches=config.num_microbatches,
            phase=self._phases[sends],
            key=derive_key(*drawn, link.tensor) if link.tensor else derive_key(*drawn),
            support=self._supports.get((link.boundary, microbatch, link.tensor))
            if link.direction == "backward"
            else None,
            learning_rate=learning_rate(config.optimizer, step, self.plan.steps_per_epoch, self.plan.num_steps),
        )

    def _remember_supports(self, end: BoundaryEnd, microbatch: int, message: Message) -> None:
        """Keep the positions of a forward message, at both ends, for the gradients that come back at them."""
        if not self.plan.config.shared_indices or end.direction != "forward":
            return
        transfers.land()  # the sender reads the packets that it has just encoded
        for name, inner in end.messages(message)[0].items():
            link = end.links[name]
            if link.compressor.codec.selects:
                support = link.compressor.codec.support(link.unpack(inner), self.device)
                self._supports[end.boundary, microbatch, name] = support


def _prefix(link: Link) -> str:
    """Return the start of the names of a link's state; names of tensors are quoted, so that none is the start of another."""
    return f"{link.boundary}.{link.direction}." + (f"{link.tensor!r}." if link.tensor else "")
