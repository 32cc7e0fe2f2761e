"""The importance of each parameter of a study for each of its objectives."""

from __future__ import annotations

import pandas as pd

from raysim.analysis.comparison.objectives import importance
from raysim.analysis.report.material import Material
from raysim.analysis.report.page import COLOURS, Axis, Figure, Panel, Section, Series, Style, finite


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
