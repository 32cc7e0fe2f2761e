"""A run's events, the phases of its start, and its orderly shutdown on a signal."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from raysim.signals import ECHO_S, SIGNALS, handled

FIRST_S = 10.0  # of a phase before the first message
EVERY_S = 30.0  # between further messages


def to_stderr(line: str) -> None:
    """Print a line on the error stream, unbuffered."""
    print(line, file=sys.stderr, flush=True)


class Phases:
    """A thread that prints what a command is waiting for, if a phase of its start takes long.

    `say` prints a line; without it nothing is printed. The last phase ends with the block.

    >>> with Phases(print) as phases:
    ...     phases.enter("Ray's servers")
    ...     phases.current
    "Ray's servers"
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self.say = say
        self.current: str | None = None
        """What the command is waiting for now."""
        self._began = 0.0
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Phases:
        return self

    def __exit__(self, *error: object) -> None:
        self.enter(None)

    def enter(self, phase: str | None) -> None:
        """End the current phase, and begin one named by what the command waits for, or none."""
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


class HopelessError(Exception):
    """A screened run is not worth training; the message is the reason."""


class Event(NamedTuple):
    """A new row of `steps` or `evals`, the progress of an evaluation, a restart and its reason, or a warning."""

    kind: str
    """"step", "evaluating", "eval", "restart" or "warning"."""
    row: Mapping[str, Any]
    """Of a warning during steps: its step, its reason, and whether compression `breaks` trained weights."""
    measures: tuple[str, ...] = ()
    """The measures in the row of an evaluation."""


class Interruption:
    """Turns signals into an orderly shutdown: after the first signal, the run ends after its next step, with a checkpoint.

    KeyboardInterrupt, which ends the run at once, is raised if the run has not begun, at a second signal (more than `ECHO_S`
    after the first), and after the grace period given to `begin`.

    >>> ending = Interruption()
    >>> with ending.on_signals():
    ...     ending.begin(grace_s=60.0)
    ...     signal.raise_signal(signal.SIGTERM)
    ...     ending.finish()
    >>> ending.wanted, ending.exit_code
    (True, 143)
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._asked_s = 0.0  # by the monotonic clock, when the first signal arrived
        self._grace_s = 0.0
        self._grace: threading.Timer | None = None  # the time left after the first signal
        self._finishing = False
        self._numbers: socket.socket | None = None  # receives the numbers of arriving signals

    @property
    def wanted(self) -> bool:
        """True after a signal to end the run."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a process ended by a signal: 128 plus the signal's number, SIGINT's by default."""
        return 128 + (self.signal or signal.SIGINT)

    def notice(self) -> None:
        """Register a signal that has arrived but was not handled, since the main thread may be stuck in Ray."""
        with suppress(BlockingIOError):
            arrived = self._numbers.recv(4096) if self._numbers is not None else b""
            self.signal = self.signal or next((number for number in arrived if number in SIGNALS), None)

    def begin(self, grace_s: float) -> None:
        """Mark the run as begun: after a signal it has `grace_s` seconds to end."""
        self._grace_s = grace_s

    def finish(self) -> None:
        """Ignore further signals, while the run writes its last records."""
        self._finishing = True
        if self._grace is not None:
            self._grace.cancel()

    def check(self) -> None:
        """Raise KeyboardInterrupt after a signal to end the run."""
        if self.wanted:
            raise KeyboardInterrupt

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle the process's signals within the block; main thread only."""
        self._numbers, written = socket.socketpair()
        for end in (self._numbers, written):
            end.setblocking(False)
        other = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        with handled(self._ask):
            try:
                yield
            finally:
                self.finish()
                if self._grace is not None:
                    self._grace.join()  # its signal must not come once the handlers are gone
                signal.set_wakeup_fd(other)
                for end in (self._numbers, written):
                    end.close()
                self._numbers = None

    def _ask(self, number: int, _frame: Any) -> None:
        again = self.wanted
        if self._finishing:
            return
        late = self._grace is not None and self._grace.finished.is_set()
        if again and not late and time.monotonic() - self._asked_s < ECHO_S:
            return
        self.signal = self.signal or number
        self._asked_s = self._asked_s or time.monotonic()
        if again or not self._grace_s:
            raise KeyboardInterrupt
        # not `signal.alarm`, which may be the caller's
        self._grace = threading.Timer(self._grace_s, self._run_out, (threading.main_thread().ident or 0, number))
        self._grace.daemon = True
        self._grace.start()

    def _run_out(self, main: int, number: int) -> None:
        """Send the signal again to the main thread, where it ends the run at once."""
        assert self._grace is not None
        self._grace.finished.set()
        signal.pthread_kill(main, number)
