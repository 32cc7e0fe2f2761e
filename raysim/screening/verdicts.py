"""Differences of a candidate's results from dense, and verdicts: hopeless at once, worth training, or no gain on the networks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from raysim.network.prices import PAYS, times
from raysim.pipeline.errors import DivergedError
from raysim.workloads.task import Task

if TYPE_CHECKING:
    from raysim.engine.engine import Engine

# --- differences from dense, paired by sample, with bounds --------------------------------------------------------------------


OUTSIDE = 0.05
"""Chance that a bound does not hold."""


class Difference(NamedTuple):
    """A measure with the candidate, and its difference from dense within `bound` at 95 %; NaN for a single unit."""

    value: float
    difference: float
    bound: float

    @property
    def low(self) -> float:
        """The least difference; infinite if it is unknown."""
        return self.difference - (self.bound if math.isfinite(self.bound) else math.inf)


def differences(task: Task, sums: NDArray[np.float64], dense: NDArray[np.float64]) -> dict[str, Difference]:
    """Return the difference of each measure, by name; the units (first axis) of both are the same samples.

    The bound is that of the jackknife over units, which for a mean is Student's interval of the paired differences.
    """
    own, reference = _results(task, sums.sum(0)), _results(task, dense.sum(0))
    without = [
        (_results(task, sums.sum(0) - sums[i]), _results(task, dense.sum(0) - dense[i])) for i in range(len(sums))
    ]
    results = {}
    for measure in task.measures:
        name = measure.name
        if math.isnan(reference[name]):  # of generated tokens
            continue
        bound = _bound(np.array([a[name] - b[name] for a, b in without]))
        results[name] = Difference(own[name], own[name] - reference[name], bound)
    return results


def changed(own: NDArray[np.int64], dense: NDArray[np.int64], counted: NDArray[np.bool_]) -> Difference:
    """Return the share of counted predictions that differ from dense's; the first axis is samples."""
    count = len(own)
    moved, of = (each.reshape(count, -1).sum(1) for each in ((own != dense) & counted, counted))
    share = float(moved.sum() / of.sum())
    left = of.sum() - of
    bound = _bound((moved.sum() - moved) / left) if count > 1 and left.all() else math.nan
    return Difference(share, share, bound)


def _bound(left_out: NDArray[np.float64]) -> float:
    """Return the bound of an estimate from its leave-one-out values; NaN for a single unit."""
    count = len(left_out)
    if count < 2:
        return math.nan
    error = math.sqrt((count - 1) / count * float(np.square(left_out - left_out.mean()).sum()))
    return float(special.stdtrit(count - 1, 1 - OUTSIDE / 2)) * error


def _results(task: Task, sums: NDArray[np.float64]) -> dict[str, float]:
    return task.results(sums.tolist())


# --- verdicts ---------------------------------------------------------------------------------------------------------------


class Deviation(NamedTuple):
    """A logarithm's mean over settings, and its standard deviations between jobs and within a job."""

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
    """Return the distance from a dense loss to `chance`; NaN below the share `KNOWN`, where training will teach more than is lost."""
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
        return NO_GAIN, f"{times(speedups[fastest])} times as fast at most, on {fastest}"
    return WORTH, ""


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
