"""Classes of the user's own that a notation names: `package.module:Class`, or the name of an entry point.

Entry points of an installed package are found under the groups `raysim.codecs`, `raysim.compressors`,
`raysim.replica_methods` and `raysim.schedules`.

A name that the user types is imported. A name in a record is not, since the record may be a stranger's: everything that
reads names from records does so inside `from_record`, where only entry points and modules given to `trusting` are imported.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

GROUPS = ("raysim.codecs", "raysim.compressors", "raysim.replica_methods", "raysim.schedules")
CONTRIB = (
    *("ATOMO", "DAQ", "MPC", "MeanStd", "Outliers", "TAHQuant", "TinyScript", "ZFP", "ResidualVQ"),
    *("AsyncSPARTA", "DeCoSGD", "DiLoCoX", "Dion", "EDGC", "HALoS"),
)
"""Names of the distribution raysim-contrib, for the sentence about it if it is not installed."""
PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # package.module:Class

_FROM_RECORD = ContextVar("from_record", default=False)
_TRUSTED: ContextVar[frozenset[str]] = ContextVar("trusted", default=frozenset())


@contextmanager
def from_record() -> Iterator[None]:
    """Import only trusted modules and those of entry points: names parsed here come from a record."""
    token = _FROM_RECORD.set(True)
    try:
        yield
    finally:
        _FROM_RECORD.reset(token)


@contextmanager
def trusting(*modules: str) -> Iterator[None]:
    """Let records name classes and functions of these modules, and of modules in these packages: they are imported, and run.

    Raises ValueError if a name is not a module's.

    >>> with trusting("mycodecs", "mydata"):
    ...     results = analysis.load("results")  # doctest: +SKIP
    """
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"A trusted module must be a name such as `mycodecs` or `mypackage`, but got {module!r}.")
    token = _TRUSTED.set(_TRUSTED.get() | set(modules))
    try:
        yield
    finally:
        _TRUSTED.reset(token)


def modules_in(*texts: str) -> set[str]:
    """Return the modules that texts name as `package.module:Class`.

    >>> modules_in("ErrorFeedback(mycodecs:Half)", "1F1B")
    {'mycodecs'}
    """
    return {path.partition(":")[0] for text in texts for path in PATH.findall(text)}


@lru_cache(maxsize=1)
def entry_points() -> dict[str, str]:
    """Return the import path of every class that an installed package registers, by name."""
    paths: dict[str, str] = {}
    for group in GROUPS:
        for point in metadata.entry_points(group=group):
            paths.setdefault(point.name, point.value)
    return paths


def written_name(cls: type) -> str:
    """Return the name under which a notation finds a class of the user's own: of its entry point, or its import path."""
    path = f"{cls.__module__}:{cls.__qualname__}"
    return next((name for name, value in entry_points().items() if value == path), path)


def import_object(path: str, kind: str = "class") -> Any:
    """Return the class or function that `package.module:name` names, looking in the current folder too.

    Raises ValueError if it cannot be imported, or a record names it and nobody trusts its module.
    """
    module_name, _, name = path.partition(":")
    if path not in entry_points().values():
        check_trusted(path, module_name)
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"`{path}` cannot be imported: {type(error).__name__}: {str(error).rstrip('.')}.") from error
    imported = getattr(module, name, None)
    if not callable(imported):
        raise ValueError(f"`{path}` cannot be imported: `{module_name}` has no {kind} `{name}`.")
    return imported


def check_trusted(what: str, module: str) -> None:
    """Raise ValueError if a record asks for `what`, which runs code of a module that nobody trusts."""
    if _FROM_RECORD.get() and not _is_trusted(module):
        raise ValueError(
            f"`{what}` is named by a record, and reading a record runs no code: if you trust `{module}`, give "
            f"`--trust {module}`, or in Python `raysim.plugins.trusting({module!r})`."
        )


def _is_trusted(module: str) -> bool:
    """Return whether a module, or a package that it lies in, is trusted."""
    return any(module == trusted or module.startswith(f"{trusted}.") for trusted in _TRUSTED.get())


def import_module(name: str) -> ModuleType:
    """Return a module, also of the current folder.

    The folder then stays in `sys.path`: later imports of the module, and workers that take over the path, need it.
    """
    folder = str(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        if folder in sys.path or (_FROM_RECORD.get() and not _is_trusted(name)):  # an entry point is installed
            raise
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit):
        sys.path.remove(folder)
        raise
