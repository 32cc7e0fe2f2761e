"""A watch on the head of a cluster: Ray's core ends a driver without a head after a minute, with a stack trace and no other word."""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from collections.abc import Callable

LOOK_S = 3.0  # between two looks
LOST_S = 20.0  # without an answer, and the head counts as lost; Ray's core waits for 60


class HeadWatch:
    """Sees whether the head of a cluster, host:port, still takes connections, in a thread of its own.

    `on_lost` is called in that thread, once, when the head has taken none for `LOST_S`. From then on Ray's own clean-up, which would
    wait for the head, is left out at the end of the process.
    """

    def __init__(self, address: str, on_lost: Callable[[HeadWatch], None] = lambda watch: None) -> None:
        self.address = address
        self.lost = False
        self._on_lost = on_lost
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="head watch", daemon=True).start()

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()

    @property
    def sentence(self) -> str:
        """The loss in words."""
        return f"the head of the cluster, {self.address}, is lost: it has not answered for {LOST_S:g} s"

    def _watch(self) -> None:
        host, _, port = self.address.rpartition(":")
        answered = time.monotonic()
        while not self._ended.wait(LOOK_S):
            try:
                socket.create_connection((host, int(port)), timeout=LOOK_S).close()
                answered = time.monotonic()
            except OSError:
                if time.monotonic() - answered >= LOST_S:
                    self.lost = True
                    atexit.register(_leave)  # before Ray's own, which was registered earlier
                    self._on_lost(self)
                    return


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
