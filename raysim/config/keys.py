"""The keys of a run, each described once: meaning, default, role, and type."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, cast, get_args, get_origin

from pydantic import BaseModel

from raysim.config.fields import OptimizerConfig, Role
from raysim.config.run import RunConfig
from raysim.config.run_fields import Named
from raysim.notation import Notation
from raysim.storage.files import expanded, read_text

_MODEL_TYPE = re.compile(r"model_type\W+([\w-]+)")


class Key(NamedTuple):
    """A key of a run, as written in TOML, on the command line, in `run.parquet` and in studies."""

    name: str
    default: object
    meaning: str
    role: Role
    kind: str  # "bool", "int", "float", "str" or "list[...]" of these; "str" also if a list may stand for one value


@lru_cache(maxsize=1)
def run_keys() -> tuple[Key, ...]:
    """Return every key of a run; the optimizer's keys are written `optimizer.KEY`.

    >>> {key.name: key.role for key in run_keys()}["timeout_s"]
    'place'
    """
    keys = (key for key in _keys("", RunConfig) if key.name != "optimizer")
    return (*keys, *_keys("optimizer.", OptimizerConfig))


def keys_of(*roles: Role) -> frozenset[str]:
    """Return the names of the keys with these roles.

    >>> sorted(keys_of("seed", "arithmetic"))
    ['deterministic', 'device', 'seed', 'threads_per_stage']
    """
    return frozenset(key.name for key in run_keys() if key.role in roles)


def as_written(value: object) -> object:
    """Return the value of a key as one text; lists and tables are written in TOML.

    >>> as_written(("TopK(0.1)", "Identity")), as_written("TopK(0.1)"), as_written(None)
    ('["TopK(0.1)", "Identity"]', 'TopK(0.1)', None)
    >>> as_written({"1": "TopK(0.1)"}), as_written({"a b": "TopK(0.1)"})
    ('{1 = "TopK(0.1)"}', '{"a b" = "TopK(0.1)"}')
    """
    return value if value is None or isinstance(value, str) else _inline(value)


def _inline(value: object) -> str:
    """Write a value in TOML, on one line."""
    if isinstance(value, Mapping):
        keys = (key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key) for key in value)
        return f"{{{', '.join(f'{key} = {_inline(inner)}' for key, inner in zip(keys, value.values(), strict=True))}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_inline, value))}]"
    return json.dumps(value)


def as_row(config: RunConfig) -> dict[str, Any]:
    """Return the configuration by key, as stored in `run.parquet`."""
    kinds = {key.name: key.kind for key in run_keys()}
    row: dict[str, Any] = {}
    for name, value in config.flat().items():
        if kinds.get(name) == "str":
            row[name] = as_written(value)
        else:
            row[name] = list(value) if isinstance(value, tuple) and value else value
    return row


def _keys(prefix: str, model: type[BaseModel]) -> list[Key]:
    keys = []
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra
        role = cast("Role", extra["role"]) if isinstance(extra, Mapping) else "training"
        default = field.default
        if isinstance(default, (Named, OptimizerConfig)):
            default = default.name
        written = repr(default) if isinstance(default, Notation) else default
        keys.append(Key(prefix + name, written, field.description or "", role, _kind(field.annotation)))
    return keys


def _kind(annotation: Any) -> str:
    """Return the kind of values allowed by an annotation, besides None."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return type(arguments[0]).__name__
    if origin is tuple:
        return f"list[{_kind(arguments[0])}]"
    if origin in (Union, UnionType):
        kinds = {_kind(argument) for argument in arguments if argument is not type(None)}
        return kinds.pop() if len(kinds) == 1 else "str"
    return annotation.__name__ if annotation in (bool, int, float) else "str"


def model_title(name: str, path: Any = None, config: Any = None) -> str:
    """Return a model's name; for `hf`, followed by its configuration's type, or else by its folder or name.

    `config` is a table, its text in TOML or JSON, or the path of a file.

    >>> model_title("gpt"), model_title("hf", config={"model_type": "qwen2"}), model_title("hf", "Qwen/Qwen2-0.5B")
    ('gpt', 'hf qwen2', 'hf Qwen2-0.5B')
    """
    if name != "hf":
        return name
    files = [f"{path}/config.json"] if isinstance(path, str) else []
    files += [config] if isinstance(config, str) and config.endswith(".json") else []
    for text in (str(config), *map(_text, files)):
        if kind := _MODEL_TYPE.search(text):
            return f"hf {kind[1]}"
    return f"hf {Path(path).name}" if isinstance(path, str) else name


def _text(path: str) -> str:
    file = expanded(path)
    try:
        return "" if file is None else read_text(file)
    except OSError:
        return ""
