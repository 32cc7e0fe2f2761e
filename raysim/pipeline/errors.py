"""Errors of a step, by their consequence for the run."""

from __future__ import annotations


class DivergedError(Exception):
    """A loss, or a tensor to send, holds NaN or infinity: the run ends, recorded as diverged at `step`."""

    def __init__(self, step: int, action: str, where: str) -> None:
        super().__init__(step, action, where)  # exceptions cross processes by their arguments
        self.step, self.action, self.where = step, action, where

    def __str__(self) -> str:
        return f"step {self.step}, {self.action}: NaN or infinity in the {self.where}"


class StageError(Exception):
    """The user's model or data failed inside a stage: the run fails, naming stage, action and step."""


class SenderStoppedError(StageError):
    """A message will not come, because the worker that would send it broke the step off."""


class WorkerLostError(Exception):
    """A worker died or did not answer in time: all stages start again from the last checkpoint."""
