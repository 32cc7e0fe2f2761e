"""PowerSGD and PowerGossip: low-rank products that average gradients over replicas or parameters with neighbours."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeAlias

from raysim.codecs import Identity, derive_key, lowrank
from raysim.codecs.codec import cast_saturating, check_finite, count_work
from raysim.codecs.draws import uniform
from raysim.codecs.lowrank import check_rank
from raysim.notation import check_choice, check_flag, check_integer, check_real
from raysim.on_demand import torch
from raysim.replication.layers import Layered, remembered
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, RoundPackets, Rounds, sum_tensors

if TYPE_CHECKING:
    from torch import Tensor


class _LowRank(NamedTuple):
    """A float64 matrix as two thin ones, multiplied where it is used."""

    left: Tensor
    right: Tensor
    transposed: bool = False

    def product(self) -> Tensor:
        wide = self.left @ self.right.T
        return wide.T if self.transposed else wide


_Approximation: TypeAlias = "Rounds[tuple[dict[str, _LowRank], dict[str, _LowRank], Memory]]"


@dataclass(frozen=True, repr=False)
class PowerSGD(Layered):
    """Approximates the mean of M by P (M^T P)^T: averages P = M Q, makes P orthonormal, then averages M^T P (Vogels et
    al. 2019, 1905.13727).

    M is the gradient plus the residual, as (first axis, the rest). Q is M^T P of the previous step (`warm_start`); the first Q is
    random, the same on all replicas. The residual is M minus the averaged approximation, or with `error="own"` minus the replica's
    own. `alternate` averages the two matrices in alternating steps. A tensor is dense unless the two thin matrices are
    `min_compression` times smaller. The method is linear. Computed in float64, sent in float32.

    >>> PowerSGD(4, warmup=100)
    PowerSGD(4, warmup=100)
    """

    rank: int
    min_compression: float = 2.0
    warm_start: bool = True
    error: str = "average"
    feedback: bool = True
    alternate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(
            rank=check_integer("rank", self.rank, 1),
            min_compression=check_real("min_compression", self.min_compression, 0, 1e9),
        )
        check_choice("error", self.error, ["average", "own"])
        for field in ("warm_start", "feedback", "alternate"):
            check_flag(field, getattr(self, field))
        if self.alternate and not self.warm_start:
            raise ValueError("`alternate` uses the last step's matrices, so `warm_start` must be True.")

    def exempts(self, shape: tuple[int, ...]) -> bool:
        if super().exempts(shape):
            return True
        rows, columns = matrix_of(shape)
        return rows * columns <= self.min_compression * min(rows, columns, self.rank) * (rows + columns)

    @property
    def by_bucket(self) -> bool:
        return True

    @property
    def common_memory(self) -> bool:
        return not self.feedback

    def compressed_rounds(self, num_replicas: int) -> int:
        return 2 if self.alternate else 4

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        check_rank(
            self.rank, {name: shape for name, shape in shapes.items() if not super(PowerSGD, self).exempts(shape)}
        )

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        values = self.compressed_values(shapes) if self.feedback else 0
        for shape in self.compressed_shapes(shapes).values():
            rows, columns = matrix_of(shape)
            values += min(rows, columns, self.rank) * (columns + (rows if self.alternate else 0)) * self.warm_start
        return 4 * values

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        matrices = {}
        for name, gradient in gradients.items():
            check_finite(gradient)
            held = remembered(memory, "residual", name, gradient) if self.feedback else torch.zeros_like(gradient)
            matrices[name] = (gradient + held).reshape(len(gradient), -1)
        products = 3 if self.alternate else 4  # one per sent side, one for the mean, one for the residual
        count_work(products * sum(gradient.nbytes for gradient in gradients.values()))
        rounds = self._one_side if self.alternate else self._both_sides
        mean, own, sides = yield from rounds(matrices, memory, context)
        averaged, moved = {}, {**memory, **sides}
        for name, gradient in gradients.items():
            m = matrices.pop(name)
            averaged[name] = cast_saturating(mean[name].product(), torch.float32).view_as(gradient)
            if not self.feedback:
                continue
            if self.error == "average":
                m.sub_(averaged[name].view_as(m))
            else:
                m = m.double().sub_(own[name].product()).float()
            moved[f"residual/{name}"] = m.view_as(gradient)
        return Averaged(averaged, moved)

    def _both_sides(self, matrices: Gradients, memory: Memory, context: ReplicaContext) -> _Approximation:
        """Return the approximations of the mean and of this replica's matrices, and the sides to store."""
        start = {name: self._start(name, "right", m, memory, context) for name, m in matrices.items()}
        left = yield from mean_sides(
            f"left of rank {self.rank}", {name: m.double() @ start[name] for name, m in matrices.items()}, context
        )
        bases = {name: orthonormal_float32(mean) for name, mean in left.items()}
        own = {
            name: (bases[name].T @ m.double()).T for name, m in matrices.items()
        }  # BLAS is slow if the long matrix is transposed
        right = yield from mean_sides(f"right of rank {self.rank}", own, context)
        sides = {f"right/{name}": mean.float() for name, mean in right.items()} if self.warm_start else {}
        mean, mine = ({name: _LowRank(bases[name], x) for name, x in thin.items()} for thin in (right, own))
        return mean, mine, sides

    def _one_side(self, matrices: Gradients, memory: Memory, context: ReplicaContext) -> _Approximation:
        """Return the same from one averaged side: a projection onto the span of the other side from the previous step."""
        side, other = ("left", "right") if context.step % 2 == 0 else ("right", "left")
        turned = matrices if side == "left" else {name: m.T for name, m in matrices.items()}
        bases = {
            name: orthonormal_float32(self._start(name, other, m, memory, context)) for name, m in matrices.items()
        }
        own = {name: m.double() @ bases[name] for name, m in turned.items()}
        mean = yield from mean_sides(f"{side} of rank {self.rank}", own, context)
        both, mine = (
            {name: _LowRank(x, bases[name], side == "right") for name, x in thin.items()} for thin in (mean, own)
        )
        return both, mine, {f"{side}/{name}": x.float() for name, x in mean.items()}

    def _start(self, name: str, side: str, matrix: Tensor, memory: Memory, context: ReplicaContext) -> Tensor:
        """Return a side of `rank` columns from the previous step, or drawn at random."""
        step = 0 if self.warm_start else context.step
        key = derive_key(context.seed, "PowerSGD", context.stage, name, side, step)
        return side_columns(memory.get(f"{side}/{name}") if self.warm_start else None, matrix, side, self.rank, key)


@dataclass(frozen=True, repr=False)
class PowerGossip(Layered):
    """Steps each replica by its own gradient and moves it towards its ring neighbours by low-rank projections of the
    differences (Vogels et al. 2020, 2008.01425).

    X_i += sum over neighbours j of w (X_j - X_i) q q^T, with w = 1/(neighbours + 1). The projection comes from a power
    iteration: p = (X_j - X_i) q is computed from X q, the only matrix sent (`rank` columns in each of `iterations`);
    the next iteration multiplies by the orthonormalised p from the left, and so on alternately. X are the parameters before the
    step. Evaluations use the mean of the replicas. For small tensors (see `min_values`), and for all tensors in the first `warmup`
    steps, gradients are averaged instead. Raises ValueError if `rank` exceeds the rank of every matrix.

    >>> PowerGossip(rank=2).neighbours(0, 4)
    [1, 3]
    """

    decentralized: ClassVar[bool] = True

    rank: int = 1
    iterations: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(
            rank=check_integer("rank", self.rank, 1), iterations=check_integer("iterations", self.iterations, 1)
        )

    def neighbours(self, replica: int, num_replicas: int) -> list[int]:
        """Return the neighbours of a replica in the ring."""
        return sorted({(replica + 1) % num_replicas, (replica - 1) % num_replicas} - {replica})

    def compressed_rounds(self, num_replicas: int) -> int:
        return self.iterations

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        check_rank(self.rank, self.compressed_shapes(shapes))

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        sides = (matrix_of(shape) for shape in self.compressed_shapes(shapes).values())
        return 2 * 4 * sum(min(m, n, self.rank) * (m + n) for m, n in sides)  # for two neighbours

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        for gradient in gradients.values():
            check_finite(gradient)
        done = context.step - self.warmup
        if not done or context.parameters is None:  # until now all replicas are equal
            return Averaged(gradients, memory)
        given = {name: context.parameters[name].detach() for name in gradients}
        matrices = {name: x.reshape(len(x), -1).to(torch.float64, copy=True) for name, x in given.items()}
        products = 2 * len(self.neighbours(context.replica, context.num_replicas))  # to send, and to update
        count_work(self.iterations * products * sum(x.nbytes for x in given.values()))
        moved = dict(memory)
        for iteration in range(done * self.iterations, (done + 1) * self.iterations):
            yield from self._iterate(iteration, matrices, moved, context)
        close = {name: cast_saturating(x, torch.float32).view_as(given[name]) for name, x in matrices.items()}
        return Averaged(gradients, moved, parameters=close)

    def _iterate(self, iteration: int, matrices: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[None]:
        """Move `matrices` towards the neighbours' matrices, and update the sides in `memory`."""
        side, other_side = ("left", "right") if iteration % 2 else ("right", "left")
        me, others = context.replica, self.neighbours(context.replica, context.num_replicas)
        bases = {
            other: {name: self._basis(name, other_side, x, other, memory, context) for name, x in matrices.items()}
            for other in others
        }
        own = {
            other: {
                name: cast_saturating(
                    x @ basis[name] if side == "left" else (basis[name].T @ x).T,  # BLAS is slow if x is transposed
                    torch.float32,
                )
                for name, x in matrices.items()
            }
            for other, basis in bases.items()
        }
        label = f"{side} of rank {self.rank}"
        flat = {other: torch.cat([x.reshape(-1) for x in sides.values()]) for other, sides in own.items()}
        received = yield RoundPackets(each={other: {label: Identity().encode(x)} for other, x in flat.items()})
        for other in others:
            theirs = received[other][label].decode(next(iter(matrices.values())).device)
            parts = torch.split(theirs, [x.numel() for x in own[other].values()])
            for (name, sent), part in zip(own[other].items(), parts, strict=True):
                difference = part.view_as(sent) - sent if me < other else sent - part.view_as(sent)  # equal at both
                memory[f"{side}/{other}/{name}"] = difference
                thin, basis = difference.double(), bases[other][name]
                projected = thin @ basis.T if side == "left" else basis @ thin.T
                matrices[name].add_(projected, alpha=(1 if me < other else -1) / (len(others) + 1))

    def _basis(
        self, name: str, side: str, matrix: Tensor, other: int, memory: Memory, context: ReplicaContext
    ) -> Tensor:
        """Return orthonormal columns, equal at both ends, from the last iteration or drawn before the first."""
        pair = sorted((context.replica, other))
        key = derive_key(context.seed, "PowerGossip", context.stage, name, side, *pair)
        return orthonormal_float32(side_columns(memory.get(f"{side}/{other}/{name}"), matrix, side, self.rank, key))


def mean_sides(name: str, own: Gradients, context: ReplicaContext) -> Rounds[Gradients]:
    """Return the means of thin matrices over replicas in float64, by a single all-reduce of this name."""
    sides = {name: cast_saturating(x, torch.float32) for name, x in own.items()}
    sums = yield from sum_tensors(name, sides, context)
    return {name: x.double() / context.num_replicas for name, x in sums.items()}


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a tensor as a matrix."""
    return shape[0], math.prod(shape[1:])


def side_columns(kept: Tensor | None, matrix: Tensor, side: str, rank: int, key: int) -> Tensor:
    """Return up to `rank` columns for the "left" or "right" side of a matrix: `kept`, orthonormalised, or drawn if it is None.

    Missing and zero columns are replaced by drawn ones.
    """
    length, rank = matrix.shape[1 if side == "right" else 0], min(*matrix.shape, rank)
    drawn = uniform(key, length * rank, matrix.device).view(length, rank) * 2 - 1
    if kept is None:
        return drawn
    kept = orthonormal_float32(kept.to(drawn.device)[:, :rank])  # a method may adapt the rank
    width = kept.shape[1]
    alive = kept.any(dim=0)  # a zero column would stay zero
    return torch.cat([torch.where(alive, kept, drawn[:, :width]), drawn[:, width:]], dim=1)


def orthonormal_float32(x: Tensor) -> Tensor:
    """Orthonormalise the columns of `x`, in float32; dependent columns become zero."""
    return lowrank.orthonormal(x[None])[0].float().double()
