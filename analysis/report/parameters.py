"""Parallel coordinates of all settings, and the importance of each parameter of a study."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import pandas as pd

from raysim.analysis.comparison.objectives import importance
from raysim.analysis.report.frontier import grouped
from raysim.analysis.report.material import MODES, Job, Material, SettingRuns
from raysim.analysis.report.page import COLOURS, Axis, ByNetwork, Figure, Panel, Section, Series, Style, finite, joined
from raysim.analysis.report.words import bytes_of, measure_text, quality, seconds

LEAST_SETTINGS = 4  # fewer are easy to read in a table


# --- parallel coordinates: each setting as a line through its codecs, bytes, seconds and quality ------------------------------


class Scale(NamedTuple):
    """One vertical axis: the value of each setting, as a position from 0 to 1 and in words."""

    text: str
    positions: Mapping[str, float]
    words: Mapping[str, str]


def parallel_section(material: Material) -> Section:
    """Return a figure per job."""
    figures = [_parallel_figure(job, material) for job in material.jobs if len(job.priced) >= LEAST_SETTINGS]
    without = f"They need {LEAST_SETTINGS} settings or more of a job, with profiled actions."
    return Section.of("parallel", "Parallel coordinates", figures, without)


def _parallel_figure(job: Job, material: Material) -> Figure:
    scales = {network: _scales(job, network) for network in material.networks}
    count = len(scales[material.network])
    series = []
    for name, (look, settings) in grouped(job.priced).items():
        lines = {
            network: joined(
                (
                    list(range(len(axes))),
                    [scale.positions.get(setting.name) for scale in axes],
                    f"{setting.name}: "
                    + ", ".join(f"{s.text.splitlines()[0]} {s.words.get(setting.name, 'none')}" for s in axes[2:]),
                )
                for setting in settings
            )
            for network, axes in scales.items()
        }
        x = lines[material.network][0]
        y, labels = (ByNetwork({network: line[part] for network, line in lines.items()}) for part in (1, 2))
        series.append(Series(name, x, y, look, kind="marked", labels=labels))
    ticks = ByNetwork({network: {scale.text: i for i, scale in enumerate(axes)} for network, axes in scales.items()})
    panel = Panel(
        "Settings across their quantities",
        Axis("quantity", "", ticks=ticks),
        Axis("place", "", ticks={"low": 0.0, "high": 1.0}),
        series,
        height=420,
    )
    return Figure(
        f"{job.key}-parallel",
        f"{job.title}: all settings at once",
        "Each line is a setting. Axes run from the lowest value (bottom) to the highest, on a logarithmic scale for bytes and "
        "seconds. Codecs are ordered by name. Hide kinds of codecs in the legend to follow the others; the table of runs has all "
        f"{count} quantities and more.",
        [panel],
        columns=1,
    )


def _scales(job: Job, network: str) -> list[Scale]:
    settings = job.priced
    scales = [_codecs("forward", settings), _codecs("backward", settings)]
    numbers: list[tuple[str, Mapping[str, float], Callable[[float], str], bool]] = [
        ("bytes a step", {setting.name: setting.wire_bytes for setting in settings}, bytes_of, True),
        ("step", {setting.name: setting.step_s[network].value for setting in settings}, seconds, True),
    ]
    for mode in MODES:
        means = {setting.name: setting.quality[mode].mean for setting in settings}
        numbers.append((f"{measure_text(job.measure)} {mode}", means, partial(quality, job.measure), False))
    for text, values, write, log in numbers:
        known = {name: value for name, value in values.items() if math.isfinite(value) and (value > 0 or not log)}
        if known:
            low, high = min(known.values()), max(known.values())
            positions = {name: _position(value, low, high, log) for name, value in known.items()}
            words = {name: write(value) for name, value in known.items()}
            scales.append(Scale(f"{text}\n{write(low)} to {write(high)}", positions, words))
    return scales


def _codecs(direction: str, settings: Sequence[SettingRuns]) -> Scale:
    names = {setting.name: str(getattr(setting, direction)) for setting in settings}
    order = sorted(set(names.values()))
    text = f"{len(order)} codecs" if len(order) > 1 else order[0]
    span = max(len(order) - 1, 1)
    return Scale(f"{direction}\n{text}", {name: order.index(codec) / span for name, codec in names.items()}, names)


def _position(value: float, low: float, high: float, log: bool) -> float:
    if high == low:
        return 0.5
    if log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


# --- importance of the parameters of a study for each objective ---------------------------------------------------------------


def importance_section(material: Material) -> Section:
    """Return a figure per study, with a panel per objective."""
    key, title = "importance", "Importance of parameters"
    if not len(material.results.trials):
        return Section(key, title, absent="It needs a study of `raysim sweep`; there is none here.")
    frame = importance(material.results)
    studies = frame[frame["importance"].notna()].groupby("study", sort=False)
    figures = [_importance_figure(i, str(study), rows) for i, (study, rows) in enumerate(studies, start=1)]
    return Section.of(key, title, figures, "It needs more finished trials of a study than there are here.")


def _importance_figure(number: int, study: str, rows: pd.DataFrame) -> Figure:
    panels = []
    for objective, of_objective in rows.groupby("objective", sort=False):
        ordered = of_objective.sort_values("importance", ascending=False)
        labels = [
            f"{row['parameter']}, over {row['trials']} trials{' that have it' if row['conditional'] else ''}"
            for row in ordered.to_dict("records")
        ]
        x, y, look = ordered["parameter"].tolist(), finite(ordered["importance"]), Style(COLOURS[0])
        bars = Series(str(objective), x, y, look, kind="bars", labels=labels)
        axes = Axis("parameter", ""), Axis("importance", "share of importance")
        panels.append(Panel(str(objective), *axes, [bars], height=280))
    return Figure(
        f"study{number}-importance",
        f"{study}: importance of settings",
        "A bar is the share of an objective's variance explained by a parameter in the searched range; it does not say in which "
        "direction. Shares add up to 1 over the parameters that all trials have; a parameter of some trials is judged over these. "
        "Hover over a bar for their number.",
        panels,
        legend=False,
    )
