"""`trials.parquet`: one row for each trial. It is rewritten whole whenever a trial changes, so it can be read at any moment."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raysim.config import ConfigError
from raysim.records import UNREADABLE, write_table
from raysim.sweeps.objectives import PRICED, Figure

STATUSES = ("waiting", "running", "finished", "diverged", "failed", "pruned")
ENDED = STATUSES[2:]
SPEEDUP = ("speedup", "speedup_low", "speedup_high")

COLUMNS = pa.schema(
    [
        ("study", pa.string()),
        ("trial", pa.int64()),  # Optuna's number
        ("name", pa.string()),  # of a baseline
        ("baseline", pa.bool_()),
        ("status", pa.string()),
        ("same_as", pa.int64()),  # the trial of the same configuration, whose results these are
        ("engine", pa.string()),  # that trained it: "inline", all stages in one process, or "ray"
        ("started_at", pa.timestamp("us", tz="UTC")),
        ("seconds", pa.float64()),  # of training and evaluating, over all seeds and sessions
        ("error", pa.string()),
        ("seeds", pa.list_(pa.int64())),
        ("runs", pa.list_(pa.string())),  # folders, relative to the study's
        ("notation", pa.string()),  # the canonical configuration, seed apart
        (
            "settled",
            pa.bool_(),
        ),  # whether prices have the compute of the whole study, or of the runs up to then; null without
        ("compute", pa.string()),  # where the seconds of compute in settled prices come from
    ]
)


@dataclass
class TrialRow:
    """Facts about one trial."""

    trial: int
    seeds: list[int]
    notation: str = ""
    name: str | None = None
    status: str = "running"
    same_as: int | None = None
    engine: str | None = None
    started_at: datetime | None = None
    seconds: float | None = None
    error: str | None = None
    runs: list[str] = field(default_factory=list)
    params: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Figure] = field(default_factory=dict)
    constraints: dict[str, float] = field(default_factory=dict)
    settled: bool | None = None
    compute: str | None = None

    @property
    def ended(self) -> bool:
        """True if the trial has ended."""
        return self.status in ENDED

    @property
    def feasible(self) -> bool | None:
        """True if the trial keeps all constraints; None where there are none, or a figure is missing."""
        return all(value <= 0 for value in self.constraints.values()) if self.constraints else None


class Rows:
    """The rows of a study by number, kept on disk."""

    def __init__(self, folder: Path, study: str) -> None:
        self.path = folder / "trials.parquet"
        self.study = study
        self._rows: dict[int, TrialRow] = {}

    def __iter__(self) -> Iterator[TrialRow]:
        return iter([self._rows[number] for number in sorted(self._rows)])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> TrialRow:
        return self._rows[number]

    def get(self, number: int) -> TrialRow | None:
        """Return the row of a trial, if there is one."""
        return self._rows.get(number)

    @property
    def distinct(self) -> int:
        """Configurations that were trained, or are being."""
        return sum(row.same_as is None and bool(row.notation) for row in self)

    def put(self, row: TrialRow) -> None:
        """Keep a row and write all of them."""
        self._rows[row.trial] = row
        self.write()

    def drop(self, number: int) -> None:
        """Forget a row that stood for nothing yet."""
        del self._rows[number]

    def write(self) -> None:
        """Write `trials.parquet` whole, and rename it into place."""
        write_table(self._table(), self.path)

    def _table(self) -> pa.Table:
        rows = list(self)
        columns: dict[str, pa.Array] = {}
        mixed: dict[str, dict[str, str]] = {}
        for column in COLUMNS:
            values = [self._fixed(row, column.name) for row in rows]
            columns[column.name] = pa.array(values, column.type)
        for name in dict.fromkeys(name for row in rows for name in row.params):
            drawn = [row.params.get(name) for row in rows]
            kind = _kind(drawn)
            if kind is None:
                drawn, mixed[f"param.{name}"] = [None if v is None else json.dumps(v) for v in drawn], JSON
            columns[f"param.{name}"] = pa.array(drawn, kind or pa.string())
        floats, truths = pa.float64(), pa.bool_()
        names = list(dict.fromkeys(name for row in rows for name in row.figures))
        none = Figure(None)
        for name in names:
            figures = [row.figures.get(name, none) for row in rows]
            columns[f"objective.{name}"] = pa.array([figure.value for figure in figures], floats)
            columns[f"spread.{name}"] = pa.array([figure.spread for figure in figures], floats)
            if name.startswith("time_to_target"):
                columns[f"reached.{name}"] = pa.array([figure.reached for figure in figures], truths)
            if name.startswith(PRICED):
                columns[f"low.{name}"] = pa.array([figure.low for figure in figures], floats)
                columns[f"high.{name}"] = pa.array([figure.high for figure in figures], floats)
            if name.startswith("step_s"):
                for place, prefix in enumerate(SPEEDUP):
                    ends = [None if figure.speedup is None else figure.speedup[place] for figure in figures]
                    columns[f"{prefix}.{name}"] = pa.array(ends, floats)
        for name in dict.fromkeys(name for row in rows for name in row.constraints):
            columns[f"constraint.{name}"] = pa.array([row.constraints.get(name) for row in rows], floats)
        columns["feasible"] = pa.array([row.feasible for row in rows], truths)
        fields = [pa.field(name, array.type, metadata=mixed.get(name)) for name, array in columns.items()]
        return pa.table(list(columns.values()), schema=pa.schema(fields))

    def _fixed(self, row: TrialRow, column: str) -> Any:
        if column == "study":
            return self.study
        return row.name is not None if column == "baseline" else getattr(row, column)

    def read(self) -> None:
        """Read the rows in the folder; raises ConfigError where the file is damaged."""
        if not self.path.is_file():
            return
        try:
            table = pq.read_table(self.path, page_checksum_verification=True)
        except UNREADABLE as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(
                f"The rows of the study to resume, {self.path}, cannot be read ({reason}): bring back a copy of the file."
            ) from None
        mixed = [one.name for one in table.schema if (one.metadata or {}).get(b"json")]
        for values in table.to_pylist():
            row = _row(values | {name: json.loads(values[name]) for name in mixed if values[name] is not None})
            self._rows[row.trial] = row


def _row(values: Mapping[str, Any]) -> TrialRow:
    groups: dict[str, dict[str, Any]] = {}
    for column, value in values.items():
        kind, dot, name = column.partition(".")
        if dot and value is not None:
            groups.setdefault(kind, {})[name] = value
    found = {name: values[name] for name in TrialRow.__dataclass_fields__ if name in values}
    names = dict.fromkeys([*groups.get("objective", {}), *groups.get("reached", {})])
    return TrialRow(
        **found,
        params=groups.get("param", {}),
        figures={name: _figure(groups, name) for name in names},
        constraints=groups.get("constraint", {}),
    )


def _figure(groups: Mapping[str, Mapping[str, Any]], name: str) -> Figure:
    def of(prefix: str) -> Any:
        return groups.get(prefix, {}).get(name)

    speedup = (of("speedup"), of("speedup_low"), of("speedup_high")) if of("speedup") is not None else None
    return Figure(of("objective"), of("spread"), of("reached"), of("low"), of("high"), speedup)


JSON = {"json": "1"}  # a column of texts of values that differ in kind


def _kind(values: list[Any]) -> pa.DataType | None:
    """Return the type of a parameter's column, None where the values differ in kind."""
    kinds = {type(value) for value in values if value is not None}
    types = (({bool}, pa.bool_()), ({int}, pa.int64()), ({int, float}, pa.float64()), ({str}, pa.string()))
    return next((arrow for allowed, arrow in types if kinds <= allowed), None)
