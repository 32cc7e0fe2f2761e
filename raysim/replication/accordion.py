"""Accordion: mild compression of a layer while its gradient norm changes quickly, strong compression otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from raysim.codecs import Codec, Identity, LowRank
from raysim.codecs.lowrank import check_rank
from raysim.codecs.message import Entry
from raysim.codecs.positions import kept_of
from raysim.compressors.compressor import Decision
from raysim.compressors.memory import ErrorFeedback
from raysim.notation import check_integer, check_real
from raysim.on_demand import torch
from raysim.replication.gathered import Gathered
from raysim.replication.layers import Layered
from raysim.replication.low_rank import PowerSGD, matrix_of
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, RoundPackets, Rounds, run_together
from raysim.replication.sparsified import energy

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class Accordion(Layered):
    """Compresses each layer by `mild` or `strong`, with error feedback (Agarwal et al. 2020, 2010.16248).

    Both are TopK (or RandomK, EstimatedTopK) with two densities, or LowRank with two ranks (PowerSGD). Every `interval` epochs
    replica 0 compares the norm of a layer's gradient, summed over the last epoch, with that `interval` epochs earlier. The layer
    gets `mild` if the norm changed by a relative `eta` or more, or if the learning rate fell to `decay` times its earlier value
    (the threshold is ours). All layers start with `mild`. Memories are kept across switches.

    >>> Accordion(LowRank(4), LowRank(1))
    Accordion(LowRank(4), LowRank(1))
    """

    mild: Codec
    strong: Codec
    eta: float = 0.5
    interval: int = 10
    decay: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(
            eta=check_real("eta", self.eta, 0, 1, open_low=True),
            interval=check_integer("interval", self.interval, 1),
            decay=check_real("decay", self.decay, 0, 1, open_low=True),
        )
        known = isinstance(self.mild, Codec) and (isinstance(self.mild, LowRank) or self.mild.kept_share is not None)
        if not known or type(self.mild) is not type(self.strong):
            raise ValueError(
                "`mild` and `strong` must both be TopK, EstimatedTopK or RandomK, or both LowRank, but got "
                f"{self.mild!r} and {self.strong!r}."
            )
        if _keeps(self.mild) <= _keeps(self.strong):
            raise ValueError(f"`mild` must keep more than `strong`, but got {self.mild!r} and {self.strong!r}.")
        for codec in (self.mild, self.strong):
            self._method(codec)  # rejects codecs that diverge under error feedback

    def _method(self, codec: Codec) -> Layered:
        if isinstance(codec, LowRank):
            return PowerSGD(codec.rank, min_compression=0.0)
        return Gathered(ErrorFeedback(codec))

    def exempts(self, shape: tuple[int, ...]) -> bool:
        if super().exempts(shape):
            return True
        return isinstance(self.mild, LowRank) and _value_factor(self.mild, shape) <= 1

    def entries(self) -> tuple[Entry, ...]:
        return tuple(entry for codec in (self.mild, self.strong) for entry in self._method(codec).entries())

    def compressed_rounds(self, num_replicas: int) -> int:
        return 1 + max(self._method(codec).compressed_rounds(num_replicas) for codec in (self.mild, self.strong))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"epochs", "learning_rate"})

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        if isinstance(self.mild, LowRank):
            check_rank(self.mild.rank, {name: s for name, s in shapes.items() if not super(Accordion, self).exempts(s)})

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        compressed = self.compressed_shapes(shapes)
        return self._method(self.mild).memory_bytes(compressed) + 4 * self.compressed_values(shapes)

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        regime = _Regime.of(memory, len(gradients), context)
        decisions: list[Decision] = []
        if regime.epoch < 0:
            decisions = self._decisions(gradients, regime, regime, "all layers begin so")
        elif context.epoch != regime.epoch and context.epoch % self.interval == 0:
            own = [math.sqrt(energy(summed(memory, name, x))) for name, x in gradients.items()]
            norms = yield from _from_first(own, context)
            before = regime
            regime = self._next(regime, norms, context)
            decisions = self._decisions(gradients, before, regime)
        restart = context.epoch != regime.epoch
        regime = regime._replace(epoch=context.epoch)

        groups = [
            {name: x for (name, x), mild in zip(gradients.items(), regime.mild, strict=True) if mild == wanted}
            for wanted in (True, False)
        ]
        running = []
        for codec, group in zip((self.mild, self.strong), groups, strict=True):
            kept = {key: x for key, x in memory.items() if key.partition("/")[2] in group}
            if group:
                running.append(self._method(codec).compress(group, kept, context))
        results: list[Averaged] = yield from run_together(*running)
        averaged = {name: x for result in results for name, x in result.gradients.items()}
        moved = {**memory, **{name: x for result in results for name, x in result.memory.items()}, **regime.tensors()}
        if context.replica == 0:
            for name, x in gradients.items():
                moved[f"epoch/{name}"] = x.clone() if restart else summed(memory, name, x) + x
        return Averaged({name: averaged[name] for name in gradients}, moved, decisions)

    def _next(self, regime: _Regime, norms: list[float], context: ReplicaContext) -> _Regime:
        decayed = context.learning_rate <= self.decay * regime.learning_rate
        mild = [
            decayed or _is_critical(before, norm, self.eta) for before, norm in zip(regime.norms, norms, strict=True)
        ]
        return regime._replace(mild=mild, norms=norms, learning_rate=context.learning_rate)

    def _decisions(
        self, gradients: Gradients, before: _Regime, after: _Regime, reason: str | None = None
    ) -> list[Decision]:
        decisions = []
        for i, (name, x) in enumerate(gradients.items()):
            mild = after.mild[i]
            decisions.append(
                Decision(
                    branch="mild" if mild else "strong",
                    factor=_value_factor(self.mild if mild else self.strong, tuple(x.shape)),
                    minimum=_value_factor(self.mild, tuple(x.shape)),
                    candidate=_value_factor(self.strong, tuple(x.shape)),
                    event="switch" if mild != before.mild[i] else None,
                    reason=reason or f"norm {before.norms[i]:.4g}, then {after.norms[i]:.4g}",
                    layer=name,
                )
            )
        return decisions


class _Regime(NamedTuple):
    """The decision for each layer, and the norms to compare with at the next decision."""

    epoch: int  # last epoch seen, -1 at the start
    mild: list[bool]
    norms: list[float]  # in the epoch before the last decision, 0 if there was none
    learning_rate: float  # at the last decision, or at the start

    @classmethod
    def of(cls, memory: Memory, count: int, context: ReplicaContext) -> _Regime:
        """Return the stored regime, or the initial one for `count` layers."""
        if "controller/whole" not in memory:
            return cls(-1, [True] * count, [0.0] * count, context.learning_rate)
        epoch, *mild = memory["controller/whole"].tolist()
        learning_rate, *norms = memory["controller/real"].tolist()
        return cls(int(epoch), list(map(bool, mild)), norms, learning_rate)

    def tensors(self) -> Memory:
        """Return the regime as tensors, to be read by `of`."""
        return {
            "controller/whole": torch.tensor([self.epoch, *self.mild], dtype=torch.int64),
            "controller/real": torch.tensor([self.learning_rate, *self.norms], dtype=torch.float64),
        }


def _is_critical(before: float, after: float, eta: float) -> bool:
    """Return whether a norm changed by a relative `eta` or more; always true if it was zero.

    >>> [_is_critical(10, norm, 0.5) for norm in (4, 6, 15)], _is_critical(0, 0, 0.5)
    ([True, False, True], True)
    """
    return before == 0 or abs(before - after) / before >= eta


def _value_factor(codec: Codec, shape: tuple[int, ...]) -> float:
    """Return a tensor's number of values divided by the number sent."""
    rows, columns = matrix_of(shape)
    if isinstance(codec, LowRank):
        return rows * columns / (min(rows, columns, codec.rank) * (rows + columns))
    assert codec.kept_share is not None
    return rows * columns / kept_of(codec.kept_share, rows * columns)


def summed(memory: Memory, name: str, like: Tensor) -> Tensor:
    """Return the sum of a layer's gradients over the epoch, which only replica 0 keeps."""
    return memory.get(f"epoch/{name}", torch.zeros_like(like)).to(like.device)


def _keeps(codec: Codec) -> float:
    """Return the rank or the share of values kept by a codec."""
    kept = codec.rank if isinstance(codec, LowRank) else codec.kept_share
    assert kept is not None
    return kept


def _from_first(own: list[float], context: ReplicaContext) -> Rounds[list[float]]:
    """Broadcast the numbers of replica 0 and return them."""
    packet = Identity().encode(torch.tensor(own, dtype=torch.float64))
    received = yield RoundPackets(everyone={"norms": packet} if context.replica == 0 else {})
    values: list[float] = received[0]["norms"].decode().tolist()
    return values
