"""gTop-k: the largest values over all replicas, by recursive doubling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.codecs import Nonzero
from raysim.codecs.codec import count_work
from raysim.codecs.message import Entry
from raysim.codecs.positions import kept_of, select_topk
from raysim.notation import check_real
from raysim.on_demand import torch
from raysim.replication.layers import Layered, check_scope, flatten, remembered, unflatten
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, RoundPackets, Rounds

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class GTopK(Layered):
    """Averages the k largest values over all replicas by recursive doubling (Shi et al. 2019, 1901.04359).

    In round t replica i swaps its k values with replica i XOR 2^t, adds them and keeps the k largest of the sum, so all end with
    the same k. A replica's value counts as sent if it survives every round, else it stays in the residual. If the number of
    replicas is not a power of two, missing replicas count as empty, and a replica with the same sum sends in their place.

    Use: Sparse gradients among many replicas.
    """

    variants: ClassVar[tuple[str, ...]] = ("GTopK(0.01)",)

    density: float
    scope: str = "tensor"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(density=check_real("density", self.density, 0, 1, open_low=True))
        check_scope(self.scope)

    def entries(self) -> tuple[Entry, ...]:
        return (Entry.of(Nonzero()),)

    def compressed_rounds(self, num_replicas: int) -> int:
        return (num_replicas - 1).bit_length()

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        fed = {
            name: row + remembered(memory, "residual", name, row)
            for name, row in flatten(gradients, self.scope).items()
        }
        survives = {name: self._greatest(row) for name, row in fed.items()}
        held = {name: torch.where(survives[name], row, 0.0) for name, row in fed.items()}
        for group in (1 << t for t in range(self.compressed_rounds(context.num_replicas))):
            source, targets = partners(context.replica, group, context.num_replicas)
            packets = {name: Nonzero().encode(row) for name, row in held.items()}
            received = yield RoundPackets(each=dict.fromkeys(targets, packets))
            if source is None:
                continue
            for name, packet in received[source].items():
                if name not in held:  # belongs to another method that shares the round
                    continue
                row = packet.decode(held[name].device)
                # in the same order on both sides, so that sums are bitwise equal
                total = held[name] + row if context.replica & group == 0 else row + held[name]
                kept = self._greatest(total)
                survives[name] &= kept
                held[name] = torch.where(kept, total, 0.0)
        moved = dict(memory)
        for name, row in fed.items():
            moved[f"residual/{name}"] = torch.where(survives[name], 0.0, row)
        means = {name: row / context.num_replicas for name, row in held.items()}
        return Averaged(unflatten(means, gradients), moved)

    def _greatest(self, row: Tensor) -> Tensor:
        """Return a mask of the k largest values of a row (1, n)."""
        count_work(row.nbytes)
        mask = torch.zeros_like(row, dtype=torch.bool)
        mask.view(-1)[select_topk(row, kept_of(self.density, row.numel()))] = True
        return mask


def partners(replica: int, group: int, count: int) -> tuple[int | None, list[int]]:
    """Return the replica to receive from and those to send to, when groups of `group` replicas with equal values merge.

    >>> [partners(replica, 2, 3) for replica in range(3)]  # there is no replica 3: replica 2 sends to 1 as well
    [(2, [2]), (2, []), (0, [0, 1])]
    """

    def source(target: int) -> int | None:
        partner = target ^ group
        if partner < count:
            return partner
        first = partner & ~(group - 1)  # in the partner's group
        return first if first < count else None

    return source(replica), [target for target in range(count) if target != replica and source(target) == replica]
