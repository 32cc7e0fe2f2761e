"""Records as a stranger may have written them: every column of every table of a run, with values of other types and sizes."""

import math
import shutil

import pyarrow as pa
import pyarrow.parquet as pq

TABLES = ("run", "steps", "evals", "links", "actions", "collectives", "decisions")

VALUES = {
    "text": "many",
    "null": None,
    "negative": -1,
    "huge": 2**62,
    "real": 1e300,
    "infinite": math.inf,
    "control": "\x1b]0;owned\x07\x1b[2J[/bold]",
    "class": "evil:W",
    "call": "evil:S(1)",
    "long": "x" * 100_000,
    "deep": "(" * 10_000,
}
GONE = "gone"
OF_ONE_ROW = ("null", "negative", "huge", "infinite")

EVIL = """
from pathlib import Path
(Path(__file__).parent / "marker").touch()
def S(*given, **named): (Path(__file__).parent / "marker").touch()
W = S
"""


def mutations(run):
    """Yield the name of a table, of a column, and of a change to it, for every table of a run."""
    for table in TABLES:
        file = run / f"{table}.parquet"
        for column in pq.read_schema(file).names if file.exists() else ():
            yield from ((table, column, change) for change in (*VALUES, GONE))
            if table != "run":
                yield from ((table, column, f"{change} in one row") for change in OF_ONE_ROW)


def mutated(run, target, table, column, change):
    """Copy a run with one column changed, in all rows or in the last one."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("checkpoints", ".lock"))
    rows = pq.read_table(target / f"{table}.parquet")
    place = rows.column_names.index(column)
    if change == GONE:
        rows = rows.remove_column(place)
    elif change.endswith(" in one row"):
        values = [*rows[column].to_pylist()[:-1], VALUES[change.removesuffix(" in one row")]]
        try:
            rows = rows.set_column(place, column, pa.array(values))
        except (pa.ArrowException, OverflowError):  # texts beside a number
            rows = rows.set_column(place, column, pa.array([None if v is None else str(v) for v in values]))
    else:
        rows = rows.set_column(place, column, pa.array([VALUES[change]] * len(rows)))
    pq.write_table(rows, target / f"{table}.parquet")
