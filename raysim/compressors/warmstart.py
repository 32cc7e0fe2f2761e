"""Low rank that goes on from the message before: PowerSGD's operator on a link."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raysim.codecs import LowRank, Packet
from raysim.codecs.lowrank import orthonormal
from raysim.compressors.base import Compressor, Context, State
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_PLACE = 0  # of Q in the state: all messages of a link share it


@dataclass(frozen=True, repr=False)
class WarmStart(Compressor):
    """Sends P = orth(M Q) and M^T P, and keeps M^T P: made orthonormal it is the Q of the link's next message (PowerSGD, Vogels et
    al. 2019, 1905.13727; on links Optimus-CC, Song et al. 2023, 2301.09830, and Bian et al. 2024, 2301.02654).

    Where messages change little, this is a subspace iteration that tends to the best approximation of the rank. The sender alone
    remembers Q. It is drawn from the key for the first message and for one of another shape, and so are columns of it that a
    message left at zero, which would stay there. Wrap it in an error feedback that takes compressors for Optimus-CC whole.

    >>> WarmStart(LowRank(16))
    WarmStart(LowRank(16))
    """

    codec: LowRank

    def __post_init__(self) -> None:
        if not isinstance(self.codec, LowRank):
            raise ValueError(f"`codec` must be a LowRank, whose Q is kept, but got {self.codec!r}.")

    def encode(self, x: Tensor, state: State, context: Context) -> tuple[Packet, State]:
        matrices = self.codec.matrices(tuple(x.shape))
        if matrices is None or context.key is None:
            return self.codec.encode(x, context.key), {}
        number, _, columns, rank = matrices
        start = self.codec.start(context.key, columns, rank, x.device)
        held = state.get(_PLACE)
        if held is not None and held.shape == (number, columns, rank):
            kept = orthonormal(held.to(x.device))
            start = torch.where(kept.any(dim=1, keepdim=True), kept, start)
        packet, right = self.codec.encode_from(x, start)
        return packet, {_PLACE: right}

    def memory_values(self, message: tuple[int, ...], num_microbatches: int, num_samples: int) -> int:
        matrices = self.codec.matrices(message)
        return 0 if matrices is None else math.prod(matrices) // matrices[1]
