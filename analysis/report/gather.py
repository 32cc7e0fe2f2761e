"""From the records of runs to what the report's sections draw on."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from analysis.report.material import ACCURACY, FIRST, LOSS, MODES, Job, Material, Metric, Setting, Spread

if TYPE_CHECKING:
    from analysis import Results

ENDED = ("finished", "diverged")
METHODS = ("forward", "backward", "replica_gradient")
TEXT = ("text", "topics", "wikitext2")


def gather(results: Results, networks: Sequence[str]) -> Material:
    """Return what the sections draw on; raises ReplayError for a network that is none."""
    from analysis import replay, safe_set

    problems: list[str] = []
    runs = results.runs
    ended = runs[runs["status"].isin(ENDED)] if len(runs) else runs
    if not len(ended):
        return Material(results, networks, networks[0], problems=problems)
    chosen = results.select(ended["run"])
    prices = replay(chosen, networks, against="dense", split=False)
    judged = safe_set(chosen)
    first = FIRST if FIRST in networks else networks[0]
    jobs = []
    for key, rows in ended.groupby(_job_key(ended), sort=False):
        number = len(jobs) + 1
        jobs.append(_job(f"job{number}", str(key), rows, chosen, prices, judged, networks))
    return Material(results, networks, first, jobs, problems)


def _job_key(runs: pd.DataFrame) -> pd.Series[str]:
    """Return what model on what data each run trains, in words: with options where two of one name differ in them."""
    words = runs["model"].astype(str) + " on " + runs["data"].astype(str)
    options = runs[[name for name in runs if str(name).startswith(("model.", "data."))]].astype(str)
    for title, rows in options.groupby(words):
        for name in options:
            if rows[name].nunique() > 1:
                words[words.index.isin(rows.index)] += f", {name}=" + rows[name]
    return words


def _job(
    key: str,
    title: str,
    runs: pd.DataFrame,
    results: Results,
    prices: pd.DataFrame,
    judged: pd.DataFrame,
    networks: Sequence[str],
) -> Job:
    metric = LOSS if str(runs["data"].iloc[0]) in TEXT else ACCURACY
    names = _names(runs)
    by_run = {str(run): rows for run, rows in prices.groupby("run", sort=False)} if len(prices) else {}
    settings = []
    for name, rows in runs.groupby(names, sort=False):
        verdicts = judged[judged["setting"].isin(rows["setting"])] if len(judged) else judged
        settings.append(_setting(str(name), rows, metric, by_run, verdicts, networks))
    settings.sort(key=lambda one: (not one.dense, one.wire_bytes))
    return Job(key, title, metric, settings, runs, networks)


def _names(runs: pd.DataFrame) -> pd.Series[str]:
    """Return what tells each run's setting from the job's others: its methods, and what else differs."""
    names = []
    shared: set[str] | None = None
    for setting in runs["setting"]:
        pairs = set(_pairs(str(setting)))
        shared = pairs if shared is None else shared & pairs
    for row in runs.to_dict("records"):
        methods = " / ".join(_method(row.get(name)) for name in ("forward", "backward"))
        words = ["dense" if _dense(row) else methods]
        for pair in _pairs(str(row["setting"])):
            if pair not in (shared or ()) and pair.split("=", 1)[0] not in ("forward", "backward"):
                words.append(pair)
        names.append(" ".join(words))
    return pd.Series(names, runs.index)


def _pairs(setting: str) -> list[str]:
    """Return the parts of a setting's text: "forward=TopK(0.1) backward=Quantize(8)" has two."""
    return [part for part in re.split(r" (?=[\w.]+=)", setting) if part]


def _method(value: Any) -> str:
    return "Identity" if value is None or (isinstance(value, float) and pd.isna(value)) else str(value)


def _dense(row: Mapping[Any, Any]) -> bool:
    return all(_method(row.get(name)) == "Identity" for name in METHODS)


def _setting(
    name: str,
    runs: pd.DataFrame,
    metric: Metric,
    prices: Mapping[str, pd.DataFrame],
    judged: pd.DataFrame,
    networks: Sequence[str],
) -> Setting:
    first = runs.iloc[0].to_dict()
    done = runs["steps_done"].astype(float).clip(lower=1)
    well = runs[runs["status"] == "finished"]
    mine = [prices[run] for run in runs["run"] if run in prices]
    frame = pd.concat(mine) if mine else pd.DataFrame()
    return Setting(
        name=name,
        forward=_method(first.get("forward")),
        backward=_method(first.get("backward")),
        dense=_dense(first),
        runs=tuple(runs["run"].astype(str)),
        diverged=int((runs["status"] == "diverged").sum()),
        steps=int(done.max()),
        wire_bytes=float((runs["wire_bytes"].astype(float) / done).mean()),
        dense_bytes=float((runs["dense_bytes"].astype(float) / done).mean()),
        quality={mode: _spread(well.get(f"final_{metric.name}_{mode}")) for mode in MODES},
        step_s=_by_network(frame, "step_s", networks),
        speedup=_by_network(frame, "speedup", networks),
        judged=judged.iloc[0].to_dict() if len(judged) else {},
    )


def _by_network(frame: pd.DataFrame, column: str, networks: Sequence[str]) -> dict[str, Spread]:
    if column not in frame:
        return {}
    known = frame[frame[column].notna()]
    return {network: _spread(known.loc[known["network"] == network, column]) for network in networks} if len(known) else {}


def _spread(values: pd.Series[float] | None) -> Spread:
    known = pd.Series(dtype=float) if values is None else values.astype(float).dropna()
    return Spread(float(known.mean()), float(known.std()), len(known))
