"""A running sweep in the terminal."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from raysim.sweeps.progress import _View


@pytest.mark.parametrize(
    ("race", "line"), [(None, "2 of 4 trials after 60 s, about 60 s left"), (object(), "2 of 4 trials after 60 s")]
)
def test_only_trials_that_train_one_after_another_foretell_the_time_left(monkeypatch, race, line):
    rows = [
        SimpleNamespace(status=status, ended=status != "running", same_as=None) for status in ("finished", "pruned")
    ]
    sweep: Any = SimpleNamespace(
        rows=rows,
        search=SimpleNamespace(progress={}),
        began_with=0,
        study=SimpleNamespace(most_trials=4, objectives=(), race=race),
    )
    view = _View(sweep)
    started = time.monotonic()
    view._started = started
    monkeypatch.setattr(time, "monotonic", lambda: started + 60)
    assert view.status() == line
