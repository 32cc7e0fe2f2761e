"""A command line that sends itself SIGTERM during a call of a function: `sender.py MOMENT train ...`.

MOMENT is JSON: `function` as module:name, the number of the `call`, among those with the `argument` where it is not null, and
the seconds `after_s` its begin. A call that ends before has the signal at its end.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
from importlib import import_module
from typing import Any


def send_during(function: str, argument: str | None, call: int, after_s: float) -> None:
    """Replace a function by itself and a signal during one of its calls."""
    module, _, path = function.partition(":")
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, import_module(module))
    original, calls, once = getattr(owner, name), [], threading.Lock()

    def send() -> None:
        if once.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGTERM)

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
