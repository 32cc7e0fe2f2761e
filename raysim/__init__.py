"""raysim: which compression of pipeline-parallel training is safe for a model, and how much faster it is on a network.

>>> import raysim
>>> raysim.parse("ErrorFeedback(TopK(0.1))")
ErrorFeedback(TopK(0.1))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raysim.compressors import parse
    from raysim.config import ConfigError, RunConfig, read_config
    from raysim.pipeline.checkpoint import load_weights
    from raysim.pipeline.training import train
    from raysim.records import Run

_HOMES = {
    "ConfigError": "raysim.config",
    "Run": "raysim.records",
    "RunConfig": "raysim.config",
    "load_weights": "raysim.pipeline.checkpoint",
    "parse": "raysim.compressors",
    "read_config": "raysim.config",
    "train": "raysim.pipeline.training",
}

__all__ = ["ConfigError", "Run", "RunConfig", "load_weights", "parse", "read_config", "train"]


def __getattr__(name: str) -> object:
    """Import what is asked for, and only then: `import raysim` brings in neither torch nor Ray."""
    if name not in _HOMES:
        raise AttributeError(f"module 'raysim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
