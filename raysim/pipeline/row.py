"""Execution of a worker's row: the actions of a step in order, with their messages, losses and times."""

from __future__ import annotations

import math

from torch import Tensor

from raysim.codecs import NonFiniteError, derive_key
from raysim.codecs.message import Message
from raysim.codecs.transfers import Flight, to_device
from raysim.pipeline.boundary import Boundary
from raysim.pipeline.device import cpu_seconds
from raysim.pipeline.errors import DivergedError, blamed
from raysim.pipeline.link import CodedMessage
from raysim.pipeline.local_stages import LocalStages
from raysim.pipeline.messages import OutgoingMessage, Receive, Send, Turns
from raysim.pipeline.reports import ActionRecord, TimedAction
from raysim.pipeline.updates import Updates
from raysim.schedules.actions import Action, dependency, sends
from raysim.values import UNNAMED, Value
from raysim.workloads.metrics import count


class RowExecution:
    """Executes the actions of one worker's row. On a GPU, packets are copied off the device while it computes."""

    def __init__(self, local: LocalStages, updates: Updates) -> None:
        self.local = local
        self.plan = local.plan
        self.row = local.plan.rows[local.row]
        self.clock = local.clock
        self.updates = updates
        self.flight = Flight()
        self.overlaps = self.flight.takes(local.device)
        self._split_backwards = {action._replace(op="B") for action in self.row if action.op == "W"}
        self.begin(0)

    def begin(self, step: int) -> None:
        self.step = step
        self.action: Action | None = None  # the current action
        self._outgoing: list[tuple[Action, OutgoingMessage]] = []
        self._losses: dict[int, float] = {}
        self._device_losses: dict[Action, Tensor] = {}  # not read yet
        self._timed: list[TimedAction] = []
        self.clock.begin()

    def forget(self) -> None:
        """Discard the transfers of an aborted step."""
        self.flight = Flight()

    def run(self) -> Turns[None]:
        """Execute the row; raises DivergedError for NaN or infinity, StageError if the model fails."""
        for action in self.row:
            self.action = action
            yield from self._execute(action)
        yield from self._deliver()
        self._read_losses()
        self.action = None
        with blamed("end of the row"):
            self.flight.settle()

    def losses(self) -> list[float]:
        return [self._losses[microbatch] for microbatch in sorted(self._losses)]

    def action_records(self) -> list[ActionRecord]:
        """Return the records of a profiled step's actions; the device must have finished them."""
        return [timed.record(self.clock) for timed in self._timed]

    def _execute(self, action: Action) -> Turns[None]:
        source, message = dependency(action, self.plan.num_stages), None
        if source is not None:
            yield from self._deliver()  # before waiting, since others may need these packets
            (message,) = yield Receive(self.local.worker(source.stage), tuple(source))
        profiled, threads = self.plan.profiles(self.step), self.plan.config.threads_per_stage
        where = f"stage {action.stage}, {action}, step {self.step}"
        with blamed(where), self.flight.open():
            start = self.clock.mark()
            x = self._input(action, message)
            decoded, cpu_s = self.clock.mark(), cpu_seconds(threads) if profiled else 0.0
            y = self._compute(action, x)
            computed, cpu_s = self.clock.mark(), cpu_seconds(threads) - cpu_s if profiled else 0.0
        yield from self._deliver()  # on a GPU the previous packet was copied meanwhile
        boundary = self._outgoing_boundary(action)
        with blamed(where), self.flight.open():
            if boundary is not None:
                assert y is not None
                sent = boundary.send(y, self.step, action.microbatch)
                target = self.local.worker(action.stage + (1 if action.op == "F" else -1))
                self._outgoing.append((action, OutgoingMessage(target, tuple(action), sent)))
            elif action.op == "F":
                assert y is not None
                self._device_losses[action] = y[UNNAMED].view(-1)[0]
                if not self.overlaps:
                    self._read_losses()
            end = self.clock.mark()
        if profiled:
            last = boundary.last_sent if boundary is not None else CodedMessage()
            work = self.local.stages[action.stage].other_work
            self._timed.append(TimedAction(action, start, decoded, computed, end, cpu_s, last, work))
        if not self.overlaps:
            yield from self._deliver()

    def _deliver(self) -> Turns[None]:
        """Send the results of actions once their bytes are off the device."""
        if not self._outgoing:
            return
        action = self._outgoing[0][0]
        with blamed(f"stage {action.stage}, {action}, step {self.step}"):
            try:
                self.flight.land()
            except NonFiniteError:
                boundary = self._outgoing_boundary(action)
                assert boundary is not None
                raise boundary.diverged(self.step, action.microbatch) from None
        messages, self._outgoing = tuple(message for _, message in self._outgoing), []
        yield Send(messages)

    def _outgoing_boundary(self, action: Action) -> Boundary | None:
        """Return the boundary to which an action sends its result, None if it sends nothing."""
        if not sends(action, self.plan.num_stages):
            return None
        return self.local.boundaries[action.stage if action.op == "F" else action.stage - 1, action.stage]

    def _input(self, action: Action, message: Message | None) -> Value | None:
        """Return the input of an action: a received value, or data; None if the stage holds its input already."""
        if message is not None:
            index = action.stage - 1 if action.op == "F" else action.stage
            return self.local.boundaries[index, action.stage].receive(message, self.step, action.microbatch)
        if action.op != "F":
            return None
        epoch, ids = self.plan.microbatch(self.step, action.microbatch, self.local.replica)
        inputs = self.local.split("train").inputs(ids, epoch, self.plan.config.seed, True)
        return {UNNAMED: to_device(inputs, self.local.device)}

    def _compute(self, action: Action, x: Value | None) -> Value | None:
        """Return the activation, the loss at the last stage, or the gradient of the stage's input; None for a W."""
        stage, microbatch = self.local.stages[action.stage], action.microbatch
        if action.op == "F":
            assert x is not None
            # numbered as if all replicas' microbatches went through one pipeline
            number = self.local.replica * self.plan.config.num_microbatches + microbatch
            key = derive_key(self.plan.config.seed, "dropout", self.step, action.stage, number)
            if stage.last and self.plan.task.has_ignored and stage.divisor is None:
                stage.divisor = self._divisor()
            targets = None
            if stage.last:
                ids = self.plan.microbatch(self.step, microbatch, self.local.replica)[1]
                targets = to_device(self.local.split("train").targets(ids), self.local.device)
            return stage.forward(microbatch, x, key, targets)
        if action.op == "W":
            stage.backward_weights(microbatch)
            return None
        y = (stage.backward_input if action in self._split_backwards else stage.backward)(microbatch, x)
        if self.plan.config.weights.updates_each_microbatch:
            self.updates.end_microbatch(self.step, action.stage)
        return y

    def _read_losses(self) -> None:
        """Read the computed losses; raises DivergedError if one is NaN or infinity."""
        for action, value in self._device_losses.items():
            loss = float(value)
            if not math.isfinite(loss):
                raise DivergedError(self.step, str(action), "loss")
            self._losses[action.microbatch] = loss
        self._device_losses.clear()

    def _divisor(self) -> float:
        """Return the mean number of targets that are not ignored in this step's microbatches, over all replicas."""
        ids = self.plan.batch(self.step)
        microbatches = self.plan.num_replicas * self.plan.config.num_microbatches
        return max(count(self.local.split("train").targets(ids)), 1) / microbatches
