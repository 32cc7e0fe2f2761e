"""Local steps: replicas train separately and average parameters, or the largest changes of blocks, every N steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.codecs import Codec, NonUniform, TopK
from raysim.codecs.codec import count_work
from raysim.codecs.message import Entry
from raysim.notation import check_integer, check_real
from raysim.replication.gathered import Dense, as_method
from raysim.replication.layers import Layered, gather_mean, key_of, remembered
from raysim.replication.low_rank import matrix_of
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

if TYPE_CHECKING:
    from torch import Tensor


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
        mean = yield from self.mean_change(gradients, memory, context, CHANGES)
        after, outer = self.outer_step(mean.gradients, memory)
        return Averaged({}, {**mean.memory, **outer}, mean.decisions, parameters=after)

    def mean_change(
        self, parameters: Gradients, memory: Memory, context: ReplicaContext, prefix: str
    ) -> Rounds[Averaged]:
        """Return the mean over replicas of the change from the agreed parameters to `parameters`, with the new memory.

        The averaging method's memory is kept under `prefix`.
        """
        gone = {name: memory[f"{AGREED}/{name}"].view_as(x) - x for name, x in parameters.items()}
        count_work(2 * sum(x.nbytes for x in gone.values()))  # the change, and the outer step
        kept = {name.removeprefix(prefix): x for name, x in memory.items() if name.startswith(prefix)}
        inside = context._replace(step=context.step // self.steps, momentum=0.0, parameters=None)
        averaged = yield from self.changes.average(gone, kept, inside)
        moved = {**memory, **{f"{prefix}{name}": x for name, x in averaged.memory.items()}}
        return Averaged(averaged.gradients, moved, averaged.decisions)

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


def block_of(shape: tuple[int, ...], side: int) -> tuple[int, int]:
    """Return the rows and columns of a tensor's blocks: the largest divisors, up to `side`, of its sides as a matrix.

    >>> block_of((128, 64, 3, 3), 64), block_of((151, 96), 64), block_of((10,), 64)
    ((64, 64), (1, 48), (10, 1))
    """
    rows, columns = matrix_of(shape)
    return divisor(rows, side), divisor(columns, side)


def divisor(count: int, limit: int) -> int:
    """Return the largest divisor of `count` up to `limit`."""
    return next(size for size in range(min(count, limit), 0, -1) if count % size == 0)


def to_blocks(x: Tensor, side: int) -> Tensor:
    """Return the blocks of a tensor as (blocks, rows, columns)."""
    rows, columns = matrix_of(tuple(x.shape))
    height, width = block_of(tuple(x.shape), side)
    cut = x.reshape(rows // height, height, columns // width, width)
    return cut.transpose(1, 2).reshape(-1, height, width)


def from_blocks(blocks: Tensor, shape: tuple[int, ...], side: int) -> Tensor:
    """Return the tensor from its blocks, which may be flat (blocks, values); the inverse of `to_blocks`."""
    rows, columns = matrix_of(shape)
    height, width = block_of(shape, side)
    cut = blocks.reshape(rows // height, columns // width, height, width)
    return cut.transpose(1, 2).reshape(shape)


def checked_blocks(kept: object, side: object, decay: object) -> dict[str, float]:
    """Check the settings of a method that selects `kept` values per block, with `decay`, and return them."""
    limit = check_integer("side", side, 1, 4096)
    return {
        "side": limit,
        "kept": check_integer("kept", kept, 1, limit * limit),
        "decay": check_real("decay", decay, 0, 1),
    }


_TWO_BITS = NonUniform(2, fit="deviation")


@dataclass(frozen=True, repr=False)
class SparseLoCo(LocalSteps):
    """Takes local steps and sends the `kept` largest values of their changes in each `side` x `side` block, with error feedback
    (Sarfi et al. 2025, 2508.15706; block size and codec as in templar's code).

    With W - W_r the change of replica r over `steps` steps, and C the codec::

        e = decay e + (W - W_r);   send C(e);   e = e - C(e)
        W = W - rate (mean over replicas of C(e))

    `values` is the codec of kept values: by default two bits, equally wide buckets within three standard deviations, each decoded
    to its mean. The sides of a block are the largest divisors of the matrix's sides up to `side`. Tensors of one dimension or with
    fewer than `min_values` values are dense (ours).
    """

    rate: float = 0.6
    decay: float = 0.95
    kept: int = 64
    side: int = 64
    values: Codec = _TWO_BITS
    min_values: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks = self.changes
        assert isinstance(blocks, BlockTopK)
        self._coerce(decay=blocks.decay, kept=blocks.kept, side=blocks.side, min_values=blocks.min_values)

    @property
    def changes(self) -> ReplicaMethod:
        return BlockTopK(self.kept, self.side, self.decay, self.values, min_values=self.min_values)


@dataclass(frozen=True, repr=False)
class BlockTopK(Layered):
    """Sends the `kept` largest values of each `side` x `side` block of the input plus `decay` times the residual."""

    kept: int
    side: int
    decay: float
    values: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(**checked_blocks(self.kept, self.side, self.decay))
        self.codec(self.side * self.side).check_feedback()  # also rejects what is no codec

    def codec(self, block_values: int) -> TopK:
        return TopK(min(1.0, self.kept / block_values), values=self.values)

    def entries(self) -> tuple[Entry, ...]:
        return (Entry.of(self.codec(self.side * self.side)),)

    def compressed_rounds(self, num_replicas: int) -> int:
        return 1

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        packets, moved = {}, dict(memory)
        for name, x in gradients.items():
            fed = to_blocks(self.decay * remembered(memory, "residual", name, x) + x, self.side).flatten(1)
            packets[name] = self.codec(fed.shape[1]).encode(fed, key_of(name, context))
            moved[f"residual/{name}"] = from_blocks(fed - packets[name].decode(fed.device), tuple(x.shape), self.side)
        means = yield from gather_mean(packets, next(iter(gradients.values())).device)
        averaged = {name: from_blocks(means[name], tuple(x.shape), self.side) for name, x in gradients.items()}
        return Averaged(averaged, moved)
