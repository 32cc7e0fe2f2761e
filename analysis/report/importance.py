"""Which parameters of a study mattered for which objective."""

from __future__ import annotations

import pandas as pd

from analysis.plots import COLOURS, Axis, Figure, Panel, Series, Style, finite
from analysis.report.blocks import Section
from analysis.report.material import Material

LEAST_TRIALS = 5  # of a study: from fewer, importance says nothing


def section(material: Material) -> Section:
    """Return a figure a study, a panel an objective."""
    from analysis import importance

    if not len(material.results.trials):
        return Section("importance", "Importance of parameters", absent="It needs a study of `raysim sweep`; there is none here.")
    frame = importance(material.results)
    figures = []
    for number, (study, rows) in enumerate(frame.groupby("study", sort=False), start=1) if len(frame) else ():
        if rows["trials"].min() >= LEAST_TRIALS:
            figures.append(_figure(number, str(study), rows))
    if not figures:
        return Section("importance", "Importance of parameters", absent=f"It needs {LEAST_TRIALS} finished trials or more of a study.")
    return Section("importance", "Importance of parameters", figures)


def _figure(number: int, study: str, rows: pd.DataFrame) -> Figure:
    panels = []
    for objective, mine in rows.groupby("objective", sort=False):
        ordered = mine.sort_values("importance", ascending=False)
        series = Series(str(objective), ordered["parameter"].tolist(), finite(ordered["importance"]), Style(COLOURS[0]), kind="bars")
        panels.append(Panel(str(objective), Axis("parameter", ""), Axis("importance", "share of importance"), [series], height=280))
    trials = int(rows["trials"].min())
    return Figure(
        f"study{number}-importance",
        f"{study}: what mattered",
        f"Shares add up to 1 for each objective, over {trials} trials. They say how much of an objective's variation a parameter explains in the "
        "range that was searched, not which way it goes.",
        panels,
        legend=False,
    )
