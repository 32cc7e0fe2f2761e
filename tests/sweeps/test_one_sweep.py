"""Two sweeps that want one folder: what the first has made is not touched by the second."""

import pytest
from studies import write_study

from raysim.config import ConfigError
from raysim.file_lock import FolderLock
from raysim.sweeps.runner import Sweep
from raysim.sweeps.store import Store
from raysim.sweeps.study_file import read_study


def test_a_sweep_that_looked_before_another_filled_the_folder_is_refused(tmp_path, monkeypatch):
    study, out = read_study(write_study(tmp_path)), tmp_path / "out"
    second = Sweep(study, out=out)
    monkeypatch.setattr(Sweep, "_run", lambda self, on_begin: study.write(self.folder))
    Sweep(study, out=out).run()
    before = sorted((path.name, path.read_bytes()) for path in out.iterdir())
    with pytest.raises(ConfigError) as error:
        second.run()
    assert str(error.value) == f"The folder {out} is not empty. Give another `out`, or `resume` the study in it."
    assert sorted((path.name, path.read_bytes()) for path in out.iterdir()) == before
    Sweep(study, out=out, resume=True).run()


def test_a_sweep_to_resume_is_compared_with_the_study_that_another_left(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".lock").touch()  # of a process that was killed at once: it may be resumed
    second = Sweep(read_study(write_study(tmp_path)), out=out, resume=True)
    other = read_study(write_study(tmp_path, objectives=["loss_on"]))
    monkeypatch.setattr(Sweep, "_run", lambda self, on_begin: self.study.write(self.folder))
    Sweep(other, out=out).run()
    with pytest.raises(ConfigError, match=r"^`objectives` must be"):
        second.run()


def test_a_sweep_in_a_bucket_leaves_the_local_files_of_one_that_runs(tmp_path, buckets, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    study, uri = read_study(write_study(tmp_path)), f"{buckets.make()}/small"
    store = Store(uri)
    first = FolderLock(store.local)
    first.acquire()
    (store.local / "trials").mkdir()
    with pytest.raises(ConfigError, match=r"^Another process is sweeping in "):
        Sweep(study, out=uri).run()
    assert (store.local / "trials").is_dir()
    first.release()
    monkeypatch.setattr(Sweep, "_run", lambda self, on_begin: None)
    Sweep(study, out=uri).run()
    assert not store.local.exists()
