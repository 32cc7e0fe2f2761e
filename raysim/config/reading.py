"""Read a configuration from a recipe, a TOML file, nested values and overrides; errors are one sentence."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from raysim.config.boundaries import OTHERS
from raysim.config.fields import OPTIMIZERS, OptimizerConfig
from raysim.config.run import RunConfig
from raysim.notation import InputError, known_words, shown
from raysim.storage.files import expanded, read_text
from raysim.storage.texts import DEEPEST, LARGEST_TOML, parse_toml

MOST_BASES = 20  # files, each the `base` of the one before
# Setting a key removes the other one.
EXCLUSIVE = {"steps": "epochs", "epochs": "steps", "num_stages": "cuts", "cuts": "num_stages"}
_OF_FALLING = ("decay_epochs", "decay_every")  # options without effect on a constant learning rate
# Words that pydantic adds to the path of a value of several kinds; no key has such a name.
_UNION = ("str", "constrained-int")
_NESTED = ("tuple[", "dict[", "constrained-tuple")


class ConfigError(InputError):
    """A configuration is wrong; one sentence with field, value and rule."""


def first_error(error: ValidationError, keys: Iterable[str] = RunConfig.model_fields, of: str = "") -> str:
    """Return pydantic's first error as one sentence in raysim's style. `keys`: the known keys; `of`: what they belong to."""
    errors = error.errors(include_url=False)
    # If a field may be a scalar or a list, show the rule of the given kind.
    scalars = ("int_type", "string_type", "dict_type")
    fitting = (each for each in errors if each["type"] not in scalars or not isinstance(each["input"], (list, tuple)))
    first = next(fitting, errors[0])
    key = ".".join(str(part) for part in first["loc"] if part not in _UNION and not str(part).startswith(_NESTED))
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"]).strip()
        return text if ("`" in text and not key) or f"`{key}" in text else f"`{key}`: {text}"
    if first["type"] == "extra_forbidden":
        prefix = "optimizer." if key.startswith("optimizer.") else ""
        known = OptimizerConfig.model_fields if prefix else keys
        return f"Unknown key `{key}`{of}.{known_words(key.removeprefix(prefix), known, prefix)}"
    if first["type"] == "missing":
        return f"`{key}` must be given."
    rules = {"model_type": "a table of keys", "tuple_type": "a list", "int_parsing_size": "an integer of fewer digits"}
    if first["type"] == "too_long":
        rules["too_long"] = f"a list of at most {first['ctx']['max_length']} entries"
    # Drop pydantic's details.
    rule = re.sub(r"^\w+ should |( after validation, not|, unable|, got) .*", "", first["msg"])
    rule = rule.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    if first["type"] in rules:
        rule = f"be {rules[first['type']]}"
    return f"`{key}` must {rule}, but got {shown(first['input'])}."


def make_config(values: Mapping[str, Any]) -> RunConfig:
    """Make a configuration from nested values; raises ConfigError with one sentence on the first error."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(first_error(error)) from None


def read_config(source: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read the configuration of a recipe or a TOML file, changed by `key=value` texts.

    Raises ConfigError if the recipe, the file, a key or a value is wrong.

    >>> read_config("digits-cnn", ["steps=10", "forward=TopK(density=0.1)"]).forward
    TopK(0.1)
    """
    return make_config(read_values(source, overrides))


def read_values(source: str | Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return the nested values of `read_config`, with their name; raises ConfigError."""
    name, values = read_source(source)
    keys = [apply_override(values, override) for override in overrides]
    check_held(values, keys)
    return {"name": name} | values


def read_source(source: str | Path, derived: tuple[Path, ...] = ()) -> tuple[str, dict[str, Any]]:
    """Return the name and the values of a recipe or a TOML file; raises ConfigError.

    The folder of a model of transformers stands for the recipe `hf` with its `model.path`.
    `derived`: the chain of files that name this one as their `base`, to detect cycles.
    """
    path = Path(source)
    recipes = recipe_names()
    if str(source) in recipes:
        text = resources.files("raysim.recipes").joinpath(f"{source}.toml").read_text(encoding="utf-8")
    elif path.suffix == ".toml":
        try:
            text = read_text(path, LARGEST_TOML)
        except FileNotFoundError:
            raise ConfigError(f"There is no file {shown(str(source))}.") from None
        except OSError as error:
            raise ConfigError(f"{source} cannot be read: {error.strerror}.") from None
    elif _is_model(path):
        name, values = read_source("hf")
        apply_override(values, f"model.path={source}")
        return name, values
    else:
        known = known_words(
            str(source), recipes, rest="; or give a .toml file, or a folder with a model of transformers"
        )
        raise ConfigError(f"Unknown recipe {shown(str(source))}.{known}")
    try:
        values = parse_toml(text)
    except ValueError as error:
        raise ConfigError(f"{source} is not TOML: {error}.") from None
    find_data(values, path.parent)
    base = values.pop("base", None)  # then the file lists only the differences from its base
    if base is not None:
        if not isinstance(base, str):
            raise ConfigError(f"`base` must be a recipe or a .toml file, but got {shown(base)}.")
        below = (*derived, path.absolute())
        parent_source: str | Path = path.parent / base if base.endswith(".toml") else base
        if Path(parent_source).absolute() in below:
            raise ConfigError(f"`base` must not form a cycle, but {source} has {base!r}.")
        if len(below) > MOST_BASES:
            raise ConfigError(
                f"At most {MOST_BASES} files may be chained by `base`, but {source} names one more, {base!r}."
            )
        parent = read_source(parent_source, below)[1]
        for key, value in values.items():
            merge(parent, key, value)
        for key in values:
            if key not in parent:
                raise ConfigError(f"Only one of `{key}` and `{EXCLUSIVE[key]}` may be given, but {source} has both.")
        values = parent
    return path.stem, values


def _is_model(folder: Path) -> bool:
    """Return whether a folder holds a model of transformers."""
    with suppress(OSError, ValueError, RuntimeError):  # not a file name, or the home of nobody
        return (folder.expanduser() / "config.json").is_file()
    return False


def find_data(values: Mapping[str, Any], folder: Path) -> None:
    """Resolve a relative `data.path` against the configuration's folder if it exists there and not in the working folder."""
    data = values.get("data")
    if isinstance(data, dict) and isinstance(path := data.get("path"), str) and path:
        with suppress(OSError, ValueError):  # not a file name: rejected with the other options
            typed = expanded(path)
            if typed is not None and not typed.exists() and (folder / path).exists():
                data["path"] = str(folder / path)


def recipe_names() -> list[str]:
    """Return the names of raysim's recipes."""
    return sorted(
        entry.name.removesuffix(".toml")
        for entry in resources.files("raysim.recipes").iterdir()
        if entry.name.endswith(".toml")
    )


def apply_override(values: dict[str, Any], override: str) -> str:
    """Apply an override `key=value` to nested `values` and return the key; a value that is not TOML is a string.

    Raises ConfigError if the text has a different form, or the key is invalid.
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"An override is written key=value, but got {shown(override)}.")
    try:
        parsed = parse_toml(f"value = {text}")
    except ValueError:  # also for numbers with thousands of digits
        parsed = {}
    merge(values, key, parsed["value"] if parsed.keys() == {"value"} else text)
    return key


def merge(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested values; a new model or data set drops the old one's options."""
    if key in ("model.name", "data.name", "loss.name"):
        key = key.removesuffix(".name")
    top = values
    *parents, last = key.split(".")
    if len(parents) >= DEEPEST:
        raise ConfigError(f"A key has at most {DEEPEST} parts, but got {shown(key)}.")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if parents[0] in ("forward", "backward") and not isinstance(inner, dict):
            inner = {OTHERS: inner}  # the key belongs to a single replica or tensor
        if isinstance(inner, str):
            inner = {"name": inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"`{key}` is not a key: `{parent}` is {inner!r}.")
        values[parent] = inner = dict(inner)
        values = inner
    if isinstance(value, dict) and last in ("model", "data", "optimizer") and "name" not in value:
        for option, option_value in value.items():
            merge(values, f"{last}.{option}", option_value)
        return
    values.pop(EXCLUSIVE.get(key, ""), None)
    values[last] = value
    optimizer = top.get("optimizer")
    if isinstance(optimizer, dict):  # drop options without meaning for the new choice
        if key == "optimizer.name" and isinstance(value, str) and value in OPTIMIZERS:
            for option in {option for options in OPTIMIZERS.values() for option in options} - {*OPTIMIZERS[value]}:
                optimizer.pop(option, None)
        elif key == "optimizer.decay" and value == "constant":
            for option in _OF_FALLING:
                optimizer.pop(option, None)


def check_held(values: Mapping[str, Any], keys: Collection[str]) -> None:
    """Raise ConfigError if a key that was set in nested `values` has been dropped by a later one of `keys`."""
    for key in keys:
        if not holds(values, key):
            other = f"that of `{EXCLUSIVE[key]}`" if EXCLUSIVE.get(key) in keys else "another one"
            raise ConfigError(f"The override of `{key}` conflicts with {other}. Leave one of them out.")


def holds(values: Any, key: str) -> bool:
    """Return whether nested values have a dotted key."""
    first, _, rest = key.partition(".")
    if not isinstance(values, Mapping):  # a bare name
        return key == "name"
    return first in values and (not rest or holds(values[first], rest))
