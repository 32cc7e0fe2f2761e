"""Cluster files against Ray's own schema and moto's EC2; sweeps over several Ray nodes on this machine."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from studies import BASE, write_study

from raysim.engine.delivery import FAR_BYTES, RAY_SETTING
from raysim.records import Run

CLUSTERS = Path(__file__).parents[2] / "sweeps" / "cluster"


@pytest.mark.parametrize("name", ["aws", "gcp", "on-premises"])
def test_cluster_files_are_valid_and_closed(name):
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text()))
    validate_config(config)
    head, worker = (" ".join(config[f"{kind}_start_ray_commands"]) for kind in ("head", "worker"))
    assert "--dashboard-host=127.0.0.1" in head
    assert "0.0.0.0" not in head
    assert "--address=$RAY_HEAD_IP:6379" in worker
    for commands in (head, worker):
        assert "RAY_AUTH_MODE=token" in commands
        assert "RAY_USAGE_STATS_ENABLED=0" in commands
    assert config["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    assert any("raysim" in command for command in config["setup_commands"])


def test_the_job_for_kubernetes_is_one_that_ray_reads():
    """KubeRay's own check is on the cluster; Ray's autoscaler reads the same resource, and validates what it reads."""
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
    from ray.autoscaler._private.util import validate_config

    job = yaml.safe_load((CLUSTERS / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"]["entrypoint"].startswith("raysim sweep quickstart --address auto --out s3://")
    spec = job["spec"]["rayClusterSpec"]
    assert spec["authOptions"] == {"mode": "token"}
    config = _derive_autoscaling_config_from_ray_cr(
        {"metadata": {"name": "raysim", "namespace": "default"}, "spec": spec}
    )
    validate_config(config)
    stages = config["available_node_types"]["stages"]
    assert (stages["min_workers"], stages["max_workers"]) == (0, 8)
    assert stages["resources"]["GPU"] == 1
    assert config["available_node_types"][config["head_node_type"]]["resources"]["CPU"] == 0


@pytest.mark.parametrize("name", ["aws.yaml", "gcp.yaml", "on-premises.yaml", "kuberay.yaml", "slurm.sh"])
def test_every_head_is_started_with_the_threshold_of_calls(name):
    values = re.findall(rf"{RAY_SETTING}\W+(\d+)", (CLUSTERS / name).read_text())
    assert [int(value) for value in values] == [FAR_BYTES]


def test_kuberays_command_of_the_head_is_one_that_a_shell_reads():
    """KubeRay joins the parameters of `ray start` to one line of a shell, `--name=value` each."""
    job = yaml.safe_load((CLUSTERS / "kuberay.yaml").read_text())
    parameters = job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]
    options = dict(word.split("=", 1) for word in shlex.split(" ".join(f"--{k}={v}" for k, v in parameters.items())))
    assert json.loads(options["--system-config"]) == {RAY_SETTING: FAR_BYTES}


def test_the_batch_script_for_slurm_is_one_that_bash_reads():
    subprocess.run(["bash", "-n", CLUSTERS / "slurm.sh"], check=True)


BUCKET = """
import os, sys, time

os.environ["RAY_AUTH_MODE"] = "disabled"  # a closed network of this machine
from ray.cluster_utils import Cluster
from raysim.config import ConfigError
from raysim.sweeps import runner
from raysim.sweeps.study_file import read_study

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2, env_vars={"AWS_ENDPOINT_URL": "http://127.0.0.1:1"})
sweep = runner.Sweep(read_study(sys.argv[1]), out=sys.argv[2], address=cluster.address)
try:
    sweep.run()
except ConfigError as error:
    print(error)
finally:
    import ray
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
def test_a_bucket_that_a_node_does_not_reach_is_refused_before_a_trial_begins(buckets, tmp_path):
    bucket = buckets.make()
    done = subprocess.run(
        [sys.executable, "-c", BUCKET, str(write_study(tmp_path)), f"{bucket}/sweep"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "RAY_TMPDIR": "/tmp/raysim-sweep"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^`out` must be a bucket that every node reaches, but on node [\d.]+ s3://", done.stdout)
    assert done.stdout.strip().endswith("Give the credentials to every node (docs/clusters.md).")
    assert not buckets.keys(bucket)


SCRIPT = """
import json, os, sys
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "disabled"  # a closed network of this machine
for name, value in {"initial_delay_ms": 500, "period_ms": 500, "timeout_ms": 500, "failure_threshold": 3}.items():
    os.environ[f"RAY_health_check_{name}"] = str(value)
from ray.cluster_utils import Cluster
from raysim.sweeps import runner
from raysim.sweeps.study_file import read_study

study, out, bucket, *cpus = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=int(each)) for each in cpus]
sweep = runner.Sweep(read_study(study), out=bucket if bucket != "-" else out, address=cluster.address)
lost, places = [], []


class Killing(runner.Watch):
    def on_step_end(self, iteration, trials, **info):
        super().on_step_end(iteration, trials, **info)
        going = [row.runs[0] for row in sweep.ledger.running]
        if not lost and len(going) == sweep.allocation.share.jobs and all(list(sweep.folder.glob(f"{one}/*/step-*")) for one in going):
            from ray._private.state import actors
            alive = [a for a in actors().values() if a["State"] == "ALIVE" and a["ActorClassName"] == "StageActor"]
            places.extend(sorted({actor["Address"]["NodeID"] for actor in alive}))
            node = next(node for node in nodes if node.node_id in places)
            cluster.remove_node(node, allow_graceful=False)
            lost.append(node.node_id)


runner.Watch = Killing
try:
    sweep.run()
    print(json.dumps({"places": places, "lost": lost}))
finally:
    import ray
    ray.shutdown()
    cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("bucket", "cpus"),
    [
        pytest.param(False, ["2", "2"], id="of two trials that then wait for each other's CPUs"),
        pytest.param(True, ["1", "1", "1"], id="of one trial"),
    ],
)
def test_lost_node_costs_no_trial(tmp_path, bucket, cpus):
    base = BASE | {"num_stages": 3, "steps": 150, "checkpoint_every_steps": 10, "evaluate_every_steps": 50}
    path = write_study(tmp_path, trials=3, base=base, engine="ray")
    where = (tmp_path / "bucket").as_uri() if bucket else "-"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(tmp_path / "out"), where, *cpus],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "RAY_TMPDIR": "/tmp/raysim-sweep"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(raylet)" not in done.stdout
    assert done.stderr.count("is lost: the trials") == 1
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(said["places"]) == 3
    assert len(said["lost"]) == 1
    folder = tmp_path / ("bucket" if bucket else "out")
    frame = pd.read_parquet(folder / "trials.parquet")
    assert frame["status"].tolist() == ["finished"] * 3
    for runs in frame["runs"]:
        assert Run(folder / runs[0]).status == "finished"
    assert (folder / "optuna.db").is_file()


@pytest.mark.slow
def test_aws_request_matches_cluster_file(tmp_path, monkeypatch):
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto")
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config
    from ray.autoscaler.tags import TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "tests")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes the key pair there
    (tmp_path / ".ssh").mkdir()
    with moto.mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
        config = bootstrap_aws(prepare_config(yaml.safe_load((CLUSTERS / "aws.yaml").read_text())))
        provider = AWSNodeProvider(config["provider"], config["cluster_name"])
        for kind, count in (("head", 1), ("worker", config["available_node_types"]["worker"]["max_workers"])):
            node = config["available_node_types"][kind]["node_config"]
            provider.create_node(node, {TAG_RAY_NODE_KIND: kind, TAG_RAY_USER_NODE_TYPE: kind}, count)
        client = boto3.client("ec2", region_name="eu-central-1")
        found = [one for group in client.describe_instances()["Reservations"] for one in group["Instances"]]
        groups = client.describe_security_groups(GroupIds=[one["GroupId"] for one in found[0]["SecurityGroups"]])
    assert {one["InstanceType"] for one in found} == {
        "g5.xlarge",
        "m6i.xlarge",
    }  # moto gives the least that is asked for
    assert {one.get("InstanceLifecycle") for one in found if one["InstanceType"] == "g5.xlarge"} == {"spot"}
    assert {one["Placement"]["AvailabilityZone"] for one in found} == {"eu-central-1a"}
    assert {one["SecurityGroups"][0]["GroupId"] for one in found} == {groups["SecurityGroups"][0]["GroupId"]}
    open_to_all = [
        (rule.get("FromPort"), rule.get("ToPort"))
        for rule in groups["SecurityGroups"][0]["IpPermissions"]
        if any(range_["CidrIp"] == "0.0.0.0/0" for range_ in rule["IpRanges"])
    ]
    assert open_to_all == [(22, 22)]  # Ray's ports are for the group alone
    assert (tmp_path / ".ssh" / Path(config["auth"]["ssh_private_key"]).name).stat().st_mode & 0o077 == 0


TWO_SWEEPS = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

os.environ["RAY_AUTH_MODE"] = "disabled"  # a closed network of this machine
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
study, out = sys.argv[1], Path(sys.argv[2])


def sweep(name, trials):
    words = ["sweep", study, "--trials", str(trials), "--out", str(out / name), "--address", cluster.address, "--wait", "300"]
    return subprocess.Popen([sys.executable, "-m", "raysim.cli", *words], stderr=(out / f"{name}.log").open("w"))


def wait(seconds, done):
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.2)


try:
    first = sweep("first", 8)
    wait(300, lambda: len(list((out / "first").glob("trials/*/parts"))) == 2)  # all CPUs are taken
    first.send_signal(signal.SIGSTOP)  # it keeps them: its trials may end, but it does not hear of that
    second = sweep("second", 2)
    wait(300, lambda: "waiting for room" in (out / "second.log").read_text())
    first.send_signal(signal.SIGCONT)
    wait(300, lambda: list((out / "second").glob("trials/*")))
    first.send_signal(signal.SIGSTOP)  # it cannot end before it has seen the node
    cluster.add_node(num_cpus=2)
    time.sleep(6)
    first.send_signal(signal.SIGCONT)
    print(json.dumps([first.wait(400), second.wait(400)]))
finally:
    cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_second_sweep_gets_its_share_and_nodes_that_join_are_used(tmp_path):
    base = BASE | {"steps": 60, "checkpoint_every_steps": 10}
    study = write_study(tmp_path, base=base, engine="ray", sampler="random")
    done = subprocess.run(
        [sys.executable, "-c", TWO_SWEEPS, str(study), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1190,
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
