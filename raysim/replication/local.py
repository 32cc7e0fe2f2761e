"""Local steps: replicas train apart, and agree on new parameters once in many steps."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from raysim.codecs.message import Entry
from raysim.codecs.work import count_work
from raysim.notation import check_integer, check_real
from raysim.replication.base import (
    AGREED,
    Averaged,
    Gradients,
    Memory,
    Received,
    ReplicaContext,
    ReplicaMethod,
    Round,
)
from raysim.replication.gathered import Dense, as_method

CHANGES = "changes/"  # prefix of the memory of the method that averages changes


@dataclass(frozen=True, repr=False)
class LocalSteps(ReplicaMethod):
    """Base of methods that average once in `steps` steps how far replicas have gone, and take an outer step by that.

    Evaluated are the parameters on which replicas agreed last.
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
        """The method that averages changes over replicas; exchanges are its steps."""

    @property
    def outer_momentum(self) -> float:
        """The momentum of outer steps."""
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
                f"`steps` of {self!r} must divide the {num_steps} steps of the run, whose last ones would be lost, "
                f"but got {self.steps}."
            )

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        values = sum(math.prod(shape) for shape in shapes.values())
        return 4 * values * (1 + bool(self.outer_momentum)) + self.changes.memory_bytes(shapes)

    def average(
        self, gradients: Gradients, memory: Memory, context: ReplicaContext
    ) -> Generator[Round, Received, Averaged]:
        if self.part(context.step) is None:
            return Averaged({}, memory)
        mean, moved = yield from self.mean_change(gradients, memory, context, CHANGES)
        after, outer = self.outer_step(mean, memory)
        return Averaged({}, {**moved, **outer}, parameters=after)

    def mean_change(
        self, parameters: Gradients, memory: Memory, context: ReplicaContext, prefix: str
    ) -> Generator[Round, Received, tuple[Gradients, Memory]]:
        """Return the mean over replicas of the way to `parameters` from those agreed on, and the memory that follows.

        The memory of the method that averages is kept under `prefix`.
        """
        gone = {name: memory[f"{AGREED}/{name}"].view_as(x) - x for name, x in parameters.items()}
        count_work(2 * sum(x.nbytes for x in gone.values()))  # the change, and the outer step
        kept = {name.removeprefix(prefix): x for name, x in memory.items() if name.startswith(prefix)}
        inside = context._replace(step=context.step // self.steps, momentum=0.0, parameters=None, previous=None)
        averaged = yield from self.changes.average(gone, kept, inside)
        return averaged.gradients, {**memory, **{f"{prefix}{name}": x for name, x in averaged.memory.items()}}

    def outer_step(self, mean: Gradients, memory: Memory) -> tuple[Gradients, Memory]:
        """Return the parameters after the outer step by a mean change, and the memory for the next one."""
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


@dataclass(frozen=True, repr=False)
class DiLoCo(LocalSteps):
    """Averages once in `steps` steps how far replicas have gone, and takes an outer step of Nesterov's momentum there.

    After H = `steps` steps of its own optimiser, replica r has gone from the parameters W, on which all agreed last, to W_r
    (Douillard et al. 2023, 2311.08105)::

        D = mean over replicas of (W - W_r)
        u = momentum u + rate D
        W = W - momentum u - rate D

    `codec` compresses W - W_r: a codec, alone or under error feedback, or a replica method that averages gradients. It counts
    exchanges as its steps. States of the optimisers stay apart. Evaluated are the parameters W. With one replica and no
    momentum it is the look-ahead optimiser (Zhang et al. 2019, 1907.08610).

    >>> from raysim.codecs import Quantize
    >>> [step for step in range(8) if DiLoCo(4, codec=Quantize(4)).part(step) is not None]
    [3, 7]
    """

    rate: float = 0.7
    momentum: float = 0.9
    codec: ReplicaMethod = Dense()  # noqa: RUF009  a frozen method

    def __post_init__(self) -> None:
        super().__post_init__()
        momentum = check_real("momentum", self.momentum, 0, 1)
        if momentum == 1:
            raise ValueError("`momentum` must be below 1, or the outer steps never end, but got 1.")
        method = as_method(self.codec)
        if method is None or method.decentralized or method.uses_previous_gradients or method.needs:
            raise ValueError(
                "`codec` must be a codec, alone or under error feedback, or a replica method that averages by gradients "
                f"alone, but got {self.codec!r}."
            )
        self._coerce(momentum=momentum, codec=method)

    @property
    def changes(self) -> ReplicaMethod:
        return self.codec

    @property
    def outer_momentum(self) -> float:
        return self.momentum


@dataclass(frozen=True, repr=False)
class MuLoCo(DiLoCo):
    """DiLoCo with Muon as the optimiser of each replica, and the outer momentum that its authors chose for it (Thérien et al.
    2025, 2505.23725; in their code 30 steps).
    """

    optimizers: ClassVar[frozenset[str] | None] = frozenset({"muon"})

    momentum: float = 0.6
