"""EDGC: PowerSGD with a rank that follows changes of the gradients' entropy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from raysim.codecs.codec import count_work
from raysim.codecs.lowrank import check_rank
from raysim.compressors.compressor import Decision
from raysim.notation import check_integer, check_real
from raysim.on_demand import torch
from raysim.replication.layers import Layered
from raysim.replication.low_rank import PowerSGD, matrix_of
from raysim.replication.method import Averaged, Gradients, Memory, ReplicaContext, Rounds

if TYPE_CHECKING:
    from torch import Tensor

_STATE = "controller/edgc"  # rank, sum and count of this window, means of the last and the first two windows


@dataclass(frozen=True, repr=False)
class EDGC(Layered):
    """PowerSGD with a rank that follows changes of the gradients' entropy (Yi et al. 2025, 2511.10333, and their code).

    The entropy of a stage's averaged gradients is that of a histogram with `bins` bins, of the share `sample` of the values in
    every `every`-th step, averaged over windows of `window` steps. With H_t the mean of window t::

        r = rank/4 + (rank - rank/4) |H_t - H_(t-1)| / |H_2 - H_1|

    rounded down to an even number, at most `stride` away from the previous rank. In the first two windows it is `rank`. The
    first `warmup` steps are dense. Each stage follows its own entropy (ours).

    Use: PowerSGD with a rank that falls once the gradients' entropy settles.
    """

    variants: ClassVar[tuple[str, ...]] = ("EDGC(16, window=100)",)

    rank: int
    window: int = 1000
    every: int = 10
    sample: float = 0.25
    stride: int = 4
    bins: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        window = check_integer("window", self.window, 1)
        self._coerce(
            rank=check_integer("rank", self.rank, 1),
            window=window,
            every=check_integer("every", self.every, 1, window),
            sample=check_real("sample", self.sample, 0, 1, open_low=True),
            stride=check_integer("stride", self.stride, 1),
            bins=check_integer("bins", self.bins, 2),
        )

    @property
    def lowest(self) -> int:
        """The lowest rank."""
        return max(1, self.rank // 4)

    def exempts(self, shape: tuple[int, ...]) -> bool:
        return self._powersgd(self.rank).exempts(shape)

    def compressed_rounds(self, num_replicas: int) -> int:
        return self._powersgd(self.rank).compressed_rounds(num_replicas)

    def check(self, shapes: Mapping[str, tuple[int, ...]], num_replicas: int, momentum: float | None) -> None:
        check_rank(self.rank, {name: shape for name, shape in shapes.items() if not super(EDGC, self).exempts(shape)})

    def memory_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        return self._powersgd(self.rank).memory_bytes(shapes)

    def compress(self, gradients: Gradients, memory: Memory, context: ReplicaContext) -> Rounds[Averaged]:
        state = memory[_STATE].tolist() if _STATE in memory else [float(self.rank), 0.0, 0.0]
        averaged = yield from self._powersgd(int(state[0])).compress(gradients, memory, context)
        rank, event, step = int(state[0]), None, context.step - self.warmup
        if step % self.every == 0:
            values = torch.cat([x.reshape(-1) for x in averaged.gradients.values()])
            count_work(math.ceil(values.nbytes * self.sample))
            state[1:3] = state[1] + entropy(values, self.bins, self.sample), state[2] + 1
        if (step + 1) % self.window == 0:
            means = [*state[3:], state[1] / max(state[2], 1.0)]
            after = self._adjusted(rank, means)
            event = "promote" if after < rank else "demote" if after > rank else None
            state = [float(after), 0.0, 0.0, *means[:2], *means[2:][-1:]]
        sides = [matrix_of(tuple(x.shape)) for x in gradients.values()]
        sent = sum(min(m, n, rank) * (m + n) for m, n in sides)
        decision = Decision(
            branch=f"rank {rank}", factor=sum(m * n for m, n in sides) / sent, event=event, throughput=None
        )
        moved = {**averaged.memory, _STATE: torch.tensor(state, dtype=torch.float64)}
        return Averaged(averaged.gradients, moved, [decision])

    def _adjusted(self, rank: int, means: list[float]) -> int:
        """Return the rank after a window, from the mean entropies of the first two windows and of the last ones."""
        if len(means) < 2 or means[0] == means[1]:
            return self.rank
        share = abs(means[-1] - means[-2]) / abs(means[1] - means[0])
        wanted = round(self.lowest + (self.rank - self.lowest) * share)
        wanted = max(self.lowest, min(wanted, self.rank))
        wanted = max(self.lowest, wanted // 2 * 2)
        return max(rank - self.stride, min(wanted, rank + self.stride))

    def _powersgd(self, rank: int) -> PowerSGD:
        return PowerSGD(rank, min_values=self.min_values)


def entropy(values: Tensor, bins: int = 1000, share: float = 0.25) -> float:
    """Return the entropy in nats of the histogram of every (1/share)-th value, with `bins` equal bins between the extremes.

    >>> round(entropy(torch.arange(4000.0)), 3), entropy(torch.zeros(10))
    (6.908, 0.0)
    """
    sampled = values.reshape(-1)[:: max(1, int(1 / share))].double().cpu()
    if not sampled.numel():
        return 0.0
    low, high = float(sampled.min()), float(sampled.max())
    if low == high:
        return 0.0
    counts = torch.histc(sampled, bins, low, high)
    return float(torch.special.entr(counts / counts.sum()).sum())
