"""Double-buffered weights: all stages read the version before the newest."""

from dataclasses import dataclass

from raysim.weights.base import Delays, WeightPolicy


@dataclass(frozen=True, repr=False)
class DoubleBuffered(WeightPolicy):
    """Updates once a step, and reads the version before the newest at all stages (PipeDream-2BW, Narayanan et al. 2021,
    2006.09503)::

        W[t+1] = W[t] - rate grad f(W[t-1])

    Two versions are enough where a step has as many microbatches as are in flight at the first stage: one a stage, with 1F1B.
    """

    def check(self, in_flight: int, num_microbatches: int, optimizer: str, momentum: float | None) -> None:
        if num_microbatches < in_flight:
            raise ValueError(
                f"`num_microbatches` must be at least {in_flight} with {self!r}, as many as are in flight at the first stage, "
                f"but got {num_microbatches}."
            )

    def delays(self, scheduled: Delays) -> Delays:
        longest = max(map(max, scheduled))
        return [[longest] * len(of_stage) for of_stage in scheduled]
