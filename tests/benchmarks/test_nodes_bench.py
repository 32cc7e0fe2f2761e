"""The benchmark of a sweep over several nodes: every kind of process is found, and has spent CPU seconds."""

import json
import subprocess
import sys

import pytest
from raysim_benchmarks.processes import kind_of


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("ray::SweepTrial.train", "trials"),
        ("ray::StageActor.perform", "stages"),
        ("ray::IDLE", "idle workers"),
        ("ray::DashboardAgent", "agents"),
        ("python ray/_private/workers/default_worker.py --raylet-name=raylet", "idle workers"),
        ("ray/core/src/ray/raylet/raylet --python_worker_command=default_worker.py --agent", "raylets"),
        ("ray/core/src/ray/gcs/gcs_server --log_dir=/tmp", "head"),
        ("python -u ray/_private/log_monitor.py", "other"),
    ],
)
def test_processes_are_recognised_by_command_line(line, kind):
    assert kind_of(line.split()) == kind


@pytest.mark.slow
def test_cpu_seconds_are_counted_by_kind_of_process(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp/raysim-bench")
    words = ["bench", "nodes", "--nodes", "2", "--trials", "2", "--steps", "2", "--json", str(tmp_path / "found.json")]
    subprocess.run([sys.executable, "-m", "raysim.cli", *words], check=True, timeout=280)
    (row,) = json.loads((tmp_path / "found.json").read_text())["results"]
    assert (row["nodes"], row["trials"]) == (2, 2)
    spent = row["cpu_s_of_a_trial"]
    assert {"driver", "head", "raylets", "agents", "trials", "stages"} <= spent.keys()
    assert min(spent.values()) >= 0
    assert spent["stages"] > 1  # four processes that import torch
