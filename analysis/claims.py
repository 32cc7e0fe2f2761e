"""What papers claim of compression, each as comparisons of settings seed by seed: one list, to which another is added.

A claim names which settings bear on it and what their comparison must show. Harm is how much worse the final quality is: in
points of accuracy, or per cent of the loss. What "does no harm" must lie surely below the margin: that no difference was
found is not enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import pandas as pd

from analysis.evidence import Context, Mode, Setting
from analysis.notations import Method, strength_of
from analysis.statistics import Side

RUDAKOV = "Rudakov, Beznosikov, Kholodov, Gasnikov 2023 (2401.07788)"
GRAVAC = "Tyagi, Swany 2023, GraVAC (2305.12201)"
OPTIMUS_CC = "Song et al. 2023, Optimus-CC (2301.09830)"

FAR_FEWER = 5.0  # GraVAC's mildest factor, 10 in values, with 32-bit positions
SAME_SPEED = 5.0  # per cent of a step within which epilogue-only is said to cost no speed
FEEDBACK = ("ErrorFeedback", "MixedErrorFeedback", "EF21")
DENSE_RUN = Setting()


class Measure(Protocol):
    """What is measured of a pair of runs, positive where the first has more of it."""

    def unit(self, context: Context) -> str:
        """Return the unit of the effect."""

    def text(self, one: str, other: str) -> str:
        """Return in words what is compared."""

    def __call__(self, context: Context, one: pd.Series[Any], other: pd.Series[Any]) -> float:
        """Return the effect at one seed; not a number where it was not measured."""


@dataclass(frozen=True)
class Harm:
    """How much worse one's quality is than the other's, each evaluated with its compression on or off."""

    one: Mode = "on"
    other: Mode = "on"

    def unit(self, context: Context) -> str:
        return context.unit

    def text(self, one: str, other: str) -> str:
        if one == other:
            return f"harm of switching compression {self.one} at inference, {one}"
        return f"harm of {one} against {other}"

    def __call__(self, context: Context, one: pd.Series[Any], other: pd.Series[Any]) -> float:
        return context.harm(one, self.one, other, self.other)


@dataclass(frozen=True)
class Freed:
    """How much less one suffers than the other from compression being switched off at inference."""

    def unit(self, context: Context) -> str:
        return context.unit

    def text(self, one: str, other: str) -> str:
        return f"how much less {one} suffers from switching compression off than {other}"

    def __call__(self, context: Context, one: pd.Series[Any], other: pd.Series[Any]) -> float:
        return context.harm(other, "off", other, "on") - context.harm(one, "off", one, "on")


@dataclass(frozen=True)
class Factor:
    """Dense over wire bytes of one, in a direction."""

    direction: str

    def unit(self, context: Context) -> str:
        return "x fewer bytes"

    def text(self, one: str, other: str) -> str:
        return f"dense over wire bytes of {one}"

    def __call__(self, context: Context, one: pd.Series[Any], other: pd.Series[Any]) -> float:
        return context.measures.factor(str(one["run"]), self.direction)


@dataclass(frozen=True)
class Slowdown:
    """How much longer one's step takes than the other's on the network asked for, both with one's compute."""

    def unit(self, context: Context) -> str:
        return f"% of a step on {context.measures.network}"

    def text(self, one: str, other: str) -> str:
        return f"time that {one} adds to a step of {other}"

    def __call__(self, context: Context, one: pd.Series[Any], other: pd.Series[Any]) -> float:
        return context.measures.slowdown(str(one["run"]), str(other["run"]))


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
    """What a paper says, and how runs are asked about it."""

    name: str
    text: str
    source: str
    contrasts: Callable[[Context, Iterable[Setting]], Iterator[Contrast]]
    """What of the settings there are bears on it."""
    examples: tuple[Setting, ...]
    """Settings that would, where there are none."""
    pooled: bool = False
    """Whether it is about the mean over its comparisons, rather than about each of them."""
    language: bool = False
    """Whether it is about language models alone."""
    num_replicas: int = 1
    """Replicas that the examples need at least."""
    recipe: tuple[str, ...] = ("digits-cnn",)
    """What to train where nothing is recorded, and changes to it."""


def _gradients_milder(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    seen = set()
    for setting in settings:
        for name in ("TopK", "Quantize"):
            forward = strength_of(setting.method("forward"), name)
            backward = strength_of(setting.method("backward"), name)
            if forward is None or backward is None or forward == backward or setting[2:] != DENSE_RUN[2:]:
                continue
            swapped = Setting(setting.backward, setting.forward)
            harsh, mild = (setting, swapped) if backward < forward else (swapped, setting)
            if harsh not in seen:
                seen.add(harsh)
                yield Contrast("gradients need it milder", harsh, mild, Harm(), "above", 0.0)


def _ten_per_cent(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in settings:
        density = _density_both_ways(setting)
        if density == 0.1:
            yield Contrast("10 % does no harm", setting, DENSE_RUN, Harm(), "below", context.margin)
        elif density is not None and density < 0.1:
            yield Contrast("less than 10 % does harm", setting, DENSE_RUN, Harm(), "above", context.margin)


def _needs_compression(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in settings:
        density = strength_of(setting.method("forward"), "TopK")
        if density is not None and density <= 0.1 and setting.replica_gradient == DENSE_RUN.replica_gradient:
            part = "switching it off does harm"
            yield Contrast(part, setting, setting, Harm("off", "on"), "above", context.margin)


def _feedback_no_better(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting, plain in _with_feedback(settings):
        yield Contrast("no gain from feedback", plain, setting, Harm(), "below", context.margin)


def _feedback_frees(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting, plain in _with_feedback(settings):
        if setting.forward != plain.forward:  # inference has activations alone
            part = "switching it off does no harm"
            yield Contrast(part, setting, setting, Harm("off", "on"), "below", context.margin)
            yield Contrast("and less than without feedback", setting, plain, Freed(), "above", 0.0)


def _aq_sgd(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in settings:
        method = setting.method("forward")
        density = strength_of(method.inner, "TopK") if method is not None and method.name == "AQSGD" else None
        if density is not None and density < 0.3 and setting.replica_gradient == DENSE_RUN.replica_gradient:
            yield Contrast("less than 30 % does harm", setting, DENSE_RUN, Harm(), "above", context.margin)


def _separate_indices(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    densities = {d: s.forward for s in settings if (d := _density_both_ways(s)) is not None}
    for forward in densities.values():
        separate, shared = Setting(forward, forward), Setting(forward, shared_indices=True)
        yield Contrast("separate indices do harm", separate, shared, Harm(), "above", context.margin)


def _gravac(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in settings:
        found = [d for d in ("forward", "backward", "replica_gradient") if "GraVAC" in _names(setting.method(d))]
        if found:
            yield Contrast("it keeps dense quality", setting, DENSE_RUN, Harm(), "below", context.margin)
        for direction in found:
            part = f"at far fewer bytes {direction.replace('_', ' ')}"
            yield Contrast(part, setting, setting, Factor(direction), "above", FAR_FEWER)


def _lazy_propagation(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in settings:
        method = setting.method("backward")
        if method is not None and method.name == "LazyErrorPropagation" and method.inner is not None:
            without = setting._replace(backward=str(method.inner))
            yield Contrast("with it, no harm", setting, DENSE_RUN, Harm(), "below", context.margin)
            yield Contrast("without it, harm", without, DENSE_RUN, Harm(), "above", context.margin)


def _epilogue(context: Context, settings: Iterable[Setting]) -> Iterator[Contrast]:
    for setting in settings:
        method = setting.method("backward")
        if method is not None and method.name == "Epilogue" and method.inner is not None:
            everywhere = setting._replace(backward=str(method.inner))
            yield Contrast("no harm", setting, DENSE_RUN, Harm(), "below", context.margin)
            yield Contrast("hardly slower", setting, everywhere, Slowdown(), "below", SAME_SPEED)


def _density_both_ways(setting: Setting) -> float | None:
    """Return the density of a setting that is TopK of one density both ways, at indices of its own or at shared ones."""
    forward = strength_of(setting.method("forward"), "TopK")
    backward = DENSE_RUN.backward if setting.shared_indices else setting.forward
    return forward if setting[1:3] == (backward, DENSE_RUN.replica_gradient) else None


def _with_feedback(settings: Iterable[Setting]) -> Iterator[tuple[Setting, Setting]]:
    """Yield settings of TopK under error feedback, each with the same without."""
    for setting in settings:
        forward, backward = (_without_feedback(setting.method(way)) for way in ("forward", "backward"))
        if forward is not None and backward is not None and "TopK" in forward + backward:
            plain = setting._replace(forward=forward, backward=backward)
            if plain != setting:
                yield setting, plain


def _without_feedback(method: Method | None) -> str | None:
    """Return the notation of plain TopK or nothing, error feedback taken off; None for any other method."""
    if method is None:
        return None
    inner = method.inner if method.name in FEEDBACK else method
    if inner is None or (strength_of(inner, "TopK") is None and str(inner) != DENSE_RUN.forward):
        return None
    return str(inner)


def _names(method: Method | None) -> set[str]:
    """Return the names of a method and of all that is nested in it."""
    if method is None:
        return set()
    inside = [value for value in (*method.arguments, *(v for _, v in method.options)) if isinstance(value, Method)]
    return {method.name}.union(*(_names(one) for one in inside))


def _both_ways(text: str) -> Setting:
    return Setting(text, text)


CLAIMS: tuple[Claim, ...] = (
    Claim(
        "gradients-milder",
        "Gradients need milder compression than activations.",
        RUDAKOV,
        _gradients_milder,
        (Setting("TopK(0.1)", "TopK(0.3)"), Setting("Quantize(2)", "Quantize(6)")),
        pooled=True,
    ),
    Claim(
        "ten-per-cent",
        "TopK of 10 % is the strongest that does no harm.",
        RUDAKOV,
        _ten_per_cent,
        (_both_ways("TopK(0.1)"), _both_ways("TopK(0.05)")),
    ),
    Claim(
        "inference-compressed",
        "Models trained under strong TopK (10 % or less) need compression at inference.",
        RUDAKOV,
        _needs_compression,
        (_both_ways("TopK(0.1)"),),
    ),
    Claim(
        "feedback-no-better",
        "Error feedback does not improve on plain TopK.",
        RUDAKOV,
        _feedback_no_better,
        (_both_ways("ErrorFeedback(TopK(0.1))"),),
    ),
    Claim(
        "feedback-frees",
        "Error feedback frees inference from compression.",
        RUDAKOV,
        _feedback_frees,
        (_both_ways("ErrorFeedback(TopK(0.1))"),),
    ),
    Claim(
        "aq-sgd-topk",
        "AQ-SGD with TopK under 30 % does harm.",
        RUDAKOV,
        _aq_sgd,
        (Setting("AQSGD(TopK(0.1))", "TopK(0.1)"),),
    ),
    Claim(
        "separate-indices",
        "TopK with separate indices for gradients does harm to language models.",
        RUDAKOV,
        _separate_indices,
        (_both_ways("TopK(0.1)"),),
        pooled=True,
        language=True,
        recipe=("topics-gpt",),
    ),
    Claim(
        "gravac",
        "GraVAC keeps dense quality at far fewer bytes.",
        GRAVAC,
        _gravac,
        (Setting(replica_gradient="GraVAC(10.0, 1000.0, window=50)"),),
        num_replicas=2,
        recipe=("digits-cnn", "num_replicas=2"),
    ),
    Claim(
        "lazy-error-propagation",
        "Low-rank gradients at boundaries do harm, and lazy error propagation mends it.",
        OPTIMUS_CC,
        _lazy_propagation,
        (Setting(backward="LazyErrorPropagation(LowRank(16))"),),
    ),
    Claim(
        "epilogue-only",
        "Compressing the epilogue alone does no harm and is hardly slower than compressing all gradients.",
        OPTIMUS_CC,
        _epilogue,
        (Setting(backward="Epilogue(LazyErrorPropagation(LowRank(16)))"),),
    ),
)
