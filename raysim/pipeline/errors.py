"""Errors of a step, classified by their consequence for the run."""

from __future__ import annotations


class DivergedError(Exception):
    """A loss, or a tensor to send, holds NaN or infinity: the run ends, recorded as diverged at `step`."""

    def __init__(self, step: int, action: str, where: str) -> None:
        super().__init__(step, action, where)  # exceptions are pickled by their arguments
        self.step, self.action, self.where = step, action, where

    def __str__(self) -> str:
        return f"step {self.step}, {self.action}: NaN or infinity in the {self.where}"


class StageError(Exception):
    """The user's model or data failed inside a stage: the run fails, naming stage, action and step."""


class SenderStoppedError(StageError):
    """A message will not arrive, because its sender aborted the step."""


class WorkerLostError(Exception):
    """A worker died or timed out: all stages restart from the last checkpoint."""
