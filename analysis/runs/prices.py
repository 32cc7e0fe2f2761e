"""Prices of runs on networks: one row each, with the step, its comparison with dense, and the time to a target."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from raysim.analysis.data import AnalysisError, ReplayError
from raysim.analysis.data.folders import find_runs
from raysim.analysis.data.recording import Recording
from raysim.analysis.data.settings import compared_keys, price_key
from raysim.analysis.runs.estimates import Estimate
from raysim.analysis.runs.job_costs import JobCosts
from raysim.analysis.runs.results import Results
from raysim.analysis.runs.step import PARTS, Replay
from raysim.config.identity import DENSE, as_text
from raysim.network.presets import parse_network
from raysim.network.profile import Profile
from raysim.network.topology import Network
from raysim.quality import MEASURES
from raysim.records import FINISHED, Run
from raysim.records.packs import open_folder
from raysim.storage.places import ListedPath, Place, PlaceError


class Target(NamedTuple):
    """A quality to reach: a measure of `evals.parquet`, and its value."""

    metric: str
    value: float
    higher: bool | None = None
    """True if values above `value` reach it; None to look up a measure that raysim knows by name."""

    def __str__(self) -> str:
        return f"{self.metric} {'>=' if self.from_below else '<='} {self.value:g}"

    @property
    def from_below(self) -> bool:
        """True if values above `value` reach the target."""
        return MEASURES[self.metric].higher if self.higher is None else self.higher

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse a target: "loss=0.5" or "accuracy=0.9"; with a metric of your own "dice>=0.8" or "error<=0.1".

        >>> print(Target.parse("accuracy=0.9"))
        accuracy >= 0.9
        """
        parts = re.fullmatch(r"\s*(\w+)\s*(>=|<=|=)\s*(\S+)\s*", text)
        try:
            number = float(parts[3]) if parts else math.nan
        except ValueError:
            number = math.nan
        if parts is None or not math.isfinite(number) or (parts[2] == "=" and parts[1] not in MEASURES):
            known = ", ".join(f"{name}=" for name in MEASURES)
            raise ReplayError(
                f"`target` must be a measure and a number, as in 'accuracy=0.9' ({known}; of your own 'name>=' or 'name<='), "
                f"but got {text!r}."
            )
        return cls(parts[1], number, None if parts[2] == "=" else parts[2] == ">=")

    def reached(self, values: pd.Series[float]) -> pd.Series[bool]:
        """Return for each value whether it reaches the target."""
        return values >= self.value if self.from_below else values <= self.value


def replay(
    runs: Results | Run | Place | str | Replay | Iterable[Run | Place | str | Replay],
    networks: Network | str | Iterable[Network | str],
    *,
    against: Run | Place | str | Replay | None = None,
    target: Target | str | None = None,
    split: bool = True,
    profile: Path | str | None = None,
) -> pd.DataFrame:
    """Price runs on networks: one row for each run and network, with the seconds and bytes of a mean step.

    Runs of one job given together share their compute and the seconds of their codecs; `Results` share them with all
    runs of their folder. The column `compute` names the source of the compute times. `profile`, a file written by `raysim profile`,
    replaces them. `step_low_s` and `step_high_s` are the ends of the 90 % interval of `step_s`. If replicas exchange in some
    steps only, the mean is over a whole period, `quiet_step_s` and `exchange_step_s` are the seconds of a step without and with
    an exchange, and `exchange_bytes` are the bytes of one exchange; `replica_bytes` is the mean over all steps.

    `against` is a dense run of the same job. It adds the columns `dense_step_s`, its seconds a step; `speedup`, which is
    `dense_step_s` over `step_s`, with the interval `speedup_low` to `speedup_high`; `verdict`, which is "faster", "slower" or
    "not distinguishable"; and `break_even_bps`, the bandwidth below which the codec pays.

    `target` adds the columns `steps_to_target_on` and `_off`, the steps to the first evaluation that reached it with links on
    and off, and `time_to_target_on_s` and `_off_s`, these steps times `step_s`. They are missing if no evaluation reached
    the target. `step_bytes_s` and `step_latency_s` are what bytes and latency add to the step. `split=False` leaves out the
    columns that split the seconds, for thousands of networks.

    With `Results`, all finished runs are priced, under their names there. A run that cannot be priced is left out and named
    in its problems. `against="dense"` compares each run with a dense run equal in all but compression and with the same
    seed; if there is none, with a dense run of the same job and schedule.

    >>> replay("results/none", "100mbps")
    Traceback (most recent call last):
    raysim.analysis.data.ReplayError: There is no run in results/none: it has no run.parquet.
    """
    chosen = [_network(n) for n in ([networks] if isinstance(networks, (Network, str)) else networks)]
    parsed = Target.parse(target) if isinstance(target, str) else target
    if isinstance(runs, Results):
        return _typed(list(_all_rows(runs, chosen, against, parsed, split=split, profile=profile)))
    if against == "dense":
        raise ReplayError(
            "`against` = 'dense' needs the `Results` of `load`, in which each run has a dense counterpart."
        )
    many = [runs] if isinstance(runs, (Run, Place, str, Replay)) else list(runs)
    replays = _together([*many, *([] if against is None else [against])], profile)
    dense = replays.pop() if against is not None else None
    return _typed([row for priced in replays for row in _rows(priced, chosen, dense, parsed, split=split)])


def _together(runs: Sequence[Run | Place | str | Replay], profile: Path | str | None) -> list[Replay]:
    """Return runs priced together; replays among them are returned as they are."""
    fresh = iter(in_company([run for run in runs if not isinstance(run, Replay)], profile=profile))
    return [run if isinstance(run, Replay) else next(fresh) for run in runs]


def _typed(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Return the rows in pandas; columns with missing values keep their type."""
    frame = pd.DataFrame(rows)
    for name in map(str, frame):
        if name.startswith(("steps_to", "dense_steps_to")):
            frame[name] = frame[name].astype("Int64")
        elif name.startswith(("time_to", "dense_time_to", "break_even", "bandwidth_bps", "latency_s")):
            frame[name] = frame[name].astype("Float64")
    return frame


def _all_rows(
    results: Results,
    networks: Sequence[Network],
    against: Run | Place | str | Replay | None,
    target: Target | None,
    *,
    split: bool,
    profile: Path | str | None,
) -> Iterator[dict[str, Any]]:
    fixed = _together([against], profile)[0] if against is not None and against != "dense" else None
    finished = results.runs["run"][results.runs["status"].isin(FINISHED)].tolist()
    replays: dict[str, Replay] = {}
    for run in finished:
        try:
            replays[run] = results.replay(run, profile=profile)
        except ReplayError as error:
            results.complain(str(error))
    partners = dense_partners(results, without=set(finished) - set(replays)) if against == "dense" else {}
    for run, priced in replays.items():
        try:
            dense = replays[partners[run]] if run in partners else fixed
            for row in _rows(priced, networks, dense, target, split=split):
                yield row | {"run": run}
        except ReplayError as error:
            results.complain(str(error))


def dense_partners(results: Results, *, without: Collection[str] = ()) -> dict[str, str]:
    """Return the dense run to compare each finished run with; runs without one are left out.

    It has the same job, engine and schedule; of several, the most similar one in all but compression, then in its seed.
    `without`: runs to leave out, such as those without a price.
    """
    rows = [row for row in results.rows.values() if row["status"] in FINISHED]
    keys = compared_keys(results.keys)
    values = [[as_text(row.get(key)) for key in keys] for row in rows]
    kinds = [(row["job"], price_key(row)) for row in rows]
    dense: dict[tuple[Any, ...], list[int]] = {}
    for i, (row, kind) in enumerate(zip(rows, kinds, strict=True)):
        if row["setting"] == str(DENSE) and str(row["run"]) not in without:
            dense.setdefault(kind, []).append(i)

    def distance(i: int, j: int) -> tuple[int, bool]:
        """Return the number of keys in which two runs differ, and whether their seeds differ."""
        return sum(a != b for a, b in zip(values[i], values[j], strict=True)), rows[i]["seed"] != rows[j]["seed"]

    return {
        str(row["run"]): str(rows[min(dense[kind], key=partial(distance, i))]["run"])
        for i, (row, kind) in enumerate(zip(rows, kinds, strict=True))
        if kind in dense
    }


def _rows(
    priced: Replay, networks: Sequence[Network], dense: Replay | None, target: Target | None, *, split: bool
) -> Iterator[dict[str, Any]]:
    wires = priced.wire_seconds(networks) if split else []  # first, since it prices all that the others ask for
    steps_s = priced.step_s(networks)
    speedups = priced.speedup(dense, networks) if dense is not None else []
    reached = priced.steps_to_target(target) if target else {}
    dense_reached = dense.steps_to_target(target) if target and dense is not None else {}
    for i, network in enumerate(networks):
        step_s = steps_s[i]
        row: dict[str, Any] = {
            "run": str(priced.run.folder),
            "network": repr(network),
            "bandwidth_bps": None if isinstance(network.bandwidth_bps, tuple) else network.bandwidth_bps,
            "latency_s": None if isinstance(network.latency_s, tuple) else network.latency_s,
            "compute": priced.costs.source,
            "priced_steps": len(priced.profiles),
            **step_s.columns("step", "_s"),
            "recorded_step_s": priced.recorded_step_s,
            "steps": priced.num_steps,
            "run_s": priced.num_steps * step_s.value,
            "wire_bytes": float(priced.wire_bytes.mean()),
            "dense_bytes": float(priced.dense_bytes.mean()),
            "tied_bytes": priced.recording.collective_bytes("tied"),
            "replica_bytes": priced.recording.collective_bytes("replica_gradient"),
        }
        row |= _exchange_columns(priced, network)
        if split:
            shares = priced.shares(network)
            row |= {name: float(shares.workers[name].mean()) for name in PARTS}
            row |= {"pipeline_s": shares.pipeline_s, "busiest_link": shares.utilisation}
            row |= {f"step_{name}": value for name, value in wires[i]._asdict().items()}
        if dense is not None:
            row |= _dense_columns(priced, dense, network, speedups[i])
        for prefix, steps_by_mode in (("", reached), ("dense_", dense_reached)):
            seconds = row.get(f"{prefix}step_s", math.nan)
            for mode, steps in steps_by_mode.items():
                row[f"{prefix}steps_to_target_{mode}"] = steps
                row[f"{prefix}time_to_target_{mode}_s"] = None if steps is None else steps * seconds
        yield row


def _exchange_columns(priced: Replay, network: Network) -> dict[str, Any]:
    """Return the seconds without and with an exchange of replicas, if these exchange in some steps only."""
    if not priced.exchanging.any() or priced.exchanging.all():
        return {}
    seconds = priced.step_seconds([network])[0]
    return {
        "quiet_step_s": float(seconds[~priced.exchanging].mean()),
        "exchange_step_s": float(seconds[priced.exchanging].mean()),
        "exchange_bytes": priced.recording.exchange_bytes(),
    }


def _dense_columns(priced: Replay, dense: Replay, network: Network, speedup: Estimate) -> dict[str, Any]:
    even = priced.break_even_bps(dense, network) if priced is not dense else None
    return {
        "dense_step_s": float(dense.step_seconds([network]).mean()),
        **speedup.columns("speedup"),
        "verdict": speedup.verdict,
        "break_even_bps": None if even is None else even.value,
    }


def _network(network: Network | str) -> Network:
    if isinstance(network, Network):
        return network
    try:
        return parse_network(network)
    except ValueError as error:
        raise ReplayError(str(error)) from None


# --- runs priced together: all runs of a job share one price for each kind of work --------------------------------------------------


def in_company(
    runs: Iterable[Run | Place | str],
    *,
    compute: str = "auto",
    profile: Profile | Path | str | None = None,
    **options: Any,
) -> list[Replay]:
    """Return runs ready to be priced; runs of one job share one price for each kind of work.

    `options`: keyword arguments of `Replay`. Raises ReplayError if one of the runs cannot be priced.
    """
    recordings = [Recording(run, clock=compute) for run in runs]
    return _replays(recordings, recordings, profile, options)


def beside(
    runs: Sequence[Run | Place | str],
    folder: Place | str | None = None,
    *,
    most: int | None = None,
    compute: str = "auto",
    profile: Profile | Path | str | None = None,
    **options: Any,
) -> list[Replay]:
    """Return runs ready to be priced with the costs of all finished runs of their jobs in `folder`.

    `folder` defaults to the parent folder of the first run, such as a study's or a folder of results. `most` limits the
    number of other runs; the runs that ended last come first. `options` are keyword arguments of `Replay`.
    Raises ReplayError if one of `runs` cannot be priced, AnalysisError if there is no such folder.
    """
    recordings = [Recording(run, clock=compute) for run in runs]
    own = {str(recording.run.folder.resolve()) for recording in recordings}
    jobs = {recording.job for recording in recordings}
    others: list[Recording] = []
    for other in _runs_in(folder, recordings[0].run.folder):
        if str(other.resolve()) not in own and len(others) != most:
            try:
                run = Run(other)
                if run.status in FINISHED and run.row["job"] in jobs:
                    others.append(Recording(run, clock=compute))
            except ValueError:  # a run that cannot be read or priced is skipped
                continue
    return _replays(recordings, [*recordings, *others], profile, options)


def _replays(
    recordings: Sequence[Recording],
    pooled: Sequence[Recording],
    profile: Profile | Path | str | None,
    options: Mapping[str, Any],
) -> list[Replay]:
    """Return recordings ready to be priced, with the costs of all `pooled` recordings of their jobs."""
    jobs: dict[str, list[Recording]] = {}
    for recording in pooled:
        jobs.setdefault(recording.job, []).append(recording)
    costs = {job: JobCosts(members, profile) for job, members in jobs.items()}
    return [Replay(recording, costs=costs[recording.job], **options) for recording in recordings]


def _runs_in(folder: Place | str | None, run: Place) -> list[Place]:
    """Return the runs at any depth of a folder, or by default those beside a run, the newest first if they are local."""
    if folder is not None:
        try:
            return list(find_runs([open_folder(folder)]).runs.values())
        except PlaceError as error:
            raise AnalysisError(str(error)) from None
    if isinstance(run, ListedPath):
        siblings = run.parent.iterdir() if run.listing.system is None else ()
        return [sibling for sibling in siblings if (sibling / "run.parquet").is_file()]
    files = run.resolve().parent.glob("*/run.parquet")
    return [file.parent for file in sorted(files, key=lambda file: (-file.stat().st_mtime, file))]
