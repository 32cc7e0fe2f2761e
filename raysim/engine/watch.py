"""Watches on Ray's servers: Ray's core ends a driver without them after up to a minute, with a stack trace and no other word."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar, NoReturn

import psutil

LOST_S = 20.0  # without an answer, and the head counts as lost; Ray's core waits for 60
VITAL = ("gcs_server", "raylet")  # servers without which Ray ends
SILENT_LOOKS = 5  # in a row at which a server is stopped or refuses connections, and it counts as lost
IN_ORDER_S = 10.0  # for a server to end after SIGTERM


class RayWatch(ABC):
    """The Ray that this driver started or joined: a thread of its own looks whether the servers are there.

    If they are lost and nobody has ended the watch `patience_s` seconds later, `on_lost` is called in that thread, once: the main
    thread may wait in Ray for ever.
    """

    look_s: ClassVar[float]  # between two looks
    sentence = ""
    """The loss in words."""

    def __init__(self, on_lost: Callable[[RayWatch], None] = lambda watch: None, patience_s: float = 0.0) -> None:
        self.lost = False
        self.dashboard_url: str | None = None
        self._on_lost, self._patience_s = on_lost, patience_s
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="Ray watch", daemon=True).start()

    def end(self) -> None:
        """Watch no longer."""
        self._ended.set()

    def look(self) -> bool:
        """Return whether the servers are lost, as far as it shows at once."""
        return self.lost

    def confirm(self) -> None:
        """Wait for servers that Ray says are leaving: SIGTERM ends a raylet in order, after up to a second."""
        deadline = time.monotonic() + IN_ORDER_S
        while not self.look() and time.monotonic() < deadline:
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill what is left of servers that this process started; others are left alone."""
        return

    @abstractmethod
    def _look(self) -> bool: ...

    def _watch(self) -> None:
        while not self._ended.wait(self.look_s):
            self.lost = self.lost or self._look()
            if self.lost:
                if not self._ended.wait(self._patience_s):
                    self.kill()
                    self._on_lost(self)
                return


class HeadWatch(RayWatch):
    """Sees whether the head of a joined cluster, host:port, still takes connections.

    After its loss the process ends without Ray's own clean-up, which would wait for the head.
    """

    look_s = 3.0

    def __init__(self, address: str, on_lost: Callable[[RayWatch], None] = lambda watch: None) -> None:
        self.address = address
        self.sentence = f"the head of the cluster, {address}, is lost: it has not answered for {LOST_S:g} s"
        self._answered = time.monotonic()
        super().__init__(on_lost)

    def _look(self) -> bool:
        host, _, port = self.address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=self.look_s).close()
            self._answered = time.monotonic()
        except OSError:
            if time.monotonic() - self._answered >= LOST_S:
                atexit.register(_leave)  # before Ray's own, which was registered earlier
                return True
        return False


class ServersWatch(RayWatch):
    """Sees whether the servers of a Ray that this process starts live, and removes what they leave.

    Each server leads a process group of its own, so that a signal to the driver's group, such as that of `timeout`, does not end
    it: the driver ends Ray in order.
    """

    look_s = 1.0

    def __init__(self, on_lost: Callable[[RayWatch], None] = lambda watch: None, patience_s: float = 0.0) -> None:
        self._servers: list[subprocess.Popen[bytes]] = []
        self._silent: dict[int, int] = {}  # looks in a row at which a server was stopped or refused connections
        self.gcs: tuple[str, int] | None = None
        """Host and port of the GCS, once it listens: asked to end while actors start, it closes its port and lives on."""
        super().__init__(on_lost, patience_s)

    def adopt(self, server: subprocess.Popen[bytes]) -> None:
        """Watch a server, which leads a process group of its own."""
        self._servers.append(server)

    def look(self) -> bool:
        self.lost = self.lost or self._find(_ended)
        return self.lost

    def _look(self) -> bool:
        return self._find(_ended) or self._find(self._was_silent)

    def _find(self, fault: Callable[[subprocess.Popen[bytes]], str]) -> bool:
        """Return whether a server that Ray cannot do without has a fault, and put it into words."""
        for server in list(self._servers):
            name = _name(server)
            if name in VITAL and (words := fault(server)):
                self.sentence = f"Ray's {name} {words}"
                _kill_group(server.pid)  # if it is stopped, and its agents, which look for it only now and then
                return True
        return False

    def _was_silent(self, server: subprocess.Popen[bytes]) -> str:
        """Count the looks at which a server is stopped or refuses connections, since seconds pass while this process is stopped."""
        fault = ""
        with suppress(psutil.Error):
            if psutil.Process(server.pid).status() == psutil.STATUS_STOPPED:
                fault = "has been stopped"
            elif _name(server) == "gcs_server" and self.gcs is not None and _refuses(self.gcs):
                fault = "has refused connections"
        looks = self._silent[server.pid] = self._silent.get(server.pid, 0) + 1 if fault else 0
        return f"{fault} for {looks * self.look_s:g} s" if looks >= SILENT_LOOKS else ""

    def kill(self) -> None:
        for server in self._servers:
            _kill_group(server.pid)


def _ended(server: subprocess.Popen[bytes]) -> str:
    """Return in words how a server ended, "" if it lives."""
    code = server.poll()
    if code is None:
        return ""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _name(server: subprocess.Popen[bytes]) -> str:
    return Path(server.args[0]).name  # type: ignore[index, arg-type]


def _refuses(address: tuple[str, int]) -> bool:
    """Return whether nothing listens at an address."""
    try:
        socket.create_connection(address, timeout=1).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def end_process(sentence: str, code: int = 1) -> NoReturn:
    """End the process with a sentence, from any thread: the main one waits in Ray."""
    with suppress(OSError):  # the terminal may have gone
        print(sentence, file=sys.stderr, flush=True)
    os._exit(code)


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
