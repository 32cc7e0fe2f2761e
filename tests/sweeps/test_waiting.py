"""Waiting for room: processes that start have theirs, however long they take."""

from types import SimpleNamespace

import pytest

from raysim.engine import occupancy
from raysim.sweeps import callbacks


@pytest.fixture
def wait(monkeypatch, capsys):
    """Return a function that lets a sweep without running trials wait, and returns its reason to end and its words."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr(callbacks, "time", clock)
    monkeypatch.setattr(occupancy, "time", clock)
    monkeypatch.setattr(callbacks, "NodeWatch", lambda say: SimpleNamespace(tell=lambda: None))
    monkeypatch.setattr(callbacks, "room_sentence", lambda lacks: f"{lacks}; 0 of 2 CPU are free")

    def wait(seconds, starting_until=0.0):
        monkeypatch.setattr(callbacks, "is_starting", lambda: now[0] < starting_until)
        entry = SimpleNamespace(trial_words="a trial of 1 process with 1 CPU")
        sweep = SimpleNamespace(wait_s=60.0, address="auto", entry=entry, reason=None, on_change=lambda: None)
        watch = callbacks.Watch(sweep)
        while now[0] < seconds and sweep.reason is None:
            now[0] += 1.0
            watch.on_step_end(0, [SimpleNamespace(status="PENDING")])
        return sweep.reason, capsys.readouterr().err

    return wait


def test_a_sweep_without_room_says_so_and_ends(wait):
    reason, words = wait(100)
    assert reason == "No trial has had room for 60 s: a trial of 1 process with 1 CPU needs room; 0 of 2 CPU are free"
    assert words.startswith("waiting for room since 10 s: a trial of 1 process with 1 CPU needs room")


def test_processes_that_start_are_no_lack_of_room(wait):
    assert wait(300, starting_until=300) == (None, "")


def test_the_wait_for_room_begins_where_nothing_starts_any_more(wait):
    reason, words = wait(300, starting_until=100)
    assert reason is not None
    assert reason.startswith("No trial has had room for 60 s")
    assert "since 10 s" in words


def test_processes_that_never_start_end_the_sweep(wait):
    reason, words = wait(1000, starting_until=1000)
    assert reason == "No trial has started for 661 s, although its processes have room"
    assert words == ""
