"""Schedules without a flush: steps that follow each other as one long step, or at every worker as soon as its row is done.

The engines run the rows of one step after another, since numbers do not depend on when an action runs; the simulator runs several
steps on end. The delay of a microbatch is worked out here, once, from the order of the actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
from numpy.typing import NDArray

from raysim.schedules.actions import Row
from raysim.schedules.families import Placed, Schedule

MOST_IN_FLIGHT = 1 << 16  # microbatches within which a schedule has to reach its steady state


@dataclass(frozen=True, repr=False)
class StepsOnEnd(Placed):
    """Base of schedules whose steps follow each other without a flush; the rows are those of one step."""

    schedule: Schedule

    def rows(self, num_stages: int, num_microbatches: int) -> list[Row]:
        return self.schedule.rows(num_stages, num_microbatches)

    def workers(self, num_stages: int) -> list[int]:
        return self.schedule.workers(num_stages)


@dataclass(frozen=True, repr=False)
class PostValidatedSteps(StepsOnEnd):
    """Steps of which every worker begins the next as soon as its row is done (Qi et al. 2023, 2401.10241, section 4).

    Unlike `Unflushed`, no forward of the next step comes before the row's end, so all passes read the newest weights.
    """

    def __repr__(self) -> str:
        return f"{self.schedule!r} with post-validation"


@dataclass(frozen=True, repr=False)
class Unflushed(StepsOnEnd):
    """A schedule whose steps follow each other without a flush; its rows are those of one step. Raises ValueError if the
    schedule has no such form.

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
        """Return the most microbatches between forward and backward at every stage, in the steady state."""
        return [1 + max(of_stage) for of_stage in self.delays(num_stages, 1)]

    def delays(self, num_stages: int, num_microbatches: int, per: int = 1) -> list[list[int]]:
        """Return the delay of every microbatch of a steady step at every stage, for an update after each `per` microbatches.

        The delay is the number of updates between the forward of a microbatch and the update that its gradient is part of.

        >>> from raysim.schedules import OneFOneB
        >>> Unflushed(OneFOneB()).delays(num_stages=3, num_microbatches=4, per=4)
        [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
        """
        for steps in self._lengths(num_microbatches):
            every = [
                _delays(self.schedule.ops(stage, num_stages, steps * num_microbatches), per).reshape(steps, -1)
                for stage in range(num_stages)
            ]
            if all((one[-1] == one[-2]).all() for one in every):
                return [one[-1].tolist() for one in every]
        raise ValueError(
            f"{self.schedule!r} must have at most {MOST_IN_FLIGHT} microbatches in flight without a flush."
        )

    def _lengths(self, num_microbatches: int) -> Iterator[int]:
        """Yield numbers of steps, each twice the last, until their microbatches are too many."""
        for power in count(1):
            if power > 1 and num_microbatches << power > 2 * MOST_IN_FLIGHT:
                return
            yield 1 << power


def _delays(letters: str, per: int) -> NDArray[np.int64]:
    """Return for each microbatch of a stage's row the updates from its forward on to its own."""
    codes = np.frombuffer(letters.encode(), np.uint8)
    backwards = np.cumsum(codes == ord("B"))[codes == ord("F")]
    found: NDArray[np.int64] = np.arange(len(backwards)) // per - backwards // per
    return found
