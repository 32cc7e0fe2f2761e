"""Checkpoints are there whole or not at all, and what is wrong with one is said in one sentence."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import same_records

from raysim.engine.inline import InlineEngine
from raysim.pipeline.errors import WorkerLostError
from raysim.pipeline.state import CheckpointError, pack_tensors, unpack_tensors
from raysim.training import checkpoint
from raysim.training.checkpoint import KEPT, Checkpoint, checkpoints, load_weights, newest_whole, write_checkpoint
from raysim.training.train import train


class Killed(BaseException):
    """What a test raises where a process would have been killed."""


def parts(step: int, num_workers: int = 2) -> list[np.ndarray]:
    return [
        pack_tensors({f"stage.{worker}.model.{worker}.weight": torch.full((2, 3), float(step + worker))})
        for worker in range(num_workers)
    ]


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return [part.tobytes() for part in a] == [part.tobytes() for part in b]


def test_tensors_are_packed_and_unpacked_bit_for_bit() -> None:
    tensors = {
        "float32": torch.tensor([[1.5, -0.0], [3e38, 1e-45]]),
        "bfloat16": torch.tensor([1.0, 3.14159], dtype=torch.bfloat16),
        "int64": torch.tensor([2**62, -1]),
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "name.with.dots": torch.ones(1),
    }
    packed = pack_tensors(tensors)
    assert packed.dtype == np.uint8
    again = unpack_tensors(packed)
    assert again.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert again[name].dtype == tensor.dtype
        assert again[name].shape == tensor.shape
        assert torch.equal(again[name], tensor)
    assert torch.signbit(again["float32"][0, 1])
    assert unpack_tensors(pack_tensors({})) == {}
    again["float32"][0, 0] = 7  # unpacked tensors are one's own
    with pytest.raises(CheckpointError, match=r"^A part of the checkpoint is not a safetensors file: .*\.$"):
        unpack_tensors(packed[:-3])


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "checkpoints", 7, parts(7, 3))
    assert written == Checkpoint(tmp_path / "checkpoints" / "step-00000007", 7)
    assert checkpoints(tmp_path / "checkpoints") == [written]
    assert same(written.parts(), parts(7, 3))
    manifest = json.loads((written.path / "manifest.json").read_text())
    assert (manifest["format"], manifest["step"]) == (checkpoint.FORMAT, 7)
    assert sorted(manifest["files"]) == [f"worker-{worker}.safetensors" for worker in range(3)]


def test_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "none") == []
    for step in (2, 4, 10, 100_000_000):
        write_checkpoint(tmp_path, step, parts(step))
    assert KEPT == 2
    assert [each.step for each in checkpoints(tmp_path)] == [10, 100_000_000]
    assert len(list(tmp_path.iterdir())) == KEPT
    write_checkpoint(tmp_path, 100_000_001, parts(1), keep=[10], newest=1)
    assert [each.step for each in checkpoints(tmp_path)] == [10, 100_000_001]
    write_checkpoint(tmp_path, 10, parts(11))  # written again, by a run that went back
    assert same(checkpoints(tmp_path)[0].parts(), parts(11))
    assert len(list(tmp_path.iterdir())) == KEPT


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("place", range(7))
def test_killed_write_leaves_whole_checkpoint_or_none(tmp_path: Path, place: int, again: bool, monkeypatch) -> None:
    """Killed at the n-th of: files and draft synced, the old one moved away (if there is one), the draft renamed, the name synced."""
    write_checkpoint(tmp_path, 2, parts(2))
    if again:
        write_checkpoint(tmp_path, 4, parts(40))
    calls = 0

    def killing(function):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls > place:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killing(os.fsync))
        patch.setattr(Path, "rename", killing(Path.rename))
        try:
            write_checkpoint(tmp_path, 4, parts(4))
        except Killed:
            pass
        else:
            assert (place, again) == (6, False)
    for found in checkpoints(tmp_path):
        wanted = [parts(2)] if found.step == 2 else [parts(4), parts(40)]
        assert any(same(found.parts(), each) for each in wanted)
    assert checkpoints(tmp_path)[0].step == 2
    write_checkpoint(tmp_path, 4, parts(4))  # the run that resumes comes by again
    assert same(checkpoints(tmp_path)[-1].parts(), parts(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000004"]  # and tidies up


WORKER, MANIFEST = "worker-1.safetensors", "manifest.json"
MANIFESTS = (
    *(b"", b"[]", b"\xff\xfe\x00", b'{"format": 2, "files": ', b"[" * 200_000, b'{"a":' * 200_000),
    *(b'{"format": 2, "files": %s}' % files for files in (b"[]", b'{"worker-1.safetensors": {}}')),
    *(
        b'{"format": 2, "files": {"%s": {"bytes": 1, "sha256": ""}}}' % name
        for name in (b"../../run.parquet", b"/dev/zero")
    ),
)
DAMAGES: dict[str, tuple[str, Callable[[Path, bytes], object]]] = {  # the file, and what is there in its place
    "truncated": (WORKER, lambda file, data: file.write_bytes(data[:-1])),
    "a bit flipped": (WORKER, lambda file, data: file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))),
    "empty": (WORKER, lambda file, data: file.write_bytes(b"")),
    "missing": (WORKER, lambda file, data: None),
    "a pipe": (WORKER, lambda file, data: os.mkfifo(file)),
    "no manifest": (MANIFEST, lambda file, data: None),
    "half a manifest": (MANIFEST, lambda file, data: file.write_bytes(data[:50])),
    "files elsewhere": (
        MANIFEST,
        lambda file, data: file.write_bytes(data.replace(b"worker-", b"../step-00000004/worker-")),
    ),
    "a manifest that is a pipe": (MANIFEST, lambda file, data: os.mkfifo(file)),
    "a manifest without end": (MANIFEST, lambda file, data: file.symlink_to("/dev/zero")),
    **{
        f"manifest {text[:50]!r}": (MANIFEST, lambda file, data, text=text: file.write_bytes(text))  # type: ignore[misc]
        for text in MANIFESTS
    },
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_corrupt_checkpoint_is_refused_in_one_sentence(tmp_path: Path, how: str) -> None:
    write_checkpoint(tmp_path / "checkpoints", 2, parts(2))
    newest = write_checkpoint(tmp_path / "checkpoints", 4, parts(4))
    name, change = DAMAGES[how]
    file, data = newest.path / name, (newest.path / name).read_bytes()
    file.unlink()
    change(file, data)
    with pytest.raises(CheckpointError) as error:
        newest.parts()
    said = r"(its manifest cannot be read \(|\S+ has changed since it was written\.|\S+ cannot be read \()"
    assert re.match(rf"The checkpoint {newest.path} is corrupt: {said}", str(error.value))
    assert str(error.value).endswith(".")
    assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError):
        load_weights(tmp_path)
    found, kept, errors = newest_whole(tmp_path / "checkpoints", lambda listed: None)
    assert (found.step, len(errors)) == (2, 1)  # the one before is there
    assert same(kept, parts(2))


@pytest.mark.parametrize(
    "name", ["step-²", "step-", "step-1e3", f"step-{'9' * 5000}"[:250], "step--1", "step-٣", "step-00x"]
)
def test_malformed_folders_are_not_checkpoints(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, 2, parts(2))
    (tmp_path / name).mkdir()
    assert [found.step for found in checkpoints(tmp_path)] == [2]


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    found = write_checkpoint(tmp_path, 2, parts(2))
    (found.path / "manifest.json").write_text('{"format": 1, "files": {}}')
    with pytest.raises(CheckpointError) as error:
        found.parts()
    assert str(error.value) == f"The checkpoint {found.path} is of format 1, but this raysim reads {checkpoint.FORMAT}."


def test_weights_have_the_names_of_the_uncut_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as error:
        load_weights(tmp_path)
    assert str(error.value) == f"There is no checkpoint in {tmp_path}."
    state = [
        {
            "stage.0.model.conv.weight": torch.ones(2),
            "stage.0.optimizer.0.momentum_buffer": torch.zeros(2),
            "link.0.forward.rows": torch.zeros(3),
        },
        {
            "stage.1.model.inner.model.head.bias": torch.full((1,), 3.0),
            "stage.1.optimizer.0.step": torch.tensor(1.0),
            "stage.1.versions.kept.1.0.inner.model.head.bias": torch.full((1,), 2.0),
        },
    ]
    write_checkpoint(tmp_path / "checkpoints", 1, [pack_tensors({"stage.0.model.conv.weight": torch.zeros(2)})])
    write_checkpoint(tmp_path / "checkpoints", 2, [pack_tensors(tensors) for tensors in state])
    weights = load_weights(tmp_path)
    assert sorted(weights) == ["conv.weight", "inner.model.head.bias"]
    assert weights["conv.weight"].tolist() == [1.0, 1.0]


def test_run_resumed_before_first_checkpoint_survives_lost_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ["num_stages=2", "steps=8", "checkpoint_every_steps=3", "data.test_samples=50"]
    whole = train("digits-cnn", *keys, engine="inline", out=tmp_path / "whole")
    step = InlineEngine.step
    errors = {1: RuntimeError("broken off"), 5: WorkerLostError("a worker is lost")}

    def failing(engine: InlineEngine, index: int, *signals: Any) -> Any:
        if index in errors:
            raise errors.pop(index)
        return step(engine, index, *signals)

    monkeypatch.setattr(InlineEngine, "step", failing)
    monkeypatch.setattr(InlineEngine, "can_restart", True)
    with pytest.raises(RuntimeError, match="broken off"):
        train("digits-cnn", *keys, engine="inline", out=tmp_path / "run")
    run = train("digits-cnn", *keys, engine="inline", out=tmp_path / "run", resume=True)
    assert (run.row["resumed"], run.row["restarts"]) == (1, 1)
    same_records(run, whole)


@pytest.mark.parametrize("every", [0, 100])
def test_a_killed_run_has_a_checkpoint_of_the_last_minutes(tmp_path: Path, monkeypatch, every: int) -> None:
    monkeypatch.setattr("raysim.training.run.KEEP_EVERY_S", 0.0)
    step = InlineEngine.step

    def failing(engine: InlineEngine, index: int, *signals: Any) -> Any:
        if index == 4:
            raise RuntimeError("killed")
        return step(engine, index, *signals)

    monkeypatch.setattr(InlineEngine, "step", failing)
    keys = ["num_stages=2", "steps=8", f"checkpoint_every_steps={every}", "data.test_samples=50"]
    with pytest.raises(RuntimeError, match="killed"):
        train("digits-cnn", *keys, engine="inline", out=tmp_path / "run")
    assert [each.step for each in checkpoints(tmp_path / "run" / "checkpoints")] == ([4] if every == 0 else [3, 4])
