"""Schedules as data: which worker runs which action in which order. Written once, executed by engines and simulated alike.

An action is one piece of work of one stage on one microbatch and prints as `2F0`: stage 2, forward, microbatch 0. Backwards of
a stage run in the order of microbatches in every schedule, so that schedules agree bit for bit.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import ClassVar, NamedTuple

from raysim.notation import Notation, check_integer, parse


class Action(NamedTuple):
    """One forward (F) or backward (B) of one microbatch on one stage.

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
        match = re.fullmatch(r"(\d+)([FB])(\d+)", text)
        if match is None:
            raise ValueError(f"An action is written as '2F0' (stage, F or B, microbatch), but got {text!r}.")
        return cls(int(match[1]), match[2], int(match[3]))


Row = list[Action]  # what one worker runs, in order


class Schedule(Notation, ABC):
    """A family of rows for any number of stages and microbatches: a frozen dataclass, written by its `repr`."""

    @abstractmethod
    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        """Return the letters of one stage's row; the n-th of a letter works on microbatch n."""

    def row(self, stage: int, num_stages: int, num_microbatches: int) -> Row:
        """Return the actions of one stage in order."""
        counts = {op: count() for op in "FB"}
        letters = self.ops(stage, num_stages, num_microbatches)
        return [Action(stage, op, next(counts[op])) for op in letters]

    def rows(self, num_stages: int, num_microbatches: int) -> list[Row]:
        """Return one row a worker."""
        return [self.row(stage, num_stages, num_microbatches) for stage in range(num_stages)]

    def workers(self, num_stages: int) -> list[int]:
        """Return the worker that owns each stage."""
        return list(range(num_stages))


@dataclass(frozen=True, repr=False)
class GPipe(Schedule):
    """All forwards, then all backwards (Huang et al. 2019, 1811.06965).

    >>> print(*GPipe().row(0, num_stages=2, num_microbatches=2))
    0F0 0F1 0B0 0B1
    """

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        return "F" * num_microbatches + "B" * num_microbatches


@dataclass(frozen=True, repr=False)
class OneFOneB(Schedule):
    """One forward, one backward, after a warm-up of forwards (PipeDream-flush; Narayanan et al. 2021, 2104.04473).

    `extra_warmup` adds forwards to the warm-up of every stage: more microbatches in flight, which hides the wire.

    >>> print(*OneFOneB().row(0, num_stages=2, num_microbatches=3))
    0F0 0F1 0B0 0F2 0B1 0B2
    """

    notation: ClassVar[str] = "1F1B"

    extra_warmup: int = 0

    def __post_init__(self) -> None:
        self._coerce(extra_warmup=check_integer("extra_warmup", self.extra_warmup, 0))

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        warmup = min(num_stages - 1 - stage + self.extra_warmup, num_microbatches)
        return "F" * warmup + "FB" * (num_microbatches - warmup) + "B" * warmup


SCHEDULES: dict[str, type[Schedule]] = {cls.name(): cls for cls in (GPipe, OneFOneB)}


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that `text` writes: the inverse of `repr`. Raises ValueError, with the known names.

    >>> parse_schedule("1F1B(extra_warmup=2)")
    1F1B(extra_warmup=2)
    """
    return parse(text, SCHEDULES, kind="schedule")


def needs(action: Action, num_stages: int) -> Action | None:
    """Return the neighbour's action whose packet `action` consumes, or None where all it takes is its own stage's.

    >>> print(needs(Action(1, "B", 0), num_stages=3), needs(Action(2, "B", 0), num_stages=3))
    2B0 None
    """
    if action.op == "F":
        return action._replace(stage=action.stage - 1) if action.stage > 0 else None
    return action._replace(stage=action.stage + 1) if action.stage < num_stages - 1 else None


def sends(action: Action, num_stages: int) -> bool:
    """Return whether a packet leaves `action`: the last forward and the first backward send none."""
    return action.stage < num_stages - 1 if action.op == "F" else action.stage > 0


def sinks(row: Row) -> list[Action]:
    """Return the actions of a row that end every chain of packets: the backwards of the first stage."""
    return [action for action in row if action.op == "B" and action.stage == 0]


def phase(row: Row, index: int) -> str:
    """Return "warmup" before the forward that the first backward follows, "cooldown" after the last forward, else "steady".

    >>> row = OneFOneB().row(1, num_stages=4, num_microbatches=4)
    >>> print(*(f"{action}:{phase(row, index)}" for index, action in enumerate(row)))
    1F0:warmup 1F1:warmup 1F2:steady 1B0:steady 1F3:steady 1B1:cooldown 1B2:cooldown 1B3:cooldown
    """
    ops = [action.op for action in row]
    if index < ops.index("B") - 1:
        return "warmup"
    return "cooldown" if "F" not in ops[index:] else "steady"


def peak_in_flight(row: Row) -> int:
    """Return how many microbatches have gone forward and not yet backward, at most, summed over the row's stages."""
    held = peak = 0
    for action in row:
        held += 1 if action.op == "F" else -1
        peak = max(peak, held)
    return peak


def order(rows: Sequence[Row], num_stages: int) -> Row:
    """Return all actions in one order that respects every row and every packet.

    Raises ValueError with the action that blocks, and what it waits for, where no such order exists.
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
    packet = needs(action, num_stages)
    own = [action._replace(op="F")] if action.op == "B" else []
    return own + ([packet] if packet else [])


def _blocked(rows: Sequence[Row], heads: Sequence[int], num_stages: int, done: set[Action]) -> str:
    waits = []
    for row, head in zip(rows, heads, strict=True):
        if head < len(row):
            missing = [str(need) for need in _prerequisites(row[head], num_stages) if need not in done]
            waits.append(f"{row[head]} waits for {' and '.join(missing)}" if missing else f"{row[head]} runs twice")
    return f"The schedule deadlocks: {'; '.join(waits)}."


def calls(row: Row, num_stages: int) -> list[Row]:
    """Return the row cut into calls: actions are joined where the first sends nothing and the next awaits no packet.

    Nobody waits longer for a joined call, and a call takes and makes at most one packet.

    >>> for call in calls(OneFOneB().row(1, num_stages=2, num_microbatches=2), num_stages=2): print(*call)
    1F0 1B0
    1F1 1B1
    """
    joined: list[Row] = []
    for action in row:
        if joined and not sends(joined[-1][-1], num_stages) and needs(action, num_stages) is None:
            joined[-1].append(action)
        else:
            joined.append([action])
    return joined
