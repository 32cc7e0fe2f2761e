"""PipeMare: no versions are stashed; rates are lowered by the delay, and backwards correct for the weights' movement."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raysim.notation import check_integer, check_real
from raysim.weights.base import Continuous, Memory, Weights

MOVEMENT = "movement/"  # prefix of the memory


@dataclass(frozen=True, repr=False)
class PipeMare(Continuous):
    """Lowers the rate of delayed stages at the start, and corrects the weights of backwards (Yang et al. 2019, 1910.05124).

    Forward and backward of a microbatch both read the newest version, which the stage has updated `delay` times in between.
    The backward goes back along d, the moving average of updates, to about the version of its forward::

        rate of step k:       rate / delay^p    with p = 1 - min(k / steps, 1)
        backward of W[t] at:  W[t] - delay d[t]
        d[t+1] = c d[t] + (1 - c) (W[t+1] - W[t])    with c = decay^(1 / delay)

    The rate is that of the longest delay of the stage, or as given without a delay. `steps` counts those of the run, each
    of which updates the weights once a microbatch, or once with `update='step'`.
    """

    rate_by_stage: ClassVar[bool] = True
    corrects: ClassVar[bool] = True
    remembers: ClassVar[bool] = True

    steps: int
    decay: float = 0.135

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(steps=check_integer("steps", self.steps, 1), decay=check_real("decay", self.decay, 0, 1))
        if self.decay == 1:
            raise ValueError("`decay` must be below 1, or the average of updates stays zero, but got 1.")

    def rate(self, rate: float, delay: int, step: int) -> float:
        power = 1 - min(step / self.steps, 1)
        return rate / float(max(delay, 1) ** power)

    def corrected(self, newest: Weights, memory: Memory, delay: int) -> Weights:
        return {name: x - delay * memory[f"{MOVEMENT}{name}"] if memory else x for name, x in newest.items()}

    def remember(self, before: Weights, after: Weights, memory: Memory, delay: int) -> Memory:
        kept = self.decay ** (1 / max(delay, 1))
        moved = {name: (1 - kept) * (x - before[name]) for name, x in after.items()}
        if memory:
            moved = {name: kept * memory[f"{MOVEMENT}{name}"] + x for name, x in moved.items()}
        return {f"{MOVEMENT}{name}": x for name, x in moved.items()}

    def num_copies(self, delays: Sequence[int]) -> int:
        longest = max(delays)
        return longest + 2 * bool(longest)  # the average, and the weights of one backward
