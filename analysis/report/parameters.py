"""Settings of a run: all as lines through their quantities, and the importance of each parameter of a study."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from raysim.analysis.report.blocks import Section
from raysim.analysis.report.figures import COLOURS, Axis, ByNetwork, Figure, Panel, Series, Style, finite, joined
from raysim.analysis.report.frontier import grouped
from raysim.analysis.report.material import MODES, Job, Material, SettingRuns
from raysim.analysis.report.words import bytes_of, seconds

# --- parallel coordinates: each setting as a line through its codecs, bytes, seconds and quality ------------------------------


LEAST = 4  # settings: fewer are read in a table


class Scale(NamedTuple):
    """One upright axis: the value of each setting, as a place from 0 to 1 and in words."""

    text: str
    places: Mapping[str, float]
    words: Mapping[str, str]


def parallel_section(material: Material) -> Section:
    """Return a figure a job."""
    figures = [_parallel_figure(job, material) for job in material.jobs if len(job.priced) >= LEAST]
    if not figures:
        return Section(
            "parallel",
            "Parallel coordinates",
            absent=f"They need {LEAST} settings or more of a job, with profiled actions.",
        )
    return Section("parallel", "Parallel coordinates", figures)


def _parallel_figure(job: Job, material: Material) -> Figure:
    scales = {network: _scales(job, network) for network in material.networks}
    some = scales[material.network]
    series = []
    for name, (look, settings) in grouped(job.priced).items():
        lines = {
            network: joined(
                (
                    list(range(len(of))),
                    [scale.places.get(setting.name) for scale in of],
                    f"{setting.name}: "
                    + ", ".join(f"{s.text.splitlines()[0]} {s.words.get(setting.name, 'none')}" for s in of[2:]),
                )
                for setting in settings
            )
            for network, of in scales.items()
        }
        x, _, _ = lines[material.network]
        series.append(
            Series(
                name,
                x,
                ByNetwork({network: y for network, (_, y, _) in lines.items()}),
                look,
                kind="marked",
                labels=ByNetwork({network: labels for network, (_, _, labels) in lines.items()}),
            )
        )
    ticks = ByNetwork(
        {network: {scale.text: place for place, scale in enumerate(of)} for network, of in scales.items()}
    )
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
        "A line is a setting; each quantity runs from its lowest value (below) to its highest, on a logarithm for "
        "bytes and seconds. Codecs are ordered by "
        f"name. Switch kinds off above to follow the others; the table of runs has all {len(some)} quantities and more.",
        [panel],
        columns=1,
    )


def _scales(job: Job, network: str) -> list[Scale]:
    settings = job.priced
    found = [_names("forward", settings), _names("backward", settings)]
    numbers: Sequence[tuple[str, Mapping[str, float], bool]] = [
        ("bytes a step", {one.name: one.wire_bytes for one in settings}, True),
        ("step", {one.name: one.step_s[network].value for one in settings}, True),
        *(
            (f"{job.metric.text} {mode}", {one.name: one.quality[mode].mean for one in settings}, False)
            for mode in MODES
        ),
    ]
    for text, values, log in numbers:
        known = {name: value for name, value in values.items() if math.isfinite(value) and (value > 0 or not log)}
        if known:
            write = bytes_of if text.startswith("bytes") else seconds if text == "step" else job.metric.write
            low, high = min(known.values()), max(known.values())
            ends = f"{text}\n{write(low)} to {write(high)}"
            found.append(
                Scale(
                    ends,
                    {n: _place(v, low, high, log) for n, v in known.items()},
                    {n: write(v) for n, v in known.items()},
                )
            )
    return found


def _names(direction: str, settings: Sequence[SettingRuns]) -> Scale:
    order = sorted({getattr(one, direction) for one in settings})
    span = max(len(order) - 1, 1)
    return Scale(
        f"{direction}\n{len(order)} codecs" if len(order) > 1 else f"{direction}\n{order[0]}",
        {one.name: order.index(getattr(one, direction)) / span for one in settings},
        {one.name: getattr(one, direction) for one in settings},
    )


def _place(value: float, low: float, high: float, log: bool) -> float:
    if high == low:
        return 0.5
    if log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


# --- importance of the parameters of a study for each objective ---------------------------------------------------------------


def importance_section(material: Material) -> Section:
    """Return a figure a study, a panel an objective."""
    from raysim.analysis.comparison.importances import importance

    if not len(material.results.trials):
        return Section(
            "importance", "Importance of parameters", absent="It needs a study of `raysim sweep`; there is none here."
        )
    frame = importance(material.results)
    known = frame[frame["importance"].notna()]
    figures = [
        _importance_figure(number, str(study), rows)
        for number, (study, rows) in enumerate(known.groupby("study", sort=False), start=1)
    ]
    if not figures:
        return Section(
            "importance",
            "Importance of parameters",
            absent="It needs more finished trials of a study than there are here.",
        )
    return Section("importance", "Importance of parameters", figures)


def _importance_figure(number: int, study: str, rows: pd.DataFrame) -> Figure:
    panels = []
    for objective, mine in rows.groupby("objective", sort=False):
        ordered = mine.sort_values("importance", ascending=False)
        series = Series(
            str(objective),
            ordered["parameter"].tolist(),
            finite(ordered["importance"]),
            Style(COLOURS[0]),
            kind="bars",
            labels=_labels(ordered),
        )
        panels.append(
            Panel(
                str(objective), Axis("parameter", ""), Axis("importance", "share of importance"), [series], height=280
            )
        )
    return Figure(
        f"study{number}-importance",
        f"{study}: importance of settings",
        "The share of an objective's variation that a parameter explains in the range that was searched, not which "
        "way it goes. Shares add up to 1 over "
        "the parameters that all trials have; a parameter of some trials is judged over these. Point at a bar for their number.",
        panels,
        legend=False,
    )


def _labels(rows: pd.DataFrame) -> list[str]:
    """Return the number of trials behind each bar."""
    kinds = {True: " that have it", False: ""}
    return [
        f"{row['parameter']}, over {row['trials']} trials{kinds[bool(row['conditional'])]}"
        for row in rows.to_dict("records")
    ]
