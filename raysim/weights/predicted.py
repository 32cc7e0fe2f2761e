"""Predicted weights: a forward reads the weights that are expected at its update."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from raysim.weights.base import Continuous, Weights

MOMENTUM = "sgd"
ADAPTIVE = ("adam", "adamw")


@dataclass(frozen=True, repr=False)
class Predicted(Continuous):
    """Reads, in a forward and its backward, the newest version moved on by `delay` steps of the optimiser::

        forward and backward at:  V = W[t - delay] - delay rate u[t - delay]
        W[t+1] = W[t] - rate grad f(V)

    With sgd, u is the momentum (SpecTrain, Chen et al. 2018, 1809.02839). With adam and adamw it is their step, m / (sqrt(v) +
    epsilon) with both means corrected for the start (XPipe, Guan et al. 2019, 1911.04610).
    """

    predicts: ClassVar[bool] = True

    def check(self, in_flight: int, num_microbatches: int, optimizer: str, momentum: float | None) -> None:
        if optimizer not in (MOMENTUM, *ADAPTIVE):
            raise ValueError(
                f"`optimizer.name` must be {MOMENTUM}, {' or '.join(ADAPTIVE)} with {self!r}, which predicts by their direction, "
                f"but got {optimizer!r}."
            )
        if optimizer == MOMENTUM and not momentum:
            raise ValueError(
                f"`optimizer.momentum` must be above 0 with {self!r}, which predicts by it, but got {momentum}."
            )

    def predicted(self, newest: Weights, directions: Weights, rate: float, delay: int) -> Weights:
        return {
            name: x - (delay * rate) * directions[name] if name in directions else x.clone()
            for name, x in newest.items()
        }

    def num_copies(self, delays: Sequence[int]) -> int:
        lengths = {delay for delay in delays if delay}
        return len(lengths) * (max(delays) + 1)
