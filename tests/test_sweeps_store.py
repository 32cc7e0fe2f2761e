"""A bucket holds what was sent, whole, and no more; what is fetched is what it holds."""

import pytest

from raysim.config import ConfigError
from raysim.pipeline.training import Training, train
from raysim.records import Run
from sweeps.store import Store


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    return lambda: Store((tmp_path / "bucket").as_uri())


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_sent_is_there_and_what_is_gone_goes(store, tmp_path):
    here, there = store(), tmp_path / "bucket"
    assert here.is_empty()
    run = here.local / "trials" / "0-s0"
    (run / "parts").mkdir(parents=True)
    (run / "parts" / "steps-00000.parquet").write_bytes(b"part")
    (run / "run.parquet").write_bytes(b"run")
    (run / ".lock").touch()
    here.send("trials/0-s0")
    assert files(there) == {"trials/0-s0/parts/steps-00000.parquet": b"part", "trials/0-s0/run.parquet": b"run"}
    (run / "parts" / "steps-00000.parquet").unlink()
    (run / "steps.parquet").write_bytes(b"whole")
    here.send("trials/0-s0")
    assert files(there) == {"trials/0-s0/steps.parquet": b"whole", "trials/0-s0/run.parquet": b"run"}
    (here.local / "trials.parquet").write_bytes(b"rows")
    here.send("trials.parquet")
    assert (there / "trials.parquet").read_bytes() == b"rows"
    assert not store().is_empty()
    assert store().fetch_file("trials.parquet")
    assert not store().fetch_file("nothing")


def test_a_run_goes_on_elsewhere_from_what_the_bucket_has(store, small, tmp_path):
    config, name = small(steps=9, checkpoint_every_steps=2, forward="EF21(TopK(0.3))"), "trials/0-s0"
    here = store()
    training = Training(config, out=here.fetch(name), engine="inline")
    for event in training.events():
        here.send_run(name)
        if event.kind == "step" and event.row["step"] == 6:
            break
    there = tmp_path / "bucket" / name / "checkpoints"
    assert {path.parent.name for path in there.glob("*/manifest.json")} == {"step-00000004", "step-00000006"}
    (there / "step-00000008").mkdir()  # a copy that was broken off
    (there / "step-00000008" / "worker-0.safetensors").touch()
    here.local.rename(tmp_path / "another machine's")
    folder = store().fetch(name)
    assert Run(folder).status == "running"
    train(config, out=folder, engine="inline", resume=True)
    whole = train(config, out=tmp_path / "whole", engine="inline")
    assert Run(folder).steps["loss"].tolist() == whole.steps["loss"].tolist()


def test_a_uri_of_no_known_system_is_refused():
    with pytest.raises(
        ConfigError, match="`out` must be a folder or a URI that pyarrow knows, but 'nope://bucket' is none"
    ):
        Store("nope://bucket")
