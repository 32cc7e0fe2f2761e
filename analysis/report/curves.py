"""Learning curves against steps, bytes and simulated seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd

from raysim.analysis.data.studies import over
from raysim.analysis.report.blocks import Section
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

MOST_POINTS = 120  # of a line
MOST_FAINT_POINTS = 30  # of one that is only there for comparison

Curve = pd.DataFrame  # columns step, sent_bytes, value, sd: a setting's mean over seeds


def section(material: Material) -> Section:
    """Return a figure a job: evaluations with compression on and off, and the training loss."""
    figures = [_figure(job, material) for job in material.jobs]
    if not figures:
        return Section("curves", "Learning curves", absent="No run here has recorded its steps yet.")
    return Section("curves", "Learning curves", figures)


def _figure(job: Job, material: Material) -> Figure:
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
        keep = thinned(len(curve), MOST_POINTS if setting.name in chosen else MOST_FAINT_POINTS)
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
