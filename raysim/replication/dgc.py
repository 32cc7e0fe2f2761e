"""Deep gradient compression: the momentum of a value builds up while it waits to be sent."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from raysim.codecs import Codec, Identity
from raysim.codecs.message import Entry
from raysim.notation import check_choice, check_integer, check_real
from raysim.replication.base import Averaged, Gradients, Memory, Received, ReplicaContext, Round, mean_dense
from raysim.replication.layers import Layered, check_scope, flatten, gather_mean, key_of, remembered, unflatten
from raysim.replication.selection import ESTIMATED, EXACT, codec_of, count_of, energy, pack, select


@dataclass(frozen=True, repr=False)
class DGC(Layered):
    """Sends the greatest of v = v + u, where u = m u + g is the velocity at this replica, and clears both where it sent (deep
    gradient compression, Lin et al. 2018, 1712.01887).

    m is the momentum of the optimiser, which then applies none to these tensors. `masking=False` lets u go on where it was
    sent; `correction=False` leaves u out, for optimisers without momentum. `clip_norm` bounds the norm of all gradients of the
    stage to clip_norm/sqrt(replicas), before all else; `optimizer.clip_norm` would clip the sums of velocities that are sent, and is
    refused. In the first `ramp` epochs the density falls from density^(1/(ramp+1)) by equal factors to `density`. `select` "exact" or
    "sampled", the threshold estimated from a sample. Where masking is on and all is sent, the step is dense, with the optimiser's
    momentum.

    >>> [round(DGC(0.001, ramp=4).density_of(epoch), 4) for epoch in range(6)]
    [0.2512, 0.0631, 0.0158, 0.004, 0.001, 0.001]
    """

    density: float
    select: str = EXACT
    ramp: int = 0
    clip_norm: float | None = None
    masking: bool = True
    correction: bool = True
    scope: str = "tensor"
    values: Codec = Identity()  # noqa: RUF009  a frozen codec

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(
            density=check_real("density", self.density, 0, 1, open_low=True), ramp=check_integer("ramp", self.ramp, 0)
        )
        check_choice("select", self.select, [EXACT, *ESTIMATED])
        if self.clip_norm is not None:
            self._coerce(clip_norm=check_real("clip_norm", self.clip_norm, 0, 1e30, open_low=True))
        for field in ("masking", "correction"):
            if not isinstance(getattr(self, field), bool):
                raise ValueError(f"`{field}` must be True or False, but got {getattr(self, field)!r}.")
        check_scope(self.scope)
        if not isinstance(self.values, Codec):
            raise ValueError(f"`values` must be a codec, but got {self.values!r}.")

    @property
    def keeps_momentum(self) -> bool:
        return self.correction

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"epochs"} if self.ramp else ())

    def density_of(self, epoch: int) -> float:
        """Return the density of an epoch: it falls while it ramps."""
        return float(self.density ** min(1.0, (epoch + 1) / (self.ramp + 1)))

    def entries(self) -> tuple[Entry, ...]:
        return tuple(
            Entry.of(codec_of(1 / self.density_of(epoch), self.select, self.values)) for epoch in range(self.ramp + 1)
        )

    def compressed_rounds(self, num_replicas: int) -> int:
        return 2

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        if self.correction and not momentum:
            raise ValueError(
                "`DGC` corrects the optimiser's momentum, but the optimiser has none. Use `optimizer.name=sgd` with "
                "`optimizer.momentum`, or `correction=False`."
            )

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 4 * self.compressed_values(shapes) * (2 if self.correction else 1)

    def average(
        self, gradients: Gradients, memory: Memory, context: ReplicaContext
    ) -> Generator[Round, Received, Averaged]:
        if self.clip_norm is not None:
            norm = math.sqrt(sum(energy(gradient) for gradient in gradients.values()))
            limit = self.clip_norm / math.sqrt(context.num_replicas)
            if norm > limit:  # NaN is found where it is sent
                gradients = {name: gradient * (limit / norm) for name, gradient in gradients.items()}
        return (yield from super().average(gradients, memory, context))

    def compress(
        self, gradients: Gradients, memory: Memory, context: ReplicaContext
    ) -> Generator[Round, Received, Averaged]:
        density = self.density_of(context.epoch)
        if density == 1 and self.masking:
            return Averaged((yield from mean_dense("dense layers", gradients, context)), memory)
        packets, moved = {}, dict(memory)
        for name, row in flatten(gradients, self.scope).items():
            waiting = remembered(memory, "residual", name, row)
            if self.correction:
                velocity = context.momentum * remembered(memory, "velocity", name, row) + row
                waiting = waiting + velocity
            else:
                waiting = waiting + row
            key = key_of(name, context)
            kept = select(waiting.view(-1), count_of(1 / density, row), self.select, key)
            packets[name] = pack(kept, row, 1 / density, self.select, self.values, key)
            moved[f"residual/{name}"] = waiting - packets[name].decode(row.device)
            if self.correction:
                if self.masking:
                    velocity.view(-1)[kept.positions] = 0
                moved[f"velocity/{name}"] = velocity
        means = yield from gather_mean(packets, next(iter(gradients.values())).device)
        with_momentum = frozenset(gradients) if self.correction else frozenset()
        return Averaged(unflatten(means, gradients), moved, with_momentum=with_momentum)
