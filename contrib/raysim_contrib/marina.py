"""MARINA: compressed differences from the gradients at the previous step's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from raysim.codecs import derive_key
from raysim.compressors import Plain
from raysim.notation import check_real
from raysim.replication.gathered import Differences
from raysim.replication.layers import remembered
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, Rounds, mean_dense
from raysim_contrib.residual_vq import ResidualVQ

_MANY = 1 << 30  # values assumed for every tensor, so that all replicas and stages flip the same coin


@dataclass(frozen=True, repr=False)
class MARINA(Differences):
    """Sends C(g(x) - g(x')), with x' the previous step's parameters and both gradients on the same samples, and adds
    the mean to the last estimate. In random steps, common to all replicas, it sends g itself (Gorbunov et al. 2021,
    2102.07845, VR-MARINA's estimate).

    C must be unbiased. The `probability` of sending g defaults to 1/(1 + w), where w is the relative variance of C. All
    other steps need twice the compute and twice the messages between stages, see `TwinStage`.

    Use: Unbiased codecs if compute is cheap.

    >>> from raysim.codecs import RandomK
    >>> MARINA(RandomK(0.25, unbiased=True)).chance
    0.25
    """

    variants: ClassVar[tuple[str, ...]] = ("MARINA(QSGD(4))",)

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

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"stage"})

    def stage_class(self) -> type[Any]:
        from raysim_contrib.twin_stage import TwinStage

        return TwinStage

    def check_plan(self, plan: Any, modules: Sequence[Any]) -> None:
        if plan.num_replicas == 1:
            return
        if any(boundary.several for boundary in plan.boundaries):
            raise ValueError(f"`replica_gradient` cannot be {self!r} if several tensors cross a boundary.")
        for compressor in plan.methods:
            if not isinstance(compressor, (Plain, ResidualVQ)):  # whose messages may change their shape
                raise ValueError(
                    f"`forward` and `backward` must be codecs without a memory with {self!r}, which doubles messages between "
                    f"stages in some steps, but got {compressor!r}."
                )

    def needs_previous_gradients(self, step: int, seed: int) -> bool:
        """Return whether a step also needs gradients at the previous step's parameters."""
        if step <= self.warmup:
            return False
        coin = np.random.default_rng(derive_key(seed, "MARINA", step)).random()
        return bool(coin >= self.chance)

    @property
    def memories(self) -> int:
        return 1  # the estimate

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        if self.needs_previous_gradients(context.step, context.seed) and context.extra is not None:
            previous = context.extra
            _, means = yield from self._exchange({name: g - previous[name] for name, g in gradients.items()}, context)
            estimate = {name: remembered(memory, "mean", name, g) + means[name] for name, g in gradients.items()}
        else:
            estimate = yield from mean_dense("gradients", gradients, context)
        held = {f"mean/{name}": mean.clone() for name, mean in estimate.items()}  # clipping overwrites gradients
        return Averaged(estimate, {**memory, **held})
