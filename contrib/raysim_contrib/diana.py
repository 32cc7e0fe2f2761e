"""DIANA: compressed differences from a moving reference gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from raysim.notation import check_real
from raysim.replication.gathered import Differences, beyond
from raysim.replication.layers import remembered
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, Rounds


@dataclass(frozen=True, repr=False)
class DIANA(Differences):
    """Sends d = C(g - h), uses mean(h) + mean(d) as the gradient, and sets h = h + `alpha` d (Mishchenko et al.
    2019, 1901.09269).

    C must be unbiased. `alpha` defaults to 1/(1 + w), where w is the relative variance of C.

    Use: Unbiased codecs.

    >>> from raysim.codecs import RandomK
    >>> DIANA(RandomK(0.25, unbiased=True)).alpha_of(1000)
    0.25
    """

    variants: ClassVar[tuple[str, ...]] = ("DIANA(QSGD(4))",)

    alpha: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha is not None:
            self._coerce(alpha=check_real("alpha", self.alpha, 0, 1, open_low=True))
        elif self.codec.relative_variance(1) is None:
            raise ValueError(
                "`alpha` must be given for a codec of unknown variance. It is known for RandomK(..., unbiased=True), QSGD, "
                f"Natural and TernGrad(clip=None), but got {self.codec!r}."
            )

    def alpha_of(self, numel: int) -> float:
        """Return the step size of h for a tensor of `numel` values."""
        return self.alpha or 1 / (1 + (self.codec.relative_variance(numel) or 0.0))

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        sent, means = yield from self._exchange(beyond(gradients, memory), context)
        moved, averaged = dict(memory), {}
        for name, gradient in gradients.items():
            alpha, known = self.alpha_of(gradient.numel()), remembered(memory, "mean", name, gradient)
            averaged[name] = known + means[name]
            moved[f"own/{name}"] = remembered(memory, "own", name, gradient) + alpha * sent[name]
            moved[f"mean/{name}"] = known + alpha * means[name]
        return Averaged(averaged, moved)
