"""Links planted in a folder that others can write: nothing is written through them, and no file of the victim changes."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raysim.analysis import load
from raysim.cli import app
from raysim.cli.options import check_writable
from raysim.config import make_config
from raysim.config.identity import Setting
from raysim.network.presets import parse_network
from raysim.network.timeline_views import write_trace
from raysim.records import Recorder, Run
from raysim.records.tables import RecordsError
from raysim.screening import screen
from raysim.screening.outputs import draw_screen, write_screen_study
from raysim.storage.files import FolderLock, check_inside, output_file, private_folder, write_through, write_whole
from raysim.sweeps.store import FOLDERS, Store
from raysim.training.checkpoint import write_checkpoint

TRAIN = ["train", "digits-cnn", "--engine", "inline", "steps=2", "num_stages=2", "model.width=2", "evaluate_samples=8"]


@pytest.fixture
def victim(tmp_path):
    """A file and a folder of somebody's, in which nothing may change; checked at the end of the test."""
    home = tmp_path / "victim"
    (home / "folder" / ".step-draft").mkdir(parents=True)
    for file in (home / "file", home / "folder" / "steps-00000.parquet", home / "folder" / ".a.parquet.b"):
        file.write_text("precious")

    def contents():
        return {path: path.read_text() if path.is_file() else None for path in sorted(home.rglob("*"))}

    before = contents()
    yield home
    assert contents() == before


@pytest.mark.parametrize("lock", [True, False])
def test_lock_follows_no_link_and_keeps_file_content(tmp_path, victim, lock):
    (tmp_path / "run").mkdir()
    if lock:
        (tmp_path / "run" / ".lock").symlink_to(victim / "file")
        with pytest.raises(OSError, match="it is a link"):
            FolderLock(tmp_path / "run").acquire()
    else:  # a hard link is no link to follow, but the same file
        os.link(victim / "file", tmp_path / "run" / ".lock")
        own = FolderLock(tmp_path / "run")
        own.acquire()
        assert (victim / "file").read_text() == "precious"
        own.release()


@pytest.mark.parametrize(
    ("name", "target"),
    [(".lock", "file"), ("parts", "folder"), ("checkpoints", "folder"), (".lock", "missing"), ("parts", "missing")],
)
def test_a_run_is_refused_in_a_folder_with_a_planted_link(tmp_path, victim, name, target):
    run = tmp_path / "run"
    run.mkdir()
    (run / name).symlink_to(victim / target)
    outcome = CliRunner().invoke(app, [*TRAIN, "--out", str(run)])
    assert outcome.exit_code == 2, outcome.output
    assert os.listdir(run) == [name]  # noqa: PTH208


@pytest.mark.parametrize("name", ["parts", "checkpoints", "tensorboard"])
def test_recorder_opens_no_folder_through_a_link(tmp_path, victim, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(victim / "folder")
    recorder = Recorder(tmp_path / "run")
    with pytest.raises(RecordsError, match="it is a link"):
        recorder.open()
    recorder.close()


def test_checkpoint_is_not_written_through_a_link(tmp_path, victim):
    (tmp_path / "checkpoints").symlink_to(victim / "folder")
    with pytest.raises(OSError, match="it is a link"):
        write_checkpoint(tmp_path / "checkpoints", 1, [])


@pytest.mark.parametrize("name", FOLDERS)
def test_a_study_is_not_swept_through_a_link(tmp_path, victim, name):
    study = tmp_path / "study"
    study.mkdir()
    (study / name).symlink_to(victim / "folder")
    store = Store(study)
    with pytest.raises(ValueError, match="it is a link"), store.locked():
        pass
    assert not (study / ".lock").exists()
    with pytest.raises(OSError, match="it is a link"):
        store.fetch(f"{name}/0-s0")
    store.clear()
    assert list(study.iterdir()) == []


def test_files_are_replaced_including_links(tmp_path, victim):
    link = tmp_path / "link"
    link.symlink_to(victim / "file")
    with pytest.raises(FileExistsError):
        write_through(link, b"data")
    write_whole(link, b"data")
    assert link.read_bytes() == b"data"
    assert not link.is_symlink()


@pytest.mark.parametrize("target", ["file", "missing"])
def test_an_output_that_is_a_link_is_refused(tmp_path, victim, target):
    link = tmp_path / "out.json"
    link.symlink_to(victim / target)
    with pytest.raises(OSError, match="it is a link"), output_file(link):
        pass
    with pytest.raises(OSError, match="it is a link"):
        write_trace(iter([]), link)
    simulated = ["simulate", "digits-cnn", "--device", "A100", "--network", "1gbps", "--json", str(link)]
    outcome = CliRunner().invoke(app, simulated)
    assert outcome.exit_code == 2
    assert "must not be a link" in outcome.output


def test_study_and_picture_of_a_screen_follow_no_link_made_while_it_measured(tmp_path, victim):
    keys = {"model": {"name": "mlp"}, "data": "digits", "num_stages": 2, "batch_size": 16, "steps": 2}
    network, setting = parse_network("1kbps"), Setting("Quantize(8)", "Quantize(8)")
    done = screen(make_config(keys), [network], tried=[setting], only_tried=True, device="A100")
    study, picture = tmp_path / "s.toml", tmp_path / "p.png"
    for link in (study, picture):
        link.symlink_to(victim / "file")
    with pytest.raises(OSError, match="it is a link"):
        write_screen_study(done, keys, study, "ray")
    with pytest.raises(OSError, match="it is a link"):
        draw_screen(done, picture)


def test_an_output_may_be_a_pipe_with_a_reader(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_writable("--json", pipe)
    with output_file(pipe) as file:
        file.write(b"figures")
    assert os.read(reader, 100) == b"figures"
    os.close(reader)
    with pytest.raises(OSError), output_file(pipe):  # it would wait for a reader
        pass


def test_scratch_folders_are_private_and_not_taken_over(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    top = private_folder("x").parent
    assert top.stat().st_mode & 0o777 == 0o700
    assert private_folder("x") == top / "x"
    top.chmod(0o755)
    with pytest.raises(OSError, match="own private folder"):
        private_folder("x")
    top.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    top.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="own private folder"):
        private_folder("x")


def test_only_subfolders_must_not_be_links(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    check_inside(tmp_path / "link" / "parts", tmp_path / "link")  # the user's own choice
    with pytest.raises(OSError, match="it is a link"):
        check_inside(tmp_path / "link" / "parts", tmp_path)


def test_runs_are_read_through_links(tmp_path):
    from records_made import write_run

    write_run(tmp_path / "real" / "run")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "run").symlink_to(tmp_path / "real" / "run")
    assert len(Run(Path(tmp_path / "linked" / "run")).steps) == 4
    assert len(load(tmp_path / "real")) == 1
