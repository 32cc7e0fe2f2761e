"""Stashed weights: a backward reads the version that its forward read."""

from dataclasses import dataclass

from raysim.weights.base import Continuous


@dataclass(frozen=True, repr=False)
class Stashed(Continuous):
    """Keeps, for each microbatch in flight, the version that its forward read, for its backward (PipeDream, Narayanan et al.
    2019, 1806.03377)::

        W[t+1] = W[t] - rate grad f(W[t - delay])

    A forward reads the newest version. Each microbatch updates the weights, or each step with `update='step'`. 1F1B without a
    flush delays stage s of P by P - 1 - s microbatches, for which a stage keeps as many versions beside the newest.
    """
