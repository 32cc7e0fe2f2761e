"""Training over time: learning curves, and decisions of adaptive methods such as GraVAC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pandas as pd

from raysim.analysis.data.folders import over
from raysim.analysis.report.blocks import Block, Cell, Column, Section, Table
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

MOST_CURVE_POINTS = 120  # of a setting with a look of its own
MOST_FAINT_POINTS = 30  # of a line for comparison
MOST_RUNS = 4  # with figures of their decisions; the table has all runs
MOST_LINES = 6  # places with lines of their own; the other layers share one
MOST_DECISIONS = 400  # points of a line

Curve: TypeAlias = "pd.DataFrame"  # columns step, sent_bytes, value, sd: a setting's mean over seeds

DECISION_COLUMNS = (
    Column("run"),
    Column("place"),
    Column("method"),
    Column("decisions", number=True),
    Column("by branch"),
    Column("mean factor", number=True),
    Column("mean gain", number=True),
    Column("events"),
)


# --- learning curves against steps, bytes and simulated seconds ---------------------------------------------------------------


def curves_section(material: Material) -> Section:
    """Return a figure per job: evaluations with compression on and off, and the training loss."""
    figures = [_curves_figure(job, material) for job in material.jobs]
    return Section.of("curves", "Learning curves", figures, "No run here has recorded its steps yet.")


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
    rows = [
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
        for panel in _curve_panels(title, axis, _curves(job, frame, column), job, material)
    ]
    return Figure(
        f"{job.key}-curves",
        f"{job.title}: learning curves",
        "The same curves against steps, against bytes sent so far, and against seconds on the chosen network "
        f"{over(job.transport)} (steps times the simulated step time). Means over seeds. Black is dense; "
        "grey lines are settings without a colour of their own.",
        panels,
        columns=3,
    )


def _curves(job: Job, frame: pd.DataFrame, column: str) -> dict[str, Curve]:
    """Return each setting's curve, mean over its seeds at each step."""
    owners = {run: setting.name for setting in job.settings for run in setting.runs}
    grouped = frame.assign(setting=frame["run"].map(owners)).groupby(["setting", "step"])
    curves = grouped[["sent_bytes"]].mean().assign(value=grouped[column].mean(), sd=grouped[column].std())
    return {str(name): rows.reset_index("step") for name, rows in curves.groupby(level="setting", sort=False)}


def looks(job: Job) -> Mapping[str, Style]:
    """Return the style of each highlighted setting."""
    others = [setting for setting in job.named if setting is not job.dense]
    dense = {job.dense.name: DENSE} if job.dense is not None else {}
    return dense | {setting.name: style(i) for i, setting in enumerate(others)}


def _curve_panels(title: str, y: Axis, curves: Mapping[str, Curve], job: Job, material: Material) -> list[Panel]:
    def times(setting: SettingRuns, curve: Curve) -> Scaled:
        step_s = {network: setting.step_s[network].value for network in material.networks}
        return Scaled(finite(curve["step"]), step_s)

    axes: list[tuple[Axis, Callable[[SettingRuns, Curve], Any]]] = [
        (Axis("step", "steps"), lambda setting, curve: curve["step"].tolist()),
        (Axis("sent_bytes", "bytes sent", unit="B"), lambda setting, curve: finite(curve["sent_bytes"])),
        (Axis("simulated_s", "time, simulated", unit="s"), times),
    ]
    return [Panel(title, axis, y, _curve_series(job, curves, values, material), height=270) for axis, values in axes]


def _curve_series(
    job: Job, curves: Mapping[str, Curve], values: Callable[[SettingRuns, Curve], Any], material: Material
) -> list[Series]:
    """Return a line for each setting with a look, the first on top, and one series of all others."""
    chosen = looks(job)
    named, faint = [], []
    for setting in job.settings:
        curve = curves.get(setting.name)
        if curve is None:
            continue
        curve = curve.iloc[thinned(len(curve), MOST_CURVE_POINTS if setting.name in chosen else MOST_FAINT_POINTS)]
        try:
            x = values(setting, curve)
        except KeyError:  # it has no price, so no seconds
            continue
        y = finite(curve["value"])
        if setting.name in chosen:
            spread = finite(curve["sd"]) if len(curve) <= 20 else None
            named.append(Series(setting.name, x, y, chosen[setting.name], kind="line", errors=spread))
        else:
            faint.append((x, y, setting.name))
    order = list(chosen)
    named.sort(key=lambda series: -order.index(series.name))
    return ([_faint(faint, material)] if faint else []) + named


def _faint(curves: list[tuple[Any, list[float | None], str]], material: Material) -> Series:
    """Return the other settings' lines as one series."""
    x, y, labels = joined(((x.values if isinstance(x, Scaled) else x), y, name) for x, y, name in curves)
    positions: Any = x
    if any(isinstance(x, Scaled) for x, _, _ in curves):
        positions = ByNetwork.of(
            material.networks,
            lambda network: joined(
                ([None if v is None else v * x.factors[network] for v in x.values], y, "") for x, y, _ in curves
            )[0],
        )
    return Series("other settings", positions, y, Style(GREY, faint=True), kind="line", labels=labels)


# --- decisions of adaptive methods, step by step ------------------------------------------------------------------------------


def decisions_section(material: Material) -> Section:
    """Return a figure for the first runs with decisions, and a table of all."""
    blocks: list[Block] = []
    for job in material.jobs:
        rows = material.results.select(job.runs["run"]).decisions
        if len(rows):
            rows = rows.assign(run=rows["run"].astype(str), place=_places(rows))
            runs = list(rows.groupby("run", sort=False))[:MOST_RUNS]
            blocks += [_decisions_figure(job, str(run), of_run, i) for i, (run, of_run) in enumerate(runs, start=1)]
            blocks.append(_decisions_table(job, rows))
    without = "No run here used an adaptive method, such as GraVAC: nothing was decided."
    return Section.of("decisions", "Decisions over time", blocks, without)


def _places(rows: pd.DataFrame) -> list[str]:
    """Return the place of each decision in words."""
    places = []
    for row in rows[["where", "stage", "boundary", "layer", "replica"]].to_dict("records"):
        parts = [str(row["where"]).replace("_", " ")]
        parts += [f"{name} {row[name]}" for name in ("stage", "boundary", "replica") if not pd.isna(row[name])]
        parts += [str(row["layer"])] if not pd.isna(row["layer"]) else []
        places.append(", ".join(parts))
    return places


def _decisions_figure(job: Job, run: str, rows: pd.DataFrame, number: int) -> Figure:
    places = list(dict.fromkeys(rows["place"]))
    factor = Axis("factor", "factor sent", log=True)
    panels = [Panel("Factor sent", Axis("step", "step"), factor, _lines(rows, places, "factor"))]
    text = (
        "The compression factor chosen for each step, counted in values for sparse codecs, else in bytes; "
        "1 is dense. Points mark events."
    )
    if rows["gain"].notna().any():  # methods with a budget of errors measure none
        gain = Axis("gain", "gain of the sent messages")
        panels.append(Panel("Gain", Axis("step", "step"), gain, _lines(rows, places, "gain")))
        text = f"Left: {text[0].lower()}{text[1:]} Right: its gain, the share of the squared norm that arrived."
    return Figure(f"{job.key}-decisions{number}", f"Decisions of {run}", text, panels)


def _lines(rows: pd.DataFrame, places: list[str], column: str) -> list[Series]:
    series = []
    for i, place in enumerate(places[:MOST_LINES]):
        decisions = rows[rows["place"] == place].sort_values("step")
        decisions = decisions.iloc[thinned(len(decisions), MOST_DECISIONS)]
        labels = [
            ": ".join(str(part) for part in (row["branch"], row["reason"]) if not pd.isna(part) and str(part))
            for row in decisions.to_dict("records")
        ]
        series.append(
            Series(place, decisions["step"].tolist(), finite(decisions[column]), style(i), kind="steps", labels=labels)
        )
    rest = rows[rows["place"].isin(places[MOST_LINES:])]
    if len(rest):
        groups = rest.groupby("place", sort=False)
        x, y, labels = joined(
            (decisions["step"].tolist(), finite(decisions[column]), str(place)) for place, decisions in groups
        )
        series.insert(0, Series("other places", x, y, Style(faint=True), kind="steps", labels=labels))
    events = rows[rows["event"].notna()].groupby("event", sort=True, observed=True)
    for i, (event, decisions) in enumerate(events):
        look = style(len(places) + i)._replace(faint=False, symbol=style(i + 2).symbol)
        labels = [f"{row['event']} at {row['place']}: {row['reason']}" for row in decisions.to_dict("records")]
        series.append(Series(str(event), decisions["step"].tolist(), finite(decisions[column]), look, labels=labels))
    return series


def _decisions_table(job: Job, rows: pd.DataFrame) -> Table:
    cells = []
    for (run, place), decisions in rows.groupby(["run", "place"], sort=False):
        branches, events = decisions["branch"].value_counts(sort=True), decisions["event"].dropna().value_counts()
        factor, gain = float(decisions["factor"].mean()), float(decisions["gain"].mean())
        cells.append(
            [
                Cell(str(run)),
                Cell(str(place)),
                Cell(str(decisions["method"].iloc[0]), code=True),
                Cell(f"{len(decisions):,}", len(decisions)),
                Cell(", ".join(f"{name} {count / len(decisions):.0%}" for name, count in branches.items() if count)),
                Cell(f"{factor:.3g}", factor),
                Cell("none") if decisions["gain"].isna().all() else Cell(f"{gain:.3f}", gain),
                Cell(", ".join(f"{count} {name}" for name, count in events.items() if count) or "none"),
            ]
        )
    caption = f"The decisions of {job.title}, by run and place."
    return Table(f"{job.key}-decision-table", caption, DECISION_COLUMNS, cells, live=True)
