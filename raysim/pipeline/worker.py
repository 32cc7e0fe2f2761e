"""A worker: one or more stages and their link ends. A plain class, without Ray; both engines drive the same one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from raysim.codecs import NonFiniteError, derive_key
from raysim.codecs.message import Message
from raysim.codecs.transfers import Flight, synchronize, to_device
from raysim.pipeline.averaging import Averaging, warm
from raysim.pipeline.device import DeviceClock, DeviceFacts, facts_of
from raysim.pipeline.errors import DivergedError, StageError
from raysim.pipeline.inference import Inference
from raysim.pipeline.links import Links
from raysim.pipeline.messages import OutgoingMessage, Receive, Send, Turns
from raysim.pipeline.plan import Plan
from raysim.pipeline.reports import Evaluated, Failure, StepFeedback, StepReport, TimedAction
from raysim.pipeline.sensitivity import Sensitivity
from raysim.pipeline.stage import Stage
from raysim.pipeline.state import pack_tensors, under, unpack_tensors
from raysim.pipeline.updates import Updates
from raysim.schedules.actions import Action, dependency, sends
from raysim.values import Value, only
from raysim.workloads.metrics import count
from raysim.workloads.splits import Data


class Worker:
    """Runs the actions of its row, step by step, and answers with messages and reports.

    `run` and `infer` are generators that send and receive messages, see `messages`; an engine advances the generators of all
    workers together. Every call names its step, so that late or lost calls cannot mix two steps.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        modules: dict[int, nn.Module],
        data: Data | None,
        device: str = "cpu",
    ) -> None:
        config = plan.config
        self.plan = plan
        self.timeout_s = config.timeout_s
        self.index = index
        self.replica, place = divmod(index, len(plan.rows))
        self.data = data  # of the workers that own the first or the last stage
        self.device = torch.device(device)
        self.stages = {
            s: Stage(
                module,
                config,
                self.device,
                first=s == 0,
                last=s == plan.num_stages - 1,
                loss=plan.task.loss,
                elementwise=plan.elementwise[s],
                delays=plan.weight_delays[s],
            )
            for s, module in modules.items()
        }
        self._sensitivities = {
            boundary: Sensitivity(self.stages[boundary + 1].module)
            for boundary, pairs in enumerate(plan.compressors[self.replica])
            if boundary + 1 in self.stages and any(method.needs_sensitivity for method, _ in pairs.values())
        }
        warm(plan)  # before a step is timed
        self.averaging = Averaging(plan, self.replica, self.stages, self.device)
        self.updates = Updates(plan, self.replica, self.stages, self.averaging)
        self.clock = DeviceClock(self.device)
        self.flight = Flight()
        self._overlaps = self.flight.takes(self.device)  # packets leave the device while it computes
        self.links = Links(plan, self.replica, list(self.stages), self.device, self.clock)
        if self._overlaps:
            self.links.warm()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # of the warming, or of an earlier worker of this process
        self.inference = Inference(plan, self.replica, self.stages, self.links, data, self.device)
        self._apart = {
            action._replace(op="B") for action in plan.rows[place] if action.op == "W"
        }  # backwards in two parts
        self._begin(0)

    def _begin(self, step: int) -> None:
        self.step = step
        for stage in self.stages.values():
            stage.begin(twin=self.plan.needs_previous_gradients(step))
        self.links.begin()
        self._has_run = False
        self._outgoing: list[tuple[Action, OutgoingMessage]] = []
        self._unread: dict[Action, Tensor] = {}  # losses that are still on the device
        self._losses: dict[int, float] = {}
        self._profiled: list[TimedAction] = []
        self.clock.begin()
        self._measured: dict[int, float] = {}  # sensitivities, by boundary
        for sensitivity in self._sensitivities.values():
            sensitivity.clear()

    # A step: `run`, which sends and takes messages, then `update` once all workers have run.

    def run(self, step: int, step_s: float | None) -> Turns[dict[int, float] | Failure]:
        """Run the row of a step, then the rounds that end it; return the squared norms of gradients, see `update`.

        `step_s` is the clock's time of the last step. An error that breaks the step off is returned as a failure: NaN or infinity,
        a model or a method that fails, or a message that will not come because its sender broke off.
        """
        action: Action | None = None
        try:
            self._check_step(step)
            for action in self.plan.rows[self.index % len(self.plan.rows)]:
                yield from self._act(action)
            yield from self._deliver()
            self._read_losses()
            action = None
            with self._blamed("end of the row"):
                self.flight.settle()
            found = {boundary: sensitivity.take() for boundary, sensitivity in self._sensitivities.items()}
            self._measured = {boundary: value for boundary, value in found.items() if value is not None}
            yield from self.averaging.run(step, step_s)
        except (DivergedError, StageError) as error:
            return Failure(action, error)
        self._has_run = True
        return self._squared_norms() if self.plan.config.optimizer.clip_norm is not None else {}

    def update(
        self, step: int, signals: StepFeedback, norms: Sequence[Mapping[int, float]]
    ) -> Turns[StepReport | Failure]:
        """Step the optimisers and end the step, which all workers have run; return its report, or a failure as `run` does.

        `signals` of the last step are for links that adapt. `norms` are the squared norms of all stages of each replica, used
        where gradients are clipped. The memories of replica methods change here, together with the parameters.
        """
        self._check_step(step)
        if not self._has_run:
            raise StageError(f"worker {self.index} was told to update in step {step} before the step was run")
        begun, cpu_s = self.clock.mark(), self._cpu_s(True)
        try:
            norm = self.updates.end_step(step, norms)
            ended, cpu_s = self.clock.mark(), self._cpu_s(True) - cpu_s
            yield from self.averaging.run(step, signals.step_s, after_update=True)
        except (DivergedError, StageError) as error:
            return Failure(None, error)
        for index, stage in self.stages.items():
            if self.plan.replica_methods[index].after_update:
                stage.place(self.averaging.parameters(index))
        groups = self.averaging.end_step()
        synchronize(self.device)
        links = self.links.end_step(step, signals)
        losses = [self._losses[m] for m in sorted(self._losses)]
        actions = [one.record(self.clock) for one in self._profiled]
        on_gpu = self.device.type == "cuda"
        update_s = self.clock.between(begun, ended) if on_gpu else cpu_s / self.plan.config.threads_per_stage
        report = StepReport(self.replica, losses, links, groups, actions, norm, update_s, self._measured)
        self._begin(step + 1)
        return report

    # Evaluation, see `Inference`.

    def infer(self, split: str, batches: Sequence[int], mode: str) -> Turns[list[Evaluated] | Failure]:
        """Evaluate batches of a split on the stages of this worker, with links in an evaluation mode."""
        return self.inference.run(self.step, split, batches, mode)

    def parameters(self) -> np.ndarray:
        """Return the parameters of all stages that are evaluated, as bytes of safetensors."""
        return pack_tensors(
            {f"{s}.{name}": x.cpu() for s in self.stages for name, x in self.averaging.agreed(s).items()}
        )

    def take_mean(self, *replicas: np.ndarray) -> None:
        """Evaluate the mean of the `parameters` of all replicas from now on; without arguments, this replica's own again."""
        self.inference.take_mean(*replicas)

    def batchnorm(self, change: str) -> None:
        """Change the BatchNorm statistics of all stages: "estimate" new ones, "use" them, or "restore" the ones of training."""
        self.inference.batchnorm(change)

    # Checkpoints.

    def state(self) -> np.ndarray:
        """Return the trained state of this worker, as bytes of safetensors: weights, slots, and one end's copy of every memory."""
        tensors: dict[str, Tensor] = {}
        for index, stage in self.stages.items():
            tensors |= {f"stage.{index}.{name}": tensor for name, tensor in stage.state().items()}
        tensors |= {f"link.{name}": x for name, x in self.links.state().items()}
        tensors |= {f"replicas.{name}": x for name, x in self.averaging.state().items()}
        return pack_tensors(tensors)

    def load(self, step: int, *parts: np.ndarray) -> None:
        """Load the state in which `step` begins from the parts of a checkpoint, which may be of other workers."""
        tensors = {name: x for part in parts for name, x in unpack_tensors(part).items()}
        for index, stage in self.stages.items():
            stage.load(under(f"stage.{index}.", tensors))
        self.links.load(under("link.", tensors))
        self.averaging.load(under("replicas.", tensors))
        self.flight = Flight()  # without the flags of a step that broke off
        self._begin(step)

    def clock_s(self) -> float:
        """Return the clock that this worker's records are stamped with."""
        return time.perf_counter()

    # Inside.

    def _act(self, action: Action) -> Turns[None]:
        """Take the message that an action needs, run the action, and send its result."""
        source, message = dependency(action, self.plan.num_stages), None
        if source is not None:
            yield from self._deliver()  # before this worker waits, so that no other waits for its packets
            (message,) = yield Receive(self.plan.worker(self.replica, source.stage), tuple(source))
        profiled = self.plan.profiles(self.step)
        where = f"stage {action.stage}, {action}, step {self.step}"
        with self._blamed(where), self.flight.open():
            start = self.clock.mark()
            x = self._receive(action, message)
            decoded, cpu_s = self.clock.mark(), self._cpu_s(profiled)
            y = self._compute(action, x)
            computed, cpu_s = self.clock.mark(), self._cpu_s(profiled) - cpu_s
        yield from self._deliver()  # on a GPU the packet before has left it while this was computed
        with self._blamed(where), self.flight.open():
            sent = self._send(action, y)
            end = self.clock.mark()
        if profiled:
            out = self.links.end(action, sender=True) if sent is not None else None
            coded = (*out.last_coded, out.last_wire_bytes, out.last_dense_bytes) if out else (0.0, 0.0, 0, 0)
            work = self._work(action.stage)
            self._profiled.append(TimedAction(action, start, decoded, computed, end, cpu_s, *coded, work))
        if sent is not None:
            target = self.plan.worker(self.replica, action.stage + (1 if action.op == "F" else -1))
            self._outgoing.append((action, OutgoingMessage(target, tuple(action), sent)))
        if not self._overlaps:
            yield from self._deliver()

    def _deliver(self) -> Turns[None]:
        """Send the results of actions once their bytes have left the device."""
        if not self._outgoing:
            return
        action = self._outgoing[0][0]
        with self._blamed(f"stage {action.stage}, {action}, step {self.step}"):
            try:
                self.flight.land()
            except NonFiniteError:
                raise self.links.diverged(action, self.step) from None
        messages, self._outgoing = tuple(message for _, message in self._outgoing), []
        yield Send(messages)

    @contextmanager
    def _blamed(self, where: str) -> Iterator[None]:
        """Turn an error that says nothing of divergence into a StageError of a place."""
        try:
            yield
        except DivergedError:
            raise
        except Exception as error:
            raise StageError(f"{where}: {type(error).__name__}: {error}") from error

    def _work(self, stage: int) -> str | None:
        """Return the kind of work of a stage's actions in this step beside one forward or backward, for the records."""
        if self.plan.needs_previous_gradients(self.step):
            return "twin"
        if self.plan.config.weights.updates_each_microbatch:
            return "update"
        return "sensitivity" if stage - 1 in self._sensitivities else None

    def _cpu_s(self, profiled: bool) -> float:
        """Return the CPU seconds of this worker's thread or process; 0 in steps that are not profiled."""
        if not profiled:
            return 0.0
        return time.thread_time() if self.plan.config.threads_per_stage == 1 else time.process_time()

    def _compute(self, action: Action, x: Value | None) -> Value | None:
        """Return the activation, the loss of the last stage's forward, or the gradient of the stage's input; None of a W."""
        stage, microbatch = self.stages[action.stage], action.microbatch
        if action.op == "F":
            assert x is not None
            place = (
                self.replica * self.plan.config.num_microbatches + microbatch
            )  # as in one pipeline of all microbatches
            key = derive_key(self.plan.config.seed, "dropout", self.step, action.stage, place)
            if stage.last and self.plan.task.has_ignored and stage.divisor is None:
                stage.divisor = self._divisor()
            y: Value | None = stage.forward(microbatch, x, key, self._targets(microbatch) if stage.last else None)
        elif action.op == "W":
            stage.backward_weights(microbatch)
            y = None
        else:
            y = (stage.backward_input if action in self._apart else stage.backward)(microbatch, x)
            if self.plan.config.weights.updates_each_microbatch:
                self.updates.end_microbatch(self.step, action.stage)
        return y

    def _send(self, action: Action, y: Value | None) -> Message | None:
        """Return the message of an action's result, None where the action sends none; keep the loss of a last forward."""
        if sends(action, self.plan.num_stages):
            assert y is not None
            return self.links.send(action, self.step, y)
        if action.op == "F":
            assert y is not None
            self._unread[action] = only(y).view(-1)[0]  # in a twin step, the loss with the present parameters
            if not self._overlaps:
                self._read_losses()
        return None

    def _read_losses(self) -> None:
        """Read the losses that have been computed; raises DivergedError where one is NaN or infinity."""
        for action, value in self._unread.items():
            loss = float(value)
            if not math.isfinite(loss):
                raise DivergedError(self.step, str(action), "loss")
            self._losses[action.microbatch] = loss
        self._unread.clear()

    def _receive(self, action: Action, message: Message | None) -> Value | None:
        """Return the input of an action: a decoded message, or data; None where the stage holds its input already."""
        if dependency(action, self.plan.num_stages) is not None:
            assert message is not None
            return self.links.receive(action, self.step, message)
        if action.op != "F":
            return None
        assert self.data is not None, "the worker of the first stage holds data"
        epoch, ids = self.plan.microbatch(self.step, action.microbatch, self.replica)
        return to_device(self.data.train.inputs(ids, epoch, self.plan.config.seed, True), self.device)

    def _targets(self, microbatch: int) -> Tensor:
        assert self.data is not None, "the worker of the last stage holds data"
        ids = self.plan.microbatch(self.step, microbatch, self.replica)[1]
        return to_device(self.data.train.targets(ids), self.device)

    def _divisor(self) -> float:
        """Return the number of targets of this step that count, over all replicas, for each of their microbatches."""
        assert self.data is not None, "the worker of the last stage holds data"
        ids = self.plan.batch(self.step)
        microbatches = self.plan.num_replicas * self.plan.config.num_microbatches
        return max(count(self.data.train.targets(ids)), 1) / microbatches

    def _squared_norms(self) -> dict[int, float]:
        """Return the squared norm of the gradients of each stage's parameters; a tied one counts at its first owner."""
        return {index: self.updates.squared_norm(index) for index in self.stages}

    def _check_step(self, step: int) -> None:
        if step != self.step:
            raise StageError(f"worker {self.index} is at step {self.step}, but was called for step {step}")

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Compute with `threads_per_stage`: another number would give other gradient bits."""
        before, wanted = torch.get_num_threads(), self.plan.config.threads_per_stage
        if before != wanted:
            torch.set_num_threads(wanted)
        try:
            yield
        finally:
            if before != wanted:
                torch.set_num_threads(before)

    def device_facts(self) -> DeviceFacts | None:
        """Return the facts of the GPU that computes here, None of a CPU."""
        return facts_of(self.device)

    def device_peak_bytes(self) -> int:
        """Return the most memory of the GPU that this process has held at once, 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
