"""Training over time: learning curves, and decisions of adaptive methods such as GraVAC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from raysim.analysis.data.studies import over
from raysim.analysis.report.blocks import Cell, Column, Section, Table
from raysim.analysis.report.figures import (
    DENSE,
    GREY,
    Axis,
    ByNetwork,
    Figure,
    Panel,
    Scaled,
    Series,
    Style,
    finite,
    joined,
    style,
    thinned,
)
from raysim.analysis.report.material import Job, Material, SettingRuns
from raysim.records import SCHEMAS

# --- learning curves against steps, bytes and simulated seconds ---------------------------------------------------------------


MOST_CURVE_POINTS = 120  # of a line
MOST_FAINT_POINTS = 30  # of one that is only there for comparison

Curve = pd.DataFrame  # columns step, sent_bytes, value, sd: a setting's mean over seeds


def curves_section(material: Material) -> Section:
    """Return a figure a job: evaluations with compression on and off, and the training loss."""
    figures = [_curves_figure(job, material) for job in material.jobs]
    if not figures:
        return Section("curves", "Learning curves", absent="No run here has recorded its steps yet.")
    return Section("curves", "Learning curves", figures)


def _curves_figure(job: Job, material: Material) -> Figure:
    runs = material.results.select(job.runs["run"])
    steps = runs.table("steps", ["step", "loss", "wire_bytes"])
    steps["run"] = steps["run"].astype(str)
    steps = steps.sort_values(["run", "step"])
    steps["wire_bytes"] = steps["wire_bytes"].fillna(0)
    steps["sent_bytes"] = steps.groupby("run")["wire_bytes"].cumsum().astype("int64")
    evals = runs.table("evals", ["step", "mode", "batchnorm", job.metric.name])
    evals["run"] = evals["run"].astype(str)
    evals = evals[evals["batchnorm"] == "running"]
    sent = steps[["run", "step", "sent_bytes"]].assign(step=steps["step"] + 1)  # evaluations count the steps done
    evals = evals.merge(sent, on=["run", "step"], how="left")
    rows: list[tuple[str, Axis, pd.DataFrame, str]] = [
        (
            f"Evaluation, compression {mode}",
            Axis(f"{job.metric.name}_{mode}", job.metric.text, unit=job.metric.unit),
            evals[evals["mode"] == mode],
            job.metric.name,
        )
        for mode in ("on", "off")
    ]
    rows.append(("Training loss", Axis("train_loss", "training loss"), steps, "loss"))
    panels = [
        panel
        for title, axis, frame, column in rows
        if len(frame)
        for panel in _row(title, axis, _curves(job, frame, column), job, material)
    ]
    return Figure(
        f"{job.key}-curves",
        f"{job.title}: learning curves",
        "The same curves against steps, bytes sent so far, and seconds on the chosen network "
        f"{over(job.transport)} (steps times its simulated step). Means over seeds; "
        "grey lines are the settings that have no look of their own, black is dense.",
        panels,
        columns=3,
    )


def _curves(job: Job, frame: pd.DataFrame, column: str) -> dict[str, Curve]:
    """Return each setting's curve, mean over its seeds at each step."""
    owners = {run: setting.name for setting in job.settings for run in setting.runs}
    whole = frame.assign(setting=frame["run"].map(owners)).groupby(["setting", "step"])
    curves = whole[["sent_bytes"]].mean().assign(value=whole[column].mean(), sd=whole[column].std())
    return {str(name): rows.reset_index("step") for name, rows in curves.groupby(level="setting", sort=False)}


def looks(job: Job) -> Mapping[str, Style]:
    """Return the look of each setting that has one of its own."""
    others = [setting for setting in job.named if setting is not job.dense]
    found = {setting.name: style(place) for place, setting in enumerate(others)}
    return ({job.dense.name: DENSE} if job.dense is not None else {}) | found


def _row(title: str, y: Axis, curves: Mapping[str, Curve], job: Job, material: Material) -> list[Panel]:
    chosen = looks(job)
    axes: list[tuple[Axis, Callable[[SettingRuns, Curve], Any]]] = [
        (Axis("step", "steps"), lambda setting, curve: curve["step"].tolist()),
        (Axis("sent_bytes", "bytes sent", unit="B"), lambda setting, curve: finite(curve["sent_bytes"])),
        (Axis("simulated_s", "time, simulated", unit="s"), lambda setting, curve: _times(setting, curve, material)),
    ]
    return [Panel(title, axis, y, _series(job, curves, chosen, place, material), height=270) for axis, place in axes]


def _times(setting: SettingRuns, curve: Curve, material: Material) -> Scaled:
    return Scaled(finite(curve["step"]), {network: setting.step_s[network].value for network in material.networks})


def _series(
    job: Job,
    curves: Mapping[str, Curve],
    chosen: Mapping[str, Style],
    place: Callable[[SettingRuns, Curve], Any],
    material: Material,
) -> list[Series]:
    named, faint = [], []
    for setting in job.settings:
        curve = curves.get(setting.name)
        if curve is None:
            continue
        try:
            x = place(setting, curve)
        except KeyError:  # it has no price: no place on the axis of seconds
            continue
        keep = thinned(len(curve), MOST_CURVE_POINTS if setting.name in chosen else MOST_FAINT_POINTS)
        curve = curve.iloc[keep]
        x = place(setting, curve)
        if setting.name in chosen:
            spread = finite(curve["sd"]) if len(curve) <= 20 else None
            named.append(
                Series(setting.name, x, finite(curve["value"]), chosen[setting.name], kind="line", errors=spread)
            )
        else:
            faint.append((x, finite(curve["value"]), setting.name))
    order = list(chosen)
    named.sort(key=lambda series: -order.index(series.name))  # the first ones lie on top
    return ([_faint(faint, material)] if faint else []) + named


def _faint(curves: list[tuple[Any, list[float | None], str]], material: Material) -> Series:
    """Return the other settings' lines as one series."""
    x, y, labels = joined(((x.values if isinstance(x, Scaled) else x), y, name) for x, y, name in curves)
    places: Any = x
    if any(isinstance(x, Scaled) for x, _, _ in curves):
        places = ByNetwork(
            {
                network: joined(
                    ([None if v is None else v * s.factors[network] for v in s.values], y, "") for s, y, _ in curves
                )[0]
                for network in material.networks
            }
        )
    return Series("other settings", places, y, Style(GREY, faint=True), kind="line", labels=labels)


# --- decisions of adaptive methods, step by step ------------------------------------------------------------------------------


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


def decisions_section(material: Material) -> Section:
    """Return a figure for the first runs that decided anything, and a table of all."""
    blocks: list[Figure | Table] = []
    if "decisions" in SCHEMAS:
        for job in material.jobs:
            rows = material.results.select(job.runs["run"]).decisions
            if len(rows):
                rows = rows.assign(run=rows["run"].astype(str), place=_places(rows))
                figures = [
                    _decisions_figure(job, str(run), mine, number)
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


def _decisions_figure(job: Job, run: str, rows: pd.DataFrame, number: int) -> Figure:
    places = list(dict.fromkeys(rows["place"]))
    panels = [
        Panel(
            "Factor sent", Axis("step", "step"), Axis("factor", "factor sent", log=True), _lines(rows, places, "factor")
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
    return Figure(f"{job.key}-decisions{number}", f"Decisions of {run}", text, panels)


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
