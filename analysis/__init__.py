"""Analysis of runs in pandas: their records, their prices on other networks, and the evidence on the papers' claims.

Imported lazily, so that `import analysis` brings in neither pandas nor numba.

>>> from analysis import replay
>>> replay("results/none", ["100mbps", "worldwide"])
Traceback (most recent call last):
analysis.data.errors.ReplayError: There is no run in results/none: it has no run.parquet.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analysis.claims import CLAIMS, Claim
    from analysis.claims.finding import Comparison, Finding, findings_frame
    from analysis.claims.verdicts import findings
    from analysis.comparison.choice import break_even, safe_set
    from analysis.comparison.importances import importance
    from analysis.comparison.pareto import frontier, natural_direction
    from analysis.comparison.targets import Target
    from analysis.data.errors import AnalysisError, ReplayError
    from analysis.data.loading import load
    from analysis.data.pack import Packed, pack
    from analysis.data.results import Results
    from analysis.pricing.company import beside, in_company
    from analysis.pricing.estimates import Estimate
    from analysis.pricing.replay import dense_partners, replay
    from analysis.pricing.step import Replay

_HOMES = {
    **dict.fromkeys(("break_even", "safe_set"), "analysis.comparison.choice"),
    **dict.fromkeys(("AnalysisError", "ReplayError"), "analysis.data.errors"),
    "load": "analysis.data.loading",
    **dict.fromkeys(("Packed", "pack"), "analysis.data.pack"),
    "Estimate": "analysis.pricing.estimates",
    "importance": "analysis.comparison.importances",
    **dict.fromkeys(("frontier", "natural_direction"), "analysis.comparison.pareto"),
    **dict.fromkeys(("beside", "in_company"), "analysis.pricing.company"),
    "Replay": "analysis.pricing.step",
    **dict.fromkeys(("dense_partners", "replay"), "analysis.pricing.replay"),
    "Results": "analysis.data.results",
    "Target": "analysis.comparison.targets",
    **dict.fromkeys(("CLAIMS", "Claim"), "analysis.claims"),
    **dict.fromkeys(("Comparison", "Finding", "findings_frame"), "analysis.claims.finding"),
    "findings": "analysis.claims.verdicts",
}

__all__ = [
    "CLAIMS",
    "AnalysisError",
    "Claim",
    "Comparison",
    "Estimate",
    "Finding",
    "Packed",
    "Replay",
    "ReplayError",
    "Results",
    "Target",
    "beside",
    "break_even",
    "dense_partners",
    "findings",
    "findings_frame",
    "frontier",
    "importance",
    "in_company",
    "load",
    "natural_direction",
    "pack",
    "replay",
    "safe_set",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Import a name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module 'analysis' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
