"""Classes of the user's own that a notation names: `package.module:Class`, or the name of an entry point.

Entry points of a package that is installed are found under the groups `raysim.codecs`, `raysim.compressors`,
`raysim.replica_methods` and `raysim.schedules`.
"""

from __future__ import annotations

import importlib
import re
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

GROUPS = ("raysim.codecs", "raysim.compressors", "raysim.replica_methods", "raysim.schedules")
PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # package.module:Class


@lru_cache(maxsize=1)
def entry_points() -> dict[str, str]:
    """Return the import path of every class that an installed package registers, by name."""
    found: dict[str, str] = {}
    for group in GROUPS:
        for point in metadata.entry_points(group=group):
            found.setdefault(point.name, point.value)
    return found


def written_name(cls: type) -> str:
    """Return the name under which a notation finds a class of the user's own: of its entry point, or its import path."""
    path = f"{cls.__module__}:{cls.__qualname__}"
    return next((name for name, value in entry_points().items() if value == path), path)


def import_object(path: str, kind: str = "class") -> Any:
    """Return the class or function that `package.module:name` names, looking in the current folder too.

    Raises ValueError where it cannot be imported.
    """
    module_name, _, name = path.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"`{path}` cannot be imported: {type(error).__name__}: {str(error).rstrip('.')}.") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise ValueError(f"`{path}` cannot be imported: `{module_name}` has no {kind} `{name}`.")
    return found


def import_module(name: str) -> ModuleType:
    """Return a module, also of the current folder.

    The folder then stays in `sys.path`: later imports of the module, and workers that take over the path, need it.
    """
    folder = str(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        if folder in sys.path:
            raise
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit):
        sys.path.remove(folder)
        raise
