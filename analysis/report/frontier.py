"""The settings of a job compared: step time against quality, and quality against density and bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from raysim.analysis.comparison.choice import divergence
from raysim.analysis.comparison.choice import settings as judge_settings
from raysim.analysis.data.folders import over
from raysim.analysis.data.settings import COMPRESSION
from raysim.analysis.report.material import MODES, Job, Material, SettingRuns
from raysim.analysis.report.page import (
    BLACK,
    COLOURS,
    DENSE,
    GREY,
    SYMBOLS,
    Axis,
    ByNetwork,
    Cell,
    Figure,
    Panel,
    Section,
    Series,
    Style,
    Table,
    code,
    finite,
    number,
    quality_axis,
    style,
)
from raysim.analysis.report.words import (
    against_dense,
    bandwidth,
    bytes_of,
    measure_text,
    plural,
    quality,
    speedup,
    step_time,
)
from raysim.analysis.runs.estimates import Estimate
from raysim.notation import Method, read_method

# --- step time against quality, with the dense baseline -----------------------------------------------------------------------


BREAK_EVEN = "1gbps"  # a link without latency, whose bandwidth is varied


def frontier_section(material: Material) -> Section:
    """Return a figure per job, and a table of the settings named in figures."""
    jobs = [job for job in material.jobs if len(job.priced) > 1]
    blocks = [block for job in jobs for block in (_frontier_figure(job, material), _settings_table(job, material))]
    without = "A frontier needs two settings or more of a job, with profiled actions; there are none here."
    return Section.of("frontier", "Frontier", blocks, without)


def _frontier_figure(job: Job, material: Material) -> Figure:
    groups = grouped(job.trained)
    untrained = ", ".join(
        f"`{setting.name}` ({quality(job.measure, setting.quality['on'].mean)})"
        for setting in job.priced
        if setting not in job.trained
    )
    panels = [
        Panel(
            f"Compression {mode} at inference",
            Axis("step_s", "time of a step", log=True, unit="s"),
            quality_axis(job.measure, f"_{mode}"),
            [
                *(_points(job, name, settings, look, mode, material) for name, (look, settings) in groups.items()),
                _front(job, mode, material),
            ],
            height=380,
            level=job.dense.quality[mode].mean if job.dense is not None else None,
        )
        for mode in MODES
    ]
    return Figure(
        f"{job.key}-frontier",
        f"{job.title}: step time against {measure_text(job.measure)}",
        f"Left is faster, {'up' if job.measure.higher else 'down'} is better. Each point is the mean of a setting over its seeds, with "
        "bars of one standard deviation. The star and the dashed line are dense; the grey line is the Pareto front. Numbers refer to "
        "the table below. Hover over a point for its bytes and seeds."
        + (f" Settings that learned less than half as much as dense are not drawn: {untrained}." if untrained else ""),
        panels,
    )


def _settings_table(job: Job, material: Material) -> Table:
    """Return a table of the highlighted settings, with the bandwidth below which they pay off."""
    runs = material.results.select([run for setting in job.named for run in setting.runs])
    even = judge_settings(runs, networks=BREAK_EVEN, **material.options)
    rows = []
    for i, setting in enumerate(job.named, start=1):
        judged = setting.judged
        same = [(even[key] == judged.get(key)).to_numpy(bool) for key in ("context", *COMPRESSION)]
        matches = even[np.logical_and.reduce(same)].to_dict("records")
        evidence = against_dense(setting, job.measure)
        if setting.verdict == "safe":
            evidence += f"; {divergence(judged)}"
        pays = "" if setting.dense else below(matches[0]) if matches else "unknown"
        rows.append(
            [
                code("setting", setting.name),
                number("point", str(i), i),
                number("seeds", str(setting.seeds), setting.seeds),
                number("bytes a step", bytes_of(setting.wire_bytes), setting.wire_bytes),
                number("factor", f"{setting.factor:.2f}", setting.factor),
                priced("step", setting, step_time, setting.step_s),
                priced("speed-up", setting, speedup, setting.speedup),
                number("pays below", pays, float(matches[0]["break_even_bps"]) if matches else math.nan),
                *(number(m, quality(job.measure, *setting.quality[m]), setting.quality[m].mean) for m in MODES),
                Cell("verdict", setting.verdict or ("baseline" if setting.dense else "no dense run")),
                Cell("quality", evidence if judged else "", kind="long"),
            ]
        )
    return Table(
        f"{job.key}-settings",
        f"The settings of {job.title} that are named in figures. Step times and speed-ups over dense, with 90 % intervals, are for "
        f"the chosen network {over(job.transport)}. Pays below: the bandwidth below which a step is faster than dense, without "
        f"latency; within the interval the two are not distinguishable. Compute: {job.source}.",
        rows,
        live=True,
    )


def priced(column: str, setting: SettingRuns, write: Callable[[Estimate], str], values: Mapping[str, Estimate]) -> Cell:
    """Return a cell of estimates by network; a dense setting is as fast as itself."""
    if not values:
        return number(column, "not priced" if not setting.step_s else "unknown")
    if setting.dense and values is setting.speedup:
        return number(column, "1", 1.0)
    return number(
        column,
        ByNetwork.of(values, lambda network: write(values[network])),
        ByNetwork.of(values, lambda network: values[network].value),
    )


def below(row: Mapping[Any, Any]) -> str:
    """Format the break-even bandwidth of a row of `raysim.analysis.settings`.

    >>> below({"pays": "below", "break_even_bps": 2.5e8, "break_even_low_bps": 2.4e8, "break_even_high_bps": 2.6e8})
    '250 Mbit/s (240 to 260)'
    >>> below({"pays": "below", "break_even_bps": math.inf, "break_even_low_bps": 9e10, "break_even_high_bps": math.inf})
    'always (90 Gbit/s to always)'
    """
    if row["pays"] != "below":
        return str(row["pays"] or "unknown")
    bandwidths = (float(row[f"break_even{name}_bps"]) for name in ("", "_low", "_high"))
    middle, low, high = ("always" if math.isinf(bps) else bandwidth(bps) for bps in bandwidths)
    unit = middle.partition(" ")[2] or " "
    return f"{middle} ({low.removesuffix(f' {unit}')} to {high.removesuffix(f' {unit}')})"


def family(notation: str) -> str:
    """Return a notation without its numbers and options, common to codecs of one kind.

    >>> family("ErrorFeedback(TopK(0.1, values=Quantize(4)))"), family("Quantize(4, range='absmax')")
    ('ErrorFeedback(TopK(Quantize))', 'Quantize')
    """
    method = read_method(notation)
    return _kind(method) if method is not None else "each boundary its own"


def _kind(method: Method) -> str:
    parts = (*method.arguments, *(value for _, value in method.options))
    inner = ", ".join(_kind(part) for part in parts if isinstance(part, Method))
    return f"{method.name}({inner})" if inner else method.name


def grouped(settings: list[SettingRuns]) -> dict[str, tuple[Style, list[SettingRuns]]]:
    """Return settings by the kinds of their codecs, and the style of each kind; dense is drawn last, on top."""
    compressed = [setting for setting in settings if not setting.dense]
    kinds: dict[str, list[SettingRuns]] = {}
    for setting in compressed:
        kinds.setdefault(f"{family(setting.forward)} / {family(setting.backward)}", []).append(setting)
    if len(kinds) > len(COLOURS):
        order = [setting for members in kinds.values() for setting in members]
        kinds = {}
        for setting in order:
            kinds.setdefault(f"{family(setting.forward)} forward", []).append(setting)
    by_size = sorted(kinds, key=lambda name: -len(kinds[name]))
    groups = {name: (style(i), kinds[name]) for i, name in enumerate(by_size[: len(COLOURS)])}
    others = [setting for name in by_size[len(COLOURS) :] for setting in kinds[name]]
    if others:
        groups["others"] = (Style(GREY), others)
    dense = [setting for setting in settings if setting.dense]
    return groups | ({"dense": (DENSE, dense)} if dense else {})


def described(setting: SettingRuns) -> str:
    """Return the label of a setting's point."""
    diverged = f", {setting.diverged} diverged" if setting.diverged else ""
    judged = f", {setting.verdict}" if setting.verdict else ""
    return (
        f"{setting.name} ({plural(setting.seeds, 'seed')}{diverged}{judged}): {bytes_of(setting.wire_bytes)} a step, "
        f"compression factor {setting.factor:.2f}"
    )


def _points(job: Job, name: str, settings: list[SettingRuns], look: Style, mode: str, material: Material) -> Series:
    return Series(
        name,
        ByNetwork.of(material.networks, lambda network: finite(setting.step_s[network].value for setting in settings)),
        finite(setting.quality[mode].mean for setting in settings),
        look,
        errors=finite(setting.quality[mode].sd for setting in settings),
        labels=[described(setting) for setting in settings],
        texts=[
            str(job.named.index(setting) + 1) if setting in job.named else "" for setting in settings
        ],  # as in the table
    )


def _front(job: Job, mode: str, material: Material) -> Series:
    fronts = {network: job.fronts[network][mode] for network in material.networks}
    return Series(
        "front",
        ByNetwork.of(fronts, lambda network: [setting.step_s[network].value for setting in fronts[network]]),
        ByNetwork.of(fronts, lambda network: [setting.quality[mode].mean for setting in fronts[network]]),
        Style(BLACK, dash="dot", faint=True),
        kind="line",
        labels=ByNetwork.of(fronts, lambda network: [setting.name for setting in fronts[network]]),
    )


# --- quality against density and bits, forward and backward separately, with compression on and off at inference --------------


STRENGTHS = {  # the meaning of a codec's first argument
    "density": ("TopK", "RandomK", "EstimatedTopK"),
    "bits": ("Quantize", "FixedPoint", "NonUniform", "QSGD"),
}
LOOKS = {"on": (COLOURS[0], SYMBOLS[0]), "off": (COLOURS[1], SYMBOLS[1])}


def strength(notation: str, kind: str) -> float | None:
    """Return the density or the bits in a notation; None without one.

    >>> strength("ErrorFeedback(TopK(0.1, values=Quantize(4)))", "density"), strength("Identity", "bits")
    (0.1, None)
    """
    method = read_method(notation)
    while method is not None and method.name not in STRENGTHS[kind]:
        method = method.inner
    return None if method is None else method.strength


def quality_section(material: Material) -> Section:
    """Return a figure per job, with panels for density and for bits in each direction that has at least two values."""
    figures = [figure for job in material.jobs if (figure := _quality_figure(job)) is not None]
    without = "It needs settings that differ in the density or the bits of a codec; there are none here."
    return Section.of("quality", "Quality against density and bits", figures, without)


def _quality_figure(job: Job) -> Figure | None:
    panels = []
    for kind in STRENGTHS:
        for direction in ("forward", "backward"):
            strengths = {
                setting: value
                for setting in job.settings
                if (value := strength(getattr(setting, direction), kind)) is not None
            }
            if len(set(strengths.values())) > 1:
                panels.append(_quality_panel(job, kind, direction, strengths))
    if not panels:
        return None
    return Figure(
        f"{job.key}-quality",
        f"{job.title}: {measure_text(job.measure)} by density and bits",
        "Lines join settings with one kind of codec whose other direction is dense: their loss is due to this direction alone. "
        "Points are means over seeds with bars of one standard deviation; the dashed line is dense.",
        panels,
    )


def _quality_panel(job: Job, kind: str, direction: str, strengths: Mapping[SettingRuns, float]) -> Panel:
    other = "backward" if direction == "forward" else "forward"
    alone = [setting for setting in strengths if getattr(setting, other) == "Identity"]
    mixed = [setting for setting in strengths if setting not in alone]
    series = []
    for mode in reversed(MODES):  # `on` is drawn on top
        colour, symbol = LOOKS[mode]
        dash = "solid" if mode == "on" else "dash"
        for text, chosen, look, joins in (
            ("both directions compressed", mixed, Style(colour, symbol, faint=bool(alone)), False),
            ("other direction dense", alone, Style(colour, symbol, dash), True),
        ):
            if not chosen:
                continue
            ordered = sorted(chosen, key=lambda setting: strengths[setting])
            one_family = len({family(getattr(setting, direction)) for setting in chosen}) == 1
            series.append(
                Series(
                    f"compression {mode}, {text}",
                    [strengths[setting] for setting in ordered],
                    finite(setting.quality[mode].mean for setting in ordered),
                    look,
                    kind="marked" if joins and one_family and len(chosen) > 1 else "points",
                    errors=finite(setting.quality[mode].sd for setting in ordered),
                    labels=[described(setting) for setting in ordered],
                )
            )
    carried = "activations" if direction == "forward" else "gradients"
    text = "density (share kept)" if kind == "density" else "bits a value"
    return Panel(
        f"{kind.capitalize()} of {carried} ({direction})",
        Axis(f"{direction}_{kind}", text, log=kind == "density"),
        quality_axis(job.measure),
        series,
        level=job.dense.quality["on"].mean if job.dense is not None else None,
    )
