"""The quantities that claims are about, each measured on a pair of runs of one seed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd

from raysim.analysis.comparison.contexts import Context, Mode
from raysim.analysis.data.settings import DENSE_SETTING, Setting
from raysim.analysis.pricing.estimates import Estimate

Trained: TypeAlias = "tuple[tuple[tuple[Setting, Mode], ...], ...]"
"""Models that must be clearly better than chance: of each group, at least one."""
Run: TypeAlias = "pd.Series[Any]"


@dataclass(frozen=True)
class Measure:
    """A quantity of a pair of runs, positive if the first has more of it; by default of quality, in the unit of harm."""

    def unit(self, context: Context) -> str:
        """Return the unit of the effect."""
        return context.unit

    def step(self, context: Context) -> float | None:
        """Return the least effect that can be shown; None for the resolution of an evaluation."""
        return None

    def text(self, one: str, other: str) -> str:
        """Return the comparison in words."""
        raise NotImplementedError

    def trained(self, one: Setting, other: Setting) -> Trained:
        """Return the models without whose skill the effect means nothing."""
        raise NotImplementedError

    def __call__(self, context: Context, one: Run, other: Run) -> float | Estimate:
        """Return the effect at one seed, with its price's interval if it has a price; not a number if it was not measured."""
        raise NotImplementedError


@dataclass(frozen=True)
class Degradation(Measure):
    """The loss of quality of the first against the second, each evaluated with its compression on or off."""

    one: Mode = "on"
    other: Mode = "on"

    def text(self, one: str, other: str) -> str:
        if one == other:
            return f"harm of switching compression {self.one} at inference, {one}"
        return f"harm of {one} against {other}"

    def trained(self, one: Setting, other: Setting) -> Trained:
        if one == other or other == DENSE_SETTING:
            return (((other, self.other),),)
        return (((one, self.one), (other, self.other)),)

    def __call__(self, context: Context, one: Run, other: Run) -> float:
        return context.harm(one, self.one, other, self.other)


@dataclass(frozen=True)
class Freed(Measure):
    """The degradation from switching compression off at inference: the second run's less the first's."""

    def text(self, one: str, other: str) -> str:
        return f"harm of switching compression off that {one} is spared beside {other}"

    def trained(self, one: Setting, other: Setting) -> Trained:
        return (((one, "on"),), ((other, "on"),))

    def __call__(self, context: Context, one: Run, other: Run) -> float:
        return context.harm(other, "off", other, "on") - context.harm(one, "off", one, "on")


@dataclass(frozen=True)
class SparedByStatistics(Measure):
    """The part of the degradation from switching compression off that BatchNorm statistics, estimated under each mode, spare.

    Not a number for a model without BatchNorm, whose evaluations with estimated statistics are those without.
    """

    def text(self, one: str, other: str) -> str:
        return f"harm of switching compression off that BatchNorm statistics of each mode spare {one}"

    def trained(self, one: Setting, other: Setting) -> Trained:
        return (((one, "on"),),)

    def __call__(self, context: Context, one: Run, other: Run) -> float:
        name = context.quality.name
        if all(one[f"{name}_{mode}"] == one[f"{name}_{mode}_estimated"] for mode in ("on", "off")):
            return math.nan
        return context.harm(one, "off", one, "on") - context.harm(one, "off_estimated", one, "on_estimated")


@dataclass(frozen=True)
class Counted(Measure):
    """Base of counted or priced quantities, which need no trained model."""

    def step(self, context: Context) -> float | None:
        return 0.0

    def trained(self, one: Setting, other: Setting) -> Trained:
        return ()


@dataclass(frozen=True)
class Saving(Counted):
    """The ratio of the compression factors of the two in one direction."""

    direction: str

    def unit(self, context: Context) -> str:
        return "times"

    def text(self, one: str, other: str) -> str:
        return f"compression factor of {self.direction.replace('_', ' ')}s by {one} over the factor by {other}"

    def __call__(self, context: Context, one: Run, other: Run) -> float:
        factor = context.quantities.factor
        return factor(str(one["run"]), self.direction) / factor(str(other["run"]), self.direction)


@dataclass(frozen=True)
class FewerBytes(Counted):
    """The factor by which the first sends fewer bytes than the second in a step, over all links."""

    def unit(self, context: Context) -> str:
        return "x fewer bytes"

    def text(self, one: str, other: str) -> str:
        return f"bytes of a step of {other} over bytes of a step of {one}"

    def __call__(self, context: Context, one: Run, other: Run) -> float:
        sent = context.quantities.step_bytes
        return sent(str(other["run"])) / sent(str(one["run"]))


@dataclass(frozen=True)
class ValueFactor(Counted):
    """Dense values over values sent, without positions, as an adaptive method chose them over a run."""

    def unit(self, context: Context) -> str:
        return "x fewer values"

    def text(self, one: str, other: str) -> str:
        return f"dense values over values sent by {one}"

    def __call__(self, context: Context, one: Run, other: Run) -> float:
        return context.quantities.values(str(one["run"]))


@dataclass(frozen=True)
class Slowdown(Counted):
    """The time that the first's step takes longer than the second's on the network of the context, both with one compute.

    The price's interval is part of the bounds: it is common to all seeds, so that more seeds do not narrow it.
    """

    def unit(self, context: Context) -> str:
        return f"% of a step on {context.quantities.network}"

    def text(self, one: str, other: str) -> str:
        return f"time that {one} adds to a step of {other}"

    def __call__(self, context: Context, one: Run, other: Run) -> Estimate:
        return context.quantities.slowdown(str(one["run"]), str(other["run"]))
