"""PowerSGD: replica gradients as products of two thin matrices, each of which adds up over replicas."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysim.codecs import derive_key, lowrank
from raysim.codecs.codec import cast_saturating, check_finite, count_work
from raysim.codecs.draws import uniform
from raysim.codecs.lowrank import check_rank
from raysim.notation import check_choice, check_flag, check_integer, check_real
from raysim.on_demand import torch
from raysim.replication.layers import Layered, remembered
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, Rounds, all_reduce

if TYPE_CHECKING:
    from torch import Tensor

_Approximation = Rounds[tuple[Gradients, Gradients, Memory]]


@dataclass(frozen=True, repr=False)
class PowerSGD(Layered):
    """Approximates the mean of M by P (M^T P)^T: averages P = M Q, makes P orthonormal, then averages M^T P (Vogels et
    al. 2019, 1905.13727).

    M is the gradient plus the residual, as (first axis, the rest). Q is M^T P of the previous step (`warm_start`); the
    first Q is random, the same on all replicas. The residual is M minus the averaged approximation, or with
    `error="own"` minus the replica's own approximation. `alternate` averages only one of the two matrices in each step,
    in turn. A tensor is sent uncompressed unless the two thin matrices are `min_compression` times smaller. The method
    is linear: the result equals that of one replica with the mean gradient. Computed in float64, sent in float32.

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
            raise ValueError("`alternate` goes on from the last step's matrices, so `warm_start` must be True.")

    def exempts(self, shape: tuple[int, ...]) -> bool:
        if super().exempts(shape):
            return True
        rows, columns = matrix_of(shape)
        return rows * columns <= self.min_compression * min(rows, columns, self.rank) * (rows + columns)

    @property
    def by_bucket(self) -> bool:
        return True

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
            matrices[name] = (gradient + held).reshape(len(gradient), -1).double()
        products = 3 if self.alternate else 4  # for each side that is sent, for the mean, and for the residual
        count_work(products * sum(gradient.nbytes for gradient in gradients.values()))
        rounds = self._one_side if self.alternate else self._both_sides
        mean, own, sides = yield from rounds(matrices, memory, context)
        averaged, moved = {}, {**memory, **sides}
        for name, gradient in gradients.items():
            averaged[name] = cast_saturating(mean[name], torch.float32).view_as(gradient)
            if self.feedback:
                m = matrices[name]
                taken = averaged[name].reshape(m.shape) if self.error == "average" else own[name]
                moved[f"residual/{name}"] = m.sub_(taken).float().view_as(gradient)
        return Averaged(averaged, moved)

    def _both_sides(self, matrices: Gradients, memory: Memory, context: ReplicaContext) -> _Approximation:
        """Return the approximations of the mean and of this replica's matrices, and the sides to remember."""
        start = {name: self._start(name, "right", m, memory, context) for name, m in matrices.items()}
        left = yield from mean_sides(
            f"left of rank {self.rank}", {name: m @ start[name] for name, m in matrices.items()}, context
        )
        bases = {name: orthonormal(mean) for name, mean in left.items()}
        own = {
            name: (bases[name].T @ m).T for name, m in matrices.items()
        }  # BLAS is slow if the long matrix is transposed
        right = yield from mean_sides(f"right of rank {self.rank}", own, context)
        sides = {f"right/{name}": mean.float() for name, mean in right.items()} if self.warm_start else {}
        mean = {name: bases[name] @ thin.T for name, thin in right.items()}
        return mean, {name: bases[name] @ thin.T for name, thin in own.items()} if self.error == "own" else {}, sides

    def _one_side(self, matrices: Gradients, memory: Memory, context: ReplicaContext) -> _Approximation:
        """Return the same from one side alone: a projection onto the span of the other side, which the last step averaged."""
        side, other = ("left", "right") if context.step % 2 == 0 else ("right", "left")
        turned = matrices if side == "left" else {name: m.T for name, m in matrices.items()}
        bases = {name: orthonormal(self._start(name, other, m, memory, context)) for name, m in matrices.items()}
        own = {name: m @ bases[name] for name, m in turned.items()}
        mean = yield from mean_sides(f"{side} of rank {self.rank}", own, context)
        wide = [{name: x @ bases[name].T for name, x in thin.items()} for thin in (mean, own)]
        if side == "right":
            wide = [{name: x.T for name, x in matrices.items()} for matrices in wide]
        return wide[0], wide[1], {f"{side}/{name}": x.float() for name, x in mean.items()}

    def _start(self, name: str, side: str, matrix: Tensor, memory: Memory, context: ReplicaContext) -> Tensor:
        """Return a side of `rank` columns: as the last step left it, or drawn at random."""
        length = matrix.shape[1 if side == "right" else 0]
        rank = min(*matrix.shape, self.rank)
        step = 0 if self.warm_start else context.step
        key = derive_key(context.seed, "PowerSGD", context.stage, name, side, step)
        drawn = uniform(key, length * rank, matrix.device).view(length, rank) * 2 - 1
        return revived(memory.get(f"{side}/{name}") if self.warm_start else None, drawn)


def mean_sides(name: str, own: Gradients, context: ReplicaContext) -> Rounds[Gradients]:
    """Return the means of thin matrices over replicas in float64, all in one all-reduce of this name."""
    flat = torch.cat([cast_saturating(x, torch.float32).reshape(-1) for x in own.values()])
    total = yield from all_reduce(name, flat, context.replica, context.num_replicas)
    parts = torch.split(total.double() / context.num_replicas, [x.numel() for x in own.values()])
    return {name: part.view_as(x) for (name, x), part in zip(own.items(), parts, strict=True)}


def matrix_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the rows and columns of a tensor as a matrix."""
    return shape[0], math.prod(shape[1:])


def revived(kept: Tensor | None, drawn: Tensor) -> Tensor:
    """Return the orthonormal columns of `kept`; columns that are missing or became zero are replaced from `drawn`."""
    if kept is None:
        return drawn
    kept = orthonormal(kept.to(drawn.device)[:, : drawn.shape[1]])  # a method may adapt the rank
    width = kept.shape[1]
    alive = kept.any(dim=0)  # a column that became zero would stay there
    return torch.cat([torch.where(alive, kept, drawn[:, :width]), drawn[:, width:]], dim=1)


def orthonormal(x: Tensor) -> Tensor:
    """Return orthonormal columns with the span of the columns of `x`, in float32; dependent columns become zero."""
    return lowrank.orthonormal(x[None])[0].float().double()
