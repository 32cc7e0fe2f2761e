"""What runs have to say, in pandas: what they recorded, would take on other networks, and prove of the papers' claims.

Imported lazily, so that `import analysis` brings in neither pandas nor numba.

>>> from analysis import replay
>>> replay("results/none", ["100mbps", "worldwide"])
Traceback (most recent call last):
analysis.pricing.ReplayError: There is no run in results/none: it has no run.parquet.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from analysis.folders import AnalysisError
    from analysis.pareto import frontier, natural_direction
    from analysis.pricing import Replay, ReplayError, Target, replay
    from analysis.results import Results, load

_HOMES = {
    "AnalysisError": "analysis.folders",
    **dict.fromkeys(("frontier", "natural_direction"), "analysis.pareto"),
    **dict.fromkeys(("Replay", "ReplayError", "Target", "replay"), "analysis.pricing"),
    **dict.fromkeys(("Results", "load"), "analysis.results"),
}

__all__ = [
    "AnalysisError",
    "Replay",
    "ReplayError",
    "Results",
    "Target",
    "frontier",
    "load",
    "natural_direction",
    "replay",
]


def __getattr__(name: str) -> object:
    """Import what is asked for, and only then."""
    if name not in _HOMES:
        raise AttributeError(f"module 'analysis' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
