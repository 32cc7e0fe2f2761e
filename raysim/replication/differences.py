"""Replica gradients sent as differences from a reference known to all replicas: EF21."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.notation import check_choice
from raysim.replication.layers import Coded, gather_mean, key_of, remembered
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, Rounds, mean_dense


@dataclass(frozen=True, repr=False)
class Differences(Coded):
    """Base of methods that send C(g - h) for a reference gradient h; subclasses define h and how it is updated."""

    @property
    def memories(self) -> int:
        return 2  # this replica's reference, and the mean of all references

    def _exchange(self, differences: Gradients, context: ReplicaContext) -> Rounds[tuple[Gradients, Gradients]]:
        """Return this replica's decoded differences, and the means over replicas."""
        packets = {}
        for name, difference in differences.items():
            rows = len(difference) if self.codec.by_matrix else 1
            packets[name] = self.codec.encode(difference.reshape(rows, -1), key_of(name, context))
        device = next(iter(differences.values())).device
        means = yield from gather_mean(packets, device)
        own = {name: packets[name].decode(device).view_as(x) for name, x in differences.items()}
        return own, {name: means[name].view_as(x) for name, x in differences.items()}


def beyond(gradients: Gradients, memory: Memory) -> Gradients:
    """Return the differences of `gradients` from this replica's reference."""
    return {name: gradient - remembered(memory, "own", name, gradient) for name, gradient in gradients.items()}


@dataclass(frozen=True, repr=False)
class ReplicaEF21(Differences):
    """Sends C(g - h), adds it to h, and uses the mean of all h as the gradient (Richtarik et al. 2021, 2106.05203).

    `start`: "dense" makes h the first gradient, sent uncompressed; "zero" starts at zero. An unbiased codec of relative variance
    w is scaled by 1/(1 + w), which makes it contractive.

    >>> from raysim.codecs import TopK
    >>> ReplicaEF21(TopK(0.01), start="zero")
    EF21(TopK(0.01), start='zero')
    """

    notation: ClassVar[str] = "EF21"

    start: str = "dense"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("start", self.start, ["dense", "zero"])

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        if self.start == "dense" and f"own/{next(iter(gradients))}" not in memory:
            means = yield from mean_dense("first gradients", gradients, context)
            own = {f"own/{name}": gradient.clone() for name, gradient in gradients.items()}
            return Averaged(means, {**memory, **own, **{f"mean/{name}": mean for name, mean in means.items()}})
        sent, means = yield from self._exchange(beyond(gradients, memory), context)
        moved, averaged = dict(memory), {}
        for name, gradient in gradients.items():
            scale = 1 / (1 + (self.codec.relative_variance(gradient.numel()) or 0.0))
            moved[f"own/{name}"] = remembered(memory, "own", name, gradient) + scale * sent[name]
            averaged[name] = remembered(memory, "mean", name, gradient) + scale * means[name]
            moved[f"mean/{name}"] = averaged[name]
        return Averaged(averaged, moved)
