"""The optimiser steps of a worker's stages: gradients clipped by their norm, the learning rate of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from raysim.pipeline.averaging import Averaging
from raysim.pipeline.errors import DivergedError
from raysim.pipeline.plan import Plan
from raysim.pipeline.stage import Stage


class Updates:
    """Updates the stages of one worker, once a step or after each microbatch."""

    def __init__(self, plan: Plan, replica: int, stages: Mapping[int, Stage], averaging: Averaging) -> None:
        self.plan = plan
        self.replica = replica
        self.stages = stages
        self.averaging = averaging

    def end_step(self, step: int, norms: Sequence[Mapping[int, float]]) -> float | None:
        """Update all stages; return the norm of the replica's gradients if they are clipped.

        `norms`: the squared norms of all stages of each replica. Without a flush, each stage is clipped by its own norm. Does nothing
        if stages update after each microbatch. Raises DivergedError if a norm is not finite.
        """
        if self.plan.config.weights.updates_each_microbatch:
            return None
        norm, squared = None, norms[self.replica]
        if self.plan.config.optimizer.clip_norm is not None:
            norm = _finite_norm(step, [squared[stage] for stage in sorted(squared)])  # whichever workers own them
        for index, stage in self.stages.items():
            own = norm if norm is None or self.plan.config.weights.flush else math.sqrt(squared[index])
            if self.plan.needs_previous_gradients(step + 1):
                stage.keep_parameters()
            stage.place(self.averaging.parameters(index))
            self._update(step, index, own, self.averaging.with_momentum(index))
        return norm

    def end_microbatch(self, step: int, index: int) -> None:
        """Update a stage after a backward, its gradients clipped by their own norm; raises DivergedError."""
        clips = self.plan.config.optimizer.clip_norm is not None
        self._update(step, index, _finite_norm(step, [self.squared_norm(index)]) if clips else None)

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
        scale = 1.0
        if config.clip_norm is not None and norm is not None:
            scale = min(1.0, config.clip_norm / (norm + 1e-6))
        rate = self.plan.learning_rate(step)
        rate = self.plan.config.weights.rate(rate, stage.versions.longest, step)
        stage.update(rate, scale, with_momentum)


def _finite_norm(step: int, squared: Iterable[float]) -> float:
    """Return the norm of gradients from the squared norms of their parts; raises DivergedError."""
    norm = math.sqrt(sum(squared))
    if not math.isfinite(norm):
        raise DivergedError(step, "update", "gradient norm")
    return norm
