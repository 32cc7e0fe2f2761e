"""Adapters to Ray's internals: with this Ray they do what they say, and in a Ray without the private name nothing breaks."""

import re
import signal
from importlib import import_module
from pathlib import Path

import pytest

from raysim.engine import ray_internals
from raysim.engine.ray_internals import (
    complaint_of,
    cpus_by_driver,
    draining_nodes,
    free_by_node,
    is_starting,
    local_address,
    local_nodes,
    new_servers,
    no_sigterm_handler,
    scaling,
    silent_losses,
    task_errors_as,
)

ROOT = Path(__file__).parents[2]
REPLACED = [
    ("ray._private.services", "ConsolePopen", lambda: new_servers(lambda server: None)),
    ("ray._private.utils", "set_sigterm_handler", no_sigterm_handler),
    ("ray._raylet", "GcsErrorSubscriber", silent_losses),
    (
        "ray.air.execution._internal.actor_manager",
        "RayActorManager._actor_task_failed",
        lambda: task_errors_as(lambda error: error),
    ),
]


@pytest.fixture
def other_ray(monkeypatch):
    """Make this Ray one without private names."""
    monkeypatch.setattr(ray_internals, "_internal", lambda module, name="": None)


@pytest.mark.parametrize(("module", "name", "adapter"), REPLACED, ids=[name for _, name, _ in REPLACED])
def test_a_private_object_is_replaced_within_the_block_only(module, name, adapter):
    before = ray_internals._internal(module, name)
    assert before is not None
    with adapter():
        assert ray_internals._internal(module, name) is not before
    with pytest.raises(KeyError), adapter():
        raise KeyError
    assert ray_internals._internal(module, name) is before


@pytest.mark.parametrize(("module", "name", "adapter"), REPLACED, ids=[name for _, name, _ in REPLACED])
def test_without_the_private_object_the_block_runs_as_it_is(module, name, adapter, monkeypatch):
    before = ray_internals._internal(module, name)
    monkeypatch.setattr(ray_internals, "_internal", lambda module, name="": None)
    with adapter():
        holder = import_module(module)
        for part in name.split("."):
            holder = getattr(holder, part)
        assert holder is before


def test_missing_private_module_or_name_is_none():
    assert ray_internals._internal("ray._private.nowhere", "name") is None
    assert ray_internals._internal("ray._private.services", "Nothing.at_all") is None


def test_sigterm_handler_of_driver_is_kept(monkeypatch):
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    with no_sigterm_handler():
        ray._private.utils.set_sigterm_handler(lambda number, frame: None)
    assert signal.getsignal(signal.SIGTERM) is handler


def test_log_filter_drops_only_lost_worker_messages():
    class Subscriber:
        closed = False

        def __init__(self):
            self.messages = [{"type": "worker_died"}, {"type": "task"}, None]

        def poll(self):
            return "key", self.messages.pop(0)

    silent = ray_internals._Silent(Subscriber())
    assert [silent.poll()[1] for _ in range(3)] == [None, {"type": "task"}, None]
    assert silent.closed is False


def test_errors_reach_tune_unwrapped():
    received = []
    manager = ray_internals._internal("ray.air.execution._internal.actor_manager", "RayActorManager")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manager, "_actor_task_failed", lambda self, actor, error: received.append(error))
        with task_errors_as(lambda error: ValueError(str(error))):
            manager._actor_task_failed(None, tracked_actor_task=None, exception=KeyError("lost"))  # as Ray calls it
    (error,) = received
    assert isinstance(error, ValueError)


def test_free_resources_are_read_by_node_and_without_that_as_one_nodes(ray, monkeypatch):
    here = ray.get_runtime_context().get_node_id()
    by_node = free_by_node()
    assert set(by_node) == {here}
    monkeypatch.setattr(ray_internals, "_internal", lambda module, name="": None)
    assert free_by_node()[here]["memory"] == by_node[here]["memory"]


def test_fallback_answers_assume_nothing(ray, other_ray):
    assert local_address() is None
    assert local_nodes() is None
    assert cpus_by_driver() == []
    assert draining_nodes() == set()
    assert not is_starting()
    assert scaling() is None


def test_manual_cluster_has_no_autoscaler(ray):
    assert scaling() is None


def test_head_check_is_skipped_if_unsupported(monkeypatch):
    monkeypatch.setattr(ray_internals, "_PROBE", ray_internals._PROBE.replace("ray._raylet", "ray.nowhere"))
    assert complaint_of("127.0.0.1:1") == ""


@pytest.mark.parametrize(
    ("probe", "complaint"),
    [("print(flush=True); time.sleep(60)", "no answer"), ("time.sleep(3); sys.exit('no token')", "no token\n")],
)
def test_head_has_its_time_from_when_ray_is_imported(monkeypatch, probe, complaint):
    monkeypatch.setattr(ray_internals, "PROBE_S", 2.0)
    monkeypatch.setattr(ray_internals, "_PROBE", f"import sys, time; {probe}")
    assert complaint_of("127.0.0.1:1") == complaint


def test_no_other_module_uses_private_names_of_ray():
    uses = []
    for path in [path for top in ("raysim", "analysis", "sweeps") for path in sorted((ROOT / top).rglob("*.py"))]:
        if path.name == "ray_internals.py":
            continue
        text = path.read_text().replace("ray.__version__", "")
        uses += [f"{path}: {name}" for name in re.findall(r"(?<![\w.])ray(?:\.\w+)*\._\w*", text)]
    assert uses == []
