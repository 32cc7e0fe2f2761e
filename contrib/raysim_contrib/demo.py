"""DeMo: the strongest frequencies of decoupled momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from raysim.codecs import TopK
from raysim.codecs.codec import count_work
from raysim.codecs.message import Entry
from raysim.on_demand import torch
from raysim.replication.layers import remembered
from raysim.replication.local import block_of, checked_blocks, from_blocks, to_blocks
from raysim.replication.method import (
    Averaged,
    Gradients,
    Memory,
    ReplicaContext,
    ReplicaMethod,
    RoundPackets,
    Rounds,
    num_values,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class DeMo(ReplicaMethod):
    """Sends the `kept` largest frequencies of each block of the momentum, and steps by the sign of their mean (decoupled momentum,
    Peng et al. 2024, 2411.19870, and bloc97/DeMo).

    With r the learning rate, F the orthonormal cosine transform of `side` x `side` blocks, and T the selection::

        m = decay m + r g;   send q = T(F(m));   m = m - F^-1(q)
        step by sign(F^-1(mean of q))

    Each frequency is averaged over the replicas that sent it. The optimiser must be SGD without momentum. The sides of a
    block are the largest divisors of the matrix's sides up to `side`. All tensors are compressed.

    Use: Comparison with signSGD and DGC: frequencies of the momentum.
    """

    variants: ClassVar[tuple[str, ...]] = ("DeMo",)
    optimizers: ClassVar[frozenset[str] | None] = frozenset({"sgd"})

    kept: int = 32
    decay: float = 0.999
    side: int = 64

    def __post_init__(self) -> None:
        self._coerce(**checked_blocks(self.kept, self.side, self.decay))

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"learning_rate"})

    def codec(self, block_values: int) -> TopK:
        return TopK(min(1.0, self.kept / block_values))

    def entries(self) -> tuple[Entry, ...]:
        return (Entry.of(self.codec(self.side * self.side)),)

    def num_rounds(self, num_replicas: int) -> int:
        return 1

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        if momentum:
            raise ValueError(
                f"`optimizer.momentum` must be 0 with {self!r}, which keeps a momentum itself, but got {momentum:g}."
            )

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 4 * num_values(shapes)

    def average(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        packets, moved = {}, dict(memory)
        for name, x in gradients.items():
            momentum = self.decay * remembered(memory, "momentum", name, x) + context.learning_rate * x.detach()
            frequencies = transformed(to_blocks(momentum, self.side)).flatten(1)
            count_work(2 * x.nbytes)  # the transform and its inverse
            packets[name] = self.codec(frequencies.shape[1]).encode(frequencies)
            moved[f"momentum/{name}"] = momentum - self._whole(packets[name].decode(x.device), x)
        received = yield RoundPackets(everyone=packets)
        steps = {}
        for name, x in gradients.items():
            sent = torch.stack([packets[name].decode(x.device) for packets in received])
            mean = sent.sum(dim=0) / sent.count_nonzero(dim=0).clamp(min=1)
            steps[name] = self._whole(mean, x).sign()
        return Averaged(steps, moved)

    def _whole(self, frequencies: Tensor, like: Tensor) -> Tensor:
        """Return the tensor with these frequencies of blocks."""
        shape = tuple(like.shape)
        blocks = frequencies.view(len(frequencies), *block_of(shape, self.side))
        return from_blocks(transformed(blocks, back=True), shape, self.side)


def transformed(blocks: Tensor, *, back: bool = False) -> Tensor:
    """Return the orthonormal cosine transform (type II) of blocks (count, rows, columns), or with `back` its inverse."""
    rows, columns = (cosines(size).to(blocks.device, blocks.dtype) for size in blocks.shape[1:])
    if back:
        return rows.T @ blocks @ columns
    return rows @ blocks @ columns.T


@lru_cache(maxsize=64)
def cosines(size: int) -> Tensor:
    """Return the orthogonal matrix of the cosine transform of `size` values, float64."""
    angles = torch.outer(torch.arange(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64) + 0.5)
    matrix = torch.cos(angles * (math.pi / size)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix
