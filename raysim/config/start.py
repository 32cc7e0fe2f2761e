"""The start of a branch: the run, and the step of its checkpoint, from which another run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raysim.notation import shown

_RULE = "`start` must be the folder of a run and the step of a checkpoint, such as results/dense@1200"


@dataclass(frozen=True)
class Start:
    """A run's folder and the step of one of its checkpoints; None for the last one.

    >>> parse_start("results/dense@1200"), parse_start("results/dense").step
    (results/dense@1200, None)
    """

    folder: str
    step: int | None = None

    def __repr__(self) -> str:
        return self.folder if self.step is None else f"{self.folder}@{self.step}"


def parse_start(text: str) -> Start:
    """Return the start written as `FOLDER@STEP` or `FOLDER`; raises ValueError for anything else."""
    folder, at, step = text.rpartition("@")
    if not at or "/" in step:
        folder, step = text, ""
    if not folder or (step and not (step.isascii() and step.isdecimal() and len(step) <= 9)) or text.endswith("@"):
        raise ValueError(f"{_RULE}, but got {shown(text)}.")
    return Start(folder, int(step) if step else None)


def read_start(value: Any) -> Start | None:
    """Return the start of a configuration's value: a text, or a start that is parsed already."""
    if value is None or isinstance(value, Start):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{_RULE}, but got {shown(value)}.")
    return parse_start(value)


def write_start(value: Start | None) -> str | None:
    """Return the text of a start."""
    return None if value is None else repr(value)
