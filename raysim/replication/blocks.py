"""SparseLoCo, which selects values within square blocks of a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysim.codecs import Codec, NonUniform, TopK
from raysim.codecs.message import Entry
from raysim.notation import check_integer, check_real
from raysim.replication.layers import Layered, gather_mean, key_of, remembered
from raysim.replication.local import LocalSteps
from raysim.replication.low_rank import matrix_of
from raysim.replication.method import (
    Averaged,
    Gradients,
    Memory,
    ReplicaContext,
    ReplicaMethod,
    Rounds,
)

if TYPE_CHECKING:
    from torch import Tensor


def block_of(shape: tuple[int, ...], side: int) -> tuple[int, int]:
    """Return the rows and columns of a tensor's blocks: the largest divisors, up to `side`, of its sides as a matrix.

    >>> block_of((128, 64, 3, 3), 64), block_of((151, 96), 64), block_of((10,), 64)
    ((64, 64), (1, 48), (10, 1))
    """
    rows, columns = matrix_of(shape)
    return divisor(rows, side), divisor(columns, side)


def divisor(count: int, limit: int) -> int:
    """Return the largest divisor of `count` up to `limit`."""
    return next(size for size in range(min(count, limit), 0, -1) if count % size == 0)


def to_blocks(x: Tensor, side: int) -> Tensor:
    """Return the blocks of a tensor as (blocks, rows, columns)."""
    rows, columns = matrix_of(tuple(x.shape))
    height, width = block_of(tuple(x.shape), side)
    cut = x.reshape(rows // height, height, columns // width, width)
    return cut.transpose(1, 2).reshape(-1, height, width)


def from_blocks(blocks: Tensor, shape: tuple[int, ...], side: int) -> Tensor:
    """Return the tensor from its blocks, which may be flat (blocks, values); the inverse of `to_blocks`."""
    rows, columns = matrix_of(shape)
    height, width = block_of(shape, side)
    cut = blocks.reshape(rows // height, columns // width, height, width)
    return cut.transpose(1, 2).reshape(shape)


def checked_blocks(kept: object, side: object, decay: object) -> dict[str, float]:
    """Check the settings of a method that selects `kept` values per block, with `decay`, and return them."""
    limit = check_integer("side", side, 1, 4096)
    return {
        "side": limit,
        "kept": check_integer("kept", kept, 1, limit * limit),
        "decay": check_real("decay", decay, 0, 1),
    }


_TWO_BITS = NonUniform(2, fit="deviation")


@dataclass(frozen=True, repr=False)
class SparseLoCo(LocalSteps):
    """Takes local steps and sends the `kept` largest values of their changes in each `side` x `side` block, with error feedback
    (Sarfi et al. 2025, 2508.15706; block size and codec as in templar's code).

    With W - W_r the change of replica r over `steps` steps, and C the codec::

        e = decay e + (W - W_r);   send C(e);   e = e - C(e)
        W = W - rate (mean over replicas of C(e))

    `values` is the codec of kept values: by default two bits, equally wide buckets within three standard deviations, each decoded
    to its mean. The sides of a block are the largest divisors of the matrix's sides up to `side`. Tensors of one dimension or with
    fewer than `min_values` values are dense (ours).
    """

    rate: float = 0.6
    decay: float = 0.95
    kept: int = 64
    side: int = 64
    values: Codec = _TWO_BITS
    min_values: int = 1024

    def __post_init__(self) -> None:
        super().__post_init__()
        blocks = self.changes
        assert isinstance(blocks, BlockTopK)
        self._coerce(decay=blocks.decay, kept=blocks.kept, side=blocks.side, min_values=blocks.min_values)

    @property
    def changes(self) -> ReplicaMethod:
        return BlockTopK(self.kept, self.side, self.decay, self.values, min_values=self.min_values)


@dataclass(frozen=True, repr=False)
class BlockTopK(Layered):
    """Sends the `kept` largest values of each `side` x `side` block of the input plus `decay` times the residual."""

    kept: int
    side: int
    decay: float
    values: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(**checked_blocks(self.kept, self.side, self.decay))
        self.codec(self.side * self.side)  # rejects unsuitable `values`

    def codec(self, block_values: int) -> TopK:
        return TopK(min(1.0, self.kept / block_values), values=self.values)

    def entries(self) -> tuple[Entry, ...]:
        return (Entry.of(self.codec(self.side * self.side)),)

    def compressed_rounds(self, num_replicas: int) -> int:
        return 1

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        packets, moved = {}, dict(memory)
        for name, x in gradients.items():
            fed = to_blocks(self.decay * remembered(memory, "residual", name, x) + x, self.side).flatten(1)
            packets[name] = self.codec(fed.shape[1]).encode(fed, key_of(name, context))
            moved[f"residual/{name}"] = from_blocks(fed - packets[name].decode(fed.device), tuple(x.shape), self.side)
        means = yield from gather_mean(packets, next(iter(gradients.values())).device)
        averaged = {name: from_blocks(means[name], tuple(x.shape), self.side) for name, x in gradients.items()}
        return Averaged(averaged, moved)
