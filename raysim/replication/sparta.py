"""SPARTA: each step averages a few of the parameters, at positions that all replicas draw alike."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

from raysim.codecs import RandomK
from raysim.notation import check_real
from raysim.on_demand import torch
from raysim.replication.base import (
    Averaged,
    Gradients,
    Memory,
    Received,
    ReplicaContext,
    ReplicaMethod,
    Round,
    all_reduce,
)
from raysim.replication.layers import key_of


@dataclass(frozen=True, repr=False)
class SPARTA(ReplicaMethod):
    """Replicas step by their own gradients, and after each step average the share `share` of the parameters (`sparta.py` of
    exo-explore/gym).

    Positions are drawn anew in each step and for each tensor, at least one, from a seed that replicas share; so values alone are sent,
    and summed on the way. Replicas differ elsewhere, and their mean is evaluated.

    >>> SPARTA(0.01)
    SPARTA(share=0.01)
    """

    after_update: ClassVar[bool] = True
    decentralized: ClassVar[bool] = True

    share: float = 0.005

    def __post_init__(self) -> None:
        self._coerce(share=check_real("share", self.share, 0, 1, open_low=True))

    def num_rounds(self, num_replicas: int) -> int:
        return 2

    def average(
        self, gradients: Gradients, memory: Memory, context: ReplicaContext
    ) -> Generator[Round, Received, Averaged]:
        drawn = {
            name: RandomK(self.share, per="tensor").draw(key_of(name, context, shared=True), tuple(x.shape), x.device)
            for name, x in gradients.items()
        }
        if not drawn:
            return Averaged({}, memory)
        values = torch.cat([x.reshape(-1)[drawn[name]] for name, x in gradients.items()])
        total = yield from all_reduce("share of parameters", values, context.replica, context.num_replicas)
        means = torch.split(total / context.num_replicas, [len(positions) for positions in drawn.values()])
        after = {}
        for (name, x), mean in zip(gradients.items(), means, strict=True):
            after[name] = x.reshape(-1).clone().index_copy_(0, drawn[name], mean).view_as(x)
        return Averaged({}, memory, parameters=after)
