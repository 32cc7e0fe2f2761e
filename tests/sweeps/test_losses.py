"""A sweep whose driver, trials or Ray's servers are lost; and the dashboards on what it leaves."""

import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter

import optuna
import pandas as pd
import pytest
from optuna.trial import TrialState
from runs import same_records
from struck import server, strike, to_group, to_server
from studies import BASE, write_study

from raysim.analysis import load, replay
from raysim.records import Run
from raysim.sweeps.runner import Sweep
from raysim.sweeps.search import LOST_PROCESSES
from raysim.sweeps.study_file import read_study
from raysim.training.train import train

KILLS = 5


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_kills_of_the_driver_cost_no_trial_and_count_none_twice(tmp_path):
    base = BASE | {"steps": 60, "checkpoint_every_steps": 10, "optimizer": {"learning_rate": 0.01}}
    path = write_study(tmp_path, trials=12, base=base, sampler="tpe")
    out = tmp_path / "out"
    words = [sys.executable, "-m", "raysim.cli", "sweep", str(path), "--out", str(out)]
    chance, kills, finishes = random.Random(4), 0, Counter()
    ended = set()
    for attempt in range(KILLS + 1):
        resume = ["--resume"] if (out / "study.toml").is_file() else []
        sessions = set(out.glob("tune/*"))  # of the last one, which was killed
        started = subprocess.Popen(
            [*words, *resume], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        try:
            if attempt < KILLS:
                _await_progress(started, out, sessions)
                time.sleep(chance.uniform(0, 4))
                started.send_signal(signal.SIGKILL)  # of the driver alone: Ray's processes notice by themselves
                kills += started.wait() == -signal.SIGKILL
            else:
                error = started.communicate(timeout=900)[1]
                assert started.returncode == 0, error[-3000:]
        finally:
            started.kill()
        frame = pd.read_parquet(out / "trials.parquet")  # readable whatever happened
        now = {row.trial for row in frame.itertuples() if row.status == "finished"}
        assert ended <= now
        finishes.update(now - ended)
        ended = now
    assert kills == KILLS
    frame = pd.read_parquet(out / "trials.parquet").set_index("trial")
    fresh = frame[frame["same_as"].isna()]
    assert fresh["status"].tolist() == ["finished"] * 12
    assert fresh["notation"].nunique() == 12
    assert set(finishes.values()) == {1}
    storage = f"sqlite:///{out / 'optuna.db'}"
    trials = optuna.load_study(study_name="small", storage=storage).trials
    assert {trial.number for trial in trials} == set(frame.index)
    priced = replay(load(out), ["100mbps"], split=False).set_index("run")["step_s"]
    for trial in trials:
        row = frame.loc[trial.number]
        assert trial.state == TrialState.COMPLETE
        told_accuracy, told_step_s = (
            trial.values
        )  # the price as it was when the trial ended; the row's is settled at the end
        assert told_accuracy == row["objective.accuracy_on"]
        assert 0 < told_step_s < math.inf
        assert row["settled"]
        assert row["objective.step_s@100mbps"] == pytest.approx(priced[list(row["runs"])].mean(), rel=1e-12)
    for number, row in list(fresh.iterrows())[:3]:  # resumed or not, a run is what it would have been
        study = read_study(path)
        overrides = {"forward": row["notation"].split()[0].removeprefix("forward=").replace("dense", "Identity")}
        same_records(
            Run(out / row["runs"][0]),
            train(study.config(overrides), engine="inline", out=tmp_path / f"fresh-{number}"),
        )


def _await_progress(started, out, sessions):
    """Wait until Tune runs a session that is none of `sessions`, and a trial goes on."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert started.poll() is None, started.stderr.read()[-3000:]
        if set(out.glob("tune/*")) - sessions:
            frame = pd.read_parquet(out / "trials.parquet")
            if "running" in set(frame["status"]):
                return
        time.sleep(0.05)
    raise AssertionError("no trial began")


def _served(process, url):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.read().decode()
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"{url} does not answer")


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.slow
def test_the_dashboards_show_the_study(tmp_path):
    pytest.importorskip("optuna_dashboard")
    pytest.importorskip("tensorboard")
    path = write_study(tmp_path, trials=2, engine="inline")
    environment = {**os.environ, "RAY_TMPDIR": "/tmp/raysim-sweep"}
    done = subprocess.run(
        [sys.executable, "-m", "raysim.cli", "sweep", str(path), "--out", "out", "--dashboard"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "Ray's dashboard: http://127.0.0.1:" in done.stderr
    ports = [_free_port(), _free_port()]
    module = "import sys; from optuna_dashboard._cli import main; main()"
    commands = [
        ["-c", module, "sqlite:///out/optuna.db", "--host", "127.0.0.1", "--port", str(ports[0])],
        ["-m", "tensorboard.main", "--logdir", "out/tensorboard", "--host", "127.0.0.1", "--port", str(ports[1])],
    ]
    running = [
        subprocess.Popen([sys.executable, *command], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in commands
    ]
    try:
        studies = json.loads(_served(running[0], f"http://127.0.0.1:{ports[0]}/api/studies"))["study_summaries"]
        assert [study["study_name"] for study in studies] == ["small"]
        url = f"http://127.0.0.1:{ports[0]}/api/studies/{studies[0]['study_id']}?after=0"
        shown = json.loads(_served(running[0], url))
        assert [trial["state"] for trial in shown["trials"]] == ["Complete", "Complete"]
        assert [len(trial["values"]) for trial in shown["trials"]] == [2, 2]
        deadline = time.monotonic() + 60
        while not (tags := json.loads(_served(running[1], f"http://127.0.0.1:{ports[1]}/data/plugin/scalars/tags"))):
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert set(tags) == {"0-s0", "1-s0"}
        assert {"train/loss", "eval/accuracy_on"} <= set(tags["0-s0"])
    finally:
        for process in running:
            process.kill()
            process.wait()


SAID = "Task was killed due to the node running low on memory."


@pytest.fixture
def killed(monkeypatch, ray):
    """Return a function that makes the first reports of trials the error that Ray raises after it has killed their process."""

    def kill(reports):
        get, left = ray.get, [reports]

        def fail(refs, **options):
            found = get(refs, **options)
            if left[0] and isinstance(found, dict) and "trial_id" in found:
                left[0] -= 1
                raise ray.exceptions.OutOfMemoryError(f"{SAID}\nMemory on the node was 22 GB.")
            return found

        monkeypatch.setattr(ray, "get", fail)
        return left

    return kill


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, LOST_PROCESSES + 1])
def test_a_trial_killed_for_memory_is_tried_again_then_failed_and_the_sweep_goes_on(killed, tmp_path, kills):
    left = killed(kills)
    one = Sweep(read_study(write_study(tmp_path, trials=2, engine="inline", jobs=1)), out=tmp_path / "out")
    one.run()
    assert left == [0]
    first, second = one.rows
    assert second.status == "finished"
    if kills == 1:
        assert (first.status, first.error) == ("finished", None)
    else:
        assert (first.status, first.error) == ("failed", f"gave up after losing its processes 4 times: {SAID[:-1]}")


@pytest.mark.slow
def test_out_of_memory_node_fails_trials_not_sweep(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")  # of which every machine has more in use
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    path = write_study(tmp_path, trials=2, engine="inline", jobs=1)
    words = [sys.executable, "-m", "raysim.cli", "sweep", str(path), "--out", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    assert "raysim: all 2 trials failed, the first of them: gave up after losing its processes 4 times" in done.stderr
    frame = pd.read_parquet(tmp_path / "out" / "trials.parquet")
    assert frame["status"].tolist() == ["failed"] * 2
    assert frame["error"].str.endswith("killed due to the node running low on memory").all()


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
    assert "1 of 3 trials had ended before" in done.stderr
    assert ["trial 0 " in done.stderr, "trial 1: finished" in done.stderr] == [False, True]


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_sigterm_to_sweep_group_is_interruption_and_old_trials_are_marked(tmp_path):
    words = sweep_words(tmp_path)
    struck = strike(words, begun(tmp_path / "out", "raylet", "trial"), to_group)
    assert struck.left == []
    assert struck.code == 143
    last = struck.said.splitlines()[-1]
    assert last == f"raysim: interrupted. To go on: raysim {' '.join(words)} --resume"
    assert pd.read_parquet(tmp_path / "out" / "trials.parquet")["status"].tolist() == ["finished", "waiting"]
    check_resume(words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "phase"),
    [
        ("raylet", signal.SIGKILL, "trial"),
        ("raylet", signal.SIGSTOP, "start"),
        ("gcs_server", signal.SIGKILL, "start"),
        ("gcs_server", signal.SIGSTOP, "trial"),
    ],
)
def test_sweep_without_servers_ends_with_one_sentence(tmp_path, name, number, phase):
    words = sweep_words(tmp_path)
    struck = strike(words, begun(tmp_path / "out", name, phase), to_server(name, number))
    assert struck.left == []
    assert struck.code == 1
    last = struck.said.splitlines()[-1]
    assert last.endswith(f". To go on: raysim {' '.join(words)} --resume")
    assert phase == "start" or last.startswith(f"raysim: Ray's {name} {WORDS[number]}.")
    if (name, phase) == ("raylet", "trial"):
        check_resume(words)
