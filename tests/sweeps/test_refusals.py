"""Disks that fill up, become read-only or go away under a sweep or a report: a sentence, and a study that can be resumed."""

import errno
import shutil
import subprocess
import sys
import time

import pandas as pd
import pytest
from disks import NoDiskError, SmallDisk
from studies import BASE, write_study
from typer.testing import CliRunner

from raysim.cli import app
from raysim.config import ConfigError
from raysim.sweeps.ledger import Ledger
from raysim.sweeps.store import find_database_error, find_disk_error
from raysim.sweeps.study_file import read_study
from raysim.sweeps.trial_rows import Rows

COMMAND = [sys.executable, "-m", "raysim.cli"]


@pytest.fixture
def disk(tmp_path):
    try:
        with SmallDisk(tmp_path / "disk", 65536) as one:
            yield one
    except NoDiskError as error:
        pytest.skip(str(error))


def sweep(path, out):
    resume = ["--resume"] if out.exists() else []
    words = [*COMMAND, "sweep", str(path), "--out", str(out), *resume]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def check_refused(process, *reasons):
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 1, errors
    last = errors.strip().splitlines()[-1]
    assert any(reason in last for reason in reasons), last
    assert "To continue: raysim sweep" in last or "to continue: raysim sweep" in last
    assert "Traceback" not in errors


def check_finishes(path, out):
    process = sweep(path, out)
    errors = process.communicate(timeout=300)[1]
    assert process.returncode == 0, errors
    frame = pd.read_parquet(out / "trials.parquet")
    assert frame["status"].tolist() == ["finished"] * len(frame)


def await_trial(process, out):
    deadline = time.monotonic() + 200
    while not any(out.glob("trials/*/parts/steps-*")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)


LONG = BASE | {"steps": 200, "checkpoint_every_steps": 2}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["inline", "ray"])
def test_read_only_disk_ends_a_sweep_that_resumes(tmp_path, disk, engine):
    path = write_study(tmp_path, trials=2, base=LONG, engine=engine, jobs=1)
    out = disk.folder / "out"
    process = sweep(path, out)
    await_trial(process, out)
    with disk.read_only():
        check_refused(process, "Read-only file system")
    check_finishes(path, out)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_missing_folder_ends_a_sweep_that_resumes(tmp_path):
    path = write_study(tmp_path, trials=2, base=LONG, engine="inline", jobs=1)
    out = tmp_path / "out"
    process = sweep(path, out)
    await_trial(process, out)
    out.rename(tmp_path / "away")
    check_refused(process, "")
    shutil.rmtree(out, ignore_errors=True)  # errors: the trial may write while its folder goes
    (tmp_path / "away").rename(out)
    check_finishes(path, out)


def test_refusals_and_trial_errors_are_distinguished(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device", "results/steps.parquet")
    sentence = "'results/steps.parquet': No space left on device."
    assert find_disk_error(full, tmp_path) == sentence
    wrapped = ConfigError("The run's folder cannot be written.")
    wrapped.__context__ = full  # as after `raise ... from None`
    assert find_disk_error(wrapped, tmp_path) == sentence
    missing = FileNotFoundError(errno.ENOENT, "No such file or directory", "data.csv")
    assert find_disk_error(missing, tmp_path) is None  # of a trial's data: other trials have others
    assert find_disk_error(missing, tmp_path / "gone") == "'data.csv': No such file or directory."
    assert find_disk_error(ValueError("a model's own"), tmp_path) is None
    assert find_database_error(full, tmp_path / "optuna.db") is None


@pytest.mark.slow
def test_damaged_database_is_rebuilt_from_rows(tmp_path):
    study = read_study(write_study(tmp_path))
    for size in (0, 5000):
        folder = tmp_path / f"out-{size}"
        folder.mkdir()
        ledger = Ledger(study, folder)
        ledger.reconcile()
        row, _ = ledger.next()
        ledger.begin(row, ["trials/0-s0"])
        ledger.close()
        database = folder / "optuna.db"
        content = database.read_bytes()
        database.write_bytes(content[:size])
        ledger = Ledger(study, folder)
        ledger.reconcile()
        again, _ = ledger.next()
        assert (again.trial, again.params, again.notation) == (row.trial, row.params, row.notation)
        ledger.close()


def test_damaged_rows_are_refused_in_a_sentence(tmp_path):
    rows = Rows(tmp_path, "small")
    rows.path.write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"^The rows of the study to resume, .*trials.parquet, cannot be read \(.*\)"):
        rows.read()


def test_failed_ray_start_gives_one_sentence_error(monkeypatch, tmp_path):
    def init(**options):
        raise Exception("The current node timed out during startup.\nThis could happen because the GCS is overloaded.")

    for name, answer in {"init": init, "is_initialized": lambda: False, "shutdown": lambda: None}.items():
        monkeypatch.setattr(f"ray.{name}", answer)
    found = CliRunner().invoke(app, ["sweep", "quickstart", "--out", str(tmp_path / "sweep")])
    assert found.exit_code == 1, found.output
    sentence = (
        "the sweep failed: Ray did not start: The current node timed out during startup. To continue: raysim sweep"
    )
    assert sentence in " ".join(found.output.split())
