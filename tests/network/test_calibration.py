"""Calibrations: what this machine was measured to take is what prices are made with; elsewhere the transport's own figures."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from raysim.cli import app
from raysim.network.transport import GLOO, RAY, HostCosts, calibrated_transport, calibration_file, save_calibration

COSTS = HostCosts(call_s=1e-3, message_s=2e-3, byte_s=3e-9, step_s=4e-3, worker_s=5e-3, source="seconds of a test")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))


def test_calibration_replaces_transport_defaults(cache):
    assert calibrated_transport("ray") is RAY
    save_calibration("gloo", COSTS)
    path = save_calibration("ray", COSTS)
    assert path == calibration_file()
    assert calibrated_transport("ray").host == calibrated_transport("gloo").host == COSTS
    assert calibrated_transport("ray").bands == RAY.bands
    assert "seconds of a test" in str(calibrated_transport("ray"))
    path.unlink()
    assert calibrated_transport("gloo") is GLOO


def test_driver_time_grows_with_workers():
    assert COSTS.overheads(3) == {"call_s": 1e-3, "message_s": 2e-3, "byte_s": 3e-9, "step_s": pytest.approx(19e-3)}


@pytest.mark.parametrize("content", ["{", '{"ray": {"call_s": -1, "source": ""}}', '{"ray": {}}', '{"ray": 3}', "[]"])
def test_broken_calibration_gives_one_sentence_error(cache, content):
    save_calibration("ray", COSTS).write_text(content)
    with pytest.raises(
        ValueError, match=r"^The calibration .*transports.json cannot be read \(.*\)\. Run `raysim calibrate`"
    ):
        calibrated_transport("ray")
    done = CliRunner().invoke(app, ["simulate", "digits-cnn", "--device", "T4", "--network", "free"])
    assert (done.exit_code, "Run `raysim calibrate`, or delete it." in done.stderr.replace("\n", " ")) == (2, True)
    save_calibration("gloo", COSTS)  # as the sentence says
    assert calibrated_transport("gloo").host == COSTS


def test_a_cluster_that_does_not_answer_is_bad_input(cache, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # another test's Ray would be used
    for words in (["calibrate"], ["sites", "two-universities", "--address", "127.0.0.1:9"]):
        done = CliRunner().invoke(app, words)
        assert (done.exit_code, "but '127.0.0.1:9' does not answer" in done.stderr) == (2, True)


@pytest.mark.slow
def test_ray_calibration_is_measured_and_cached(cache):
    words = [sys.executable, "-c", "from raysim.cli import main; main()", "calibrate"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "from worker to worker" in done.stdout
    costs = calibrated_transport("ray").host
    assert 0 < costs.call_s < costs.message_s + costs.call_s < 0.1
    assert costs.source.startswith("seconds of Ray ")
