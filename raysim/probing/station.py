"""Stations of a probe: a watched module, and the candidates tried on its tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.utils.hooks import RemovableHandle

from raysim.codecs import NonFiniteError, warm
from raysim.compressors import Context
from raysim.distributed.exchange import Channel, ReplicaError
from raysim.nn.boundary import UNKNOWN, Samples, current_samples
from raysim.probing.candidates import GradientCandidate, LinkCandidate, Measured, Sample, fidelity_of, merge_measured
from raysim.probing.stopwatch import Seconds, Stopwatch
from raysim.random import derive_key
from raysim.replication.method import ReplicaContext
from raysim.schedules.families import parse_schedule


@dataclass(frozen=True)
class Sampling:
    """The steps to sample, and the schedule that prices them; see `raysim.probe`."""

    out: Path
    steps: int = 20
    every: int = 10
    num_microbatches: int = 1
    schedule: str = "1F1B"
    seed: int = 0

    def halves(self, num_stages: int) -> set[tuple[int, int]]:
        """Return the (stage, microbatch) pairs whose backward is split into an input and a weight part by the schedule."""
        rows = parse_schedule(self.schedule).rows(num_stages, self.num_microbatches)
        return {(action.stage, action.microbatch) for row in rows for action in row if action.op == "W"}

    def check(self, num_stages: int, *, times_halves: bool = False) -> None:
        """Raise ValueError if a field is invalid; `times_halves`: split backwards can be timed."""
        for field in ("steps", "every", "num_microbatches"):
            if getattr(self, field) < 1:
                raise ValueError(f"`{field}` must be at least 1, but got {getattr(self, field)}.")
        try:
            halves = self.halves(num_stages)
        except ValueError as refused:
            raise ValueError(f"`schedule`: {refused}") from None
        if halves and not times_halves:
            raise ValueError(
                f"`schedule` must have backwards in one part, as this training has, but got {self.schedule}. Use 1F1B or GPipe."
            )
        if self.out.exists() and any(self.out.iterdir()):
            raise ValueError(f"`out` must be a new or empty folder, but {self.out} holds files.")


class Station:
    """A watched module: decides which microbatches to sample, and keeps the samples.

    A step ends with the first forward after `num_microbatches` backwards, or with `end_step`. A step is dropped if it has too few
    or too many forwards or backwards, or a tensor held NaN or infinity. In torch's pipelines the first step is skipped, because
    they rehearse before it.
    """

    num_replicas = 1

    def __init__(
        self, watch: Stopwatch, candidates: Sequence[LinkCandidate], sampling: Sampling, replica: int = 0
    ) -> None:
        self.watch = watch
        self.module = watch.module
        self.candidates = candidates
        self.sampling = sampling
        self.replica = replica
        self.num_rows = 0  # of a microbatch
        self.samples: dict[int, Sample] = {}
        self.overhead_s = 0.0
        self._step = 0  # of the training
        self._first_step = int(watch.stage is not None)
        self._taken = 0  # number of steps whose sampling has begun
        self._forwards = 0  # of the step
        self._spoiled = False
        self._named: dict[int, Samples] = {}  # the sample ids of each microbatch

    def open(self) -> None:
        """Compile the kernels of the candidates, and register the hooks."""
        warm({method.codec for candidate in self.candidates for method in candidate.methods.values()})
        self.watch.open(self._begin_forward, self._leaving)

    def close(self, *, ends: bool) -> None:
        """Remove the hooks; `ends`: also keep the last step if it is complete."""
        self.watch.remove()
        if ends:
            self.end_step()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """End the current step, and remove the hooks within the context."""
        self.end_step()
        self.watch.remove()
        try:
            yield
        finally:
            self.open()

    def _begin_forward(self) -> int | None:
        if not self.module.training or not torch.is_grad_enabled():
            return None
        if self.watch.backwards >= self.sampling.num_microbatches:
            self.end_step()
        number = self._forwards
        self._forwards += 1
        if not self._sampled or number >= self.sampling.num_microbatches:
            return None
        self._named[number] = current_samples.get()
        return number

    def _leaving(self, direction: str, boundary: int, microbatch: int, x: Tensor) -> None:
        with self._aside():
            self.num_rows = len(x) if x.dim() else 1
            named = self._named.get(microbatch, UNKNOWN)
            samples = named.of_microbatch(self.num_rows, microbatch, self.sampling.num_microbatches)
            context = Context(
                direction=direction,
                step=self._taken,
                epoch=samples.epoch,
                microbatch=microbatch,
                sample_ids=samples.ids,
                key=derive_key(self.sampling.seed, self.replica, boundary, direction, self._taken, microbatch),
            )
            try:
                for candidate in self.candidates:
                    candidate.send(x, boundary, context)
            except NonFiniteError:  # the training goes on, and so does the probe
                self._spoiled = True

    def end_step(self) -> None:
        """End the current step, and keep its sample if it is complete."""
        if self._sampled and self._forwards:
            count = self.sampling.num_microbatches
            with self._aside():
                measured = self.measured(whole=self._forwards == count == self.watch.backwards)
            if measured is not None and not self._spoiled:
                seconds = {(self.replica, *key): spent for key, spent in self.watch.seconds.items()}
                self.samples[self._step] = Sample(seconds, measured)
            self._taken += 1
        self._step += 1
        self._forwards = self.watch.backwards = 0
        self.watch.seconds = {}
        self._spoiled = False
        self._named.clear()

    def measured(self, *, whole: bool) -> list[Measured] | None:
        """Return the measurements of every candidate in the current step, None for a step that is not `whole`."""
        measured = [candidate.end_step() for candidate in self.candidates]
        return measured if whole else None

    @property
    def _sampled(self) -> bool:
        since = self._step - self._first_step
        return since >= 0 and since % self.sampling.every == 0 and len(self.samples) < self.sampling.steps

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Count the seconds of the block as overhead of the probe."""
        start = Seconds(time.perf_counter(), time.process_time())
        yield
        spent = Seconds(time.perf_counter() - start.wall, time.process_time() - start.cpu)
        self.watch.skip(spent)
        self.overhead_s += spent.wall


class GradientStation(Station):
    """A replica with watched gradients: after a sampled step all ranks average them, but only to measure it.

    Every link candidate is recorded with every replica method. The first method is dense, and its average is the reference for the
    others. A parameter belongs to the stage that the backward has reached when its gradient is computed.
    """

    def __init__(
        self,
        watch: Stopwatch,
        links: Sequence[LinkCandidate],
        methods: Sequence[GradientCandidate],
        sampling: Sampling,
        channel: Channel,
    ) -> None:
        super().__init__(watch, links, sampling, channel.rank)
        self.num_replicas = channel.size
        self._gradients: dict[str, Tensor] = {}  # of this rank alone, summed over the microbatches of the step
        self._parts: dict[str, int] = {}  # the stage of each parameter
        self._methods, self._channel = methods, channel
        self._handles: list[RemovableHandle] = []

    def open(self) -> None:
        super().open()
        self._parameters = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        self._handles = [
            parameter.register_hook(self._keeper(name))  # type: ignore[no-untyped-call]
            for name, parameter in self._parameters.items()
        ]

    def close(self, *, ends: bool) -> None:
        for handle in self._handles:
            handle.remove()
        super().close(ends=ends)

    def measured(self, *, whole: bool) -> list[Measured] | None:
        links = super().measured(whole=whole and not self._spoiled)
        local, self._gradients = self._gradients, {}
        everyone: list[Any] = [None] * self._channel.size
        dist.all_gather_object(everyone, (links is not None, self._parts), group=self._channel.group)
        if links is None or not all(kept for kept, _ in everyone):  # if one rank drops the step, all do
            return None
        self._parts = everyone[0][1]
        stages: dict[int, dict[str, Tensor]] = {}
        for name, parameter in self._parameters.items():
            gradient = local.get(name, torch.zeros_like(parameter))
            stages.setdefault(self._parts.get(name, 0), {})[name] = gradient
        context = ReplicaContext(
            replica=self._channel.rank,
            num_replicas=self._channel.size,
            step=self._taken,
            epoch=0,
            steps_per_epoch=max(1, self._taken + 1),
            seed=self.sampling.seed,
        )
        try:
            with torch.no_grad(), torch.autocast(self._channel.device.type, enabled=False):
                averages = [method.average(stages, self._channel, context) for method in self._methods]
        except ReplicaError:  # raised on all ranks; the training goes on, and so does the probe
            return None
        measured = []
        for method, average in zip(self._methods, averages, strict=True):
            fidelities = {
                stage: fidelity_of(average[stage].result.gradients, averages[0][stage].result.gradients)
                for stage in stages
            }
            measured.append(method.measured(average, fidelities))
        return [merge_measured([link, each]) for link in links for each in measured]

    def _keeper(self, name: str) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            if self._sampled:
                with self._aside():
                    self._parts.setdefault(name, self.watch.part)
                    if name in self._gradients:
                        self._gradients[name] += gradient.detach()
                    else:
                        self._gradients[name] = gradient.detach().to(torch.float32, copy=True)

        return keep
