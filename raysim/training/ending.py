"""Ending a run in order: SIGTERM of Slurm, Kubernetes and spot machines, SIGHUP of a terminal that closes, Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """Turns signals into an orderly end: after the first signal, the run ends with its next step and a checkpoint.

    KeyboardInterrupt ends the run at once. It is raised if the run has not begun, at a second signal, and after the seconds given
    to `begin`.

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
        self._grace_s = 0.0
        self._finishing = False

    @property
    def wanted(self) -> bool:
        """True if a signal has asked for the end."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a process that a signal ended: 128 plus the signal's number, SIGINT's by default."""
        return 128 + (self.signal or signal.SIGINT)

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
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, _frame: Any) -> None:
        if self._finishing:
            return
        again = self.wanted
        self.signal = self.signal or number
        if again or not self._grace_s:
            raise KeyboardInterrupt
        signal.setitimer(signal.ITIMER_REAL, self._grace_s)

    def _run_out(self, _number: int, _frame: Any) -> None:
        if not self._finishing:
            raise KeyboardInterrupt
