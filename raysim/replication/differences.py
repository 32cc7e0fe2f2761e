"""Replica gradients sent as differences from a reference known to all replicas: EF21 and MARINA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.codecs import derive_key
from raysim.notation import check_choice, check_real
from raysim.replication.layers import Coded, gather_mean, key_of, remembered
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, Rounds, mean_dense

_MANY = 1 << 30  # values assumed for every tensor, so that all replicas and stages flip the same coin


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


@dataclass(frozen=True, repr=False)
class MARINA(Differences):
    """Sends C(g(x) - g(x')), with x' the previous step's parameters and both gradients on the same samples, and adds
    the mean to the last estimate. In random steps, common to all replicas, it sends g itself (Gorbunov et al. 2021,
    2102.07845, VR-MARINA's estimate).

    C must be unbiased. The `probability` of sending g defaults to 1/(1 + w), where w is the relative variance of C. All
    other steps need twice the compute and twice the messages between stages; see `needs_previous_gradients`.

    >>> from raysim.codecs import RandomK
    >>> MARINA(RandomK(0.25, unbiased=True)).chance
    0.25
    """

    uses_previous_gradients: ClassVar[bool] = True

    probability: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec.relative_variance(1) is None:
            raise ValueError(
                "`codec` must be unbiased: Identity, RandomK(..., unbiased=True), QSGD, Natural or TernGrad(clip=None), but got "
                f"{self.codec!r}."
            )
        if self.probability is not None:
            self._coerce(probability=check_real("probability", self.probability, 0, 1, open_low=True))
        elif self._variance(4 * _MANY) > 1.5 * self._variance(_MANY):
            raise ValueError(f"`probability` must be given for {self.codec!r}, whose variance grows with the tensor.")

    @property
    def chance(self) -> float:
        """Return the probability that a step sends the gradients themselves."""
        if self.probability is not None:
            return self.probability
        return 1 / (1 + self._variance(_MANY))

    def _variance(self, numel: int) -> float:
        return self.codec.relative_variance(numel) or 0.0

    def needs_previous_gradients(self, step: int, seed: int) -> bool:
        if step <= self.warmup:
            return False
        coin = np.random.default_rng(derive_key(seed, "MARINA", step)).random()
        return bool(coin >= self.chance)

    @property
    def memories(self) -> int:
        return 1  # the estimate

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        if self.needs_previous_gradients(context.step, context.seed) and context.previous is not None:
            previous = context.previous
            _, means = yield from self._exchange({name: g - previous[name] for name, g in gradients.items()}, context)
            estimate = {name: remembered(memory, "mean", name, g) + means[name] for name, g in gradients.items()}
        else:
            estimate = yield from mean_dense("gradients", gradients, context)
        return Averaged(estimate, {**memory, **{f"mean/{name}": mean for name, mean in estimate.items()}})
