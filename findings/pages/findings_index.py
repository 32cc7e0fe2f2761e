"""The index of the findings: the claims with their verdicts by kind of model, and how often bounds hold."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from findings_evidence import ABOUT
from findings_tables import with_reference
from raysim_findings.finding import Finding
from raysim_findings.table import CLAIMS

from raysim.analysis import Results
from raysim.analysis.comparison.statistics import bounds
from raysim.config.identity import Setting

MODELS = {
    "cnn": "CNN",
    "gpt": "GPT",
    "llama": "Llama",
    "gpt2": "GPT",
    "lstm": "LSTM",
    "resnet18": "ResNet-18",
    "vgg16": "VGG-16",
    "MiniLM": "MiniLM",
    "SmolLM2": "SmolLM2",
}
ORIGINS = ("from scratch", "fine-tuned", "trained elsewhere")


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.2g}" if parameters < 1e8 else f"{parameters / 1e6:.0f}"


def claims_table(findings_of: Mapping[str, Sequence[Finding]]) -> str:
    """Return a row for each claim, with its verdicts by study and origin of the model."""
    lines = [f"| claim | source | {' | '.join(ORIGINS)} |", "|---" * (2 + len(ORIGINS)) + "|"]
    for claim in CLAIMS:
        cells: dict[str, dict[str, list[str]]] = {origin: {} for origin in ORIGINS}
        for study, findings in findings_of.items():
            about = ABOUT["studies"][study]
            link = f"[{MODELS[about['model']]} {_millions(about['parameters'])}M]({study}.md)"
            for verdict in dict.fromkeys(finding.verdict for finding in findings if finding.claim is claim):
                cells[about["origin"]].setdefault(verdict, []).append(link)
        if any(cells.values()):
            row = [
                "; ".join(f"{verdict}: {', '.join(links)}" for verdict, links in verdicts.items())
                for verdicts in cells.values()
            ]
            paper = re.search(r"\d{4}\.\d{5}", claim.source)
            source = (
                f"{'raysim, on ' if claim.source.startswith('raysim') else ''}arXiv:{paper[0]}"
                if paper
                else claim.source
            )
            lines.append(f"| {claim.text} | {source} | {' | '.join(row)} |")
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


def coverage_sentence(studies: Mapping[str, Results]) -> str:
    """Return how often bounds hold on the spreads of all studies."""
    low, high = coverage([value for results in studies.values() for value in deviations(results)])
    return f"Lower bounds held in {100 * low:.1f} % of draws, upper bounds in {100 * high:.1f} %."
