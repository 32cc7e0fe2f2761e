"""Weight policies: the version of a stage's weights that each pass reads, and the time and the rate of its updates.

A delay counts the updates that a stage makes after the forward of a microbatch and before the update with its gradient. The schedule
gives the delays, see `raysim.schedules.unflushed`; a policy may only lengthen them. A policy computes on the weights of one stage and
knows no other stage.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from raysim.notation import Notation, check_choice
from raysim.schedules import Schedule, Unflushed

if TYPE_CHECKING:
    from torch import Tensor

Weights: TypeAlias = "dict[str, Tensor]"  # of a stage, by parameter name
Memory: TypeAlias = "dict[str, Tensor]"  # of a policy at one stage, by any names; checkpoints keep it
Delays: TypeAlias = Sequence[Sequence[int]]  # by stage and microbatch of a step


class WeightPolicy(Notation, ABC):
    """Decides which weights the passes of a stage read, and when and at which rate the stage updates.

    A frozen dataclass, equal and hashed by its settings.
    """

    flush: ClassVar[bool] = False  # whether the pipeline runs empty between steps
    rate_by_stage: ClassVar[bool] = False  # whether stages update at different rates
    predicts: ClassVar[bool] = False  # whether forwards read weights moved on along the optimiser's directions
    corrects: ClassVar[bool] = False  # whether backwards read other weights than their forwards
    remembers: ClassVar[bool] = False  # whether it has a memory

    @property
    def updates_each_microbatch(self) -> bool:
        """True if a stage updates after the backward of each microbatch, instead of once a step."""
        return False

    def order(self, schedule: Schedule) -> Schedule:
        """Return a schedule as it runs with these weights; raises ValueError where it needs a flush and they have none."""
        return schedule if self.flush else Unflushed(schedule)

    def check(self, in_flight: int, num_microbatches: int, optimizer: str, momentum: float | None) -> None:
        """Raise ValueError, by field and rule, where the policy does not fit the run.

        `in_flight`: the most microbatches that a stage holds at once. `momentum`: the optimiser's, None where it has none.
        """

    def delays(self, scheduled: Delays) -> Delays:
        """Return the delay of every microbatch of a steady step at every stage; `scheduled` are those of the schedule."""
        return scheduled

    def rate(self, rate: float, delay: int, step: int) -> float:
        """Return the learning rate of a stage whose longest delay is `delay`."""
        return rate

    def predicted(self, newest: Weights, directions: Weights, rate: float, delay: int) -> Weights:
        """Return the weights that forwards with a delay read where `newest` is the newest version, of a policy that `predicts`.

        `directions`: the optimiser's last update, divided by minus its learning rate; empty before the first. The tensors
        must not share memory with `newest`.
        """
        return newest

    def corrected(self, newest: Weights, memory: Memory, delay: int) -> Weights:
        """Return the weights that a backward reads, of a policy that `corrects`; elsewhere it reads those of its forward."""
        return newest

    def remember(self, before: Weights, after: Weights, memory: Memory, delay: int) -> Memory:
        """Return the memory after an update of a stage whose longest delay is `delay`."""
        return {}

    def num_copies(self, delays: Sequence[int]) -> int:
        """Return the most copies of the weights that a stage with these delays holds beside the newest version."""
        return max(delays)


@dataclass(frozen=True, repr=False)
class Continuous(WeightPolicy):
    """Base of policies that keep the schedule's delays, and update after each microbatch or once a step."""

    update: str = field(default="microbatch", kw_only=True)

    def __post_init__(self) -> None:
        check_choice("update", self.update, ("microbatch", "step"))

    @property
    def updates_each_microbatch(self) -> bool:
        return self.update == "microbatch"
