"""Schedules as flat arrays for the simulator's kernels, and schedules whose steps follow each other without a flush.

Arrays take 9 bytes per action instead of an object. Without a flush, steps follow each other as one long step, or on every worker as
soon as its row is done. The engines run the rows of one step after another, since results do not depend on when an action runs; the
simulator runs several steps in sequence. The delay of a microbatch follows from the order of the actions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.schedules.actions import Row, topological_order
from raysim.schedules.families import Schedule, WorkerSchedule

OPS = "FBW"
"""Ops by number: forward, backward, and the weight-gradient part of a split backward."""

FEWEST_STEPS, MOST_STEPS = 12, 96  # simulated without a flush
MOST_IN_FLIGHT = 1 << 16  # limit on microbatches before a schedule reaches its steady state


class ActionTable(NamedTuple):
    """The rows of a schedule, one worker after another.

    >>> from raysim.schedules import GPipe
    >>> table = make_table(GPipe(), num_stages=2, num_microbatches=2)
    >>> table.offsets.tolist(), table.stage.tolist(), table.op.tolist(), table.microbatch.tolist()
    ([0, 4, 8], [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1])
    """

    offsets: NDArray[np.int64]
    """The row of worker w is actions offsets[w] to offsets[w + 1]."""
    stage: NDArray[np.int32]
    op: NDArray[np.uint8]
    microbatch: NDArray[np.int32]
    owner: NDArray[np.int32]
    """The worker of each stage."""
    num_microbatches: int
    """Number of microbatches in all steps."""
    num_steps: int = 1
    """Number of steps that follow each other without a flush."""
    priced_step: int = 0
    """Index of the step whose time is reported."""
    repeats: bool = False
    """True if the rows repeat the actions of one step, with later microbatches."""

    @property
    def per_step(self) -> int:
        """Return the number of microbatches per step."""
        return self.num_microbatches // self.num_steps

    @property
    def num_stages(self) -> int:
        return len(self.owner)

    @property
    def num_workers(self) -> int:
        return len(self.offsets) - 1

    @property
    def splits_backward(self) -> bool:
        """Return whether backwards are split into input and weight parts."""
        return int(self.op.max()) == OPS.index("W")

    @property
    def sends(self) -> NDArray[np.bool_]:
        """Return whether each action sends a packet."""
        forward, backward = self.op == OPS.index("F"), self.op == OPS.index("B")
        sends: NDArray[np.bool_] = (forward & (self.stage < self.num_stages - 1)) | (backward & (self.stage > 0))
        return sends

    def places(self) -> NDArray[np.int64]:
        """Return the index of each action (stage, op, microbatch), or -1."""
        places = np.full((self.num_stages, len(OPS), self.num_microbatches), -1)
        places[self.stage, self.op, self.microbatch] = np.arange(len(self.stage))
        return places

    def sources(self) -> NDArray[np.int64]:
        """Return the index of the action whose packet each action consumes, or -1."""
        forward, backward = self.op == OPS.index("F"), self.op == OPS.index("B")
        takes = (forward & (self.stage > 0)) | (backward & (self.stage < self.num_stages - 1))
        neighbour = np.where(takes, self.stage + np.where(forward, -1, 1), 0)
        return np.where(takes, self.places()[neighbour, self.op, self.microbatch], -1)

    def repeated(self, num_steps: int) -> ActionTable:
        """Return the rows of several consecutive steps, with microbatches numbered consecutively.

        >>> from raysim.schedules import GPipe
        >>> table = make_table(GPipe(), num_stages=1, num_microbatches=2).repeated(2)
        >>> table.op.tolist(), table.microbatch.tolist()
        ([0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 2, 3, 2, 3])
        """
        rows = [slice(*bounds) for bounds in pairwise(self.offsets)]
        microbatches = [
            self.microbatch[row] + step * self.num_microbatches for row in rows for step in range(num_steps)
        ]
        return ActionTable(
            offsets=self.offsets * num_steps,
            stage=np.concatenate([np.tile(self.stage[row], num_steps) for row in rows]),
            op=np.concatenate([np.tile(self.op[row], num_steps) for row in rows]),
            microbatch=np.concatenate(microbatches).astype(np.int32),
            owner=self.owner,
            num_microbatches=num_steps * self.num_microbatches,
            num_steps=num_steps,
            repeats=True,
        )

    def windows(self) -> NDArray[np.int64]:
        """Return each worker's index range (start, stop) of the priced step's actions.

        Without a flush it starts after the worker's last backward of the previous step, and its forwards are of later microbatches.
        """
        whole = np.stack([self.offsets[:-1], self.offsets[1:]], axis=1)
        if self.num_steps == 1:
            return whole
        if self.repeats:
            lengths = np.diff(self.offsets) // self.num_steps
            first = self.offsets[:-1] + self.priced_step * lengths
            return np.stack([first, first + lengths], axis=1)
        for edge, step in ((0, self.priced_step - 1), (1, self.priced_step)):
            lasts = np.flatnonzero((self.op == OPS.index("B")) & (self.microbatch == (step + 1) * self.per_step - 1))
            whole[:, edge] = lasts + 1  # one stage per worker, in order
        return whole


@lru_cache(maxsize=8)
def make_table(schedule: Schedule, num_stages: int, num_microbatches: int) -> ActionTable:
    """Return the rows of a schedule as arrays; raises ValueError naming the blocked action if they deadlock."""
    owner = schedule.workers(num_stages)
    if type(schedule).rows is Schedule.rows:  # one stage per worker: built from letters, without objects
        parts = [_row(schedule.ops(stage, num_stages, num_microbatches)) for stage in range(num_stages)]
        stages = [np.full(len(ops), stage, np.int32) for stage, (ops, _) in enumerate(parts)]
    else:
        rows = schedule.rows(num_stages, num_microbatches)
        topological_order(rows, num_stages)
        parts = [
            (
                np.array([OPS.index(action.op) for action in row], np.uint8),
                np.array([action.microbatch for action in row], np.int32),
            )
            for row in rows
        ]
        stages = [np.array([action.stage for action in row], np.int32) for row in rows]
    return ActionTable(
        offsets=np.cumsum([0, *(len(ops) for ops, _ in parts)], dtype=np.int64),
        stage=np.concatenate(stages),
        op=np.concatenate([ops for ops, _ in parts]),
        microbatch=np.concatenate([microbatches for _, microbatches in parts]),
        owner=np.array(owner, np.int32),
        num_microbatches=num_microbatches,
    )


def _row(letters: str) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """Return ops and microbatches of a row of letters: the n-th occurrence of a letter is for microbatch n."""
    codes = np.frombuffer(letters.encode(), np.uint8)
    ops = np.empty(len(codes), np.uint8)
    microbatches = np.empty(len(codes), np.int32)
    for number, op in enumerate(OPS):
        chosen = codes == ord(op)
        ops[chosen] = number
        microbatches[chosen] = np.arange(letters.count(op), dtype=np.int32)
    return ops, microbatches


@dataclass(frozen=True, repr=False)
class StepsOnEnd(WorkerSchedule):
    """Base of schedules whose steps follow each other without a flush; `rows` are those of one step."""

    schedule: Schedule

    def rows(self, num_stages: int, num_microbatches: int) -> list[Row]:
        return self.schedule.rows(num_stages, num_microbatches)

    def workers(self, num_stages: int) -> list[int]:
        return self.schedule.workers(num_stages)


@dataclass(frozen=True, repr=False)
class PostValidatedSteps(StepsOnEnd):
    """A schedule in which every worker starts the next step as soon as its row is done (Qi et al. 2023, 2401.10241, section 4).

    Unlike in `Unflushed`, no forward of the next step precedes the end of the row, so all passes read the newest weights.
    """

    def __repr__(self) -> str:
        return f"{self.schedule!r} with post-validation"


@dataclass(frozen=True, repr=False)
class Unflushed(StepsOnEnd):
    """A schedule whose steps follow each other without a flush; `rows` are those of one step. Raises ValueError if the
    schedule does not support this.

    >>> from raysim.schedules import OneFOneB
    >>> Unflushed(OneFOneB()).delays(num_stages=4, num_microbatches=2)
    [[3, 3], [2, 2], [1, 1], [0, 0]]
    """

    def __repr__(self) -> str:
        return f"{self.schedule!r} without a flush"

    def __post_init__(self) -> None:
        if not self.schedule.goes_on:
            raise ValueError(f"{self.schedule!r} cannot run without a flush.")

    def in_flight(self, num_stages: int) -> list[int]:
        """Return the peak number of microbatches in flight on every stage, in the steady state."""
        return [1 + max(of_stage) for of_stage in self.delays(num_stages, 1)]

    def delays(self, num_stages: int, num_microbatches: int, per: int = 1) -> list[list[int]]:
        """Return the delay of every microbatch of a steady step on every stage, for an update after each `per` microbatches.

        The delay is the number of updates between the forward of a microbatch and the update with its gradient.

        >>> from raysim.schedules import OneFOneB
        >>> Unflushed(OneFOneB()).delays(num_stages=3, num_microbatches=4, per=4)
        [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
        """
        for steps in self._lengths(num_microbatches):
            by_stage = [
                _delays(self.schedule.ops(stage, num_stages, steps * num_microbatches), per).reshape(steps, -1)
                for stage in range(num_stages)
            ]
            if all((delays[-1] == delays[-2]).all() for delays in by_stage):
                return [delays[-1].tolist() for delays in by_stage]
        raise ValueError(
            f"{self.schedule!r} must have at most {MOST_IN_FLIGHT} microbatches in flight without a flush."
        )

    def _lengths(self, num_microbatches: int) -> Iterator[int]:
        """Yield powers of two as numbers of steps, while their microbatches are within the limit."""
        for power in count(1):
            if power > 1 and num_microbatches << power > 2 * MOST_IN_FLIGHT:
                return
            yield 1 << power


def _delays(letters: str, per: int) -> NDArray[np.int64]:
    """Return the delay of each microbatch in a stage's row."""
    codes = np.frombuffer(letters.encode(), np.uint8)
    backwards = np.cumsum(codes == ord("B"))[codes == ord("F")]
    delays: NDArray[np.int64] = np.arange(len(backwards)) // per - backwards // per
    return delays


def steps_table(schedule: Schedule, num_stages: int, num_microbatches: int) -> ActionTable:
    """Return the rows to simulate for the time of a step: one step, or without a flush several."""
    if isinstance(schedule, PostValidatedSteps):
        table = make_table(schedule.schedule, num_stages, num_microbatches)
        return table.repeated(FEWEST_STEPS + 1)._replace(priced_step=FEWEST_STEPS - 1)  # no worker runs two steps ahead
    if not isinstance(schedule, Unflushed):
        return make_table(schedule, num_stages, num_microbatches)
    priced, ahead = _lengths(schedule, num_stages, num_microbatches)
    table = make_table(schedule.schedule, num_stages, (priced + ahead) * num_microbatches)
    return table._replace(num_steps=priced + ahead, priced_step=priced - 1)


@lru_cache(maxsize=256)
def _lengths(schedule: Unflushed, num_stages: int, num_microbatches: int) -> tuple[int, int]:
    """Return the number of steps up to the priced one, and the number of later steps whose forwards start before its end.

    The cycle of steps is at most as long as the number of microbatches in flight. Three times as many steps are simulated, and
    the first third may differ from the rest.
    """
    in_flight = max(schedule.in_flight(num_stages))
    ahead = math.ceil((in_flight - 1) / num_microbatches)
    return max(FEWEST_STEPS, min(3 * in_flight + 3, MOST_STEPS)) + 3 * ahead, ahead
