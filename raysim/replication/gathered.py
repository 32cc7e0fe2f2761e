"""Replica gradients averaged uncompressed, coded once for an all-gather (themselves, or as differences from a reference that all
replicas know: EF21), or coded twice for a two-shot all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.codecs import Codec, Identity, Packet
from raysim.codecs.message import Entry
from raysim.compressors.compressor import Compressor, Context, Plain
from raysim.compressors.memory import ErrorFeedback, MixedErrorFeedback, Residual
from raysim.notation import check_choice
from raysim.on_demand import torch
from raysim.replication.layers import (
    Coded,
    Layered,
    check_scope,
    flatten,
    gather_mean,
    key_of,
    remembered,
    sum_values,
    unflatten,
)
from raysim.replication.method import (
    Averaged,
    Gradients,
    Memory,
    ReplicaContext,
    ReplicaMethod,
    RoundPackets,
    Rounds,
    mean_dense,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class Dense(ReplicaMethod):
    """Averages gradients uncompressed by an all-reduce; written `Identity`."""

    compresses: ClassVar[bool] = False

    def __repr__(self) -> str:
        return repr(Identity())

    @property
    def by_bucket(self) -> bool:
        return True

    def num_rounds(self, num_replicas: int) -> int:
        return 2

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        return Averaged((yield from mean_dense("dense", gradients, context)), memory)


@dataclass(frozen=True, repr=False)
class Gathered(Layered):
    """Sends every tensor by a codec, with or without error feedback, and averages the decoded tensors of all replicas.

    Written as the bare codec or compressor if all options have their defaults. A tensor is one row for TopK, and (first axis, the
    rest) for codecs of matrices, rows or channels; `scope="stage"` makes the whole stage one row. With `seeds="shared"`, RandomK
    draws the same positions on all replicas, so only values are sent, by an all-reduce; with "separate" keys are sent.

    >>> from raysim.codecs import TopK
    >>> Gathered(TopK(0.01)), Gathered(ErrorFeedback(TopK(0.01)), warmup=100)
    (TopK(0.01), Gathered(ErrorFeedback(TopK(0.01)), warmup=100))
    """

    compressor: Compressor
    scope: str = "tensor"
    seeds: str = "shared"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.compressor, Codec):
            self._coerce(compressor=Plain(self.compressor))
        if not isinstance(self.compressor, (Plain, ErrorFeedback, MixedErrorFeedback)):
            raise ValueError(
                f"`compressor` of replica gradients must be a codec, alone or under ErrorFeedback, but got {self.compressor!r}."
            )
        if isinstance(self.compressor, Residual) and self.compressor.key == "sample":
            raise ValueError("`key` of replica gradients cannot be 'sample': they belong to no sample. Leave it out.")
        check_scope(self.scope)
        check_choice("seeds", self.seeds, ["shared", "separate"])
        if self.scope == "stage" and self.compressor.codec.by_matrix:
            raise ValueError(
                f"`scope` must be 'tensor' for {self.compressor.codec!r}, which works on matrices, but got 'stage'."
            )

    def __repr__(self) -> str:
        bare = Gathered(self.compressor)
        return repr(self.compressor) if self == bare else super().__repr__()

    @property
    def by_bucket(self) -> bool:
        return self.scope == "tensor"

    def entries(self) -> tuple[Entry, ...]:
        return self.compressor.entries()

    def compressed_rounds(self, num_replicas: int) -> int:
        return 2 if self._linear else 1

    @property
    def _linear(self) -> bool:
        """True if the packets of all replicas have the same positions, so their values can be summed."""
        return self.compressor.codec.linear and self.seeds == "shared"

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        if self.compressor.codec.by_matrix:
            rows = {name: gradient.reshape(len(gradient), -1) for name, gradient in gradients.items()}
        else:
            rows = flatten(gradients, self.scope)
        packets, moved = {}, dict(memory)
        for name, x in rows.items():
            key = key_of(name, context, shared=self._linear)
            kept = memory.get(f"residual/{name}")
            state = {} if kept is None else {0: kept.view_as(x)}
            packets[name], changes = self.compressor.encode(x, state, _message(context, key))
            moved |= {f"residual/{name}": residual for residual in changes.values()}
        device = next(iter(rows.values())).device
        if self._linear:
            means = yield from sum_values(packets, context, device)
        else:
            means = yield from gather_mean(packets, device)
        return Averaged(unflatten(means, gradients), moved)

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        self.compressor.codec.check_shapes(self.compressed_shapes(shapes))

    @property
    def memories(self) -> int:
        return int(isinstance(self.compressor, Residual))


def as_method(written: object) -> ReplicaMethod | None:
    """Return the replica method of a bare codec or compressor, or the method itself; None for anything else."""
    if isinstance(written, ReplicaMethod):
        return written
    if isinstance(written, Identity):
        return Dense()
    if isinstance(written, (Codec, ErrorFeedback, MixedErrorFeedback)):
        return Gathered(written)  # type: ignore[arg-type]  # a codec becomes Plain there
    return None


def _message(context: ReplicaContext, key: int) -> Context:
    """Return the context of a step's only message, for a link compressor."""
    return Context(
        direction="replica_gradient",
        step=context.step,
        epoch=context.epoch,
        microbatch=0,
        sample_ids=(0,),
        key=key,
    )


@dataclass(frozen=True, repr=False)
class TwoShot(Coded):
    """Reduce-scatters coded chunks and all-gathers the coded means, as in ZeRO++ (Wang et al. 2023, 2306.10209).

    Replica i receives code(chunk i) from all others, adds them and its own chunk in float32, and sends code(mean of chunk i) to all.
    With D replicas each sends 2 (D - 1)/D of the coded bytes, while `Gathered` sends D - 1 times as many. Values are coded twice for
    any D; PRIME's ring (Jaghouar et al. 2024, 2412.01152) codes them D times, with the same bytes.

    >>> from raysim.codecs import Quantize
    >>> TwoShot(Quantize(8))
    TwoShot(Quantize(8))
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec.by_matrix:
            raise ValueError(f"`codec` must code chunks of any length, but {self.codec!r} works on matrices.")

    @property
    def fixed_size(self) -> bool:
        return self.codec.fixed_size

    @property
    def by_bucket(self) -> bool:
        return True

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        me, count = context.replica, context.num_replicas
        chunks = {name: gradient.reshape(-1).tensor_split(count) for name, gradient in gradients.items()}
        parts = {
            other: {
                name: self._encode(chunk[other], f"{name} to {other}", context)
                for name, chunk in chunks.items()
                if chunk[other].numel()
            }
            for other in range(count)
            if other != me
        }
        received = yield RoundPackets(each=parts)
        means = {}
        for name, chunk in chunks.items():
            if own := chunk[me].numel():
                total = torch.zeros_like(chunk[me])
                for other, sent in enumerate(received):
                    total += chunk[me] if other == me else sent[name].decode(total.device).view(own)
                means[name] = self._encode(total / count, f"mean of {name}", context)
        received = yield RoundPackets(everyone=means)
        averaged = {}
        for name, gradient in gradients.items():
            decoded = [sent[name].decode(gradient.device).reshape(-1) for sent in received if name in sent]
            averaged[name] = torch.cat(decoded).view_as(gradient)
        return Averaged(averaged, memory)

    def _encode(self, chunk: Tensor, label: str, context: ReplicaContext) -> Packet:
        return self.codec.encode(chunk[None], key_of(label, context))

    @property
    def memories(self) -> int:
        return 0


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
        if self.codec.relative_variance(1) is None:
            self.codec.check_feedback()

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        if self.start == "dense" and f"own/{next(iter(gradients))}" not in memory:
            means = yield from mean_dense("first gradients", gradients, context)
            own = {f"own/{name}": gradient.clone() for name, gradient in gradients.items()}
            return Averaged(means, {**memory, **own, **{f"mean/{name}": mean.clone() for name, mean in means.items()}})
        sent, means = yield from self._exchange(beyond(gradients, memory), context)
        moved, averaged = dict(memory), {}
        for name, gradient in gradients.items():
            scale = 1 / (1 + (self.codec.relative_variance(gradient.numel()) or 0.0))
            moved[f"own/{name}"] = remembered(memory, "own", name, gradient) + scale * sent[name]
            averaged[name] = remembered(memory, "mean", name, gradient) + scale * means[name]
            moved[f"mean/{name}"] = averaged[name].clone()  # clipping overwrites gradients
        return Averaged(averaged, moved)
