"""Tables of claims tested on runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from raysim.analysis.comparison.samples import sample_sentence
from raysim.analysis.data.folders import over
from raysim.show.terminal import console, show_notes, write_line

if TYPE_CHECKING:
    import pandas as pd

    from raysim.analysis import Finding
    from raysim.analysis.report.reuse import Adoption


def show_findings(
    found: Sequence[Finding],
    problems: Iterable[str],
    home: Iterable[Adoption],
    transport: str,
    samples: pd.DataFrame,
    *,
    untested: bool,
) -> None:
    """Print the verdicts of runs on the papers' claims, with reasons, and the commands that would decide undecided ones.

    Claims without a comparison are counted in a line, or shown too if `untested`. Then come the rows of `sample_harms`, in
    `samples`, and the settings to take `home`, as lines for another training loop.
    """
    out = console()
    tested = [finding for finding in found if finding.tested]
    for finding in found if untested else tested:
        style = {"supported": "green", "contradicted": "red", "undecided": "yellow"}[finding.verdict]
        out.print(f"[{style}]{finding.verdict:<12}[/] [bold]{finding.claim.text}[/]", highlight=False, soft_wrap=True)
        claim = finding.claim
        source = f"{claim.source}; claim {claim.name!r}"
        quoted = f'"{claim.quote}": {source}' if claim.quote else source
        for line in (quoted, claim.reading, finding.context, finding.reason):
            if line:
                write_line(out, f"             {line}")
        if len(finding.comparisons) > 1:
            for comparison in finding.comparisons:
                lacking = f", {comparison.lacking}" if comparison.lacking and comparison.effects else ""
                write_line(out, f"             - {comparison}: {comparison.verdict}{lacking}")
        for i, command in enumerate(finding.commands):
            lead = "to decide:" if i == 0 else ""
            write_line(out, f"  {lead:<11}{command}")
        if finding.cost is not None:
            write_line(out, f"  {'at a cost of':<11} {finding.cost}")
        out.print()
    counts = {
        verdict: sum(finding.verdict == verdict for finding in tested)
        for verdict in ("supported", "contradicted", "undecided")
    }
    counts["not tested by these runs"] = len(found) - len(tested)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    if len(tested) < len(found) and not untested:
        summary += " (`--untested` lists them, with the runs to make)"
    priced = f" Steps are priced {over(transport)}." if found else ""
    out.print(f"{summary}.{f' {found[0].rule}' if found else ''}{priced}", highlight=False, soft_wrap=True)
    show_notes(out, problems)
    for row in samples.to_dict("records"):
        write_line(out, f"{row['setting']}: {sample_sentence(row)}")
    for setting in home:
        write_line(out, "\n" + setting.text.replace("`", ""))
        if setting.code:
            write_line(out, setting.code)


def findings_figures(
    found: Sequence[Finding], problems: Iterable[str], home: Iterable[Adoption], samples: pd.DataFrame
) -> dict[str, Any]:
    """Return the content of `show_findings`, for JSON: null for a missing effect or interval."""
    rows = []
    for finding in found:
        comparisons = [
            {name: getattr(c, name) for name in ("part", "text", "verdict")}
            | {
                "effect": c.effect if c.effects else None,
                "low": c.low if math.isfinite(c.low) else None,
                "high": c.high if math.isfinite(c.high) else None,
            }
            | {name: getattr(c, name) for name in ("unit", "side", "threshold", "confidence")}
            | {
                "effects_by_seed": c.effects,
                "judged_seeds": list(c.sample.seeds),
                "lacking": c.lacking,
                "runs": list(c.runs),
            }
            for c in finding.comparisons
        ]
        claim = finding.claim
        rows.append(
            {"claim": claim.name}
            | {name: getattr(claim, name) for name in ("text", "quote", "source", "reading")}
            | {name: getattr(finding, name) for name in ("context", "verdict", "reason")}
            | {
                "comparisons": comparisons,
                "runs": list(finding.runs),
                "commands": list(finding.commands),
                "cost": finding.cost._asdict() if finding.cost is not None else None,
            }
        )
    return {
        "findings": rows,
        "problems": list(problems),
        "samples": samples.astype(object).where(samples.notna(), None).to_dict("records"),
        "take_home": [setting._asdict() for setting in home],
    }
