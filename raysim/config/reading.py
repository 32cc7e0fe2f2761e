"""Reading a configuration: of a recipe, a TOML file, or nested values."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raysim.config.errors import ConfigError, sentence
from raysim.config.overrides import EXCLUSIVE, apply_override, holds, merge
from raysim.config.run import RunConfig
from raysim.files import read_text
from raysim.notation import known_words, shown

LARGEST_BYTES = 4 * 2**20  # of a TOML file


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of nested values; raises ConfigError with the first thing that is wrong, in one sentence."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(sentence(error)) from None


def read_config(source: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the configuration of a recipe's name or a TOML file, changed by `key=value` texts.

    Raises ConfigError where the recipe, the file, a key or a value is wrong.

    >>> read_config("digits-cnn", ["steps=10", "forward=TopK(density=0.1)"]).forward
    'TopK(0.1)'
    """
    name, values = read_source(source)
    keys = [apply_override(values, override) for override in overrides]
    for key in keys:
        if not holds(values, key):
            raise ConfigError(f"The override of `{key}` is undone by another one. Leave one of them out.")
    values.setdefault("name", name)
    return make_config(values)


def read_source(source: str | Path, derived: tuple[Path, ...] = ()) -> tuple[str, dict[str, Any]]:
    """Return the name and the values of a recipe or a TOML file; raises ConfigError.

    `derived`: the files that derive from it, whose `base` it is.
    """
    path = Path(source)
    recipes = recipe_names()
    if str(source) in recipes:
        text = resources.files("raysim.recipes").joinpath(f"{source}.toml").read_text(encoding="utf-8")
    elif path.suffix == ".toml":
        try:
            text = read_text(path, LARGEST_BYTES)
        except FileNotFoundError:
            raise ConfigError(f"There is no file {shown(str(source))}.") from None
        except OSError as error:
            raise ConfigError(f"{source} cannot be read: {error.strerror}.") from None
    else:
        known = known_words(str(source), recipes, rest="; or give a .toml file")
        raise ConfigError(f"Unknown recipe {shown(str(source))}.{known}")
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not TOML: {error}.") from None
    find_data(values, path.parent)
    base = values.pop("base", None)  # a recipe derives from another by naming what differs
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"`base` must be a recipe or a .toml file, but got {shown(base)}.")
        below = (*derived, path.absolute())
        parent_source: str | Path = path.parent / base if base.endswith(".toml") else base
        if Path(parent_source).absolute() in below:
            raise ConfigError(f"`base` must not lead back to where it came from, but {source} has {base!r}.")
        parent = read_source(parent_source, below)[1]
        for key, value in values.items():
            merge(parent, key, value)
        for key in values:
            if key not in parent:
                raise ConfigError(f"Just one of `{key}` and `{EXCLUSIVE[key]}` may be given, but {source} has both.")
        values = parent
    return path.stem, values


def find_data(values: Mapping[str, Any], folder: Path) -> None:
    """Complete `data.path` if it is relative, and lies in the folder of the file that names it, not in the working folder."""
    data = values.get("data")
    if isinstance(data, dict) and isinstance(path := data.get("path"), str) and path:
        with suppress(OSError, ValueError):  # no name of a file: refused with the other options
            if not Path(path).expanduser().exists() and (folder / path).exists():
                data["path"] = str(folder / path)


def recipe_names() -> list[str]:
    """Return the names of the recipes that come with raysim."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in resources.files("raysim.recipes").iterdir()
        if entry.name.endswith(".toml")
    )
