"""Records and checkpoints that are damaged after they were written: a resumed run says so, and goes back or is refused."""

from __future__ import annotations

import shutil

import pytest
from runs import break_off, same_records

from raysim.config import ConfigError
from raysim.records import Run
from raysim.training.checkpoint import checkpoints
from raysim.training.run import Training
from raysim.training.train import train

CHANGES = {"forward": "ErrorFeedback(TopK(0.3))", "steps": 9, "evaluate_every_steps": 4}
DAMAGES = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "flipped": lambda content: content[:60] + bytes([content[60] ^ 4]) + content[61:],
    "gone": None,
}


def damage(path, how):
    change = DAMAGES[how]
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that was interrupted after seven steps, with checkpoints at 4 and 6, and the whole run."""
    from configurations import SMALL

    from raysim.config import make_config

    folder = tmp_path_factory.mktemp("damage")
    config = make_config({**SMALL, **CHANGES})
    whole = train(config, engine="inline", out=folder / "whole")
    break_off(Training(config, engine="inline", out=folder / "broken"), 7)
    assert [found.step for found in checkpoints(folder / "broken" / "checkpoints")] == [4, 6]
    return config, whole, folder / "broken"


def parts(folder):
    return sorted(path.name for path in (folder / "parts").iterdir())


@pytest.mark.parametrize(("how", "table"), list(zip(DAMAGES, ["steps", "links"] * 2, strict=True)))
def test_run_resumes_from_checkpoint_with_complete_records(runs, tmp_path, how, table):
    config, whole, broken = runs
    folder, name = tmp_path / "run", f"{table}-00002.parquet"  # written between the checkpoints at 4 and 6
    shutil.copytree(broken, folder)
    assert name in parts(folder)
    damage(folder / "parts" / name, how)
    training = Training(config, engine="inline", out=folder, resume=True)
    events = list(training.events())
    assert events[0].kind == "warning"
    reason = events[0].row["reason"]
    assert name in reason
    assert "The run continues from step 4, and repeats the steps after it." in reason
    assert [event.row["step"] for event in events if event.kind == "step"] == [4, 5, 6, 7, 8]
    assert Run(folder).row["warning"] == reason
    same_records(Run(folder), whole)


@pytest.mark.parametrize("how", ["flipped", "gone"])  # nothing reads it
def test_part_without_checkpoint_is_rewritten(runs, tmp_path, how):
    config, whole, broken = runs
    folder = tmp_path / "run"
    shutil.copytree(broken, folder)
    last = max(parts(folder), key=lambda name: name.rpartition("-")[2])
    damage(folder / "parts" / last, how)
    same_records(train(config, engine="inline", out=folder, resume=True), whole)


def test_damaged_checkpoint_falls_back_to_previous(runs, tmp_path):
    config, whole, broken = runs
    folder = tmp_path / "run"
    shutil.copytree(broken, folder)
    damage(checkpoints(folder / "checkpoints")[-1].path / "worker-1.safetensors", "flipped")
    training = Training(config, engine="inline", out=folder, resume=True)
    first, *_ = list(training.events())
    assert "step-00000006 is corrupt" in first.row["reason"]
    same_records(Run(folder), whole)


@pytest.mark.parametrize("how", DAMAGES)
def test_resume_without_complete_records_is_refused_unchanged(runs, tmp_path, how):
    config, _, broken = runs
    folder = tmp_path / "run"
    shutil.copytree(broken, folder)
    damage(folder / "parts" / "steps-00000.parquet", how)
    before = parts(folder)
    with pytest.raises(ConfigError, match=r"^No checkpoint in .* is intact\. ") as error:
        train(config, engine="inline", out=folder, resume=True)
    assert "steps-00000.parquet" in str(error.value)
    assert "\n" not in str(error.value)
    assert parts(folder) == before
    assert len(checkpoints(folder / "checkpoints")) == 2


@pytest.mark.parametrize("resume", [False, True])
def test_folder_of_a_run_killed_at_start_is_reused(small, tmp_path, resume):
    folder = tmp_path / "run"
    (folder / "parts").mkdir(parents=True)
    for name in (".lock", ".run.parquet.4711"):
        (folder / name).touch()
    run = train(small(), engine="inline", out=folder, resume=resume)
    assert (run.status, run.row["resumed"]) == ("finished", 0)
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
