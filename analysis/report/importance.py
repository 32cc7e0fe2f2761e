"""Importance of the parameters of a study for each objective."""

from __future__ import annotations

import pandas as pd

from raysim.analysis.report.blocks import Section
from raysim.analysis.report.figures import COLOURS, Axis, Figure, Panel, Series, Style, finite
from raysim.analysis.report.material import Material


def section(material: Material) -> Section:
    """Return a figure a study, a panel an objective."""
    from raysim.analysis.comparison.importances import importance

    if not len(material.results.trials):
        return Section(
            "importance", "Importance of parameters", absent="It needs a study of `raysim sweep`; there is none here."
        )
    frame = importance(material.results)
    known = frame[frame["importance"].notna()]
    figures = [
        _figure(number, str(study), rows)
        for number, (study, rows) in enumerate(known.groupby("study", sort=False), start=1)
    ]
    if not figures:
        return Section(
            "importance",
            "Importance of parameters",
            absent="It needs more finished trials of a study than there are here.",
        )
    return Section("importance", "Importance of parameters", figures)


def _figure(number: int, study: str, rows: pd.DataFrame) -> Figure:
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
