"""Commands that reproduce the runs: a recipe of the settings that all share, a command for each, and versions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from raysim.analysis.report.blocks import Block, Cell, Column, Heading, Section, Table, Text
from raysim.analysis.report.material import Job, Material

ENVIRONMENT = ("raysim", "torch", "ray", "numpy", "python", "host", "cpu", "cpu_capability", "engine")
TABLES = ("model", "data")  # keys whose options stand with them in one table


def section(material: Material) -> Section:
    """Return the settings and versions of every job."""
    if not material.jobs:
        return Section("reproduce", "Settings and versions", absent="No run here is finished.")
    return Section(
        "reproduce", "Settings and versions", [block for job in material.jobs for block in _blocks(job, material)]
    )


def _blocks(job: Job, material: Material) -> Iterator[Block]:
    runs = job.runs
    given = [key for key in material.results.keys if key in runs and runs[key].map(_written).any()]
    given = [key for key in given if key != "num_stages" or "cuts" not in given]  # the cuts say how many there are
    varied = [key for key in given if runs[key].map(_written).nunique() > 1]
    shared = [key for key in given if key not in varied]
    for table in TABLES:  # a recipe cannot have half of one
        if any(key.startswith(f"{table}.") for key in varied):
            shared = [key for key in shared if key != table and not key.startswith(f"{table}.")]
            varied = [key for key in given if key not in shared]
    yield Heading(job.title)
    yield Text(f"The settings that all {len(runs)} runs share, as a recipe: `{job.key}.toml`.")
    yield Text(recipe(runs.iloc[0].to_dict(), shared), "code")
    yield Text("The settings named in the figures, the first seed of each:")
    commands = []
    for setting in job.named:
        row = runs[runs["run"] == setting.runs[0]].iloc[0].to_dict()
        words = [f"{key}={_plain(row[key])}" for key in varied if _written(row[key])]
        commands.append(shlex.join(["raysim", "train", f"{job.key}.toml", *words, "--engine", str(row["engine"])]))
    yield Text("\n".join(commands), "code")
    yield Table(
        f"{job.key}-versions",
        f"{job.title}: software and hardware of the runs",
        (Column("what"), Column("version")),
        [[Cell(name), Cell(_counted(runs[name]))] for name in ENVIRONMENT if name in runs],
    )


def recipe(row: dict[Any, Any], keys: Sequence[str]) -> str:
    """Return the keys of a run in TOML.

    >>> row = {"model": "gpt", "model.width": 64, "steps": 10, "forward": '{1 = "TopK(0.1)"}', "optimizer.name": "adamw"}
    >>> print(recipe(row, list(row)))
    model = { name = "gpt", width = 64 }
    steps = 10
    forward = {1 = "TopK(0.1)"}
    optimizer.name = "adamw"
    """
    lines = []
    for key in keys:
        table, _, option = key.partition(".")
        if table in TABLES and option:
            continue
        options = [other for other in keys if table in TABLES and other.startswith(f"{table}.")]
        if options:
            inner = ", ".join(f"{other.partition('.')[2]} = {_written(row[other])}" for other in options)
            lines.append(f"{key} = {{ name = {_written(row[key])}, {inner} }}")
        else:
            lines.append(f"{key} = {_written(row[key])}")
    return "\n".join(lines)


def _written(value: Any) -> str:
    """Return a value in TOML, which is JSON's for all that a run has; nothing where it was not given.

    Lists by boundary and tables by replica are recorded as text that is TOML already.
    """
    if value is None or repr(value) in ("<NA>", "nan"):
        return ""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, str) and value.startswith(("[", "{")):
        return value
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    """Return a value for the command line, where a text needs no quotes."""
    return value if isinstance(value, str) else _written(value)


def _counted(values: pd.Series[Any]) -> str:
    counts = values.map(lambda value: _plain(value) or "unknown").value_counts()
    if len(counts) == 1:
        return str(counts.index[0])
    return ", ".join(f"{value} ({count} runs)" for value, count in counts.items())
