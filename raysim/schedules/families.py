"""Families of schedules: GPipe, 1F1B, interleaved, zero-bubble, and schedules from CSV files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from raysim.notation import Notation, check_integer, check_real, parse_notation
from raysim.schedules.actions import Action, Row, read_csv
from raysim.schedules.zero_bubble import Costs, pattern, search


class Schedule(Notation, ABC):
    """A schedule for any number of stages and microbatches: a frozen dataclass with its notation as `repr`."""

    goes_on: ClassVar[bool] = False  # whether it can run several steps as one row, without a flush

    @abstractmethod
    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        """Return one stage's actions as letters; the n-th occurrence of a letter is for microbatch n."""

    def row(self, stage: int, num_stages: int, num_microbatches: int) -> Row:
        """Return the actions of one stage in order."""
        counts = {op: count() for op in "FBW"}
        letters = self.ops(stage, num_stages, num_microbatches)
        return [Action(stage, op, next(counts[op])) for op in letters]

    def rows(self, num_stages: int, num_microbatches: int) -> list[Row]:
        """Return one row per worker."""
        return [self.row(stage, num_stages, num_microbatches) for stage in range(num_stages)]

    def workers(self, num_stages: int) -> list[int]:
        """Return the worker that owns each stage."""
        return list(range(num_stages))


class WorkerSchedule(Schedule):
    """Base of schedules with several stages per worker, defined by the rows of workers, not of stages."""

    @abstractmethod
    def workers(self, num_stages: int) -> list[int]:
        """Return the worker that owns each stage."""

    @abstractmethod
    def rows(self, num_stages: int, num_microbatches: int) -> list[Row]:
        """Return one row per worker."""

    def row(self, stage: int, num_stages: int, num_microbatches: int) -> Row:
        row = self.rows(num_stages, num_microbatches)[self.workers(num_stages)[stage]]
        return [action for action in row if action.stage == stage]

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        return "".join(action.op for action in self.row(stage, num_stages, num_microbatches))


@dataclass(frozen=True, repr=False)
class GPipe(Schedule):
    """Runs all forwards, then all backwards (Huang et al. 2019, 1811.06965).

    >>> print(*GPipe().row(0, num_stages=2, num_microbatches=2))
    0F0 0F1 0B0 0B1
    """

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        return "F" * num_microbatches + "B" * num_microbatches


@dataclass(frozen=True, repr=False)
class OneFOneB(Schedule):
    """Alternates one forward and one backward after a warm-up of forwards (PipeDream-flush; Narayanan et al. 2021, 2104.04473).

    More microbatches in flight hide communication, at the cost of memory. `ahead` is how many forwards each stage runs ahead of
    the next before its first backward: 2 hides a round trip as long as the compute of a microbatch, 3 one twice as long.
    `extra_warmup` adds the same number of forwards to the warm-up of every stage, which hides bursts but not the round trip.

    >>> print(*OneFOneB().row(0, num_stages=2, num_microbatches=3))
    0F0 0F1 0B0 0F2 0B1 0B2
    """

    notation: ClassVar[str] = "1F1B"
    goes_on: ClassVar[bool] = True

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
class Interleaved1F1B(WorkerSchedule):
    """1F1B with several stages per worker: worker w of p owns stages w, w + p, w + 2p, ... (Narayanan et al. 2021, 2104.04473).

    With v stages per worker the bubble is v times smaller, and workers send v times as many packets.

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

    def _row(self, worker: int, num_workers: int, num_microbatches: int) -> Row:
        """Return a worker's row: groups of `num_workers` microbatches go through one stage, then through the next."""
        total = num_microbatches * self.stages_per_worker
        warmup = min(2 * (num_workers - 1 - worker) + (self.stages_per_worker - 1) * num_workers, total)

        def nth(op: str, n: int) -> Action:
            turn, rest = divmod(n, num_workers * self.stages_per_worker)
            chunk, microbatch = divmod(rest, num_workers)
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
    """1F1B with split backwards in the peak memory of 1F1B (Qi et al. 2023, 2401.10241).

    Stage s delays each W by s backwards, so every stage holds as many microbatches as the first stage of 1F1B, and the bubble is
    p - 1 times F + B - W.

    >>> print(*ZBH1().row(1, num_stages=2, num_microbatches=3))
    1F0 1B0 1F1 1B1 1W0 1F2 1B2 1W1 1W2
    """

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        return pattern(stage, num_stages, num_microbatches, warmup=1)


@dataclass(frozen=True, repr=False)
class ZBH2(Schedule):
    """ZBH1 with twice the warm-up, in almost twice the memory (Qi et al. 2023, 2401.10241).

    Every stage holds up to 2p - 1 microbatches. If F, B and W take equally long and there are at least 2p - 1 microbatches, no stage
    waits between its first and its last action. Otherwise each waits p - 1 times F + B - 2W.

    >>> print(*ZBH2().row(0, num_stages=2, num_microbatches=4))
    0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
    """

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        return pattern(stage, num_stages, num_microbatches, warmup=2)


@dataclass(frozen=True, repr=False)
class ZB(Schedule):
    """Split backwards in an order searched for given times and memory (ZB-1p, ZB-2p; Qi et al. 2023, 2401.10241).

    Times of a microbatch and stage, in any unit: forward, backward for inputs, backward for weights, message. `memory` is a multiple
    of 1F1B's; `kept` is the share of a microbatch's memory that is held from B to W, in raysim all of it.

    >>> print(*ZB(weight=0.5, memory=2).row(0, num_stages=2, num_microbatches=4))
    0F0 0F1 0F2 0B0 0F3 0B1 0W0 0W1 0B2 0W2 0B3 0W3
    """

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    message: float = 0.0
    memory: float = 1.0
    kept: float = 1.0

    def __post_init__(self) -> None:
        limits = {"message": (0, 1e9), "memory": (1, 1e9), "kept": (0, 1)}
        for name, value in vars(self).items():
            self._coerce(**{name: check_real(name, value, *limits.get(name, (1e-9, 1e9)))})

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        return search(Costs(**vars(self)), num_stages, num_microbatches)[stage]


class VShaped(WorkerSchedule):
    """Base of schedules with two stages per worker: worker w of p owns stages w and 2p - 1 - w.

    The first and the last stage share a worker, and so do the two middle stages.
    """

    def workers(self, num_stages: int) -> list[int]:
        if num_stages % 2:
            raise ValueError(f"`num_stages` must be even for {self!r}, with two stages a worker, but got {num_stages}.")
        return [min(stage, num_stages - 1 - stage) for stage in range(num_stages)]

    def rows(self, num_stages: int, num_microbatches: int) -> list[Row]:
        num_workers = max(self.workers(num_stages)) + 1
        return [self._row(worker, num_workers, num_microbatches) for worker in range(num_workers)]

    @abstractmethod
    def _row(self, worker: int, num_workers: int, num_microbatches: int) -> Row:
        """Return the row of a worker."""


@dataclass(frozen=True, repr=False)
class ZBV(VShaped):
    """Two stages per worker along a V, with split backwards, in the memory of 1F1B (Qi et al. 2023, 2401.10241, section 6).

    The actions are those of torch's ScheduleZBVZeroBubble. If F, B and W take equally long and there are at least 2p
    microbatches, no worker waits between its first and its last action; with `weights=PostValidated` there is no bubble.

    >>> print(*ZBV().rows(num_stages=4, num_microbatches=2)[1])
    1F0 2F0 1F1 2F1 2B0 2W0 1B0 1W0 2B1 2W1 1B1 1W1
    """

    def _row(self, worker: int, num_workers: int, num_microbatches: int) -> Row:
        """Return a worker's row; if too few microbatches fill the pipeline, the row of a full one without the missing ones."""
        p, w, n = num_workers, worker, max(2 * num_workers - 1, num_microbatches)
        letters = "F" * (2 * (p - w) - 1) + "fF" * w + "fbw" * (p - w)  # upper case: stage w, lower: 2p - 1 - w
        letters += "FBWfbw" * (n - 2 * p + w + 1) + "BWfbw" * (p - w - 1)
        letters += "Bb" * w + "BW" * (p - w) + "w" * w + "W" * w
        counts = {letter: count() for letter in "FBWfbw"}
        row = [
            Action(w if letter.isupper() else 2 * p - 1 - w, letter.upper(), next(counts[letter])) for letter in letters
        ]
        return [action for action in row if action.microbatch < num_microbatches]


@dataclass(frozen=True, repr=False)
class DualPipeV(VShaped):
    """DualPipe cut in half: two stages per worker along a V, most backwards whole (DeepSeek-AI 2024, 2412.19437).

    The actions are those of torch's ScheduleDualPipeV, with overlapped pairs run sequentially, forward first. Needs at least as many
    microbatches as stages, 2p. The bubble is at most p - 1 times F + 2B - 3W, where B is a whole backward.

    >>> print(*DualPipeV().rows(num_stages=4, num_microbatches=4)[1])
    1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2B3 1B3 2W3 1W3
    """

    def _row(self, worker: int, num_workers: int, num_microbatches: int) -> Row:
        p, w = num_workers, worker
        if num_microbatches < 2 * p:
            raise ValueError(
                f"`num_microbatches` must be at least the number of stages ({2 * p}) for {self!r}, but got {num_microbatches}."
            )
        row: Row = []
        stages = {"0": w, "1": 2 * p - 1 - w}
        counts = {(stage, op): count() for stage in stages.values() for op in "FB"}
        waiting: deque[Action] = deque()  # weight gradients of both stages, oldest first

        def add(*steps: str) -> None:
            """Add actions: F, whole backward B, input-gradient backward I (queues its W), and W (the oldest queued)."""
            for step in steps:
                if step != "W":
                    op, stage = step[0].replace("I", "B"), stages[step[1]]
                    row.append(Action(stage, op, next(counts[stage, op])))
                elif waiting:
                    row.append(waiting.popleft())
                if step[0] == "I":
                    waiting.append(row[-1]._replace(op="W"))

        add(*["F0"] * (2 * (p - w - 1)))
        add(*["F0", "F1"] * (w + 1))
        add(*["I1", "W", "F1"] * (p - w - 1))
        add(*["F0", "B1", "F1", "B0"] * (num_microbatches - 2 * p + w + 1))
        add(*["B1", "F1", "B0"] * (p - w - 1))
        backwards = ["1", "0"] * (w + 1)  # after the middle their weight gradients are queued
        split = 2 * ((w + 1) // 2) + (1 if w % 2 == 0 else 0)
        add(*(("B" if i < split else "I") + stage for i, stage in enumerate(backwards)))
        add(*["W", "I0"] * (p - w - 1))
        add(*["W"] * (w + 1))
        return row


@dataclass(frozen=True, repr=False)
class Custom(WorkerSchedule):
    """Rows from a CSV file in torch's pipeline format, which fixes the numbers of stages and microbatches.

    The file is read once, when the schedule is created.
    """

    _rows: ClassVar[list[Row]]  # set per object, but not a field: the notation has only the path
    _hash: ClassVar[int]

    path: str

    def __post_init__(self) -> None:
        self._keep(read_csv(self.path))

    def __eq__(self, other: object) -> bool:  # the file may have changed
        return isinstance(other, Custom) and (self.path, self._rows) == (other.path, other._rows)

    def __hash__(self) -> int:
        return self._hash

    def _keep(self, rows: list[Row]) -> None:
        object.__setattr__(self, "_rows", rows)
        object.__setattr__(self, "_hash", hash((self.path, *map(tuple, rows))))

    @classmethod
    def of_rows(cls, path: str, rows: list[Row]) -> Custom:
        """Return the schedule with recorded rows, without reading the file."""
        schedule = object.__new__(cls)
        object.__setattr__(schedule, "path", path)
        schedule._keep(rows)
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
                raise ValueError(f"`{name}` must be {value}, as in {self.path!r}, but got {size[name]}.")
        return rows

    def workers(self, num_stages: int) -> list[int]:
        owner = {action.stage: worker for worker, row in enumerate(self._rows) for action in row}
        return [owner[stage] for stage in sorted(owner)]


SCHEDULES: dict[str, type[Schedule]] = {
    cls.name(): cls for cls in (GPipe, OneFOneB, Interleaved1F1B, ZBH1, ZBH2, ZB, ZBV, DualPipeV, Custom)
}
"""All schedule families, by name in the notation."""


def parse_schedule(text: str) -> Schedule:
    """Parse the notation of a schedule; the inverse of `repr`. Raises ValueError listing the known names.

    >>> parse_schedule("1F1B(extra_warmup=2)"), parse_schedule("Interleaved1F1B(2)")
    (1F1B(extra_warmup=2), Interleaved1F1B(2))
    """
    return parse_notation(text, SCHEDULES, kind="schedule")
