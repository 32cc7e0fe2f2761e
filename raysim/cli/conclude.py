"""Commands on recorded runs and studies: findings, report and pack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raysim.cli.exits import fail
from raysim.cli.options import (
    Compute,
    ComputeProfile,
    JsonFile,
    Networks,
    StudyTransport,
    Trust,
    check_runs,
    check_writable,
    parse_networks,
    write_json,
)
from raysim.cli.terminal import echo

if TYPE_CHECKING:
    import pandas as pd

    from raysim.analysis import Finding
    from raysim.analysis.claims.finding import Comparison
    from raysim.analysis.report.reuse import Adoption

ReportOut = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="The page; with --format md a folder (default: report.html or report, in DIR or, for a bucket, here).",
    ),
]
Folder = Annotated[
    str, typer.Argument(metavar="DIR", help="A folder, or a bucket's URI, with runs or studies at any depth.")
]


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
            help="Where step times are compared, and for which a setting is recommended (default: a study's own, the first of its "
            "`step_s@` objectives; else 1gbps)."
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
    given = parse_networks([network]) if network is not None else []
    check_runs(folder, "no folder there has a run.parquet")
    from raysim.analysis import findings as test_claims
    from raysim.analysis import load, sample_harms
    from raysim.analysis.report.reuse import adoptions

    results = load(folder)
    if results.runs.empty:
        fail(" ".join(results.problems), 2)
    verdicts = test_claims(
        results, quality=quality, margin=margin, confidence=confidence, network=network, transport=transport
    )
    problems = list(results.problems)  # recommendations name runs without a price themselves
    study = results.runs["study"].dropna()
    (chosen,) = given or parse_networks([results.network_of(study)])
    recommendations = adoptions(results, chosen, transport)
    samples = sample_harms(results)
    priced = transport or results.transport_of(study)
    show_findings(verdicts, problems, recommendations, priced, samples, untested=untested)
    if json_file is not None:
        write_json(findings_figures(verdicts, problems, recommendations, samples), json_file)


STYLES = {"supported": "green", "contradicted": "red", "undecided": "yellow"}


def show_findings(
    findings: Sequence[Finding],
    problems: Sequence[str],
    recommendations: Sequence[Adoption],
    transport: str,
    samples: pd.DataFrame,
    *,
    untested: bool,
) -> None:
    """Print the verdicts on the papers' claims, with reasons and the commands that would decide undecided ones.

    Claims without a comparison are counted in a line, or listed if `untested`. The rows of `sample_harms` in `samples` follow,
    then the recommended settings, as lines for another training loop.
    """
    from rich.text import Text

    from raysim.analysis.comparison.samples import sample_sentence
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
    for row in samples.to_dict("records"):
        write_line(out, f"{row['setting']}: {sample_sentence(row)}")
    for recommendation in recommendations:
        write_line(out, "\n" + recommendation.text.replace("`", ""))
        if recommendation.code:
            write_line(out, recommendation.code)


def findings_figures(
    findings: Sequence[Finding],
    problems: Sequence[str],
    recommendations: Sequence[Adoption],
    samples: pd.DataFrame,
) -> dict[str, Any]:
    """Return the content of `show_findings`, for JSON: null for a missing effect or interval."""
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
    return {
        "findings": rows,
        "problems": list(problems),
        "samples": samples.astype(object).where(samples.notna(), None).to_dict("records"),
        "take_home": [recommendation._asdict() for recommendation in recommendations],
    }


def _comparison_figures(comparison: Comparison) -> dict[str, Any]:
    names = ("part", "text", "verdict", "unit", "side", "threshold", "confidence", "lacking")
    figures = {name: getattr(comparison, name) for name in names}
    figures["effect"] = comparison.effect if comparison.effects else None
    for name in ("low", "high"):
        bound = getattr(comparison, name)
        figures[name] = bound if math.isfinite(bound) else None
    seeds = {"effects_by_seed": comparison.effects, "judged_seeds": list(comparison.sample.seeds)}
    return figures | seeds | {"runs": list(comparison.runs)}


def report(
    folder: Annotated[
        str,
        typer.Argument(metavar="DIR", help="A run, a study, or a folder of either at any depth; or a bucket's URI."),
    ],
    out: ReportOut = None,
    form: Annotated[
        str, typer.Option("--format", help="html: one page. md: Markdown, PNG figures, and their data as CSV.")
    ] = "html",
    network: Networks = None,
    only: Annotated[
        bool, typer.Option("--only", help="Leave out the presets that stand beside the networks given.")
    ] = False,
    profile: ComputeProfile = None,
    compute: Compute = "auto",
    transport: StudyTransport = None,
    trust: Trust = None,
) -> None:
    """Write the report of runs and studies: one page that needs nothing but a browser.

    Given networks come before the presets in the page's menu.
    For example: raysim report results -o report.html
    """
    for option, value, known in (("--format", form, ("html", "md")), ("--compute", compute, ("auto", "cpu", "wall"))):
        if value not in known:
            fail(f"`{option}` must be {' or '.join(known)}, but got {value!r}.", 2)
    if only and not network:
        fail("`--only` must go with one `--network` or more.", 2)
    given = parse_networks(network) if network else []
    own = [repr(each) for each in given]
    check_runs(folder, "no folder there has a run.parquet")
    target = _report_target(folder, out, form)
    from raysim.analysis.report import NETWORKS, compose, write_report
    from raysim.cli.terminal import console

    unlike = next((repr(each) for each in given if given[own.index(repr(each))] != each), None)
    if unlike is not None:
        fail(f"`--network`: two networks are called {unlike}. Give one of them another `name`, or its file another.", 2)
    networks = [*given, *(() if only else (preset for preset in NETWORKS if preset not in own))] if given else None
    with console().status(f"reading {folder}"):
        first = own[0] if own else None
        page = compose(folder, networks, first=first, compute=compute, profile=profile, transport=transport)
        write_report(page, target, form)
    for problem in page.problems:
        echo(f"- {problem}")
    echo(f"Report of {page.subtitle[:-1]}: {target if form == 'html' else target / 'report.md'}")
    for sentence in page.decisions(own or [page.network]):
        echo(sentence)


def _report_target(folder: str, out: Path | None, form: str) -> Path:
    """Return the page or folder to write; fails if it cannot be written."""
    from raysim.storage.places import in_bucket, local_path

    parent = Path() if in_bucket(folder) else local_path(folder)
    target = out or parent / ("report.html" if form == "html" else "report")
    if out is None and target.is_symlink():
        fail(f"{target} is a link, which the report would follow: give `--out`.", 2)
    if form == "html":
        check_writable("--out", target)
    elif target.exists() and not target.is_dir():
        fail(f"`--out` must be a folder with --format md, but {target} is a file.", 2)
    return target


def pack(
    folder: Folder,
    target: Annotated[str, typer.Argument(metavar="PACK", help="Folder to write, new or empty.")],
) -> None:
    """Pack the finished and diverged runs of a folder into one file per table, to send, commit, or read quickly from a bucket.

    Reports, findings and replays read a pack as they read the folder. Checkpoints and logs stay behind.

    For example: raysim pack results/study study-packed
    """
    check_runs(folder, "no folder there has a run.parquet")
    from raysim.analysis import pack as write_pack
    from raysim.cli.terminal import counted

    packed = write_pack(folder, target)
    for problem in packed.problems:
        echo(f"- {problem}")
    studies = f" and {packed.studies} {'study' if packed.studies == 1 else 'studies'}" if packed.studies else ""
    left = f" Runs that are not over were left out: {packed.left_out}." if packed.left_out else ""
    echo(f"{target} holds {counted(packed.runs, 'run')}{studies}, in {packed.size / 1e6:.2f} MB.{left}")
