"""Resources on a cluster with other users: waiting for them, a fair share, nodes that join and are lost."""

import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from studies import write_study

from raysim.config import ConfigError
from raysim.engine import resources as occupancy
from raysim.engine.ray_internals import DriverCpus, Scaling
from raysim.sweeps import allocation, tuning
from raysim.sweeps.allocation import Allocation, fair_limit, fit
from raysim.sweeps.runner import Sweep
from raysim.sweeps.study_file import read_study
from raysim.sweeps.tuning import NodeWatch
from raysim.training.events import Phases

COUNTS = st.integers(0, 50)


@given(running=COUNTS, free=COUNTS, capacity=COUNTS, others=COUNTS)
def test_shares_are_equal_under_contention(running, free, capacity, others):
    alone = fair_limit(running, free, capacity, waiting=False, others=others)
    shared = fair_limit(running, free, capacity, waiting=True, others=others)
    assert 1 <= alone <= max(1, capacity)
    assert 1 <= shared <= max(1, capacity)
    assert shared * (1 + others) <= max(
        capacity, 1 + others
    )  # all who ask have their shares at once, or one trial each
    if 1 <= running + free <= capacity:
        assert alone == running + free


def test_nodes_that_join_and_are_lost_are_named():
    there, said = {"a": "10.0.0.1", "b": "10.0.0.2"}, []
    watch = NodeWatch(said.append, lambda: there, set)
    watch.compare()
    assert said == []
    del there["b"]
    there["c"] = "10.0.0.3"
    watch.compare()
    assert said == [
        "node 10.0.0.2 is lost: the trials with stages on it restart from their checkpoints",
        "node 10.0.0.3 has joined",
    ]
    watch.compare()
    assert len(said) == 2


def test_an_idle_node_that_an_autoscaler_ended_is_not_lost():
    there, said = {"a": "10.0.0.1", "b": "10.0.0.2"}, []
    watch = NodeWatch(said.append, lambda: there, lambda: {"b"})
    del there["b"]
    watch.compare()
    assert said == ["node 10.0.0.2 was idle, and the autoscaler ended it"]


@pytest.fixture
def scaled(ray, monkeypatch):
    """Return a demand on a cluster whose autoscaler says what the test sets, and its clock."""
    state = SimpleNamespace(now=100.0, scaling=Scaling({}, ()))
    clock = SimpleNamespace(monotonic=lambda: state.now, time=time.time)
    monkeypatch.setattr(occupancy, "time", clock)
    monkeypatch.setattr(occupancy, "scaling", lambda since_s: state.scaling)
    with occupancy.Demand() as made:
        yield made, state


def test_an_autoscaler_is_waited_for_while_it_starts_nodes(scaled):
    asked, state = scaled
    assert asked.elastic
    assert asked.growing
    assert not asked.reached([{"CPU": 1000.0}], 0.0)
    assert asked.words == "; the autoscaler is asked for nodes"
    state.now, state.scaling = 120.0, Scaling({"gpu": 2, "cpu": 1}, ())
    assert asked.words == "; the autoscaler starts 3 nodes (cpu, gpu)"
    state.now, state.scaling = 140.0, Scaling({}, ("no quota for g5.xlarge.",))
    assert asked.words == "; the autoscaler cannot start a node: no quota for g5.xlarge"
    state.now, state.scaling = 165.0, Scaling({}, ())
    assert asked.growing
    state.now = 171.0
    assert not asked.growing
    assert asked.words.startswith("; the autoscaler starts no node for them: ")
    asked.leave()
    assert asked.growing  # it may have nodes for another demand


def test_resources_are_held_from_their_arrival_on(ray):
    with occupancy.Demand() as asked:
        assert not asked.elastic
        assert asked.words == ""
        assert asked.reached([{"CPU": 8.0}], 30.0)
        with occupancy.Demand() as other:
            assert not other.reached([{"CPU": 1.0}], 0.5)
            asked.leave()
            assert other.reached([{"CPU": 1.0}], 30.0)


def test_on_a_cluster_that_grows_stages_get_whole_cpus_and_all_jobs_begin(ray, small, monkeypatch):
    nodes = [{"CPU": 4.0}]
    cut = fit(small(), nodes, 4, engine="ray", jobs=8, growing=True)
    whole = fit(small(), nodes, 4, engine="ray", jobs=8, growing=True, elastic=True)
    assert (cut.cpus, whole.cpus) == (0.125, 1.0)
    monkeypatch.setattr(allocation, "LOOK_S", 0.0)
    monkeypatch.setattr(allocation, "free_resources", lambda: {"a": {"CPU": 0.0}})
    monkeypatch.setattr(allocation, "total_resources", lambda: {"a": nodes[0]})
    assert Allocation("ray", whole, 4, 8, shared=True, elastic=True).trials(running=1) == 8
    assert Allocation("ray", whole, 4, 8, shared=True).trials(running=1) == 1
    assert Allocation("ray", whole, 4, shared=True, elastic=True).trials(running=1) == 1
    waiting = DriverCpus("x", "raysim sweep", "10.0.0.9", 0.0, 4.0, "")
    monkeypatch.setattr(allocation, "cpus_by_driver", lambda: [waiting])
    assert Allocation("ray", whole, 4, 8, shared=True, elastic=True).trials(running=1) == 1


@pytest.fixture
def taken(ray):
    """Hold all CPUs of the cluster; return what gives them back."""
    group = ray.util.placement_group([{"CPU": 8}])
    ray.get(group.ready())
    yield lambda: ray.util.remove_placement_group(group)
    ray.util.remove_placement_group(group)


def test_header_counts_trials_with_capacity(ray, tmp_path):
    group = ray.util.placement_group([{"CPU": 6}])
    ray.get(group.ready())
    try:
        while ray.available_resources()["CPU"] != 2:
            time.sleep(0.1)
        study = read_study(write_study(tmp_path, engine="ray"))
        found = allocation.allocate(study, str(tmp_path), shared=True, wait_s=60.0, check=lambda: None)
    finally:
        ray.util.remove_placement_group(group)
    assert (found.now, found.share.jobs) == (1, 4)


def test_full_cluster_is_refused_without_folder(taken, tmp_path, monkeypatch):
    monkeypatch.setattr(allocation, "FREED_S", 0.2)
    sweep = Sweep(read_study(write_study(tmp_path, engine="ray")), out=tmp_path / "out", address="auto")
    with pytest.raises(ConfigError) as caught:
        sweep.run()
    assert str(caught.value) == ("a trial needs 2 processes with 1 CPU each; 0 of 8 CPU are free.")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_sweep_waits_for_capacity_and_reports_it(taken, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("raysim.engine.resources.FIRST_S", 0.5)
    study = read_study(write_study(tmp_path, trials=2, engine="ray"))
    sweep = Sweep(study, out=tmp_path / "out", address="auto", wait_s=60.0)
    threading.Timer(2.0, taken).start()
    sweep.run()
    assert [row.status for row in sweep.rows] == ["finished"] * 2
    assert "waiting for room since" in capsys.readouterr().err


@pytest.fixture
def wait(monkeypatch, capsys):
    """Return a function that lets a sweep without running trials wait, and returns its reason to end and its words."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(tuning, "time", clock)
    monkeypatch.setattr(occupancy, "time", clock)
    monkeypatch.setattr(tuning, "NodeWatch", lambda say: SimpleNamespace(look=lambda: None))
    monkeypatch.setattr(tuning, "shortage", lambda lacks: f"{lacks}; 0 of 2 CPU are free")

    def wait(seconds, starting_until=0.0):
        monkeypatch.setattr(tuning, "is_starting", lambda: now[0] < starting_until)
        halt = tuning.Halt()
        words, phases = "a trial needs 1 process with 1 CPU", Phases()
        watch = tuning.Watch(halt, None, needs=words, limit_s=60.0, shared=True, phases=phases, on_look=lambda: None)
        while now[0] < seconds and halt.reason is None:
            now[0] += 1.0
            watch.on_step_end(0, [SimpleNamespace(status="PENDING")])  # type: ignore[list-item]
        return halt.reason, capsys.readouterr().err

    return wait


def test_sweep_without_capacity_reports_and_ends(wait):
    reason, words = wait(100)
    assert reason == "No trial has had resources for 60 s: a trial needs 1 process with 1 CPU; 0 of 2 CPU are free"
    assert words.startswith("waiting for room since 10 s: a trial needs 1 process with 1 CPU")


def test_starting_processes_are_not_missing_capacity(wait):
    assert wait(300, starting_until=300) == (None, "")


def test_capacity_wait_starts_after_last_start(wait):
    reason, words = wait(300, starting_until=100)
    assert reason is not None
    assert reason.startswith("No trial has had resources for 60 s")
    assert "since 10 s" in words


def test_processes_that_never_start_end_the_sweep(wait):
    reason, words = wait(1000, starting_until=1000)
    assert reason == "No trial has started for 661 s, although its processes have their resources"
    assert words == ""
