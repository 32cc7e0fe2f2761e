"""Optimiser steps of a worker's stages, with gradient clipping and the learning rate of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from raysim.codecs.message import Message
from raysim.config import OptimizerConfig
from raysim.pipeline.averaging import GroupExchanges
from raysim.pipeline.device import DeviceClock, Moment, cpu_seconds
from raysim.pipeline.errors import DivergedError
from raysim.pipeline.local_stages import LocalStages
from raysim.pipeline.messages import OutgoingMessage, Receive, Send, Turns
from raysim.pipeline.stage import Snapshot


class Updates:
    """Updates the stages of one worker, once per step or after each microbatch."""

    def __init__(self, local: LocalStages, averaging: GroupExchanges) -> None:
        self.local = local
        self.plan = local.plan
        self.stages = local.stages
        self.averaging = averaging
        self._spans: list[tuple[Moment, Moment]] = []
        self._cpu_s = 0.0

    def end_run(self, step: int) -> Turns[dict[int, float]]:
        """Return the squared gradient norms of the stages, which `end_step` needs from all workers."""
        yield from ()  # without a message to another worker
        if self.plan.config.optimizer.clip_norm is None:
            return {}
        return {index: self.squared_norm(index) for index in self.stages}

    def end_step(self, step: int, norms: Sequence[Mapping[int, float]]) -> Turns[float | None]:
        """Update all stages; return the norm of the replica's gradients if they are clipped.

        `norms`: the squared norms of all stages of each replica. Does nothing if stages update after each microbatch. Raises
        DivergedError if a norm is not finite.
        """
        yield from ()  # without a message to another worker
        if self.plan.config.weights.updates_each_microbatch:
            return None
        norm, squared = None, norms[self.local.replica]
        if self.plan.config.optimizer.clip_norm is not None:
            norm = finite_norm(step, [squared[stage] for stage in sorted(squared)])  # independent of the owners
        self.update(step, norm, squared if self.plan.config.weights.between_steps == "continue" else {})
        return norm

    def update(self, step: int, norm: float | None, squared: Mapping[int, float] = MappingProxyType({})) -> None:
        """Update all stages with gradients clipped by `norm`, or by their own norms if `squared` has these by stage."""
        clock, threads = self.local.clock, self.plan.config.threads_per_stage
        start, cpu_s = clock.mark(), cpu_seconds(threads)
        for index, stage in self.stages.items():
            stage.place(self.averaging.parameters(index))
            own = math.sqrt(squared[index]) if index in squared else norm
            self._update(step, index, own, self.averaging.with_momentum(index))
        self._cpu_s += cpu_seconds(threads) - cpu_s
        self._spans.append((start, clock.mark()))

    def take_seconds(self) -> float:
        """Return the seconds of the step's updates: CPU seconds per thread, on a GPU wall-clock seconds."""
        spans, cpu_s, self._spans, self._cpu_s = self._spans, self._cpu_s, [], 0.0
        if any(not isinstance(start, float) for start, _ in spans):
            return sum(DeviceClock.between(*span) for span in spans)
        return cpu_s / self.plan.config.threads_per_stage

    def end_microbatch(self, step: int, index: int) -> None:
        """Update a stage after a backward, its gradients clipped by their own norm; raises DivergedError."""
        clips = self.plan.config.optimizer.clip_norm is not None
        self._update(step, index, finite_norm(step, [self.squared_norm(index)]) if clips else None)

    def squared_norm(self, index: int) -> float:
        """Return the squared gradient norm of a stage; a tied parameter counts at its first owner."""
        elsewhere = {owner for owners in self.plan.tied for owner in owners[1:]}
        return sum(
            float(gradient.double().square().sum())
            for name, gradient in self.stages[index].gradients().items()
            if (index, name) not in elsewhere
        )

    def _update(self, step: int, index: int, norm: float | None, with_momentum: frozenset[str] = frozenset()) -> None:
        """Step the optimiser of a stage, with gradients clipped by `norm`."""
        config, stage = self.plan.config, self.stages[index]
        scale = 1.0 if norm is None else clipping_scale(config.optimizer, norm)
        rate = config.weights.rate(self.plan.learning_rate(step), stage.versions.longest, step)
        stage.update(rate, scale, with_momentum)


class ValidatedUpdates(Updates):
    """Post-validation: updates that do not wait for the norms of other workers, and are amended if necessary.

    Qi et al. 2023, arXiv:2401.10241, section 4. The squared norms of stages travel from the first worker of a replica to the last
    and back. The paper rolls back by inverting the optimiser step; this restores copies, so that the weights are bit for bit those
    of a synchronous step.
    """

    def end_run(self, step: int) -> Turns[dict[int, float]]:
        """Pass on the norms of this and earlier workers, and update the stages if these norms are finite and need no clipping."""
        row = self.local.row
        self._snapshots: dict[int, Snapshot] = {}  # of stages that updated early
        self._squared: dict[int, float] = {}  # of the stages of this worker and of earlier ones
        if row > 0:
            self._squared = yield from self._receive(row - 1)
        self._squared |= {index: self.squared_norm(index) for index in self.stages}
        if row < len(self.plan.rows) - 1:
            yield self._send(row + 1)
        norm = math.sqrt(math.fsum(self._squared.values()))
        if math.isfinite(norm) and clipping_scale(self.plan.config.optimizer, norm) == 1.0:
            self._snapshots = {index: stage.snapshot() for index, stage in self.stages.items()}
            self.update(step, None)
        return {}

    def end_step(self, step: int, norms: Sequence[Mapping[int, float]]) -> Turns[float | None]:
        """Amend the updates if needed, and return the norm of all stages' gradients; raises DivergedError if it is not finite."""
        row = self.local.row
        if row < len(self.plan.rows) - 1:
            self._squared = yield from self._receive(row + 1)
        if row > 0:
            yield self._send(row - 1)
        squared = [self._squared[stage] for stage in sorted(self._squared)]
        finite = all(map(math.isfinite, squared))
        if self._snapshots and not (
            finite and clipping_scale(self.plan.config.optimizer, math.sqrt(sum(squared))) == 1.0
        ):
            for index, stage in self.stages.items():
                stage.restore(self._snapshots[index])
            self._snapshots = {}
        norm = finite_norm(step, squared)
        if not self._snapshots:
            self.update(step, norm)
        self._snapshots = {}  # they are as large as the stages and their gradients
        return norm

    def _send(self, row: int) -> Send:
        """Return the request to send the known norms to another row of this replica."""
        message: Message = (b"", np.array(list(self._squared.items()), np.float64).reshape(-1).view(np.uint8))
        target = self.local.replica * len(self.plan.rows) + row
        return Send((OutgoingMessage(target, ("norms", self.local.row), message),))

    def _receive(self, row: int) -> Turns[dict[int, float]]:
        """Return the norms known to another row of this replica."""
        (message,) = yield Receive(self.local.replica * len(self.plan.rows) + row, ("norms", row))
        assert message is not None
        _, *arrays = message
        return {int(stage): float(squared) for stage, squared in arrays[0].view(np.float64).reshape(-1, 2)}


def clipping_scale(config: OptimizerConfig, norm: float) -> float:
    """Return the clipping factor for gradients with a norm, 1 without clipping."""
    return 1.0 if config.clip_norm is None else min(1.0, config.clip_norm / (norm + 1e-6))


def finite_norm(step: int, squared: Iterable[float]) -> float:
    """Return the gradient norm from the squared norms of parts; raises DivergedError if it is not finite."""
    norm = math.sqrt(sum(squared))
    if not math.isfinite(norm):
        raise DivergedError(step, "update", "gradient norm")
    return norm
