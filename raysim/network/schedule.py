"""Schedules as data: which worker runs which action in which order. Written once, executed by engines and simulated
alike.

An action is one piece of work of one stage on one microbatch and prints as `2F0`: stage 2, forward, microbatch 0.
Actions of one op run in the order of microbatches on every stage, in every schedule, so that schedules agree bit for bit.

A backward (B) gives the gradient of the input and those of the weights. Where a schedule holds the microbatch's W, these are
apart: B gives the gradient of the input, which the stage before awaits, and W, which nobody awaits, those of the weights.
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


Row = list[Action]  # what one worker runs, in order


class Schedule(Notation, ABC):
    """A family of rows for any number of stages and microbatches: a frozen dataclass, written by its `repr`."""

    @abstractmethod
    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        """Return the letters of one stage's actions in order; the n-th of a letter works on microbatch n."""

    def row(self, stage: int, num_stages: int, num_microbatches: int) -> Row:
        """Return the actions of one stage in order."""
        counts = {op: count() for op in "FBW"}
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

    More microbatches in flight hide the wire, and are paid for in memory. `ahead` is how many forwards each stage runs ahead
    of the next before its first backward: 2 covers a hop and back that take as long as a microbatch's compute, 3 twice that.
    `extra_warmup` adds forwards to the warm-up of every stage alike, so it covers bursts but not the hop.

    >>> print(*OneFOneB().row(0, num_stages=2, num_microbatches=3))
    0F0 0F1 0B0 0F2 0B1 0B2
    """

    notation: ClassVar[str] = "1F1B"

    extra_warmup: int = 0
    ahead: int = 1

    def __post_init__(self) -> None:
        self._coerce(
            extra_warmup=check_integer("extra_warmup", self.extra_warmup, 0),
            ahead=check_integer("ahead", self.ahead, 1),
        )

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        warmup = min((num_stages - 1 - stage) * self.ahead + self.extra_warmup, num_microbatches)
        return "F" * warmup + "FB" * (num_microbatches - warmup) + "B" * warmup


@dataclass(frozen=True, repr=False)
class Interleaved1F1B(Schedule):
    """1F1B with several stages a worker: worker w of p owns stages w, w + p, w + 2p, ... (Narayanan et al. 2021, 2104.04473).

    The bubble is as many times smaller as a worker has stages, and the packets are as many times more.

    >>> print(*Interleaved1F1B(2).rows(num_stages=4, num_microbatches=2)[1])
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """

    stages_per_worker: int

    def __post_init__(self) -> None:
        self._coerce(stages_per_worker=check_integer("stages_per_worker", self.stages_per_worker, 1))

    def workers(self, num_stages: int) -> list[int]:
        if num_stages % self.stages_per_worker:
            raise ValueError(
                f"`num_stages` must be a multiple of `stages_per_worker` ({self.stages_per_worker}), but got {num_stages}."
            )
        num_workers = num_stages // self.stages_per_worker
        return [stage % num_workers for stage in range(num_stages)]

    def rows(self, num_stages: int, num_microbatches: int) -> list[Row]:
        num_workers = max(self.workers(num_stages)) + 1
        if num_microbatches % num_workers:
            raise ValueError(
                f"`num_microbatches` must be a multiple of the number of workers ({num_workers}) for {self!r}, "
                f"but got {num_microbatches}."
            )
        return [self._row(worker, num_workers, num_microbatches) for worker in range(num_workers)]

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        row = self.rows(num_stages, num_microbatches)[self.workers(num_stages)[stage]]
        return "".join(action.op for action in row if action.stage == stage)

    def _row(self, worker: int, num_workers: int, num_microbatches: int) -> Row:
        """Return a worker's row: as many microbatches as there are workers go through one stage, then through the next."""
        total = num_microbatches * self.stages_per_worker
        warmup = min(2 * (num_workers - 1 - worker) + (self.stages_per_worker - 1) * num_workers, total)

        def nth(op: str, n: int) -> Action:
            turn, place = divmod(n, num_workers * self.stages_per_worker)
            chunk, microbatch = divmod(place, num_workers)
            if op == "B":
                chunk = self.stages_per_worker - 1 - chunk
            return Action(chunk * num_workers + worker, op, turn * num_workers + microbatch)

        row = [nth("F", n) for n in range(warmup)]
        for n in range(total):
            if warmup + n < total:
                row.append(nth("F", warmup + n))
            row.append(nth("B", n))
        return row


@dataclass(frozen=True, repr=False)
class ZBH1(Schedule):
    """1F1B whose weight gradients wait, and fill what would be bubble (Qi et al. 2023, 2401.10241).

    Stage s puts off each W until s backwards later: so every stage holds as many microbatches as the first of 1F1B does, and the
    bubble is p - 1 times forward + B - W.

    >>> print(*ZBH1().row(1, num_stages=2, num_microbatches=3))
    1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2
    """

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        warmup, delay = min(num_stages - 1 - stage, num_microbatches), min(stage, num_microbatches)
        letters = "F" * warmup
        for m in range(num_microbatches):
            letters += ("F" if warmup + m < num_microbatches else "") + "B" + ("W" if m >= delay else "")
        return letters + "W" * delay


@dataclass(frozen=True, repr=False)
class Custom(Schedule):
    """The rows of a file in the CSV format of torch's pipelines, which fix the numbers of stages and microbatches.

    The file is read once, when the schedule is made.
    """

    _rows: ClassVar[list[Row]]  # of each object, but no field: the notation has the path alone

    path: str

    def __post_init__(self) -> None:
        from raysim.network.torch_csv import read_csv  # which reads actions, and so imports this file

        object.__setattr__(self, "_rows", read_csv(self.path))

    @classmethod
    def of_rows(cls, path: str, rows: list[Row]) -> Custom:
        """Return the schedule as it was recorded, whatever the file holds now."""
        schedule = object.__new__(cls)
        object.__setattr__(schedule, "path", path)
        object.__setattr__(schedule, "_rows", rows)
        return schedule

    def rows(self, num_stages: int, num_microbatches: int) -> list[Row]:
        rows = self._rows
        size = {"num_stages": num_stages, "num_microbatches": num_microbatches}
        fixed = {
            "num_stages": 1 + max(action.stage for row in rows for action in row),
            "num_microbatches": 1 + max(action.microbatch for row in rows for action in row),
        }
        for name, value in fixed.items():
            if size[name] != value:
                raise ValueError(f"`{name}` must be that of {self.path!r} ({value}), but got {size[name]}.")
        return rows

    def workers(self, num_stages: int) -> list[int]:
        owner = {action.stage: worker for worker, row in enumerate(self._rows) for action in row}
        return [owner[stage] for stage in sorted(owner)]

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        rows = self.rows(num_stages, num_microbatches)
        return "".join(action.op for row in rows for action in row if action.stage == stage)


SCHEDULES: dict[str, type[Schedule]] = {cls.name(): cls for cls in (GPipe, OneFOneB, Interleaved1F1B, ZBH1, Custom)}
"""All there are, executed by engines and simulated alike."""


def parse_schedule(text: str) -> Schedule:
    """Return the schedule that `text` writes: the inverse of `repr`. Raises ValueError, with the known names.

    >>> parse_schedule("1F1B(extra_warmup=2)"), parse_schedule("Interleaved1F1B(2)")
    (1F1B(extra_warmup=2), Interleaved1F1B(2))
    """
    return parse(text, SCHEDULES, kind="schedule")


def needs(action: Action, num_stages: int) -> Action | None:
    """Return the neighbour's action whose packet `action` consumes, or None where all it takes is its own stage's.

    >>> print(needs(Action(1, "B", 0), num_stages=3), needs(Action(2, "B", 0), num_stages=3))
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


def sinks(row: Row) -> list[Action]:
    """Return the actions of a row that nobody awaits, whose ends are the end of the step.

    The backwards of the first stage end every chain of packets; weights' backwards are on none.
    """
    return [action for action in row if action.op == "W" or (action.op == "B" and action.stage == 0)]


def phase(row: Row, index: int) -> str:
    """Return "warmup" before the forward that the first backward follows, "cooldown" after the last forward, else
    "steady".

    >>> row = OneFOneB().row(1, num_stages=4, num_microbatches=4)
    >>> print(*(f"{action}:{phase(row, index)}" for index, action in enumerate(row)))
    1F0:warmup 1F1:warmup 1F2:steady 1B0:steady 1F3:steady 1B1:cooldown 1B2:cooldown 1B3:cooldown
    """
    ops = [action.op for action in row]
    if index < ops.index("B") - 1:
        return "warmup"
    return "cooldown" if "F" not in ops[index:] else "steady"


def peak_in_flight(row: Row) -> int:
    """Return how many microbatches have gone forward and not yet backward, at most, summed over the row's stages.

    What a forward saved is let go by the microbatch's last backward: W where there is one.
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
    order(rows, num_stages)


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
