"""The quantities in claims, each measured on a pair of runs with the same seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from raysim.analysis.comparison.contexts import Context, Mode
from raysim.analysis.data.settings import DENSE_SETTING, Setting
from raysim.analysis.runs.estimates import Estimate

Trained: TypeAlias = "tuple[tuple[tuple[Setting, Mode], ...], ...]"
"""Models that must be clearly better than chance: of each group, at least one."""
Run: TypeAlias = "pd.Series[Any]"


@dataclass(frozen=True)
class Measure:
    """A quantity of a pair of runs, positive if the first has more of it."""

    words: str
    """The comparison in words, with "{one}" and "{other}" for its settings."""
    effect: Callable[[Context, Run, Run], float | Estimate]
    """The effect at one seed, with its price's interval if it has a price; not a number if it was not measured."""
    trains: Callable[[Setting, Setting], Trained] | None = None
    """The models without whose skill the effect means nothing; None for counted or priced quantities."""
    units: str | Callable[[Context], str] = lambda context: context.unit

    def unit(self, context: Context) -> str:
        """Return the unit of the effect, by default that of harm."""
        return self.units if isinstance(self.units, str) else self.units(context)

    def step(self) -> float | None:
        """Return the least effect that can be shown; None for the resolution of an evaluation."""
        return 0.0 if self.trains is None else None

    def text(self, one: str, other: str) -> str:
        """Return the comparison in words."""
        return self.words.format(one=one, other=other)

    def trained(self, one: Setting, other: Setting) -> Trained:
        """Return the runs that must be better than chance for the effect to be meaningful."""
        return () if self.trains is None else self.trains(one, other)


def _harm(one_mode: Mode, other_mode: Mode) -> Callable[[Context, Run, Run], float]:
    return lambda context, one, other: context.harm(one, one_mode, other, other_mode)


def _either(one: Setting, other: Setting) -> Trained:
    return (((other, "on"),),) if other == DENSE_SETTING else (((one, "on"), (other, "on")),)


def _freed(context: Context, one: Run, other: Run) -> float:
    return context.harm(other, "off", other, "on") - context.harm(one, "off", one, "on")


def _spared_by_statistics(context: Context, one: Run, other: Run) -> float:
    """Return not a number for a model without BatchNorm: its evaluations with estimated statistics equal the others."""
    name = context.quality.name
    if all(one[f"{name}_{mode}"] == one[f"{name}_{mode}_estimated"] for mode in ("on", "off")):
        return math.nan
    return context.harm(one, "off", one, "on") - context.harm(one, "off_estimated", one, "on_estimated")


def _saving(context: Context, one: Run, other: Run) -> float:
    factors = [context.quantities.factor(str(run["run"]), "replica_gradient") for run in (one, other)]
    return factors[0] / factors[1]


def _fewer_bytes(context: Context, one: Run, other: Run) -> float:
    return context.quantities.step_bytes(str(other["run"])) / context.quantities.step_bytes(str(one["run"]))


HARM = Measure("harm of {one} against {other}", _harm("on", "on"), _either)
"""The loss of quality of the first against the second."""
SWITCHED_OFF = Measure(
    "harm of switching compression off at inference, {one}", _harm("off", "on"), lambda one, other: (((one, "on"),),)
)
"""The loss of quality of one model from switching its compression off."""
FREED = Measure(
    "harm of switching compression off that {one} is spared beside {other}",
    _freed,
    lambda one, other: (((one, "on"),), ((other, "on"),)),
)
"""The loss of quality from switching compression off: the second run's less the first's."""
SPARED_BY_STATISTICS = Measure(
    "harm of switching compression off that BatchNorm statistics of each mode spare {one}",
    _spared_by_statistics,
    lambda one, other: (((one, "on"),),),
)
"""The part of the loss from switching compression off that BatchNorm statistics, estimated under each mode, spare."""
SAVING = Measure("compression factor of replica gradients by {one} over the factor by {other}", _saving, units="times")
FEWER_BYTES = Measure("bytes of a step of {other} over bytes of a step of {one}", _fewer_bytes, units="x fewer bytes")
"""Over all links."""
VALUE_FACTOR = Measure(
    "dense values over values sent by {one}",
    lambda context, one, other: context.quantities.values(str(one["run"])),
    units="x fewer values",
)
"""Dense values over values sent, without positions, as an adaptive method chose them over a run."""
SLOWDOWN = Measure(
    "time that {one} adds to a step of {other}",
    lambda context, one, other: context.quantities.slowdown(str(one["run"]), str(other["run"])),
    units=lambda context: f"% of a step on {context.quantities.network}",
)
"""The extra time of the first's step on the network of the context, both with one compute.

The price's interval is part of the bounds: it is common to all seeds, so that more seeds do not narrow it.
"""
