"""Runs on networks: a row each, with what a step takes there, what it is set against, and when a quality is reached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd

from analysis.errors import ReplayError
from analysis.evidence import Setting, contexts
from analysis.pricing import PARTS, Replay
from analysis.results import Results
from analysis.targets import Target
from raysim.network.network import Network
from raysim.network.presets import parse_network
from raysim.places import Place
from raysim.records import FINISHED, Run


def replay(
    runs: Results | Run | Place | str | Replay | Iterable[Run | Place | str | Replay],
    networks: Network | str | Iterable[Network | str],
    *,
    against: Run | Place | str | Replay | None = None,
    target: Target | str | None = None,
    split: bool = True,
) -> pd.DataFrame:
    """Return what each run would take on each network: a row a run and network, seconds and bytes of a mean step.

    `against` is a run of the same model without compression: then `dense_step_s` has this run's compute with that one's
    packets, `speedup` is dense over compressed, and the codec pays below `break_even_bps`. With `target` the columns
    `steps_to_target_on` and `_off` count the steps to the first evaluation, with links on and off, that reached it, and
    `time_to_target_on_s` and `_off_s` are these times `step_s`; missing where it was not reached. `split=False` leaves out
    where the seconds went, for thousands of networks.

    Of `Results`, all runs that are over are priced, under the names that they have there; one that cannot be is left out and
    named in its problems. `against="dense"` sets each against the dense run of its seed, alike in all else.

    >>> replay("results/none", "100mbps")
    Traceback (most recent call last):
    analysis.errors.ReplayError: There is no run in results/none: it has no run.parquet.
    """
    chosen = [_network(n) for n in ([networks] if isinstance(networks, (Network, str)) else networks)]
    wanted = Target.parse(target) if isinstance(target, str) else target
    if isinstance(runs, Results):
        return _typed(list(_all_rows(runs, chosen, against, wanted, split=split)))
    if against == "dense":
        raise ReplayError("`against` = 'dense' needs `Results`, in which each run finds its dense one: see `load`.")
    many = [runs] if isinstance(runs, (Run, Place, str, Replay)) else runs
    prepared = [run if isinstance(run, Replay) else Replay(run) for run in many]
    if isinstance(against, (Run, Place, str)):
        against = Replay(against, compute=prepared[0].compute if prepared else "wall")
    return _typed([row for one in prepared for row in _rows(one, chosen, against, wanted, split=split)])


def _typed(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows in pandas; what may be missing keeps its type."""
    frame = pd.DataFrame(rows)
    for name in frame:
        if str(name).startswith(("steps_to", "dense_steps_to")):
            frame[name] = frame[name].astype("Int64")
        elif str(name).startswith(("time_to", "dense_time_to", "break_even", "step_sd")):
            frame[name] = frame[name].astype("Float64")
    return frame


def _all_rows(
    results: Results,
    networks: Sequence[Network],
    against: Run | Place | str | Replay | None,
    target: Target | None,
    *,
    split: bool,
) -> Iterator[dict[str, Any]]:
    partners = dense_partners(results) if against == "dense" else {}
    fixed = Replay(against) if isinstance(against, (Run, Place, str)) and against != "dense" else against
    for run in results.runs["run"][results.runs["status"].isin(FINISHED)]:
        try:
            dense = Replay(results.path(partners[run])) if run in partners else None
            other = dense if against == "dense" else fixed
            assert not isinstance(other, (Run, Place, str))
            for row in _rows(Replay(results.path(run)), networks, other, target, split=split):
                yield row | {"run": run}
        except ReplayError as error:
            results.complain(str(error))


def dense_partners(results: Results) -> dict[str, str]:
    """Return for each run the dense one of its seed, alike in all but compression; runs without one are left out."""
    found: dict[str, str] = {}
    for context in contexts(results):
        dense = context.settings.get(Setting(), pd.DataFrame({"run": []}))["run"]
        rows = context.rows[context.rows["seed"].isin(dense.index)]
        found |= {run: str(dense[seed]) for run, seed in zip(rows["run"], rows["seed"], strict=True)}
    return found


def _rows(
    one: Replay, networks: Sequence[Network], dense: Replay | None, target: Target | None, *, split: bool
) -> Iterator[dict[str, Any]]:
    seconds = one.step_seconds(networks)
    dense_seconds = one.step_seconds(networks, dense) if dense is not None else None
    count = seconds.shape[1]
    reached = one.steps_to_target(target) if target else {}
    dense_reached = dense.steps_to_target(target) if target and dense is not None else {}
    for index, network in enumerate(networks):
        step_s = float(seconds[index].mean())
        row: dict[str, Any] = {
            "run": str(one.run.folder),
            "network": repr(network),
            "priced_steps": count,
            "step_s": step_s,
            "step_sd_s": float(seconds[index].std(ddof=1)) if count > 1 else None,
            "step_min_s": float(seconds[index].min()),
            "step_max_s": float(seconds[index].max()),
            "recorded_step_s": one.recorded_step_s,
            "steps": one.num_steps,
            "run_s": one.num_steps * step_s,
            "wire_bytes": float(one.wire_bytes.mean()),
            "dense_bytes": float(one.dense_bytes.mean()),
            "tied_bytes": one.num_replicas * float(one.tied["wire_bytes"].sum()),
            "replica_bytes": one.num_replicas * float(one.averaged["wire_bytes"].sum()),
        }
        if split:
            parts = one.split(network)
            row |= {name: float(parts.workers[name].mean()) for name in PARTS}
            row |= {
                "pipeline_s": parts.pipeline_s,
                "outside_s": parts.outside_s,
                "busiest_link": parts.utilisation,
            }
        if dense is not None and dense_seconds is not None:
            dense_step_s = float(dense_seconds[index].mean())
            row |= {
                "dense_step_s": dense_step_s,
                "speedup": dense_step_s / step_s,
                "break_even_bps": one.break_even_bps(dense, network),
            }
        for mode, steps in reached.items():
            row[f"steps_to_target_{mode}"] = steps
            row[f"time_to_target_{mode}_s"] = None if steps is None else steps * step_s
        for mode, steps in dense_reached.items():
            row[f"dense_steps_to_target_{mode}"] = steps
            row[f"dense_time_to_target_{mode}_s"] = None if steps is None else steps * row["dense_step_s"]
        yield row


def _network(network: Network | str) -> Network:
    if isinstance(network, Network):
        return network
    try:
        return parse_network(network)
    except ValueError as error:
        raise ReplayError(str(error)) from None
