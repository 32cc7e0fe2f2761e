"""Schedules as data: the actions of each worker in order, executed by the engines and timed by the simulator.

An action is one piece of work of one stage on one microbatch and prints as `2F0`: stage 2, forward, microbatch 0.
In every schedule, each stage runs the actions of one op in the order of microbatches, so all schedules give bitwise equal results.

A backward (B) computes the gradients of the input and of the weights. If the schedule also has a W for the microbatch, the backward
is split: B computes the gradient of the input, which the previous stage waits for, and W the gradients of the weights.

Files use the CSV format of torch.distributed.pipelining ("compute_only"): one line per worker, one action per cell. Torch writes
`2B0` for a whole backward, and `2I0` and `2W0` for a split one; raysim reads both `2B0` and `2I0` as B, which is split if there is a
W for the same microbatch. Torch's overlapped pairs, such as `(0F4;3B1)OVERLAP_F_B`, are read as two actions. Empty cells, which
represent bubbles, and empty lines are ignored: an action runs as soon as it can.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from raysim.storage.files import read_text

CELL = re.compile(r"(\d+)([FIBW])(\d+)")
PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


class Action(NamedTuple):
    """A forward (F), backward (B) or weight-gradient backward (W) of one microbatch on one stage.

    >>> print(Action(2, "F", 0), Action.parse("0B13"))
    2F0 0B13
    """

    stage: int
    op: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse an action such as "2F0"; raises ValueError."""
        match = re.fullmatch(r"(\d+)([FBW])(\d+)", text)
        if match is None:
            raise ValueError(f"An action is written as '2F0' (stage, F, B or W, microbatch), but got {text!r}.")
        return cls(int(match[1]), match[2], int(match[3]))


Row = list[Action]  # the actions of one worker, in order


def dependency(action: Action, num_stages: int) -> Action | None:
    """Return the neighbour's action whose packet `action` consumes, or None if it depends only on its own stage.

    >>> print(dependency(Action(1, "B", 0), num_stages=3), dependency(Action(2, "B", 0), num_stages=3))
    2B0 None
    """
    if action.op == "F":
        return action._replace(stage=action.stage - 1) if action.stage > 0 else None
    if action.op == "B":
        return action._replace(stage=action.stage + 1) if action.stage < num_stages - 1 else None
    return None


def sends(action: Action, num_stages: int) -> bool:
    """Return whether `action` sends a packet: the last stage's F, the first stage's B and all W send none."""
    if action.op == "F":
        return action.stage < num_stages - 1
    return action.op == "B" and action.stage > 0


def phase(row: Row, index: int) -> str:
    """Return the phase of an action: "warmup" before the forward preceding the first backward, "cooldown" after the
    last forward, else "steady".

    >>> from raysim.schedules import OneFOneB
    >>> row = OneFOneB().row(1, num_stages=4, num_microbatches=4)
    >>> print(*(f"{action}:{phase(row, index)}" for index, action in enumerate(row)))
    1F0:warmup 1F1:warmup 1F2:steady 1B0:steady 1F3:steady 1B1:cooldown 1B2:cooldown 1B3:cooldown
    """
    ops = [action.op for action in row]
    if index < ops.index("B") - 1:
        return "warmup"
    return "cooldown" if "F" not in ops[index:] else "steady"


def split_backwards(actions: Iterable[Action]) -> set[Action]:
    """Return the split backwards: each B with a W for the same microbatch."""
    return {action._replace(op="B") for action in actions if action.op == "W"}


def peak_in_flight(row: Row) -> int:
    """Return the peak number of microbatches between forward and backward, summed over the row's stages.

    The saved tensors of a microbatch are released by its last backward: W if there is one, else B.
    """
    apart = split_backwards(row)
    held = peak = 0
    for action in row:
        if action.op == "F":
            held += 1
        elif action not in apart:
            held -= 1
        peak = max(peak, held)
    return peak


def topological_order(rows: Sequence[Row], num_stages: int) -> Row:
    """Return all actions in an order consistent with every row and every packet.

    Raises ValueError naming the blocked action and the one it waits for if no such order exists.
    """
    done: set[Action] = set()
    merged: Row = []
    heads = [0] * len(rows)
    total = sum(len(row) for row in rows)
    while len(merged) < total:
        before = len(merged)
        for worker, row in enumerate(rows):
            while heads[worker] < len(row):
                action = row[heads[worker]]
                missing = [need for need in _prerequisites(action, num_stages) if need not in done]
                if missing or action in done:
                    break
                done.add(action)
                merged.append(action)
                heads[worker] += 1
        if len(merged) == before:
            raise ValueError(_blocked(rows, heads, num_stages, done))
    return merged


def _prerequisites(action: Action, num_stages: int) -> list[Action]:
    packet = dependency(action, num_stages)
    before = {"B": "F", "W": "B"}.get(action.op)
    own = [action._replace(op=before)] if before else []
    return own + ([packet] if packet else [])


def _blocked(rows: Sequence[Row], heads: Sequence[int], num_stages: int, done: set[Action]) -> str:
    waits = []
    for row, head in zip(rows, heads, strict=True):
        if head < len(row):
            missing = [str(need) for need in _prerequisites(row[head], num_stages) if need not in done]
            waits.append(f"{row[head]} waits for {' and '.join(missing)}" if missing else f"{row[head]} runs twice")
    return f"The schedule deadlocks: {'; '.join(waits)}."


def check_rows(rows: Sequence[Row]) -> None:
    """Raise ValueError naming the faulty action if `rows` are not a complete schedule without deadlocks.

    Each stage must be on one worker. Every microbatch must have one F, one B and at most one W on every stage, each op in
    the order of microbatches, and so must the actions that produce weight gradients: W and whole backwards.
    """
    actions = [action for row in rows for action in row]
    if not actions:
        raise ValueError("A schedule must have actions, but got none.")
    for worker, row in enumerate(rows):
        if not row:
            raise ValueError(f"Every worker must have actions, but worker {worker} has none.")
    num_stages = 1 + max(action.stage for action in actions)
    num_microbatches = 1 + max(action.microbatch for action in actions)
    seen: set[Action] = set()
    for action in actions:
        if action in seen:
            raise ValueError(f"Every action must be in a schedule once, but got {action} twice.")
        seen.add(action)
    owner: dict[int, int] = {}
    last: dict[tuple[int, str], Action] = {}
    apart = split_backwards(actions)
    for worker, row in enumerate(rows):
        for action in row:
            if owner.setdefault(action.stage, worker) != worker:
                raise ValueError(
                    f"A stage must be on one worker, but got {action} on worker {worker} and stage {action.stage} on "
                    f"worker {owner[action.stage]}."
                )
            weights = action.op == "W" or (action.op == "B" and action not in apart)
            for kind in (action.op, *(["weights"] if weights else [])):
                before = last.get((action.stage, kind), action)
                if action.microbatch < before.microbatch:
                    raise ValueError(f"Microbatches must be in order on every stage, but got {action} after {before}.")
                last[action.stage, kind] = action
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            for op in "FB":
                if Action(stage, op, microbatch) not in seen:
                    raise ValueError(
                        f"Every action must be in a schedule once, but {stage}{op}{microbatch} is missing."
                    )
    topological_order(rows, num_stages)


def rows_to_csv(rows: Sequence[Row]) -> str:
    """Return rows as text for torch's `_load_csv`.

    >>> from raysim.schedules import OneFOneB
    >>> print(rows_to_csv(OneFOneB().rows(num_stages=2, num_microbatches=2)), end="")
    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1
    """
    apart = split_backwards(action for row in rows for action in row)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow(str(action._replace(op="I") if action in apart else action) for action in row)
    return text.getvalue()


def rows_from_csv(text: str) -> list[Row]:
    """Parse rows from CSV text; raises ValueError naming the faulty cell or action."""
    rows: list[Row] = []
    backwards: dict[str, set[Action]] = {"B": set(), "I": set(), "W": set()}
    for line in filter(None, csv.reader(text.splitlines())):
        row = []
        for cell in map(str.strip, line):
            if not cell:
                continue
            pair = PAIR.fullmatch(cell)
            for written in map(str.strip, pair.groups() if pair else [cell]):
                match = CELL.fullmatch(written)
                if match is None:
                    raise ValueError(
                        f"A cell must be a stage, one of F, B, I, W and a microbatch, such as '2F0', but got {written!r}."
                    )
                action = Action(int(match[1]), match[2].replace("I", "B"), int(match[3]))
                if match[2] != "F":
                    backwards[match[2]].add(action._replace(op="B"))
                row.append(action)
        rows.append(row)
    for action in sorted(backwards["B"] & backwards["W"]):
        raise ValueError(f"A whole backward cannot have a W as well, but got {action} and {action._replace(op='W')}.")
    for action in sorted(backwards["I"] - backwards["W"]):
        raise ValueError(f"An input's backward must have a W, but got {action._replace(op='I')} alone.")
    check_rows(rows)
    return rows


def read_csv(path: Path | str) -> list[Row]:
    """Read rows from a CSV file; raises ValueError naming the file."""
    try:
        text = read_text(path)
    except OSError as error:
        raise ValueError(f"The schedule {str(path)!r} cannot be read: {error.strerror}.") from None
    try:
        return rows_from_csv(text)
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{str(error).rstrip('.')} (in {str(path)!r}).") from None
