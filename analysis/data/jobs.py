"""Jobs: runs that do the same computation, and so share its measured time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from raysim.analysis.data.settings import as_text

Job: TypeAlias = tuple[tuple[str, str], ...]
"""The keys of a configuration that decide the computation of a forward or backward, with their values as text."""

KEYS = (
    "model",
    "data",
    "loss",
    "num_stages",
    "cuts",
    "bottleneck",
    "bottleneck_form",
    "batch_size",
    "num_microbatches",
    "num_replicas",
    "dtype",
    "recompute",
    "threads_per_stage",
    "device_kind",
)
"""Keys of a job, beside the options of its model, its data and its loss. Compression, schedule, optimizer, steps and seed are not."""

FLAGS = ("tf32", "deterministic", "probe")
"""Further keys of a job, if they are on; they are off in runs recorded before these keys existed."""

PRICED = ("schedule", "schedule_rows", "fused_embedding", "engine")
"""Keys in which compared runs must agree, since they decide the price of a step besides its packets. Weights do too, but are
themselves compared: each run is priced with its own."""


def job_of(row: Mapping[Any, Any]) -> Job:
    """Return the job of a run, from its row of `run.parquet`."""
    options = sorted(str(name) for name in row if str(name).startswith(("model.", "data.", "loss.")))
    values = {name: as_text(row.get(name)) for name in (*KEYS, *options)} | {"device_kind": device_kind(row)}
    values |= {name: as_text(row.get(name)).replace("false", "") for name in FLAGS}
    return tuple((name, value) for name, value in values.items() if value)


def device_kind(row: Mapping[Any, Any]) -> str:
    """Return the device that computed: "cpu" or "cuda". Older runs have only the configured `device`."""
    return as_text(row.get("device_kind")) or ("cuda" if row.get("device") == "cuda" else "cpu")


def price_key(row: Mapping[Any, Any]) -> tuple[str, ...]:
    """Return the values of `PRICED`: if these are equal, runs of one job differ in price only by packets and weights."""
    return tuple(as_text(row.get(name)) for name in PRICED)


def titles(jobs: Iterable[Job]) -> dict[Job, str]:
    """Return a short title for each job: model, data, and the values of keys that differ between the given jobs.

    >>> first, second = (("model", "cnn"), ("data", "digits"), ("num_stages", "4")), (("model", "cnn"), ("data", "digits"))
    >>> list(titles([first, second]).values())
    ['cnn on digits, num_stages=4', 'cnn on digits']
    """
    by_job = {job: dict(job) for job in jobs}
    texts = {}
    for job, values in by_job.items():
        others = [other for other in by_job.values() if _subject(other) == _subject(values)]
        names = list(dict.fromkeys(name for other in others for name in other))
        differing = [name for name in names if len({other.get(name, "") for other in others}) > 1]
        short = [name for name in differing if name != "cuts"]  # mostly they follow from the number of stages
        if len({tuple(other.get(name) for name in short) for other in others}) == len(others):
            differing = short
        parts = [f"{name}={values[name]}" for name in differing if name in values]
        texts[job] = ", ".join([_subject(values), *parts])
    return texts


def _subject(values: Mapping[str, str]) -> str:
    return f"{model_of(values)} on {values.get('data', 'data')}"


def model_of(values: Mapping[Any, Any]) -> str:
    """Return the name of a run's model, with its family if it is of transformers."""
    name = str(values.get("model", "a model"))
    if name != "hf":
        return name
    from raysim.config.keys import model_title

    return model_title(name, values.get("model.path"), values.get("model.config"))
