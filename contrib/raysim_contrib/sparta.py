"""SPARTA: a random share of the parameters averaged in each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.codecs import RandomK
from raysim.notation import check_real
from raysim.replication.layers import key_of
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, ReplicaMethod, Rounds, sum_tensors


@dataclass(frozen=True, repr=False)
class SPARTA(ReplicaMethod):
    """Trains replicas on their own gradients and averages a random `share` of the parameters after each step (`sparta.py` of
    exo-explore/gym).

    Positions, at least one per tensor, are drawn in each step from a seed shared by all replicas, so only values are
    sent, by an all-reduce. All other parameters differ between replicas; evaluations use their mean.

    Use: A few values in every step, to keep replicas close to one another.

    >>> SPARTA(0.01)
    SPARTA(share=0.01)
    """

    variants: ClassVar[tuple[str, ...]] = ("SPARTA",)
    after_update: ClassVar[bool] = True
    decentralized: ClassVar[bool] = True

    share: float = 0.005

    def __post_init__(self) -> None:
        self._coerce(share=check_real("share", self.share, 0, 1, open_low=True))

    def num_rounds(self, num_replicas: int) -> int:
        return 2

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        drawn = {
            name: RandomK(self.share, per="tensor").draw(key_of(name, context, shared=True), tuple(x.shape), x.device)
            for name, x in gradients.items()
        }
        if not drawn:
            return Averaged({}, memory)
        values = {name: x.reshape(-1)[drawn[name]] for name, x in gradients.items()}
        sums = yield from sum_tensors("share of parameters", values, context)
        after = {}
        for name, x in gradients.items():
            mean = sums[name] / context.num_replicas
            after[name] = x.reshape(-1).clone().index_copy_(0, drawn[name], mean).view_as(x)
        return Averaged({}, memory, parameters=after)
