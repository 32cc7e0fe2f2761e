"""Training over time: learning curves, decisions of adaptive methods such as GraVAC, and branches from a dense run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pandas as pd

from raysim.analysis.comparison.branches import ASSUMPTION, branch_harms
from raysim.analysis.data.folders import over
from raysim.analysis.report.material import Job, Material, SettingRuns
from raysim.analysis.report.page import (
    DENSE,
    GREY,
    Axis,
    Block,
    ByNetwork,
    Cell,
    Figure,
    Panel,
    Scaled,
    Section,
    Series,
    Style,
    Table,
    Text,
    code,
    finite,
    joined,
    number,
    on_network,
    quality_axis,
    style,
    thinned,
)
from raysim.analysis.runs.results import Results
from raysim.config.identity import is_missing

MOST_CURVE_POINTS = 120  # of a setting with its own style
MOST_FAINT_POINTS = 30  # of a line for comparison
MOST_RUNS = 4  # with figures of their decisions; the table has all runs
MOST_LINES = 6  # places with lines of their own; the other layers share one
MOST_DECISIONS = 400  # points of a line

Curve: TypeAlias = "pd.DataFrame"  # columns step, sent_bytes, value, sd: a setting's mean over seeds

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
    evals = runs.table("evals", ["step", "mode", "batchnorm", job.measure.name])
    evals["run"] = evals["run"].astype(str)
    evals = evals[evals["batchnorm"] == "running"]
    sent = steps[["run", "step", "sent_bytes"]].assign(step=steps["step"] + 1)  # evaluations count the steps done
    evals = evals.merge(sent, on=["run", "step"], how="left")
    rows = [
        (
            f"Evaluation, compression {mode}",
            quality_axis(job.measure, f"_{mode}"),
            evals[evals["mode"] == mode],
            job.measure.name,
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
    """Return a line for each setting with its own style, the first on top, and one series of all others."""
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
    def line(network: str) -> tuple[list[Any], list[Any], list[str]]:
        return joined((on_network(x, network), y, name) for x, y, name in curves)

    x, y, labels = line(material.network)
    scaled = isinstance(curves[0][0], Scaled)
    positions = ByNetwork.of(material.networks, lambda network: line(network)[0]) if scaled else x
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
    places = []
    for row in rows[["where", "stage", "boundary", "layer", "replica"]].to_dict("records"):
        parts = [str(row["where"]).replace("_", " ")]
        parts += [f"{name} {row[name]}" for name in ("stage", "boundary", "replica") if not pd.isna(row[name])]
        parts += [str(row["layer"])] if not pd.isna(row["layer"]) else []
        places.append(", ".join(parts))
    return places


def _decisions_figure(job: Job, run: str, rows: pd.DataFrame, i: int) -> Figure:
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
    return Figure(f"{job.key}-decisions{i}", f"Decisions of {run}", text, panels)


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
                Cell("run", str(run)),
                Cell("place", str(place)),
                code("method", str(decisions["method"].iloc[0])),
                number("decisions", f"{len(decisions):,}", len(decisions)),
                Cell("by branch", ", ".join(f"{name} {n / len(decisions):.0%}" for name, n in branches.items() if n)),
                number("mean factor", f"{factor:.3g}", factor),
                number("mean gain", "none") if math.isnan(gain) else number("mean gain", f"{gain:.3f}", gain),
                Cell("events", ", ".join(f"{count} {name}" for name, count in events.items() if count) or "none"),
            ]
        )
    caption = f"The decisions of {job.title}, by run and place."
    return Table(f"{job.key}-decision-table", caption, cells, live=True)


# --- branches: the harm of compressing each part of training, and from which step on a setting is safe --------------------


def has_branches(results: Results) -> bool:
    """Return whether runs branch from another one at several steps; the other tables cover a single step."""
    if "parent" not in results.runs:
        return False
    starts = results.runs[results.runs["parent"].notna()].groupby("parent")["first_step"].nunique()
    return bool((starts > 1).any())


def branches_section(material: Material) -> Section:
    """Return a table for each dense run from which others branch: settings by point, with a sentence on where each is safe."""
    key, title = "branches", "Where in training compression harms"
    harms, blocks = branch_harms(material.results), list[Block]()
    for i, (job, rows) in enumerate(harms.groupby("job", sort=False), start=1):
        blocks.append(
            Text(" ".join(safe_from(of_setting) for _, of_setting in rows.groupby("setting", sort=False)), "lead")
        )
        unit, within = rows["unit"].iloc[0], rows["within"].iloc[0]
        caption = f"{job}: harm in {unit}, with a margin of {within:g}"
        blocks.append(Table(f"branches{i}", caption, [branch_cells(row) for row in rows.to_dict("records")]))
    blocks.append(Text(ASSUMPTION, "note"))
    return Section.of(key, title, blocks, "No branch has a dense one beside it.")


def branch_cells(row: Mapping[Any, Any]) -> list[Cell]:
    """Return the cells of a row of `branch_harms`."""
    cells = [
        code("setting", row["setting"]),
        number("compressed steps", f"{row['first_step']:,} to {row['end_step']:,}"),
        number("seeds", str(row["seeds"])),
    ]
    for prefix, column in (("", "harm"), ("rest_", "harm to the end")):
        why = row[f"{prefix}lacking"]
        cells += [
            number(column, f"{row[f'{prefix}harm']:+.2f}"),
            number("at most", f"{row[f'{prefix}harm_high']:+.2f}"),
            Cell("verdict", f"{row[f'{prefix}verdict']}{f' ({why})' if why else ''}"),
        ]
    return cells


def safe_from(rows: pd.DataFrame) -> str:
    """Return a sentence on the step from which on a setting is safe, and where it harms most; `rows` of `branch_harms`."""
    setting, start, planned = rows["setting"].iloc[0], rows["safe_from"].iloc[0], int(rows["planned_steps"].iloc[0])
    harmed = rows[rows["harm"] > 0].sort_values("harm")
    where = ""
    if len(harmed):
        worst = harmed.iloc[-1]
        where = f" It harms most in steps {worst['first_step']:,} to {worst['end_step']:,} ({worst['harm']:+.2f} {worst['unit']})."
    if is_missing(start):
        return f"`{setting}` is not shown to be safe from any of these steps on.{where}"
    if start == 0:
        return f"`{setting}` is safe for all {planned:,} steps.{where}"
    return f"`{setting}` is safe from step {start:,} of {planned:,} on: `compress_from={start}`.{where}"
