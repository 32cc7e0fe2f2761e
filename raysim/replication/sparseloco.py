"""SparseLoCo: local steps whose changes are sent as the greatest few of each block, in two bits each."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysim.codecs import Codec, NonUniform, TopK
from raysim.codecs.message import Entry
from raysim.notation import check_integer, check_real
from raysim.replication.base import Averaged, Gradients, Memory, Received, ReplicaContext, ReplicaMethod, Round
from raysim.replication.blocks import block_of, from_blocks, to_blocks
from raysim.replication.layers import Layered, gather_mean, key_of, remembered
from raysim.replication.local import LocalSteps

if TYPE_CHECKING:
    from torch import Tensor

TWO_BITS = NonUniform(2, fit="deviation")


@dataclass(frozen=True, repr=False)
class SparseLoCo(LocalSteps):
    """Local steps whose changes are sent as the `kept` greatest values of each block of `side` x `side`, under error feedback
    (Sarfi et al. 2025, 2508.15706; block size and codec as in the code of templar).

    With W - W_r the change of replica r in `steps` steps, C the codec, and no momentum::

        e = decay e + (W - W_r);   send C(e);   e = e - C(e)
        W = W - rate (mean over replicas of C(e))

    Values are sent by the codec `values`: by default in two bits, buckets within three standard deviations of the mean, each
    decoded as the mean of its values. Blocks have the greatest divisors of a matrix's sides up to `side`. Tensors of one
    dimension, or of fewer than `min_values` values, are sent uncompressed (ours).
    """

    rate: float = 0.6
    decay: float = 0.95
    kept: int = 64
    side: int = 64
    values: Codec = TWO_BITS
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
    """Sends the `kept` greatest values of each block of `side` x `side` values, of the input plus `decay` times the residual."""

    kept: int
    side: int
    decay: float
    values: Codec

    def __post_init__(self) -> None:
        super().__post_init__()
        side = check_integer("side", self.side, 1, 4096)
        self._coerce(
            side=side,
            kept=check_integer("kept", self.kept, 1, side * side),
            decay=check_real("decay", self.decay, 0, 1),
        )
        self.codec(side * side)  # refuses unfit `values`

    def codec(self, block_values: int) -> TopK:
        """Return the codec of blocks of so many values."""
        return TopK(min(1.0, self.kept / block_values), values=self.values)

    def entries(self) -> tuple[Entry, ...]:
        return (Entry.of(self.codec(self.side * self.side)),)

    def compressed_rounds(self, num_replicas: int) -> int:
        return 1

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return 4 * self.compressed_values(shapes)

    def compress(
        self, gradients: Gradients, memory: Memory, context: ReplicaContext
    ) -> Generator[Round, Received, Averaged]:
        packets, moved = {}, dict(memory)
        for name, x in gradients.items():
            fed = to_blocks(self.decay * remembered(memory, "residual", name, x) + x, self.side).flatten(1)
            packets[name] = self.codec(fed.shape[1]).encode(fed, key_of(name, context))
            moved[f"residual/{name}"] = self._whole(fed - packets[name].decode(fed.device), x)
        means = yield from gather_mean(packets, next(iter(gradients.values())).device)
        return Averaged({name: self._whole(means[name], x) for name, x in gradients.items()}, moved)

    def _whole(self, blocks: Tensor, like: Tensor) -> Tensor:
        """Return flat blocks as the tensor that they were cut from."""
        shape = tuple(like.shape)
        return from_blocks(blocks.view(len(blocks), *block_of(shape, self.side)), shape)
