"""Which settings are safe, and on which networks they pay: against dense runs alike in all else, seed by seed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from analysis.errors import ReplayError
from analysis.evidence import Setting, contexts
from analysis.pricing import Replay
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


def break_even(results: Results, network: Network | str = "1gbps", *, compute: str = "wall") -> pd.DataFrame:
    """Return a row a setting: the bandwidth below which its step is faster than with dense packets, all else of `network` kept.

    `break_even_bps` is the median over seeds, between `break_even_low_bps` and `break_even_high_bps`: 0 where it never pays,
    infinity where it always does, missing where the network has no one bandwidth.
    `compute` is as for `Replay`. Runs that cannot be priced are named in
    the problems of `results`.
    """
    chosen = parse_network(network) if isinstance(network, str) else network
    rows = []
    for context in contexts(results):
        dense = context.settings.get(Setting())
        for setting, runs in context.settings.items():
            if setting == Setting() or dense is None:
                continue
            found = []
            for seed in (seed for seed in runs.index if seed in dense.index):
                try:
                    one, other = (Replay(results.path(str(r.loc[seed, "run"])), compute=compute) for r in (runs, dense))
                    bps = one.break_even_bps(other, chosen)
                except ReplayError as error:
                    results.complain(str(error))
                    continue
                found += [] if bps is None else [bps]
            middle = float(np.median(found)) if found else math.nan
            rows.append(
                _named(context.label, setting, results, runs)
                | {
                    "network": repr(chosen),
                    "seeds": len(found),
                    "break_even_bps": middle,
                    "break_even_low_bps": min(found, default=math.nan),
                    "break_even_high_bps": max(found, default=math.nan),
                    "pays": _pays(middle),
                }
            )
    return pd.DataFrame(rows, columns=[*_COLUMNS, *_EVEN])


_COLUMNS = ("context", "setting", "forward", "backward", "replica_gradient", "shared_indices", "compression_factor")
_SAFE = ("seeds", "harm", "harm_low", "harm_high", "unit", "within", "confidence", "verdict")
_EVEN = ("network", "seeds", "break_even_bps", "break_even_low_bps", "break_even_high_bps", "pays")


def _named(context: str, setting: Setting, results: Results, runs: pd.DataFrame) -> dict[str, Any]:
    factors = results.runs["compression_factor"][results.runs["run"].isin(runs["run"])]
    return {"context": context, "setting": str(setting), **setting._asdict(), "compression_factor": factors.mean()}


def _pays(bps: float) -> str | None:
    if math.isnan(bps):
        return None
    return "always" if math.isinf(bps) else "below" if bps else "never"
