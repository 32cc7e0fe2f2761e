"""Forecasts of a setting's final harm during training, paired with dense by seed and step.

Final harm is forecast from training losses in two ways: as if the present harm persisted, and as a delay, as if the setting were at
an earlier step of dense. The smaller counts, since harm fades.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize

from raysim.quality import Measure
from raysim.records import Run

Losses: TypeAlias = np.ndarray[Any, Any]


class Observation(NamedTuple):
    """A setting's harm at a rung, in the unit of the measure, and the final harm that it forecasts."""

    harms: tuple[float, ...]
    """By training losses over the latter half of the steps done, one per seed."""
    delayed: float
    """Final harm if the setting is only behind dense, see `delayed_harm`."""

    @property
    def forecast(self) -> float:
        """The lower of the forecasts of final harm."""
        return min(fmean(self.harms), self.delayed)


def losses_of(run: Run) -> Losses:
    """Return the training losses of a run, by step."""
    losses: Losses = run.steps.sort_values("step")["loss"].to_numpy(float)
    return losses


def chances_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the measures at chance, by name, in a row of `run.parquet`."""
    values = {key.removeprefix("chance_"): value for key, value in row.items() if key.startswith("chance_")}
    return {name: float(value) for name, value in values.items() if value is not None}


def observe(
    measure: Measure, runs: Sequence[Losses], dense: Sequence[Losses], steps: int, chances: Mapping[str, float]
) -> Observation:
    """Return the harm of a setting after `steps` steps of each seed, against complete dense runs of the same seeds.

    `runs` and `dense` are training losses by step. `chances` are the measures at chance, by name.
    """
    begin = steps // 2
    latter = [(run[begin:steps], other[begin:steps]) for run, other in zip(runs, dense, strict=True)]
    behind = float(np.mean([np.mean(own) - np.mean(reference) for own, reference in latter]))
    curve = np.mean(dense, axis=0)
    return Observation(
        tuple(training_harm(measure, own, reference, chances) for own, reference in latter),
        delayed_harm(measure, behind, curve, steps, chances),
    )


def training_harm(measure: Measure, losses: ArrayLike, dense: ArrayLike, chances: Mapping[str, float]) -> float:
    """Return how much worse a run trains than dense at the same steps, in the unit of harm of `measure`.

    `losses` and `dense` are training losses of the same steps and batches. A measure in points is assumed to fall linearly from
    perfection to chance as the loss rises from 0 to that by chance (`chances`, by measure), for all classifiers, and no further. A
    perplexity is the exponential of the loss; every other measure is compared like the loss, in per cent.
    """
    own, reference = float(np.mean(np.asarray(losses))), float(np.mean(np.asarray(dense)))
    if measure.points and chances.get("loss", 0.0) > 0:
        chance = chances.get(measure.name, 0.0)
        perfect = 1.0 if measure.higher else 0.0
        own, reference = (min(loss, chances["loss"]) for loss in (own, reference))
        return 100 * abs(perfect - chance) / chances["loss"] * (own - reference)
    if measure.name == "perplexity":
        return 100 * math.expm1(own - reference)
    return 100 * (own / reference - 1) if reference > 0 else math.nan


def delayed_harm(measure: Measure, behind: float, dense: Losses, step: int, chances: Mapping[str, float]) -> float:
    """Forecast the final harm if mean training loss is `behind` dense over the latter half of `step` steps.

    `dense` are the mean training losses of dense by step, to the end. If compression only costs time, the setting is at an
    earlier step of dense now, and at the same share of the steps in the end. Losses are made monotone by isotonic regression.
    """
    falling = optimize.isotonic_regression(dense, increasing=False).x
    total = np.concatenate([[0.0], np.cumsum(falling)])
    ends = np.arange(1, len(falling) + 1)
    latter = (total[ends] - total[ends // 2]) / (ends - ends // 2)  # mean over the latter half of the steps so far
    share = min(1.0, float(np.interp(-(latter[step - 1] + behind), -latter, ends)) / step)
    recent = (total[ends] - total[ends * 4 // 5]) / (ends - ends * 4 // 5)
    final = float(np.interp(share * len(falling), ends, recent))
    return training_harm(measure, [final], [float(recent[-1])], chances)
