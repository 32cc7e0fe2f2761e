"""signSGD: a majority vote of signs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from raysim.codecs.message import Entry
from raysim.notation import check_real
from raysim.on_demand import torch
from raysim.replication.layers import gather_mean, remembered
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, ReplicaMethod, Rounds, num_values
from raysim_contrib.signs import Sign


@dataclass(frozen=True, repr=False)
class SignSGD(ReplicaMethod):
    """Takes a majority vote of signs, +1 or -1, for each value; ties and zeros count as +1 (Bernstein et al. 2018, 1802.04434).

    Only the learning rate sets the step size, so all tensors are compressed. With `beta`, replicas vote with the sign
    of a moving average of their gradients, m = beta m + (1 - beta) g (Signum); the optimiser should then have no
    momentum.

    Use: 1 bit a value, by majority vote.
    """

    variants: ClassVar[tuple[str, ...]] = ("SignSGD",)

    beta: float = 0.0

    def __post_init__(self) -> None:
        self._coerce(beta=check_real("beta", self.beta, 0, 1))
        if self.beta == 1:
            raise ValueError("`beta` must be below 1, or no gradient is ever seen, but got 1.")

    def entries(self) -> tuple[Entry, ...]:
        return (Entry.of(Sign(scaled=False)),)

    @property
    def by_bucket(self) -> bool:
        return True

    def num_rounds(self, num_replicas: int) -> int:
        return 1

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        if not gradients:
            return Averaged({}, memory)
        moved = dict(memory)
        if self.beta:
            for name, x in gradients.items():
                moved[f"average/{name}"] = (
                    self.beta * remembered(memory, "average", name, x) + (1 - self.beta) * x.detach()
                )
        packets = {
            name: Sign(scaled=False).encode(moved[f"average/{name}"] if self.beta else x.detach())
            for name, x in gradients.items()
        }
        means = yield from gather_mean(packets, next(iter(gradients.values())).device)
        return Averaged({name: torch.where(mean >= 0, 1.0, -1.0) for name, mean in means.items()}, moved)

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 4 * num_values(shapes) if self.beta else 0
