"""A worker: one or more stages and their sides of the boundaries. Independent of Ray; all engines use the same class."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from raysim.codecs.transfers import synchronize
from raysim.compressors.compressor import Meter
from raysim.pipeline.averaging import GroupExchanges, warm_run
from raysim.pipeline.device import DeviceFacts, facts_of
from raysim.pipeline.errors import DivergedError, StageError
from raysim.pipeline.inference import Inference
from raysim.pipeline.local_stages import LocalStages
from raysim.pipeline.messages import Turns
from raysim.pipeline.plan import Plan
from raysim.pipeline.reports import Evaluated, Failure, StepFeedback, StepReport, Unreached
from raysim.pipeline.row import RowExecution
from raysim.pipeline.state import pack_tensors, under, unpack_tensors
from raysim.pipeline.updates import Updates, ValidatedUpdates
from raysim.workloads.splits import Data


class Worker:
    """Trains its stages step by step, and reports on each step.

    `run`, `update` and `infer` are generators that send and receive messages, see `messages`; an engine advances the generators
    of all workers together. Every call names its step, so that late or lost calls cannot mix up two steps.
    """

    def __init__(
        self,
        plan: Plan,
        index: int,
        modules: dict[int, nn.Module],
        data: Data | None,
        device: str = "cpu",
    ) -> None:
        self.plan = plan
        self.timeout_s = plan.config.timeout_s
        self.index = index
        self.device = torch.device(device)
        self.local = LocalStages(plan, index, modules, data, self.device)
        self.stages, self.boundaries = self.local.stages, self.local.boundaries
        self._meters: dict[int, Meter] = {}  # of receiving stages, by boundary
        for index, stage in self.stages.items():
            for forward, _ in plan.compressors[self.local.replica][index - 1].values() if index else ():
                if meter := forward.meter(stage.module):
                    self._meters[index - 1], stage.other_work = meter, meter.work
        warm_run(plan)  # before a step is timed
        self.averaging = GroupExchanges(self.local)
        self.updates = (ValidatedUpdates if plan.validates else Updates)(self.local, self.averaging)
        self.row = RowExecution(self.local, self.updates)
        if self.row.overlaps:
            for boundary in self.boundaries.values():
                boundary.warm()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # drop peaks of warming and earlier workers
        self.inference = Inference(self.local)
        self._begin(0)

    def _begin(self, step: int) -> None:
        self.step = step
        for stage in self.stages.values():
            stage.begin(step, fresh=step <= self.plan.memories_from)
        for boundary in self.boundaries.values():
            boundary.begin()
        self.row.begin(step)
        self._has_run = False
        self._measured: dict[int, float] = {}  # by the meters
        self._unreached: dict[int, Unreached] = {}
        for meter in self._meters.values():
            meter.clear()

    # A step: `run`, then `update` once all workers have run.

    def run(self, step: int, step_s: float | None) -> Turns[dict[int, float] | Failure]:
        """Execute the row of a step and average gradients; return the stages' squared gradient norms, see `update`.

        `step_s`: seconds of the last step, by the clock. An error that aborts the step is returned as a failure: NaN or infinity,
        an error of the model or of a method, or a missing message because its sender aborted.
        """
        try:
            self._check_step(step)
            yield from self.row.run()
            if step == self.plan.first_step:
                self._unreached = {index: stage.unreached() for index, stage in self.stages.items()}
            taken = {boundary: meter.take() for boundary, meter in self._meters.items()}
            self._measured = {boundary: value for boundary, value in taken.items() if value is not None}
            yield from self.averaging.run(step, step_s)
            norms = yield from self.updates.end_run(step)
        except (DivergedError, StageError) as error:
            return Failure(self.row.action, error)
        self._has_run = True
        return norms

    def update(
        self, step: int, feedback: StepFeedback, norms: Sequence[Mapping[int, float]]
    ) -> Turns[StepReport | Failure]:
        """Step the optimisers and end the step, after all workers' `run`; return its report, or a failure as `run` does.

        `feedback`: the last step's, for adaptive links. `norms`: the squared norms of all stages of each replica, if gradients
        are clipped. The memories of replica methods change here, together with the parameters.
        """
        self._check_step(step)
        if not self._has_run:
            raise StageError(f"worker {self.index} was told to update in step {step} before the step was run")
        try:
            norm = yield from self.updates.end_step(step, norms)
            yield from self.averaging.run(step, feedback.step_s, after_update=True)
        except (DivergedError, StageError) as error:
            return Failure(None, error)
        for index, stage in self.stages.items():
            if self.plan.replica_methods[index].after_update:
                stage.place(self.averaging.parameters(index))
        groups = self.averaging.end_step()
        synchronize(self.device)
        coded = self.plan.tied_method(step).compresses
        tied_s = sum(account.codec_s for account in groups if account.tied and coded)
        links = [account for each in self.boundaries.values() for account in each.end_step(step, feedback)]
        report = StepReport(
            self.local.replica,
            self.row.losses(),
            links,
            groups,
            self.row.action_records(),
            norm,
            self.updates.take_seconds() + tied_s,
            self._measured,
            self._unreached,
        )
        self._begin(step + 1)
        return report

    # Evaluation, see `Inference`.

    def infer(self, split: str, batches: Sequence[int], mode: str) -> Turns[list[Evaluated] | Failure]:
        return self.inference.run(self.step, split, batches, mode)

    def parameters(self) -> np.ndarray:
        """Return the parameters to evaluate, of all stages, as safetensors bytes."""
        return pack_tensors(
            {f"{s}.{name}": x.cpu() for s in self.stages for name, x in self.averaging.agreed(s).items()}
        )

    def take_mean(self, *replicas: np.ndarray) -> None:
        self.inference.take_mean(*replicas)

    def batchnorm(self, change: str) -> None:
        self.inference.batchnorm(change)

    # Checkpoints.

    def state(self) -> np.ndarray:
        """Return the trained state of this worker as safetensors bytes: weights, slots, and the memories of its methods."""
        tensors: dict[str, Tensor] = {}
        for index, stage in self.stages.items():
            tensors |= {f"stage.{index}.{name}": tensor for name, tensor in stage.state().items()}
        for boundary in self.boundaries.values():
            tensors |= {f"link.{name}": x for name, x in boundary.state().items()}
        tensors |= self.averaging.state()
        return pack_tensors(tensors)

    def load(self, step: int, *parts: np.ndarray) -> None:
        """Load the state at the start of `step` from the parts of a checkpoint, possibly saved by other workers."""
        others = tuple(f"stage.{index}." for index in range(self.plan.num_stages) if index not in self.stages)
        tensors = {name: x for part in parts for name, x in unpack_tensors(part).items() if not name.startswith(others)}
        for index, stage in self.stages.items():
            stage.load(under(f"stage.{index}.", tensors))
        memories = under("link.", tensors)
        for boundary in self.boundaries.values():
            boundary.load(memories)
        self.averaging.load(tensors)
        self.row.forget()
        self._begin(step)

    def clock_s(self) -> float:
        """Return the time of the clock in this worker's records."""
        return time.perf_counter()

    def _check_step(self, step: int) -> None:
        if step != self.step:
            raise StageError(f"worker {self.index} is at step {self.step}, but was called for step {step}")

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Compute with `threads_per_stage`, on which the bits of gradients depend."""
        before, wanted = torch.get_num_threads(), self.plan.config.threads_per_stage
        if before != wanted:
            torch.set_num_threads(wanted)
        try:
            yield
        finally:
            if before != wanted:
                torch.set_num_threads(before)

    def device_facts(self) -> DeviceFacts | None:
        return facts_of(self.device)

    def device_peak_bytes(self) -> int:
        """Return the peak GPU memory of this process, 0 on a CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else 0
