"""Watch Ray's servers. If they die, Ray kills the driver after up to a minute with only a stack trace; this reports the cause."""

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

LOST_S = 20.0  # without an answer, the head counts as lost; Ray's core waits 60 s
VITAL = ("gcs_server", "raylet")  # Ray ends without these servers
SILENT_LOOKS = 5  # a server that is stopped or refuses connections this often in a row counts as lost
IN_ORDER_S = 10.0  # for a server to end after SIGTERM


class RayWatch(ABC):
    """A thread that checks whether the servers of this driver's Ray are alive.

    If they are lost and the watch has not been ended `patience_s` seconds later, `on_lost` is called once in that thread: the main
    thread may be stuck in Ray for ever.
    """

    look_s: ClassVar[float]  # between two looks
    sentence = ""
    """A description of the loss."""

    def __init__(self, on_lost: Callable[[RayWatch], None] = lambda watch: None, patience_s: float = 0.0) -> None:
        self.lost = False
        self.dashboard_url: str | None = None
        self._on_lost, self._patience_s = on_lost, patience_s
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="Ray watch", daemon=True).start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def look(self) -> bool:
        """Return whether the servers are already known to be lost, without waiting."""
        return self.lost

    def confirm(self) -> None:
        """Wait until servers reported by Ray as leaving have ended: after SIGTERM, a raylet takes up to a second."""
        deadline = time.monotonic() + IN_ORDER_S
        while not self.look() and time.monotonic() < deadline:
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill the remaining servers started by this process, and no others."""
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
    """Watches whether the head of a joined cluster, at host:port, accepts connections.

    After its loss the process ends without Ray's own clean-up, which would wait for the head.
    """

    look_s = 3.0

    def __init__(
        self, address: str, on_lost: Callable[[RayWatch], None] = lambda watch: None, patience_s: float = 0.0
    ) -> None:
        self.address = address
        self.sentence = f"the head of the cluster, {address}, is lost: it has not answered for {LOST_S:g} s"
        self._answered = time.monotonic()
        super().__init__(on_lost, patience_s)

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
    """Watches the servers of a Ray started by this process, and kills the processes they leave behind.

    Each server has its own process group, so that a signal to the driver's group, for example from `timeout`, does not end
    it: the driver shuts Ray down in order.
    """

    look_s = 1.0

    def __init__(self, on_lost: Callable[[RayWatch], None] = lambda watch: None, patience_s: float = 0.0) -> None:
        self._servers: list[subprocess.Popen[bytes]] = []
        self._silent: dict[int, int] = {}  # looks in a row at which a server was stopped or refused connections
        self.gcs: tuple[str, int] | None = None
        """Host and port of the GCS, once it listens. If told to end while actors start, it closes its port but stays alive."""
        super().__init__(on_lost, patience_s)

    def adopt(self, server: subprocess.Popen[bytes]) -> None:
        """Watch a server that has its own process group."""
        self._servers.append(server)

    def look(self) -> bool:
        self.lost = self.lost or self._find(_ended)
        return self.lost

    def _look(self) -> bool:
        return self._find(_ended) or self._find(self._was_silent)

    def _find(self, fault: Callable[[subprocess.Popen[bytes]], str]) -> bool:
        """Return whether a vital server has a fault, and describe it in `sentence`."""
        for server in list(self._servers):
            name = _name(server)
            if name in VITAL and (words := fault(server)):
                self.sentence = f"Ray's {name} {words}"
                _kill_group(server.pid)  # a stopped server, and its agents, which check for it only now and then
                return True
        return False

    def _was_silent(self, server: subprocess.Popen[bytes]) -> str:
        """Describe a stopped or refusing server; counts failed checks, not seconds, since those pass while this process is stopped."""
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
    """Describe how a server ended; "" if it lives."""
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
    """Print a sentence and end the process, from any thread: the main thread may be waiting in Ray."""
    with suppress(OSError):  # the terminal may have gone
        print(sentence, file=sys.stderr, flush=True)
    os._exit(code)


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
