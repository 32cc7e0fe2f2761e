"""The tables of all runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from raysim.analysis.data.folders import over
from raysim.analysis.report.frontier import priced
from raysim.analysis.report.material import Job, Material, SettingRuns
from raysim.analysis.report.page import ByNetwork, Cell, Section, Table, code, number
from raysim.analysis.report.words import bytes_of, measure_text, quality, seconds, step_time
from raysim.config.identity import is_missing


def runs_section(material: Material) -> Section:
    """Return one table for each job, and one for unfinished runs."""
    tables = [_runs_table(job, material) for job in material.jobs]
    shown = {str(run) for job in (*material.jobs, *material.probes) for run in job.runs["run"]}
    rows = material.results.runs
    rest = rows[~rows["run"].astype(str).isin(shown)] if len(rows) else rows
    if len(rest):
        tables.append(_unfinished(rest))
    return Section.of("runs", "Runs", tables, "There is no run here, other than candidates of a probe.")


def _runs_table(job: Job, material: Material) -> Table:
    owners = {run: setting for setting in job.settings for run in setting.runs}
    return Table(
        f"{job.key}-runs",
        f"The runs of {job.title}. On and off: {measure_text(job.measure)} of the last evaluation with compression on and off. "
        f"Simulated step: step time on the chosen network {over(job.transport)}, mean of the setting's seeds with its 90 % "
        f"interval (compute: {job.source}). Front: the modes in which no other setting is both faster and better there.",
        [_run_row(job, owners[str(row["run"])], row, material) for row in job.runs.to_dict("records")],
        live=True,
    )


def _run_row(job: Job, setting: SettingRuns, row: dict[Any, Any], material: Material) -> list[Cell]:
    done = max(1.0, _number(row.get("steps_done")))  # a missing value (NaN) gives 1, in this order only
    wire, dense = _number(row.get("wire_bytes")), _number(row.get("dense_bytes"))
    on, off = (_number(row.get(f"final_{job.measure.name}_{mode}")) for mode in ("on", "off"))
    loss, took = _number(row.get("final_train_loss")), _number(row.get("seconds"))
    front = ByNetwork.of(
        material.networks,
        lambda network: " ".join(mode for mode, members in job.fronts[network].items() if setting in members),
    )
    return [
        Cell("run", str(row["run"])),
        code("forward", setting.forward),
        code("backward", setting.backward),
        _recorded("seed", row)._replace(kind="number"),
        Cell("status", str(row["status"])),
        number("steps", f"{done:,.0f}", done),
        number("bytes a step", bytes_of(wire / done), wire / done),
        number("factor", f"{dense / wire:.2f}" if wire > 0 else "none", dense / wire if wire > 0 else None),
        number("on", quality(job.measure, on), on),
        number("off", quality(job.measure, off), off),
        number("train loss", "none" if math.isnan(loss) else f"{loss:.3f}", loss),
        priced("step, simulated", setting, step_time, setting.step_s),
        number("recorded", seconds(took), took),
        Cell("front", front if setting.step_s else ""),
    ]


def _unfinished(rows: pd.DataFrame) -> Table:
    cells = [
        [
            Cell("run", str(row["run"])),
            _recorded("status", row),
            code("setting", str(row["setting"])),
            _recorded("error", row),
        ]
        for row in rows.to_dict("records")
    ]
    return Table("open-runs", "These runs are not finished, and are in no figure.", cells, live=True)


def _number(value: Any) -> float:
    return math.nan if is_missing(value) else float(value)


def _recorded(column: str, row: Mapping[Any, Any]) -> Cell:
    value = row.get(column)
    return Cell(column, "none") if is_missing(value) else Cell(column, str(value), value)
