"""From the records of runs to what the report's sections draw on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from analysis.choice import safe_set
from analysis.errors import ReplayError
from analysis.evidence import LANGUAGE, contexts, setting_of
from analysis.evidence import Setting as How
from analysis.pricing import Replay
from analysis.replays import dense_partners
from analysis.report.material import ACCURACY, FIRST, LOSS, MODES, Job, Material, Metric, Setting, Spread
from analysis.results import Results
from analysis.settings import COMPRESSION
from raysim.network.network import Network
from raysim.records import FINISHED


class Price(NamedTuple):
    """What a step of one run takes, by network, and over the same compute with dense packets, where there is a dense run."""

    step_s: Mapping[str, float]
    speedup: Mapping[str, float]
    notes: Sequence[str]


Prices = Mapping[str, Price]
Judged = Mapping[str, Mapping[str, Any]]  # the row of `safe_set`, by run


def gather(results: Results, networks: Mapping[str, Network], compute: str = "wall") -> Material:
    """Return what the sections draw on."""
    names = list(networks)
    material = Material(results, networks, FIRST if FIRST in networks else names[0], compute)
    ended = results.runs[results.runs["status"].isin(FINISHED)]
    if not len(ended):
        return material
    chosen = results.select(ended)
    prices = _prices(chosen, networks, compute)
    judged = _judged(chosen)
    jobs = [
        _job(f"job{number}", str(title), rows, prices, judged, names)
        for number, (title, rows) in enumerate(ended.groupby(_titles(ended), sort=False), start=1)
    ]
    return replace(material, jobs=jobs)


def _prices(results: Results, networks: Mapping[str, Network], compute: str) -> Prices:
    """Return what a step of each run takes; a run that cannot be priced is left out, and named in the problems."""
    chosen = list(networks.values())
    partners = dense_partners(results)
    dense: dict[str, Replay] = {}  # each is set against many runs
    found = {}
    for run in results.runs["run"].astype(str):
        try:
            one = dense[run] if run in dense else Replay(results.path(run), compute=compute)
            step_s = one.step_seconds(chosen).mean(axis=1)
            rows = {"step_s": step_s}
            if run in partners:
                other = partners[run]
                if other not in dense:
                    dense[other] = one if other == run else Replay(results.path(other), compute=compute)
                rows["speedup"] = one.step_seconds(chosen, dense[other]).mean(axis=1) / step_s
            by_network = {name: dict(zip(networks, values.tolist(), strict=True)) for name, values in rows.items()}
            found[run] = Price(by_network["step_s"], by_network.get("speedup", {}), one.notes)
        except ReplayError as error:
            results.complain(str(error))
    return found


def _judged(results: Results) -> Judged:
    """Return the row of `safe_set` that each run is among the evidence of."""
    rows = {
        (row["context"], *(row[key] for key in COMPRESSION)): {str(name): value for name, value in row.items()}
        for row in safe_set(results).to_dict("records")
    }
    found = {}
    for context in contexts(results):
        for run, setting in zip(context.rows["run"], context.rows["setting"], strict=True):
            key = (context.label, *(getattr(setting, name) for name in COMPRESSION))
            if key in rows:
                found[str(run)] = rows[key]
    return found


def _titles(runs: pd.DataFrame) -> pd.Series[str]:
    """Return what model on what data each run trains, in words: with options where two of one name differ in them."""
    words = _column(runs, "model", "a model").astype(str) + " on " + _column(runs, "data", "data").astype(str)
    options = runs[[name for name in runs if str(name).startswith(("model.", "data."))]].astype(str)
    for _, rows in options.groupby(words):
        for name in options:
            if rows[name].nunique() > 1:
                words.loc[rows.index] += f", {name}=" + rows[name]
    return words


def _job(key: str, title: str, runs: pd.DataFrame, prices: Prices, judged: Judged, networks: Sequence[str]) -> Job:
    metric = LOSS if str(_column(runs, "data", "").iloc[0]) in LANGUAGE else ACCURACY
    settings = [
        _setting(str(name), rows, metric, prices, judged, networks)
        for name, rows in runs.groupby(_names(runs), sort=False)
    ]
    settings.sort(key=lambda one: (not one.dense, one.wire_bytes))
    return Job(key, title, metric, settings, runs, networks)


def _column(runs: pd.DataFrame, name: str, missing: Any) -> pd.Series[Any]:
    """Return a column; `missing` where records of another version do not have it."""
    return runs[name].fillna(missing) if name in runs else pd.Series(missing, runs.index)


def _names(runs: pd.DataFrame) -> pd.Series[str]:
    """Return what tells each run's setting from the job's others: forward / backward, and in what else they differ."""
    pairs = [set(_pairs(str(setting))) for setting in runs["setting"]]
    shared = set.intersection(*pairs)
    names = []
    for place, setting in enumerate(runs["setting"]):
        how = setting_of(runs.iloc[place])
        words = ["dense" if how == How() else f"{how.forward} / {how.backward}"]
        words += [
            pair for pair in _pairs(str(setting)) if pair not in shared and pair.split("=")[0] not in COMPRESSION[:2]
        ]
        names.append(" ".join(words))
    return pd.Series(names, runs.index)


def _pairs(setting: str) -> list[str]:
    """Return the parts of a setting's text: "forward=TopK(0.1) backward=Quantize(8)" has two."""
    return [part for part in re.split(r" (?=[\w.]+=)", setting) if part]


def _setting(
    name: str,
    runs: pd.DataFrame,
    metric: Metric,
    prices: Prices,
    judged: Judged,
    networks: Sequence[str],
) -> Setting:
    how = setting_of(runs.iloc[0])
    done = _column(runs, "steps_done", 1).astype(float).clip(lower=1)
    wire, dense = (_column(runs, name, math.nan).astype(float) / done for name in ("wire_bytes", "dense_bytes"))
    well = runs[runs["status"] == "finished"]
    mine = {str(run): prices[run] for run in runs["run"] if run in prices}
    return Setting(
        name=name,
        forward=how.forward,
        backward=how.backward,
        dense=how == How(),
        runs=tuple(runs["run"].astype(str)),
        seeds=int(_column(runs, "seed", 0).nunique()),
        diverged=int((runs["status"] == "diverged").sum()),
        steps=int(done.max()),
        wire_bytes=float(wire.mean()),
        dense_bytes=float(dense.mean()),
        quality={mode: _spread(well.get(f"final_{metric.name}_{mode}")) for mode in MODES},
        priced=next(iter(mine), None),
        notes=next(iter(mine.values())).notes if mine else (),
        step_s=_by_network([one.step_s for one in mine.values()], networks),
        speedup=_by_network([one.speedup for one in mine.values() if one.speedup], networks),
        judged=next((judged[run] for run in runs["run"] if run in judged), {}),
    )


def _by_network(values: Sequence[Mapping[str, float]], networks: Sequence[str]) -> dict[str, Spread]:
    return {network: _spread(pd.Series([one[network] for one in values])) for network in networks} if values else {}


def _spread(values: pd.Series[float] | None) -> Spread:
    known = pd.Series(dtype=float) if values is None else values.astype(float).dropna()
    return Spread(float(known.mean()), float(known.std()), len(known))
