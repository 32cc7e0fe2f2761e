"""A claim: a paper's wording, and the comparisons of settings by which runs are asked about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from raysim.analysis.claims.measures import Degradation, Measure
from raysim.analysis.comparison.evidence import Context, Setting
from raysim.analysis.comparison.statistics import Side
from raysim.analysis.data.notations import Method

DENSE_RUN = Setting()


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
    """A statement of a paper, how raysim reads it, and which comparisons bear on it."""

    name: str
    text: str
    quote: str
    """The paper's own words; empty where they were not read, and `reading` says what the claim rests on."""
    source: str
    reading: str
    """The margin, and what would support or contradict the claim: a choice of raysim's where the paper gives no figure."""
    contrasts: Callable[[Context, Iterable[Setting]], Iterator[Contrast]]
    """The comparisons that the settings there are allow."""
    examples: tuple[Setting, ...]
    """Settings that would bear on it, where there are none."""
    pooled: bool = False
    """True if the claim is about the mean over its comparisons, not about each comparison."""
    language: bool = False
    """True where the claim is about language models alone."""
    num_replicas: int = 1
    """Replicas that the examples need at least."""
    recipe: tuple[str, ...] = ("digits-cnn",)
    """The run to train where nothing is recorded, and changes to it."""


def both_ways(text: str) -> Setting:
    """Return the setting that compresses activations and gradients alike."""
    return Setting(text, text)


def keeps_quality(context: Context, setting: Setting, part: str = "no harm") -> Contrast:
    """Return the contrast that a setting's degradation beside dense is below the margin."""
    return Contrast(part, setting, DENSE_RUN, Degradation(), "below", context.margin)


def wrapping(name: str, field: str, settings: Iterable[Setting]) -> Iterator[tuple[Setting, Method]]:
    """Yield the settings whose method in a field has this name and wraps another, each with the wrapped method."""
    for setting in settings:
        method = setting.method(field)
        if method is not None and method.name == name and method.inner is not None:
            yield setting, method.inner


def alone(field: str, settings: Iterable[Setting]) -> Iterator[Setting]:
    """Yield the settings that change no other field: beside dense, the harm of other compression would be taken for this one's."""
    for setting in settings:
        if setting == DENSE_RUN._replace(**{field: getattr(setting, field)}):
            yield setting
