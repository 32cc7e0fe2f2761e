"""Connections to Ray: handlers of signals around its start and end, its token, and who may listen."""

import ctypes
import ipaddress
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import ray

from raysim.engine import connection
from raysim.engine.connection import dashboard_sentence, end_ray, listen_on_loopback, protect_token, start_ray
from raysim.engine.watch import ServersWatch


def test_ray_shutdown_keeps_signal_handlers(monkeypatch):
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


def test_ray_shutdown_does_not_wait_for_stopped_server(monkeypatch):
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


def test_token_file_is_private(tmp_path, monkeypatch):
    token = tmp_path / "token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    protect_token()  # where there is none
    assert not token.exists()
    token.write_text("secret")
    token.chmod(0o644)
    protect_token()
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.read_text() == "secret"


def test_dashboard_line_names_token_file_if_required(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    assert dashboard_sentence("127.0.0.1:8265") == "Ray's dashboard: http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    assert dashboard_sentence("127.0.0.1:8265").endswith(f", by the token in {tmp_path / 'token'}")


VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@pytest.mark.parametrize(
    ("address", "environment", "set_"), [(None, None, True), ("auto", None, False), (None, "10.0.0.1:6379", False)]
)
def test_only_own_ray_is_shut_down(monkeypatch, address, environment, set_):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.delenv(VARIABLE)
    if environment is not None:
        monkeypatch.setenv("RAY_ADDRESS", environment)
    listen_on_loopback(address)
    assert os.environ.get(VARIABLE) == ("0" if set_ else None)


def listening(process):
    """Return the addresses on which a process and all that it has started listen."""
    found = set()
    for one in [process, *process.children(recursive=True)]:
        try:
            found |= {each.laddr.ip for each in one.net_connections("inet") if each.status == psutil.CONN_LISTEN}
        except psutil.Error:  # it has ended
            continue
    return {address.removeprefix("::ffff:") for address in found}


@pytest.mark.slow
def test_a_run_listens_on_loopback_alone(tmp_path):
    words = [sys.executable, "-m", "raysim.cli", "train", "digits-cnn", "num_stages=2", "steps=100000"]
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "RAY_ADDRESS")}
    started = subprocess.Popen([*words, "--out", str(tmp_path / "run")], stderr=subprocess.PIPE, env=environment)
    try:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("run/checkpoints/step-*")):
            assert started.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        addresses = listening(psutil.Process(started.pid))
    finally:
        started.terminate()
        started.communicate(timeout=60)
    assert addresses
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses
