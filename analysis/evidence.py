"""Runs that may be set against each other: alike in all but compression and seed, with what they reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import pandas as pd

from analysis.errors import AnalysisError
from analysis.notations import Method, read_method
from analysis.results import Results
from analysis.settings import COMPRESSION, DENSE, NO_SETTING, differing
from raysim.records import FINISHED

# Data sets of text, whose quality is the loss; of all others it is the accuracy.
LANGUAGE = ("text", "topics", "wikitext2")
METRICS = ("accuracy", "loss")
# What is said to do no harm: half a point of accuracy, or one per cent of the loss.
MARGINS = {"accuracy": 0.5, "loss": 1.0}
UNITS = {"accuracy": "points of accuracy", "loss": "% of loss"}

Mode = Literal["on", "off"]


class Setting(NamedTuple):
    """How links compress: notations of activations, gradients and replica gradients, and whether indices are shared."""

    forward: str = DENSE
    backward: str = DENSE
    replica_gradient: str = DENSE
    shared_indices: bool = False

    def __str__(self) -> str:
        return " ".join(f"{k}={str(v).lower() if v is True else v}" for k, v in self.changes().items()) or "dense"

    def changes(self) -> dict[str, str | bool]:
        """Return the keys of the configuration in which it differs from a dense run."""
        usual = Setting()
        return {key: value for key, value in self._asdict().items() if value != getattr(usual, key)}

    def method(self, direction: str) -> Method | None:
        """Return what it does in a direction ("forward", "backward", "replica_gradient"), read."""
        return read_method(str(getattr(self, direction)))


@dataclass(frozen=True, eq=False)
class Context:
    """Runs that are alike in all but compression and seed.

    `rows` has a row a run: run, setting (a Setting), seed, and accuracy and loss with compression on and off. `measures` are
    quantities that are worked out only where a claim asks for them.
    """

    label: str
    rows: pd.DataFrame
    metric: str = "accuracy"
    margin: float = MARGINS["accuracy"]
    """What does no harm, in `unit`."""
    language: bool = False
    num_replicas: int = 1
    measures: Measures = field(default_factory=lambda: Measures())

    @cached_property
    def settings(self) -> dict[Setting, pd.DataFrame]:
        """The runs of each setting, a row a seed; of runs that repeat a seed the first stands."""
        found: dict[Setting, pd.DataFrame] = {}
        for setting, rows in self.rows.groupby(self.rows["setting"].map(tuple), sort=True):
            found[Setting(*setting)] = rows.drop_duplicates("seed").set_index("seed").sort_index()
        return found

    @property
    def unit(self) -> str:
        """The unit of harm."""
        return UNITS[self.metric]

    def harm(self, worse: pd.Series[Any], worse_mode: Mode, than: pd.Series[Any], than_mode: Mode) -> float:
        """Return how much worse one run's quality is than another's: points of accuracy, or per cent of the loss."""
        one, other = float(worse[f"{self.metric}_{worse_mode}"]), float(than[f"{self.metric}_{than_mode}"])
        if self.metric == "accuracy":
            return 100 * (other - one)
        return 100 * (one / other - 1) if other > 0 else math.nan


@dataclass(frozen=True)
class Measures:
    """What runs are asked beside their quality; each by the names of runs."""

    factor: Callable[[str, str], float] = lambda run, direction: math.nan
    """Dense over wire bytes of a run in a direction."""
    slowdown: Callable[[str, str], float] = lambda run, than: math.nan
    """Per cent by which a step takes longer than one of another run of the same job, on the network asked for."""
    network: str = ""


def contexts(
    results: Results, *, quality: str = "auto", margin: float | None = None, network: str = "1gbps"
) -> list[Context]:
    """Return the runs that are over, apart by all that is not compression or seed.

    A diverged run counts as untrained: accuracy 0, and the loss of its first step. `quality` is "accuracy", "loss", or
    "auto": the loss of language models and the accuracy of all others; `margin` is what of it does no harm, half a point or one
    per cent where not given. Runs without a final evaluation are named in the problems of `results`.
    """
    if quality not in ("auto", *METRICS):
        raise AnalysisError(f"`quality` must be one of auto, {', '.join(METRICS)}, but got {quality!r}.")
    runs = results.runs[results.runs["status"].isin(FINISHED)]
    if runs.empty:
        return []
    keys = [key for key in results.keys if key not in {*COMPRESSION, *NO_SETTING, "seed"} and key in runs]
    groups = runs.groupby([runs[key].map(repr) for key in keys], sort=False) if keys else [("", runs)]
    measures = _measures(results, network)
    found = []
    for _, mine in groups:
        rows = _rows(results, mine)
        if len(rows):
            language = str(mine["data"].iloc[0]) in LANGUAGE if "data" in mine else False
            metric = ("loss" if language else "accuracy") if quality == "auto" else quality
            limit = MARGINS[metric] if margin is None else margin
            replicas = int(mine["num_replicas"].iloc[0]) if "num_replicas" in mine else 1
            found.append(Context(_label(mine.iloc[0], runs, keys), rows, metric, limit, language, replicas, measures))
    return sorted(found, key=lambda context: context.label)


def setting_of(row: Mapping[Any, Any] | pd.Series[Any]) -> Setting:
    """Return how a run of `results.runs` compresses; keys that it does not have are dense."""
    known = {key: row[key] for key in COMPRESSION if key in row and not pd.isna(row[key])}
    forward, backward, replica_gradient = (_alike(str(known.get(key, DENSE))) for key in COMPRESSION[:3])
    return Setting(forward, backward, replica_gradient, bool(known.get("shared_indices", False)))


def _alike(text: str) -> str:
    """Return a notation; a list that gives all boundaries the same one as that one."""
    method = read_method(text)
    if text.startswith("[") and method is not None:
        return str(text[2 : text.index('"', 2)])
    return text


def _rows(results: Results, runs: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for row in (runs.iloc[place] for place in range(len(runs))):
        values = {f"{m}_{mode}": _number(row.get(f"final_{m}_{mode}")) for m in METRICS for mode in ("on", "off")}
        if row["status"] == "diverged":
            loss = _first_loss(results, row["run"])
            results.complain(
                f"The run {row['run']} diverged, and counts as untrained: accuracy 0, the loss of its first step."
            )
            values = {name: 0.0 if name.startswith("accuracy") else loss for name in values}
        if all(math.isnan(value) for value in values.values()):
            results.complain(f"The run {row['run']} has no final evaluation, and is not compared.")
            continue
        rows.append({"run": row["run"], "setting": setting_of(row), "seed": int(row["seed"]), **values})
    return pd.DataFrame(rows)


def _first_loss(results: Results, run: str) -> float:
    losses = results.select([run]).table("steps", ["loss"], [("step", "==", 0)])["loss"]
    return float(losses.iloc[0]) if len(losses) else math.nan


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _label(row: pd.Series[Any], runs: pd.DataFrame, keys: Iterable[str]) -> str:
    """Return what a run is of: its model, its data, and that in which others of the same are not like it."""
    names = [key for key in ("model", "data") if key in runs]
    alike = runs[(runs[names] == row[names]).all(axis=1)]
    telling = [key for key in differing(alike, keys) if key not in COMPRESSION]
    parts = [f"{key}={row[key]}" for key in telling if not (row[key] is None or repr(row[key]) in ("nan", "<NA>"))]
    return ", ".join([" on ".join(str(row[name]) for name in names), *parts])


def _measures(results: Results, network: str) -> Measures:
    from raysim.network.presets import parse_network

    try:
        parsed = parse_network(network)
    except ValueError as error:
        raise AnalysisError(f"`network`: {error}") from None

    def factor(run: str, direction: str) -> float:
        where = [("direction", "==", direction)]
        links = results.select([run]).table("links", ["wire_bytes", "dense_bytes"], where)
        sent = float(links["wire_bytes"].sum())
        return float(links["dense_bytes"].sum()) / sent if sent else math.nan

    def slowdown(run: str, than: str) -> float:
        try:
            (speedup,) = results.replay(run).speedup(results.replay(than), [parsed])
        except ValueError as error:
            results.complain(str(error))
            return math.nan
        return 100 * (1 / speedup.value - 1)

    return Measures(factor, slowdown, repr(parsed))
