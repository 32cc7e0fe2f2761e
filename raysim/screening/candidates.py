"""The settings that a screen tries, chosen by the statistics of the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from raysim.compressors import parse
from raysim.config.identity import DENSE, IDENTITY, Setting
from raysim.notation import InputError
from raysim.pipeline.plan import Plan
from raysim.probing.candidates import check_gradients
from raysim.replication import parse_replica_method
from raysim.screening.passes import TensorFacts


class Default(NamedTuple):
    """Codecs of activations and gradients, tried if the activations are `massive` (True), are not (False), or always."""

    forward: str
    backward: str
    massive: bool | None = None


ROWS = 'Quantize(8, per="row")'
LINKS = (
    Default("Quantize(8)", "Quantize(8)"),
    Default("Quantize(4)", "Quantize(8)", False),
    Default(ROWS, ROWS),
    Default(IDENTITY, 'Quantize(4, per="row")', True),
    Default('Quantize(4, per="row")', ROWS),
    Default('Quantize(4, per="channel")', ROWS),
    Default('Quantize(4, per="block", block=64)', ROWS),
    Default('Quantize(4, per="block", block=32)', 'Quantize(4, per="block", block=32)'),
    Default('Hadamard(Quantize(4, per="row"))', ROWS),
    Default("Rotated(4)", "Rotated(4)", True),
    Default("Rotated(3)", "Rotated(4)", True),
    Default("TAHQuant(tile=64)", ROWS),
    Default("TAHQuant(tile=64)", "TAHQuant(tile=64)"),
    Default('Outliers(Quantize(4, per="row"))', ROWS, True),
    Default('MX("e4m3")', 'MX("e4m3")'),
    Default('MX("e2m1")', ROWS),
    Default("TopK(0.3)", "TopK(0.3)"),
    Default("TopK(0.1)", "TopK(0.1)"),
    Default("LowRank(32)", "LowRank(32)"),
)
"""Settings of links by default, mildest of a family first; add a line to try another codec."""
METHODS = (
    "TwoShot(Quantize(8))",
    "PowerSGD(32)",
    "PowerSGD(4)",
    "ErrorFeedback(TopK(0.1))",
    "ErrorFeedback(TopK(0.01))",
)
"""Replica methods by default."""
SUMS = ("ErrorFeedback(TopK(0.01))", "PowerSGD(8)", 'TwoShot(Quantize(8, per="block", block=64))')
"""Methods for the sums of tied parameters by default, which only training can judge."""
LOCAL_STEPS = (10, 100, 500)
"""Local steps between two exchanges, which only training can judge."""


MOST = len(LINKS) + len(METHODS)
"""Default settings of any screen."""


def defaults(plan: Plan, facts: Sequence[TensorFacts]) -> list[Setting]:
    """Return the default settings that suit the tensors and can send them; dense is not among them."""
    massive = any(each.massive for each in facts if each.direction == "forward")
    links = [Setting(each.forward, each.backward) for each in LINKS if each.massive in (None, massive)]
    methods = [Setting(replica_gradient=method) for method in METHODS if plan.num_replicas > 1]
    settings = [*(links if plan.boundaries else []), *methods]
    return [canonical(each) for each in settings if _fits(each, plan)]


def every(
    stages: int, replicas: int, steps: int | None, tried: Iterable[Setting] = (), *, tied: bool = False
) -> list[Setting]:
    """Return all default settings of a run, whatever its tensors and including settings that only training can judge, then `tried`."""
    links = [Setting(each.forward, each.backward) for each in LINKS if stages > 1]
    methods = [*METHODS, *(f"DiLoCo({count})" for count in LOCAL_STEPS if steps and steps % count == 0)]
    settings = [*links, *(Setting(replica_gradient=method) for method in methods if replicas > 1)]
    settings += [Setting(tied_gradient=method) for method in SUMS if tied]
    known = []
    for each in settings:
        with suppress(ValueError):  # a codec that is not installed
            known.append(canonical(each))
    return distinct([*known, *map(canonical, tried)])


def canonical(setting: Setting) -> Setting:
    """Return a setting in canonical notation; raises ValueError if one cannot be parsed."""
    return Setting(
        repr(parse(setting.forward)),
        repr(parse(setting.backward)),
        repr(parse_replica_method(setting.replica_gradient)),
        tied_gradient=repr(parse_replica_method(setting.tied_gradient)),
    )


def distinct(settings: Iterable[Setting]) -> list[Setting]:
    """Return the settings once each, without dense."""
    return [each for each in dict.fromkeys(settings) if each != DENSE]


def tried_setting(setting: Setting, plan: Plan, *, gradients: bool = True) -> Setting:
    """Return a setting of `--try` in canonical notation; raises InputError if it cannot be screened in this run."""
    for key in () if gradients else ("backward", "replica_gradient"):
        if (method := getattr(setting, key)) != IDENTITY:
            raise InputError(f"`--try`: {method} needs gradients: leave out `{key}`, or `--no-gradients`.")
    check_parts(setting, plan.num_stages, plan.num_replicas)
    try:
        _check_methods(setting, plan)
        return canonical(setting)
    except ValueError as error:
        raise InputError(f"`--try`: {error}") from None


def check_parts(setting: Setting, stages: int, replicas: int) -> None:
    """Raise InputError if a setting of `--try` compresses messages that the run does not send."""
    if (setting.forward, setting.backward) != (IDENTITY, IDENTITY) and stages == 1:
        raise InputError(f"`--try`: {setting.forward} / {setting.backward} needs links, but the run has one stage.")
    if setting.replica_gradient != IDENTITY and replicas < 2:
        raise InputError(
            f"`--try`: {setting.replica_gradient} needs replicas, but the run has one: add num_replicas=2."
        )


def _fits(setting: Setting, plan: Plan) -> bool:
    """Return whether a default setting's codecs are installed and can send this run's tensors."""
    try:
        _check_methods(setting, plan)
    except ValueError:
        return False
    return True


def _check_methods(setting: Setting, plan: Plan) -> None:
    for field, text in (("forward", setting.forward), ("backward", setting.backward)):
        method = parse(text)
        if field not in method.directions:
            raise ValueError(
                f"`{field}` cannot be {method!r}, which is for {' and '.join(method.directions)} messages."
            )
        for shape in {shape for tensors in plan.boundaries for shape in tensors.shapes.values()}:
            method.codec.encode(torch.zeros(shape), key=0)
    if setting.replica_gradient != IDENTITY:
        check_gradients(parse_replica_method(setting.replica_gradient), {}, plan.num_replicas)
