"""Analysis of runs in pandas: their records, their prices on other networks, and verdicts on settings.

Names are imported on first use, so that `from raysim import analysis` imports neither pandas nor numba.

>>> from raysim.analysis import replay
>>> replay("results/none", ["100mbps", "worldwide"])
Traceback (most recent call last):
raysim.analysis.data.ReplayError: There is no run in results/none: it has no run.parquet.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raysim.analysis.comparison.branches import branch_harms as branch_harms
    from raysim.analysis.comparison.carry import carry as carry
    from raysim.analysis.comparison.choice import settings as settings
    from raysim.analysis.comparison.objectives import frontier as frontier
    from raysim.analysis.comparison.objectives import importance as importance
    from raysim.analysis.comparison.race_plan import race_plan as race_plan
    from raysim.analysis.data import AnalysisError as AnalysisError
    from raysim.analysis.data import ReplayError as ReplayError
    from raysim.analysis.data.folders import natural_direction as natural_direction
    from raysim.analysis.runs.estimates import Estimate as Estimate
    from raysim.analysis.runs.loading import load as load
    from raysim.analysis.runs.pack import Packed as Packed
    from raysim.analysis.runs.pack import pack as pack
    from raysim.analysis.runs.prices import Target as Target
    from raysim.analysis.runs.prices import beside as beside
    from raysim.analysis.runs.prices import dense_partners as dense_partners
    from raysim.analysis.runs.prices import in_company as in_company
    from raysim.analysis.runs.prices import replay as replay
    from raysim.analysis.runs.results import Results as Results
    from raysim.analysis.runs.step import Replay as Replay

_MODULES = {
    "comparison.branches": ("branch_harms",),
    "comparison.carry": ("carry",),
    "comparison.choice": ("settings",),
    "comparison.objectives": ("frontier", "importance"),
    "comparison.race_plan": ("race_plan",),
    "data": ("AnalysisError", "ReplayError"),
    "data.folders": ("natural_direction",),
    "runs.estimates": ("Estimate",),
    "runs.loading": ("load",),
    "runs.pack": ("Packed", "pack"),
    "runs.prices": ("Target", "beside", "dense_partners", "in_company", "replay"),
    "runs.results": ("Results",),
    "runs.step": ("Replay",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Import a name on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"raysim.analysis.{_MODULE_OF[name]}"), name)
