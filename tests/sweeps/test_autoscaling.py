"""Runs and sweeps on clusters whose autoscaler starts the nodes: from none, up to what is asked for, and down again."""

import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from autoscaled import autoscaled
from studies import BASE, write_study

from raysim.records import Run

IDLE = "was idle, and the autoscaler ended it"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


def on(address):
    """Return the environment of a driver on a cluster."""
    return {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}


def raysim(address, *words):
    """Return the ended command on a cluster."""
    return subprocess.run(
        [sys.executable, "-m", "raysim.cli", *map(str, words)],
        env=on(address),
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.parametrize("second", [False, True], ids=["first autoscaler", "second autoscaler"])
def test_a_run_gets_its_nodes_and_one_that_fits_no_node_is_refused(tmp_path, second):
    stages = ["train", "digits-cnn", "steps=4", "num_stages=3"]
    with autoscaled(cpus=2, workers=2, second=second) as address:
        done = raysim(address, *stages, "--out", tmp_path / "run")
        assert done.returncode == 0, done.stderr
        run = Run(tmp_path / "run")
        assert run.status == "finished"
        refused = raysim(address, *stages, "cpus_per_stage=4", "--out", tmp_path / "no")
    assert refused.returncode == 2
    assert "3 workers of 4 CPU each do not fit: there is capacity for 0; 4 of 4 CPU are free" in refused.stderr
    assert "the autoscaler starts no node for them: no type of node fits, or all are at their maximum" in refused.stderr
    assert not (tmp_path / "no").exists()


def test_a_sweep_gets_nodes_for_all_its_jobs(tmp_path):
    study = write_study(tmp_path, trials=3, base=BASE | {"steps": 100, "evaluate_every_steps": 50}, engine="ray")
    with autoscaled(cpus=2, workers=3) as address:
        done = raysim(address, "sweep", study, "--jobs", 2, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    frame = pd.read_parquet(tmp_path / "out" / "trials.parquet").sort_values("started_at")
    assert frame["status"].tolist() == ["finished"] * 3
    begun, seconds = frame["started_at"], frame["seconds"]
    assert begun.iloc[1] < begun.iloc[0] + pd.Timedelta(seconds=seconds.iloc[0])  # on a second node
    assert done.stderr.count("has joined") == 1  # the first was there when the first trial began, and none was too many


def test_idle_node_shutdown_does_not_affect_other_nodes(tmp_path):
    study = write_study(tmp_path, trials=1000, engine="ray")
    log = tmp_path / "log"
    with autoscaled(cpus=2, workers=2, idle_minutes=0.1) as address:
        command = [sys.executable, "-m", "raysim.cli", "sweep", study, "--jobs", "1", "--out", tmp_path / "out"]
        with log.open("w") as output:
            sweep = subprocess.Popen(command, env=on(address), stdout=output, stderr=output)

        def wait(done):
            while not done(log.read_text()):
                assert sweep.poll() is None, log.read_text()
                time.sleep(0.2)

        try:
            wait(lambda said: ": finished" in said)
            run = raysim(address, "train", "digits-cnn", "steps=4", "num_stages=2", "--out", tmp_path / "run")
            assert run.returncode == 0, run.stderr
            wait(lambda said: IDLE in said)
            wait(lambda said: ": finished" in said.partition(IDLE)[2])
            sweep.send_signal(signal.SIGINT)
            sweep.wait(60)
        finally:
            sweep.kill()
            sweep.wait()
    said = log.read_text()
    assert said.index("has joined") < said.index(IDLE)
    assert "is lost" not in said
    assert "restarts from its checkpoint" not in said
    statuses = pd.read_parquet(tmp_path / "out" / "trials.parquet")["status"]
    assert set(statuses) <= {"finished", "waiting"}
