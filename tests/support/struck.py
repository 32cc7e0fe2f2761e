"""A command that is struck in a phase: its Ray's servers are killed or stopped, or its group gets a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

BEGIN_S = 200.0  # within which a phase has to begin
LIMIT_S = 300.0
GONE_S = 5.0  # within which processes that were killed must have ended


class Struck(NamedTuple):
    """The end of a command that was struck."""

    code: int
    said: str
    """Its standard error."""
    took_s: float
    """Seconds from the blow to its end."""
    left: list[str]
    """Processes that it, or those that it started, had started, and that outlive it."""


def strike(
    words: list[str], begun: Callable[[str, psutil.Process], bool], blow: Callable[[psutil.Process], None]
) -> Struck:
    """Run `raysim` with these words, strike it once when its phase has begun by its output and processes, and await its end."""
    driver = subprocess.Popen(
        [sys.executable, "-m", "raysim.cli", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
        env=os.environ | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
    )
    said: list[str] = []
    reader = threading.Thread(target=lambda: said.extend(iter(driver.stderr.readline, "")), daemon=True)
    reader.start()
    me, started, struck = psutil.Process(driver.pid), set[psutil.Process](), None
    try:
        deadline = time.monotonic() + BEGIN_S
        while driver.poll() is None:
            try:
                started |= set(me.children(recursive=True))
            except psutil.Error:
                continue
            if struck is None and begun("".join(said), me):
                blow(me)
                struck, deadline = time.monotonic(), time.monotonic() + LIMIT_S
            assert time.monotonic() < deadline, "".join(said)
            time.sleep(0.02)
        took_s = time.monotonic() - (struck or 0.0)
        reader.join()
        assert struck is not None, "".join(said)
        _, alive = psutil.wait_procs(started, timeout=GONE_S)
        return Struck(driver.returncode, "".join(said), took_s, [" ".join(process.cmdline()) for process in alive])
    finally:
        for process in {me, *started}:
            if process.is_running():
                process.kill()
        driver.wait()


def server(driver: psutil.Process, name: str) -> psutil.Process | None:
    """Return the server of a driver's Ray by its name, None where it has not started."""
    return next((child for child in driver.children() if child.name() == name), None)


def to_group(driver: psutil.Process) -> None:
    """Send SIGTERM to the driver and then to its group, as `timeout` does."""
    driver.terminate()
    os.killpg(driver.pid, signal.SIGTERM)
