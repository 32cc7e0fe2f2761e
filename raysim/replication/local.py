"""Local steps: replicas train separately and average parameters every N steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from raysim.codecs.codec import count_work
from raysim.codecs.message import Entry
from raysim.notation import check_integer, check_real
from raysim.replication.gathered import Dense, as_method
from raysim.replication.method import (
    AGREED,
    Averaged,
    Gradients,
    Memory,
    ReplicaContext,
    ReplicaMethod,
    Rounds,
    num_values,
)

CHANGES = "changes/"  # memory prefix of the method that averages changes


@dataclass(frozen=True, repr=False)
class LocalSteps(ReplicaMethod):
    """Base of methods that average the parameter changes of replicas every `steps` steps and take an outer step with the mean.

    Evaluations use the last agreed parameters.
    """

    after_update: ClassVar[bool] = True
    decentralized: ClassVar[bool] = True
    works_alone: ClassVar[bool] = True

    steps: int
    rate: float

    def __post_init__(self) -> None:
        self._coerce(
            steps=check_integer("steps", self.steps, 1), rate=check_real("rate", self.rate, 0, 100, open_low=True)
        )

    @property
    @abstractmethod
    def changes(self) -> ReplicaMethod:
        """The method that averages changes over replicas; each exchange is one of its steps."""

    @property
    def exact(self) -> bool:
        return self.changes.exact

    @property
    def outer_momentum(self) -> float:
        return 0.0

    def part(self, step: int) -> int | None:
        return 0 if (step + 1) % self.steps == 0 else None

    @property
    def period(self) -> int:
        return self.steps

    def num_rounds(self, num_replicas: int) -> int:
        return self.changes.num_rounds(num_replicas)

    def entries(self) -> tuple[Entry, ...]:
        return self.changes.entries()

    def begin(self, parameters: Gradients) -> Memory:
        return {f"{AGREED}/{name}": x.detach().clone() for name, x in parameters.items()}

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        self.changes.check(shapes, num_replicas, None)

    def check_steps(self, num_steps: int) -> None:
        if num_steps % self.steps:
            raise ValueError(
                f"`steps` of {self!r} must divide the {num_steps} steps of the run, or its last steps would never be averaged, "
                f"but got {self.steps}."
            )

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 4 * num_values(shapes) * (1 + bool(self.outer_momentum)) + self.changes.memory_bytes(shapes)

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        if self.part(context.step) is None:
            return Averaged({}, memory)
        mean, moved = yield from self.mean_change(gradients, memory, context, CHANGES)
        after, outer = self.outer_step(mean, memory)
        return Averaged({}, {**moved, **outer}, parameters=after)

    def mean_change(
        self, parameters: Gradients, memory: Memory, context: ReplicaContext, prefix: str
    ) -> Rounds[tuple[Gradients, Memory]]:
        """Return the mean over replicas of the change from the agreed parameters to `parameters`, and the new memory.

        The averaging method's memory is kept under `prefix`.
        """
        gone = {name: memory[f"{AGREED}/{name}"].view_as(x) - x for name, x in parameters.items()}
        count_work(2 * sum(x.nbytes for x in gone.values()))  # the change, and the outer step
        kept = {name.removeprefix(prefix): x for name, x in memory.items() if name.startswith(prefix)}
        inside = context._replace(step=context.step // self.steps, momentum=0.0, parameters=None)
        averaged = yield from self.changes.average(gone, kept, inside)
        return averaged.gradients, {**memory, **{f"{prefix}{name}": x for name, x in averaged.memory.items()}}

    def outer_step(self, mean: Gradients, memory: Memory) -> tuple[Gradients, Memory]:
        """Return the parameters after the outer step with a mean change, and the new memory."""
        after, outer = {}, {}
        for name, x in mean.items():
            change = self.rate * x
            if self.outer_momentum:
                kept = memory.get(f"velocity/{name}")
                velocity = change if kept is None else self.outer_momentum * kept.view_as(x) + change
                outer[f"velocity/{name}"] = velocity
                change = change + self.outer_momentum * velocity
            after[name] = outer[f"{AGREED}/{name}"] = memory[f"{AGREED}/{name}"].view_as(x) - change
        return after, outer


def check_momentum(field: str, value: object) -> float:
    """Return the outer momentum; raises ValueError if it is not in [0, 1)."""
    momentum = check_real(field, value, 0, 1)
    if momentum == 1:
        raise ValueError(f"`{field}` must be below 1, or the outer steps do not converge, but got 1.")
    return momentum


@dataclass(frozen=True, repr=False)
class DiLoCo(LocalSteps):
    """Averages the changes of replicas every `steps` steps, and takes an outer step with Nesterov momentum.

    In H = `steps` steps of its own optimiser, replica r moves from the last agreed parameters W to W_r (Douillard et
    al. 2023, 2311.08105)::

        D = mean over replicas of (W - W_r)
        u = momentum u + rate D
        W = W - momentum u - rate D

    `codec` compresses W - W_r: a codec with or without error feedback, or a replica method for gradients, with one of
    its steps per exchange. Optimiser states are not averaged. Evaluations use W. With one replica and no momentum this
    is the Lookahead optimiser (Zhang et al. 2019, 1907.08610).

    >>> from raysim.codecs import Quantize
    >>> [step for step in range(8) if DiLoCo(4, codec=Quantize(4)).part(step) is not None]
    [3, 7]
    """

    rate: float = 0.7
    momentum: float = 0.9
    codec: ReplicaMethod = Dense()  # noqa: RUF009  a frozen method

    def __post_init__(self) -> None:
        super().__post_init__()
        method = as_method(self.codec)
        if method is None or method.decentralized or method.needs:
            raise ValueError(
                "`codec` must be a codec, alone or under error feedback, or a replica method that averages gradients "
                f"only, but got {self.codec!r}."
            )
        self._coerce(momentum=check_momentum("momentum", self.momentum), codec=method)

    @property
    def changes(self) -> ReplicaMethod:
        return self.codec

    @property
    def outer_momentum(self) -> float:
        return self.momentum
