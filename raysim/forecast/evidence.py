"""Verdicts of raysim's findings on settings, the tested models, and laws that extend verdicts to other sizes."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any, NamedTuple

from raysim.config.identity import DENSE, IDENTITY, Setting
from raysim.units import decimals, format_parameters

HARMFUL = "harmful"
HOPELESS = "hopeless at once"
BREAKS = (HARMFUL, HOPELESS)
SAFE, WORTH = "safe", "worth training"
WORST_FIRST = (*BREAKS, "undecided", WORTH, SAFE)
UNTRIED = "untried"
TRANSFORMER = "transformer"
CONVOLUTIONAL = "convolutional"
RECURRENT = "recurrent"
UNKNOWN = "unknown"
"""The kind of a module of the user's own."""
SCRATCH, ELSEWHERE = "from scratch", "trained elsewhere"
LARGE = 50_000_000
"""Parameters of a transformer above which small models trained for minutes say nothing good about it."""
MARGIN = 1.0  # per cent of the loss
REACH = 3.1
"""Factor of parameters over which predictions of harm held on sizes left out, see docs/measurements/sizes.md."""


class Scope(NamedTuple):
    """The model of a verdict, or of a question."""

    kind: str
    """`transformer`, `convolutional`, `recurrent` or `unknown`."""
    parameters: int
    origin: str = SCRATCH
    """`from scratch`; `fine-tuned` after minutes of training by raysim; or `trained elsewhere`, from a folder or a checkpoint."""
    model: str = ""
    peak: float | None = None
    """Largest value over the root mean square at its cuts, if measured."""

    @property
    def small(self) -> bool:
        """True unless weights were trained elsewhere, or it is a transformer above `LARGE`."""
        return self.origin != ELSEWHERE and not (self.kind == TRANSFORMER and self.parameters > LARGE)

    def distance(self, other: Scope) -> tuple[bool, bool, float]:
        """Return how far a model is from another: in kind, in training and size, in the number of parameters."""
        return self.kind != other.kind, self.small != other.small, abs(math.log(self.parameters / other.parameters))

    def __str__(self) -> str:
        """Return the model and its parameters.

        >>> str(Scope("transformer", 867_072, model="gpt"))
        'gpt, 0.87 M'
        """
        return f"{self.model}, {format_parameters(self.parameters)}"


class CarriedHarm(NamedTuple):
    """Harm at a size, in per cent of the loss, with 90 % bounds, by a law through other sizes."""

    harm: float
    low: float
    high: float
    parameters: int
    smallest: int
    largest: int

    @property
    def verdict(self) -> str:
        """Return the verdict by the bounds."""
        return SAFE if self.high < MARGIN else "harmful" if self.low > MARGIN else "undecided"

    def __str__(self) -> str:
        """Return the harm in words.

        >>> str(CarriedHarm(0.9, 0.3, 2.4, 1_300_000_000, 300_000, 5_000_000))
        'by a law from 0.3 M to 5 M: +0.9 % (+0.3 to +2.4) at 1.3 B'
        """
        smallest, largest, asked = map(format_parameters, (self.smallest, self.largest, self.parameters))
        harm, low, high = (decimals(each, 1, MARGIN, sign="+") for each in (self.harm, self.low, self.high))
        return f"by a law from {smallest} to {largest}: {harm} % ({low} to {high}) at {asked}"


class Known(NamedTuple):
    """A verdict on a setting, and the model of the runs behind it, or the law of size that predicts it."""

    verdict: str = UNTRIED
    scope: Scope | CarriedHarm | None = None

    @property
    def breaks(self) -> bool:
        """True if the setting is known to do harm."""
        return self.verdict in BREAKS

    def __str__(self) -> str:
        """Return the verdict and the model in words."""
        return self.verdict if self.scope is None else f"{self.verdict}: {self.scope}"


def known(setting: Setting, asked: Scope, replicas: int = 1) -> Known:
    """Return the verdict on a setting for a model: the nearest model's, or the worst harm of one of the setting's parts.

    Harm found after training counts for every model, other verdicts only for models of the same kind and size class (`small`).
    A setting that is safe on a large model counts as worth training on models more than `REACH` times as large. Parts that are
    safe alone may do harm together, so their combination is untried. For a model trained from scratch, a law through several
    sizes takes precedence.
    """
    if setting == DENSE:
        return Known("")
    harm = carried(setting, asked.kind, asked.parameters, replicas) if asked.origin == SCRATCH else None
    if harm is not None:
        return Known(harm.verdict, harm)
    if whole := _nearest(setting, asked):
        return whole
    alone = [Setting(**{key: value}) for key, value in setting.changes().items()]
    parts = [*alone, setting._replace(replica_gradient=IDENTITY)]
    harms = [part for each in parts if (part := _nearest(each, asked)) and part.breaks]
    return min(harms, key=lambda part: BREAKS.index(part.verdict), default=Known())


def _nearest(setting: Setting, asked: Scope) -> Known | None:
    """Return the worst verdict on exactly this setting among the nearest models; None if it does not apply to the model.

    If all are undecided, harm found after training on any other model counts. A verdict after training replaces a screen's
    `worth training` on the same model.
    """
    judged = _evidence().get(setting)
    if not judged:
        return None
    near = min(scope.distance(asked)[:2] for _, scope in judged)
    alike = [(verdict, scope) for verdict, scope in judged if scope.distance(asked)[:2] == near]
    if near == (False, False) and {verdict for verdict, _ in alike} == {"undecided"}:
        alike = [(verdict, scope) for verdict, scope in judged if verdict == HARMFUL] or alike
    trained = {scope.model for verdict, scope in alike if verdict in (SAFE, "undecided", HARMFUL)}
    alike = [(verdict, scope) for verdict, scope in alike if verdict != WORTH or scope.model not in trained]
    worst, scope = min(alike, key=lambda each: (WORST_FIRST.index(each[0]), each[1].distance(asked)))
    if worst == SAFE and not scope.small and asked.parameters > REACH * scope.parameters:
        worst = WORTH
    return Known(worst, scope) if near == (False, False) or worst == HARMFUL else None


@cache
def _evidence() -> dict[Setting, list[tuple[str, Scope]]]:
    """Return the verdicts written by `make findings`, by setting."""
    text = resources.files("raysim.forecast").joinpath("evidence.json").read_text(encoding="utf-8")
    judged: dict[Setting, list[tuple[str, Scope]]] = {}
    for row in json.loads(text):
        setting = Setting.of(row)
        judged.setdefault(setting, []).append((row["verdict"], Scope(**row["scope"])))
    return judged


def carried(setting: Setting, kind: str, parameters: int, replicas: int) -> CarriedHarm | None:
    """Return the harm of a setting in training from scratch; None if no law covers the model.

    Harm grows with replicas: between two measured numbers of replicas, the law of the larger one is used.
    """
    laws = [
        law
        for law in _laws()
        if setting == Setting(replica_gradient=law["replica_gradient"])
        and kind == law["kind"]
        and replicas <= law["replicas"]
        and law["curve"][0][0] <= parameters <= law["curve"][-1][0]
    ]
    if not laws or replicas < 2:
        return None
    law = min(laws, key=lambda law: law["replicas"])
    for (size, *lower), (following, *upper) in pairwise(law["curve"]):
        if size <= parameters <= following:
            share = math.log(parameters / size) / math.log(following / size)
            harm, low, high = (one + share * (other - one) for one, other in zip(lower, upper, strict=True))
            return CarriedHarm(harm, low, high, parameters, law["smallest"], law["largest"])
    return None


@cache
def _laws() -> list[dict[str, Any]]:
    """Return the curves written by `make findings`."""
    text = resources.files("raysim.forecast").joinpath("laws.json").read_text(encoding="utf-8")
    laws: list[dict[str, Any]] = json.loads(text)
    return laws
