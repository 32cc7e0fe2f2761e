"""Synchronous weights: one version, which all microbatches of a step read."""

from dataclasses import dataclass
from typing import ClassVar

from raysim.weights.base import WeightPolicy


@dataclass(frozen=True, repr=False)
class Synchronous(WeightPolicy):
    """Updates once a step, when the pipeline is empty: `W[t+1] = W[t] - rate grad f(W[t])`."""

    flush: ClassVar[bool] = True
