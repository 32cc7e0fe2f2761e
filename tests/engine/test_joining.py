"""Sentences about a cluster: the way in for a driver outside, what is waited for, who holds it, a head that is lost."""

import math
import os
import queue
import re
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raysim.config import ConfigError
from raysim.engine import nodes, ray_internals, resources
from raysim.engine import ray as engine_on_ray
from raysim.engine.connection import check_address, token_words
from raysim.engine.nodes import (
    FEW,
    Reach,
    StageSeconds,
    measured_gflops,
    slow_node_warning,
    slow_start_warning,
    starts_slowly,
)
from raysim.engine.ray import RayEngine
from raysim.engine.ray_internals import DriverCpus, cpus_by_driver, is_starting
from raysim.engine.resources import Waiting, describe_driver, shortage
from raysim.engine.watch import HeadWatch
from raysim.limits import cpu_quota
from raysim.pipeline.errors import WorkerLostError
from raysim.pipeline.prepare import prepare
from raysim.pipeline.reports import ActionRecord, StepReport
from raysim.training.run import Training


@pytest.fixture
def listening():
    """Return the address of a server that takes connections, as a head does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def refused(address):
    with pytest.raises(ConfigError) as caught:
        check_address(address, "`RAY_ADDRESS`")
    return str(caught.value)


def test_address_unusable_by_drivers_is_refused(listening, monkeypatch):
    assert refused("ray://10.0.0.1:10001") == (
        "`RAY_ADDRESS` must be the host:port of a cluster's head, or auto, but got 'ray://10.0.0.1:10001': a driver needs a Ray "
        "node on its own machine. Send a job with `raysim submit`."
    )
    assert "must be a running cluster's, but '127.0.0.1:1' does not answer: " in refused("127.0.0.1:1")
    for address in ("10.78.0.50", "10.78.0.50:", "10.78.0.50:ray"):
        assert refused(address) == (
            f"`RAY_ADDRESS` must be the host:port of a cluster's head, such as 10.78.0.50:6379, but got {address!r}."
        )
    monkeypatch.setattr(ray_internals, "local_nodes", set)
    assert refused(listening) == (
        f"`RAY_ADDRESS` = '{listening}' answers, but this machine is not a node of that cluster. Send a job with `raysim submit`, or "
        f"make this machine a node without CPUs: `ray start --address={listening} --num-cpus=0` (with RAY_AUTH_MODE=token where "
        "the cluster has a token)."
    )
    monkeypatch.setattr(ray_internals, "local_address", lambda: "")
    assert refused("auto").startswith("`RAY_ADDRESS` = 'auto' finds no Ray node on this machine. Send a job")


@pytest.mark.parametrize(
    ("said", "mode", "sentence"),
    [
        ("AuthenticationError: no", "", "this process showed none, since RAY_AUTH_MODE is not `token`. Set RAY_AUTH_MODE=token,"),
        ("RpcError: Invalid authentication token", "token", "/auth_token is wrong. Copy it again from the machine that made"),
        ("RpcError: Deadline Exceeded", "", "does not list its nodes: RpcError: Deadline Exceeded."),
        ("[2026-11-28 21:57:06,129 W 3 3] rpc_client.h:638: Failed to connect.", "", "does not list its nodes: Failed to connect."),
    ],
)  # fmt: skip
def test_rejected_token_error_names_remedy(listening, tmp_path, monkeypatch, said, mode, sentence):
    monkeypatch.setattr(ray_internals, "local_nodes", lambda: {"here"})
    monkeypatch.setattr(ray_internals, "_PROBE", f"import sys; sys.exit({said!r})")
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "auth_token"))
    (tmp_path / "auth_token").write_text("0" * 64)
    assert sentence in refused(listening)


def test_missing_or_environment_token_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    assert token_words() == f"and there is none in {tmp_path / 'none'}. Copy it from the machine that made the cluster."
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 64)
    assert token_words().startswith("and that of RAY_AUTH_TOKEN (64 characters) is wrong. Unset it, and copy")


@pytest.mark.parametrize(
    "program", ["/home/a/long/way/env/bin/python /home/a/long/way/env/bin/raysim", "python -m raysim.cli"]
)
def test_resource_holder_is_named_by_user_and_study(program):
    driver = DriverCpus("01", f"{program} sweep quickstart --out /srv/nfs/{'x' * 80}", "10.0.0.1", 2.0, 0.0, "ada@desk")
    assert describe_driver(driver).startswith("ada@desk: `raysim sweep quickstart --out /srv/nfs/xx")
    assert describe_driver(driver).endswith("...` on 10.0.0.1 (2 CPU)")


def test_progress_is_reported_after_10_s_then_every_30_s(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(resources.time, "monotonic", lambda: now[0])
    said = []
    waiting = Waiting(said.append)
    for second in range(101):
        now[0] = float(second)
        waiting.tell(lambda: "a trial needs room")
    assert said == [f"waiting for room since {second} s: a trial needs room" for second in (10, 40, 70, 100)]


def test_drivers_are_listed_with_held_and_awaited_resources(ray):
    held = ray.util.placement_group([{"CPU": 2}, {"CPU": 1}])
    waiting = ray.util.placement_group([{"CPU": 100}])
    ray.get(held.ready())
    actor = ray.remote(num_cpus=1)(type("Idle", (), {"nothing": lambda self: None})).remote()
    ray.get(actor.nothing.remote())
    try:
        (own,) = (driver for driver in cpus_by_driver() if driver.job == ray.get_runtime_context().get_job_id())
        assert own.held >= 4
        assert own.waiting == 100
        assert re.fullmatch(r"`.*` on [\d.]+ \(\d+ CPU\)", describe_driver(own))
        assert re.fullmatch(r"a trial needs room; \d of 8 CPU are free", shortage("a trial needs room"))
    finally:
        ray.util.remove_placement_group(held)
        ray.util.remove_placement_group(waiting)
        ray.kill(actor)


def test_starting_actor_process_is_detected(ray, tmp_path):
    class Slow:
        def __init__(self, go):
            while not go.exists():
                time.sleep(0.01)

        def nothing(self):
            pass

    actor = ray.remote(num_cpus=1)(Slow).remote(tmp_path / "go")
    deadline = time.monotonic() + 60
    while not is_starting():  # Ray registers it in the background
        assert time.monotonic() < deadline
    (tmp_path / "go").touch()
    ray.get(actor.nothing.remote())
    assert not is_starting()
    ray.kill(actor)


def test_silent_head_counts_as_lost(monkeypatch):
    monkeypatch.setattr(HeadWatch, "look_s", 0.05)
    monkeypatch.setattr("raysim.engine.watch.LOST_S", 0.3)
    monkeypatch.setattr("raysim.engine.watch.atexit.register", lambda function: None)
    server = socket.create_server(("127.0.0.1", 0))
    told = threading.Event()
    watch = HeadWatch(f"127.0.0.1:{server.getsockname()[1]}", lambda watch: told.set())
    assert not told.wait(0.6)
    server.close()
    assert told.wait(10)
    assert watch.lost
    assert watch.sentence.startswith("the head of the cluster, 127.0.0.1:")


def test_driver_that_is_stuck_in_ray_ends_with_the_loss_of_the_head(small, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("raysim.engine.connection.init_ray", lambda **options: SimpleNamespace(dashboard_url=None))
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    monkeypatch.setattr(engine_on_ray, "check_address", lambda *arguments: None)
    monkeypatch.setattr(engine_on_ray, "PATIENCE_S", 0.05)
    monkeypatch.setattr(HeadWatch, "look_s", 0.05)
    monkeypatch.setattr("raysim.engine.watch.LOST_S", 0.0)
    monkeypatch.setattr("raysim.engine.watch.atexit.register", lambda function: None)
    said = queue.SimpleQueue[str]()
    engine: Any = Training(small(), out=tmp_path / "run", engine="ray").engine
    engine.on_stuck = said.put
    engine._connect()
    assert said.get(timeout=60).startswith("the head of the cluster, 127.0.0.1:1, is lost")
    assert engine.loss() is not None


@pytest.mark.slow
def test_run_without_head_fails_once_and_stops(ray, small, tmp_path):
    training: Any = Training(small(), out=tmp_path / "run")
    watch = HeadWatch("127.0.0.1:1")
    watch.end()

    def train():
        for event in training.events():
            if event.kind == "step" and event.row["step"] == 2:
                watch.lost, training.engine._watch = True, watch

    with pytest.raises(WorkerLostError, match=r"the head of the cluster, 127.0.0.1:1, is lost"):
        train()
    training.engine._watch = None
    training.engine.close()
    row = training._row
    assert (row["status"], row["restarts"]) == ("failed", 0)
    assert [event.kind for event in Training(small(), out=tmp_path / "run", resume=True).events()][-1] == "eval"


def test_a_lost_node_is_named_with_its_stages(ray, small, monkeypatch):
    engine = RayEngine(prepare(small()))
    engine._nodes = ["a", "b", "b"]
    monkeypatch.setattr("raysim.engine.ray.lost_nodes", lambda nodes: ["b"])
    assert engine._loss(RuntimeError()) == "node b is lost with stages 1, 2"
    monkeypatch.setattr("raysim.engine.ray.lost_nodes", lambda nodes: [])
    assert engine._loss(RuntimeError("The actor died.\nclass: A")) == "The actor died"


def test_a_slow_node_is_named():
    assert slow_node_warning({"a": 40.0, "b": 20.0, "c": 41.0}) is None
    assert slow_node_warning({"a": 40.0, "b": 10.0, "c": 41.0}) == (
        "Node b computes 4.0 times slower than the median of the nodes (10 against 40 GFLOP/s): the stages on it hold the others "
        "up. Stop other work there, lift a CPU quota, or leave the node out."
    )
    assert measured_gflops() > 0


def _reports(*seconds):
    """Reports of workers of one stage each: the replica and stage, and the wall and CPU seconds of an action."""
    return [
        StepReport(replica, [], [], [], [ActionRecord(stage, "F", 0, 0.0, 1.0, 0.0, wall_s, cpu_s, 0.0, 0, 0)], None)
        for replica, stage, wall_s, cpu_s in seconds
    ]


@pytest.mark.parametrize(
    ("nodes", "steps", "sentence"),
    [
        (["a", "b"], [(0, 0, 0.10, 0.10), (0, 1, 0.20, 0.20)], None),
        (
            ["a", "b"],
            [(0, 0, 0.10, 0.10), (0, 1, 0.80, 0.20)],
            "stage 1 takes 4 s for a second on the CPU, stages elsewhere 1",
        ),
        (["a", "a"], [(0, 0, 0.10, 0.10), (0, 1, 0.80, 0.20)], None),
        (["a", "b"], [(0, 0, 0.10, math.nan), (0, 1, 0.80, math.nan)], None),  # CPU seconds are unknown on GPUs
        (["a", "b"], [(0, 0, 0.10, 0.10), (1, 0, 0.15, 0.15)], None),
        (
            ["a", "b"],
            [(0, 0, 0.10, 0.10), (1, 0, 0.40, 0.40)],
            "stage 0 computes 0.4 s a step there, and 0.1 s on other nodes",
        ),
    ],
    ids=["alike", "quota", "one-node", "gpus", "replicas-alike", "slow-replica"],
)
def test_delaying_node_is_named_with_its_stages(nodes, steps, sentence):
    seconds = StageSeconds()
    for _ in range(FEW):
        assert seconds.warning() is None
        seconds.add(nodes, _reports(*steps))
    expected = (
        f"Node b holds the others up: {sentence}. Stop other work there, lift a CPU quota, or leave the node out."
    )
    assert seconds.warning() == (expected if sentence else None)


@pytest.fixture
def quarter():
    """Put this process into a control group with a quarter of a core."""
    folder, mine = Path("/sys/fs/cgroup/cpu"), f"raysim-test-{os.getpid()}"
    try:
        (folder / mine).mkdir()
        (folder / mine / "cpu.cfs_quota_us").write_text("25000")
        (folder / mine / "tasks").write_text(str(os.getpid()))
    except OSError as error:
        pytest.skip(f"needs control groups of version 1, and root: {error}")
    yield
    for task in (folder / mine / "tasks").read_text().split():
        (folder / "tasks").write_text(task)
    (folder / mine).rmdir()


def test_sustained_quarter_core_is_reported_slow(quarter, monkeypatch):
    monkeypatch.setattr(nodes, "_seconds", lambda matrix: 1.0)
    assert cpu_quota() == 0.25
    assert measured_gflops() == pytest.approx(0.25 * 2e-9 * nodes.SIZE**3)


def test_distant_nodes_whose_connections_start_slowly_are_named():
    near, far, tuned = Reach(True, 0.002), Reach(True, 0.08), Reach(False, 0.08)
    assert slow_start_warning({"a": near, "b": tuned}) is None
    assert slow_start_warning({"a": far, "b": tuned, "c": Reach(True, 0.02), "d": near}) == (
        "TCP starts slowly after idle on a, c, 80 ms from a neighbour: large packets take two to four times as long. "
        "Run `sysctl -w net.ipv4.tcp_slow_start_after_idle=0` there (docs/networks.md)."
    )
    assert isinstance(starts_slowly(), bool)
