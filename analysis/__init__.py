"""What runs have to say, in pandas: what they would take on networks that one does not have.

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
    from analysis.pricing import Replay, ReplayError, Target, replay

_HOMES = dict.fromkeys(("Replay", "ReplayError", "Target", "replay"), "analysis.pricing")

__all__ = ["Replay", "ReplayError", "Target", "replay"]


def __getattr__(name: str) -> object:
    """Import what is asked for, and only then."""
    if name not in _HOMES:
        raise AttributeError(f"module 'analysis' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
