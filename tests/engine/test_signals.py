"""Handlers of signals around the start and the end of Ray."""

import ctypes
import signal

import ray

from raysim.engine.init import end_ray


def test_the_end_of_ray_leaves_the_handlers_of_signals(monkeypatch):
    """Ray's core takes them away below Python, where `signal.getsignal` does not see it."""
    system = ctypes.CDLL(None)
    system.signal.restype = ctypes.c_void_p
    monkeypatch.setattr(ray, "shutdown", lambda: system.signal(signal.SIGTERM, None))
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        end_ray()
        assert system.signal(signal.SIGTERM, None)  # a handler, not the system's default
    finally:
        signal.signal(signal.SIGTERM, before)
