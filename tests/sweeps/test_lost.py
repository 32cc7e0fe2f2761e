"""Sweeps that lose the processes of their trials to the memory monitor of Ray."""

import subprocess
import sys

import pandas as pd
import pytest
from studies import write_study

from raysim.sweeps.runner import Sweep
from raysim.sweeps.search import LOST_PROCESSES
from raysim.sweeps.study_file import read_study

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
def test_a_node_without_memory_fails_every_trial_and_no_sweep(tmp_path, monkeypatch):
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
