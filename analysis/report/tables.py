"""Tables: all runs, candidates of a probe, and claims of papers tested on the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pandas as pd

from raysim.analysis.claims.finding import Finding
from raysim.analysis.claims.train_commands import Cost
from raysim.analysis.claims.verdicts import findings
from raysim.analysis.data.probe_candidates import LIMIT, cost_words, smaller_runs
from raysim.analysis.data.studies import over
from raysim.analysis.report.blocks import Block, Cell, Column, Section, Table, Text
from raysim.analysis.report.figures import ByNetwork
from raysim.analysis.report.frontier import priced
from raysim.analysis.report.material import Job, Material, SettingRuns
from raysim.analysis.report.words import bytes_of, points, seconds, speedup, step_time

# --- all runs, to be sorted and filtered --------------------------------------------------------------------------------------


RUN_COLUMNS = (
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


def runs_section(material: Material) -> Section:
    """Return one table for each job, and one for the runs that are not over."""
    tables = [_runs_table(job, material) for job in material.jobs]
    shown = {str(run) for job in (*material.jobs, *material.probes) for run in job.runs["run"]}
    rows = material.results.runs
    rest = rows[~rows["run"].astype(str).isin(shown)] if len(rows) else rows
    if len(rest):
        tables.append(_unfinished(rest))
    if not tables:
        return Section("runs", "Runs", absent="There is no run here, other than candidates of a probe.")
    return Section("runs", "Runs", tables)


def _runs_table(job: Job, material: Material) -> Table:
    owners = {run: setting for setting in job.settings for run in setting.runs}
    return Table(
        f"{job.key}-runs",
        f"{job.title}: on and off are the {job.metric.text} of the last evaluation with compression on and off; the "
        f"simulated step is on the chosen network {over(job.transport)}, mean of the setting's seeds with its 90 % interval "
        f"(compute: {job.source}); front says in which mode no other setting is both faster and better there.",
        RUN_COLUMNS,
        [_run_row(job, owners[str(row["run"])], row, material) for row in job.runs.to_dict("records")],
        live=True,
    )


def _run_row(job: Job, setting: SettingRuns, row: dict[Any, Any], material: Material) -> list[Cell]:
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
        _plain_cell(row.get("seed")),
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
            _plain_cell(row.get("status")),
            Cell(str(row["setting"]), code=True),
            _plain_cell(row.get("error")),
        ]
        for row in rows.to_dict("records")
    ]
    return Table("open-runs", "Runs that are not finished: they are in no figure.", columns, cells, live=True)


def _number(value: Any) -> float:
    return float("nan") if value is None or pd.isna(value) else float(value)


def _plain_cell(value: Any) -> Cell:
    return Cell("none") if value is None or pd.isna(value) else Cell(str(value), value)


# --- candidates of a probe: their bytes, errors and prices, and the training that would judge them ----------------------------


CANDIDATE_COLUMNS = (
    Column("candidate"),
    Column("bytes a step", number=True),
    Column("factor", number=True),
    Column("fidelity, activations", number=True),
    Column("fidelity, gradients", number=True),
    Column("fidelity of the average", number=True),
    Column("step", number=True),
    Column("speed-up", number=True),
)
DIRECTIONS = ("forward", "backward", "replica_gradient")


def probes_section(material: Material) -> Section:
    """Return a table of the candidates of every probe, and the commands that train them at a smaller size."""
    return Section("probes", "Probe", [block for job in material.probes for block in _probe_blocks(job, material)])


def _probe_blocks(job: Job, material: Material) -> Iterator[Block]:
    rows = job.runs.to_dict("records")
    if job.priced:
        yield Text(ByNetwork({network: _probe_lead(job, network) for network in material.networks}), "lead")
    yield Text(f"{job.title}: {cost_words(rows[0])} {job.compute}")
    links = material.results.select(job.runs["run"]).table("links", ["direction", "fidelity"])
    yield Table(
        f"{job.key}-candidates",
        f"{job.title}: candidates, their errors as fidelity (1 where messages arrive exactly, 0 where they arrive as zeros), and "
        f"steps and speed-ups on the chosen network {over(job.transport)} with their 90 % intervals. Compute: {job.source}.",
        CANDIDATE_COLUMNS,
        [_candidate_row(setting, links) for setting in job.settings],
        live=True,
    )
    yield Text(LIMIT)
    runs = {str(row["run"]): row for row in rows}
    yield Text("\n".join(smaller_runs(runs[setting.runs[0]] for setting in job.settings)), "code")


def _probe_lead(job: Job, network: str) -> str:
    faster = [one for one in job.priced if one.speedup and one.speedup[network].low > 1]
    best = max(faster, key=lambda one: one.speedup[network].value, default=None)
    limit = "A probe does not say whether training stays sound under it."
    if best is None:
        dense = f", which takes {seconds(job.dense.step_s[network].value)} a step" if job.dense is not None else ""
        return f"On {network} {over(job.transport)}, no candidate of the probe is faster than dense{dense}."
    value, low, high = best.speedup[network]
    return (
        f"On {network} {over(job.transport)}, the fastest candidate of the probe is `{best.name}`: {value:.2f} times as fast as "
        f"dense ({low:.2f} to {high:.2f}). {limit}"
    )


def _candidate_row(setting: SettingRuns, links: pd.DataFrame) -> list[Cell]:
    mine = links[links["run"].isin(setting.runs)]
    means = mine.groupby("direction", observed=True)["fidelity"].mean()
    errors = [float(means.get(direction, float("nan"))) for direction in DIRECTIONS]
    return [
        Cell(setting.name, code=True),
        Cell(bytes_of(setting.wire_bytes), setting.wire_bytes),
        Cell(f"{setting.factor:.2f}", setting.factor),
        *(Cell("none" if pd.isna(value) else f"{value:.4f}", value) for value in errors),
        priced(setting, step_time, setting.step_s),
        priced(setting, speedup, setting.speedup),
    ]


# --- claims of papers, tested on these runs -----------------------------------------------------------------------------------


FINDING_COLUMNS = (
    Column("verdict"),
    Column("claim", long=True),
    Column("runs", long=True),
    Column("effect", long=True),
    Column("seeds", number=True),
    Column("why", long=True),
)
MARKS = {"supported": "✓ supported", "contradicted": "✗ contradicted", "undecided": "? undecided"}


def findings_section(material: Material) -> Section:
    """Return a table of the claims that could be tested, and the commands for the others."""
    found = findings(material.results)
    tested = [one for one in found if one.context]
    if not material.jobs:
        return Section("findings", "Findings", absent="No run here is finished, so no claim could be tested.")
    counts: Counter[str] = Counter(one.verdict for one in tested)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in MARKS if counts[verdict]) or "none fits these runs"
    blocks: list[Block] = [Text(f"Claims of papers on compressed training, tested on these runs: {said}.")]
    if tested:
        blocks.append(
            Table(
                "finding-table",
                f"Claims by job, each effect with its one-sided bounds over seeds. {tested[0].rule}",
                FINDING_COLUMNS,
                [_finding_row(one) for one in tested],
                live=True,
                verdict=0,
            )
        )
    commands = list(dict.fromkeys(command for one in found for command in one.commands))
    if commands:
        blocks += [Text(f"To decide the others, run{_cost(found)}:"), Text("\n".join(commands), "code")]
    return Section("findings", "Findings", blocks)


def _cost(found: list[Finding]) -> str:
    """Return the cost of all that the findings would have run, in brackets; a run that two of them want counts twice."""
    costs = [one.cost for one in found if one.cost is not None]
    known = [cost.seconds for cost in costs if cost.seconds is not None]
    if not costs:
        return ""
    return f" ({Cost(sum(cost.runs for cost in costs), sum(known) if len(known) == len(costs) else None)} at most)"


def _finding_row(one: Finding) -> list[Cell]:
    effect = "none"
    if one.effect is not None:
        effect = f"{points(one.effect)} {one.unit}"
        if one.low is not None and one.high is not None:
            effect += f" ({points(one.low)} to {points(one.high)})"
    return [
        Cell(MARKS[one.verdict], one.verdict),
        Cell(f"{one.claim.text} {f'“{one.claim.quote}”: ' if one.claim.quote else ''}{one.claim.source}"),
        Cell(one.context),
        Cell(effect, one.effect),
        Cell(str(one.seeds), one.seeds),
        Cell(one.reason),
    ]
