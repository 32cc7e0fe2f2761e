"""gTop-k: replicas add their greatest values by pairs, and go on with the greatest of the sum."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysim.codecs import Nonzero
from raysim.codecs.message import Entry
from raysim.codecs.selection import kept_of, select_topk
from raysim.codecs.work import count_work
from raysim.notation import check_real
from raysim.on_demand import torch
from raysim.replication.base import Averaged, Gradients, Memory, Received, ReplicaContext, Round
from raysim.replication.layers import Layered, check_scope, flatten, remembered, unflatten

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class GTopK(Layered):
    """Averages the k values that are greatest over all replicas, found by recursive doubling (Shi et al. 2019, 1901.04359).

    In round t replica i swaps its k values with replica i XOR 2^t, adds, and keeps the k greatest of the sum; so all end up
    with the same k. A replica's value is sent where it survived every round; elsewhere it stays in the residual. If the number of
    replicas is no power of two, missing replicas count as empty, and a replica with the same sum sends in their place.
    """

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

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 4 * self.compressed_values(shapes)

    def compress(
        self, gradients: Gradients, memory: Memory, context: ReplicaContext
    ) -> Generator[Round, Received, Averaged]:
        fed = {
            name: row + remembered(memory, "residual", name, row)
            for name, row in flatten(gradients, self.scope).items()
        }
        survives = {name: self._greatest(row) for name, row in fed.items()}
        held = {name: torch.where(survives[name], row, 0.0) for name, row in fed.items()}
        for group in (1 << t for t in range(self.compressed_rounds(context.num_replicas))):
            source, targets = partners(context.replica, group, context.num_replicas)
            packets = {name: Nonzero().encode(row) for name, row in held.items()}
            received = yield Round(each=dict.fromkeys(targets, packets))
            if source is None:
                continue
            for name, packet in received[source].items():
                if name not in held:  # of other methods that share the round
                    continue
                row = packet.decode(held[name].device)
                # in the same order on both sides, so that sums have the same bits
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
        """Return which of a row, (1, n), are its k greatest."""
        count_work(row.nbytes)
        mask = torch.zeros_like(row, dtype=torch.bool)
        mask.view(-1)[select_topk(row, kept_of(self.density, row.numel()))] = True
        return mask


def partners(replica: int, group: int, count: int) -> tuple[int | None, list[int]]:
    """Return from whom a replica receives, and to whom it sends, where groups of `group` replicas hold the same and merge.

    >>> [partners(replica, 2, 3) for replica in range(3)]  # there is no replica 3: replica 2 sends to 1 as well
    [(2, [2]), (2, []), (0, [0, 1])]
    """

    def source(target: int) -> int | None:
        partner = target ^ group
        if partner < count:
            return partner
        first = partner & ~(group - 1)  # of the partner's group
        return first if first < count else None

    return source(replica), [target for target in range(count) if target != replica and source(target) == replica]
