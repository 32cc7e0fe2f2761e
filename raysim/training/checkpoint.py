"""Checkpoints: whole folders of safetensors, one file a worker, with a manifest; no pickle.

A checkpoint is written beside its place and renamed into it, so that it is there whole or not at all. It holds one
end's copy of every memory: both ends of a delta method are equal, and restored from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from raysim.pipeline.state import CheckpointError, mean_of, unpack_tensors
from raysim.records import RecordsError
from raysim.replication.method import AGREED
from raysim.storage.files import make_folder, sync_folder, write_through
from raysim.storage.places import Place

FORMAT = 2
KEPT = 2  # checkpoints that stay: the newest, and the one before in case its disk fails


class Checkpoint(NamedTuple):
    """A checkpoint on disk: the state in which `step` begins."""

    path: Path
    step: int


def write_checkpoint(
    folder: Path,
    step: int,
    parts: Iterable[np.ndarray],
    signals: Mapping[str, Any] | None = None,
    records: Mapping[str, str] | None = None,
    keep: Collection[int] = (),
) -> Checkpoint:
    """Write the parts of all workers as the checkpoint of `step`, whole or not at all; remove all but the newest `KEPT`.

    `keep`: steps whose checkpoints stay in any case. `signals`: of the last step, which adaptive methods have yet to see, as JSON.
    `records`: the SHA-256 of the files that hold the records up to `step`, by name.
    """
    path = folder / f"step-{step:08d}"
    draft = folder / f".{path.name}.{os.getpid()}"
    for unfinished in folder.glob(".step-*"):  # of this process or one that was killed
        shutil.rmtree(unfinished, ignore_errors=True)
    make_folder(folder)
    draft.mkdir()
    try:
        files = {}
        for worker, part in enumerate(parts):
            name = f"worker-{worker}.safetensors"
            write_through(draft / name, part.data)
            files[name] = {"bytes": part.nbytes, "sha256": hashlib.sha256(part.data).hexdigest()}
        manifest = {"format": FORMAT, "step": step, "signals": signals, "records": dict(records or {}), "files": files}
        write_through(draft / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync_folder(draft)
    except OSError:  # a full disk is no fuller than before
        shutil.rmtree(draft, ignore_errors=True)
        raise
    aside = folder / f".{path.name}.old"
    if path.exists():  # written again by a run that went back: out of the way whole, too
        path.rename(aside)
    draft.rename(path)
    sync_folder(folder)  # before older ones are removed
    shutil.rmtree(aside, ignore_errors=True)
    for old in [each for each in checkpoints(folder) if each.step not in keep][:-KEPT]:
        shutil.rmtree(old.path, ignore_errors=True)
    return Checkpoint(path, step)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, oldest first; unfinished ones are not among them."""
    found = [Checkpoint(path, int(path.name[5:])) for path in folder.glob("step-*") if path.name[5:].isdigit()]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def read_checkpoint(checkpoint: Checkpoint) -> list[np.ndarray]:
    """Return the parts of a checkpoint, one a worker; raises CheckpointError if a file is missing or not as written."""
    entries = _manifest(checkpoint)
    try:
        written = entries["format"]
        files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unreadable(checkpoint, error) from None
    if written != FORMAT:
        raise CheckpointError(
            f"The checkpoint {checkpoint.path} is of format {written}, but this raysim reads {FORMAT}."
        )
    parts = []
    for name, (size, digest) in files.items():
        try:
            part = np.fromfile(checkpoint.path / name, dtype=np.uint8)
        except OSError as error:
            raise CheckpointError(
                f"The checkpoint {checkpoint.path} is corrupt: {name} cannot be read ({error})."
            ) from None
        if part.nbytes != size or hashlib.sha256(part.data).hexdigest() != digest:
            raise CheckpointError(f"The checkpoint {checkpoint.path} is corrupt: {name} is not what was written.")
        parts.append(part)
    return parts


def read_signals(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the signals of the step before a checkpoint, None if it has none; raises CheckpointError."""
    signals: dict[str, Any] | None = _manifest(checkpoint).get("signals")
    return signals


def read_records(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the SHA-256 of the files of records that a checkpoint stands on, by name; raises CheckpointError."""
    listed = _manifest(checkpoint).get("records")
    if not isinstance(listed, dict):
        raise CheckpointError(f"The checkpoint {checkpoint.path} does not list its records: it is of an older raysim.")
    return listed


def newest_whole(
    folder: Path, check: Callable[[Mapping[str, str]], None]
) -> tuple[tuple[Checkpoint, list[np.ndarray]] | None, list[str]]:
    """Return the newest checkpoint that is whole and whose records `check` accepts, with its parts; and the errors of newer ones.

    `check` raises RecordsError. None if there is no checkpoint; raises CheckpointError if there are some, and none is whole.
    """
    errors: list[str] = []
    for checkpoint in reversed(checkpoints(folder)):
        try:
            parts = read_checkpoint(checkpoint)
            try:
                check(read_records(checkpoint))
            except RecordsError as error:
                raise CheckpointError(
                    f"The records of the checkpoint {checkpoint.path} are damaged: {error}."
                ) from None
            return (checkpoint, parts), errors
        except CheckpointError as error:
            errors.append(str(error))
    if errors:
        raise CheckpointError(f"No checkpoint in {folder} is whole with its records. {' '.join(errors)}")
    return None, []


def _manifest(checkpoint: Checkpoint) -> dict[str, Any]:
    try:
        entries = json.loads((checkpoint.path / "manifest.json").read_bytes())
    except (OSError, ValueError) as error:
        raise _unreadable(checkpoint, error) from None
    if not isinstance(entries, dict):
        raise _unreadable(checkpoint, TypeError("no table"))
    return entries


def _unreadable(checkpoint: Checkpoint, error: Exception) -> CheckpointError:
    return CheckpointError(f"The checkpoint {checkpoint.path} is corrupt: its manifest cannot be read ({error}).")


def load_weights(run_folder: str | Place) -> dict[str, Tensor]:
    """Return the model's tensors from a run's newest checkpoint, by the names of the uncut model.

    Where a method lets replicas differ, they are the parameters on which replicas agreed last, or else the mean. BatchNorm
    statistics are the first replica's.

    Raises CheckpointError if there is none, or it is corrupt.

    >>> import tempfile, raysim
    >>> run = raysim.train("digits-cnn", "steps=1", engine="inline", out=tempfile.mkdtemp())
    >>> weights = load_weights(run.folder)
    >>> weights["conv1.0.weight"].shape
    torch.Size([16, 1, 3, 3])
    """
    found = checkpoints(Path(str(run_folder)) / "checkpoints")
    if not found:
        raise CheckpointError(f"There is no checkpoint in {run_folder}.")
    weights: dict[str, list[Tensor]] = {}
    agreed: dict[str, list[Tensor]] = {}
    for part in read_checkpoint(found[-1]):
        for name, tensor in unpack_tensors(part).items():
            for kind, infix, held in (("stage.", ".model.", weights), ("replicas.", f".{AGREED}/", agreed)):
                stage, separator, parameter = name.partition(infix)
                if separator and stage.startswith(kind):
                    held.setdefault(parameter, []).append(tensor)
    weights |= agreed
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    return {
        name: tensors[0] if name.rpartition(".")[2] in statistics else mean_of(tensors)
        for name, tensors in weights.items()
    }
