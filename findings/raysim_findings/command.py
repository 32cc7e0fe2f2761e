"""The command `raysim findings`, registered as an entry point `raysim.commands`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.exits import fail
from raysim.cli.options import JsonFile, StudyTransport, Trust, check_runs, parse_networks, write_json
from raysim.cli.recorded import Folder

if TYPE_CHECKING:
    from raysim_findings.finding import Comparison, Finding

command = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


@command.command("findings")
def findings(
    folder: Folder,
    quality: Annotated[
        str,
        typer.Option(help="A measure of the runs, such as accuracy or loss; auto: the one that each run is judged by."),
    ] = "auto",
    margin: Annotated[
        float | None,
        typer.Option(help="Harm that counts as none (default: half a point of accuracy or R2, or 1 % of the loss)."),
    ] = None,
    confidence: Annotated[float, typer.Option(help="Of the intervals over seeds.")] = 0.95,
    network: Annotated[
        str | None,
        typer.Option(
            help="Where step times are compared (default: a study's own, the first of its `step_s@` objectives; else 1gbps)."
        ),
    ] = None,
    transport: StudyTransport = None,
    untested: Annotated[
        bool, typer.Option("--untested", help="Also list the claims on which no run bears, with the runs to make.")
    ] = False,
    json_file: JsonFile = None,
    trust: Trust = None,
) -> None:
    """Test the papers' claims on your runs: supported, contradicted or undecided, with the runs that would decide an undecided one.

    For example: raysim findings results
    """
    if network is not None:
        parse_networks([network])
    check_runs(folder, "no folder there has a run.parquet")
    from raysim.analysis import load
    from raysim_findings.verdicts import findings as test_claims

    results = load(folder)
    if results.runs.empty:
        fail(" ".join(results.problems), 2)
    verdicts = test_claims(
        results, quality=quality, margin=margin, confidence=confidence, network=network, transport=transport
    )
    priced = results.pricing_of(results.runs, transport=transport)["transport"]
    show_findings(verdicts, results.problems, priced, untested=untested)
    write_json(findings_figures(verdicts, results.problems), json_file)


STYLES = {"supported": "green", "contradicted": "red", "undecided": "yellow"}


def show_findings(findings: Sequence[Finding], problems: Sequence[str], transport: str, *, untested: bool) -> None:
    """Print the verdicts on the papers' claims, with reasons and the commands that would decide undecided ones.

    Claims without a comparison are counted in a line, or listed if `untested`.
    """
    from rich.text import Text

    from raysim.analysis.data.folders import over
    from raysim.cli.terminal import console, show_notes, write_line

    out = console()
    tested = [finding for finding in findings if finding.tested]
    for finding in findings if untested else tested:
        claim, style = finding.claim, STYLES[finding.verdict]
        out.print(Text.assemble((f"{finding.verdict:<12}", style), " ", (claim.text, "bold")), soft_wrap=True)
        source = f"{claim.source}; claim {claim.name!r}"
        quoted = f'"{claim.quote}": {source}' if claim.quote else source
        lines = list(filter(None, (quoted, claim.reading, finding.context, finding.reason)))
        for comparison in finding.comparisons if len(finding.comparisons) > 1 else ():
            lacking = f", {comparison.lacking}" if comparison.lacking and comparison.effects else ""
            lines.append(f"- {comparison}: {comparison.verdict}{lacking}")
        for line in lines:
            write_line(out, f"             {line}")
        for i, command in enumerate(finding.commands):
            write_line(out, f"  {'' if i else 'to decide:':<11}{command}")
        if finding.cost is not None:
            write_line(out, f"  at a cost of {finding.cost}")
        out.print()
    counts = {verdict: sum(finding.verdict == verdict for finding in tested) for verdict in STYLES}
    counts["not tested by these runs"] = len(findings) - len(tested)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    if len(tested) < len(findings) and not untested:
        summary += " (`--untested` lists them, with the runs to make)"
    rule = f" {findings[0].rule} Steps are priced {over(transport)}." if findings else ""
    write_line(out, f"{summary}.{rule}")
    show_notes(out, problems)


def findings_figures(findings: Sequence[Finding], problems: Sequence[str]) -> dict[str, Any]:
    """Return the content of `show_findings`, for JSON."""
    rows = []
    for finding in findings:
        claim = finding.claim
        row: dict[str, Any] = {"claim": claim.name}
        row |= {name: getattr(claim, name) for name in ("text", "quote", "source", "reading")}
        row |= {name: getattr(finding, name) for name in ("context", "verdict", "reason")}
        row["comparisons"] = [_comparison_figures(comparison) for comparison in finding.comparisons]
        row |= {"runs": list(finding.runs), "commands": list(finding.commands)}
        row["cost"] = finding.cost._asdict() if finding.cost is not None else None
        rows.append(row)
    return {"findings": rows, "problems": list(problems)}


def _comparison_figures(comparison: Comparison) -> dict[str, Any]:
    names = ("part", "text", "verdict", "unit", "side", "threshold", "confidence", "lacking")
    figures = {name: getattr(comparison, name) for name in names}
    figures["effect"] = comparison.effect if comparison.effects else None
    figures |= {"low": comparison.low, "high": comparison.high}
    seeds = {"effects_by_seed": comparison.effects, "judged_seeds": list(comparison.sample.seeds)}
    return figures | seeds | {"runs": list(comparison.runs)}
