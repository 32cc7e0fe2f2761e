"""Quality against density and bits, forward and backward apart, with compression on and off at inference."""

from __future__ import annotations

from raysim.analysis.data.recorded_methods import read_method
from raysim.analysis.report.blocks import Section
from raysim.analysis.report.figures import COLOURS, SYMBOLS, Axis, Figure, Panel, Series, Style, family, finite
from raysim.analysis.report.material import MODES, Job, Material, SettingRuns
from raysim.analysis.report.tradeoff import described

STRENGTHS = {  # the meaning of a codec's first argument
    "density": ("TopK", "RandomK", "EstimatedTopK"),
    "bits": ("Quantize", "FixedPoint", "NonUniform", "QSGD"),
}
LOOKS = {"on": (COLOURS[0], SYMBOLS[0]), "off": (COLOURS[1], SYMBOLS[1])}


def strength(notation: str, kind: str) -> float | None:
    """Return the density or the bits in a notation, or None where it has none.

    >>> strength("ErrorFeedback(TopK(0.1, values=Quantize(4)))", "density"), strength("Identity", "bits")
    (0.1, None)
    """
    method = read_method(notation)
    while method is not None and method.name not in STRENGTHS[kind]:
        method = method.inner
    return None if method is None else method.strength


def section(material: Material) -> Section:
    """Return a figure a job, a panel for each of density and bits in each direction that has two values or more."""
    figures = [figure for job in material.jobs if (figure := _figure(job)) is not None]
    if not figures:
        return Section(
            "quality",
            "Quality against density and bits",
            absent="It needs settings that differ in the density or the bits of a codec; there are none here.",
        )
    return Section("quality", "Quality against density and bits", figures)


def _figure(job: Job) -> Figure | None:
    panels = []
    for kind in STRENGTHS:
        for direction in ("forward", "backward"):
            known = [one for one in job.settings if strength(getattr(one, direction), kind) is not None]
            if len({strength(getattr(one, direction), kind) for one in known}) > 1:
                panels.append(_panel(job, kind, direction, known))
    if not panels:
        return None
    return Figure(
        f"{job.key}-quality",
        f"{job.title}: {job.metric.text} by density and bits",
        "Where the other direction is dense, the loss is due to this one alone; points of one kind of codec are then joined. "
        "Means over seeds with bars of one standard deviation; the dashed line is dense.",
        panels,
    )


def _panel(job: Job, kind: str, direction: str, settings: list[SettingRuns]) -> Panel:
    other = "backward" if direction == "forward" else "forward"
    alone = [one for one in settings if getattr(one, other) == "Identity"]
    series = []
    for mode in reversed(MODES):  # on lies on top
        colour, symbol = LOOKS[mode]
        mixed = [one for one in settings if one not in alone]
        for name, chosen, look, form in (
            (
                f"compression {mode}, both directions compressed",
                mixed,
                Style(colour, symbol, faint=bool(alone)),
                "points",
            ),
            (
                f"compression {mode}, other direction dense",
                alone,
                Style(colour, symbol, "solid" if mode == "on" else "dash"),
                "marked",
            ),
        ):
            if chosen:
                ordered = sorted(chosen, key=lambda one: strength(getattr(one, direction), kind) or 0.0)
                series.append(
                    Series(
                        name,
                        [strength(getattr(one, direction), kind) for one in ordered],
                        finite(one.quality[mode].mean for one in ordered),
                        look,
                        kind=form
                        if len(chosen) > 1 and len({family(getattr(one, direction)) for one in chosen}) == 1
                        else "points",
                        errors=finite(one.quality[mode].sd for one in ordered),
                        labels=[described(one) for one in ordered],
                    )
                )
    carried = "activations" if direction == "forward" else "gradients"
    text = "density (share kept)" if kind == "density" else "bits a value"
    return Panel(
        f"{kind.capitalize()} of {carried} ({direction})",
        Axis(f"{direction}_{kind}", text, log=kind == "density"),
        Axis(job.metric.name, job.metric.text, unit=job.metric.unit),
        series,
        level=job.dense.quality["on"].mean if job.dense is not None else None,
    )
