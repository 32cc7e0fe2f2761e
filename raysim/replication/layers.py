"""Base of methods that compress gradients layer by layer, except in the first steps and for small layers."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raysim.codecs import Codec, Identity, derive_key
from raysim.codecs.codec import check_is_codec, nest, to_tensor
from raysim.codecs.message import Entry
from raysim.notation import check_choice, check_integer
from raysim.on_demand import torch
from raysim.replication.method import (
    Averaged,
    Gradients,
    Memory,
    Packets,
    ReplicaContext,
    ReplicaMethod,
    RoundPackets,
    Rounds,
    mean_dense,
    num_values,
    run_together,
    sum_tensors,
)

if TYPE_CHECKING:
    from torch import Tensor

WHOLE = "all layers"  # name of a stage's gradients as one tensor, see `flatten`; no parameter has a name with a space


@dataclass(frozen=True, repr=False)
class Layered(ReplicaMethod):
    """Base of methods that compress tensor by tensor, in `compress`.

    Tensors of one dimension or with fewer than `min_values` values are averaged uncompressed, and so are all tensors in the
    first `warmup` steps. They share rounds with the compressed tensors.
    """

    min_values: int = field(default=1024, kw_only=True)
    warmup: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        self._coerce(
            min_values=check_integer("min_values", self.min_values, 1), warmup=check_integer("warmup", self.warmup, 0)
        )

    @abstractmethod
    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        """Return the rounds that average `gradients` (at least one tensor) with compression."""

    @abstractmethod
    def compressed_rounds(self, num_replicas: int) -> int:
        """Return the maximum number of rounds of `compress`."""

    def exempts(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape is averaged uncompressed."""
        return len(shape) < 2 or math.prod(shape) < self.min_values

    def num_rounds(self, num_replicas: int) -> int:
        return max(2, self.compressed_rounds(num_replicas))

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        compressed = {
            name: gradient.detach()
            for name, gradient in gradients.items()
            if context.step >= self.warmup and not self.exempts(tuple(gradient.shape))
        }
        exempt = mean_dense(
            "exempt layers", {name: x for name, x in gradients.items() if name not in compressed}, context
        )
        if not compressed:
            return Averaged((yield from exempt), memory)
        dense, averaged = yield from run_together(exempt, self.compress(compressed, memory, context))
        means = {**dense, **averaged.gradients}
        result: Averaged = replace(averaged, gradients={name: means[name] for name in gradients})
        return result

    def compressed_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the compressed tensors."""
        return {name: shape for name, shape in shapes.items() if not self.exempts(shape)}

    def compressed_values(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the number of compressed values in `shapes`, which is the size of a residual."""
        return num_values(self.compressed_shapes(shapes))

    @property
    def memories(self) -> int:
        """The number of float32 values per compressed value in one replica's memory; by default 1, for a residual."""
        return 1

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 4 * self.memories * self.compressed_values(shapes)


@dataclass(frozen=True, repr=False)
class Coded(Layered):
    """Base of methods that send every tensor, or its chunks, by one codec."""

    codec: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        check_is_codec("codec", self.codec)

    def entries(self) -> tuple[Entry, ...]:
        return (Entry.of(self.codec),)

    def compressed_rounds(self, num_replicas: int) -> int:
        return 2

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        self.codec.check_shapes(self.compressed_shapes(shapes))


def check_scope(scope: object) -> None:
    """Raise ValueError unless `scope` is "tensor" (one selection per tensor) or "stage" (one for all)."""
    check_choice("scope", scope, ["tensor", "stage"])


def flatten(gradients: Gradients, scope: str) -> Gradients:
    """Return each tensor as one row, or with scope "stage" all tensors as a single row."""
    if scope == "tensor":
        return {name: gradient.reshape(1, -1) for name, gradient in gradients.items()}
    return {WHOLE: torch.cat([gradient.reshape(-1) for gradient in gradients.values()])[None]}


def unflatten(rows: Gradients, gradients: Gradients) -> Gradients:
    """Reshape the rows of `flatten` to the shapes of `gradients`."""
    if WHOLE in rows:
        parts = torch.split(rows[WHOLE].view(-1), [gradient.numel() for gradient in gradients.values()])
        rows = dict(zip(gradients, parts, strict=True))
    return {name: rows[name].view_as(gradient) for name, gradient in gradients.items()}


def key_of(name: str, context: ReplicaContext, *, shared: bool = False) -> int:
    """Return the key of a random codec for the tensor `name` in this step, per replica or shared by all replicas."""
    who = "shared" if shared else context.replica
    return derive_key(context.seed, "replica gradient", who, context.stage, name, context.step)


def remembered(memory: Memory, kind: str, name: str, like: Tensor) -> Tensor:
    """Return the memory of a `kind` for the tensor `name`; zeros if none is stored."""
    kept = memory.get(f"{kind}/{name}")
    return torch.zeros_like(like) if kept is None else kept.to(like.device).view_as(like)


def gather_mean(packets: Packets, device: torch.device) -> Rounds[Gradients]:
    """Return the mean of the decoded packets of each name, summed in the order of replicas."""
    received = yield RoundPackets(everyone=packets)
    means = {}
    for name, packet in packets.items():
        total = torch.zeros(packet.shape, device=device)
        for sent in received:
            total += sent[name].decode(device)
        means[name] = total / len(received)
    return means


def sum_values(packets: Packets, context: ReplicaContext, device: torch.device) -> Rounds[Gradients]:
    """Return the means of packets with equal positions: sums only the values, and decodes the mean."""
    values = {
        name: to_tensor(packet.arrays["values.values"], torch.float32, device) for name, packet in packets.items()
    }
    label = f"values by {next(iter(packets.values())).codec!r}"
    sums = yield from sum_tensors(label, values, context)
    means = {}
    for name, packet in packets.items():
        arrays = dict(packet.arrays, **nest("values", Identity().encode(sums[name] / context.num_replicas)))
        means[name] = packet._replace(arrays=arrays).decode(device)
    return means
