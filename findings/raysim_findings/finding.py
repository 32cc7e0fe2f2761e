"""Findings: the verdict of recorded runs on a claim, and the comparisons behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import pandas as pd

from raysim.analysis.comparison.rule import LOOKS, PairedSample
from raysim.analysis.comparison.statistics import Side
from raysim.config.identity import Setting
from raysim_findings.claim import Claim
from raysim_findings.train_commands import Cost

Verdict: TypeAlias = Literal["supported", "contradicted", "undecided"]


@dataclass(frozen=True)
class Comparison:
    """The outcome of a contrast on recorded runs."""

    part: str
    """Of the claim."""
    text: str
    """The two sides of the comparison, in words."""
    effect: float
    """Mean over the seeds that count, in `unit`; not a number without any."""
    low: float
    """One-sided bound, as is `high`: each holds at `confidence`."""
    high: float
    unit: str
    side: Side
    """The side of `threshold` on which the claim puts the effect: "above" or "below"."""
    threshold: float
    confidence: float
    """Confidence of the claim over all interim analyses; that of the bounds is higher by the share of this one."""
    verdict: Verdict
    effects: dict[int, float]
    """By seed."""
    sample: PairedSample
    """The effects that count."""
    runs: tuple[str, ...]
    settings: tuple[Setting, ...]
    price: tuple[float, float] = (0.0, 0.0)
    """Distances from the effect down and up to the ends of the price's interval, mean over seeds. They are added to the bounds."""

    @property
    def seeds(self) -> int:
        """Number of seeds behind the verdict: those of a plan, or of the last interim analysis."""
        return len(self.sample.values)

    @property
    def lacking(self) -> str:
        """The reason for no verdict; empty if there is one."""
        return self.sample.lacking

    def __str__(self) -> str:
        if not self.effects:
            return f"{self.text}: not run"
        where = f"{self.low:.3g} to {self.high:.3g}" if math.isfinite(self.low) else "no interval"
        return f"{self.text}: {self.effect:.3g} {self.unit} ({where}, {self.seeds} seeds)"


@dataclass(frozen=True)
class Finding:
    """The verdict of comparable runs on a claim."""

    claim: Claim
    context: str
    """The common properties of the runs; empty if no run bears on the claim."""
    verdict: Verdict
    reason: str
    """A sentence."""
    comparisons: tuple[Comparison, ...]
    decisive: Comparison | None
    """The deciding comparison: one against the claim, an undecided one, or the closest; the mean for a pooled claim."""
    confidence: float
    commands: tuple[str, ...]
    """Shell commands that would decide the claim; none if it is decided, or would take too many seeds."""
    cost: Cost | None = None
    """Cost of the commands, estimated from recorded runs."""

    @property
    def tested(self) -> bool:
        """True if runs were compared."""
        return any(comparison.effects for comparison in self.comparisons)

    @property
    def rule(self) -> str:
        """The rule of the verdict, in words: as for settings, but the comparisons are the family and borrow no spread."""
        looks = ", ".join(map(str, LOOKS))
        return (
            f"A comparison decides if its one-sided bound over paired seeds lies beyond the threshold, at {self.confidence:.4g} over "
            "all looks: half of the error is spent on the seeds that a study fixed before it began, the rest at those of "
            f"{looks} seeds that follow. Upper bounds allow for skewness. Each claim is judged by itself; evidence against it is "
            "corrected for the number of its comparisons (Holm)."
        )

    @property
    def effect(self) -> float | None:
        """Mean of the decisive comparison, in `unit`; None if nothing was compared."""
        return self.decisive.effect if self.decisive and self.decisive.effects else None

    @property
    def low(self) -> float | None:
        """Lower end of its interval; None if there is none."""
        return self.decisive.low if self.decisive and math.isfinite(self.decisive.low) else None

    @property
    def high(self) -> float | None:
        """Upper end of its interval; None if there is none."""
        return self.decisive.high if self.decisive and math.isfinite(self.decisive.high) else None

    @property
    def unit(self) -> str:
        """Unit of the effect."""
        return self.decisive.unit if self.decisive else ""

    @property
    def side(self) -> Side | None:
        """Side of `threshold` on which the claim puts the effect."""
        return self.decisive.side if self.decisive else None

    @property
    def threshold(self) -> float | None:
        """Value with which the effect is compared, in `unit`."""
        return self.decisive.threshold if self.decisive else None

    @property
    def seeds(self) -> int:
        """Seeds of the decisive comparison."""
        return self.decisive.seeds if self.decisive else 0

    @property
    def runs(self) -> tuple[str, ...]:
        """The compared runs, by their names in `Results.runs`."""
        return tuple(dict.fromkeys(run for comparison in self.comparisons for run in comparison.runs))


def findings_frame(found: Iterable[Finding]) -> pd.DataFrame:
    """Return one row for each finding: claim, verdict, effect with its interval, and runs."""
    figures = ("effect", "low", "high", "unit", "side", "threshold", "confidence", "seeds")
    names = ("context", "verdict", *figures, "reason")
    rows: list[dict[str, Any]] = [
        {"claim": finding.claim.name, "text": finding.claim.text, "source": finding.claim.source}
        | {name: getattr(finding, name) for name in names}
        | {"runs": list(finding.runs), "commands": list(finding.commands)}
        for finding in found
    ]
    columns = ["claim", "text", "source", *names, "runs", "commands"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(("effect", "low", "high", "threshold"), "float64"))
