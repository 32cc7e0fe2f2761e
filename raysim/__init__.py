"""raysim: which compression of pipeline-parallel training is safe for a model, and how much faster it is on a network.

>>> import raysim
>>> raysim.parse("ErrorFeedback(TopK(0.1))")
ErrorFeedback(TopK(0.1))
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import analysis
    import sweeps
    from raysim import nn
    from raysim.compressors import parse
    from raysim.config import ConfigError, RunConfig, read_config
    from raysim.distributed import ddp, fsdp, pipelining
    from raysim.probing import probe
    from raysim.records import Run
    from raysim.training.checkpoint import load_weights
    from raysim.training.export import save_pretrained
    from raysim.training.run import train

_PACKAGES = ("analysis", "sweeps")
_MODULES = {
    "ddp": "raysim.distributed.ddp",
    "fsdp": "raysim.distributed.fsdp",
    "nn": "raysim.nn",
    "pipelining": "raysim.distributed.pipelining",
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
    "train": "raysim.training.run",
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
    if name in _PACKAGES:
        return _package(name)
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'raysim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def _package(name: str) -> object:
    """Import our package of that name, even where a user's file or folder of the name comes first on the path."""
    place = Path(__file__).resolve().parent.parent / name / "__init__.py"
    module = sys.modules.get(name)
    if module is None:
        spec = spec_from_file_location(name, place, submodule_search_locations=[str(place.parent)])
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(module)
    if module.__file__ is None or Path(module.__file__).resolve() != place:
        raise ImportError(f"`raysim.{name}` needs its own {name}, but {module.__file__} is imported under that name.")
    return module
