"""DeMo: momentum stays at each replica but for its strongest frequencies, whose sign is the step."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from raysim.codecs import TopK
from raysim.codecs.message import Entry
from raysim.codecs.work import count_work
from raysim.notation import check_integer, check_real
from raysim.on_demand import torch
from raysim.replication.base import Averaged, Gradients, Memory, Received, ReplicaContext, ReplicaMethod, Round
from raysim.replication.blocks import block_of, from_blocks, to_blocks
from raysim.replication.layers import remembered

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class DeMo(ReplicaMethod):
    """Sends the `kept` greatest frequencies of each block of the momentum, and steps by the sign of their mean (decoupled momentum,
    Peng et al. 2024, 2411.19870, and bloc97/DeMo).

    With r the learning rate, F the orthonormal cosine transform of blocks of `side` x `side`, T the selection::

        m = decay m + r g;   send q = T(F(m));   m = m - F^-1(q)
        step by sign(F^-1(mean of q))

    The mean of a frequency is that over the replicas that sent it. The optimiser is plain SGD, without a momentum of its own.
    Blocks have the greatest divisors of a matrix's sides up to `side`; all tensors are compressed.
    """

    optimizers: ClassVar[frozenset[str] | None] = frozenset({"sgd"})

    kept: int = 32
    decay: float = 0.999
    side: int = 64

    def __post_init__(self) -> None:
        side = check_integer("side", self.side, 1, 4096)
        self._coerce(
            side=side,
            kept=check_integer("kept", self.kept, 1, side * side),
            decay=check_real("decay", self.decay, 0, 1),
        )

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"learning_rate"})

    def codec(self, block_values: int) -> TopK:
        """Return the codec of blocks of so many values."""
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
        return 4 * sum(math.prod(shape) for shape in shapes.values())

    def average(
        self, gradients: Gradients, memory: Memory, context: ReplicaContext
    ) -> Generator[Round, Received, Averaged]:
        packets, moved = {}, dict(memory)
        for name, x in gradients.items():
            momentum = self.decay * remembered(memory, "momentum", name, x) + context.learning_rate * x.detach()
            frequencies = transformed(to_blocks(momentum, self.side)).flatten(1)
            count_work(2 * x.nbytes)  # the transform, there and back
            packets[name] = self.codec(frequencies.shape[1]).encode(frequencies)
            moved[f"momentum/{name}"] = momentum - self._whole(packets[name].decode(x.device), x)
        received = yield Round(everyone=packets)
        steps = {}
        for name, x in gradients.items():
            sent = torch.stack([packets[name].decode(x.device) for packets in received])
            mean = sent.sum(dim=0) / sent.count_nonzero(dim=0).clamp(min=1)
            steps[name] = self._whole(mean, x).sign()
        return Averaged(steps, moved)

    def _whole(self, frequencies: Tensor, like: Tensor) -> Tensor:
        """Return the tensor whose blocks have these frequencies."""
        shape = tuple(like.shape)
        blocks = frequencies.view(len(frequencies), *block_of(shape, self.side))
        return from_blocks(transformed(blocks, back=True), shape)


def transformed(blocks: Tensor, *, back: bool = False) -> Tensor:
    """Return the orthonormal cosine transform (type II) of blocks (count, rows, columns), or of that `back` the blocks."""
    rows, columns = (cosines(size).to(blocks.device, blocks.dtype) for size in blocks.shape[1:])
    if back:
        return rows.T @ blocks @ columns
    return rows @ blocks @ columns.T


@lru_cache(maxsize=64)
def cosines(size: int) -> Tensor:
    """Return the matrix of the cosine transform of `size` values, float64; its transpose is its inverse."""
    angles = torch.outer(torch.arange(size, dtype=torch.float64), torch.arange(size, dtype=torch.float64) + 0.5)
    matrix = torch.cos(angles * (math.pi / size)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix
