"""Families of models that differ only in size, with the harm of each setting at each size."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from raysim.analysis.comparison.choice import settings
from raysim.analysis.data import AnalysisError
from raysim.analysis.data.settings import compared_keys, model_of
from raysim.analysis.runs.results import Results
from raysim.config.identity import as_text, plain
from raysim.scaling import FEWEST
from raysim.units import format_parameters

SIZE_KEYS = {
    *("steps", "epochs", "batch_size", "data.train_samples", "optimizer.learning_rate", "optimizer.warmup_steps"),
    *("num_stages", "cuts", "model.path"),
}
"""Keys that may differ between sizes, besides whole numbers among a model's options; tokens and stages follow from some of them."""
ALIKE = 1.5  # factor within which numbers of tokens a parameter count as equal
PROPORTION, CUTS = "tokens a parameter", "stages"


class Size(NamedTuple):
    """A size at which a family was trained."""

    parameters: int
    tokens: float
    """Predictions trained on, over all steps."""
    stages: int


@dataclass(frozen=True, eq=False)
class SizeFamily:
    """Jobs that differ only in size."""

    label: str
    trained: bool
    """True if the weights were trained before."""
    rows: dict[str, dict[Size, Mapping[Any, Any]]] = field(default_factory=dict)
    """The row of `settings` by setting and size."""

    @cached_property
    def sizes(self) -> list[Size]:
        """The sizes, smallest first."""
        return sorted({size for rows in self.rows.values() for size in rows})

    @property
    def parameters(self) -> list[int]:
        """The different numbers of parameters, smallest first."""
        return sorted({size.parameters for size in self.sizes})

    @cached_property
    def quantities(self) -> tuple[str, ...]:
        """The quantities, other than parameters, that take several values at one size."""
        several = {PROPORTION: False, CUTS: False}
        for parameters in self.parameters:
            own = [size for size in self.sizes if size.parameters == parameters]
            tokens = [size.tokens for size in own]
            several[PROPORTION] |= max(tokens) > ALIKE * min(tokens)
            several[CUTS] |= len({size.stages for size in own}) > 1
        return tuple(name for name, varies in several.items() if varies)

    def usual(self, parameters: float) -> Size:
        """Return the usual tokens and stages at this size: fitted tokens, and the stages of the nearest size."""
        parameters_of, tokens_of = (
            np.log([getattr(size, name) for size in self.sizes]) for name in ("parameters", "tokens")
        )
        slope, level = np.polyfit(parameters_of, tokens_of, 1)
        nearest = min(self.sizes, key=lambda size: (abs(math.log(size.parameters / parameters)), size.stages))
        return Size(round(parameters), math.exp(level + slope * math.log(parameters)), nearest.stages)

    def point(self, size: Size) -> list[float]:
        """Return the logarithms of the quantities of a size."""
        logs = {
            PROPORTION: math.log(size.tokens / size.parameters),
            CUTS: math.log(max(size.stages - 1, 1)),
        }
        return [math.log(size.parameters), *(logs[name] for name in self.quantities)]


def size_families(results: Results, *, quality: str = "auto", within: float | None = None) -> list[SizeFamily]:
    """Return the families of at least three sizes, and the harms of their settings.

    Raises AnalysisError if there is none, or if a setting has no harm, or two, at one of a family's sizes.
    """
    judged = settings(results, within, quality=quality)
    judged = judged[judged["seeds"] > 0]
    if judged.empty:
        raise AnalysisError("A law of size needs compressed and dense runs of the same seeds, but there are none.")
    tokens = _tokens_of_sample(results)
    keys = compared_keys(results.keys, besides=SIZE_KEYS)
    families: dict[tuple[str, ...], SizeFamily] = {}
    jobs: dict[tuple[str, ...], Mapping[Any, Any]] = {}
    for row in judged.to_dict("records"):
        runs = [results.rows[run] for run in row["runs"]]
        facts = runs[0]
        key = tuple(_without_size(name, facts.get(name)) for name in keys)
        trained = any(plain(facts.get(name)) is not None for name in ("model.path", "parent"))
        family = families.setdefault(key, SizeFamily("", trained))
        jobs[key] = facts
        size = _size(runs, tokens.get(facts["job"], 1.0))
        by_size = family.rows.setdefault(str(row["setting"]), {})
        if size in by_size:
            raise AnalysisError(
                f"{row['setting']} has two harms at {format_parameters(size.parameters)} parameters, tokens and stages being equal "
                f"({by_size[size]['context']}; {row['context']}): load the runs of one of them."
            )
        by_size[size] = row
    labels = _labels(jobs, keys)
    enough = [
        SizeFamily(labels[key], family.trained, family.rows)
        for key, family in families.items()
        if len(family.parameters) >= FEWEST
    ]
    if not enough:
        raise AnalysisError(_too_few(families, keys))
    for family in enough:
        _check_complete(family)
    return sorted(enough, key=lambda family: family.label)


def _tokens_of_sample(results: Results) -> dict[str, float]:
    """Return the predictions for each sample, by job, where evaluations recorded them."""
    evals = results.evals.dropna(subset=["predictions", "samples"])
    rates = evals["predictions"] / evals["samples"]
    jobs = evals["run"].astype(str).map({run: row["job"] for run, row in results.rows.items()})
    return {str(job): float(rate) for job, rate in rates.groupby(jobs).first().items()}


def _size(runs: Sequence[Mapping[Any, Any]], tokens: float) -> Size:
    """Return the size of the runs of a setting: a diverged one has fewer steps than planned."""
    run, steps = runs[0], max(each["steps_done"] for each in runs)
    parameters = plain(run.get("num_parameters"))
    if parameters is None:
        raise AnalysisError(
            f"The run {run['run']} records no `num_parameters`: it was trained by an earlier raysim. Train it again."
        )
    return Size(
        int(parameters), round(tokens * run["batch_size"] * (plain(run.get("steps")) or steps)), int(run["num_stages"])
    )


def _without_size(name: str, value: Any) -> str:
    """Return the value of a key without the whole numbers of a model's options, as a text."""
    value = plain(value)
    if not name.startswith("model."):
        return as_text(value)
    if isinstance(value, str) and value.startswith("{"):
        value = json.loads(value)
    if isinstance(value, Mapping):
        return repr(sorted((key, inner) for key, inner in value.items() if not _is_count(inner)))
    return "" if _is_count(value) else as_text(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and float(value).is_integer()


def _labels(jobs: Mapping[tuple[str, ...], Mapping[Any, Any]], keys: Iterable[str]) -> dict[tuple[str, ...], str]:
    """Return a label for each family: its model and data, and the keys in which families differ."""
    differing = [i for i in range(len(next(iter(jobs)))) if len({key[i] for key in jobs}) > 1]
    names = list(keys)
    labels = {}
    for key, row in jobs.items():
        title = f"{model_of(row)} on {row.get('data')}"
        labels[key] = ", ".join(
            [title, *(f"{names[i]}={key[i]}" for i in differing if names[i] not in ("model", "data"))]
        )
    return labels


def _too_few(families: Mapping[tuple[str, ...], SizeFamily], keys: Iterable[str]) -> str:
    """Return why there is no family of enough sizes."""
    sizes = sorted({parameters for family in families.values() for parameters in family.parameters})
    named = ", ".join(map(format_parameters, sizes))
    differing = [name for name, values in zip(keys, zip(*families, strict=True), strict=True) if len(set(values)) > 1]
    if len(sizes) >= FEWEST:
        return (
            f"A law of size needs {FEWEST} sizes that differ in size alone, but those of {named} also differ in "
            f"{', '.join(f'`{name}`' for name in differing)}."
        )
    return f"A law of size needs at least {FEWEST} sizes of one family, but got {len(sizes)}: {named}."


def _check_complete(family: SizeFamily) -> None:
    for setting, rows in family.rows.items():
        for size in family.sizes:
            if size not in rows:
                raise AnalysisError(
                    f"{setting} has no finished runs to compare with dense at {format_parameters(size.parameters)} "
                    f"({family.label}): train it there, or leave that size out."
                )
