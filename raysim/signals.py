"""Handlers of the signals that end a process; a signal that the process was started to ignore stays ignored."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ECHO_S = 1.0  # a second signal within it is an echo: `timeout` signals both the process and its group


@contextmanager
def handled(handler: Callable[[int, Any], None], numbers: Iterable[int] = SIGNALS) -> Iterator[None]:
    """Handle signals within the block, and restore their handlers after it; main thread only.

    Ignored signals are left alone, such as SIGHUP under `nohup`.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in before:
            take(number, handler)
        yield
    finally:
        for number, own in before.items():
            signal.signal(number, own if own is not None else signal.SIG_DFL)


def take(number: int, handler: Callable[[int, Any], None]) -> None:
    """Handle a signal from now on, unless this process ignores it."""
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, handler)
