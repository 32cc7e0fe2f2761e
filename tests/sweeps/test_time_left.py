"""A running sweep in the terminal."""

import shutil
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from studies import BASE, write_study

from raysim.sweeps.allocation import full_disk
from raysim.sweeps.progress import _View
from raysim.sweeps.study_file import read_study
from raysim.training.checkpoint import KEPT


@pytest.mark.parametrize(
    ("race", "standing", "line"),
    [
        (None, "", "2 of 4 trials after 60 s, about 60 s left"),
        (object(), "", "2 of 4 trials after 60 s"),
        (object(), "3 settings open", "after 60 s: 3 settings open"),
    ],
)
def test_only_trials_that_train_one_after_another_foretell_the_time_left(monkeypatch, race, standing, line):
    rows = [
        SimpleNamespace(status=status, ended=status != "running", same_as=None) for status in ("finished", "pruned")
    ]
    sweep: Any = SimpleNamespace(
        rows=rows,
        search=SimpleNamespace(progress={}, standing=lambda: standing),
        began_with=0,
        study=SimpleNamespace(most_trials=4, objectives=(), race=race),
    )
    view = _View(sweep)
    started = time.monotonic()
    view._started = started
    monkeypatch.setattr(time, "monotonic", lambda: started + 60)
    assert view.status() == line


def test_a_disk_too_small_for_all_checkpoints_is_named_beforehand(tmp_path, monkeypatch):
    study = read_study(write_study(tmp_path, seeds=[0, 1]))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=8_000_000))
    most = 8_000_000 // (study.most_trials * 2 * KEPT)
    assert full_disk(study, most, tmp_path) is None
    assert full_disk(study, 2 * most, tmp_path) == (
        f"Checkpoints of 8 runs may take 16 MB, but {tmp_path} has 8 MB free: make room, or give another folder."
    )


def test_a_race_keeps_checkpoints_of_settings_that_may_go_on(tmp_path, monkeypatch):
    """A race without checkpoints of its own keeps one a run, and none of dense."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    base, dense = (
        BASE | {"checkpoint_every_steps": 0},
        {"name": "dense", "set": {"forward": "Identity", "backward": "Identity"}},
    )
    options = {
        "race": True,
        "seeds": [0, 1, 2],
        "baselines": [dense],
        "sampler": "grid",
        "trials": None,
        "symbols": None,
        "space": {"forward": ["TopK(0.1)", "Quantize(4)"]},
    }
    study = read_study(write_study(tmp_path, base=base, **options))
    settings = study.most_trials - 1
    assert (full_disk(study, 10**6, tmp_path) or "").startswith(
        f"Checkpoints of {3 * settings} runs may take {3 * settings} MB, "
    )
    planned = replace(study, planned_seeds=2)
    assert (full_disk(planned, 10**6, tmp_path) or "").startswith(f"Checkpoints of {2 * settings} runs ")
