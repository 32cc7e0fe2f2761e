"""Handlers of signals, kept from Ray, which puts its own in their place."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


@contextmanager
def signals_after() -> Iterator[None]:
    """Put off signals until the block ends, and have the handlers that were there before: for a block that starts Ray.

    Ray has SIGTERM end the process, with a stack dump once its core runs, and a start that is broken off leaves processes.
    Where Ray ends the process all the same, KeyboardInterrupt is raised in its place. In other threads than the main one, where
    signals never arrive, nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def keep(number: int, _frame: Any) -> None:
        arrived.append(number)

    before = {number: signal.signal(number, keep) for number in SIGNALS}
    broken_off = False
    try:
        yield
    except SystemExit:
        broken_off = True
        arrived.append(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    for late in arrived:
        signal.raise_signal(late)
    if broken_off:
        raise KeyboardInterrupt
