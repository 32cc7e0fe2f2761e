"""PowerGossip: replicas with parameters of their own approach their neighbours by low-rank differences (Vogels et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.codecs import Identity, derive_key
from raysim.codecs.codec import cast_saturating, check_finite, count_work
from raysim.codecs.draws import uniform
from raysim.codecs.lowrank import check_rank
from raysim.notation import check_integer
from raysim.on_demand import torch
from raysim.replication.layers import Layered
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, Round, Rounds
from raysim.replication.powersgd import matrix_of, orthonormal, revived

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class PowerGossip(Layered):
    """Each replica takes its own optimiser step and moves towards its neighbours in a ring, by low-rank projections of
    the differences (Vogels et al. 2020, 2008.01425).

    X_i += sum over neighbours j of w (X_j - X_i) q q^T, with w = 1/(neighbours + 1). The projection comes from a power
    iteration: p = (X_j - X_i) q is computed from X q, the only matrix that is sent (`rank` columns in each of
    `iterations`); the next iteration multiplies by orthonormal p from the left, and so on in turn. The unsent part of
    the difference stays in the parameters, so there is no residual. As with overlapping in the authors' code, X are the
    parameters before the step.

    The parameters of replicas differ; their mean is evaluated. For small tensors (see `min_values`), and for all
    tensors in the first `warmup` steps, gradients are averaged instead. Raises ValueError if `rank` exceeds the rank of
    every matrix.

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
        return 2 * 4 * sum(min(m, n, self.rank) * (m + n) for m, n in sides)  # for each of two neighbours

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        for gradient in gradients.values():
            check_finite(gradient)
        done = context.step - self.warmup
        if not done or context.parameters is None:  # up to here replicas are one
            return Averaged(gradients, memory)
        given = {name: context.parameters[name].detach() for name in gradients}
        matrices = {name: x.reshape(len(x), -1).to(torch.float64, copy=True) for name, x in given.items()}
        products = 2 * len(self.neighbours(context.replica, context.num_replicas))  # to send, and to move by
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
        received = yield Round(each={other: {label: Identity().encode(_flat(own[other]))} for other in others})
        for other in others:
            theirs = received[other][label].decode(next(iter(matrices.values())).device)
            parts = torch.split(theirs, [x.numel() for x in own[other].values()])
            for (name, sent), part in zip(own[other].items(), parts, strict=True):
                difference = part.view_as(sent) - sent if me < other else sent - part.view_as(sent)  # the same at both
                memory[f"{side}/{other}/{name}"] = difference
                thin, basis = difference.double(), bases[other][name]
                projected = thin @ basis.T if side == "left" else basis @ thin.T
                matrices[name].add_(projected, alpha=(1 if me < other else -1) / (len(others) + 1))

    def _basis(
        self, name: str, side: str, matrix: Tensor, other: int, memory: Memory, context: ReplicaContext
    ) -> Tensor:
        """Return orthonormal columns, the same at both ends: of the last iteration, or drawn before the first."""
        length = matrix.shape[1 if side == "right" else 0]
        rank = min(*matrix.shape, self.rank)
        pair = sorted((context.replica, other))
        key = derive_key(context.seed, "PowerGossip", context.stage, name, side, *pair)
        drawn = uniform(key, length * rank, matrix.device).view(length, rank) * 2 - 1
        return orthonormal(revived(memory.get(f"{side}/{other}/{name}"), drawn))


def _flat(tensors: Gradients) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors.values()])
