"""A claim: a paper's wording, the comparisons of settings that test it on runs, and the quantities compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import pandas as pd

from raysim.analysis.comparison.contexts import Mode
from raysim.analysis.comparison.statistics import Side
from raysim.analysis.runs.estimates import Estimate
from raysim.config.identity import DENSE, Setting
from raysim_findings.claimed_runs import ClaimedRuns

Trained: TypeAlias = "tuple[tuple[tuple[Setting, Mode], ...], ...]"
"""Models that must be clearly better than chance: of each group, at least one."""
Run: TypeAlias = "pd.Series[Any]"


@dataclass(frozen=True)
class Measure:
    """A quantity of a pair of runs, positive if the first has more of it."""

    words: str
    """The comparison in words, with "{one}" and "{other}" for its settings."""
    effect: Callable[[ClaimedRuns, Run, Run], float | Estimate]
    """The effect at one seed, with its price's interval if it has a price; not a number if it was not measured."""
    trains: Callable[[Setting, Setting], Trained] | None = None
    """The models that must be better than chance; None for counted or priced quantities."""
    units: str | Callable[[ClaimedRuns], str] = lambda context: context.unit

    def unit(self, context: ClaimedRuns) -> str:
        """Return the unit of the effect, by default the unit of harm."""
        return self.units if isinstance(self.units, str) else self.units(context)

    def step(self) -> float | None:
        """Return the smallest effect that can be shown; None for the resolution of an evaluation."""
        return 0.0 if self.trains is None else None

    def trained(self, one: Setting, other: Setting) -> Trained:
        """Return the models that must have learned for the effect to mean anything."""
        return () if self.trains is None else self.trains(one, other)


def _harm(one_mode: Mode, other_mode: Mode) -> Callable[[ClaimedRuns, Run, Run], float]:
    return lambda context, one, other: context.harm(one, one_mode, other, other_mode)


def _either(one: Setting, other: Setting) -> Trained:
    return (((other, "on"),),) if other == DENSE else (((one, "on"), (other, "on")),)


def _freed(context: ClaimedRuns, one: Run, other: Run) -> float:
    return context.harm(other, "off", other, "on") - context.harm(one, "off", one, "on")


def _spared_by_statistics(context: ClaimedRuns, one: Run, other: Run) -> float:
    """Return NaN for a model without BatchNorm: its evaluations with estimated statistics equal the others."""
    name = context.quality.name
    if all(one[f"{name}_{mode}"] == one[f"{name}_{mode}_estimated"] for mode in ("on", "off")):
        return math.nan
    return context.harm(one, "off", one, "on") - context.harm(one, "off_estimated", one, "on_estimated")


def _saving(context: ClaimedRuns, one: Run, other: Run) -> float:
    factors = [context.quantities.factor(str(run["run"]), "replica_gradient") for run in (one, other)]
    return factors[0] / factors[1]


def _fewer_bytes(context: ClaimedRuns, one: Run, other: Run) -> float:
    return context.quantities.step_bytes(str(other["run"])) / context.quantities.step_bytes(str(one["run"]))


def _values(context: ClaimedRuns, one: Run, other: Run) -> float:
    return context.quantities.values(str(one["run"]))


def _slowdown(context: ClaimedRuns, one: Run, other: Run) -> Estimate:
    return context.quantities.slowdown(str(one["run"]), str(other["run"]))


def _first(one: Setting, other: Setting) -> Trained:
    return (((one, "on"),),)


HARM = Measure("harm of {one} against {other}", _harm("on", "on"), _either)
"""The loss of quality of the first against the second."""
SWITCHED_OFF = Measure("harm of switching compression off at inference, {one}", _harm("off", "on"), _first)
"""The loss of quality of one model from switching its compression off."""
FREED = Measure(
    "harm of switching compression off, {other} minus {one}",
    _freed,
    lambda one, other: (((one, "on"),), ((other, "on"),)),
)
"""The loss of quality from switching compression off: the second run's less the first's."""
SPARED_BY_STATISTICS = Measure(
    "harm of switching compression off avoided by BatchNorm statistics of each mode, {one}",
    _spared_by_statistics,
    _first,
)
"""The part of the loss from switching compression off that BatchNorm statistics, estimated under each mode, spare."""
SAVING = Measure("compression factor of replica gradients by {one} over the factor by {other}", _saving, units="times")
FEWER_BYTES = Measure("bytes of a step of {other} over bytes of a step of {one}", _fewer_bytes, units="x fewer bytes")
"""Over all links."""
VALUE_FACTOR = Measure("dense values over values sent by {one}", _values, units="x fewer values")
"""Dense values over values sent, without positions, as an adaptive method chose them over a run."""
SLOWDOWN = Measure(
    "time that {one} adds to a step of {other}",
    _slowdown,
    units=lambda context: f"% of a step on {context.quantities.network}",
)
"""The extra time of the first's step on the network of the context, both with one compute.

The price's interval is part of the bounds: it is common to all seeds, so that more seeds do not narrow it.
"""


@dataclass(frozen=True)
class Contrast:
    """Two settings compared seed by seed, and the side of the threshold on which the claim puts the effect."""

    part: str
    """Of the claim: each of its parts must hold."""
    one: Setting
    other: Setting
    measure: Measure
    side: Side
    threshold: float


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, raysim's reading of it, and the comparisons that test it."""

    name: str
    text: str
    quote: str
    """The paper's own words; empty if they were not read, and `reading` says what the claim rests on."""
    source: str
    reading: str
    """The margin, and what would support or contradict the claim: raysim's choice if the paper gives no figure."""
    contrasts: Callable[[ClaimedRuns, Iterable[Setting]], Iterator[Contrast]]
    """The comparisons that the recorded settings allow, for instance `Parts`."""
    examples: tuple[Setting, ...]
    """Settings that would bear on it, if none were recorded."""
    pooled: bool = False
    """True if the claim is about the mean over its comparisons, not about each comparison."""
    language: bool = False
    """True if the claim is about language models only."""
    num_replicas: int = 1
    """Replicas that the examples need at least."""
    recipe: tuple[str, ...] = ("digits-cnn",)
    """The run to train if nothing is recorded, and changes to it."""


class Margins(NamedTuple):
    """A threshold in margins of the context: half a point of accuracy, or one per cent of the loss."""

    times: float


MARGIN = Margins(1.0)


class Part(NamedTuple):
    """One part of a claim: a contrast between two roles, which a claim's `match` assigns to settings."""

    text: str
    measure: Measure
    side: Side
    threshold: float | Margins
    one: str = "setting"
    other: str = "dense"


def no_harm(text: str) -> Part:
    """Return the part "the harm of a setting against dense is below the margin"."""
    return Part(text, HARM, "below", MARGIN)


class Parts:
    """The contrasts of a claim: its parts, for each recorded setting accepted by `match`.

    `match` returns, by role, the settings to compare a setting with, or None for a setting outside of the
    claim. The roles "setting" and "dense" are always there; parts with an unfilled role are left out.
    """

    def __init__(self, match: Callable[[Setting], Mapping[str, Setting] | None], *parts: Part) -> None:
        self.match = match
        self.parts = parts

    def __call__(self, context: ClaimedRuns, settings: Iterable[Setting]) -> Iterator[Contrast]:
        """Yield each contrast of the settings once."""
        yielded: set[Contrast] = set()
        for setting in settings:
            matched = self.match(setting)
            if matched is None:
                continue
            roles = {"setting": setting, "dense": DENSE, **matched}
            for part in self.parts:
                if not {part.one, part.other} <= set(roles):
                    continue
                limit = part.threshold
                threshold = limit.times * context.margin if isinstance(limit, Margins) else limit
                contrast = Contrast(part.text, roles[part.one], roles[part.other], part.measure, part.side, threshold)
                if contrast not in yielded:
                    yielded.add(contrast)
                    yield contrast
