"""The tables of the findings' index: the studies, the claims with their verdicts, and how often bounds hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from findings_tables import with_reference
from raysim_findings.finding import Finding
from raysim_findings.table import CLAIMS

from raysim.analysis import Results
from raysim.analysis.comparison.statistics import bounds
from raysim.config.identity import Setting


def studies_table(pages: Mapping[str, Results], titles: Mapping[str, str]) -> str:
    """Return a row for each study: its model and data, its runs, and the quality of its models without compression."""
    lines = ["| study | model and data | runs | hours | without compression |", "|---|---|---|---|---|"]
    for name, results in pages.items():
        runs = results.runs
        jobs = " and ".join(
            dict.fromkeys(f"`{model}` on `{data}`" for model, data in zip(runs["model"], runs["data"], strict=True))
        )
        dense = {}
        for context in with_reference(results):
            quality = context.quality.name
            dense.setdefault(quality, []).append(context.settings[Setting()][f"{quality}_on"].mean())
        reached = ", ".join(f"{quality} {_range(values)}" for quality, values in dense.items())
        lines.append(
            f"| [{titles[name]}]({name}.md) | {jobs} | {len(runs)} | {runs['seconds'].sum() / 3600:.1f} | {reached} |"
        )
    return "\n".join(lines)


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def claims_table(findings_of: Mapping[str, Sequence[Finding]]) -> str:
    """Return a row for each claim, with the studies that support it, contradict it, or leave it undecided."""
    verdicts = ("supported", "contradicted", "undecided")
    lines = [f"| claim | {' | '.join(verdicts)} | source |", "|---" * 5 + "|"]
    for claim in CLAIMS:
        complete: dict[str, dict[str, bool]] = {verdict: {} for verdict in verdicts}
        for name, findings in findings_of.items():
            for finding in findings:
                if finding.claim is claim:
                    verdict = finding.verdict
                    whole = verdict != "undecided" or all(comparison.effects for comparison in finding.comparisons)
                    complete[verdict][name] = complete[verdict].get(name, True) and whole
        if any(complete.values()):
            cells = " | ".join(
                ", ".join(f"[{name}]({name}.md){'' if whole else ' (not all run)'}" for name, whole in studies.items())
                for studies in complete.values()
            )
            source = claim.source.replace("|", "\\|")
            lines.append(f"| {claim.text} | {cells} | {source} |")
    return "\n".join(lines)


def deviations(results: Results) -> list[float]:
    """Return the harms of all seeds minus their setting's mean, in standard deviations of that setting.

    Exact settings, with harms differing by less than an evaluation can show, are left out.
    """
    scaled: list[float] = []
    for context in with_reference(results):
        dense = context.settings[Setting()]
        for setting, runs in context.settings.items():
            seeds = dense.index.intersection(runs.index)
            if setting != Setting() and len(seeds) >= 5:
                harms = np.array([context.harm(runs.loc[seed], "on", dense.loc[seed], "on") for seed in seeds])
                spread = harms.std(ddof=1)
                scaled += list((harms - harms.mean()) / spread) if spread > context.step else []
    return scaled


def coverage(spread: list[float], draws: int = 20_000) -> tuple[float, float]:
    """Return how often the lower and the upper 95 % bound of five values, drawn from a spread with mean 0, contain 0."""
    drawn = np.random.default_rng(0).choice(spread, (draws, 5))
    intervals = [bounds(values, 0.95) for values in drawn]
    return float(np.mean([interval.low < 0 for interval in intervals])), float(
        np.mean([interval.high > 0 for interval in intervals])
    )


def coverage_table(pages: Mapping[str, Results]) -> str:
    """Return how often bounds hold on the spreads of each study, and of all."""
    by_study = {f"[{name}]({name}.md)": deviations(results) for name, results in pages.items()}
    spreads = {name: spread for name, spread in by_study.items() if spread}  # none of a study of fewer than five seeds
    spreads["all"] = [value for spread in spreads.values() for value in spread]
    lines = ["| spreads of | lower bound | upper bound |", "|---|---|---|"]
    for name, spread in spreads.items():
        low, high = coverage(spread)
        lines.append(f"| {name} | {100 * low:.1f} % | {100 * high:.1f} % |")
    return "\n".join(lines)
