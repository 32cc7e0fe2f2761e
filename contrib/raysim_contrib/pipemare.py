"""PipeMare: backwards through corrected weights, and lower rates for delayed stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from raysim.notation import check_integer, check_real
from raysim.schedules.weights import Continuous, Memory, Weights

_MOVEMENT = "movement/"  # memory prefix


@dataclass(frozen=True, repr=False)
class PipeMare(Continuous):
    """Lowers the rate of delayed stages at the start, and corrects the weights of backwards (Yang et al. 2019, 1910.05124).

    Forward and backward of a microbatch both read the newest version, which is updated `delay` times in between. The backward
    subtracts `delay` times d, the moving average of updates, to approximate the weights of its forward::

        rate of step k:       rate / delay^p    with p = 1 - min(k / steps, 1)
        backward of W[t] at:  W[t] - delay d[t]
        d[t+1] = c d[t] + (1 - c) (W[t+1] - W[t])    with c = decay^(1 / delay)

    `delay` in the rate is the stage's longest; stages without delay use the given rate. `steps` counts steps of the run, each
    of which updates the weights once per microbatch, or once with `update='step'`.

    Use: Many stages, if a deployment cannot keep stashed versions.
    """

    variants: ClassVar[tuple[str, ...]] = ("PipeMare(200)",)

    steps: int
    decay: float = 0.135

    def __post_init__(self) -> None:
        super().__post_init__()
        self._coerce(steps=check_integer("steps", self.steps, 1), decay=check_real("decay", self.decay, 0, 1))
        if self.decay == 1:
            raise ValueError("`decay` must be below 1, or the average of updates stays zero, but got 1.")

    def check(self, run: Any) -> None:
        if run.dtype != "float32":
            raise ValueError(
                f"`dtype` must be float32 with {self!r}, whose backwards do not read the weights that were rounded for the "
                f"forwards, but got {run.dtype}."
            )

    def check_plan(self, plan: Any, modules: Sequence[Any]) -> None:
        if plan.tied:
            raise ValueError(
                f"`weights` cannot be {self!r} with parameters that are tied between stages: their copies would diverge. Use "
                "'DoubleBuffered'."
            )

    def rate(self, rate: float, delay: int, step: int) -> float:
        power = 1 - min(step / self.steps, 1)
        return rate / float(max(delay, 1) ** power)

    def backward_weights(self, read: Weights, newest: Weights, memory: Memory, delay: int) -> Weights:
        return {name: x - delay * memory[f"{_MOVEMENT}{name}"] if memory else x for name, x in newest.items()}

    def after_update(self, before: Weights, after: Weights, memory: Memory, delay: int) -> Memory:
        kept = self.decay ** (1 / max(delay, 1))
        moved = {name: (1 - kept) * (x - before[name]) for name, x in after.items()}
        if memory:
            moved = {name: kept * memory[f"{_MOVEMENT}{name}"] + x for name, x in moved.items()}
        return {f"{_MOVEMENT}{name}": x for name, x in moved.items()}

    def num_copies(self, delays: Sequence[int]) -> int:
        longest = max(delays)
        return longest + 2 * bool(longest)  # the moving average, and the weights of one backward
