"""Comparing runs: the keys in which they differ, as texts, and the candidates of probes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from raysim.config import keys_of, run_keys
from raysim.config.identity import IDENTITY, as_text, job_keys
from raysim.config.keys import model_title

if TYPE_CHECKING:
    import pandas as pd

NO_SETTING = keys_of("place", "observation", "arithmetic")
"""Keys outside of a comparison: where a run is done, how often it is observed, its last bits."""
COMPRESSION = tuple(key.name for key in run_keys() if key.role == "compression")
"""Keys of compression: runs that are alike in all other keys are compared with one another."""
PRICED = ("schedule", "schedule_rows", "fused_embedding", "engine")
"""Keys in which compared runs must agree, since they decide the price of a step besides its packets. Weights do too, but are
themselves compared: each run is priced with its own."""


def compared_keys(keys: Iterable[str], *, besides: Container[str] = ()) -> list[str]:
    """Return the keys that compared runs share: all except compression, `NO_SETTING`, the seed, and `besides`."""
    return [key for key in keys if key not in {*COMPRESSION, *NO_SETTING, "seed"} and key not in besides]


def differing(runs: pd.DataFrame, keys: Iterable[str]) -> list[str]:
    """Return the keys in which runs differ, except for the seed; keys of compression come first."""
    known = [key for key in keys if key in runs and key not in NO_SETTING | {"seed"}]
    several = [key for key in known if len({as_text(value) for value in runs[key].tolist()}) > 1]
    return sorted(several, key=lambda key: COMPRESSION.index(key) if key in COMPRESSION else len(COMPRESSION))


def price_key(row: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the values of `PRICED`: if these are equal, runs of one job differ in price only by packets and weights."""
    return tuple(as_text(row.get(name)) for name in PRICED)


def titles(rows: Iterable[Mapping[Any, Any]]) -> dict[str, str]:
    """Return a short title for the job of each run: model, data, and the values of keys that differ between these jobs.

    >>> first, second = ({"job": str(n), "model": "cnn", "data": "digits", "num_stages": n} for n in (1, 4))
    >>> list(titles([first, second]).values())
    ['cnn on digits, num_stages=1', 'cnn on digits, num_stages=4']
    """
    by_job: dict[str, dict[str, str]] = {}
    for row in rows:
        by_job.setdefault(str(row["job"]), job_keys(row))
    texts = {}
    for job, values in by_job.items():
        others = [other for other in by_job.values() if _subject(other) == _subject(values)]
        names = list(dict.fromkeys(name for other in others for name in other))
        differing = [name for name in names if len({other.get(name, "") for other in others}) > 1]
        short = [name for name in differing if name != "cuts"]  # usually these follow from the number of stages
        if len({tuple(other.get(name) for name in short) for other in others}) == len(others):
            differing = short
        parts = [f"{name}={values[name]}" for name in differing if name in values]
        texts[job] = ", ".join([_subject(values), *parts])
    return texts


def _subject(values: Mapping[str, str]) -> str:
    return f"{model_of(values)} on {values['data']}"


def model_of(values: Mapping[Any, Any]) -> str:
    """Return the name of a run's model, with its family if it is from transformers."""
    return model_title(str(values.get("model", "a model")), values.get("model.path"), values.get("model.config"))


# --- candidates of `raysim.probe` among recorded runs ----------------------------------------------------------------------


def is_probe(row: Mapping[Any, Any]) -> bool:
    """Return whether a run is a candidate of a probe: it has no losses of its own, so no quality."""
    return str(row.get("probe")) == "True"


def candidate_name(row: Mapping[Any, Any]) -> str:
    """Return the name of a candidate, from its run.

    >>> candidate_name({"forward": "TopK(0.1)", "replica_gradient": "SignSGD", "num_stages": 2})
    'TopK(0.1), replicas SignSGD'
    """
    both = int(row["num_stages"]) > 1
    links, replicas = (str(row[key]) for key in ("forward", "replica_gradient"))
    words = [links] if links != IDENTITY else []
    if replicas != IDENTITY:
        words.append(f"replicas {replicas}" if both else replicas)
    return ", ".join(words) or "dense"
