"""The table of all runs that were found, which the reader can sort and filter."""

from __future__ import annotations

from typing import Any

import pandas as pd

from raysim.analysis.data.studies import over
from raysim.analysis.report.blocks import Cell, Column, Section, Table
from raysim.analysis.report.figures import ByNetwork
from raysim.analysis.report.material import Job, Material, SettingRuns
from raysim.analysis.report.words import bytes_of, seconds, step_time

COLUMNS = (
    Column("run"),
    Column("forward"),
    Column("backward"),
    Column("seed", number=True),
    Column("status"),
    Column("steps", number=True),
    Column("bytes a step", number=True),
    Column("factor", number=True),
    Column("on", number=True),
    Column("off", number=True),
    Column("train loss", number=True),
    Column("step, simulated", number=True),
    Column("recorded", number=True),
    Column("front"),
)


def section(material: Material) -> Section:
    """Return one table for each job, and one for the runs that are not over."""
    tables = [_table(job, material) for job in material.jobs]
    shown = {str(run) for job in (*material.jobs, *material.probes) for run in job.runs["run"]}
    rows = material.results.runs
    rest = rows[~rows["run"].astype(str).isin(shown)] if len(rows) else rows
    if len(rest):
        tables.append(_unfinished(rest))
    if not tables:
        return Section("runs", "Runs", absent="There is no run here, other than candidates of a probe.")
    return Section("runs", "Runs", tables)


def _table(job: Job, material: Material) -> Table:
    owners = {run: setting for setting in job.settings for run in setting.runs}
    return Table(
        f"{job.key}-runs",
        f"{job.title}: on and off are the {job.metric.text} of the last evaluation with compression on and off; the "
        f"simulated step is on the chosen network {over(job.transport)}, mean of the setting's seeds with its 90 % interval "
        f"(compute: {job.source}); front says in which mode no other setting is both faster and better there.",
        COLUMNS,
        [_row(job, owners[str(row["run"])], row, material) for row in job.runs.to_dict("records")],
        live=True,
    )


def _row(job: Job, setting: SettingRuns, row: dict[Any, Any], material: Material) -> list[Cell]:
    done = max(1.0, _number(row.get("steps_done")))  # in this order, 1 where it is missing
    wire, dense = _number(row.get("wire_bytes")), _number(row.get("dense_bytes"))
    on, off = (_number(row.get(f"final_{job.metric.name}_{mode}")) for mode in ("on", "off"))
    loss, took = _number(row.get("final_train_loss")), _number(row.get("seconds"))
    step = Cell("not priced")
    front = Cell("")
    if setting.step_s:
        times = {network: setting.step_s[network].value for network in material.networks}
        step = Cell(
            ByNetwork({network: step_time(estimate) for network, estimate in setting.step_s.items()}), ByNetwork(times)
        )
        front = Cell(
            ByNetwork(
                {
                    network: " ".join(mode for mode, members in job.fronts[network].items() if setting in members)
                    for network in material.networks
                }
            )
        )
    return [
        Cell(str(row["run"])),
        Cell(setting.forward, code=True),
        Cell(setting.backward, code=True),
        _plain(row.get("seed")),
        Cell(str(row["status"])),
        Cell(f"{done:,.0f}", done),
        Cell(bytes_of(wire / done), wire / done),
        Cell(f"{dense / wire:.2f}" if wire > 0 else "none", dense / wire if wire > 0 else None),
        Cell(job.metric.write(on), on),
        Cell(job.metric.write(off), off),
        Cell("none" if pd.isna(loss) else f"{loss:.3f}", loss),
        step,
        Cell(seconds(took), took),
        front,
    ]


def _unfinished(rows: pd.DataFrame) -> Table:
    columns = (Column("run"), Column("status"), Column("setting"), Column("error"))
    cells = [
        [
            Cell(str(row["run"])),
            _plain(row.get("status")),
            Cell(str(row["setting"]), code=True),
            _plain(row.get("error")),
        ]
        for row in rows.to_dict("records")
    ]
    return Table("open-runs", "Runs that are not finished: they are in no figure.", columns, cells, live=True)


def _number(value: Any) -> float:
    return float("nan") if value is None or pd.isna(value) else float(value)


def _plain(value: Any) -> Cell:
    return Cell("none") if value is None or pd.isna(value) else Cell(str(value), value)
