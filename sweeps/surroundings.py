"""Surroundings of a sweep: Tune's settings in the environment, and signals that end it in order."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from raysim.training.ending import ECHO_S, SIGNALS

# Settings of Tune: no output, no files of its own beside our rows, and no snapshots.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # results on the way have no loss
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "600",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}


@contextmanager
def tune_settings(settings: Mapping[str, str]) -> Iterator[None]:
    """Have settings of Tune in the environment, where they are not."""
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@contextmanager
def ending_in_order(interrupt: Callable[[int], None]) -> Iterator[None]:
    """Let the first Ctrl-C, SIGTERM or SIGHUP end the sweep in order, and the second, after `ECHO_S`, at once."""
    asked: list[float] = []

    def handle(number: int, frame: Any) -> None:
        if asked and time.monotonic() - asked[0] < ECHO_S:
            return
        if asked:
            raise KeyboardInterrupt
        asked.append(time.monotonic())
        interrupt(number)
        with suppress(OSError):  # the terminal may have gone
            print("\nending: trials under way are kept for a resume", file=sys.stderr)

    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
