"""Decisions of adaptive methods such as GraVAC, step by step."""

from __future__ import annotations

import pandas as pd

from raysim.analysis.report.blocks import Cell, Column, Section, Table
from raysim.analysis.report.figures import Axis, Figure, Panel, Series, Style, finite, joined, style, thinned
from raysim.analysis.report.material import Job, Material
from raysim.records import SCHEMAS

MOST_RUNS = 4  # with figures of their own; the table has all
MOST_LINES = 6  # places told apart in one; more layers are drawn alike
MOST_POINTS = 400

COLUMNS = (
    Column("run"),
    Column("place"),
    Column("method"),
    Column("decisions", number=True),
    Column("by branch"),
    Column("mean factor", number=True),
    Column("mean gain", number=True),
    Column("events"),
)


def section(material: Material) -> Section:
    """Return a figure for the first runs that decided anything, and a table of all."""
    blocks: list[Figure | Table] = []
    if "decisions" in SCHEMAS:
        for job in material.jobs:
            rows = material.results.select(job.runs["run"]).decisions
            if len(rows):
                rows = rows.assign(run=rows["run"].astype(str), place=_places(rows))
                figures = [
                    _figure(job, str(run), mine, number)
                    for number, (run, mine) in enumerate(rows.groupby("run", sort=False), start=1)
                    if number <= MOST_RUNS
                ]
                blocks += [*figures, _table(job, rows)]
    if not blocks:
        return Section(
            "decisions",
            "Decisions over time",
            absent="No run here used an adaptive method, such as GraVAC: nothing was decided.",
        )
    return Section("decisions", "Decisions over time", blocks)


def _places(rows: pd.DataFrame) -> list[str]:
    """Return where each decision was taken, in words."""
    words = []
    for row in rows[["where", "stage", "boundary", "layer", "replica"]].to_dict("records"):
        parts = [str(row["where"]).replace("_", " ")]
        parts += [f"{name} {row[name]}" for name in ("stage", "boundary", "replica") if not pd.isna(row[name])]
        parts += [str(row["layer"])] if not pd.isna(row["layer"]) else []
        words.append(", ".join(parts))
    return words


def _figure(job: Job, run: str, rows: pd.DataFrame, number: int) -> Figure:
    places = list(dict.fromkeys(rows["place"]))
    panels = [
        Panel(
            "Factor sent",
            Axis("step", "step"),
            Axis("factor", "factor sent", log=True),
            _lines(rows, places, "factor"),
        )
    ]
    text = (
        "The compression factor that the method chose for each step: of values where some of them are sent, else of bytes; "
        "1 is dense. Points mark events."
    )
    if rows["gain"].notna().any():  # methods that follow a budget of errors measure none
        panels.append(
            Panel("Gain", Axis("step", "step"), Axis("gain", "gain of the sent messages"), _lines(rows, places, "gain"))
        )
        text = f"Left: {text[0].lower()}{text[1:]} Right: the gain that it reached, the share of the squared norm that arrived."
    return Figure(
        f"{job.key}-decisions{number}",
        f"Decisions of {run}",
        text,
        panels,
    )


def _lines(rows: pd.DataFrame, places: list[str], column: str) -> list[Series]:
    series = []
    for number, place in enumerate(places[:MOST_LINES]):
        mine = rows[rows["place"] == place].sort_values("step")
        mine = mine.iloc[thinned(len(mine), MOST_POINTS)]
        labels = [
            ": ".join(str(part) for part in (row["branch"], row["reason"]) if not pd.isna(part) and str(part))
            for row in mine.to_dict("records")
        ]
        series.append(
            Series(place, mine["step"].tolist(), finite(mine[column]), style(number), kind="steps", labels=labels)
        )
    rest = rows[rows["place"].isin(places[MOST_LINES:])]
    if len(rest):
        lines = [
            (part["step"].tolist(), finite(part[column]), str(place))
            for place, part in rest.groupby("place", sort=False)
        ]
        x, y, labels = joined(lines)
        series.insert(0, Series("other places", x, y, Style(faint=True), kind="steps", labels=labels))
    known = rows[rows["event"].notna()]
    for number, (event, mine) in enumerate(known.groupby("event", sort=True, observed=True)):
        look = style(len(places) + number)._replace(faint=False, symbol=style(number + 2).symbol)
        labels = [f"{row['event']} at {row['place']}: {row['reason']}" for row in mine.to_dict("records")]
        series.append(Series(str(event), mine["step"].tolist(), finite(mine[column]), look, labels=labels))
    return series


def _table(job: Job, rows: pd.DataFrame) -> Table:
    cells = []
    for (run, place), mine in rows.groupby(["run", "place"], sort=False):
        branches = mine["branch"].value_counts(sort=True)
        events = mine["event"].dropna().value_counts()
        cells.append(
            [
                Cell(str(run)),
                Cell(str(place)),
                Cell(str(mine["method"].iloc[0]), code=True),
                Cell(f"{len(mine):,}", len(mine)),
                Cell(", ".join(f"{name} {count / len(mine):.0%}" for name, count in branches.items() if count)),
                Cell(f"{mine['factor'].mean():.3g}", float(mine["factor"].mean())),
                Cell("none")
                if mine["gain"].isna().all()
                else Cell(f"{mine['gain'].mean():.3f}", float(mine["gain"].mean())),
                Cell(", ".join(f"{count} {name}" for name, count in events.items() if count) or "none"),
            ]
        )
    return Table(f"{job.key}-decision-table", f"{job.title}: decisions by run and place", COLUMNS, cells, live=True)
