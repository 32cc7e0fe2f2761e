"""Claims tested on runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from raysim.show.terminal import console, show_notes

if TYPE_CHECKING:
    from analysis import Finding


def show_findings(found: Sequence[Finding], problems: Iterable[str]) -> None:
    """Print what runs say of the papers' claims: the verdicts, why, and what to run where it is open."""
    out = console()
    for finding in found:
        style = {"supported": "green", "contradicted": "red", "undecided": "yellow"}[finding.verdict]
        out.print(f"[{style}]{finding.verdict:<12}[/] [bold]{finding.claim.text}[/]", highlight=False, soft_wrap=True)
        for line in (finding.context, finding.reason, f"{finding.claim.source}; claim {finding.claim.name!r}"):
            if line:
                out.print(f"             {line}", highlight=False, markup=False, soft_wrap=True)
        if len(finding.comparisons) > 1:
            for one in finding.comparisons:
                out.print(f"             - {one}: {one.verdict}", highlight=False, markup=False, soft_wrap=True)
        for place, command in enumerate(finding.commands):
            lead = "to decide:" if place == 0 else ""
            out.print(f"  {lead:<11}{command}", highlight=False, markup=False, soft_wrap=True)
        out.print()
    counts = {
        verdict: sum(one.verdict == verdict for one in found) for verdict in ("supported", "contradicted", "undecided")
    }
    confidence = f"{100 * found[0].confidence:g} %" if found else ""
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    out.print(
        f"{summary}. Intervals of {confidence} over seeds, paired (Student's t).", highlight=False, soft_wrap=True
    )
    show_notes(out, problems)


def findings_figures(found: Sequence[Finding], problems: Iterable[str]) -> dict[str, Any]:
    """Return all that `show_findings` prints, for JSON: null where there is no effect or no interval."""
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
                "runs": list(c.runs),
            }
            for c in one.comparisons
        ]
        rows.append(
            {
                "claim": one.claim.name,
                "text": one.claim.text,
                "source": one.claim.source,
                "context": one.context,
                "verdict": one.verdict,
                "reason": one.reason,
                "comparisons": comparisons,
                "runs": list(one.runs),
                "commands": list(one.commands),
            }
        )
    return {"findings": rows, "problems": list(problems)}
