"""Sweeps that are asked to end, at every phase: they say how to go on, and go on to what they would have been."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pandas as pd
import psutil
import pytest
from studies import BASE, write_study

from raysim.records import Run
from raysim.signals import SIGNALS
from raysim.sweeps.confirm import confirming
from raysim.sweeps.runner import Sweep
from raysim.sweeps.study_file import read_study

LIMIT_S = 200.0  # until a phase is reached
END_S = 60.0  # until an interrupted sweep has ended


def statuses(folder):
    """Return the statuses of a study's trials, none where there are no rows yet."""
    file = folder / "trials.parquet"
    return pd.read_parquet(file)["status"].tolist() if file.is_file() else []


def ended(folder):
    return sum(status in ("finished", "failed") for status in statuses(folder))


PHASES = {
    "start": lambda out, before: (out / "study.toml").is_file(),
    "trial": lambda out, before: any(out.glob("trials/*/parts/steps-*")) and "running" in statuses(out),
    "between": lambda out, before: ended(out) > before,
    "confirm": lambda out, before: "running" in statuses(out / "confirm"),
}


def processes_under(folder):
    """Return the processes that have a folder's path in their command lines: those of the Ray that keeps its files there."""
    processes = psutil.process_iter(["cmdline"])
    return [process for process in processes if str(folder) in " ".join(process.info["cmdline"] or ())]


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_a_sweep_in_order_and_it_resumes_to_the_same_rows(tmp_path, number, monkeypatch):
    rays = tempfile.mkdtemp(prefix="ray-")  # a short path: sockets lie in it
    monkeypatch.setenv("RAY_TMPDIR", rays)
    base = BASE | {"steps": 40, "checkpoint_every_steps": 5, "evaluate_every_steps": 10}
    objectives = ["accuracy_on", "wire_bytes"]  # the same whenever it is trained, and so the choice that is confirmed
    path = write_study(tmp_path, trials=3, base=base, engine="inline", jobs=1, confirm=3, objectives=objectives)
    out = tmp_path / "out"
    words = [sys.executable, "-m", "raysim.cli", "sweep", str(path), "--out", str(out)]
    for phase, reached in PHASES.items():
        before, resume = ended(out), ["--resume"] if out.exists() else []
        process = subprocess.Popen([*words, *resume], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + LIMIT_S
        while not reached(out, before):
            assert process.poll() is None, (phase, process.stderr.read())
            assert time.monotonic() < deadline, phase
            time.sleep(0.02)
        process.send_signal(number)
        errors = process.communicate(timeout=END_S)[1]
        assert process.returncode == 128 + number, (phase, errors)
        assert "interrupted. To go on: raysim sweep" in errors
        assert "Traceback" not in errors
        assert "running" not in statuses(out)
        assert {Run(run.parent).status for run in out.glob("trials/*/run.parquet")} <= {"finished", "interrupted"}
        deadline = time.monotonic() + 20
        while left := processes_under(rays):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)
    done = subprocess.run([*words, "--resume"], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(rays)
    monkeypatch.delenv("RAY_TMPDIR")
    assert os.environ.get("RAY_TMPDIR") is None
    whole = Sweep(read_study(path), out=tmp_path / "whole")
    whole.run()
    second = confirming(whole)
    assert second is not None
    second.run()
    for folder in ("", "confirm"):
        one, other = (pd.read_parquet(top / folder / "trials.parquet") for top in (out, tmp_path / "whole"))
        alike = ["trial", "name", "status", "notation", "objective.accuracy_on"]
        pd.testing.assert_frame_equal(one[alike], other[alike])


@pytest.mark.parametrize("left", [[".lock"], [".lock", "space.py"], [".lock", ".study.toml.17"]])
def test_a_folder_killed_in_its_first_moments_is_taken_over(tmp_path, left):
    out = tmp_path / "out"
    out.mkdir()
    for name in left:
        (out / name).touch()
    study = read_study(write_study(tmp_path))
    for resume in (False, True):
        assert not Sweep(study, out=out, resume=resume).begun


def test_signals_before_start_give_one_sentence(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from raysim.cli import app

    def interrupted(self, *arguments):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("raysim.sweeps.progress.show_sweep", interrupted)
    path = write_study(tmp_path)
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out")])
    assert done.exit_code == 143
    assert done.stderr.strip() == "raysim: interrupted before anything began."


def test_a_signal_that_breaks_off_the_start_of_ray_keeps_its_number(tmp_path, monkeypatch):
    import ray

    def break_off(**options):
        signal.raise_signal(signal.SIGTERM)
        raise KeyboardInterrupt  # see `signals_after`

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr("raysim.sweeps.runner.start_ray", break_off)
    with pytest.raises(KeyboardInterrupt) as caught:
        Sweep(read_study(write_study(tmp_path)), out=tmp_path / "out").run()
    assert caught.value.args == (signal.SIGTERM,)
