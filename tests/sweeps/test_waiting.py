"""Waiting for resources: starting processes have theirs, however long they take."""

from types import SimpleNamespace

import pytest

from raysim.engine import resources as occupancy
from raysim.sweeps import tuning
from raysim.training.phases import Phases


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
            watch.on_step_end(0, [SimpleNamespace(status="PENDING")])
        return halt.reason, capsys.readouterr().err

    return wait


def test_a_sweep_without_room_says_so_and_ends(wait):
    reason, words = wait(100)
    assert reason == "No trial has had resources for 60 s: a trial needs 1 process with 1 CPU; 0 of 2 CPU are free"
    assert words.startswith("waiting for room since 10 s: a trial needs 1 process with 1 CPU")


def test_processes_that_start_are_no_lack_of_room(wait):
    assert wait(300, starting_until=300) == (None, "")


def test_the_wait_for_room_begins_where_nothing_starts_any_more(wait):
    reason, words = wait(300, starting_until=100)
    assert reason is not None
    assert reason.startswith("No trial has had resources for 60 s")
    assert "since 10 s" in words


def test_processes_that_never_start_end_the_sweep(wait):
    reason, words = wait(1000, starting_until=1000)
    assert reason == "No trial has started for 661 s, although its processes have their resources"
    assert words == ""
