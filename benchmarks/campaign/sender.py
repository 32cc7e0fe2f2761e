"""A command line that a signal hits during a call of a function: `sender.py MOMENT train ...`.

MOMENT is JSON: `function` as module:name, the number of the `call`, among those with the `argument` where it is not null, and
the seconds `after_s` its begin. A call that ends before has the signal at its end. The signal is SIGTERM to this process, or the
`blow` to a process of its Ray: `words`, of which its command line has one, the `number` of the signal, `pause_s` after which it is
continued, null for never, and a file `struck`, which is written once the signal is sent.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

START_S = 20.0  # within which a process that is to be struck must start


def strike(words: Sequence[str], number: int, pause_s: float | None, struck: str) -> None:
    """Send a signal to the first descendant of this process that has one of the words in its name or first arguments."""
    deadline, own = time.monotonic() + START_S, psutil.Process().cmdline()
    while time.monotonic() < deadline:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                arguments = process.cmdline()
                line = " ".join([process.name(), *arguments[:3]])  # a raylet's words name its agents
                if arguments != own and any(word in line for word in words):  # those of a fork, at first
                    process.send_signal(number)
                    Path(struck).write_text(line)
                    if pause_s is not None:
                        time.sleep(pause_s)
                        process.send_signal(signal.SIGCONT)
                    return
        time.sleep(0.02)


def send_during(function: str, argument: str | None, call: int, after_s: float, blow: dict[str, Any] | None) -> None:
    """Replace a function by itself and a signal during one of its calls."""
    module, _, path = function.partition(":")
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, import_module(module))
    original, calls, once = getattr(owner, name), [], threading.Lock()

    def send() -> None:
        if not once.acquire(blocking=False):
            return
        if blow is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            threading.Thread(target=strike, kwargs=blow, daemon=True).start()

    @functools.wraps(original)
    def disturbed(*arguments: Any, **options: Any) -> Any:
        counts = argument is None or argument in arguments
        if counts:
            calls.append(None)
        if not counts or len(calls) != call:
            return original(*arguments, **options)
        timer = threading.Timer(after_s, send)
        timer.daemon = True
        timer.start()
        try:
            return original(*arguments, **options)
        finally:
            send()

    setattr(owner, name, disturbed)


if __name__ == "__main__":
    send_during(**json.loads(sys.argv.pop(1)))
    from raysim.cli import main

    main()
