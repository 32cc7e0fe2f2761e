"""The user's own classes in a notation: `package.module:Class`, or the name of an entry point.

Entry points of installed packages are found in the groups `raysim.codecs`, `raysim.compressors`,
`raysim.replica_methods`, `raysim.schedules` and `raysim.weight_policies`.

A name typed by the user is imported. A name in a record is not, since the record may come from somebody else: all code that
reads names from records does so inside `from_record`, where only entry points and modules given to `trusting` are imported.
"""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

GROUPS = (
    "raysim.codecs",
    "raysim.compressors",
    "raysim.replica_methods",
    "raysim.schedules",
    "raysim.weight_policies",
)
PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")  # package.module:Class

_FROM_RECORD = ContextVar("from_record", default=False)
_TRUSTED: ContextVar[frozenset[str]] = ContextVar("trusted", default=frozenset())


@contextmanager
def from_record() -> Iterator[None]:
    """Mark names parsed in the block as coming from a record: only entry points and trusted modules are imported."""
    token = _FROM_RECORD.set(True)
    try:
        yield
    finally:
        _FROM_RECORD.reset(token)


@contextmanager
def trusting(*modules: str) -> Iterator[None]:
    """Trust classes and functions named in records if they are in these modules or packages: they are imported and run.

    Raises ValueError if an argument is not a module name.

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
    """Return the modules named in texts as `package.module:Class`.

    >>> modules_in("ErrorFeedback(mycodecs:Half)", "1F1B")
    {'mycodecs'}
    """
    return {path.partition(":")[0] for text in texts for path in PATH.findall(text)}


@lru_cache(maxsize=1)
def entry_points() -> dict[str, str]:
    """Return the import path of every class registered by an installed package, by name."""
    paths: dict[str, str] = {}
    for group in GROUPS:
        for point in metadata.entry_points(group=group):
            paths.setdefault(point.name, point.value)
    return paths


def plug_ins(group: str) -> list[Any]:
    """Return the classes that installed packages register in a group of entry points."""
    return [import_object(point.value) for point in metadata.entry_points(group=group)]


@lru_cache(maxsize=1)
def contrib() -> dict[str, str]:
    """Return the import path of every class of raysim-contrib by name, installed or not."""
    project = tomllib.loads(Path(__file__).with_name("contrib.toml").read_text(encoding="utf-8"))["project"]
    return {name: path for points in project["entry-points"].values() for name, path in points.items()}


def written_name(cls: type) -> str:
    """Return the name of a user's own class in a notation: its entry point, or its import path."""
    path = f"{cls.__module__}:{cls.__qualname__}"
    return next((name for name, value in entry_points().items() if value == path), path)


def import_object(path: str, kind: str = "class") -> Any:
    """Import the class or function `package.module:name`, also from the current folder.

    Raises ValueError if it cannot be imported, or if a record names it and its module is not trusted.
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


def check_trusted(name: str, module: str) -> None:
    """Raise ValueError if a record asks for `name`, which runs code of an untrusted module."""
    if _FROM_RECORD.get() and not _is_trusted(module):
        raise ValueError(
            f"`{name}` is named by a record, and reading a record runs no code: if you trust `{module}`, give "
            f"`--trust {module}`, or in Python `raysim.plugins.trusting({module!r})`."
        )


def _is_trusted(module: str) -> bool:
    """Return whether a module, or a package that contains it, is trusted."""
    return any(module == trusted or module.startswith(f"{trusted}.") for trusted in _TRUSTED.get())


def import_module(name: str) -> ModuleType:
    """Import a module, also from the current folder.

    The folder then stays in `sys.path`: later imports of the module need it, and so do workers, which inherit the path.
    """
    folder = str(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        if folder in sys.path or (_FROM_RECORD.get() and not _is_trusted(name)):  # entry points are installed
            raise
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit):
        sys.path.remove(folder)
        raise
