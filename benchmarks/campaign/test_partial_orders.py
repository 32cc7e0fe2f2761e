"""Partial-order reduction covers what enumeration covers: the same end for each moment, from fewer runs."""

import sqlite3
from pathlib import Path

import pytest
from file_calls import Process
from hypothesis import given
from hypothesis import strategies as st
from partial_orders import CONNECTS, Step, covered, steps_of, together

from raysim.storage.files import FolderLock, is_locked, write_whole

NAMES = ("a", "b", "folder/a", "folder/b")
OPERATION = st.tuples(st.sampled_from(["read", "os.listdir", "open", "os.remove"]), st.sampled_from(NAMES))


class Files:
    """Files in memory, and a process that writes what it has read so far."""

    def __init__(self):
        self.files, self.seen = {"a": "0"}, {}

    def step(self, who, event, name):
        seen = self.seen.setdefault(who, [])
        if event == "read":
            seen.append(self.files.get(name))
        elif event == "os.listdir":
            seen.append([each for each in sorted(self.files) if each.rpartition("/")[0] == name.rpartition("/")[0]])
        elif event == "open":
            self.files[name] = f"{who} has seen {seen}"
        else:
            self.files.pop(name, None)


def steps(program):
    """Return the steps of a program, which lists the folder of a name."""
    return [
        Step.of(event, name if event != "os.listdir" else name.rpartition("/")[0] or ".") for event, name in program
    ]


def end(first, second, moment):
    files = Files()
    for who, program in (("first", first[:moment]), ("second", second), ("first", first[moment:])):
        for event, name in program:
            files.step(who, event, name)
    return files.files, files.seen


@given(st.lists(OPERATION, max_size=12), st.lists(OPERATION, max_size=6))
def test_a_moment_ends_as_the_one_that_stands_for_it(first, second):
    held = []

    def hold(moment):
        held.append(moment)
        return together(steps(second)), end(first, second, moment)

    reduced = covered(steps(first), hold)
    assert reduced == {moment: end(first, second, moment) for moment in range(len(first) + 1)}
    assert len(held) <= len(first) + 1


def test_a_process_is_held_only_where_the_other_can_tell():
    first = steps([("read", "a"), ("open", "a"), ("open", "folder/b"), ("read", "b"), ("os.remove", "a")])
    held = []

    def hold(moment):
        held.append(moment)
        return together(steps([("read", "a")])), moment

    assert covered(first, hold) == {0: 0, 1: 0, 2: 2, 3: 2, 4: 2, 5: 5}
    assert held == [0, 2, 5]


def test_steps_on_a_folder_and_on_what_is_in_it_do_not_commute():
    for one, other, apart in [
        (Step.of("os.rename", "run/.x", "run/x"), Step.of("stat", "run/x/manifest.json"), False),
        (Step.of("open", "run/new"), Step.of("os.scandir", "run"), False),
        (Step.of("open", "run/new"), Step.of("stat", "run"), True),
        (Step.of("read", "run/a"), Step.of("read", "run/a"), True),
        (Step.of("fcntl.flock", "run/.lock"), Step.of("fcntl.flock", "run/.lock"), False),
        (Step.of("open", "run/parts/.a.0123456789abcdef"), Step.of("read", "run/evals.parquet"), True),
    ]:
        assert one.commutes(other) is other.commutes(one) is apart


def test_steps_after_a_connection_to_a_database_may_write_to_it():
    touched = [(1, "read", "run/a"), (2, CONNECTS, "run/b.db"), (3, "read", "run/a")]
    steps = steps_of(touched, 4)
    assert [step.commutes(Step.of(CONNECTS, "run/b.db")) for step in steps] == [True, False, False, False]
    assert [step.commutes(Step.of("os.listdir", "run")) for step in steps] == [True, False, True, True]


def write():
    lock = FolderLock(Path("run"))
    lock.acquire()
    for name in ("a", "b", "c"):
        write_whole(Path("run", name), name.encode())
    sqlite3.connect("run/d").close()
    Path("run", "a").unlink()
    lock.release()
    return {}


def read():
    path = Path("run", "b")
    return {"read": path.read_text() if path.exists() else None, "locked": is_locked(Path("run"))}


@pytest.mark.slow
def test_processes_that_are_held_end_as_the_ones_that_stand_for_them(tmp_path):
    (tmp_path / "alone").mkdir()
    alone = Process(write, tmp_path / "alone", mode="list").wait()
    held = []

    def hold(moment):
        held.append(moment)
        home = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        home.mkdir()
        first = Process(write, home, moment + 1)
        assert "held" in first.wait()
        said = Process(read, home).wait()
        first.go_on()
        assert "error" not in first.wait()
        left = {str(path.relative_to(home)) for path in home.rglob("*")}
        return together(Step.of(event, *names) for _, event, *names in said["touched"]), (
            said["read"],
            said["locked"],
            left,
        )

    assert [each[1:] for each in alone["touched"] if each[1] == CONNECTS] == [[CONNECTS, "run/d"]]
    count = len(alone["operations"])
    every = {moment: hold(moment)[1] for moment in range(count)}
    held.clear()
    assert covered(steps_of(alone["touched"], count)[:-1], hold) == every
    assert len({str(one) for one in every.values()}) >= 3
    assert len(held) < count
