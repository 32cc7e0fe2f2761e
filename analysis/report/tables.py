"""Tables: all runs, candidates of a probe, and claims of papers tested on the runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pandas as pd

from raysim.analysis.claims.finding import Finding
from raysim.analysis.claims.train_commands import Cost
from raysim.analysis.claims.verdicts import findings
from raysim.analysis.data.folders import over
from raysim.analysis.report.frontier import priced
from raysim.analysis.report.material import Job, Material, SettingRuns
from raysim.analysis.report.page import Block, ByNetwork, Cell, Section, Table, Text, code, number
from raysim.analysis.report.words import bytes_of, measure_text, points, quality, seconds, step_time
from raysim.config.identity import is_missing

# --- all runs, to be sorted and filtered --------------------------------------------------------------------------------------


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


# --- claims of papers, tested on these runs -----------------------------------------------------------------------------------


MARKS = {"supported": "✓ supported", "contradicted": "✗ contradicted", "undecided": "? undecided"}


def findings_section(material: Material) -> Section:
    """Return a table of the claims that could be tested, and the commands for the others."""
    if not material.jobs:
        return Section("findings", "Findings", absent="No run here is finished, so no claim could be tested.")
    all_findings = findings(material.results)
    tested = [finding for finding in all_findings if finding.context]
    counts: Counter[str] = Counter(finding.verdict for finding in tested)
    words = ", ".join(f"{counts[verdict]} {verdict}" for verdict in MARKS if counts[verdict]) or "none fits these runs"
    blocks: list[Block] = [Text(f"Published claims on compressed training, tested on these runs: {words}.")]
    if tested:
        caption = f"The claims by job, each effect with its one-sided bounds over seeds. {tested[0].rule}"
        rows = [_finding_row(finding) for finding in tested]
        blocks.append(Table("finding-table", caption, rows, live=True, verdicts=True))
    commands = list(dict.fromkeys(command for finding in all_findings for command in finding.commands))
    if commands:
        blocks += [Text(f"To decide the others, run{_cost(all_findings)}:"), Text("\n".join(commands), "code")]
    return Section("findings", "Findings", blocks)


def _cost(all_findings: list[Finding]) -> str:
    """Return the cost of all commands in brackets; a run that two findings want counts twice."""
    costs = [finding.cost for finding in all_findings if finding.cost is not None]
    known = [cost.seconds for cost in costs if cost.seconds is not None]
    if not costs:
        return ""
    return f" ({Cost(sum(cost.runs for cost in costs), sum(known) if len(known) == len(costs) else None)} at most)"


def _finding_row(finding: Finding) -> list[Cell]:
    effect = "none"
    if finding.effect is not None:
        effect = f"{points(finding.effect)} {finding.unit}"
        if finding.low is not None and finding.high is not None:
            effect += f" ({points(finding.low)} to {points(finding.high)})"
    claim = finding.claim
    return [
        Cell("verdict", MARKS[finding.verdict], finding.verdict),
        Cell("claim", f"{claim.text} {f'“{claim.quote}”: ' if claim.quote else ''}{claim.source}", kind="long"),
        Cell("runs", finding.context, kind="long"),
        Cell("effect", effect, finding.effect, "long"),
        number("seeds", str(finding.seeds), finding.seeds),
        Cell("why", finding.reason, kind="long"),
    ]
