"""Changes of nested values by dotted keys: on a command line, or where a file derives from another."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from raysim.config.errors import ConfigError
from raysim.config.links import OTHERS
from raysim.config.optimizer import OPTIMIZERS
from raysim.notation import shown

# A key that is set takes the other one away.
EXCLUSIVE = {"steps": "epochs", "epochs": "steps", "num_stages": "cuts", "cuts": "num_stages"}
_OF_FALLING = ("decay_epochs", "decay_every")  # options that mean nothing where the learning rate does not fall


def apply_override(values: dict[str, Any], override: str) -> str:
    """Change nested `values` by a text `key=value`, the value in TOML, or a string where it is none; return the key.

    Raises ConfigError where it is no such text, or the key cannot be one.
    """
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"An override is written key=value, but got {shown(override)}.")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # also of a number of thousands of digits
        parsed = {}
    merge(values, key, parsed["value"] if parsed.keys() == {"value"} else text)
    return key


def merge(values: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested values; a new model or data set starts without the old one's options."""
    if key in ("model.name", "data.name", "loss.name"):
        key = key.removesuffix(".name")
    top = values
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if parents[0] in ("forward", "backward") and not isinstance(inner, dict):
            inner = {OTHERS: inner}  # the key sets one replica or tensor apart
        if isinstance(inner, str):
            inner = {"name": inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"`{key}` is no key: `{parent}` is {inner!r}.")
        values[parent] = inner = dict(inner)
        values = inner
    if isinstance(value, dict) and last in ("model", "data", "optimizer") and "name" not in value:
        for option, option_value in value.items():
            merge(values, f"{last}.{option}", option_value)
        return
    values.pop(EXCLUSIVE.get(key, ""), None)
    values[last] = value
    optimizer = top.get("optimizer")
    if isinstance(optimizer, dict):  # options that mean nothing to the new choice are dropped
        if key == "optimizer.name" and isinstance(value, str) and value in OPTIMIZERS:
            for option in {option for options in OPTIMIZERS.values() for option in options} - {*OPTIMIZERS[value]}:
                optimizer.pop(option, None)
        elif key == "optimizer.decay" and value == "constant":
            for option in _OF_FALLING:
                optimizer.pop(option, None)


def holds(values: Any, key: str) -> bool:
    """Return whether nested values have a dotted key."""
    first, _, rest = key.partition(".")
    if not isinstance(values, Mapping):  # a bare name
        return key == "name"
    return first in values and (not rest or holds(values[first], rest))
