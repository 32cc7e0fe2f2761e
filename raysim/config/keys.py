"""The keys of a run, each described once: its meaning, its default, its part in the result, and the kind of its values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin

from pydantic import BaseModel

from raysim.config.fields import Role
from raysim.config.optimizer import OptimizerConfig
from raysim.config.run import Named, RunConfig


class Key(NamedTuple):
    """A key of a run, as it is written in TOML, on the command line, in `run.parquet` and in studies."""

    name: str
    default: object
    meaning: str
    role: Role
    kind: str  # "bool", "int", "float", "str" or "list[...]" of these; "str" also where a list may stand for one value


@lru_cache(maxsize=1)
def run_keys() -> tuple[Key, ...]:
    """Return every key of a run; the optimizer's keys are written `optimizer.KEY`.

    >>> {key.name: key.role for key in run_keys()}["timeout_s"]
    'place'
    """
    keys = (key for key in _keys("", RunConfig) if key.name != "optimizer")
    return (*keys, *_keys("optimizer.", OptimizerConfig))


def keys_of(*roles: Role) -> frozenset[str]:
    """Return the names of the keys of some roles.

    >>> sorted(keys_of("seed", "arithmetic"))
    ['deterministic', 'device', 'seed', 'threads_per_stage']
    """
    return frozenset(key.name for key in run_keys() if key.role in roles)


def as_written(value: object) -> object:
    """Return the value of a key as one text, in TOML, where a list or a table may stand for one value.

    >>> as_written(("TopK(0.1)", "Identity")), as_written("TopK(0.1)"), as_written(None)
    ('["TopK(0.1)", "Identity"]', 'TopK(0.1)', None)
    >>> as_written({"1": "TopK(0.1)"}), as_written({"a b": "TopK(0.1)"})
    ('{1 = "TopK(0.1)"}', '{"a b" = "TopK(0.1)"}')
    """
    return value if value is None or isinstance(value, str) else _inline(value)


def _inline(value: object) -> str:
    """Return a value in TOML, on one line."""
    if isinstance(value, Mapping):
        keys = (key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key) for key in value)
        return f"{{{', '.join(f'{key} = {_inline(inner)}' for key, inner in zip(keys, value.values(), strict=True))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_inline, value))}]"
    return json.dumps(value)


def as_row(config: RunConfig) -> dict[str, Any]:
    """Return the configuration as `run.parquet` holds it, by key."""
    kinds = {key.name: key.kind for key in run_keys()}
    row: dict[str, Any] = {}
    for name, value in config.flat().items():
        if kinds.get(name) == "str":
            row[name] = as_written(value)
        else:
            row[name] = list(value) if isinstance(value, tuple) and value else value
    return row


def _keys(prefix: str, model: type[BaseModel]) -> list[Key]:
    found = []
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        role = cast("Role", extra["role"]) if isinstance(extra, Mapping) else "setting"
        default = getattr(field.default, "name", field.default)
        found.append(Key(prefix + name, default, field.description or "", role, _kind(field.annotation)))
    return found


def _kind(annotation: Any) -> str:
    """Return the kind of the values that an annotation allows, None apart."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return type(arguments[0]).__name__
    if origin is tuple:
        return f"list[{_kind(arguments[0])}]"
    if origin in (Union, UnionType):
        kinds = {_kind(one) for one in arguments if one is not type(None)}
        return kinds.pop() if len(kinds) == 1 else "str"
    return "str" if annotation is Named else str(annotation.__name__)
