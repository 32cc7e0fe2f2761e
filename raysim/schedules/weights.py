"""Weight policies: the version of a stage's weights read by each pass, and the timing and learning rate of its updates.

The delay of a microbatch is the number of updates a stage makes between its forward and the update with its gradient. Delays come
from the schedule, see `raysim.schedules.arrays`; a policy can only increase them. A policy operates on the weights of one stage. To
add a policy, write a class and add it to `POLICIES`; the property tests then require an example of it.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from raysim.notation import Notation, check_choice, check_integer, check_real, parse
from raysim.schedules.arrays import PostValidatedSteps, Unflushed
from raysim.schedules.families import Schedule

if TYPE_CHECKING:
    from torch import Tensor

Weights: TypeAlias = "dict[str, Tensor]"  # of a stage, by parameter name
Memory: TypeAlias = "dict[str, Tensor]"  # of a policy at one stage, with names of its choice; saved in checkpoints
Delays: TypeAlias = Sequence[Sequence[int]]  # by stage and microbatch of a step

MOVEMENT = "movement/"  # prefix of PipeMare's memory
ADAPTIVE = ("adam", "adamw")


class WeightPolicy(Notation, ABC):
    """Decides which weights a stage's passes read, and when and at which learning rate the stage updates.

    A frozen dataclass, equal and hashed by its settings.
    """

    flush: ClassVar[bool] = False  # whether the pipeline runs empty between steps
    validates: ClassVar[bool] = (
        False  # whether stages update at once, and correct the update if all stages' norms require it
    )
    rate_by_stage: ClassVar[bool] = False  # whether stages have different learning rates
    predicts: ClassVar[bool] = False  # whether forwards read weights extrapolated along the optimiser's updates
    corrects: ClassVar[bool] = False  # whether backwards read different weights than their forwards
    remembers: ClassVar[bool] = False  # whether it has a memory

    @property
    def updates_each_microbatch(self) -> bool:
        """True if a stage updates after the backward of each microbatch, instead of once a step."""
        return False

    def order(self, schedule: Schedule) -> Schedule:
        """Return the schedule adapted to this policy; raises ValueError if it needs a flush and the policy has none."""
        return schedule if self.flush else Unflushed(schedule)

    @property
    def clips_by_stage(self) -> bool:
        """True if each stage clips by its own norm, because the norms of the others are not known."""
        return not (self.flush or self.validates)

    def check(self, in_flight: int, num_microbatches: int, optimizer: str, momentum: float | None) -> None:
        """Raise ValueError, naming field and rule, if the policy does not fit the run.

        `in_flight`: the peak number of microbatches on a stage. `momentum`: the optimiser's, None without momentum.
        """

    def delays(self, scheduled: Delays) -> Delays:
        """Return the delay of every microbatch of a steady step on every stage; `scheduled` are the schedule's delays."""
        return scheduled

    def rate(self, rate: float, delay: int, step: int) -> float:
        """Return the learning rate of a stage with longest delay `delay`."""
        return rate

    def predicted(self, newest: Weights, directions: Weights, rate: float, delay: int) -> Weights:
        """Return the weights read by forwards with a delay, for a policy that `predicts`; `newest` is the newest version.

        `directions`: the optimiser's last update divided by minus its learning rate; empty before the first update. The
        returned tensors must not share memory with `newest`.
        """
        return newest

    def corrected(self, newest: Weights, memory: Memory, delay: int) -> Weights:
        """Return the weights read by a backward, for a policy that `corrects`; otherwise they are its forward's."""
        return newest

    def remember(self, before: Weights, after: Weights, memory: Memory, delay: int) -> Memory:
        """Return the memory after an update of a stage with longest delay `delay`."""
        return {}

    def num_copies(self, delays: Sequence[int]) -> int:
        """Return the most copies of the weights held by a stage with these delays, besides the newest version."""
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

    flush: ClassVar[bool] = True


@dataclass(frozen=True, repr=False)
class PostValidated(WeightPolicy):
    """Updates each stage as soon as its step is done, and validates the update in the next step (Qi et al. 2023, 2401.10241,
    section 4)::

        W[t+1] = W[t] - rate grad f(W[t])

    No stage waits for the others between steps. With `optimizer.clip_norm`, partial norms are passed from the first worker to the
    last: a worker postpones its update if the norm so far requires clipping or is not finite. The total norm is then passed back,
    and a worker that updated although the gradients must be clipped, or are not finite, rolls its update back and repeats it.
    The weights equal those of `Synchronous` bit for bit.
    """

    validates: ClassVar[bool] = True

    def order(self, schedule: Schedule) -> Schedule:
        return PostValidatedSteps(schedule)


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

    def check(self, in_flight: int, num_microbatches: int, optimizer: str, momentum: float | None) -> None:
        if num_microbatches < in_flight:
            raise ValueError(
                f"`num_microbatches` must be at least {in_flight} with {self!r}, as many as are in flight at the first stage, "
                f"but got {num_microbatches}."
            )

    def delays(self, scheduled: Delays) -> Delays:
        longest = max(map(max, scheduled))
        return [[longest] * len(of_stage) for of_stage in scheduled]


@dataclass(frozen=True, repr=False)
class PipeMare(Continuous):
    """Lowers the rate of delayed stages at the start, and corrects the weights of backwards (Yang et al. 2019, 1910.05124).

    Forward and backward of a microbatch both read the newest version, which is updated `delay` times in between. The backward
    subtracts `delay` times d, the moving average of updates, to approximate the weights of its forward::

        rate of step k:       rate / delay^p    with p = 1 - min(k / steps, 1)
        backward of W[t] at:  W[t] - delay d[t]
        d[t+1] = c d[t] + (1 - c) (W[t+1] - W[t])    with c = decay^(1 / delay)

    `delay` in the rate is the stage's longest; stages without delay use the given rate. `steps` counts steps of the run, each
    of which updates the weights once per microbatch, or once with `update='step'`.
    """

    rate_by_stage: ClassVar[bool] = True
    corrects: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    steps: int
    decay: float = 0.135

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(steps=check_integer("steps", self.steps, 1), decay=check_real("decay", self.decay, 0, 1))
        if self.decay == 1:
            raise ValueError("`decay` must be below 1, or the average of updates stays zero, but got 1.")

    def rate(self, rate: float, delay: int, step: int) -> float:
        power = 1 - min(step / self.steps, 1)
        return rate / float(max(delay, 1) ** power)

    def corrected(self, newest: Weights, memory: Memory, delay: int) -> Weights:
        return {name: x - delay * memory[f"{MOVEMENT}{name}"] if memory else x for name, x in newest.items()}

    def remember(self, before: Weights, after: Weights, memory: Memory, delay: int) -> Memory:
        kept = self.decay ** (1 / max(delay, 1))
        moved = {name: (1 - kept) * (x - before[name]) for name, x in after.items()}
        if memory:
            moved = {name: kept * memory[f"{MOVEMENT}{name}"] + x for name, x in moved.items()}
        return {f"{MOVEMENT}{name}": x for name, x in moved.items()}

    def num_copies(self, delays: Sequence[int]) -> int:
        longest = max(delays)
        return longest + 2 * bool(longest)  # the moving average, and the weights of one backward


@dataclass(frozen=True, repr=False)
class Predicted(Continuous):
    """Reads the newest version extrapolated by `delay` optimiser steps, in a forward and its backward::

        forward and backward at:  V = W[t - delay] - delay rate u[t - delay]
        W[t+1] = W[t] - rate grad f(V)

    With sgd, u is the momentum (SpecTrain, Chen et al. 2018, 1809.02839). With adam and adamw it is their step, m / (sqrt(v) +
    epsilon) with bias correction of both means (XPipe, Guan et al. 2019, 1911.04610).
    """

    predicts: ClassVar[bool] = True

    def check(self, in_flight: int, num_microbatches: int, optimizer: str, momentum: float | None) -> None:
        if optimizer not in ("sgd", *ADAPTIVE):
            raise ValueError(
                f"`optimizer.name` must be sgd, {' or '.join(ADAPTIVE)} with {self!r}, which predicts by their direction, "
                f"but got {optimizer!r}."
            )
        if optimizer == "sgd" and not momentum:
            raise ValueError(
                f"`optimizer.momentum` must be above 0 with {self!r}, which predicts by it, but got {momentum}."
            )

    def predicted(self, newest: Weights, directions: Weights, rate: float, delay: int) -> Weights:
        return {
            name: x - (delay * rate) * directions[name] if name in directions else x.clone()
            for name, x in newest.items()
        }

    def num_copies(self, delays: Sequence[int]) -> int:
        lengths = {delay for delay in delays if delay}
        return len(lengths) * (max(delays) + 1)


POLICIES: dict[str, type[WeightPolicy]] = {
    cls.name(): cls for cls in (Synchronous, PostValidated, Stashed, DoubleBuffered, PipeMare, Predicted)
}


def parse_weights(text: str) -> WeightPolicy:
    """Parse the notation of a weight policy; the inverse of `repr`. Raises ValueError listing the known names.

    >>> parse_weights("Stashed"), parse_weights("PipeMare(steps=100)")
    (Stashed, PipeMare(100))
    """
    return parse(text, POLICIES, kind="weight policy")
