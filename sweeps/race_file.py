"""`race.parquet`: the plans, the parts and the exits of a race, rewritten whole at every round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raysim.analysis.comparison.race import RUNGS, Exit, Kind
from raysim.config import ConfigError
from raysim.records import UNREADABLE, write_table

COLUMNS = pa.schema(
    [
        ("round", pa.int64()),
        ("trial", pa.int64()),  # Optuna's number
        # "train"; why the trial left: "harmful", "hopeless", "slower", "failed"; "plan" of a budget; "further" than the plan
        ("decision", pa.string()),
        ("seeds", pa.list_(pa.int64())),  # trained in this round, behind the exit, or planned from here on
        ("share", pa.float64()),  # of the steps, after which the part ends
        ("cost", pa.float64()),  # of a step, by which trials are ordered: seconds or bytes
        ("harm", pa.float64()),  # mean over the seeds, in the unit of the measure: only of an exit
        ("bound", pa.float64()),  # lower bound of the final harm, or the chance of a verdict of safe: only of an exit
        ("ended", pa.bool_()),  # whether the round has ended
        (
            "elapsed_s",
            pa.float64(),
        ),  # seconds of the race at the end of the round, over all sessions: only within a budget
    ]
)


@dataclass
class Entry:
    """A row of `race.parquet`."""

    round: int
    trial: int
    decision: str
    seeds: list[int]
    share: float
    cost: float
    harm: float | None = None
    bound: float | None = None
    ended: bool = False
    elapsed_s: float | None = None

    @property
    def is_whole(self) -> bool:
        """True if all values that its decision needs are there."""
        needed = (self.round, self.trial, self.decision, self.seeds, self.share, self.cost)
        exit_needs = not self.is_exit or (self.harm is not None and self.share in RUNGS)
        return None not in needed and None not in self.seeds and exit_needs

    @property
    def is_exit(self) -> bool:
        """True if the trial left by a decision of the race."""
        return self.decision not in ("train", "failed", "plan", "further")

    @property
    def exit(self) -> Exit:
        """The exit that the row records."""
        assert self.harm is not None
        kind: Kind = self.decision  # type: ignore[assignment]
        bound = math.nan if self.bound is None else self.bound
        return Exit(kind, rung_of(self.share), len(self.seeds), self.harm, bound)


def write_entries(file: Path, entries: Sequence[Entry]) -> None:
    """Write entries whole, or not at all."""
    columns = {name: [getattr(entry, name) for entry in entries] for name in COLUMNS.names}
    write_table(pa.table(columns, schema=COLUMNS), file)


def read_entries(file: Path) -> list[Entry]:
    """Return the entries of a file, none without one; raises ConfigError if it is damaged."""
    if not file.is_file():
        return []
    try:
        entries = [Entry(**row) for row in pq.read_table(file, schema=COLUMNS, partitioning=None).to_pylist()]
        if wrong := next((entry for entry in entries if not entry.is_whole), None):
            raise ValueError(f"trial {wrong.trial} has an impossible row in round {wrong.round}")
        return entries
    except (*UNREADABLE, OverflowError) as error:
        raise ConfigError(
            f"The rounds of the race, {file}, cannot be read ({error}): restore the file from a copy."
        ) from None


def rung_of(share: float) -> int:
    """Return the rung of a share of the steps."""
    return RUNGS.index(share)
