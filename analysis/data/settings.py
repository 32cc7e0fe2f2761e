"""Settings of runs: their compression, and a short text of the keys in which they differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raysim.analysis.data.recorded_methods import Method, read_method
from raysim.config import keys_of, run_keys

if TYPE_CHECKING:
    import pandas as pd

NO_SETTING = keys_of("place", "observation", "arithmetic")
"""Keys outside of a setting: where a run is done, how often it is observed, its last bits."""
COMPRESSION = tuple(key.name for key in run_keys() if key.role == "compression")
"""Keys of compression: runs that are alike in all other keys are compared with one another."""
DENSE = "Identity"
SYNCHRONOUS = "Synchronous"  # weights of runs recorded before the key existed, too


class Setting(NamedTuple):
    """The compression of a run: its notations for activations, gradients and replica gradients, and the keys that go with them."""

    forward: str = DENSE
    backward: str = DENSE
    replica_gradient: str = DENSE
    shared_indices: bool = False
    fused_embedding: bool = False
    weights: str = SYNCHRONOUS
    compress_from: int = 0

    def __str__(self) -> str:
        return " ".join(f"{k}={str(v).lower() if v is True else v}" for k, v in self.changes().items()) or "dense"

    def changes(self) -> dict[str, str | bool | int]:
        """Return the keys of the configuration in which it differs from a dense run."""
        return {key: value for key, value in self._asdict().items() if value != getattr(DENSE_SETTING, key)}

    def method(self, direction: str) -> Method | None:
        """Return the parsed method of a direction: "forward", "backward" or "replica_gradient"."""
        return read_method(str(getattr(self, direction)))


DENSE_SETTING = Setting()


def setting_of(row: Mapping[Any, Any] | pd.Series[Any]) -> Setting:
    """Return the compression of a run of `results.runs`; missing keys are dense."""
    known = {key: row[key] for key in COMPRESSION if key in row and not is_missing(row[key])}
    forward, backward, replica_gradient = (_one_notation(str(known.get(key, DENSE))) for key in Setting._fields[:3])
    shared_indices, fused_embedding = (bool(known.get(key, False)) for key in ("shared_indices", "fused_embedding"))
    weights = str(known.get("weights", SYNCHRONOUS))
    begin = int(known.get("compress_from", 0))
    return Setting(forward, backward, replica_gradient, shared_indices, fused_embedding, weights, begin)


def _one_notation(text: str) -> str:
    """Return a notation; of a list that gives all boundaries the same one, that one."""
    if text.startswith("[") and read_method(text) is not None:
        return text[2 : text.index('"', 2)]
    return text


def configuration(columns: Sequence[str]) -> list[str]:
    """Return the columns of a `run.parquet` that are keys of its configuration: all before the schema version."""
    return list(columns[: list(columns).index("schema_version")]) if "schema_version" in columns else []


def differing(runs: pd.DataFrame, keys: Iterable[str]) -> list[str]:
    """Return the keys in which runs differ, except for the seed; keys of compression come first."""
    known = [key for key in keys if key in runs and key not in NO_SETTING | {"seed"}]
    several = [key for key in known if len({as_text(value) for value in runs[key].tolist()}) > 1]
    return sorted(several, key=lambda key: COMPRESSION.index(key) if key in COMPRESSION else len(COMPRESSION))


def setting_texts(runs: pd.DataFrame, keys: Iterable[str]) -> list[str]:
    """Return each run's values of the keys in which the runs differ: "forward=TopK(0.1) backward=Quantize(8)".

    >>> import pandas as pd
    >>> runs = pd.DataFrame({"forward": ["Identity", "TopK(0.1)"], "steps": [300, 300], "seed": [0, 1]})
    >>> setting_texts(runs, ["forward", "steps", "seed"])
    ['forward=Identity', 'forward=TopK(0.1)']
    """
    names = differing(runs, keys)
    columns = [
        [f"{name}={as_text(value)}" if as_text(value) else "" for value in runs[name].tolist()] for name in names
    ]
    return [" ".join(filter(None, texts)) for texts in zip(*columns, strict=True)] if names else [""] * len(runs)


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
    """Return a value of a key as it is written on the command line; nothing if it is not given."""
    value = plain(value)
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
