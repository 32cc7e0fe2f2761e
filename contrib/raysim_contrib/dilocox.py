"""DiLoCoX: local steps with a delayed outer step and coded low-rank factors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.codecs import Codec, Quantize, derive_key
from raysim.codecs.codec import cast_saturating, check_finite, check_is_codec, count_work
from raysim.codecs.lowrank import check_rank
from raysim.codecs.message import Entry
from raysim.notation import check_integer
from raysim.on_demand import torch
from raysim.replication.layers import Layered, gather_mean, key_of, remembered
from raysim.replication.local import LocalSteps, check_momentum
from raysim.replication.low_rank import matrix_of, orthonormal_float32, side_columns
from raysim.replication.method import AGREED, Averaged, Gradients, Memory, ReplicaContext, ReplicaMethod, Rounds

if TYPE_CHECKING:
    from torch import Tensor

_RANKS = "ranks"  # memory: the effective ranks of the last window, then the current rank


@dataclass(frozen=True, repr=False)
class DiLoCoX(LocalSteps):
    """DiLoCo with changes in coded low-rank factors, and an outer step delayed by one exchange (Qi et al. 2025, 2506.21263).

    In exchange t, with W - W_r the change of replica r in `steps` steps, e its residual, P orthonormal and C the codec `values`::

        M_r = W - W_r + e_r;   P = orth(mean of C(M_r Q));   Q_r = C(M_r^T P);   Q = mean of Q_r;   e_r = M_r - P Q_r^T
        D_t = P Q^T;   u = momentum u + rate D_(t-1);   W = W - momentum u - rate D_(t-1)

    So an exchange may take as long as the following `steps` steps. `delay=0` uses D_t. With `rank=None`, or if the factors would
    not be smaller, C(M_r) itself is sent. After every `window` exchanges the rank falls to the mean effective rank of D: e to the
    entropy of the columns' shares of Q's energy (ours). `window=0` keeps the rank.

    Use: Local steps that never wait for an exchange, at a few kilobytes each.

    >>> DiLoCoX(125, rank=64).steps_under_way
    125
    """

    variants: ClassVar[tuple[str, ...]] = ("DiLoCoX(20, rank=64)",)

    rate: float = 0.7
    momentum: float = 0.9
    rank: int | None = None
    values: Codec = Quantize(4)  # noqa: RUF009  a frozen codec
    window: int = 5
    delay: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_is_codec("values", self.values)
        self.values.check_feedback()
        self._coerce(
            momentum=check_momentum("momentum", self.momentum),
            rank=None if self.rank is None else check_integer("rank", self.rank, 1),
            window=check_integer("window", self.window, 0),
            delay=check_integer("delay", self.delay, 0, 1),
        )

    @property
    def changes(self) -> ReplicaMethod:
        return CodedFactors(self.rank, self.values, self.window)

    @property
    def outer_momentum(self) -> float:
        return self.momentum

    @property
    def steps_under_way(self) -> int:
        return self.delay * self.steps

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return super().memory_bytes(shapes) + 4 * self.delay * sum(math.prod(shape) for shape in shapes.values())

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        if not self.delay or self.part(context.step) is None:
            return (yield from super().average(gradients, memory, context))
        mean = yield from self.mean_change(gradients, memory, context, "changes/")
        if all(f"waiting/{name}" in memory for name in gradients):
            late = {name: memory[f"waiting/{name}"].view_as(x) for name, x in gradients.items()}
            after, outer = self.outer_step(late, memory)
        else:
            after, outer = {name: memory[f"{AGREED}/{name}"].view_as(x) for name, x in gradients.items()}, {}
        waiting = {f"waiting/{name}": x for name, x in mean.gradients.items()}
        return Averaged({}, {**mean.memory, **outer, **waiting}, mean.decisions, parameters=after)


@dataclass(frozen=True, repr=False)
class CodedFactors(Layered):
    """Sends coded factors of the input plus the residual, see `DiLoCoX`."""

    rank: int | None
    values: Codec
    window: int

    def entries(self) -> tuple[Entry, ...]:
        return (Entry.of(self.values),)

    def compressed_rounds(self, num_replicas: int) -> int:
        return 1 if self.rank is None else 2

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        if self.rank is None:
            self.values.check_shapes(self.compressed_shapes(shapes))
        else:
            check_rank(self.rank, self.compressed_shapes(shapes))

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        sides = (matrix_of(shape) for shape in self.compressed_shapes(shapes).values())
        thin = sum(n * self._factor_rank((m, n), self.rank) for m, n in sides)
        return super().memory_bytes(shapes) + 4 * thin + 8 * (self.window + 1) * bool(self.window and self.rank)

    def _factor_rank(self, sides: tuple[int, int], rank: int | None) -> int:
        """Return the rank at which a matrix is sent; 0 if its factors would not be smaller."""
        m, n = sides
        rank = min(m, n, rank or 0)
        return rank if rank * (m + n) < m * n else 0

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        rank = self._rank(memory)
        fed = {name: x + remembered(memory, "residual", name, x) for name, x in gradients.items()}
        for x in fed.values():
            check_finite(x)
        matrices = {
            name: x.reshape(len(x), -1).double()
            for name, x in fed.items()
            if self._factor_rank(matrix_of(tuple(x.shape)), rank)
        }
        count_work(4 * sum(x.nbytes for x in fed.values()))
        starts = {name: self._start(name, m, rank, memory, context) for name, m in matrices.items()}
        whole = {name: x for name, x in fed.items() if name not in matrices}
        lefts, _ = yield from self._exchange("left", {name: m @ starts[name] for name, m in matrices.items()}, context)
        bases = {name: orthonormal_float32(left.double()) for name, left in lefts.items()}
        rights = {name: m.T @ bases[name] for name, m in matrices.items()}
        means, own = yield from self._exchange("right", {**rights, **whole}, context)
        averaged, moved = {}, dict(memory)
        for name, x in fed.items():
            if name in matrices:
                averaged[name] = cast_saturating(bases[name] @ means[name].double().T, torch.float32).view_as(x)
                moved[f"right/{name}"] = means[name]
                sent = (bases[name] @ own[name].double().T).float().view_as(x)
            else:
                averaged[name], sent = means[name], own[name]
            moved[f"residual/{name}"] = x - sent
        return Averaged(averaged, moved | self._ranks({name: means[name] for name in matrices}, rank, memory))

    def _exchange(self, side: str, own: Gradients, context: ReplicaContext) -> Rounds[tuple[Gradients, Gradients]]:
        """Return the means of coded tensors over replicas, and this replica's decoded tensors."""
        if not own:
            return {}, {}
        packets = {}
        for name, x in own.items():
            rows = len(x) if self.values.by_matrix else 1
            thin = cast_saturating(x, torch.float32)
            packets[name] = self.values.encode(thin.reshape(rows, -1), key_of(f"{side} {name}", context))
        device = next(iter(own.values())).device
        means = yield from gather_mean(packets, device)
        decoded = {name: packets[name].decode(device).view_as(x) for name, x in own.items()}
        return {name: means[name].view_as(x) for name, x in own.items()}, decoded

    def _start(self, name: str, matrix: Tensor, rank: int | None, memory: Memory, context: ReplicaContext) -> Tensor:
        """Return the right side of the last exchange, or a random one, the same at all replicas."""
        factor_rank = self._factor_rank((matrix.shape[0], matrix.shape[1]), rank)
        key = derive_key(context.seed, "DiLoCoX", context.stage, name)
        return side_columns(memory.get(f"right/{name}"), matrix, "right", factor_rank, key)

    def _rank(self, memory: Memory) -> int | None:
        return int(memory[_RANKS][-1]) if _RANKS in memory else self.rank

    def _ranks(self, rights: Gradients, rank: int | None, memory: Memory) -> Memory:
        """Return the memory of effective ranks after an exchange with these right sides."""
        if not self.window or rank is None or not rights:
            return {}
        seen = memory[_RANKS][:-1].tolist() if _RANKS in memory else []
        seen.append(sum(map(effective_rank, rights.values())) / len(rights))
        if len(seen) == self.window:
            rank, seen = max(1, min(rank, math.ceil(sum(seen) / len(seen)))), []
        return {_RANKS: torch.tensor([*seen, rank], dtype=torch.float64)}


def effective_rank(right: Tensor) -> float:
    """Return e to the entropy of the columns' shares of the energy; 1 for a matrix of zeros.

    >>> round(effective_rank(torch.eye(6)[:, :3]), 6), round(effective_rank(torch.tensor([[3.0, 0.0]])), 6)
    (3.0, 1.0)
    """
    energy = right.double().square().sum(dim=0)
    if not float(energy.sum()):
        return 1.0
    return math.exp(float(torch.special.entr(energy / energy.sum()).sum()))
