"""A bucket holds exactly what was sent, and reads like a folder; one sweep at a time writes a study's folder."""

import subprocess
import sys
import time

import pandas as pd
import pytest
from pyarrow import fs
from studies import BASE, write_study

from raysim.analysis import AnalysisError, load, pack, replay
from raysim.config import ConfigError
from raysim.records import Run
from raysim.storage.files import FolderLock
from raysim.storage.places import open_place
from raysim.sweeps.runner import Sweep
from raysim.sweeps.store import Store
from raysim.sweeps.study_file import read_study
from raysim.training.run import Training
from raysim.training.train import train

RUN = "trials/0-s0"


@pytest.fixture
def bucket(buckets):
    return f"{buckets.make()}/sweeps/small"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that moves to another machine: one with a temporary folder of its own."""

    def move(name):
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / name))

    move("first")
    return move


def copy(uri, target):
    """Copy a study as README does."""
    fs.copy_files(uri, str(target))
    return target


def test_bucket_sync_uploads_and_deletes(bucket, buckets, machine):
    here = Store(bucket)
    assert here.is_empty()
    run = here.local / RUN
    (run / "parts").mkdir(parents=True)
    for number in range(2):
        (run / "parts" / f"steps-0000{number}.parquet").write_bytes(b"part")
    (run / "run.parquet").write_bytes(b"run")
    (run / ".lock").touch()
    here.send(RUN)
    top = f"sweeps/small/{RUN}"
    parts = {f"{top}/parts/steps-0000{number}.parquet": b"part" for number in range(2)}
    assert buckets.content(bucket) == parts | {f"{top}/run.parquet": b"run"}
    (run / "parts" / "steps-00000.parquet").unlink()
    here.send(RUN)
    assert f"{top}/parts/steps-00000.parquet" not in buckets.keys(bucket.removesuffix("/sweeps/small"))
    (run / "parts" / "steps-00001.parquet").unlink()
    (run / "parts").rmdir()
    (run / "steps.parquet").write_bytes(b"whole")
    here.send(RUN)
    held = {key: value for key, value in buckets.content(bucket).items() if not key.endswith("/")}
    assert held == {f"{top}/steps.parquet": b"whole", f"{top}/run.parquet": b"run"}
    assert {key for key in buckets.keys(bucket) if key.endswith("/")} <= {f"{RUN}/"}  # of a folder that has files
    (here.local / "trials.parquet").write_bytes(b"rows")
    here.send("trials.parquet")
    assert buckets.content(bucket)["sweeps/small/trials.parquet"] == b"rows"
    machine("second")
    there = Store(bucket)
    assert not there.is_empty()
    assert there.fetch_file("trials.parquet")
    assert not there.fetch_file("nothing")
    folder = there.fetch(RUN)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        "steps.parquet": b"whole",
        "run.parquet": b"run",
    }


def test_checkpoints_are_dropped_here_and_in_the_bucket(bucket, buckets, machine):
    node, driver = Store(bucket), Store(bucket)
    for name in ("run.parquet", "checkpoints/step-00000002/manifest.json", "checkpoints/step-00000004/manifest.json"):
        (node.local / RUN / name).parent.mkdir(parents=True, exist_ok=True)
        (node.local / RUN / name).write_bytes(b"file")
    node.send(RUN)
    assert len(buckets.content(bucket)) >= 3
    for _ in range(2):  # the second time there are none
        driver.drop_checkpoints(RUN)
        held = [key for key in buckets.content(bucket) if not key.endswith("/")]
        assert held == [f"sweeps/small/{RUN}/run.parquet"]
        assert not (node.local / RUN / "checkpoints").exists()


def test_a_run_of_an_earlier_study_with_this_uri_does_not_count(bucket, machine):
    stale = Store(bucket).local / RUN
    stale.mkdir(parents=True)
    (stale / "run.parquet").write_bytes(b"finished")
    assert not (Store(bucket).fetch(RUN) / "run.parquet").exists()


def test_run_resumes_on_another_node_from_bucket(bucket, buckets, small, tmp_path, machine):
    config = small(steps=9, checkpoint_every_steps=2, forward="EF21(TopK(0.3))")
    here = Store(bucket)
    training = Training(config, out=here.fetch(RUN), engine="inline")
    for event in training.events():
        here.send_run(RUN)
        if event.kind == "step" and event.row["step"] == 6:
            break
    sent = [key for key in buckets.keys(f"{bucket}/{RUN}") if key.endswith("manifest.json")]
    assert sent == ["checkpoints/step-00000004/manifest.json", "checkpoints/step-00000006/manifest.json"]
    name = bucket.removeprefix("s3://").partition("/")[0]
    broken_off = f"sweeps/small/{RUN}/checkpoints/step-00000008/worker-0.safetensors"
    buckets.client.put_object(Bucket=name, Key=broken_off, Body=b"")
    machine("second")
    folder = Store(bucket).fetch(RUN)
    assert Run(folder).status == "running"
    train(config, out=folder, engine="inline", resume=True)
    whole = train(config, out=tmp_path / "whole", engine="inline")
    assert Run(folder).steps["loss"].tolist() == whole.steps["loss"].tolist()


def test_bucket_and_its_copy_load_completely(bucket, buckets, small, tmp_path, machine):
    here = Store(bucket)
    for trial, forward in enumerate(("Identity", "TopK(0.3)")):
        name = f"trials/{trial}-s0"
        training = Training(small(forward=forward, steps=2), out=here.fetch(name), engine="inline")
        for _ in training.events():
            here.send_run(name)
        here.send(name)
        buckets.client.put_object(  # as pyarrow 26 leaves it where it removes a folder's files one by one
            Bucket=bucket.removeprefix("s3://").partition("/")[0], Key=f"sweeps/small/{name}/parts/", Body=b""
        )
    local = load(here.local)
    copied = load(copy(bucket, tmp_path / "copy"))
    assert (tmp_path / "copy" / RUN / "parts").is_dir()
    in_place = load(bucket)
    assert local.problems == copied.problems == in_place.problems == []
    for table in ("runs", "steps", "evals", "links", "actions", "decisions"):
        wanted = getattr(local, table)
        assert len(wanted) or table == "decisions"
        pd.testing.assert_frame_equal(getattr(copied, table), wanted)
        pd.testing.assert_frame_equal(getattr(in_place, table), wanted)
    where = [("direction", "==", "forward")]
    pd.testing.assert_frame_equal(
        in_place.table("links", ["step", "wire_bytes"], where=where),
        local.table("links", ["step", "wire_bytes"], where=where),
    )
    assert in_place.files("steps") == [f"{bucket}/trials/{trial}-s0/steps.parquet" for trial in range(2)]
    pd.testing.assert_frame_equal(replay(in_place, "100mbps"), replay(local, "100mbps"))
    one = replay(f"{bucket}/{RUN}", "100mbps").drop(columns="run")
    pd.testing.assert_frame_equal(one, replay(here.local / RUN, "100mbps").drop(columns="run"))
    pack(bucket, tmp_path / "packed")
    fs.copy_files(str(tmp_path / "packed"), f"{bucket}-packed")
    packed = load(f"{bucket}-packed")
    pd.testing.assert_frame_equal(packed.runs, local.runs)
    pd.testing.assert_frame_equal(packed.links, local.links)
    assert packed.files("steps") == [f"{bucket}-packed/steps.parquet"]
    inside = replay(f"{bucket}-packed/{RUN}", "100mbps").drop(columns="run")
    pd.testing.assert_frame_equal(inside, replay(here.local / RUN, "100mbps").drop(columns="run"))
    assert load(f"{bucket}-packed/trials").runs["run"].tolist() == ["0-s0", "1-s0"]
    with pytest.raises(AnalysisError, match=r"^There is no folder s3://"):
        load(f"{bucket}-packed/elsewhere")
    assert open_place(f"{bucket}/{RUN}").is_dir()
    with pytest.raises(ConfigError, match=r"is finished: there is nothing to resume\.$"):
        Training(small(forward="Identity", steps=2), out=tmp_path / "copy" / RUN, engine="inline", resume=True)


DRIVER = """
import sys, tempfile

tempfile.tempdir = sys.argv.pop(1)  # of the driver alone: the trials' processes have the machine's
from raysim.cli import main

main()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_bucket_sweep_result_is_shown_on_driver(bucket, tmp_path):
    space = {"forward": ["Identity", "Nonzero"]}
    changes = {"sampler": "grid", "trials": None, "space": space, "symbols": None, "confirm": 3, "engine": "inline"}
    path = write_study(tmp_path, objectives=["accuracy_on", "wire_bytes"], **changes)
    words = [sys.executable, "-c", DRIVER, str(tmp_path), "sweep", str(path), "--out", bucket]
    done = subprocess.run(words, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "The frontier: accuracy_on against wire_bytes" in done.stdout
    assert "│ forward=Nonzero │" in done.stdout  # by the records of the confirming runs
    assert "The only compressed setting is not at least 5 % faster: " in done.stdout


def test_tables_that_a_copy_lacks_are_a_problem_by_name(small, tmp_path):
    folder = tmp_path / "run"
    run = train(small(), out=folder, engine="inline")
    (folder / "links.parquet").unlink()
    run.steps.iloc[:0].to_parquet(folder / "steps.parquet")
    results = load(folder)
    assert results.problems == [
        f"{folder}/steps.parquet is empty, but the run has done 6 steps.",
        f"The run in {folder} has done 6 steps, but has no table links: copy it again.",
    ]
    assert results.steps.empty
    assert len(results.problems) == 2


def test_unreachable_bucket_gives_one_sentence_error_quickly(buckets, small, tmp_path, monkeypatch):
    start = time.monotonic()
    with pytest.raises(ConfigError) as error:
        Store.checked("s3://no-such-bucket/sweeps/small")
    assert str(error.value) == (
        "`out`: s3://no-such-bucket/sweeps/small cannot be opened: there is no bucket 'no-such-bucket': make it first."
    )
    with pytest.raises(AnalysisError, match=r"^s3://no-such-bucket cannot be opened: there is no bucket"):
        load("s3://no-such-bucket")
    with pytest.raises(AnalysisError, match=r"^There is no folder s3://bucket-\d+/nothing\.$"):
        load(f"{buckets.make()}/nothing")
    with pytest.raises(
        ConfigError, match=r"^`out`: nope://bucket cannot be opened: Unrecognized filesystem type in URI"
    ):
        Store.checked("nope://bucket")
    monkeypatch.setattr("raysim.storage.places.LIMIT_S", 0.01)
    with pytest.raises(ConfigError, match=r"no answer within 0.01 s\. Check the network and the credentials\.$"):
        Store.checked(buckets.make())
    assert time.monotonic() - start < 60


def test_runs_are_in_local_folders(small, tmp_path):
    with pytest.raises(
        ConfigError, match=r"^`out` of a run must be a folder of this machine, but got 's3://bucket/run': "
    ):
        Training(small(), out="s3://bucket/run", engine="inline")
    assert Training(small(), out=(tmp_path / "a b").as_uri(), engine="inline").folder == tmp_path / "a b"
    store = Store((tmp_path / "a b").as_uri())
    assert not store.remote
    assert store.local == tmp_path / "a b"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_study_in_a_bucket_is_killed_resumed_copied_and_read_in_place(bucket, buckets, tmp_path):
    path = write_study(tmp_path, trials=4, base=BASE | {"steps": 40, "checkpoint_every_steps": 5})
    words = [sys.executable, "-m", "raysim.cli", "sweep", str(path), "--out", bucket]
    first = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not any(key.endswith("manifest.json") for key in buckets.keys(bucket)):
            assert first.poll() is None, first.stderr.read()[-3000:]
            time.sleep(0.2)
    finally:
        first.kill()  # of the driver alone: Ray's processes notice by themselves
        first.wait()
    again = subprocess.run([*words, "--resume"], cwd=tmp_path, capture_output=True, text=True, timeout=400)
    assert again.returncode == 0, again.stderr[-3000:]
    in_place, copied = load(bucket), load(copy(bucket, tmp_path / "copy" / "small"))
    assert in_place.problems == copied.problems == []
    assert set(in_place.trials["status"]) == {"finished"}
    assert in_place.steps.groupby("run", observed=True).size().tolist() == [40] * len(in_place)
    for table in ("runs", "steps", "evals", "links", "actions", "trials"):
        pd.testing.assert_frame_equal(getattr(in_place, table), getattr(copied, table))
    for run in in_place.runs["run"]:
        study, forward = read_study(path), in_place.runs.set_index("run").loc[run, "forward"]
        fresh = train(study.config({"forward": forward}), engine="inline", out=tmp_path / "fresh" / run)
        assert in_place.steps[in_place.steps["run"] == run]["loss"].tolist() == fresh.steps["loss"].tolist()
    for command in (
        ["report", bucket, "-o", "page.html"],
        ["replay", f"{bucket}/{in_place.runs['run'][0]}", "--network", "1gbps"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "raysim.cli", *command], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    assert not [key for key in buckets.keys(bucket) if key.endswith("parts/")]


def test_sweep_is_refused_if_folder_was_filled_meanwhile(tmp_path, monkeypatch):
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


def test_resumed_sweep_is_compared_with_stored_study(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".lock").touch()  # of a process that was killed at once: it may be resumed
    second = Sweep(read_study(write_study(tmp_path)), out=out, resume=True)
    other = read_study(write_study(tmp_path, objectives=["loss_on"]))
    monkeypatch.setattr(Sweep, "_run", lambda self, on_begin: self.study.write(self.folder))
    Sweep(other, out=out).run()
    with pytest.raises(ConfigError, match=r"^`objectives` must be"):
        second.run()


def test_bucket_sweep_keeps_local_files_of_running_sweep(tmp_path, buckets, monkeypatch):
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
