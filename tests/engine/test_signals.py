"""Handlers of signals around the start and the end of Ray."""

import ctypes
import signal
import subprocess

import pytest
import ray

from raysim.engine import connection
from raysim.engine.connection import end_ray, start_ray
from raysim.engine.watch import ServersWatch


def test_the_end_of_ray_leaves_the_handlers_of_signals(monkeypatch):
    """Ray's core takes them away below Python, where `signal.getsignal` does not see it."""
    system = ctypes.CDLL(None)
    system.signal.restype = ctypes.c_void_p
    monkeypatch.setattr(ray, "shutdown", lambda: system.signal(signal.SIGTERM, None))
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        end_ray(ServersWatch())
        assert system.signal(signal.SIGTERM, None)  # a handler, not the system's default
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_end_of_ray_does_not_wait_for_a_stopped_server(monkeypatch):
    """Ray's core would: of a raylet or a GCS that was stopped in the last seconds of a run."""
    monkeypatch.setattr(connection, "END_S", 0.1)
    watch, server = ServersWatch(), subprocess.Popen(["sleep", "600"], process_group=0)
    watch.adopt(server)
    server.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(ray, "shutdown", lambda: server.wait(60))
    try:
        end_ray(watch)
    finally:
        server.kill()
    assert server.returncode == -signal.SIGKILL


def test_sigterm_while_ray_starts_waits_for_the_start_and_then_ends_ray(monkeypatch):
    """Ray's own handlers, which kill its servers in the middle of the start, are left out."""
    happened = []

    def init(**options):
        ray._private.utils.set_sigterm_handler(lambda number, frame: pytest.fail("Ray's handler was called"))
        signal.raise_signal(signal.SIGTERM)
        happened.append("started")

    def interrupt(number, frame):
        happened.append("asked")
        raise KeyboardInterrupt

    ours = ray._private.utils.set_sigterm_handler
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: happened.append("ended"))
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            start_ray(num_cpus=1, dashboard=False, on_lost=lambda watch: None, patience_s=0.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert happened == ["started", "asked", "ended"]
    assert ray._private.utils.set_sigterm_handler is ours
