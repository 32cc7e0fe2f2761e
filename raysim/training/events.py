"""Events of a run, and the phases of its start, which may take minutes on a busy machine: for displays of its progress."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

FIRST_S = 10.0  # of a phase, after which the first message comes
EVERY_S = 30.0  # between further messages


def to_stderr(line: str) -> None:
    """Print a line on the error stream at once."""
    print(line, file=sys.stderr, flush=True)


class Phases:
    """Prints what a command waits for if a phase of its start lasts, from a thread of its own.

    `say` prints a line; without it nothing is printed. The last phase ends with the block.

    >>> with Phases(print) as phases:
    ...     phases.enter("Ray's servers")
    ...     phases.current
    "Ray's servers"
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.say = say
        self.current: str | None = None
        """What the command waits for now."""
        self._began = 0.0
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, *error: object) -> None:
        self.enter(None)

    def enter(self, phase: str | None) -> None:
        """Begin a phase, named by what the command waits for, or none; the one before it ends."""
        self.current, self._began = phase, time.monotonic()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if phase is not None and self.say is not None:
            self._wait(phase, FIRST_S)

    def _wait(self, phase: str, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._tell, (phase,))
        self._timer.daemon = True
        self._timer.start()

    def _tell(self, phase: str) -> None:
        if self.current == phase and self.say is not None:
            self.say(f"waiting for {phase} since {time.monotonic() - self._began:.0f} s")
            self._wait(phase, EVERY_S)


class Event(NamedTuple):
    """A new row of `steps` or `evals`, the progress of an evaluation, a restart and its reason, or a warning."""

    kind: str
    """"step", "evaluating", "eval", "restart" or "warning"."""
    row: Mapping[str, Any]
    measures: tuple[str, ...] = ()
    """The measures in the row of an evaluation."""
