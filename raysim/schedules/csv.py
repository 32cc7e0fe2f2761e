"""Schedules in the CSV format of torch.distributed.pipelining ("compute_only"): one line a worker, one action a cell.

Torch writes `2B0` for a whole backward, and `2I0` and `2W0` for a backward in two parts, of the input and of the weights. raysim
writes both `2B0` and `2I0` as B; a W of the same microbatch tells them apart. Torch's overlapped pairs, such as
`(0F4;3B1)OVERLAP_F_B`, are read as two actions. Empty cells, which stand for bubbles, and empty lines are ignored: an action runs as
soon as it can.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from raysim.schedules.actions import Action, Row, check_rows
from raysim.storage.files import read_text

CELL = re.compile(r"(\d+)([FIBW])(\d+)")
PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


def rows_to_csv(rows: Sequence[Row]) -> str:
    """Return rows as text that torch's `_load_csv` reads.

    >>> from raysim.schedules import OneFOneB
    >>> print(rows_to_csv(OneFOneB().rows(num_stages=2, num_microbatches=2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    apart = {(action.stage, action.microbatch) for row in rows for action in row if action.op == "W"}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        split = [action.op == "B" and (action.stage, action.microbatch) in apart for action in row]
        writer.writerow(str(action._replace(op="I") if i else action) for action, i in zip(row, split, strict=True))
    return text.getvalue()


def rows_from_csv(text: str) -> list[Row]:
    """Return the rows that `text` writes; raises ValueError with the cell or the action at fault."""
    rows: list[Row] = []
    joint: set[Action] = set()
    inputs: set[Action] = set()
    for line in csv.reader(text.splitlines()):
        if not line:
            continue
        row = []
        for text_of_action in _actions(line):
            match = CELL.fullmatch(text_of_action)
            if match is None:
                raise ValueError(
                    f"A cell must be a stage, one of F, B, I, W and a microbatch, such as '2F0', but got {text_of_action!r}."
                )
            stage, op, microbatch = int(match[1]), match[2], int(match[3])
            action = Action(stage, "B" if op == "I" else op, microbatch)
            if op in "BI":
                (joint if op == "B" else inputs).add(action)
            row.append(action)
        rows.append(row)
    weights = {action._replace(op="B") for row in rows for action in row if action.op == "W"}
    for action in sorted(joint & weights):
        raise ValueError(f"A whole backward must have no W beside it, but got {action} and {action._replace(op='W')}.")
    for action in sorted(inputs - weights):
        raise ValueError(f"An input's backward must have a W, but got {action._replace(op='I')} alone.")
    check_rows(rows)
    return rows


def _actions(line: Sequence[str]) -> Iterator[str]:
    """Yield the text of each action of a line."""
    for cell in map(str.strip, line):
        pair = PAIR.fullmatch(cell)
        if pair is not None:
            yield from map(str.strip, pair.groups())
        elif cell:
            yield cell


def read_csv(path: Path | str) -> list[Row]:
    """Return the rows in a file; raises ValueError naming the file."""
    try:
        text = read_text(path)
    except OSError as error:
        raise ValueError(f"The schedule {str(path)!r} must be readable, but: {error.strerror}.") from None
    try:
        return rows_from_csv(text)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{str(error).rstrip('.')} (in {str(path)!r}).") from None
