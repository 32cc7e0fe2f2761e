"""The screen of one run before its first step, by evaluations of its own engine."""

from __future__ import annotations

import numpy as np

from raysim.engine.engine import Engine
from raysim.pipeline.errors import DivergedError
from raysim.screening.differences import differences
from raysim.screening.verdicts import HOPELESS, verdict

BATCHES = 4
"""Training batches of a screen: units of its bound."""


def why_hopeless(engine: Engine, chance: float | None) -> str | None:
    """Return why a run is hopeless at once; None if it is not, or if its first weights are untrained.

    `engine` holds the first weights; `chance` is the loss of predicting by the frequencies of the targets. The first training batches
    are evaluated with compression on and off, so memories are empty: AQ-SGD, whose first messages are dense, is never hopeless.
    """
    plan = engine.plan
    if not plan.trained or not plan.compresses or chance is None or plan.config.compress_from > plan.first_step:
        return None
    batches = range(min(BATCHES, plan.steps_per_epoch))
    dense = engine.evaluate_batches("off", "train", batches)
    try:
        own = engine.evaluate_batches("on", "train", batches)
    except DivergedError:
        loss = None
    else:
        sums, reference = (np.array([each.sums for each in results], np.float64) for results in (own, dense))
        loss = differences(plan.task, sums, reference)["loss"]
    outcome, reason = verdict(loss, chance, {})
    return f"{HOPELESS}: {reason}" if outcome == HOPELESS else None
