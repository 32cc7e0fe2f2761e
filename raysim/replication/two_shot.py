"""A coded all-reduce in two shots: a reduce-scatter of codes, and an all-gather of the coded means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysim.codecs import Codec, Packet
from raysim.codecs.codec import check_codec
from raysim.codecs.message import Entry
from raysim.on_demand import torch
from raysim.replication.layers import Layered, key_of
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, Round, Rounds

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class TwoShot(Layered):
    """Sums coded chunks where they belong, and sends the coded means back, as ZeRO++ does (Wang et al. 2023, 2306.10209).

    Each tensor is cut into one chunk a replica. Replica i receives code(chunk i) from all others, adds them and its own chunk in
    float32, and sends code(mean of chunk i) to all. With D replicas each sends 2 (D - 1)/D of the coded bytes, where `Gathered` sends
    D - 1 times as many: less from three replicas on. Values are coded twice, however many replicas there are; PRIME's ring
    (Jaghouar et al. 2024, 2412.01152) codes them D times, with the same bytes.

    >>> from raysim.codecs import Quantize
    >>> TwoShot(Quantize(8))
    TwoShot(Quantize(8))
    """

    codec: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        check_codec("codec", self.codec)
        if self.codec.by_matrix:
            raise ValueError(f"`codec` must code chunks of any length, but {self.codec!r} works on matrices.")

    @property
    def by_bucket(self) -> bool:
        return True

    def entries(self) -> tuple[Entry, ...]:
        return (Entry.of(self.codec),)

    def compressed_rounds(self, num_replicas: int) -> int:
        return 2

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
        received = yield Round(each=parts)
        means = {}
        for name, chunk in chunks.items():
            if own := chunk[me].numel():
                total = torch.zeros_like(chunk[me])
                for other, sent in enumerate(received):
                    total += chunk[me] if other == me else sent[name].decode(total.device).view(own)
                means[name] = self._encode(total / count, f"mean of {name}", context)
        received = yield Round(everyone=means)
        averaged = {}
        for name, gradient in gradients.items():
            decoded = [sent[name].decode(gradient.device).reshape(-1) for sent in received if name in sent]
            averaged[name] = torch.cat(decoded).view_as(gradient)
        return Averaged(averaged, memory)

    def _encode(self, chunk: Tensor, label: str, context: ReplicaContext) -> Packet:
        return self.codec.encode(chunk[None], key_of(label, context))

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        self.codec.check_shapes(self.compressed_shapes(shapes))

    @property
    def memories(self) -> int:
        return 0
