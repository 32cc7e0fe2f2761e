"""Two sweeps at once on a cluster whose head has no CPUs, as KubeRay makes it, while a node joins."""

import json
import os
import subprocess
import sys

import pandas as pd
import pytest
from studies import BASE, write_study

SCRIPT = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "disabled"  # a closed network of this machine
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
study, out = sys.argv[1], Path(sys.argv[2])


def sweep(name, trials):
    words = ["sweep", study, "--trials", str(trials), "--out", str(out / name), "--address", cluster.address, "--wait", "200"]
    return subprocess.Popen([sys.executable, "-m", "raysim.cli", *words], stderr=(out / f"{name}.log").open("w"))


def wait(seconds, done):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


try:
    first = sweep("first", 8)
    wait(120, lambda: len(list((out / "first").glob("trials/*/parts"))) == 2)  # all CPUs are taken
    first.send_signal(signal.SIGSTOP)  # it keeps them: its trials may end, but it does not hear of that
    second = sweep("second", 2)
    wait(120, lambda: "waiting for room" in (out / "second.log").read_text())
    first.send_signal(signal.SIGCONT)
    wait(120, lambda: list((out / "second").glob("trials/*")))
    first.send_signal(signal.SIGSTOP)  # it cannot end before it has seen the node
    cluster.add_node(num_cpus=2)
    time.sleep(6)
    first.send_signal(signal.SIGCONT)
    print(json.dumps([first.wait(250), second.wait(250)]))
finally:
    cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_second_sweep_gets_its_share_and_nodes_that_join_are_used(tmp_path):
    base = BASE | {"steps": 60, "checkpoint_every_steps": 10}
    study = write_study(tmp_path, base=base, engine="ray", sampler="random")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(study), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=590,
        env={**os.environ, "RAY_TMPDIR": "/tmp/raysim-two"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in ("first", "second")}
    assert json.loads(done.stdout.strip().splitlines()[-1]) == [0, 0], logs
    first, second = (pd.read_parquet(tmp_path / name / "trials.parquet") for name in ("first", "second"))
    assert set(first["status"]) | set(second["status"]) <= {"finished", "diverged"}
    assert second["started_at"].min() < first["started_at"].max()  # it did not wait for the first one's end
    assert "has joined" in logs["first"]
    assert "waiting for room since 10 s: " in logs["second"]
    assert "raysim sweep" in logs["second"] or "raysim.cli" in logs["second"]  # who holds it
