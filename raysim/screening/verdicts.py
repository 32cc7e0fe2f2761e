"""Verdicts on screened settings: hopeless at once, worth training, or no gain on the networks."""

from __future__ import annotations

import math
from collections.abc import Mapping

from raysim.forecast.advise import PAYS
from raysim.screening.differences import Difference

HOPELESS, WORTH, NO_GAIN = "hopeless at once", "worth training", "no gain on this network"
LOST = 0.5
"""Share of what the model knows whose loss at once makes a setting hopeless."""


def knowledge_lost(loss: Difference, chance: float, *, surely: bool = False) -> float:
    """Return the loss added at once, as a share of dense's distance to `chance`; NaN for a model that knows nothing.

    `surely`: by the lower bound of the difference.
    """
    known = chance - (loss.value - loss.difference)
    if not known > 0:
        return math.nan
    return (loss.low if surely else loss.difference) / known


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
