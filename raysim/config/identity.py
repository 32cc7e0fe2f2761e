"""The job and the setting of a run: what its steps compute and what they compress, by the roles of its keys."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from raysim.config.keys import keys_of, run_keys
from raysim.notation import Method, cut_middle, read_method
from raysim.storage.texts import parse_json

IDENTITY = "Identity"
METHOD_KEYS = ("forward", "backward", "replica_gradient", "tied_gradient")
SYNCHRONOUS = "Synchronous"
LONGEST_TITLE = 200  # characters of a job's model and data


class Setting(NamedTuple):
    """The compression of a run: its keys of this role. Its text is the run's `setting`: "dense", or the keys that differ."""

    forward: str = IDENTITY
    backward: str = IDENTITY
    replica_gradient: str = IDENTITY
    shared_indices: bool = False
    fused_embedding: bool = False
    tied_gradient: str = IDENTITY
    weights: str = SYNCHRONOUS
    compress_from: int = 0

    @classmethod
    def of(cls, row: Mapping[Any, Any]) -> Setting:
        """Return the setting of a row of `run.parquet`, by default dense; equal notations of all boundaries become one."""
        known = {key: value for key in cls._fields if (value := plain(row.get(key))) is not None}
        one: dict[str, Any] = {key: _one_notation(v) if isinstance(v, str) else v for key, v in known.items()}
        return cls(**one)

    def __str__(self) -> str:
        return " ".join(f"{key}={as_text(value)}" for key, value in self.changes().items()) or "dense"

    def methods(self) -> dict[str, str]:
        """Return the link codecs and the methods of replicas and tied parameters, in notation."""
        return {key: getattr(self, key) for key in METHOD_KEYS}

    def changes(self) -> dict[str, Any]:
        """Return the keys of the configuration in which it differs from a dense run."""
        return {key: value for key, value in self._asdict().items() if value != getattr(DENSE, key)}

    def method(self, direction: str) -> Method | None:
        """Return the method of a direction: "forward", "backward" or "replica_gradient"."""
        return read_method(str(getattr(self, direction)))


DENSE = Setting()


def _one_notation(text: str) -> str:
    """Return a notation, or the common notation of a list that is the same for all boundaries."""
    try:
        each = set(parse_json(text)) if text.startswith("[") else {text}
    except (TypeError, ValueError):
        return text
    return str(each.pop()) if len(each) == 1 else text


@lru_cache(maxsize=1)
def _computing() -> dict[str, str]:
    """Return the keys of a job with the texts of their defaults."""
    names = keys_of("computation", "arithmetic") - {"device"}
    defaults = {key.name: as_text(key.default) for key in run_keys() if key.name in names}
    return defaults | {"model": "a model", "data": "data", "probe": ""}


def job_keys(row: Mapping[Any, Any]) -> dict[str, str]:
    """Return the keys that decide the computation of a step, as texts: options of model, data and loss among them.

    Missing and false ones are left out.
    """
    values = {name: as_text(row.get(name)) or default for name, default in _computing().items()}
    options = sorted(str(name) for name in row if str(name).startswith(("model.", "data.", "loss.")))
    values |= {"device_kind": device_kind(row)} | {name: as_text(row[name]) for name in options}
    return {name: value for name, value in values.items() if value not in ("", "false")}


def device_kind(row: Mapping[Any, Any]) -> str:
    """Return the device that computed: "cpu" or "cuda". Runs of earlier versions have only the configured `device`."""
    return as_text(row.get("device_kind")) or ("cuda" if row.get("device") == "cuda" else "cpu")


def identity(row: Mapping[Any, Any]) -> dict[str, str]:
    """Return the columns `job` and `setting` of a row of `run.parquet`: runs with equal ones differ in training and seed only.

    >>> identity({"model": "cnn", "data": "digits", "forward": "TopK(0.1)"})
    {'job': 'cnn on digits aa57ec08', 'setting': 'forward=TopK(0.1)'}
    """
    keys = job_keys(row)
    digest = hashlib.sha256(json.dumps(sorted(keys.items())).encode()).hexdigest()[:8]
    title = cut_middle(f"{keys['model']} on {keys['data']}", LONGEST_TITLE)
    return {"job": f"{title} {digest}", "setting": str(Setting.of(row))}


# --- values of a row, which a frame may hold as those of numpy or pandas ------------------------------------------------------


def is_missing(value: object) -> bool:
    """Return whether a cell of a frame is empty: None, pandas' NA, or not a number."""
    return value is None or repr(value) == "<NA>" or (isinstance(value, float) and math.isnan(value))


def plain(value: Any) -> Any:
    """Return a cell as Python's own value; None if it is empty."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if is_missing(value) else value


def as_text(value: object) -> str:
    """Return a key's value as written on the command line; empty if it is not given."""
    value = plain(value)
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
