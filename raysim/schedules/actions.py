"""Schedules as data: the actions of each worker in order, executed by the engines and timed by the simulator.

An action is one piece of work of one stage on one microbatch and prints as `2F0`: stage 2, forward, microbatch 0.
Actions of one op run in the order of microbatches on every stage, in every schedule, so that schedules agree bit for bit.

A backward (B) computes the gradients of the input and of the weights. Where a schedule holds a W of the microbatch, the two are
apart: B computes the gradient of the input, which the stage before awaits, and W the gradients of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Action(NamedTuple):
    """One forward (F), backward (B) or backward for the weights alone (W) of one microbatch on one stage.

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
        """Return the action that `text` writes; raises ValueError."""
        match = re.fullmatch(r"(\d+)([FBW])(\d+)", text)
        if match is None:
            raise ValueError(f"An action is written as '2F0' (stage, F, B or W, microbatch), but got {text!r}.")
        return cls(int(match[1]), match[2], int(match[3]))


Row = list[Action]  # the actions of one worker, in order


def dependency(action: Action, num_stages: int) -> Action | None:
    """Return the neighbour's action whose packet `action` consumes, or None if it depends on its own stage alone.

    >>> print(dependency(Action(1, "B", 0), num_stages=3), dependency(Action(2, "B", 0), num_stages=3))
    2B0 None
    """
    if action.op == "F":
        return action._replace(stage=action.stage - 1) if action.stage > 0 else None
    if action.op == "B":
        return action._replace(stage=action.stage + 1) if action.stage < num_stages - 1 else None
    return None


def sends(action: Action, num_stages: int) -> bool:
    """Return whether a packet leaves `action`: the last forward, the first backward and weights' backwards send none."""
    if action.op == "F":
        return action.stage < num_stages - 1
    return action.op == "B" and action.stage > 0


def phase(row: Row, index: int) -> str:
    """Return "warmup" before the forward that the first backward follows, "cooldown" after the last forward, else
    "steady".

    >>> from raysim.schedules import OneFOneB
    >>> row = OneFOneB().row(1, num_stages=4, num_microbatches=4)
    >>> print(*(f"{action}:{phase(row, index)}" for index, action in enumerate(row)))
    1F0:warmup 1F1:warmup 1F2:steady 1B0:steady 1F3:steady 1B1:cooldown 1B2:cooldown 1B3:cooldown
    """
    ops = [action.op for action in row]
    if index < ops.index("B") - 1:
        return "warmup"
    return "cooldown" if "F" not in ops[index:] else "steady"


def peak_in_flight(row: Row) -> int:
    """Return the most microbatches that have gone forward and not yet backward, summed over the row's stages.

    The microbatch's last backward, W where there is one, releases the tensors that its forward saved.
    """
    apart = {(action.stage, action.microbatch) for action in row if action.op == "W"}
    held = peak = 0
    for action in row:
        if action.op == "F":
            held += 1
        elif action.op == "W" or (action.stage, action.microbatch) not in apart:
            held -= 1
        peak = max(peak, held)
    return peak


def topological_order(rows: Sequence[Row], num_stages: int) -> Row:
    """Return all actions in one order that respects every row and every packet.

    Raises ValueError if no such order exists, with the action that blocks and the action that it waits for.
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
    """Raise ValueError with the action at fault unless `rows` are a whole schedule that runs to its end.

    Each stage is on one worker; every microbatch goes forward and backward on every stage once, each op in the order of
    microbatches, and so do the actions that give gradients of weights, W and whole backwards; W is there once or not at
    all; and nothing deadlocks.
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
    apart = {action._replace(op="B") for action in actions if action.op == "W"}
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
                    raise ValueError(f"Every action must be in a schedule once, but {stage}{op}{microbatch} is not.")
    topological_order(rows, num_stages)
