"""Types and bounds of recorded values; values out of bounds are rejected with the column's name."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raysim.config.identity import identity
from raysim.config.keys import run_keys
from raysim.notation import CONTROL, REPLACED, check_size, cut_middle, printable, shown
from raysim.records.schema import FINISHED, OWN_COLUMNS
from raysim.storage.texts import parse_toml

NEEDED = ("schema_version", "seed", "status")
"""Required columns: a `run.parquet` without them was not written by raysim."""
_OF_PROBES = (
    *("num_stages", "num_replicas", "forward", "backward", "replica_gradient", "steps_done", "probe_every"),
    "probe_overhead",
)
ADDED = ("run", "study", "trial", "compression_factor")
"""Columns that `analysis.load` adds to those of `run.parquet`."""

LARGEST_INTEGER = 2**53  # exact in a float
LONGEST_S = 1e9  # 32 years
LONGEST_TEXT = 1_000_000  # characters of a value, except the rows of a schedule
ROWS_EACH = 1000  # of a table for a step, stage, microbatch and pair of replicas, such as one for each layer
LARGEST_COUNT = 2**15  # stages, microbatches, replicas: beyond the tables' types

_KINDS = {key.name: key.kind for key in run_keys()}
SEEDS = ("seed", "model_seed")
_COUNTS = ("num_stages", "num_microbatches", "num_replicas")
_NOTATIONS = ("forward", "backward", "replica_gradient", "schedule", "weights")


def check_row(table: pa.Table) -> None:
    """Check the row of a `run.parquet`; raises ArrowInvalid with a column that raysim would not have written."""
    names = table.column_names
    twice = [name for name, count in Counter(names).items() if count > 1]
    added = [name for name in ADDED if name in names]
    strange = [name for name in names if printable(name) != name or len(name) > LONGEST_TEXT]
    for wrong, why in ((twice, "is there twice"), (added, "is added by `analysis.load`"), (strange, "is not a name")):
        if wrong:
            raise pa.ArrowInvalid(f"its column {shown(wrong[0])} {why}")
    unknown = [field.name for field in table.schema if not _is_written(field.type)]
    if unknown:
        raise pa.ArrowInvalid(f"its column {shown(unknown[0])} is of type {table.schema.field(unknown[0]).type}")
    row = table.to_pylist()[0]
    for name, value in row.items():
        kind = _kind(name)
        if value is None:
            if name in NEEDED:
                raise pa.ArrowInvalid(f"its `{name}` has no value")
        elif kind is not None and not _is_of(kind, value):
            raise pa.ArrowInvalid(f"its `{name}` must be {_WORDS[kind]}, but is {shown(value)}")
        elif name != "schedule_rows" and len(str(value)) > LONGEST_TEXT:
            raise pa.ArrowInvalid(f"its `{name}` has more than {LONGEST_TEXT:,} characters")
        elif not _within(name, kind, value):
            raise pa.ArrowInvalid(f"its `{name}` is out of bounds: {shown(value)}")
        elif isinstance(value, list | dict) and any(printable(text) != text for text in _texts(value)):
            raise pa.ArrowInvalid(f"its `{name}` holds control characters")
    if row.get("probe") and (missing := [name for name in _OF_PROBES if row.get(name) is None]):
        raise pa.ArrowInvalid(f"it is of a probe, but its `{missing[0]}` has no value")
    for name in _NOTATIONS:
        for notation in _each(row.get(name)):
            try:
                check_size(notation)
            except ValueError as error:
                raise pa.ArrowInvalid(f"its `{name}` cannot be read: {str(error).rstrip('.')}") from None


def fitted(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `run.parquet` as its reader accepts it: long texts are shortened, invalid characters replaced."""
    return {name: _fit(name, value) for name, value in row.items()}


def _fit(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [printable(_fit(name, each)) if isinstance(each, str) else _fit(name, each) for each in value]
    if not isinstance(value, str):
        return value
    text = value.encode("utf-8", "replace").decode()  # half of a surrogate pair, as in the names of odd files
    return text if name == "schedule_rows" else cut_middle(text, LONGEST_TEXT)


def most_rows(table: str, row: Mapping[Any, Any]) -> int | None:
    """Return a bound on the rows of a table of an ended run, by its row of `run.parquet`; None without one."""
    steps = row.get("steps_done")
    if row.get("status") not in FINISHED or not isinstance(steps, int):
        return None
    if table == "steps":
        return steps
    stages, microbatches, replicas = (int(row.get(name) or 1) for name in _COUNTS)
    return (steps + 2) * stages * microbatches * replicas * replicas * ROWS_EACH


def check_values(rows: pa.Table | pa.RecordBatch) -> None:
    """Check a table's values by type and unit; raises ArrowInvalid with the column out of bounds."""
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if not (pa.types.is_integer(field.type) or pa.types.is_floating(field.type)):
            continue
        if field.name == "step" and column.null_count:
            raise pa.ArrowInvalid("it has rows without a step")
        ends = pc.min_max(column).as_py()
        for value in (ends["min"], ends["max"]):
            if value is not None and not _is_bounded(field.name, value):
                raise pa.ArrowInvalid(f"its `{field.name}` is out of bounds: {value!r}")


def printable_rows(rows: Any) -> Any:
    """Replace control characters in the texts of a table or batch, for display."""
    columns, schema = list(rows.columns), rows.schema
    for i, field in enumerate(rows.schema):
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        if field.name != "schedule_rows" and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            columns[i] = pc.replace_substring_regex(columns[i].cast(pa.string()), CONTROL, REPLACED)
            schema = schema.set(i, pa.field(field.name, pa.string()))
    return type(rows).from_arrays(columns, schema=schema)


def identified(rows: pa.Table) -> pa.Table:
    """Return the row of a `run.parquet` with its job and its setting, which earlier versions did not write."""
    lacking = [name for name in ("job", "setting") if name not in rows.column_names or rows[name].null_count]
    known = identity(rows.to_pylist()[0]) if lacking else {}
    for name in lacking:
        kept = rows.drop_columns([name]) if name in rows.column_names else rows
        rows = kept.append_column(name, pa.array([known[name]]))
    return rows


@cache
def _is_written(kind: pa.DataType) -> bool:
    """Return whether raysim writes values of a type: booleans, numbers, strings, and lists and tables of them."""
    types = pa.types
    if types.is_list(kind):
        return _is_written(kind.value_type)
    if types.is_struct(kind):
        return all(_is_written(field.type) for field in kind)
    if types.is_dictionary(kind):
        return bool(types.is_string(kind.value_type))
    simple = ("null", "boolean", "integer", "floating", "string", "large_string")
    return any(getattr(types, f"is_{name}")(kind) for name in simple)


def _kind(name: str) -> str | None:
    """Return the kind of a column of `run.parquet`; None if it may hold anything."""
    measured = "float" if name.startswith(("final_", "chance_")) else None
    return _KINDS.get(name) or OWN_COLUMNS.get(name) or measured


_WORDS = {"int": "an integer", "float": "a number", "str": "a text", "bool": "true or false"} | {
    f"list[{kind}]": "a list" for kind in ("int", "float", "str")
}


def _is_of(kind: str, value: object) -> bool:
    if kind.startswith("list"):
        inner = kind[5:-1]
        return isinstance(value, list) and all(_is_of(inner, each) for each in value)
    if kind in ("int", "float"):
        return isinstance(value, int if kind == "int" else int | float) and not isinstance(value, bool)
    return isinstance(value, str if kind == "str" else bool)


def _within(name: str, kind: str | None, value: Any) -> bool:
    """Return whether a value of `run.parquet` is within the bounds of its column."""
    if kind == "int":
        if name in SEEDS:
            return bool(0 <= value < 2**63)
        return bool(0 <= value <= (LARGEST_COUNT if name in _COUNTS else LARGEST_INTEGER))
    return kind != "float" or _is_bounded(name, value)


def _is_bounded(name: str, value: float) -> bool:
    if isinstance(value, int):
        return 0 <= value <= LARGEST_INTEGER
    seconds = name == "seconds" or name.endswith("_s")
    return not seconds or (math.isfinite(value) and abs(value) <= LONGEST_S)


def _texts(value: object) -> Iterator[str]:
    """Yield the texts in a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for inner in (*value, *value.values()) if isinstance(value, dict) else value:
            yield from _texts(inner)


def _each(written: object) -> list[str]:
    """Return the notations of a key: several if boundaries differ."""
    if not isinstance(written, str):
        return []
    if not written.startswith(("[", "{")):
        return [written]
    try:
        return list(_texts(list(parse_toml(f"value = {written}").values())))
    except ValueError:
        return [written]
