"""Which settings are safe, and on which networks they pay: against dense runs alike in all else, seed by seed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.errors import AnalysisError, ReplayError
from analysis.estimates import Estimate
from analysis.evidence import Setting, contexts
from analysis.replays import dense_partners
from analysis.results import Results
from analysis.statistics import MIN_SEEDS, paired_interval
from raysim.network.network import Network
from raysim.network.presets import parse_network

VERDICTS = {"supported": "safe", "contradicted": "harmful", "undecided": "undecided"}


def safe_set(
    results: Results, within: float | None = None, *, quality: str = "auto", confidence: float = 0.95
) -> pd.DataFrame:
    """Return a row a setting: how much worse than dense it is, and whether that is surely less than `within`.

    `harm` is the mean over seeds of the difference in final quality with compression on, in points of accuracy or per cent of
    the loss, and `harm_low` to `harm_high` its interval; `within` is half a point or one per cent where not given. A setting
    is "safe" where the whole interval lies below `within`, "harmful" where it lies above, and "undecided" else and with
    fewer than three seeds. A diverged run counts as untrained.
    """
    if within is not None and not isinstance(within, (int, float)):
        raise AnalysisError(
            f"`within` must be a number, in points of accuracy or per cent of the loss, but got {within!r}: write 1 for 1 %."
        )
    rows = []
    for context in contexts(results, quality=quality, margin=within):
        dense = context.settings.get(Setting())
        for setting, runs in context.settings.items():
            if setting == Setting():
                continue
            seeds = [] if dense is None else [seed for seed in runs.index if seed in dense.index]
            harms = [context.harm(runs.loc[s], "on", dense.loc[s], "on") for s in seeds if dense is not None]
            harms = [harm for harm in harms if not math.isnan(harm)]
            interval = paired_interval(harms, confidence)
            verdict = interval.verdict(context.margin, "below") if len(harms) >= MIN_SEEDS else "undecided"
            rows.append(
                _named(context.label, setting, results, runs)
                | {
                    "seeds": len(harms),
                    "harm": interval.mean,
                    "harm_low": interval.low,
                    "harm_high": interval.high,
                    "unit": context.unit,
                    "within": context.margin,
                    "confidence": confidence,
                    "verdict": VERDICTS[verdict],
                }
            )
    return pd.DataFrame(rows, columns=[*_COLUMNS, *_SAFE])


def break_even(
    results: Results, network: Network | str = "1gbps", *, compute: str = "auto", profile: Path | str | None = None
) -> pd.DataFrame:
    """Return a row a setting: the bandwidth below which its step is faster than a dense one, all else of `network` kept.

    Compute is that of the job, as for `replay`. `break_even_bps`, the median over seeds, is 0 where the setting never pays,
    infinity where it always does, missing where the network has no one bandwidth. Between `break_even_low_bps` and
    `break_even_high_bps`, its 90 % interval, the two are not distinguishable. `step_s`, `dense_step_s` and `speedup` are on the
    network itself, with the interval and the verdict that `replay` has. Runs that cannot be priced are named in the problems
    of `results`.
    """
    chosen = parse_network(network) if isinstance(network, str) else network
    partners = dense_partners(results)
    rows = []
    for context in contexts(results):
        for setting, runs in context.settings.items():
            if setting == Setting():
                continue
            found, steps, speedups = [], [], []
            for run in (str(run) for run in runs["run"] if run in partners):
                try:
                    one, dense = (
                        results.replay(name, compute=compute, profile=profile) for name in (run, partners[run])
                    )
                    even = one.break_even_bps(dense, chosen)
                    steps.append([float(each.step_seconds([chosen]).mean()) for each in (one, dense)])
                    speedups += one.speedup(dense, [chosen])
                except ReplayError as error:
                    results.complain(str(error))
                    continue
                found += [] if even is None else [even]
            if not runs["run"].isin(list(partners)).any():
                continue
            even = Estimate(*(float(np.median(values)) for values in zip(*found, strict=True))) if found else UNKNOWN
            step_s, dense_step_s = np.mean(steps, axis=0) if steps else (math.nan, math.nan)
            speedup = (
                Estimate(*(float(np.mean(values)) for values in zip(*speedups, strict=True))) if steps else UNKNOWN
            )
            rows.append(
                _named(context.label, setting, results, runs)
                | {
                    "network": repr(chosen),
                    "seeds": len(steps),
                    "break_even_bps": even.value,
                    "break_even_low_bps": even.low,
                    "break_even_high_bps": even.high,
                    "pays": _pays(even),
                    "step_s": step_s,
                    "dense_step_s": dense_step_s,
                    "speedup": dense_step_s / step_s,
                    "speedup_low": speedup.low,
                    "speedup_high": speedup.high,
                    "verdict": speedup.verdict if steps else None,
                }
            )
    return pd.DataFrame(rows, columns=[*_COLUMNS, *_EVEN])


UNKNOWN = Estimate(math.nan, math.nan, math.nan)
_COLUMNS = ("context", "setting", "forward", "backward", "replica_gradient", "shared_indices", "compression_factor")
_SAFE = ("seeds", "harm", "harm_low", "harm_high", "unit", "within", "confidence", "verdict")
_EVEN = (
    *("network", "seeds", "break_even_bps", "break_even_low_bps", "break_even_high_bps", "pays"),
    *("step_s", "dense_step_s", "speedup", "speedup_low", "speedup_high", "verdict"),
)


def _named(context: str, setting: Setting, results: Results, runs: pd.DataFrame) -> dict[str, Any]:
    factors = results.runs["compression_factor"][results.runs["run"].isin(runs["run"])]
    return {"context": context, "setting": str(setting), **setting._asdict(), "compression_factor": factors.mean()}


def _pays(even: Estimate) -> str | None:
    """Return where a setting pays, in a word: what the interval leaves open is not distinguishable."""
    if math.isnan(even.value):
        return None
    if math.isinf(even.low):
        return "always"
    if even.high == 0:
        return "never"
    return "below" if even.low > 0 else "not distinguishable"
