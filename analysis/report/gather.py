"""From the records of runs to the material of the report's sections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from raysim.analysis.data.settings import candidate_name, differing, is_probe, titles
from raysim.analysis.report.material import MODES, JobRuns, Material, MeanQuality, SettingRuns
from raysim.analysis.runs.estimates import Estimate
from raysim.analysis.runs.results import Results
from raysim.config.identity import DENSE, Setting, as_text
from raysim.network.costs import Expected, FleetCosts
from raysim.network.profile import Profile
from raysim.network.topology import Network
from raysim.quality import Measure

HOME_TRANSPORTS = ("nccl", "gloo")  # of torch.distributed
_DENSE = {key: as_text(value) for key, value in DENSE._asdict().items()}


def gather(
    results: Results,
    networks: Iterable[Network],
    compute: str | None = None,
    profile: Profile | Path | str | None = None,
    *,
    first: str | None = None,
    transport: str | None = None,
    costs: FleetCosts | None = None,
) -> Material:
    """Return the material of the sections; `first`: the initially chosen network, if it is among `networks`.

    `compute`, `profile` and `transport` are by default those of the runs' study, see `Results.pricing_of`.
    `costs`: money and churn.
    """
    by_name = {repr(network): network for network in networks}
    chosen = first if first is not None and first in by_name else next(iter(by_name))
    options = results.pricing_of(results.runs, compute=compute, profile=profile, transport=transport)
    material = Material(results, by_name, chosen, options, costs)
    runs = material.finished.runs
    if not len(runs):
        return material
    jobs = []
    for i, (name, title) in enumerate(titles(runs.to_dict("records")).items(), start=1):
        job = _job(f"job{i}", title, runs[runs["job"] == name], material)
        jobs.append(replace(job, home=_home(job, material), costs=costs, expected=_expected(job, material)))
    probes = [job for job in jobs if is_probe(job.runs.iloc[0].to_dict())]
    return replace(material, jobs=[job for job in jobs if job not in probes], probes=probes)


def _home(job: JobRuns, material: Material) -> dict[str, dict[str, Mapping[str, Estimate]]]:
    """Return the speed-ups of the settings to reuse, over the transports of torch's own training code."""
    home = {}
    for setting in job.on_some_network(job.taken_home):
        prices = {name: material.price(setting.runs, transport=name) for name in HOME_TRANSPORTS}
        home[setting.name] = {name: price.get("speedup", {}) for name, price in prices.items()}
    return home


def _expected(job: JobRuns, material: Material) -> dict[tuple[str, str], Expected]:
    """Return the step of dense and of the setting to use on each network, with its churn and money."""
    if material.costs is None or not job.priced:
        return {}
    expected = {}
    for name, network in material.networks.items():
        chosen = job.recommended(name) or job.fastest(name)
        for setting in {chosen, job.fastest_dense(name) or chosen}:
            steps = material.priced(setting.runs, methodcaller("expected", material.costs, network))
            expected[name, setting.name] = Expected.mean(steps)
    return expected


def _job(key: str, title: str, runs: pd.DataFrame, material: Material) -> JobRuns:
    measure = material.finished.measure_of(runs)
    groups = runs.groupby(_names(runs, material.results.keys), sort=False)
    settings = [_setting(str(name), rows, measure, material) for name, rows in groups]
    settings.sort(key=lambda setting: (not setting.dense, setting.wire_bytes))
    costs = next((material.replay(setting.priced).costs for setting in settings if setting.priced), None)
    words = ("", "") if costs is None else (costs.method, costs.source)
    return JobRuns(key, title, measure, settings, runs, list(material.networks), *words, material.options["transport"])


def _column(runs: pd.DataFrame, name: str, missing: Any) -> pd.Series[Any]:
    """Return a column; `missing` if records of another version lack it."""
    return runs[name].fillna(missing) if name in runs else pd.Series(missing, runs.index)


def _names(runs: pd.DataFrame, keys: Iterable[str]) -> pd.Series[str]:
    """Return the name of each run's setting: forward / backward, and the other keys in which it differs from other settings.

    Keys with the value of a dense run are left out.
    """
    rows = runs.to_dict("records")
    if is_probe(rows[0]):
        return pd.Series([candidate_name(row) for row in rows], runs.index)
    others = [key for key in differing(runs, keys) if key not in ("forward", "backward")]
    names = []
    for row in rows:
        setting = Setting.of(row)
        words = ["dense" if setting == DENSE else f"{setting.forward} / {setting.backward}"]
        values = {key: as_text(row[key]) for key in others}
        words += [f"{key}={value}" for key, value in values.items() if value not in ("", _DENSE.get(key))]
        names.append(" ".join(words))
    return pd.Series(names, runs.index)


def _setting(name: str, runs: pd.DataFrame, measure: Measure, material: Material) -> SettingRuns:
    how = Setting.of(runs.iloc[0].to_dict())
    done = _column(runs, "steps_done", 1).astype(float).clip(lower=1)
    wire, dense = (_column(runs, name, math.nan).astype(float) / done for name in ("wire_bytes", "dense_bytes"))
    well = runs[runs["status"] == "finished"]
    names = tuple(runs["run"].astype(str))
    return SettingRuns(
        name=name,
        forward=how.forward,
        backward=how.backward,
        dense=how == DENSE,
        runs=names,
        seeds=int(_column(runs, "seed", 0).nunique()),
        diverged=int((runs["status"] == "diverged").sum()),
        wire_bytes=float(wire.mean()),
        dense_bytes=float(dense.mean()),
        quality={mode: _mean(well.get(f"final_{measure.name}_{mode}")) for mode in MODES},
        judged=next((material.judged[run] for run in names if run in material.judged), {}),
        skill=_skill(well, measure),
        **material.price(names),
    )


def _skill(runs: pd.DataFrame, measure: Measure) -> float:
    """Return the mean skill of runs with compression on; nan if they do not record the quality by chance."""
    columns = (f"final_{measure.name}_on", f"chance_{measure.name}")
    if not measure.points or not {*columns} <= {*runs}:
        return math.nan
    pairs = runs[[*columns]].astype(float).dropna().to_numpy()
    return float(np.mean([measure.skill(value, chance) for value, chance in pairs])) if len(pairs) else math.nan


def _mean(values: pd.Series[float] | None) -> MeanQuality:
    known = pd.Series(dtype=float) if values is None else values.astype(float).dropna()
    return MeanQuality(float(known.mean()), float(known.std()))
