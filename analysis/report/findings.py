"""The claims of papers, held against these runs."""

from __future__ import annotations

from collections import Counter

from raysim.analysis.claims.finding import Finding
from raysim.analysis.claims.train_commands import Cost
from raysim.analysis.claims.verdicts import findings
from raysim.analysis.report.blocks import Block, Cell, Column, Section, Table, Text
from raysim.analysis.report.material import Material
from raysim.analysis.report.words import points

COLUMNS = (
    Column("verdict"),
    Column("claim", long=True),
    Column("runs", long=True),
    Column("effect", long=True),
    Column("seeds", number=True),
    Column("why", long=True),
)
MARKS = {"supported": "✓ supported", "contradicted": "✗ contradicted", "undecided": "? undecided"}


def section(material: Material) -> Section:
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
                COLUMNS,
                [_row(one) for one in tested],
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


def _row(one: Finding) -> list[Cell]:
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
