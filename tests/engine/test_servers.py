"""Ray's own servers die or are stopped: a run goes on with a fresh Ray, and no process is left."""

import os
import shutil
import signal
import socket
import threading

import pytest
from struck import server, strike, to_group

from raysim.engine.ray_internals import new_servers
from raysim.engine.watch import ServersWatch

KEYS = ["num_stages=2", "steps=900", "checkpoint_every_steps=100", "evaluate_every_steps=300", "data.test_samples=300"]
WORDS = {
    signal.SIGKILL: "was ended by SIGKILL",
    signal.SIGTERM: "ended with exit code 0",  # in order: Ray tells the driver that its node has left
    signal.SIGSTOP: "has been stopped for 5 s",
}
PHASES = {
    "start": lambda name: lambda said, driver: server(driver, name) is not None,
    "training": lambda name: lambda said, driver: "\nstep " in said,
    "evaluation": lambda name: lambda said, driver: "evaluating" in said,
}


def to_all(driver):
    """Send SIGTERM to the driver and to all that it has started, as some schedulers do."""
    for process in [driver, *driver.children(recursive=True)]:
        process.terminate()


@pytest.mark.slow
@pytest.mark.parametrize(("blow", "phase"), [(to_group, "start"), (to_all, "training"), (to_group, "evaluation")])
def test_sigterm_to_process_group_is_an_interruption(tmp_path, blow, phase):
    words = ["train", "digits-cnn", *KEYS, "--out", str(tmp_path / "run")]
    struck = strike(words, PHASES[phase]("raylet"), blow)
    assert struck.left == []
    assert struck.code == 143
    last = struck.said.splitlines()[-1]
    assert last.startswith("raysim: interrupted. To continue: raysim train digits-cnn ")
    assert last.endswith(" --resume")


@pytest.mark.slow
def test_calibration_ends_with_the_loss_of_its_servers():
    def actors(_said, driver):
        return any(child.name().startswith("ray::") for child in driver.children(recursive=True))

    struck = strike(["calibrate"], actors, lambda driver: server(driver, "gcs_server").kill())
    assert struck.left == []
    assert struck.code == 1
    assert struck.said.splitlines()[-1] == (
        "raysim: Ray's gcs_server was ended by SIGKILL. Once Ray's servers can run, repeat the calibration."
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_watch_detects_killed_or_stopped_server(tmp_path, monkeypatch, number):
    from ray._private import services

    monkeypatch.setattr(ServersWatch, "look_s", 0.05)
    program = tmp_path / "raylet"
    program.symlink_to(shutil.which("sleep"))
    lost = threading.Event()
    watch = ServersWatch(lambda watch: lost.set())
    with new_servers(watch.adopt):
        process = services.ConsolePopen([str(program), "60"])
    assert os.getpgid(process.pid) == process.pid  # out of reach of signals to the group of the driver
    assert not watch.look()
    process.send_signal(number)
    assert lost.wait(60)
    assert watch.sentence.startswith(f"Ray's raylet {WORDS[number].partition(' for')[0]}")
    assert process.wait(60) == -signal.SIGKILL  # a stopped one is killed


def test_watch_detects_gcs_without_port(tmp_path, monkeypatch):
    from ray._private import services

    monkeypatch.setattr(ServersWatch, "look_s", 0.05)
    program = tmp_path / "gcs_server"
    program.symlink_to(shutil.which("sleep"))
    lost = threading.Event()
    watch = ServersWatch(lambda watch: lost.set())
    with new_servers(watch.adopt):
        process = services.ConsolePopen([str(program), "60"])
    with socket.create_server(("127.0.0.1", 0)) as listening:
        watch.gcs = listening.getsockname()
        assert not lost.wait(1)  # many looks
    assert lost.wait(60)
    assert watch.sentence.startswith("Ray's gcs_server has refused connections for ")
    assert process.wait(60) == -signal.SIGKILL
