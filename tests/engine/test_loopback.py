"""A Ray of one command's own is closed to other machines."""

import ipaddress
import os
import subprocess
import sys
import time

import psutil
import pytest

from raysim.engine.connection import listen_on_loopback

VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@pytest.mark.parametrize(
    ("address", "environment", "set_"), [(None, None, True), ("auto", None, False), (None, "10.0.0.1:6379", False)]
)
def test_only_a_ray_of_its_own_is_closed(monkeypatch, address, environment, set_):
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
