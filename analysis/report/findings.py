"""The claims of papers, held against these runs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from analysis.report.blocks import Block, Cell, Column, Section, Table, Text
from analysis.report.material import Material
from analysis.report.words import points

if TYPE_CHECKING:
    from analysis import Finding

COLUMNS = (
    Column("claim", long=True),
    Column("verdict"),
    Column("effect", long=True),
    Column("seeds", number=True),
    Column("why", long=True),
    Column("runs"),
)
MARKS = {"supported": "✓ supported", "contradicted": "✗ contradicted", "undecided": "? undecided"}


def section(material: Material) -> Section:
    """Return a table of what could be tested, and of the rest what to run."""
    from analysis import findings

    found = findings(material.results) if material.jobs else []
    tested = [one for one in found if one.context]
    if not found:
        return Section("findings", "Findings", absent="No run here is finished, so no claim could be tested.")
    counts = Counter(one.verdict for one in tested)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in MARKS if counts[verdict]) or "none fits these runs"
    blocks: list[Block] = [Text(f"What papers say of compressed training, tested on these runs: {said}.")]
    if tested:
        blocks.append(
            Table(
                "finding-table",
                "Claims by job. The interval is that of the effect over seeds; a claim is undecided where it holds the threshold.",
                COLUMNS,
                [_row(one) for one in tested],
                live=True,
            )
        )
    commands = list(dict.fromkeys(command for one in found for command in one.commands))
    if commands:
        blocks += [Text("To decide the others, run:"), Text("\n".join(commands), "code")]
    return Section("findings", "Findings", blocks)


def _row(one: Finding) -> list[Cell]:
    effect = "none"
    if one.effect is not None:
        effect = f"{points(one.effect)} {one.unit}"
        if one.low is not None and one.high is not None:
            effect += f" ({points(one.low)} to {points(one.high)})"
    return [
        Cell(f"{one.claim.text} ({one.claim.source}) {one.context}"),
        Cell(MARKS[one.verdict], one.verdict),
        Cell(effect, one.effect if one.effect is not None else None),
        Cell(str(one.seeds), one.seeds),
        Cell(one.reason),
        Cell(f"{len(one.runs)}", len(one.runs)),
    ]
