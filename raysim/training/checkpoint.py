"""Checkpoints, and resuming from them: folders with one safetensors file per worker and a manifest; no pickle.

A checkpoint is written under a temporary name and then renamed, so that it is either complete or absent. It holds only one
end's copy of every memory: both ends of a delta method have equal memories, and are restored from it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from raysim.config import ConfigError, RunConfig, keys_of
from raysim.pipeline.reports import StepFeedback
from raysim.pipeline.state import CheckpointError, mean_of, unpack_tensors
from raysim.records import Recorder, RecordsError, Run, recorded_value
from raysim.replication.method import AGREED
from raysim.storage.files import check_inside, make_folder, open_regular, read_text, sync_folder, write_through
from raysim.storage.places import Place
from raysim.storage.texts import parse_json

FORMAT = 2
_STEP = re.compile(r"step-([0-9]{1,18})")
KEPT = 2  # checkpoints to keep: the newest, and the one before in case the newest is damaged


class Checkpoint(NamedTuple):
    """A checkpoint on disk: the state at the start of `step`."""

    path: Path
    step: int

    def manifest(self) -> dict[str, Any]:
        """Return the checkpoint's table of contents; raises CheckpointError."""
        try:
            entries = parse_json(read_text(self.path / "manifest.json"))
            if not isinstance(entries, dict):
                raise ValueError("it is not a table")
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from None
        return entries

    def signals(self) -> StepFeedback:
        """Return the last step's signals, not yet seen by adaptive methods; raises CheckpointError."""
        try:
            written = dict(self.manifest().get("signals") or {})
            written.pop("floors", None)  # of links with a common budget, before version 0.3
            return StepFeedback(**written)
        except (TypeError, ValueError) as error:
            raise self._unreadable(error) from None

    def parts(self) -> list[np.ndarray]:
        """Return the state, one part per worker; raises CheckpointError if a file is missing or has changed."""
        entries = self.manifest()
        try:
            written = entries["format"]
            files = {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in entries["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._unreadable(error) from None
        if written != FORMAT:
            raise CheckpointError(f"The checkpoint {self.path} is of format {written}, but this raysim reads {FORMAT}.")
        parts = []
        for name, (size, digest) in files.items():
            try:
                if Path(name).name != name:
                    raise OSError(errno.EINVAL, "it lies elsewhere")
                with open_regular(self.path / name) as file:
                    part = np.fromfile(file, dtype=np.uint8)
            except OSError as error:
                raise CheckpointError(
                    f"The checkpoint {self.path} is corrupt: {name} cannot be read ({error})."
                ) from None
            if part.nbytes != size or hashlib.sha256(part.data).hexdigest() != digest:
                raise CheckpointError(
                    f"The checkpoint {self.path} is corrupt: {name} has changed since it was written."
                )
            parts.append(part)
        return parts

    def _unreadable(self, error: Exception) -> CheckpointError:
        return CheckpointError(f"The checkpoint {self.path} is corrupt: its manifest cannot be read ({error}).")


def write_checkpoint(
    folder: Path,
    step: int,
    parts: Iterable[np.ndarray],
    signals: StepFeedback | None = None,
    records: Mapping[str, str] | None = None,
    keep: Collection[int] = (),
    newest: int = KEPT,
) -> Checkpoint:
    """Write the parts of all workers atomically as the checkpoint of `step`, and remove all but the `newest`.

    `keep`: steps whose checkpoints are never removed. `signals`: the last step's, not yet seen by adaptive methods. `records`:
    the SHA-256 of the files with the records up to `step`, by name.
    """
    path = folder / f"step-{step:08d}"
    draft = folder / f".{path.name}.{secrets.token_hex(8)}"
    check_inside(folder, folder.parent)
    for unfinished in folder.glob(".step-*"):  # left by this process or a killed one
        shutil.rmtree(unfinished, ignore_errors=True)
    make_folder(folder)
    draft.mkdir()
    try:
        files = {}
        for worker, part in enumerate(parts):
            name = f"worker-{worker}.safetensors"
            write_through(draft / name, part.data)
            files[name] = {"bytes": part.nbytes, "sha256": hashlib.sha256(part.data).hexdigest()}
        manifest = {
            "format": FORMAT,
            "step": step,
            "signals": signals and signals._asdict(),
            "records": dict(records or {}),
            "files": files,
        }
        write_through(draft / "manifest.json", json.dumps(manifest, indent=1).encode())
        sync_folder(draft)
    except OSError:  # leave a full disk no fuller than before
        shutil.rmtree(draft, ignore_errors=True)
        raise
    aside = folder / f".{path.name}.old"
    if path.exists():  # a run that went back writes it again: move the old one away atomically too
        path.rename(aside)
    draft.rename(path)
    sync_folder(folder)  # before older ones are removed
    shutil.rmtree(aside, ignore_errors=True)
    for old in [each for each in checkpoints(folder) if each.step not in keep][:-newest]:
        shutil.rmtree(old.path, ignore_errors=True)
    return Checkpoint(path, step)


def checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the complete checkpoints of a folder, oldest first."""
    named = ((path, _STEP.fullmatch(path.name)) for path in folder.glob("step-*"))
    known = [Checkpoint(path, int(match[1])) for path, match in named if match is not None]
    return sorted(known, key=lambda checkpoint: checkpoint.step)


def load_weights(run_folder: str | Place) -> dict[str, Tensor]:
    """Return the model's tensors from a run's newest checkpoint, by their names in the uncut model.

    If a method lets replicas differ, the parameters on which replicas last agreed are returned, or else their mean. BatchNorm
    statistics are the first replica's.

    Raises CheckpointError if there is no checkpoint, or it is corrupt.

    >>> import tempfile, raysim
    >>> run = raysim.train("digits-cnn", "steps=1", engine="inline", out=tempfile.mkdtemp())
    >>> weights = load_weights(run.folder)
    >>> weights["conv1.0.weight"].shape
    torch.Size([16, 1, 3, 3])
    """
    written = checkpoints(Path(str(run_folder)) / "checkpoints")
    if not written:
        raise CheckpointError(f"There is no checkpoint in {run_folder}.")
    weights: dict[str, list[Tensor]] = {}
    agreed: dict[str, list[Tensor]] = {}
    for part in written[-1].parts():
        for name, tensor in unpack_tensors(part).items():
            kind, _, rest = name.split(".", 2)
            for known, prefix, held in (("stage", "model.", weights), ("replicas", f"{AGREED}/", agreed)):
                if kind == known and rest.startswith(prefix):
                    held.setdefault(rest.removeprefix(prefix), []).append(tensor)
    weights |= agreed
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    return {
        name: tensors[0] if name.rpartition(".")[2] in statistics else mean_of(tensors)
        for name, tensors in weights.items()
    }


def newest_whole(
    folder: Path, check: Callable[[Mapping[str, str]], None]
) -> tuple[Checkpoint | None, list[np.ndarray], list[str]]:
    """Return the newest intact checkpoint whose records pass `check`, its parts, and the errors of newer ones.

    `check` takes the SHA-256 of the files of records by name, and raises RecordsError. The checkpoint is None if there are none;
    raises CheckpointError if there are checkpoints, but none is intact.
    """
    errors: list[str] = []
    for checkpoint in reversed(checkpoints(folder)):
        try:
            parts, listed = checkpoint.parts(), checkpoint.manifest().get("records")
            if not isinstance(listed, dict):
                raise CheckpointError(
                    f"The checkpoint {checkpoint.path} does not list its records: it is of an older raysim."
                )
            check(listed)
            return checkpoint, parts, errors
        except RecordsError as error:
            errors.append(f"The records of the checkpoint {checkpoint.path} are damaged: {error}.")
        except CheckpointError as error:
            errors.append(str(error))
    if errors:
        raise CheckpointError(f"No checkpoint in {folder} is intact. {' '.join(errors)}")
    return None, [], []


class Resumable(NamedTuple):
    """An interrupted run, read from its folder."""

    row: Mapping[str, Any]
    """Its recorded row of `runs`."""
    checkpoint: Checkpoint | None
    """The newest intact checkpoint; None if the run ended before its first."""
    parts: list[np.ndarray]
    """The contents of the checkpoint, one part per worker."""
    errors: list[str]
    """A sentence on each newer, damaged checkpoint."""

    def kept_columns(self) -> dict[str, Any]:
        """Return the columns of the row that carry over to the resumed run."""
        names = ("run_id", "parent", "started_at", "restarts", "seconds", "start_s", "warning")
        kept = {name: self.row[name] for name in names if name in self.row}
        return kept | {"resumed": self.row["resumed"] + 1}

    def other_processor(self, row: Mapping[str, Any]) -> str | None:
        """Return a warning if the CPU capability differs from the recorded one. `row`: the row of a new run on this machine."""
        old, new = self.row.get("cpu_capability"), row["cpu_capability"]
        if old in (None, new):  # unknown in older records
            return None
        return (
            f"The run was recorded with {old} ({self.row['cpu']}) and resumes with {new} ({row['cpu']}): losses may differ in the "
            "last digits."
        )

    def drop_damaged(self) -> str | None:
        """Remove damaged checkpoints, and return a warning about them, or None if there are none."""
        if not self.errors:
            return None
        assert self.checkpoint is not None
        for newer in checkpoints(self.checkpoint.path.parent):
            if newer.step > self.checkpoint.step:
                shutil.rmtree(newer.path)
        step = self.checkpoint.step
        return f"{' '.join(self.errors)} The run continues from step {step}, and repeats the steps after it."


def find_resumable(folder: Path, config: RunConfig, row: Mapping[str, Any], recorder: Recorder) -> Resumable:
    """Read the interrupted run in a folder, with its newest intact checkpoint.

    `row` is the row of `runs` of a new run with `config`. Raises ConfigError if the recorded configuration differs in more than
    the keys of role "place", if the samples have changed, if the model's cuts or the rows of a schedule file differ, or if no
    checkpoint is intact.
    """
    old = Run(folder).row
    recorded = {key for key in old if key.partition(".")[0] in RunConfig.model_fields}
    for key in sorted(recorded | set(config.flat())):
        if key not in keys_of("place") | {"cuts", "num_stages"}:
            _check_same(key, recorded_value(old, key), row.get(key))
    check_data(old, row)
    _check_same("cuts", old["cuts"], row["cuts"])
    if row["schedule_rows"] != old.get("schedule_rows"):
        raise ConfigError(
            f"`schedule` must have the rows of the run to resume, but {config.schedule!r} has others now."
        )
    try:
        return Resumable(old, *newest_whole(folder / "checkpoints", recorder.check_parts))
    except CheckpointError as error:
        raise ConfigError(str(error)) from None


def check_data(old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise ConfigError if a new run's samples differ from an earlier run's, if that run recorded them."""
    if old.get("data_digest") not in (None, new["data_digest"]):
        raise ConfigError(
            f"`data` must have the samples of run {old['run_id']}, but they have changed since. Restore them, or train again in "
            "another folder."
        )


def _check_same(key: str, old: object, new: object) -> None:
    if old != new:
        raise ConfigError(f"`{key}` must be {old!r}, as in the run to resume, but got {new!r}.")
