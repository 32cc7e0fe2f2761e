"""Runs and sweeps on clusters whose autoscaler starts the nodes: from none, up to what is asked for, and down again."""

import os
import subprocess
import sys

import pytest
from autoscaled import autoscaled

from raysim.records import Run

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
    assert "3 workers of 4 CPU each need room, and there is room for 0; 4 of 4 CPU are free" in refused.stderr
    assert "the autoscaler starts no node for them: no type of node fits, or all are at their maximum" in refused.stderr
    assert not (tmp_path / "no").exists()
