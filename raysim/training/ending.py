"""Ending a run in order: SIGTERM of Slurm, Kubernetes and spot machines, SIGHUP of a terminal that closes, Ctrl-C."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_S = 1.0  # within which a second signal is the first one's echo: `timeout` sends it to the process and to its group


class Ending:
    """Turns signals into an orderly end: after the first signal, the run ends with its next step and a checkpoint.

    KeyboardInterrupt ends the run at once. It is raised if the run has not begun, at a second signal (more than `ECHO_S` after
    the first), and after the seconds given to `begin`.

    >>> ending = Ending()
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
        self._finishing = False
        self._numbers: socket.socket | None = None  # of signals as they arrive

    @property
    def wanted(self) -> bool:
        """True if a signal has asked for the end."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a process that a signal ended: 128 plus the signal's number, SIGINT's by default."""
        return 128 + (self.signal or signal.SIGINT)

    def notice(self) -> None:
        """Take a signal into account that has arrived, but was not handled: the main thread may wait in Ray for ever."""
        with suppress(BlockingIOError):
            arrived = self._numbers.recv(4096) if self._numbers is not None else b""
            self.signal = self.signal or next((number for number in arrived if number in SIGNALS), None)

    def begin(self, grace_s: float) -> None:
        """Give a run that begins `grace_s` seconds from a signal on."""
        self._grace_s = grace_s

    def finish(self) -> None:
        """Protect the end of a run, which writes its last records: further signals do nothing."""
        self._finishing = True
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def check(self) -> None:
        """Raise KeyboardInterrupt where the end is asked for."""
        if self.wanted:
            raise KeyboardInterrupt

    @contextmanager
    def on_signals(self) -> Iterator[None]:
        """Take the signals of the process until the block ends; only its main thread may."""
        before = {number: signal.signal(number, self._ask) for number in SIGNALS}
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._run_out)
        self._numbers, written = socket.socketpair()
        for end in (self._numbers, written):
            end.setblocking(False)
        other = signal.set_wakeup_fd(written.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(other)
            for end in (self._numbers, written):
                end.close()
            self._numbers = None
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, _frame: Any) -> None:
        again = self.wanted
        if self._finishing or (again and time.monotonic() - self._asked_s < ECHO_S):
            return
        self.signal = self.signal or number
        self._asked_s = self._asked_s or time.monotonic()
        if again or not self._grace_s:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _run_out(self, _number: int, _frame: Any) -> None:
        if not self._finishing:
            raise KeyboardInterrupt
