"""raysim: find the compression that your model tolerates in pipeline parallelism, and predict the speed-up on your network.

>>> import raysim
>>> raysim.parse("ErrorFeedback(TopK(0.1))")
ErrorFeedback(TopK(0.1))
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.storage.files import give_kernels_a_cache

if TYPE_CHECKING:
    from raysim import analysis as analysis
    from raysim import nn as nn
    from raysim import sweeps as sweeps
    from raysim.compressors import parse as parse
    from raysim.config import ConfigError as ConfigError
    from raysim.config import RunConfig as RunConfig
    from raysim.config import read_config as read_config
    from raysim.distributed import ddp as ddp
    from raysim.distributed import fsdp as fsdp
    from raysim.distributed import pipelining as pipelining
    from raysim.probing import probe as probe
    from raysim.records import Run as Run
    from raysim.training.checkpoint import load_weights as load_weights
    from raysim.training.export import save_pretrained as save_pretrained
    from raysim.training.train import train as train

_MODULES = {
    **{name: f"raysim.{name}" for name in ("analysis", "nn", "sweeps")},
    **{name: f"raysim.distributed.{name}" for name in ("ddp", "fsdp", "pipelining")},
}
_HOMES = {
    **dict.fromkeys(("ConfigError", "RunConfig", "read_config"), "raysim.config"),
    "Run": "raysim.records",
    "load_weights": "raysim.training.checkpoint",
    "parse": "raysim.compressors",
    "probe": "raysim.probing",
    "save_pretrained": "raysim.training.export",
    "train": "raysim.training.train",
}
__all__ = sorted([*_MODULES, *_HOMES])


give_kernels_a_cache(Path(__file__).parent)


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Import a name on first use, so that `import raysim` loads neither torch nor Ray."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'raysim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
