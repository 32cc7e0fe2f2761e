"""Dion: low-rank orthonormal updates with the residual kept in the momentum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from raysim.codecs import derive_key
from raysim.codecs.codec import cast_saturating, check_finite, count_work
from raysim.codecs.lowrank import check_rank
from raysim.notation import check_integer, check_real
from raysim.on_demand import torch
from raysim.replication.layers import Layered, remembered
from raysim.replication.low_rank import matrix_of, mean_sides, orthonormal_float32, side_columns
from raysim.replication.method import (
    Averaged,
    Gradients,
    Memory,
    ReplicaContext,
    Rounds,
)

_TINY = 1e-8  # added to a column's norm, as in the authors' code


@dataclass(frozen=True, repr=False)
class Dion(Layered):
    """Steps by an orthonormal matrix of rank `rank` near the momentum's leading subspace (Ahn et al. 2025, 2504.05295, and
    microsoft/dion).

    With g_r the gradient of replica r as a matrix m x n (first axis, the rest), and Q of the step before::

        M_r = M_r + g_r;   P = orth(mean of M_r Q);   R = mean of M_r^T P;   M_r = M_r - (1 - mu) P R^T
        Q = R with columns of norm 1;   step by sqrt(m / n) P Q^T

    Only the two thin means are sent. One-dimensional and small tensors (`min_values`) step by Lion on the uncompressed mean: the
    sign of b1 m + (1 - b1) g with m = b2 m + (1 - b2) g (Chen et al. 2023, 2302.06675). Embeddings and the last layer are matrices
    too (ours). The optimiser must be SGD without momentum; its learning rate is the authors' (0.02).

    Use: Orthonormal updates like Muon's from two thin matrices; with plain SGD.
    """

    variants: ClassVar[tuple[str, ...]] = ("Dion(16)",)
    optimizers: ClassVar[frozenset[str] | None] = frozenset({"sgd"})

    rank: int
    mu: float = 0.95
    b1: float = 0.9
    b2: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(
            rank=check_integer("rank", self.rank, 1),
            mu=check_real("mu", self.mu, 0, 1),
            b1=check_real("b1", self.b1, 0, 1),
            b2=check_real("b2", self.b2, 0, 1),
        )

    def compressed_rounds(self, num_replicas: int) -> int:
        return 4

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        if momentum:
            raise ValueError(
                f"`optimizer.momentum` must be 0 with {self!r}, which keeps a momentum itself, but got {momentum:g}."
            )
        check_rank(self.rank, self.compressed_shapes(shapes))

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        values = 0
        for shape in shapes.values():
            rows, columns = matrix_of(shape)
            of_lion = self.exempts(shape) or self.warmup
            values += rows * columns if of_lion else 0
            values += 0 if self.exempts(shape) else rows * columns + min(rows, columns, self.rank) * columns
        return 4 * values

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        averaged = yield from super().average(gradients, memory, context)
        dense = [name for name, x in gradients.items() if context.step < self.warmup or self.exempts(tuple(x.shape))]
        steps, moved = dict(averaged.gradients), dict(averaged.memory)
        for name in dense:
            mean = averaged.gradients[name]
            held = remembered(memory, "lion", name, mean)
            steps[name] = (self.b1 * held + (1 - self.b1) * mean).sign()
            moved[f"lion/{name}"] = self.b2 * held + (1 - self.b2) * mean
        return Averaged(steps, moved)

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        matrices, starts = {}, {}
        for name, x in gradients.items():
            check_finite(x)
            matrices[name] = (remembered(memory, "momentum", name, x) + x).reshape(len(x), -1).double()
            key = derive_key(context.seed, "Dion", context.stage, name)
            kept = memory.get(f"right/{name}")  # made orthonormal below, of the same span
            starts[name] = side_columns(kept, matrices[name], "right", self.rank, key)
        count_work(4 * sum(x.nbytes for x in gradients.values()))
        left = yield from mean_sides(
            f"left of rank {self.rank}", {name: m @ starts[name] for name, m in matrices.items()}, context
        )
        bases = {name: orthonormal_float32(mean) for name, mean in left.items()}
        own = {name: (bases[name].T @ m).T for name, m in matrices.items()}
        right = yield from mean_sides(f"right of rank {self.rank}", own, context)
        steps, moved = {}, dict(memory)
        for name, x in gradients.items():
            kept = matrices[name] - (1 - self.mu) * (bases[name] @ right[name].T)
            sides = right[name] / (right[name].norm(dim=0, keepdim=True) + _TINY)
            scale = (matrices[name].shape[0] / matrices[name].shape[1]) ** 0.5
            steps[name] = (scale * (bases[name] @ sides.T)).float().view_as(x)
            moved[f"momentum/{name}"] = cast_saturating(kept, torch.float32).view_as(x)
            moved[f"right/{name}"] = sides.float()
        return Averaged(steps, moved)
