"""Curves of a trial for TensorBoard."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event as Entry
from tensorboardX.summary import hparams, scalar

from raysim.config import RunConfig
from raysim.records import Run
from raysim.training.events import Event

FLUSH_S = 5.0  # at most between a value and its arrival on disk, while values arrive


class Board:
    """A file of curves in a folder, written in the thread of the caller.

    `SummaryWriter` of tensorboardX has a thread that writes. It dies when the disk is full, and its caller then waits for it
    forever; this class raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(folder / "events"))
        self._flushed = time.monotonic()

    def __enter__(self) -> Board:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def show(self, event: Event) -> None:
        """Add the values of a step or an evaluation."""
        row = event.row
        if event.kind == "step":
            for name in ("loss", "learning_rate", "wire_bytes"):
                self._scalar(f"train/{name}", row[name], row["step"])
        elif event.kind == "eval" and row["batchnorm"] == "running":
            for name in event.measures:
                self._scalar(f"eval/{name}_{row['mode']}", row[name], row["step"])

    def show_result(self, config: RunConfig, run: Run) -> None:
        """Add the configuration and the last evaluation, for TensorBoard's page of hyperparameters."""
        values = {key: value for key, value in config.flat().items() if value is not None}
        known = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in values.items()
        }
        row = run.row
        names = [f"{name}_{mode}" for name in run.measures for mode in ("on", "off")]
        reached = {f"final/{name}": row[f"final_{name}"] for name in names if row.get(f"final_{name}") is not None}
        for summary in hparams(known, reached):
            self._write(summary, 0)
        for name, value in reached.items():
            self._scalar(name, value, 0)

    def _scalar(self, name: str, value: float, step: int) -> None:
        self._write(scalar(name, value), step)

    def _write(self, summary: Any, step: int) -> None:
        self._file.write_event(Entry(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._flushed >= FLUSH_S:
            self._file.flush()
            self._flushed = time.monotonic()
