"""`trials.parquet`: one row per trial, replaced at every change so that it can be read at any moment."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from raysim import analysis
from raysim.config import ConfigError
from raysim.records import UNREADABLE, read_whole, write_table
from raysim.storage.texts import parse_json
from raysim.sweeps.objectives import PRICED, Figure, Objective

ENDED = ("finished", "diverged", "failed", "pruned")  # statuses; before them a trial is waiting or running
NEEDED = ("trial", "seeds", "status")  # columns with a value in every row
JSON = {"json": "1"}  # metadata of a column of JSON texts, for values of different types
# Columns of a `Figure`, and the prefixes of the objectives that have them.
FIGURE: Mapping[str, str | tuple[str, ...]] = {
    "objective": "",
    "spread": "",
    "reached": "time_to_target",
    "low": PRICED,
    "high": PRICED,
    "speedup": "step_s",
    "speedup_low": "step_s",
    "speedup_high": "step_s",
}

COLUMNS = pa.schema(
    [
        ("study", pa.string()),
        ("trial", pa.int64()),  # Optuna's number
        ("name", pa.string()),  # of a baseline
        ("baseline", pa.bool_()),
        ("status", pa.string()),
        ("same_as", pa.int64()),  # the trial with the same configuration whose results these are
        ("engine", pa.string()),  # "inline", all stages in one process, or "ray"
        ("started_at", pa.timestamp("us", tz="UTC")),
        ("seconds", pa.float64()),  # of training and evaluating, over all seeds and sessions
        ("error", pa.string()),
        ("seeds", pa.list_(pa.int64())),
        ("runs", pa.list_(pa.string())),  # folders, relative to the study's
        ("notation", pa.string()),  # the setting, and the other keys that differ from the base
        (
            "settled",
            pa.bool_(),
        ),  # whether prices use the compute of all runs, not only of the first ones; null without prices
        ("compute", pa.string()),  # source of the seconds of compute in settled prices
    ]
)


@dataclass
class TrialRow:
    """The state and results of one trial."""

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
    def baseline(self) -> bool:
        return self.name is not None

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def value(self, objective: str) -> float | None:
        """Return the value of an objective by its name, None without one."""
        figure = self.figures.get(objective)
        return None if figure is None else figure.value

    @property
    def feasible(self) -> bool | None:
        """True if the trial keeps all constraints; None if there are none, or a figure is missing."""
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
        return self._rows.get(number)

    @property
    def distinct(self) -> int:
        """The number of different configurations trained or in training."""
        return sum(row.same_as is None and bool(row.notation) for row in self)

    def put(self, row: TrialRow) -> None:
        """Keep a row and write all of them."""
        self._rows[row.trial] = row
        self.write()

    def drop(self, number: int) -> None:
        """Forget the row of an unstarted trial."""
        del self._rows[number]

    def write(self) -> None:
        """Write `trials.parquet` whole, and rename it into place."""
        write_table(self._table(), self.path)

    def _table(self) -> pa.Table:
        rows = list(self)
        columns: dict[str, pa.Array] = {}
        mixed: dict[str, dict[str, str]] = {}
        for column in COLUMNS:
            values = [self.study if column.name == "study" else getattr(row, column.name) for row in rows]
            columns[column.name] = pa.array(values, column.type)
        for name in dict.fromkeys(name for row in rows for name in row.params):
            drawn = [row.params.get(name) for row in rows]
            kind = _kind(drawn)
            if kind is None:
                drawn, mixed[f"param.{name}"] = [None if v is None else json.dumps(v) for v in drawn], JSON
            columns[f"param.{name}"] = pa.array(drawn, kind or pa.string())
        for name in dict.fromkeys(name for row in rows for name in row.figures):
            columns |= _figure_columns(name, [row.figures.get(name, Figure(None)) for row in rows])
        for name in dict.fromkeys(name for row in rows for name in row.constraints):
            columns[f"constraint.{name}"] = pa.array([row.constraints.get(name) for row in rows], pa.float64())
        columns["feasible"] = pa.array([row.feasible for row in rows], pa.bool_())
        fields = [pa.field(name, array.type, metadata=mixed.get(name)) for name, array in columns.items()]
        return pa.table(list(columns.values()), schema=pa.schema(fields))

    def read(self) -> None:
        """Read the rows in the folder; raises ConfigError if the file is damaged."""
        if not self.path.is_file():
            return
        try:
            table = _checked(read_whole(self.path))
            mixed = [field.name for field in table.schema if (field.metadata or {}).get(b"json")]
            rows = [
                _row(values | {name: parse_json(values[name]) for name in mixed if values[name] is not None})
                for values in table.to_pylist()
            ]
        except (*UNREADABLE, TypeError, OverflowError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(
                f"The rows of the study to resume, {self.path}, cannot be read ({reason}): restore the file from a copy."
            ) from None
        self._rows |= {row.trial: row for row in rows}


def best_trials(rows: Rows, objectives: Sequence[Objective], without: Container[int] = ()) -> list[TrialRow]:
    """Return the finished, feasible trials on the Pareto front of all objectives, sorted by the first objective.

    Trials whose numbers are in `without` are left out.
    """
    finished = [row for row in rows if row.status == "finished" and row.same_as is None and row.trial not in without]
    feasible = [row for row in finished if row.feasible is not False]
    if not feasible:
        return []
    values = [{objective.name: row.value(objective.name) for objective in objectives} for row in feasible]
    directions = {objective.name: objective.direction for objective in objectives}
    best = analysis.frontier(pd.DataFrame(values, dtype="float64"), directions)
    return [feasible[i] for i in best.index]


def _checked(table: pa.Table) -> pa.Table:
    """Return a table with the columns of `COLUMNS` in their types; raises ValueError if one is missing or of another type."""
    for column in COLUMNS:
        if column.name not in table.column_names:
            if column.name in NEEDED:
                raise ValueError(f"it has no column `{column.name}`")
            continue
        values = table[column.name].cast(column.type)
        if column.name in NEEDED and values.null_count:
            raise ValueError(f"`{column.name}` is missing in a row")
        table = table.set_column(table.column_names.index(column.name), column, values)
    return table


def _row(values: Mapping[str, Any]) -> TrialRow:
    groups: dict[str, dict[str, Any]] = {}
    for column, value in values.items():
        kind, dot, name = column.partition(".")
        if dot and value is not None:
            groups.setdefault(kind, {})[name] = value
    fixed = {name: values[name] for name in TrialRow.__dataclass_fields__ if name in values}
    names = dict.fromkeys([*groups.get("objective", {}), *groups.get("reached", {})])
    return TrialRow(
        **fixed,
        params=groups.get("param", {}),
        figures={name: _figure(groups, name) for name in names},
        constraints=groups.get("constraint", {}),
    )


def _figure(groups: Mapping[str, Mapping[str, Any]], name: str) -> Figure:
    *parts, speedup, low, high = (groups.get(part, {}).get(name) for part in FIGURE)
    return Figure._make((*parts, None if speedup is None else (speedup, low, high)))


def _figure_columns(name: str, figures: Sequence[Figure]) -> dict[str, pa.Array]:
    rows = [(*parts, *(speedup or (None, None, None))) for *parts, speedup in figures]
    return {
        f"{part}.{name}": pa.array(values, pa.bool_() if part == "reached" else pa.float64())
        for part, *values in zip(FIGURE, *rows, strict=True)
        if name.startswith(FIGURE[part])
    }


def _kind(values: list[Any]) -> pa.DataType | None:
    kinds = {type(value) for value in values if value is not None}
    types = (({bool}, pa.bool_()), ({int}, pa.int64()), ({int, float}, pa.float64()), ({str}, pa.string()))
    return next((arrow for allowed, arrow in types if kinds <= allowed), None)
