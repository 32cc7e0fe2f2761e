"""Settings of runs: methods, compression, jobs, and texts of the keys in which runs differ.

Methods in records are parsed without their classes, since records may come from a raysim with other methods.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from raysim.config import keys_of, run_keys
from raysim.notation import check_size, hide_paths
from raysim.storage.texts import parse_json

if TYPE_CHECKING:
    import pandas as pd


class Method(NamedTuple):
    """A name with its arguments, which may be methods; leading required arguments are positional."""

    name: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __repr__(self) -> str:
        written = [*map(repr, self.arguments), *(f"{name}={value!r}" for name, value in self.options)]
        return f"{self.name}({', '.join(written)})" if written else self.name

    @property
    def inner(self) -> Method | None:
        """The wrapped method: TopK(0.1) of ErrorFeedback(TopK(0.1))."""
        return next((argument for argument in self.arguments if isinstance(argument, Method)), None)

    @property
    def strength(self) -> float | None:
        """The number that orders methods of one name, strongest first: a density, bits or a rank."""
        first = self.arguments[0] if self.arguments else None
        return float(first) if isinstance(first, (int, float)) and not isinstance(first, bool) else None


def read_method(text: str) -> Method | None:
    """Return the method of a notation; None if it is invalid, too long, or a list with different ones for the boundaries.

    >>> read_method("ErrorFeedback(TopK(0.1))").inner.strength
    0.1
    >>> str(read_method("ErrorFeedback(mycodecs:Strided(4))"))
    'ErrorFeedback(mycodecs:Strided(4))'
    >>> read_method('["TopK(0.1)", "Identity"]') is None
    True
    """
    if text.startswith("["):
        try:
            each = set(parse_json(text))
        except (ValueError, TypeError):
            return None
        return read_method(str(each.pop())) if len(each) == 1 else None
    try:
        check_size(text)
        source, paths = hide_paths(text)
        method = _build(ast.parse(source, mode="eval").body, paths)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return method if isinstance(method, Method) else None


def _build(node: ast.expr, paths: Mapping[str, str]) -> Any:
    match node:
        case ast.Name(id=name):
            return Method(paths.get(name, name))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            options = tuple((str(keyword.arg), _build(keyword.value, paths)) for keyword in keywords)
            return Method(paths.get(name, name), tuple(_build(argument, paths) for argument in arguments), options)
        case ast.List() | ast.Tuple():
            return tuple(_build(element, paths) for element in node.elts)
    return ast.literal_eval(node)


def strength_of(method: Method | None, name: str) -> float | None:
    """Return the strength of a method if it is this codec without options, else None.

    >>> strength_of(read_method("TopK(0.1)"), "TopK"), strength_of(read_method("TopK(0.1, per='tensor')"), "TopK")
    (0.1, None)
    """
    return method.strength if method is not None and method.name == name and not method.options else None


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
    """Return a notation, or the common notation of a list that is the same for all boundaries."""
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
    """Return a key's value as written on the command line; empty if it is not given."""
    value = plain(value)
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# --- jobs: runs that do the same computation, and so share its measured time ------------------------------------------------


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
        short = [name for name in differing if name != "cuts"]  # usually these follow from the number of stages
        if len({tuple(other.get(name) for name in short) for other in others}) == len(others):
            differing = short
        parts = [f"{name}={values[name]}" for name in differing if name in values]
        texts[job] = ", ".join([_subject(values), *parts])
    return texts


def _subject(values: Mapping[str, str]) -> str:
    return f"{model_of(values)} on {values.get('data', 'data')}"


def model_of(values: Mapping[Any, Any]) -> str:
    """Return the name of a run's model, with its family if it is from transformers."""
    name = str(values.get("model", "a model"))
    if name != "hf":
        return name
    from raysim.config.keys import model_title

    return model_title(name, values.get("model.path"), values.get("model.config"))


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
    words = [links] if links != DENSE else []
    if replicas != DENSE:
        words.append(f"replicas {replicas}" if both else replicas)
    return ", ".join(words) or "dense"
