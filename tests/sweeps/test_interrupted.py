"""Sweeps that are asked to end, at every phase: they say how to go on, and go on to what they would have been."""

import signal

import pytest
from studies import write_study

from raysim.network.presets import parse_network
from raysim.sweeps.decide import DecisionState, Question
from raysim.sweeps.runner import Sweep
from raysim.sweeps.store import Store
from raysim.sweeps.study_file import read_study


@pytest.mark.parametrize("left", [[".lock"], [".lock", "space.py"], [".lock", ".study.toml.17"]])
def test_a_folder_killed_in_its_first_moments_is_taken_over(tmp_path, left):
    out = tmp_path / "out"
    out.mkdir()
    for name in left:
        (out / name).touch()
    study = read_study(write_study(tmp_path))
    for resume in (False, True):
        assert not Sweep(study, out=out, resume=resume).begun


@pytest.mark.parametrize("left", [[".lock"], [".lock", ".decision.json.17"]])
def test_so_is_the_folder_of_a_decision(tmp_path, left):
    for name in left:
        (tmp_path / name).touch()
    keys = {"name": "small", "data": "digits", "model": "mlp", "num_stages": 3, "num_microbatches": 2, "batch_size": 16}
    question = Question({**keys, "steps": 4}, parse_network("1mbps"))
    for resume in (False, True):
        assert DecisionState.begin(question, str(tmp_path), resume=resume).ended == ""


def test_a_sweep_writes_nothing_before_its_lock_is_on_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(
        "raysim.sweeps.store.sync_folder", lambda folder: synced.append([path.name for path in folder.iterdir()])
    )
    with Store(tmp_path / "out").locked():
        assert synced == [[".lock"]]


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
