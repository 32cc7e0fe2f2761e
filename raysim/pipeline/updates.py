"""The optimiser steps of a worker's stages: gradients clipped by their norm, the learning rate of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from raysim.config import OptimizerConfig
from raysim.pipeline.averaging import Averaging
from raysim.pipeline.device import DeviceClock, Moment, cpu_seconds
from raysim.pipeline.errors import DivergedError
from raysim.pipeline.plan import Plan
from raysim.pipeline.stage import Stage


class Updates:
    """Updates the stages of one worker, once a step or after each microbatch."""

    def __init__(
        self, plan: Plan, replica: int, stages: Mapping[int, Stage], averaging: Averaging, clock: DeviceClock
    ) -> None:
        self.plan = plan
        self.replica = replica
        self.stages = stages
        self.averaging = averaging
        self.clock = clock
        self._spans: list[tuple[Moment, Moment]] = []
        self._cpu_s = 0.0

    def end_step(self, step: int, norms: Sequence[Mapping[int, float]]) -> float | None:
        """Update all stages; return the norm of the replica's gradients if they are clipped.

        `norms`: the squared norms of all stages of each replica. Does nothing if stages update after each microbatch. Raises
        DivergedError if a norm is not finite.
        """
        if self.plan.config.weights.updates_each_microbatch:
            return None
        norm, squared = None, norms[self.replica]
        if self.plan.config.optimizer.clip_norm is not None:
            norm = finite_norm(step, [squared[stage] for stage in sorted(squared)])  # whichever workers own them
        self.update(step, norm, squared if self.plan.config.weights.clips_by_stage else {})
        return norm

    def update(self, step: int, norm: float | None, squared: Mapping[int, float] = MappingProxyType({})) -> None:
        """Update all stages, with gradients clipped by `norm`, or by their own norms if these are given by stage, `squared`."""
        start, cpu_s = self.clock.mark(), cpu_seconds(self.plan.config.threads_per_stage)
        for index, stage in self.stages.items():
            if self.plan.needs_previous_gradients(step + 1):
                stage.keep_parameters()
            stage.place(self.averaging.parameters(index))
            own = math.sqrt(squared[index]) if index in squared else norm
            self._update(step, index, own, self.averaging.with_momentum(index))
        self._cpu_s += cpu_seconds(self.plan.config.threads_per_stage) - cpu_s
        self._spans.append((start, self.clock.mark()))

    def take_seconds(self) -> float:
        """Return the seconds of the step's updates: CPU seconds a thread, on a GPU seconds as they passed."""
        spans, cpu_s, self._spans, self._cpu_s = self._spans, self._cpu_s, [], 0.0
        if any(not isinstance(start, float) for start, _ in spans):
            return sum(DeviceClock.between(*span) for span in spans)
        return cpu_s / self.plan.config.threads_per_stage

    def end_microbatch(self, step: int, index: int) -> None:
        """Update a stage after a backward, its gradients clipped by their own norm; raises DivergedError."""
        clips = self.plan.config.optimizer.clip_norm is not None
        self._update(step, index, finite_norm(step, [self.squared_norm(index)]) if clips else None)

    def squared_norm(self, index: int) -> float:
        """Return the squared norm of the gradients of a stage; a tied parameter counts at its first owner."""
        elsewhere = {owner for owners in self.plan.tied for owner in owners[1:]}
        return sum(
            float(gradient.double().square().sum())
            for name, gradient in self.stages[index].gradients().items()
            if (index, name) not in elsewhere
        )

    def _update(self, step: int, index: int, norm: float | None, with_momentum: frozenset[str] = frozenset()) -> None:
        """Step the optimiser of a stage, with gradients clipped by `norm`."""
        config, stage = self.plan.config.optimizer, self.stages[index]
        scale = 1.0 if norm is None else clipping_scale(config, norm)
        rate = self.plan.learning_rate(step)
        rate = self.plan.config.weights.rate(rate, stage.versions.longest, step)
        stage.update(rate, scale, with_momentum)


def clipping_scale(config: OptimizerConfig, norm: float) -> float:
    """Return the factor by which gradients with a norm are clipped, 1 if they are not."""
    return 1.0 if config.clip_norm is None else min(1.0, config.clip_norm / (norm + 1e-6))


def finite_norm(step: int, squared: Iterable[float]) -> float:
    """Return the norm of gradients from the squared norms of their parts; raises DivergedError."""
    norm = math.sqrt(sum(squared))
    if not math.isfinite(norm):
        raise DivergedError(step, "update", "gradient norm")
    return norm
