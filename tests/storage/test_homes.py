"""A folder in the user's home, as it is typed where no shell expands it: in Python, in quotes, after `--out=`."""

from pathlib import Path

from raysim.cli.recorded import _report_target
from raysim.storage.places import open_place
from raysim.sweeps.store import Store
from raysim.training.start import run_folder


def test_folders_are_in_the_home_and_not_in_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    here = tmp_path / "run"
    assert run_folder("~/run") == open_place("~/run") == here
    assert Store("~/run").out == str(here)
    assert _report_target("results", Path("~/run"), "md") == here
    assert str(run_folder("~nobody-here/run")) == "~nobody-here/run"
