"""A running sweep in the terminal."""

import shutil
import time
from types import SimpleNamespace
from typing import Any

import pytest
from studies import write_study

from raysim.sweeps.progress import _View, full_disk
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
