"""Post-validation: stages update without waiting for the norms of others, and amend the update if these ask for it.

Qi et al. 2023, arXiv:2401.10241, section 4. The squared norms of stages travel from the first worker of a replica to the last and
back. A rollback restores copies, where the paper's inverts the optimiser's step, so that the weights have the bits of a synchronous
step.
"""

from __future__ import annotations

import math

import numpy as np

from raysim.codecs.message import Message
from raysim.pipeline.messages import OutgoingMessage, Receive, Send, Turns
from raysim.pipeline.plan import Plan
from raysim.pipeline.stage import Snapshot
from raysim.pipeline.updates import Updates, clipping_scale, finite_norm


class Validation:
    """Updates the stages of one worker early, and validates the update."""

    def __init__(self, plan: Plan, replica: int, row: int, updates: Updates) -> None:
        self.plan = plan
        self.replica = replica
        self.row = row
        self.updates = updates
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self._squared: dict[int, float] = {}  # of the stages of this worker and those before it
        self._snapshots: dict[int, Snapshot] = {}  # of stages that updated early

    def update_early(self, step: int) -> Turns[None]:
        """Pass the norms of this and earlier workers on, and update the stages unless these norms ask for an amendment."""
        if self.row > 0:
            self._squared = yield from self._receive(self.row - 1)
        self._squared |= {index: self.updates.squared_norm(index) for index in self.updates.stages}
        if self.row < len(self.plan.rows) - 1:
            yield self._send(self.row + 1)
        norm = math.sqrt(math.fsum(self._squared.values()))
        if math.isfinite(norm) and clipping_scale(self.plan.config.optimizer, norm) == 1.0:
            self._snapshots = {index: stage.snapshot() for index, stage in self.updates.stages.items()}
            self.updates.update(step, None)

    def validate(self, step: int) -> Turns[float]:
        """Return the norm of all stages' gradients once the stages are updated by it; raises DivergedError if it is not finite."""
        if self.row < len(self.plan.rows) - 1:
            self._squared = yield from self._receive(self.row + 1)
        if self.row > 0:
            yield self._send(self.row - 1)
        squared = [self._squared[stage] for stage in sorted(self._squared)]
        amended = not all(map(math.isfinite, squared)) or self._scale(squared) < 1.0
        if self._snapshots and amended:
            for index, stage in self.updates.stages.items():
                stage.restore(self._snapshots[index])
            self._snapshots = {}
        norm = finite_norm(step, squared)
        if not self._snapshots:
            self.updates.update(step, norm)
        return norm

    def _scale(self, squared: list[float]) -> float:
        return clipping_scale(self.plan.config.optimizer, math.sqrt(sum(squared)))

    def _send(self, row: int) -> Send:
        """Return the request to send the known norms to another row of this replica."""
        message: Message = (b"", np.array(list(self._squared.items()), np.float64).reshape(-1).view(np.uint8))
        target = self.replica * len(self.plan.rows) + row
        return Send((OutgoingMessage(target, ("norms", self.row), message),))

    def _receive(self, row: int) -> Turns[dict[int, float]]:
        """Return the norms known to another row of this replica."""
        (message,) = yield Receive(self.replica * len(self.plan.rows) + row, ("norms", row))
        assert message is not None
        _, *arrays = message
        return {int(stage): float(squared) for stage, squared in arrays[0].view(np.float64).reshape(-1, 2)}
