"""Replica gradients averaged uncompressed, coded once for an all-gather, or coded twice for a two-shot all-reduce."""

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
