"""Verdicts on screened settings: hopeless at once, worth training, or no gain on the networks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from scipy import special

from raysim.forecast.advise import PAYS
from raysim.screening.differences import Difference


class Deviation(NamedTuple):
    """A logarithm's mean, its standard deviation between jobs, and that within one, over its settings."""

    mean: float
    between: float
    within: float


HOPELESS, WORTH, NO_GAIN = "hopeless at once", "worth training", "no gain on this network"
KNOWN = 0.2
"""Share of the loss by chance that a model must be below it: those behind `LEFT` are 35 and 95 % below."""
TOLERATED = 0.02
"""Share of what a model knows that no margin tolerates: 1 % of the loss is 0.05 to 1.9 % of it in the jobs behind `LEFT`."""
ERROR = 1e-3
"""Chance that a setting dropped at the limit `LOST` would have lost less than `TOLERATED` in the end."""
LEFT = Deviation(mean=0.06, between=0.53, within=0.62)
"""The logarithm of harm after training over harm at once: by 22 settings of a CNN that trained on for a quarter to four times its
steps, and three of SmolLM2-135M after 12 steps (docs/measurements/verdicts.md)."""
LOST = TOLERATED / math.exp(LEFT.mean + float(special.ndtri(ERROR)) * math.hypot(LEFT.between, LEFT.within))
"""Share of what the model knows whose loss at once makes a setting hopeless: 22 %."""


def knowledge(dense: float, chance: float) -> float:
    """Return the distance from a dense loss to `chance`; NaN below `KNOWN` of it, since training will teach more than is lost."""
    return chance - dense if chance - dense > KNOWN * chance else math.nan


def knowledge_lost(loss: Difference, chance: float, *, surely: bool = False) -> float:
    """Return the added loss as a share of the distance to chance; NaN if that distance is too small.

    `surely`: by the lower bound of the difference.
    """
    return (loss.low if surely else loss.difference) / knowledge(loss.value - loss.difference, chance)


def verdict(loss: Difference | None, chance: float, speedups: Mapping[str, float]) -> tuple[str, str]:
    """Return the verdict of a setting and its reason; `loss` is None if a tensor overflowed, `speedups` by network."""
    if loss is None or not math.isfinite(loss.value):
        return HOPELESS, "a tensor or a gradient overflows"
    lost = knowledge_lost(loss, chance, surely=True)
    if lost > LOST:
        share = knowledge_lost(loss, chance)
        words = "all" if share >= 1 else f"{share:.0%}"
        dense = loss.value - loss.difference
        return HOPELESS, f"loss {dense:.4g} to {loss.value:.4g}, which loses {words} of what the model knows"
    if speedups and max(speedups.values()) < PAYS:
        fastest = max(speedups, key=lambda name: speedups[name])
        return NO_GAIN, f"{speedups[fastest]:.2f} times as fast at most, on {fastest}"
    return WORTH, ""
