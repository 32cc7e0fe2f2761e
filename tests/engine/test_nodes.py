"""Several Ray nodes on one machine, in a process of their own: stages spread over them, and one node dies."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import same_records

from raysim.records import Run
from raysim.training.train import train

SCRIPT = """
import json, os, sys
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "disabled"  # a closed network of this machine
os.environ["RAY_health_check_initial_delay_ms"] = "500"
os.environ["RAY_health_check_period_ms"] = "500"
os.environ["RAY_health_check_timeout_ms"] = "500"
os.environ["RAY_health_check_failure_threshold"] = "3"
sys.path.insert(0, sys.argv[2])
from configurations import SMALL
from ray.cluster_utils import Cluster
from raysim.config import make_config
from raysim.training.run import Training

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=4), cluster.add_node(num_cpus=4)]
os.environ["RAY_ADDRESS"] = cluster.address
try:
    changes = {"num_stages": 4, "steps": 200, "checkpoint_every_steps": 20}
    config = make_config({**SMALL, **changes, "forward": "EF21(TopK(0.3))", "backward": "Quantize(8)"})
    training = Training(config, out=sys.argv[1])
    placed = []
    for event in training.events():
        if not placed or placed[-1] != training.engine._nodes:
            placed.append(training.engine._nodes)
        if event.kind == "step" and event.row["step"] == 3:
            reaches = training.engine.node_reaches()
        if event.kind == "step" and event.row["step"] == 4 and training._row["restarts"] == 0:
            lost = placed[0][-1]
            node = next(n for n in nodes if n.node_id == lost)
            cluster.remove_node(node, allow_graceful=False)
    head = cluster.head_node.node_id
    print(json.dumps({"placed": placed, "head": head, "reaches": list(reaches.values())}))
finally:
    import ray
    ray.shutdown()
    cluster.shutdown()
"""

DRAINED = SCRIPT.replace(
    """            cluster.remove_node(node, allow_graceful=False)
""",
    """            words = ["drain-node", "--address", cluster.address, "--node-id", node.node_id]
            words += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
            subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *words, "--deadline-remaining-seconds", "120"], check=True)
            training.engine._looked_s = 0.0
""",
).replace("import json, os, sys", "import json, os, subprocess, sys")


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPT, DRAINED], ids=["lost", "drained"])
def test_stages_leave_a_lost_or_draining_node_to_the_same_bits(small, tmp_path, script):
    environment = {**os.environ, "RAY_TMPDIR": "/tmp/raysim-nodes"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "nodes"), str(Path(__file__).parents[1] / "support")],
        capture_output=True, text=True, timeout=240, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    before, after = said["placed"]
    assert before[0] == before[1] == said["head"]  # two neighbours on the driver's node, one on each of the others
    assert len(set(before)) == 3
    assert before[-1] not in after
    run = Run(tmp_path / "nodes")
    assert len(run.row["nodes"]) == len(run.row["node_gflops"]) == 4
    assert min(run.row["node_gflops"]) > 0
    assert all(0 < farthest_s < 10 for _, farthest_s in said["reaches"])
    assert (run.status, run.row["restarts"]) == ("finished", 1)
    changes = {"num_stages": 4, "steps": 200, "checkpoint_every_steps": 20}
    config = small(**changes, forward="EF21(TopK(0.3))", backward="Quantize(8)")
    same_records(run, train(config, engine="inline", out=tmp_path / "inline"))
