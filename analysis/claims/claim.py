"""A claim: a paper's wording, and the comparisons of settings that test it on runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from raysim.analysis.claims.measures import HARM, Measure
from raysim.analysis.comparison.contexts import Context
from raysim.analysis.comparison.statistics import Side
from raysim.analysis.data.settings import DENSE_SETTING, Setting


@dataclass(frozen=True)
class Contrast:
    """Two settings compared seed by seed: the claim says on which side of the threshold the effect lies."""

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
    contrasts: Callable[[Context, Iterable[Setting]], Iterator[Contrast]]
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

    def __call__(self, context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
        """Yield each contrast of the settings once."""
        yielded: set[Contrast] = set()
        for setting in settings:
            matched = self.match(setting)
            if matched is None:
                continue
            roles = {"setting": setting, "dense": DENSE_SETTING, **matched}
            for part in self.parts:
                if not {part.one, part.other} <= set(roles):
                    continue
                limit = part.threshold
                threshold = limit.times * context.margin if isinstance(limit, Margins) else limit
                contrast = Contrast(part.text, roles[part.one], roles[part.other], part.measure, part.side, threshold)
                if contrast not in yielded:
                    yielded.add(contrast)
                    yield contrast
