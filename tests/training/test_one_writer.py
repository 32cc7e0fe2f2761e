"""Two processes that want one folder: whoever comes second goes on with what the first left, or is refused; nothing is lost."""

import shutil

import pytest
from configurations import SMALL
from runs import same_records

from raysim.config import ConfigError, make_config
from raysim.records import Run
from raysim.training.run import Training
from raysim.training.train import train

CHANGES = {"forward": "ErrorFeedback(TopK(0.3))", "steps": 9, "evaluate_every_steps": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A whole run, and one that was interrupted after its fifth step, with a checkpoint at step 4."""
    folder, config = tmp_path_factory.mktemp("runs"), make_config({**SMALL, **CHANGES})
    whole = train(config, engine="inline", out=folder / "whole")
    _interrupt(Training(config, engine="inline", out=folder / "broken"), 4)
    return config, whole, folder / "broken"


def _interrupt(training, step):
    events = training.events()
    while next(events).row.get("step") != step:
        pass
    events.close()


def test_stale_resume_of_an_ended_run_is_refused(runs, tmp_path):
    config, whole, broken = runs
    out = shutil.copytree(broken, tmp_path / "run")
    second = Training(config, engine="inline", out=out, resume=True)
    train(config, engine="inline", out=out, resume=True)
    with pytest.raises(ConfigError) as error:
        second.events()
    assert str(error.value) == f"The run in {out} is finished: there is nothing to resume."
    same_records(Run(out), whole)
    assert not (out / ".lock").exists()


def test_resume_uses_state_left_by_another_process(runs, tmp_path):
    config, whole, broken = runs
    out = shutil.copytree(broken, tmp_path / "run")
    second = Training(config, engine="inline", out=out, resume=True)
    _interrupt(Training(config, engine="inline", out=out, resume=True), 6)
    assert [event.row["step"] for event in second.events() if event.kind == "step"] == [6, 7, 8]
    assert Run(out).row["resumed"] == 2
    same_records(Run(out), whole)


@pytest.mark.parametrize("resume", [False, True])
def test_run_is_refused_if_folder_was_filled_meanwhile(runs, tmp_path, resume):
    config, whole, _ = runs
    out = tmp_path / "run"
    out.mkdir()
    (out / ".lock").touch()  # of a process that was killed at once: it may be resumed
    second = Training(config, engine="inline", out=out, resume=resume)
    train(config, engine="inline", out=out)
    with pytest.raises(ConfigError, match="is finished: there is nothing" if resume else "is not empty"):
        second.events()
    same_records(Run(out), whole)


def test_locked_folder_is_refused_and_its_run_continues(runs, tmp_path):
    config, whole, _ = runs
    out = tmp_path / "run"
    second = Training(config, engine="inline", out=out)
    first = Training(config, engine="inline", out=out).events()
    next(first)
    with pytest.raises(ConfigError) as error:
        second.events()
    assert str(error.value) == f"Another process is writing the run in {out}."
    for _ in first:
        pass
    same_records(Run(out), whole)
