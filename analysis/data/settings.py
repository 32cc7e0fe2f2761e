"""Settings of runs: the keys of their configuration, and a short text of the keys in which they differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pandas as pd

from raysim.config import keys_of, run_keys

NO_SETTING = keys_of("place", "observation", "arithmetic")
"""Keys that a setting does not consist of: where a run is done, how often it is looked at, its last bits."""
COMPRESSION = tuple(key.name for key in run_keys() if key.role == "compression")
"""Keys of compression: runs that are alike in all other keys are compared with one another."""
DENSE = "Identity"
SYNCHRONOUS = "Synchronous"  # weights of runs recorded before the key existed, too


def configuration(columns: Sequence[str]) -> list[str]:
    """Return the columns of a `run.parquet` that are keys of its configuration: all before the schema version."""
    return list(columns[: list(columns).index("schema_version")]) if "schema_version" in columns else []


def differing(runs: pd.DataFrame, keys: Iterable[str]) -> list[str]:
    """Return the keys in which runs differ, except for the seed; keys of compression come first."""
    known = [key for key in keys if key in runs and key not in NO_SETTING | {"seed"}]
    found = [key for key in known if len({as_text(value) for value in runs[key].tolist()}) > 1]
    return sorted(found, key=lambda key: COMPRESSION.index(key) if key in COMPRESSION else len(COMPRESSION))


def setting_texts(runs: pd.DataFrame, keys: Iterable[str]) -> list[str]:
    """Return each run's values of the keys in which the runs differ: "forward=TopK(0.1) backward=Quantize(8)".

    >>> runs = pd.DataFrame({"forward": ["Identity", "TopK(0.1)"], "steps": [300, 300], "seed": [0, 1]})
    >>> setting_texts(runs, ["forward", "steps", "seed"])
    ['forward=Identity', 'forward=TopK(0.1)']
    """
    names = differing(runs, keys)
    columns = [
        [f"{name}={as_text(value)}" if as_text(value) else "" for value in runs[name].tolist()] for name in names
    ]
    return [" ".join(filter(None, texts)) for texts in zip(*columns, strict=True)] if names else [""] * len(runs)


def as_text(value: object) -> str:
    """Return a value of a key as it is written on the command line; nothing where it is not given."""
    if value is None or repr(value) in ("<NA>", "nan"):
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if hasattr(value, "tolist"):
        value = value.tolist()
    return str(value)
