"""raysim: which compression of pipeline-parallel training is safe for a model, and how much faster it is on a network.

>>> import raysim
>>> raysim.parse("ErrorFeedback(TopK(0.1))")
ErrorFeedback(TopK(0.1))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raysim import analysis, nn, sweeps
    from raysim.compressors import parse
    from raysim.config import ConfigError, RunConfig, read_config
    from raysim.distributed import ddp, fsdp, pipelining
    from raysim.probing import probe
    from raysim.records import Run
    from raysim.training.checkpoint import load_weights
    from raysim.training.export import save_pretrained
    from raysim.training.train import train

_MODULES = {
    "analysis": "raysim.analysis",
    "ddp": "raysim.distributed.ddp",
    "fsdp": "raysim.distributed.fsdp",
    "nn": "raysim.nn",
    "pipelining": "raysim.distributed.pipelining",
    "sweeps": "raysim.sweeps",
}
_HOMES = {
    "ConfigError": "raysim.config",
    "Run": "raysim.records",
    "RunConfig": "raysim.config",
    "load_weights": "raysim.training.checkpoint",
    "parse": "raysim.compressors",
    "probe": "raysim.probing",
    "read_config": "raysim.config",
    "save_pretrained": "raysim.training.export",
    "train": "raysim.training.train",
}

__all__ = [
    "ConfigError",
    "Run",
    "RunConfig",
    "analysis",
    "ddp",
    "fsdp",
    "load_weights",
    "nn",
    "parse",
    "pipelining",
    "probe",
    "read_config",
    "save_pretrained",
    "sweeps",
    "train",
]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Import a name on first use, so that `import raysim` imports neither torch nor Ray."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'raysim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
