"""Resuming a run: its configuration must be the recorded one, and its newest whole checkpoint is the place to go on from."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raysim.config import ConfigError, RunConfig, keys_of
from raysim.pipeline.state import CheckpointError
from raysim.records import Recorder, Run, recorded_value
from raysim.training.checkpoint import Checkpoint, checkpoints, newest_whole

_KEPT = ("run_id", "parent", "started_at", "restarts", "seconds", "start_s", "warning")


class Resumable(NamedTuple):
    """A run that was interrupted, as its folder holds it."""

    row: Mapping[str, Any]
    """Its recorded row of `runs`."""
    checkpoint: Checkpoint | None
    """The newest checkpoint that is whole; None if the run ended before its first."""
    parts: list[np.ndarray] | None
    """The contents of the checkpoint, one part a worker."""
    errors: list[str]
    """A sentence on each newer checkpoint that is damaged."""

    def kept_columns(self) -> dict[str, Any]:
        """Return the columns of the row that the resumed run goes on with."""
        kept = {key: self.row[key] for key in _KEPT if key in self.row}
        return kept | {"resumed": self.row["resumed"] + 1}

    def other_processor(self, row: Mapping[str, Any]) -> str | None:
        """Return a warning if the run goes on with other instructions than recorded, by the `row` that would begin it here."""
        old, new = self.row.get("cpu_capability"), row["cpu_capability"]
        if old in (None, new):  # older records do not tell
            return None
        return (
            f"The run was recorded with {old} ({self.row['cpu']}) and resumes with {new} ({row['cpu']}): losses may differ in the "
            "last digits."
        )

    def drop_damaged(self) -> str | None:
        """Remove the damaged checkpoints, and return a warning about them; None if there are none."""
        if not self.errors:
            return None
        assert self.checkpoint is not None
        for newer in checkpoints(self.checkpoint.path.parent):
            if newer.step > self.checkpoint.step:
                shutil.rmtree(newer.path)
        step = self.checkpoint.step
        return f"{' '.join(self.errors)} The run goes on from step {step}, and repeats the steps after it."


def find_resumable(folder: Path, config: RunConfig, row: Mapping[str, Any], recorder: Recorder) -> Resumable:
    """Read the interrupted run in a folder, with its newest whole checkpoint.

    `row` is the row of `runs` that `config` would begin with. Raises ConfigError if the recorded configuration differs, other
    than in the place of the run, if the model's cuts or the rows of a schedule's file differ, and if no checkpoint is whole.
    """
    old = Run(folder).row
    recorded = {key for key in old if key.partition(".")[0] in RunConfig.model_fields}
    for key in sorted(recorded | set(config.flat())):
        if key not in keys_of("place") | {"cuts", "num_stages"}:
            _check_same(key, recorded_value(old, key), row.get(key))
    _check_same("cuts", old["cuts"], row["cuts"])
    if row["schedule_rows"] != old.get("schedule_rows"):
        raise ConfigError(
            f"`schedule` must have the rows of the run to resume, but {config.schedule!r} has others now."
        )
    try:
        found, errors = newest_whole(folder / "checkpoints", recorder.check_parts)
    except CheckpointError as error:
        raise ConfigError(str(error)) from None
    checkpoint, parts = found if found is not None else (None, None)
    return Resumable(old, checkpoint, parts, errors)


def _check_same(key: str, old: object, new: object) -> None:
    if old != new:
        raise ConfigError(f"`{key}` must be {old!r}, as in the run to resume, but got {new!r}.")
