"""A sweep whose own Ray loses its servers, or that is asked to end with all of its group: a sentence, no process left, a resume."""

import signal
import subprocess
import sys

import pandas as pd
import pytest
from struck import server, strike, to_group, to_server
from studies import BASE, write_study

STUDY = BASE | {"steps": 1000, "checkpoint_every_steps": 100, "evaluate_every_steps": 500}
WORDS = {signal.SIGKILL: "was ended by SIGKILL", signal.SIGSTOP: "has been stopped for 5 s"}


def begun(out, name, phase):
    """Return whether a phase of a sweep has begun: its server has started, or its second trial goes on."""

    def reached(said, driver):
        return server(driver, name) is not None and (phase == "start" or any(out.glob("trials/1-s0/parts/steps-*")))

    return reached


def sweep_words(tmp_path):
    path = write_study(tmp_path, trials=3, base=STUDY, engine="inline", jobs=1, objectives=["accuracy_on"])
    return ["sweep", str(path), "--out", str(tmp_path / "out")]


def check_resume(words):
    """Resume a sweep of three trials, of which one had ended, and check that it is not told again."""
    done = subprocess.run(
        [sys.executable, "-m", "raysim.cli", *words, "--resume"],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 3 trials were finished before" in done.stderr
    assert ["trial 0 " in done.stderr, "trial 1: finished" in done.stderr] == [False, True]


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_sigterm_to_the_group_of_a_sweep_is_an_interruption_and_old_trials_are_said_to_be_old(tmp_path):
    words = sweep_words(tmp_path)
    struck = strike(words, begun(tmp_path / "out", "raylet", "trial"), to_group)
    assert struck.left == []
    assert struck.code == 143
    last = struck.said.splitlines()[-1]
    assert last == f"raysim: interrupted. To go on: raysim {' '.join(words)} --resume"
    assert pd.read_parquet(tmp_path / "out" / "trials.parquet")["status"].tolist() == ["finished", "waiting"]
    check_resume(words)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["start", "trial"])
@pytest.mark.parametrize("number", WORDS)
@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_sweep_without_servers_ends_with_a_sentence(tmp_path, name, number, phase):
    words = sweep_words(tmp_path)
    struck = strike(words, begun(tmp_path / "out", name, phase), to_server(name, number))
    assert struck.left == []
    assert struck.code == 1
    last = struck.said.splitlines()[-1]
    assert last.endswith(f". To go on: raysim {' '.join(words)} --resume")
    assert phase == "start" or last.startswith(f"raysim: Ray's {name} {WORDS[number]}.")
    if (name, phase) == ("raylet", "trial"):
        check_resume(words)
