"""Errors of a step, classified by their consequence for the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from raysim.notation import described


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


@contextmanager
def blamed(where: str) -> Iterator[None]:
    """Turn errors of the user's code, `sys.exit` included, into a StageError that names the place; divergence passes."""
    try:
        yield
    except DivergedError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and vars(error):  # Ray marks its own, by which it ends a process
            raise
        raise StageError(f"{where}: {described(error)}") from error
