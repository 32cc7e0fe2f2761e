"""DGC and RedSync, which send the largest values of gradient plus residual."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from raysim.codecs import Codec, EstimatedTopK, Identity, Mean, Nonzero, Packet, TopK
from raysim.codecs.codec import check_is_codec, count_work, dtype_name, nest
from raysim.codecs.groups import total
from raysim.codecs.message import Entry
from raysim.codecs.positions import encode_positions, kept_of, select_with_values, smallest_form
from raysim.notation import check_choice, check_flag, check_integer, check_real
from raysim.replication.layers import Layered, check_scope, flatten, gather_mean, key_of, remembered, unflatten
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, Rounds, mean_dense

if TYPE_CHECKING:
    from torch import Tensor


EXACT = "exact"
ESTIMATED = ("sampled", "bisect")  # as in DGC and RedSync


class Kept(NamedTuple):
    """The selected values of a flat row and their increasing positions."""

    positions: Tensor
    values: Tensor


def select(row: Tensor, count: int, how: str, key: int) -> Kept:
    """Select about `count` of the largest magnitudes of a flat row: exactly `count` for "exact", else by an `EstimatedTopK` policy.

    Raises NonFiniteError on NaN or infinity.
    """
    count_work(row.nbytes)
    if how == EXACT:
        return Kept(*select_with_values(row.view(1, -1), count))
    return Kept(*EstimatedTopK(min(1.0, count / len(row)), how).select(row.contiguous(), key))


def select_within(kept: Kept, count: int, how: str, key: int) -> Kept:
    """Select about `count` of the kept values (multi-level compression); with "exact" the result equals `select`."""
    if len(kept.values) <= count:
        return kept
    positions, values = select(kept.values, count, how, key)
    return Kept(kept.positions[positions], values)


def count_of(factor: float, row: Tensor) -> int:
    """Return the number of values of a row kept at a compression factor."""
    return kept_of(1 / factor, row.numel())


def codec_of(factor: float, how: str, values: Codec) -> TopK | EstimatedTopK:
    """Return the codec of the packets made by `packet_of`."""
    return TopK(1 / factor, values=values) if how == EXACT else EstimatedTopK(1 / factor, how, values=values)


def packet_of(kept: Kept, row: Tensor, factor: float, how: str, values: Codec, key: int) -> Packet:
    """Return the packet of the kept values of `row`, (1, n), encoded by the codec `values`."""
    shape, total = tuple(row.shape), row.numel()
    codec = codec_of(factor, how, values)
    if isinstance(codec, EstimatedTopK):
        return Packet(codec, codec.arrays_of(kept.positions, kept.values, total, key), shape, dtype_name(row))
    arrays = dict(nest("values", values.encode(kept.values.view(1, -1), key)))
    if len(kept.positions) < total:
        arrays |= encode_positions(kept.positions, total, smallest_form(len(kept.positions), total))
    return Packet(codec, arrays, shape, dtype_name(row))


def energy(x: Tensor) -> float:
    """Return the squared norm, independent of the number of threads."""
    return total(x, "squares")


@dataclass(frozen=True, repr=False)
class DGC(Layered):
    """Sends the largest values of v = v + u, with u = m u + g this replica's velocity, and clears u and v at sent positions
    (deep gradient compression, Lin et al. 2018, 1712.01887).

    m is the optimiser's momentum, which the optimiser itself then does not apply to these tensors. `masking=False` keeps u at sent
    positions; `correction=False` omits u, for optimisers without momentum. `clip_norm` first clips the norm of the stage's gradients
    to clip_norm/sqrt(replicas); `optimizer.clip_norm` is rejected, since it would clip sums of velocities. In the first `ramp`
    epochs the density falls from density^(1/(ramp+1)) to `density` by equal factors. `select` is "exact" or "sampled".

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
        check_flag("masking", self.masking)
        check_flag("correction", self.correction)
        check_scope(self.scope)
        check_is_codec("values", self.values)
        self.values.check_feedback()

    @property
    def keeps_momentum(self) -> bool:
        return self.correction

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"epochs"} if self.ramp else ())

    def density_of(self, epoch: int) -> float:
        """Return the density of an epoch; it falls during the ramp."""
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

    @property
    def memories(self) -> int:
        return 2 if self.correction else 1

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        if self.clip_norm is not None:
            norm = math.sqrt(sum(energy(gradient) for gradient in gradients.values()))
            limit = self.clip_norm / math.sqrt(context.num_replicas)
            if norm > limit:  # NaN is detected by the selection
                gradients = {name: gradient * (limit / norm) for name, gradient in gradients.items()}
        return (yield from super().average(gradients, memory, context))

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
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
            packets[name] = packet_of(kept, row, 1 / density, self.select, self.values, key)
            moved[f"residual/{name}"] = waiting - packets[name].decode(row.device)
            if self.correction:
                if self.masking:
                    velocity.view(-1)[kept.positions] = 0
                moved[f"velocity/{name}"] = velocity
        means = yield from gather_mean(packets, next(iter(gradients.values())).device)
        with_momentum = frozenset(gradients) if self.correction else frozenset()
        return Averaged(unflatten(means, gradients), moved, with_momentum=with_momentum)


@dataclass(frozen=True, repr=False)
class RedSync(Layered):
    """Sends about the share `density` of gradient plus residual, above a searched threshold (Fang et al. 2019, 1808.04357).

    `search="binary"`: bisects between the mean and the largest magnitude until k to 2k values pass. "trimmed": lowers the
    threshold until k pass and keeps the k largest; the result equals TopK's, so TopK is executed. `same_sign`: sends
    only positive values in even steps and negative ones in odd steps, all as their mean: positions and one value.
    """

    density: float
    search: str = "binary"
    same_sign: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(density=check_real("density", self.density, 0, 1, open_low=True))
        check_choice("search", self.search, ["binary", "trimmed"])
        check_flag("same_sign", self.same_sign)

    @property
    def _codec(self) -> Codec:
        return EstimatedTopK(self.density, "bisect") if self.search == "binary" else TopK(self.density)

    def entries(self) -> tuple[Entry, ...]:
        return (Entry.of(Nonzero(Mean()) if self.same_sign else self._codec),)

    def compressed_rounds(self, num_replicas: int) -> int:
        return 1

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        packets, moved = {}, dict(memory)
        for name, gradient in gradients.items():
            fed = (gradient + remembered(memory, "residual", name, gradient)).view(1, -1)
            key = key_of(name, context)
            if self.same_sign:
                one_sign = fed.clamp_min(0) if context.step % 2 == 0 else fed.clamp_max(0)
                selected = self._codec.encode(one_sign, key).decode(fed.device)
                packets[name] = Nonzero(Mean()).encode(selected)
            else:
                packets[name] = self._codec.encode(fed, key)
            moved[f"residual/{name}"] = (fed - packets[name].decode(fed.device)).view_as(gradient)
        means = yield from gather_mean(packets, next(iter(gradients.values())).device)
        averaged = {name: means[name].view_as(gradient) for name, gradient in gradients.items()}
        return Averaged(averaged, moved)
