"""From the records of runs to the material of the report's sections."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from raysim.analysis.comparison.choice import safe_set
from raysim.analysis.comparison.contexts import contexts
from raysim.analysis.comparison.samples import sample_harms, sample_sentence
from raysim.analysis.data import ReplayError
from raysim.analysis.data.settings import (
    COMPRESSION,
    Setting,
    as_text,
    candidate_name,
    is_probe,
    job_of,
    setting_of,
    titles,
)
from raysim.analysis.report.material import MODES, Job, Material, Metric, SettingRuns, Spread
from raysim.analysis.runs.estimates import Estimate
from raysim.analysis.runs.prices import dense_partners
from raysim.analysis.runs.results import Results
from raysim.analysis.runs.step import Replay
from raysim.network.topology import Network
from raysim.quality import Measure
from raysim.records import FINISHED

HOME_TRANSPORTS = ("nccl", "gloo")  # of torch.distributed
UNCOMPRESSED = {f"{key}={as_text(value)}" for key, value in Setting()._asdict().items()}  # of a dense run


class Price(NamedTuple):
    """The price of one run's step by network, its speed-up, and the step of the dense run that it is compared with."""

    step_s: Mapping[str, Estimate]
    speedup: Mapping[str, Estimate]
    dense_step_s: Mapping[str, float]
    replay: Replay


class MeanPrice(NamedTuple):
    """The price of a setting by network, as in `SettingRuns`."""

    step_s: Mapping[str, Estimate]
    speedup: Mapping[str, Estimate]
    dense_step_s: Mapping[str, float]


Prices = Mapping[str, Price]
Judged = Mapping[str, Mapping[str, Any]]  # the row of `safe_set`, by run


def gather(
    results: Results,
    networks: Mapping[str, Network],
    compute: str = "auto",
    profile: Path | str | None = None,
    *,
    first: str | None = None,
    transport: str | None = None,
) -> Material:
    """Return the material of the sections; `first`: the initially chosen network, if it is among `networks`.

    `transport` is by default that of the runs' study, see `Results.transport_of`.
    """
    names = list(networks)
    chosen_first = first if first is not None and first in networks else names[0]
    transport = transport or results.transport_of(results.runs["study"].dropna())
    material = Material(results, networks, chosen_first, compute, profile, transport)
    ended = results.runs[results.runs["status"].isin(FINISHED)]
    if not len(ended):
        return material
    chosen = results.select(ended)
    partners = dense_partners(chosen)
    prices = prices_of(chosen, partners, networks, material.options)
    judged = _judged(chosen)
    each = [job_of(row) for row in ended.to_dict("records")]
    jobs = []
    for number, (of_job, title) in enumerate(titles(each).items(), start=1):
        runs = ended[[job == of_job for job in each]]
        job = _job(f"job{number}", title, runs, Metric(chosen.measure_of(runs)), prices, judged, names)
        jobs.append(replace(job, transport=transport, home=_home(job, chosen, partners, networks, material.options)))
    probes = [job for job in jobs if is_probe(job.runs.iloc[0].to_dict())]
    return replace(material, jobs=[job for job in jobs if job not in probes], probes=probes)


def prices_of(
    results: Results,
    partners: Mapping[str, str],
    networks: Mapping[str, Network],
    options: Mapping[str, Any],
    runs: Iterable[str] | None = None,
) -> Prices:
    """Return the price of each run's step, or of `runs` alone, beside the dense runs of `dense_partners`.

    `options` are the keyword arguments of `Results.replay`. A run that cannot be priced is left out, and named in the problems.
    """
    chosen = list(networks.values())
    prices = {}
    for run in results.runs["run"].astype(str) if runs is None else runs:
        try:
            replay = results.replay(run, **options)
            dense = results.replay(partners[run], **options) if run in partners else None
            steps = replay.step_s(chosen)
            speedups = replay.speedup(dense, chosen) if dense is not None else []
            dense_s = dense.step_seconds(chosen).mean(axis=1).tolist() if dense is not None else []
        except ReplayError as error:
            results.complain(str(error))
            continue
        prices[run] = Price(
            dict(zip(networks, steps, strict=True)),
            dict(zip(networks, speedups, strict=False)),
            dict(zip(networks, dense_s, strict=False)),
            replay,
        )
    return prices


def _judged(results: Results) -> Judged:
    """Return the row of `safe_set` that each run is among the evidence of."""
    rows = {
        (row["context"], *(row[key] for key in COMPRESSION)): {str(name): value for name, value in row.items()}
        for row in safe_set(results).to_dict("records")
    }
    by_samples = {
        (row["context"], row["setting"]): sample_sentence(row) for row in sample_harms(results).to_dict("records")
    }
    judged = {}
    for context in contexts(results):
        for run, setting in zip(context.rows["run"], context.rows["setting"], strict=True):
            key = (context.label, *(getattr(setting, name) for name in COMPRESSION))
            if key in rows:
                judged[str(run)] = rows[key] | {"samples": by_samples.get((context.label, str(setting)), "")}
    return judged


def _home(
    job: Job, results: Results, partners: Mapping[str, str], networks: Mapping[str, Network], options: Mapping[str, Any]
) -> dict[str, dict[str, Mapping[str, Estimate]]]:
    """Return the speed-ups of the settings to take home over the transports of torch's own training code."""
    chosen = {setting.name: setting for network in networks if (setting := job.taken_home(network)) is not None}
    speedups: dict[str, dict[str, Mapping[str, Estimate]]] = {name: {} for name in chosen}
    for name, setting in chosen.items():
        for transport in HOME_TRANSPORTS:
            prices = prices_of(results, partners, networks, {**options, "transport": transport}, setting.runs)
            speedups[name][transport] = mean_price(list(prices.values()), networks).speedup
    return speedups


def _job(
    key: str, title: str, runs: pd.DataFrame, metric: Metric, prices: Prices, judged: Judged, networks: Sequence[str]
) -> Job:
    settings = [
        _setting(str(name), rows, metric, prices, judged, networks)
        for name, rows in runs.groupby(_names(runs), sort=False)
    ]
    settings.sort(key=lambda setting: (not setting.dense, setting.wire_bytes))
    costs = next((prices[run].replay.costs for run in runs["run"] if run in prices), None)
    words = ("", "") if costs is None else (costs.method, costs.source)
    return Job(key, title, metric, settings, runs, networks, *words)


def _column(runs: pd.DataFrame, name: str, missing: Any) -> pd.Series[Any]:
    """Return a column; `missing` if records of another version lack it."""
    return runs[name].fillna(missing) if name in runs else pd.Series(missing, runs.index)


def _names(runs: pd.DataFrame) -> pd.Series[str]:
    """Return the name of each run's setting: forward / backward, and the other keys in which it differs from other settings.

    Keys with the value of a dense run are left out.
    """
    rows = runs.to_dict("records")
    if is_probe(rows[0]):
        return pd.Series([candidate_name(row) for row in rows], runs.index)
    shared = set.intersection(*(set(_pairs(str(row["setting"]))) for row in rows))
    names = []
    for row in rows:
        setting = setting_of(row)
        words = ["dense" if setting == Setting() else f"{setting.forward} / {setting.backward}"]
        words += [
            pair
            for pair in _pairs(str(row["setting"]))
            if pair not in shared and pair not in UNCOMPRESSED and pair.split("=")[0] not in ("forward", "backward")
        ]
        names.append(" ".join(words))
    return pd.Series(names, runs.index)


def _pairs(setting: str) -> list[str]:
    """Return the parts of a setting's text: "forward=TopK(0.1) backward=Quantize(8)" has two."""
    return [part for part in re.split(r" (?=[\w.]+=)", setting) if part]


def _setting(
    name: str, runs: pd.DataFrame, metric: Metric, prices: Prices, judged: Judged, networks: Sequence[str]
) -> SettingRuns:
    how = setting_of(runs.iloc[0])
    done = _column(runs, "steps_done", 1).astype(float).clip(lower=1)
    wire, dense = (_column(runs, name, math.nan).astype(float) / done for name in ("wire_bytes", "dense_bytes"))
    well = runs[runs["status"] == "finished"]
    priced = {str(run): prices[run] for run in runs["run"] if run in prices}
    price = mean_price(list(priced.values()), networks)
    return SettingRuns(
        name=name,
        forward=how.forward,
        backward=how.backward,
        dense=how == Setting(),
        runs=tuple(runs["run"].astype(str)),
        seeds=int(_column(runs, "seed", 0).nunique()),
        diverged=int((runs["status"] == "diverged").sum()),
        steps=int(done.max()),
        wire_bytes=float(wire.mean()),
        dense_bytes=float(dense.mean()),
        quality={mode: _spread(well.get(f"final_{metric.name}_{mode}")) for mode in MODES},
        priced=next(iter(priced), None),
        notes=next(iter(priced.values())).replay.notes if priced else (),
        exceeds_dense=next(iter(priced.values())).replay.recording.more_than_dense if priced else None,
        **price._asdict(),
        judged=next((judged[run] for run in runs["run"] if run in judged), {}),
        skill=_skill(well, metric.measure),
    )


def mean_price(prices: Sequence[Price], networks: Iterable[str]) -> MeanPrice:
    """Return the price of a setting, the mean over its runs."""
    names = list(networks)
    against = [price for price in prices if price.speedup]
    step_s = _by_network([price.step_s for price in prices], names)
    speedup = _by_network([price.speedup for price in against], names)
    dense_step_s = {name: float(np.mean([price.dense_step_s[name] for price in against])) for name in names if against}
    for name, dense_s in dense_step_s.items():  # of the mean steps themselves, as the rows show them
        speedup[name] = speedup[name].at(dense_s / step_s[name].value)
    return MeanPrice(step_s, speedup, dense_step_s)


def _by_network(values: Sequence[Mapping[str, Estimate]], networks: Sequence[str]) -> dict[str, Estimate]:
    """Return the mean over a setting's runs: their prices share all but their bytes, so the ends of intervals average too."""
    if not values:
        return {}
    return {
        network: Estimate(*np.mean([estimates[network] for estimates in values], axis=0).tolist())
        for network in networks
    }


def _skill(runs: pd.DataFrame, measure: Measure) -> float:
    """Return the mean skill of runs with compression on; nan if they do not record the quality by chance."""
    columns = (f"final_{measure.name}_on", f"chance_{measure.name}")
    if not measure.points or not {*columns} <= {*runs}:
        return math.nan
    pairs = runs[[*columns]].astype(float).dropna().to_numpy()
    return float(np.mean([measure.skill(value, chance) for value, chance in pairs])) if len(pairs) else math.nan


def _spread(values: pd.Series[float] | None) -> Spread:
    known = pd.Series(dtype=float) if values is None else values.astype(float).dropna()
    return Spread(float(known.mean()), float(known.std()), len(known))
