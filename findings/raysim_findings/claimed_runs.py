"""Comparable runs as claims see them: with their bytes and step times, which are computed only if a claim needs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from raysim.analysis.comparison.contexts import ComparedRuns, contexts
from raysim.analysis.data import AnalysisError
from raysim.analysis.data.folders import USUAL_TRANSPORT, over
from raysim.analysis.runs.estimates import Estimate
from raysim.analysis.runs.results import Results
from raysim.config.identity import plain
from raysim.network.presets import parse_network
from raysim.quality import is_language

UNPRICED = Estimate(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Quantities:
    """Quantities of runs besides their quality, each a function of the names of runs."""

    factor: Callable[[str, str], float] = lambda run, direction: math.nan
    """Dense over wire bytes of a run in a direction."""
    step_bytes: Callable[[str], float] = lambda run: math.nan
    """Bytes that a run sends in a step, the mean over its steps."""
    values: Callable[[str], float] = lambda run: math.nan
    """Dense values over values sent, as an adaptive method of replica gradients chose them."""
    slowdown: Callable[[str, str], Estimate] = lambda run, than: UNPRICED
    """Per cent by which a step takes longer than a step of another run of the same job on `network`, with the price's interval."""
    network: str = ""


@dataclass(frozen=True, eq=False)
class ClaimedRuns(ComparedRuns):
    """Comparable runs, with the quantities that claims compare besides quality."""

    language: bool = False
    num_replicas: int = 1
    quantities: Quantities = field(default_factory=Quantities)


def claimed_runs(
    results: Results, *, quality: str, margin: float | None, network: str | None = None, transport: str | None = None
) -> list[ClaimedRuns]:
    """Return the comparable runs of `raysim.analysis.comparison.contexts`; step times are compared on `network` over `transport`."""
    rows = {row["run"]: row for row in results.runs.to_dict("records")}
    claimed = []
    for runs in contexts(results, quality=quality, margin=margin):
        first, studies = rows[runs.rows["run"].iloc[0]], runs.rows["study"].dropna()
        chosen = results.network_of(studies) if network is None else network
        claimed.append(
            ClaimedRuns(
                **{each.name: getattr(runs, each.name) for each in fields(runs)},
                language=is_language(first),
                num_replicas=int(plain(first.get("num_replicas")) or 1),
                quantities=_quantities(results, chosen, results.pricing_of(runs.rows, transport=transport)),
            )
        )
    return claimed


def _quantities(results: Results, network: str, pricing: Mapping[str, Any]) -> Quantities:
    try:
        parsed = parse_network(network)
    except ValueError as error:
        raise AnalysisError(f"`network`: {error}") from None

    def factor(run: str, direction: str) -> float:
        where = [("direction", "==", direction)]
        links = results.select([run]).table("links", ["wire_bytes", "dense_bytes"], where)
        sent = float(links["wire_bytes"].sum())
        return float(links["dense_bytes"].sum()) / sent if sent else math.nan

    def step_bytes(run: str) -> float:
        (row,) = results.runs[results.runs["run"] == run].to_dict("records")
        return float(row["wire_bytes"]) / row["steps_done"] if row["steps_done"] else math.nan

    def values(run: str) -> float:
        where = [("where", "==", "replica_gradient")]
        factors = results.select([run]).table("decisions", ["factor"], where)["factor"].dropna()
        return 1 / float((1 / factors).mean()) if len(factors) else math.nan

    def slowdown(run: str, than: str) -> Estimate:
        try:
            replay, reference = (results.replay(name, **pricing) for name in (run, than))
            (speedup,) = replay.speedup(reference, [parsed])
        except ValueError as error:
            results.complain(str(error))
            return UNPRICED
        return Estimate(*(100 * (1 / times - 1) for times in (speedup.value, speedup.high, speedup.low)))

    named = "" if pricing["transport"] == USUAL_TRANSPORT else f" {over(pricing['transport'])}"
    return Quantities(factor, step_bytes, values, slowdown, f"{parsed!r}{named}")
