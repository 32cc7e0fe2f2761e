"""The settings of a job compared: step time against quality, and quality against density and bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from raysim.analysis.comparison.choice import break_even
from raysim.analysis.data.recorded_methods import read_method
from raysim.analysis.data.settings import COMPRESSION
from raysim.analysis.data.studies import over
from raysim.analysis.pricing.estimates import Estimate
from raysim.analysis.report.blocks import Cell, Column, Section, Table
from raysim.analysis.report.figures import (
    BLACK,
    COLOURS,
    DENSE,
    GREY,
    SYMBOLS,
    Axis,
    ByNetwork,
    Figure,
    Panel,
    Series,
    Style,
    family,
    finite,
    style,
)
from raysim.analysis.report.material import MODES, Job, Material, SettingRuns
from raysim.analysis.report.words import against_dense, bandwidth, bytes_of, plural, speedup, step_time

# --- step time against quality, with the dense baseline -----------------------------------------------------------------------


BREAK_EVEN = "1gbps"  # a link without latency, whose bandwidth is varied
COLUMNS = (
    Column("setting"),
    Column("point", number=True),
    Column("seeds", number=True),
    Column("bytes a step", number=True),
    Column("factor", number=True),
    Column("step", number=True),
    Column("speed-up", number=True),
    Column("pays below", number=True),
    Column("on", number=True),
    Column("off", number=True),
    Column("verdict"),
    Column("quality", long=True),
)


def frontier_section(material: Material) -> Section:
    """Return a figure a job, and a table of the settings that figures name."""
    jobs = [job for job in material.jobs if len(job.priced) > 1]
    if not jobs:
        return Section(
            "frontier",
            "Frontier",
            absent="A frontier needs two settings or more of a job, with profiled actions; there are none here.",
        )
    return Section(
        "frontier", "Frontier", [block for job in jobs for block in (_figure(job, material), _table(job, material))]
    )


def _figure(job: Job, material: Material) -> Figure:
    groups = grouped(job.trained)
    untrained = [
        f"`{one.name}` ({job.metric.write(one.quality['on'].mean)})" for one in job.priced if one not in job.trained
    ]
    panels = [
        Panel(
            f"Compression {mode} at inference",
            Axis("step_s", "time of a step", log=True, unit="s"),
            Axis(f"{job.metric.name}_{mode}", job.metric.text, unit=job.metric.unit),
            [
                *(_points(job, name, settings, look, mode, material) for name, (look, settings) in groups.items()),
                _front(job, mode, material),
            ],
            height=380,
            level=job.dense.quality[mode].mean if job.dense is not None else None,
        )
        for mode in MODES
    ]
    better = "Up" if job.metric.higher else "Down"
    return Figure(
        f"{job.key}-frontier",
        f"{job.title}: step time against {job.metric.text}",
        f"Left is faster, {better.lower()} is better: one point a setting, mean over its seeds, with bars of one "
        "standard deviation. The star and the "
        "dashed line are the dense runs; the grey line joins the settings of which no other is both faster and better. "
        "Numbers are those of the table below. Point at one for its bytes and seeds."
        + (
            f" Settings that learned less than half as much as dense are not drawn: {', '.join(untrained)}."
            if untrained
            else ""
        ),
        panels,
    )


def _table(job: Job, material: Material) -> Table:
    """Return a table of the settings with a look of their own, with the bandwidth below which they pay."""
    runs = material.results.select([run for setting in job.named for run in setting.runs])
    even = break_even(runs, BREAK_EVEN, **material.options)
    rows = []
    for setting in job.named:
        judged = setting.judged
        same = [(even[key] == judged.get(key)).to_numpy(bool) for key in ("context", *COMPRESSION)]
        mine = even[np.logical_and.reduce(same)].to_dict("records")
        bps = float(mine[0]["break_even_bps"]) if mine else math.nan
        rows.append(
            [
                Cell(setting.name, code=True),
                Cell(number(job, setting), job.named.index(setting) + 1),
                Cell(str(setting.seeds), setting.seeds),
                Cell(bytes_of(setting.wire_bytes), setting.wire_bytes),
                Cell(f"{setting.factor:.2f}", setting.factor),
                priced(setting, step_time, setting.step_s),
                priced(setting, speedup, setting.speedup),
                Cell("" if setting.dense else below(mine[0]) if mine else "unknown", bps),
                Cell(job.metric.write(*setting.quality["on"][:2]), setting.quality["on"].mean),
                Cell(job.metric.write(*setting.quality["off"][:2]), setting.quality["off"].mean),
                Cell(setting.verdict or ("baseline" if setting.dense else "no dense run")),
                Cell(against_dense(setting, job.metric.measure) if judged else ""),
            ]
        )
    return Table(
        f"{job.key}-settings",
        f"{job.title}: the settings named in the figures. Steps and speed-ups over dense, with their 90 % intervals, are on the "
        f"chosen network {over(job.transport)}. Pays below: the bandwidth under which a step is faster than a dense one, without "
        f"latency, and the interval in which the two are not distinguishable. Compute: {job.source}.",
        COLUMNS,
        rows,
        live=True,
    )


def priced(setting: SettingRuns, write: Callable[[Estimate], str], values: Mapping[str, Estimate]) -> Cell:
    """Return a cell of estimates by network; a dense setting is as fast as itself."""
    if not values:
        return Cell("not priced" if not setting.step_s else "unknown")
    if setting.dense and values is setting.speedup:
        return Cell("1", 1.0)
    return Cell(
        ByNetwork({network: write(estimate) for network, estimate in values.items()}),
        ByNetwork({network: estimate.value for network, estimate in values.items()}),
    )


def below(row: Mapping[Any, Any]) -> str:
    """Return a break-even bandwidth, of a row of `break_even`, in words.

    >>> below({"pays": "below", "break_even_bps": 2.5e8, "break_even_low_bps": 2.4e8, "break_even_high_bps": 2.6e8})
    '250 Mbit/s (240 to 260)'
    >>> below({"pays": "below", "break_even_bps": math.inf, "break_even_low_bps": 9e10, "break_even_high_bps": math.inf})
    'always (90 Gbit/s to always)'
    """
    if row["pays"] != "below":
        return str(row["pays"] or "unknown")
    found = (float(row[f"break_even{name}_bps"]) for name in ("", "_low", "_high"))
    middle, low, high = ("always" if math.isinf(bps) else bandwidth(bps) for bps in found)
    unit = middle.partition(" ")[2] or " "
    return f"{middle} ({low.removesuffix(f' {unit}')} to {high.removesuffix(f' {unit}')})"


def grouped(settings: list[SettingRuns]) -> dict[str, tuple[Style, list[SettingRuns]]]:
    """Return settings by the kinds of their codecs, and the look of each kind; dense comes last, to lie on top."""
    kinds: dict[str, list[SettingRuns]] = {}
    for setting in settings:
        if not setting.dense:
            kinds.setdefault(f"{family(setting.forward)} / {family(setting.backward)}", []).append(setting)
    if len(kinds) > len(COLOURS):
        merged: dict[str, list[SettingRuns]] = {}
        for members in kinds.values():
            for setting in members:
                merged.setdefault(f"{family(setting.forward)} forward", []).append(setting)
        kinds = merged
    by_size = sorted(kinds, key=lambda name: -len(kinds[name]))
    found = {name: (style(place), kinds[name]) for place, name in enumerate(by_size[: len(COLOURS)])}
    others = [setting for name in by_size[len(COLOURS) :] for setting in kinds[name]]
    if others:
        found["others"] = (Style(GREY), others)
    dense = [setting for setting in settings if setting.dense]
    return found | ({"dense": (DENSE, dense)} if dense else {})


def number(job: Job, setting: SettingRuns) -> str:
    """Return the number of a named setting, which stands beside its point and in the table of settings."""
    return str(job.named.index(setting) + 1) if setting in job.named else ""


def described(setting: SettingRuns) -> str:
    """Return a setting for one who points at it."""
    diverged = f", {setting.diverged} diverged" if setting.diverged else ""
    judged = f", {setting.verdict}" if setting.verdict else ""
    return (
        f"{setting.name} ({plural(setting.seeds, 'seed')}{diverged}{judged}): {bytes_of(setting.wire_bytes)} a step, "
        f"compression factor {setting.factor:.2f}"
    )


def _points(job: Job, name: str, settings: list[SettingRuns], look: Style, mode: str, material: Material) -> Series:
    return Series(
        name,
        ByNetwork({network: finite(one.step_s[network].value for one in settings) for network in material.networks}),
        finite(one.quality[mode].mean for one in settings),
        look,
        errors=finite(one.quality[mode].sd for one in settings),
        labels=[described(one) for one in settings],
        texts=[number(job, one) for one in settings],
    )


def _front(job: Job, mode: str, material: Material) -> Series:
    fronts = {network: job.fronts[network][mode] for network in material.networks}
    return Series(
        "front",
        ByNetwork({network: [one.step_s[network].value for one in front] for network, front in fronts.items()}),
        ByNetwork({network: [one.quality[mode].mean for one in front] for network, front in fronts.items()}),
        Style(BLACK, dash="dot", faint=True),
        kind="line",
        labels=ByNetwork({network: [one.name for one in front] for network, front in fronts.items()}),
    )


# --- quality against density and bits, forward and backward separately, with compression on and off at inference --------------


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


def quality_section(material: Material) -> Section:
    """Return a figure a job, a panel for each of density and bits in each direction that has two values or more."""
    figures = [figure for job in material.jobs if (figure := _quality_figure(job)) is not None]
    if not figures:
        return Section(
            "quality",
            "Quality against density and bits",
            absent="It needs settings that differ in the density or the bits of a codec; there are none here.",
        )
    return Section("quality", "Quality against density and bits", figures)


def _quality_figure(job: Job) -> Figure | None:
    panels = []
    for kind in STRENGTHS:
        for direction in ("forward", "backward"):
            known = [one for one in job.settings if strength(getattr(one, direction), kind) is not None]
            if len({strength(getattr(one, direction), kind) for one in known}) > 1:
                panels.append(_quality_panel(job, kind, direction, known))
    if not panels:
        return None
    return Figure(
        f"{job.key}-quality",
        f"{job.title}: {job.metric.text} by density and bits",
        "Where the other direction is dense, the loss is due to this one alone; points of one kind of codec are then joined. "
        "Means over seeds with bars of one standard deviation; the dashed line is dense.",
        panels,
    )


def _quality_panel(job: Job, kind: str, direction: str, settings: list[SettingRuns]) -> Panel:
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
