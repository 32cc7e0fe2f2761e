"""Weight policies: the version of a stage's weights read by each pass, and the timing and learning rate of its updates.

The delay of a microbatch is the number of updates a stage makes between its forward and the update with its gradient. Delays come
from the schedule, see `raysim.schedules.arrays`; a policy can only increase them. A policy operates on the weights of one stage. To
add a policy, write a class and add it to `POLICIES`; the property tests then require an example of it.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from raysim.notation import Notation, check_choice, parse_notation
from raysim.schedules.arrays import PostValidatedSteps, Unflushed
from raysim.schedules.families import Schedule

if TYPE_CHECKING:
    from torch import Tensor

Weights: TypeAlias = "dict[str, Tensor]"  # of a stage, by parameter name
Memory: TypeAlias = "dict[str, Tensor]"  # of a policy at one stage, with names of its choice; saved in checkpoints
Delays: TypeAlias = Sequence[Sequence[int]]  # by stage and microbatch of a step


class WeightPolicy(Notation, ABC):
    """Decides which weights a stage's passes read, and when and at which learning rate the stage updates.

    A frozen dataclass, equal and hashed by its settings.
    """

    between_steps: ClassVar[Literal["flush", "validate", "continue"]] = "continue"
    """The pipeline runs empty; or stages update at once, and amend the update if the norms of all stages require it; or the steps
    overlap, and each stage clips by its own norm."""

    @property
    def updates_each_microbatch(self) -> bool:
        """True if a stage updates after the backward of each microbatch, instead of once a step."""
        return False

    def order(self, schedule: Schedule) -> Schedule:
        """Return the schedule adapted to this policy; raises ValueError if it needs a flush and the policy has none."""
        if self.between_steps == "flush":
            return schedule
        return PostValidatedSteps(schedule) if self.between_steps == "validate" else Unflushed(schedule)

    def check(self, run: Any) -> None:
        """Raise ValueError, naming field and rule, if the policy does not fit a run; `run`: its `RunConfig`."""

    def check_plan(self, plan: Any, modules: Sequence[Any]) -> None:
        """Raise ValueError if the policy does not fit a run's `Plan`, or the modules of its stages."""

    def delays(self, scheduled: Delays) -> Delays:
        """Return the delay of every microbatch of a steady step on every stage; `scheduled` are the schedule's delays."""
        return scheduled

    def rate(self, rate: float, delay: int, step: int) -> float:
        """Return the learning rate of a stage with longest delay `delay`."""
        return rate

    def forward_weights(
        self, newest: Weights, directions: Callable[[], Weights], rate: float, delays: Sequence[int]
    ) -> dict[int, Weights]:
        """Return by delay the weights that forwards read in place of the newest version; key 0 holds the weights for all other delays.

        `directions`: returns the optimiser's last update divided by minus its learning rate `rate`, empty before the first
        update. `delays`: the stage's non-zero delays. New tensors must not share memory with `newest`.
        """
        return {0: newest}

    def backward_weights(self, read: Weights, newest: Weights, memory: Memory, delay: int) -> Weights:
        """Return the weights for the backward of a forward that read `read`."""
        return read

    def after_update(self, before: Weights, after: Weights, memory: Memory, delay: int) -> Memory:
        """Return the memory after an update of a stage with longest delay `delay`."""
        return memory

    def num_copies(self, delays: Sequence[int]) -> int:
        """Return the maximum number of weight copies held by a stage with these delays, besides the newest version."""
        return max(delays)


@dataclass(frozen=True, repr=False)
class Continuous(WeightPolicy):
    """Base of policies that keep the schedule's delays and update after each microbatch or once per step."""

    update: str = field(default="microbatch", kw_only=True)

    def __post_init__(self) -> None:
        check_choice("update", self.update, ("microbatch", "step"))

    @property
    def updates_each_microbatch(self) -> bool:
        return self.update == "microbatch"


@dataclass(frozen=True, repr=False)
class Synchronous(WeightPolicy):
    """Updates once per step, when the pipeline is empty: `W[t+1] = W[t] - rate grad f(W[t])`."""

    between_steps = "flush"


@dataclass(frozen=True, repr=False)
class PostValidated(WeightPolicy):
    """Updates each stage as soon as its step is done, and validates the update in the next step (Qi et al. 2023, 2401.10241,
    section 4)::

        W[t+1] = W[t] - rate grad f(W[t])

    No stage waits for the others between steps. With `optimizer.clip_norm`, partial norms are passed from the first worker to the
    last: a worker postpones its update if the norm so far requires clipping or is not finite. The total norm is passed back, and
    wrong updates are rolled back and repeated. The weights equal those of `Synchronous` bit for bit.
    """

    between_steps = "validate"


@dataclass(frozen=True, repr=False)
class Stashed(Continuous):
    """Keeps the weights read by each microbatch's forward for its backward (weight stashing; PipeDream, Narayanan et al. 2019,
    1806.03377)::

        W[t+1] = W[t] - rate grad f(W[t - delay])

    Forwards read the newest version. The weights are updated after each microbatch, or after each step with `update='step'`. 1F1B
    without a flush delays stage s of P by P - 1 - s microbatches, and the stage keeps as many versions besides the newest.
    """


@dataclass(frozen=True, repr=False)
class DoubleBuffered(WeightPolicy):
    """Updates once per step, and reads the second newest version on all stages (PipeDream-2BW, Narayanan et al. 2021,
    2006.09503)::

        W[t+1] = W[t] - rate grad f(W[t-1])

    Two versions suffice if a step has at least as many microbatches as are in flight on the first stage: with 1F1B, one per stage.
    """

    def check(self, run: Any) -> None:
        in_flight = max(Unflushed(run.schedule).in_flight(run.stages))
        if run.num_microbatches < in_flight:
            raise ValueError(
                f"`num_microbatches` must be at least {in_flight} with {self!r}, the number in flight at the first stage, "
                f"but got {run.num_microbatches}."
            )

    def delays(self, scheduled: Delays) -> Delays:
        longest = max(map(max, scheduled))
        return [[longest] * len(of_stage) for of_stage in scheduled]


POLICIES: dict[str, type[WeightPolicy]] = {
    cls.name(): cls for cls in (Synchronous, PostValidated, Stashed, DoubleBuffered)
}


def parse_weights(text: str) -> WeightPolicy:
    """Parse the notation of a weight policy; the inverse of `repr`. Raises ValueError listing the known names.

    >>> parse_weights("Stashed"), parse_weights("Stashed(update='step')")
    (Stashed, Stashed(update='step'))
    """
    return parse_notation(text, POLICIES, kind="weight policy")
