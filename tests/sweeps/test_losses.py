"""A sweep whose driver, trials or Ray's servers are lost; and the dashboards on what it leaves."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pandas as pd
import pytest
from studies import write_study

from raysim.sweeps.runner import Sweep
from raysim.sweeps.search import LOST_PROCESSES
from raysim.sweeps.study_file import read_study


def _served(process, url):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"{url} does not answer")


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_the_dashboards_show_the_study(tmp_path):
    pytest.importorskip("optuna_dashboard")
    pytest.importorskip("tensorboard")
    path = write_study(tmp_path, trials=2, engine="inline")
    environment = {**os.environ, "RAY_TMPDIR": "/tmp/raysim-sweep"}
    done = subprocess.run(
        [sys.executable, "-m", "raysim.cli", "sweep", str(path), "--out", "out", "--dashboard"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "Ray's dashboard: http://127.0.0.1:" in done.stderr
    ports = [_free_port(), _free_port()]
    module = "import sys; from optuna_dashboard._cli import main; main()"
    commands = [
        ["-c", module, "sqlite:///out/optuna.db", "--host", "127.0.0.1", "--port", str(ports[0])],
        ["-m", "tensorboard.main", "--logdir", "out/tensorboard", "--host", "127.0.0.1", "--port", str(ports[1])],
    ]
    running = [
        subprocess.Popen([sys.executable, *command], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        studies = json.loads(_served(running[0], f"http://127.0.0.1:{ports[0]}/api/studies"))["study_summaries"]
        assert [study["study_name"] for study in studies] == ["small"]
        url = f"http://127.0.0.1:{ports[0]}/api/studies/{studies[0]['study_id']}?after=0"
        shown = json.loads(_served(running[0], url))
        assert [trial["state"] for trial in shown["trials"]] == ["Complete", "Complete"]
        assert [len(trial["values"]) for trial in shown["trials"]] == [2, 2]
        deadline = time.monotonic() + 60
        while not (tags := json.loads(_served(running[1], f"http://127.0.0.1:{ports[1]}/data/plugin/scalars/tags"))):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert set(tags) == {"0-s0", "1-s0"}
        assert {"train/loss", "eval/accuracy_on"} <= set(tags["0-s0"])
    finally:
        for process in running:
            process.kill()
            process.wait()


SAID = "Task was killed due to the node running low on memory."


@pytest.fixture
def killed(monkeypatch, ray):
    """Return a function that makes the first reports of trials the error that Ray raises after it has killed their process."""

    def kill(reports):
        get, left = ray.get, [reports]

        def fail(refs, **options):
            found = get(refs, **options)
            if left[0] and isinstance(found, dict) and "trial_id" in found:
                left[0] -= 1
                raise ray.exceptions.OutOfMemoryError(f"{SAID}\nMemory on the node was 22 GB.")
            return found

        monkeypatch.setattr(ray, "get", fail)
        return left

    return kill


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, LOST_PROCESSES + 1])
def test_a_trial_killed_for_memory_is_tried_again_then_failed_and_the_sweep_goes_on(killed, tmp_path, kills):
    left = killed(kills)
    one = Sweep(read_study(write_study(tmp_path, trials=2, engine="inline", jobs=1)), out=tmp_path / "out")
    one.run()
    assert left == [0]
    first, second = one.rows
    assert second.status == "finished"
    if kills == 1:
        assert (first.status, first.error) == ("finished", None)
    else:
        assert (first.status, first.error) == ("failed", f"gave up after losing its processes 4 times: {SAID[:-1]}")


@pytest.mark.slow
def test_out_of_memory_node_fails_trials_not_sweep(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")  # of which every machine has more in use
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    path = write_study(tmp_path, trials=2, engine="inline", jobs=1)
    words = [sys.executable, "-m", "raysim.cli", "sweep", str(path), "--out", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert "raysim: all 2 trials failed, the first of them: gave up after losing its processes 4 times" in done.stderr
    frame = pd.read_parquet(tmp_path / "out" / "trials.parquet")
    assert frame["status"].tolist() == ["failed"] * 2
    assert frame["error"].str.endswith("killed due to the node running low on memory").all()
