"""A schedule as flat arrays, which the simulator's kernels read: the same rows, 9 bytes an action instead of an object."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.schedules.actions import topological_order
from raysim.schedules.families import Schedule

OPS = "FBW"
"""An op's number is its place here: forward, backward, and backward for the weights alone where it is apart."""


class ActionTable(NamedTuple):
    """The rows of a schedule, one worker after another.

    >>> from raysim.schedules import GPipe
    >>> table = make_table(GPipe(), num_stages=2, num_microbatches=2)
    >>> table.offsets.tolist(), table.stage.tolist(), table.op.tolist(), table.microbatch.tolist()
    ([0, 4, 8], [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 0, 1, 0, 1])
    """

    offsets: NDArray[np.int64]
    """Row of worker w: actions offsets[w] to offsets[w + 1]."""
    stage: NDArray[np.int32]
    op: NDArray[np.uint8]
    microbatch: NDArray[np.int32]
    owner: NDArray[np.int32]
    """The worker of each stage."""
    num_microbatches: int
    """Of all steps."""
    num_steps: int = 1
    """Steps that follow each other without a flush."""
    priced_step: int = 0
    """The step of these whose time counts."""
    repeats: bool = False
    """True if the rows hold the actions of one step again and again, with later microbatches."""

    @property
    def per_step(self) -> int:
        """Return the microbatches of one step."""
        return self.num_microbatches // self.num_steps

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return len(self.owner)

    @property
    def num_workers(self) -> int:
        """Return the number of workers."""
        return len(self.offsets) - 1

    @property
    def splits_backward(self) -> bool:
        """Return whether backwards are in two parts, for inputs and for weights."""
        return int(self.op.max()) == OPS.index("W")

    def repeated(self, num_steps: int) -> ActionTable:
        """Return the rows of several steps on end, whose microbatches are numbered consecutively.

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


def make_table(schedule: Schedule, num_stages: int, num_microbatches: int) -> ActionTable:
    """Return the rows of a schedule as arrays; raises ValueError with the action that blocks where they deadlock."""
    owner = schedule.workers(num_stages)
    if type(schedule).rows is Schedule.rows:  # one stage a worker, rows of letters: no objects are needed
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
    """Return the ops and microbatches of a row of letters: the n-th of a letter works on microbatch n."""
    codes = np.frombuffer(letters.encode(), np.uint8)
    ops = np.empty(len(codes), np.uint8)
    microbatches = np.empty(len(codes), np.int32)
    for number, op in enumerate(OPS):
        chosen = codes == ord(op)
        ops[chosen] = number
        microbatches[chosen] = np.arange(letters.count(op), dtype=np.int32)
    return ops, microbatches
