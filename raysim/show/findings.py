"""Claims tested on runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from raysim.analysis.data.studies import over
from raysim.show.terminal import console, show_notes

if TYPE_CHECKING:
    from raysim.analysis import Finding
    from raysim.analysis.report.reuse import Adoption


def show_findings(found: Sequence[Finding], problems: Iterable[str], home: Iterable[Adoption], transport: str) -> None:
    """Print the verdicts of runs on the papers' claims, with reasons, and the commands that would decide undecided ones.

    The settings to take `home` come last, as lines for another training loop.
    """
    out = console()
    for finding in found:
        style = {"supported": "green", "contradicted": "red", "undecided": "yellow"}[finding.verdict]
        out.print(f"[{style}]{finding.verdict:<12}[/] [bold]{finding.claim.text}[/]", highlight=False, soft_wrap=True)
        claim = finding.claim
        source = f"{claim.source}; claim {claim.name!r}"
        quoted = f'"{claim.quote}": {source}' if claim.quote else source
        for line in (quoted, claim.reading, finding.context, finding.reason):
            if line:
                out.print(f"             {line}", highlight=False, markup=False, soft_wrap=True)
        if len(finding.comparisons) > 1:
            for one in finding.comparisons:
                said = f"{one.verdict}, {one.lacking}" if one.lacking and one.effects else one.verdict
                out.print(f"             - {one}: {said}", highlight=False, markup=False, soft_wrap=True)
        for place, command in enumerate(finding.commands):
            lead = "to decide:" if place == 0 else ""
            out.print(f"  {lead:<11}{command}", highlight=False, markup=False, soft_wrap=True)
        if finding.cost is not None:
            out.print(f"  {'at a cost of':<11} {finding.cost}", highlight=False, markup=False, soft_wrap=True)
        out.print()
    counts = {
        verdict: sum(one.verdict == verdict for one in found) for verdict in ("supported", "contradicted", "undecided")
    }
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    priced = f" Steps are priced {over(transport)}." if found else ""
    out.print(f"{summary}.{f' {found[0].rule}' if found else ''}{priced}", highlight=False, soft_wrap=True)
    show_notes(out, problems)
    for setting in home:
        out.print("\n" + setting.text.replace("`", ""), highlight=False, markup=False, soft_wrap=True)
        if setting.code:
            out.print(setting.code, highlight=False, markup=False, soft_wrap=True)


def findings_figures(found: Sequence[Finding], problems: Iterable[str], home: Iterable[Adoption]) -> dict[str, Any]:
    """Return the content of `show_findings`, for JSON: null where there is no effect or no interval."""
    rows = []
    for one in found:
        comparisons = [
            {
                "part": c.part,
                "text": c.text,
                "verdict": c.verdict,
                "effect": c.effect if c.effects else None,
                "low": c.low if math.isfinite(c.low) else None,
                "high": c.high if math.isfinite(c.high) else None,
                "unit": c.unit,
                "side": c.side,
                "threshold": c.threshold,
                "confidence": c.confidence,
                "effects_by_seed": c.effects,
                "judged_seeds": list(c.sample.seeds),
                "lacking": c.lacking,
                "runs": list(c.runs),
            }
            for c in one.comparisons
        ]
        rows.append(
            {
                "claim": one.claim.name,
                "text": one.claim.text,
                "quote": one.claim.quote,
                "source": one.claim.source,
                "reading": one.claim.reading,
                "context": one.context,
                "verdict": one.verdict,
                "reason": one.reason,
                "comparisons": comparisons,
                "runs": list(one.runs),
                "commands": list(one.commands),
                "cost": one.cost._asdict() if one.cost is not None else None,
            }
        )
    return {"findings": rows, "problems": list(problems), "take_home": [one._asdict() for one in home]}
