"""Records as a stranger may have written them: every column of every table of a run, with values of other types and sizes."""

import math
import shutil
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from configurations import SMALL

from raysim.config import make_config
from raysim.training.train import train

TABLES = ("run", "steps", "evals", "links", "actions", "collectives", "decisions")

SIGNS = "\x1b]0;owned\x07\x1b[2J[/bold]\u202e"

VALUES = {
    "text": "many",
    "null": None,
    "negative": -1,
    "huge": 2**62,
    "real": 1e300,
    "infinite": math.inf,
    "signs": SIGNS,
    "class": "evil:W",
    "call": "evil:S(1)",
    "long": "x" * 100_000,
    "deep": "(" * 10_000,
}
GONE = "gone"
OF_ONE_ROW = ("null", "negative", "huge", "infinite")

EVIL = """
from pathlib import Path
def S(*given, **named):
    Path(__file__).with_name("marker").touch()
W = S
S()
"""
"""A module whose import, and whose functions, leave a file `marker` beside it."""


def train_runs(folder):
    """Train two settings with two seeds, which are compared, and a run whose replicas decide: it has all tables."""
    shared = {"steps": 8, "evaluate_every_steps": 4, "profile_every_steps": 1, "checkpoint_every_steps": 0}
    topk = {"forward": "TopK(0.1)", "backward": "TopK(0.1)"}
    replicas = {"num_replicas": 2, "replica_gradient": "GraVAC(2, 8, window=2)"}
    runs: dict[str, Any] = {
        f"{name}-s{s}": {**changes, "seed": s} for name, changes in (("dense", {}), ("topk", topk)) for s in (0, 1)
    }
    for name, changes in {**runs, "replicas": replicas}.items():
        train(make_config({**SMALL, **shared, **changes}), engine="inline", out=folder / name)
    return folder


def copy_run(run, target):
    """Copy the records of a run, without its checkpoints."""
    return shutil.copytree(run, target, ignore=shutil.ignore_patterns("checkpoints"))


def mutations(run):
    """Return the name of a table, of a column, and of a change to it, for every table of a run."""
    found = []
    for table in TABLES:
        file = run / f"{table}.parquet"
        changes = [*VALUES, GONE, *(f"{change} in one row" for change in OF_ONE_ROW if table != "run")]
        for column in pq.read_schema(file).names if file.exists() else ():
            found += [(table, column, change) for change in changes]
    return found


def mutate(folder, table, column, change):
    """Change a column of a run, in all rows or in the last one."""
    file = folder / f"{table}.parquet"
    rows = pq.read_table(file)
    place = rows.column_names.index(column) if column in rows.column_names else rows.num_columns
    if change == GONE:
        pq.write_table(rows.remove_column(place), file)
        return
    values = [VALUES.get(change, change)] * len(rows)
    if change.endswith(" in one row"):
        values = [*rows[column].to_pylist()[:-1], VALUES[change.removesuffix(" in one row")]]
    try:
        made = pa.array(values)
    except (pa.ArrowException, OverflowError):  # texts beside a number
        made = pa.array([None if value is None else str(value) for value in values])
    known = place < rows.num_columns
    pq.write_table(rows.set_column(place, column, made) if known else rows.append_column(column, made), file)
