"""Curves of a trial for TensorBoard."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event as Entry
from tensorboardX.summary import hparams, scalar

from raysim.config import RunConfig
from raysim.records import Run
from raysim.training.events import Event

FLUSH_S = 5.0  # between two flushes to disk while values arrive


class Curves:
    """A file of curves in a folder, written in the caller's thread.

    `SummaryWriter` of tensorboardX writes in a thread, which dies when the disk is full; its caller then waits forever. This
    class raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(folder / "events"))
        self._flushed = time.monotonic()

    def __enter__(self) -> Curves:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, event: Event) -> None:
        """Add the values of a step or an evaluation."""
        row = event.row
        if event.kind == "step":
            for name in ("loss", "learning_rate", "wire_bytes"):
                self._write(scalar(f"train/{name}", row[name]), row["step"])
        elif event.kind == "eval" and row["batchnorm"] == "running":
            for name in event.measures:
                self._write(scalar(f"eval/{name}_{row['mode']}", row[name]), row["step"])

    def add_result(self, config: RunConfig, run: Run) -> None:
        """Add the configuration and the last evaluation, for TensorBoard's page of hyperparameters."""
        keys = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in config.flat().items()
            if value is not None
        }
        names = [f"final_{name}_{mode}" for name in run.measures for mode in ("on", "off")]
        final = {
            f"final/{name.removeprefix('final_')}": run.row[name] for name in names if run.row.get(name) is not None
        }
        for summary in hparams(keys, final):
            self._write(summary, 0)
        for name, value in final.items():
            self._write(scalar(name, value), 0)

    def _write(self, summary: Any, step: int) -> None:
        self._file.write_event(Entry(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._flushed >= FLUSH_S:
            self._file.flush()
            self._flushed = time.monotonic()
