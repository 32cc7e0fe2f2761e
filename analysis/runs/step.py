"""The price of a recorded run's step on any network, without training again.

A run's `actions.parquet` holds the bytes of every packet of its profiled steps, and the seconds of every action. Bytes are the
run's own; seconds are the job's, pooled over its runs (see `raysim.analysis.runs.job_costs`). The simulator combines both
with a network. Only training steps are priced, not evaluations or checkpoints. All figures are seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysim.analysis.data import ReplayError
from raysim.analysis.data.recording import Recording
from raysim.analysis.data.settings import PRICED
from raysim.analysis.data.work import Floats
from raysim.analysis.runs.estimates import BOUNDS, Estimate, crossing
from raysim.analysis.runs.job_costs import JobCosts, priced_profiles, resampled_profiles
from raysim.network.collectives import EXCHANGES
from raysim.network.costs import Expected, FleetCosts, expected_step
from raysim.network.prices import (
    WireSeconds,
    averaging_words,
    overlapped_steps,
    wire_seconds,
    with_model_error,
)
from raysim.network.profile import Profile
from raysim.network.recorded import mean_profile
from raysim.network.simulate import Mixture, break_even_bps, simulate, step_seconds
from raysim.network.timeline import Timeline, WorkerTime
from raysim.network.timeline_views import busiest_share, trace_events
from raysim.network.topology import FREE, Network, Placement
from raysim.network.transport import calibrated_transport
from raysim.records import Run
from raysim.schedules import StepsOnEnd
from raysim.storage.places import Place

if TYPE_CHECKING:
    from raysim.analysis.runs.prices import Target

LOWEST_BPS, HIGHEST_BPS = 1e5, 1e12  # limits of the search for a break-even
PARTS = WorkerTime._fields[2:]


@dataclass(frozen=True, eq=False)
class StepShares:
    """Shares of the seconds of a mean step on one network."""

    workers: pd.DataFrame
    """One row for each worker: its stages, and the seconds of `PARTS`, which add up to the step."""
    pipeline_s: float
    """From the first action to the last."""
    utilisation: float
    """Share of the step in which the busiest direction between two hosts, or the busiest port in collectives, moved bytes."""
    critical_s: dict[str, float]
    """Seconds of each kind on the critical path: the most that a speed-up of that kind could save."""


class Replay:
    """A recorded run, ready to be priced on any network.

    Bytes are the run's own, step by step. The seconds of compute, codecs and updates are the job's: `costs`, pooled over recordings
    of the job, or by default over this run alone. `transport`: "ray", "nccl", "gloo" or "bare"; its bytes, trips and host
    seconds do not depend on the engine and load of the recording. `averaging`: how replicas average over it, such as
    "ring/25MiB". `compute` and `profile` make a `Recording` and `JobCosts` if these are not given.

    >>> Replay("results/none")
    Traceback (most recent call last):
    raysim.analysis.data.ReplayError: There is no run in results/none: it has no run.parquet.
    """

    def __init__(
        self,
        run: Run | Place | str | Recording,
        *,
        costs: JobCosts | None = None,
        compute: str = "auto",
        profile: Profile | Path | str | None = None,
        transport: str = "ray",
        averaging: str | None = None,
    ) -> None:
        try:
            self.transport = calibrated_transport(transport, averaging)
        except ValueError as error:
            raise ReplayError(str(error)) from None
        self.recording = run if isinstance(run, Recording) else Recording(run, clock=compute)
        self.costs = costs if costs is not None else JobCosts([self.recording], profile)
        recording = self.recording
        self.run, self.row, self.schedule, self.rows = recording.run, recording.row, recording.schedule, recording.rows
        self.num_stages, self.num_microbatches = recording.num_stages, recording.num_microbatches
        self.num_replicas = recording.num_replicas
        self._step_s: dict[Network, Floats] = {}
        self._resampled_s: dict[tuple[Network, ...], Floats] = {}
        self.overheads = self.transport.host.overheads(self.num_workers)
        self.profiles = priced_profiles(recording, self.costs, self.transport, self.num_workers)

    def __repr__(self) -> str:
        return f"Replay({str(self.run.folder)!r})"

    @property
    def num_workers(self) -> int:
        """Number of workers over all replicas, each on its own host if the network has as many."""
        return self.num_replicas * len(self.rows)

    @property
    def num_steps(self) -> int:
        """Number of completed steps of the run."""
        return len(self.recording.steps)

    @property
    def recorded_step_s(self) -> float:
        """Mean recorded seconds of the priced steps, on the machine of the recording."""
        steps = self.recording.steps
        return float(steps[steps["step"].isin(self.profiles)]["seconds"].mean())

    @property
    def wire_bytes(self) -> Floats:
        """Bytes of all packets of each priced step, without gradients of tied parameters."""
        return np.array([float(profile.wire_bytes.sum()) for profile in self.profiles.values()])

    @property
    def dense_bytes(self) -> Floats:
        """Bytes of the tensors in these packets, uncompressed."""
        return np.array([float(profile.dense_bytes.sum()) for profile in self.profiles.values()])

    @cached_property
    def resampled(self) -> list[Profile]:
        """The mean step at the estimate, then at each resample of the prices."""
        return resampled_profiles(self.recording, self.costs, self.mean_profile, self.overheads, list(self.profiles))

    @property
    def notes(self) -> list[str]:
        """Limits of the figures, one sentence each."""
        notes = [f"Transport {self.transport}."]
        if not self.costs.knows_updates:
            notes.append(
                "The optimiser's update is not in the price: this version of the records does not have its seconds."
            )
        if isinstance(self.schedule, StepsOnEnd):
            notes.append(
                f"{self.row['weights']}: a step is priced as one of many without a flush, from the end of the step before to its own. "
                "The stages of raysim's engines wait for one another between steps, so recorded seconds are longer."
            )
        if self.recording.compress_from > self.recording.first_step:
            notes.append(
                f"Priced are the compressed steps, from `compress_from` = {self.recording.compress_from} on; those before were dense, "
                "and count as compressed in the seconds of a whole run and to a target."
            )
        low, high = self.wire_bytes.min(), self.wire_bytes.max()
        if high > 1.01 * low:
            notes.append(f"The packets of a step varied between {low:,.0f} and {high:,.0f} bytes; times are means.")
        if self.row.get("exchange_delay"):
            notes.append(
                f"An exchange of replicas may last {self.row['exchange_delay']} steps more: of a step's seconds the part that these "
                "hide is left out, but its shares by worker and the break-even are those of exchanges that are waited for."
            )
        if (sentence := self.recording.more_than_dense) is not None:
            notes.append(sentence)
        if self.num_replicas > 1:
            known = "by the transfers recorded"
            if self.transport.averaging.algorithm != "direct" and self.exchange_profile.gradient_bytes.all():
                known = "by the bytes recorded"
            if self.recording.knows_totals_alone:
                known = "and the bytes recorded are spread evenly over rounds and peers, as the run has no table of transfers"
            notes.append(
                f"{self.num_replicas} replicas average their gradients {averaging_words(self.exchange_profile)}, {known}."
            )
        return notes

    def placement(self, network: Network) -> Placement:
        """Return the hosts of the workers: spread evenly over the network's hosts, or one each if it names none."""
        return Placement.spread(self.num_workers, network.num_hosts)

    def step_seconds(self, networks: Sequence[Network]) -> Floats:
        """Return the seconds of every priced step on every network: shape (networks, steps)."""
        fresh = [network for network in dict.fromkeys(networks) if network not in self._step_s]
        if fresh:
            delay = int(self.row.get("exchange_delay") or 0)
            profiles = list(self.profiles.values())
            seconds = overlapped_steps(self._seconds, profiles, fresh, delay, self.interval, self.recording.owner)
            self._step_s.update(zip(fresh, seconds, strict=True))
        return np.stack([self._step_s[network] for network in networks])

    def expected(self, costs: FleetCosts, network: Network) -> Expected:
        """Return a mean step with the churn and money of `costs`."""
        kinds = [(1 / len(self.profiles), timeline) for timeline in self.timelines(network)]
        return expected_step(costs, float(self.step_seconds([network]).mean()), kinds, period=self.interval)

    def wire_seconds(self, networks: Sequence[Network]) -> list[WireSeconds]:
        """Return by network the seconds that bytes and latency add to a mean step."""
        return wire_seconds(lambda chosen: self.step_seconds(chosen).mean(axis=1), networks)

    @cached_property
    def exchange_profile(self) -> Profile:
        """The priced step in which replicas average the most gradients."""
        return max(self.profiles.values(), key=lambda profile: float(profile.bucketed_bytes.sum()))

    @cached_property
    def exchanging(self) -> NDArray[np.bool_]:
        """True for each priced step in which replicas exchange something."""
        return np.array(
            [bool((profile.transfers["direction"] == EXCHANGES[0]).any()) for profile in self.profiles.values()]
        )

    @property
    def interval(self) -> float:
        """Steps from one exchange of replicas to the next, among those priced; 1 without replicas."""
        return len(self.profiles) / max(1, int(self.exchanging.sum())) if self.num_replicas > 1 else 1.0

    def step_s(self, networks: Sequence[Network]) -> list[Estimate]:
        """Return by network the seconds of a mean step."""
        means, resampled = self.step_seconds(networks).mean(axis=1), self.resampled_seconds(networks)
        return [Estimate.of(float(mean), values) for mean, values in zip(means, resampled, strict=True)]

    def resampled_seconds(self, networks: Sequence[Network]) -> Floats:
        """Return the seconds of a step for each resample of the recordings: shape (networks, resamples).

        Resamples of two runs with the same costs are paired. They include the error of the network model, equal for all
        runs.
        """
        key = tuple(networks)
        if key not in self._resampled_s:
            seconds = self._seconds(self.resampled, [FREE, *networks])
            mean = self.step_seconds([FREE, *networks]).mean(axis=1, keepdims=True)
            drawn = mean * seconds[:, 1:] / seconds[:, :1]
            self._resampled_s[key] = with_model_error(drawn[1:], drawn[:1])
        return self._resampled_s[key]

    def speedup(self, dense: Replay, networks: Sequence[Network]) -> list[Estimate]:
        """Return by network the speed-up of a step over the step of `dense`, a run of the same job and costs."""
        self._check_alike(dense)
        means = dense.step_seconds(networks).mean(axis=1) / self.step_seconds(networks).mean(axis=1)
        each = dense.resampled_seconds(networks) / self.resampled_seconds(networks)
        return [Estimate.of(float(mean), values) for mean, values in zip(means, each, strict=True)]

    def _seconds(self, profiles: Sequence[Profile], networks: Sequence[Network]) -> Floats:
        try:
            return step_seconds(self.schedule, profiles, networks)
        except ValueError as error:
            raise ReplayError(str(error)) from None

    def timelines(self, network: Network) -> Iterator[Timeline]:
        """Yield the simulated timeline of every priced step."""
        for seed, profile in enumerate(self.profiles.values()):
            yield simulate(self.schedule, profile, network, placement=self.placement(network), seed=seed)

    def shares(self, network: Network) -> StepShares:
        """Return the breakdown of a step's seconds on `network`, mean over the priced steps."""
        parts = np.zeros((self.num_workers, len(PARTS)))
        pipeline_s = utilisation = 0.0
        critical: dict[str, float] = {}
        for timeline in self.timelines(network):
            parts += [[getattr(worker, name) for name in PARTS] for worker in timeline.workers()]
            pipeline_s += timeline.pipeline_s
            utilisation += busiest_share(timeline)
            for kind, seconds in timeline.explain().items():
                critical[kind] = critical.get(kind, 0.0) + seconds
        count = len(self.profiles)
        workers = pd.DataFrame(parts / count, columns=list(PARTS))
        per = len(self.rows)
        stages = [
            [s for s, worker in enumerate(self.recording.owner) if worker == w % per] for w in range(self.num_workers)
        ]
        workers.insert(0, "worker", range(self.num_workers))
        workers.insert(1, "stages", [", ".join(map(str, of_worker)) for of_worker in stages])
        return StepShares(
            workers=workers,
            pipeline_s=pipeline_s / count,
            utilisation=utilisation / count,
            critical_s={kind: seconds / count for kind, seconds in critical.items()},
        )

    def steps_to_target(self, target: Target) -> dict[str, int | None]:
        """Return the steps to the first evaluation that reached `target`, by mode: links "on" and "off"; None if none did.

        A branch counts its own steps, not its parent's. The resolution is `evaluate_every_steps`, the interval between evaluations.
        """
        evals, folder = self.recording.evals, self.run.folder
        if not len(evals):
            raise ReplayError(
                f"The run in {folder} has no evaluations to find {target} in: it is {self.row.get('status')}."
            )
        if target.metric not in evals or evals[target.metric].isna().all():
            raise ReplayError(
                f"The run in {folder} does not measure {target.metric}. It has {', '.join(self.run.measures)}."
            )
        reached = evals[target.reached(evals[target.metric])]
        first = {mode: reached["step"][reached["mode"] == mode].min() for mode in ("on", "off")}
        begun = self.recording.first_step
        return {mode: None if pd.isna(step) else int(step) - begun for mode, step in first.items()}

    def best(self, target: Target, mode: str) -> float:
        """Return the best evaluated value of the target's measure, with compression `mode`: "on" or "off"."""
        evals = self.recording.evals
        values = evals[evals["mode"] == mode][target.metric]
        return float(values.max() if target.from_below else values.min())

    def break_even_bps(self, dense: Replay, network: Network) -> Estimate | None:
        """Return the bandwidth below which a mean step is faster than the step of `dense`, on an otherwise equal `network`.

        0 if it never is, infinity if it always is (from 100 kbit/s to 1 Tbit/s). Below the interval's `low` it is faster
        in 95 % of the resamples; above its `high`, slower in as many. None if the network has several bandwidths.
        """
        self._check_alike(dense)
        if isinstance(network.bandwidth_bps, tuple):
            return None
        placement, mixtures = self.placement(network), (self.mixture, dense.mixture)
        even = break_even_bps(self.schedule, *mixtures, network, placement=placement, dense_schedule=dense.schedule)
        grid = np.geomspace(LOWEST_BPS, HIGHEST_BPS, 57)  # an eighth of a decade apart
        networks = [replace(network, bandwidth_bps=float(bandwidth), name="") for bandwidth in grid]
        ratios = dense.resampled_seconds(networks) / self.resampled_seconds(networks)
        low, high = (crossing(grid, bound) for bound in np.quantile(ratios, BOUNDS, axis=1))
        return Estimate(even, min(even, low), max(even, high))

    @cached_property
    def mean_profile(self) -> Profile:
        """The mean of all priced steps."""
        return mean_profile(list(self.profiles.values()))

    @cached_property
    def mixture(self) -> Mixture:
        """The mean of the priced steps with an exchange of replicas, and of the steps without one, with their shares."""
        profiles = list(self.profiles.values())
        groups = [
            [profile for profile, exchanges in zip(profiles, self.exchanging, strict=True) if exchanges == wanted]
            for wanted in (True, False)
        ]
        return [(len(group) / len(profiles), mean_profile(group)) for group in groups if group]

    def trace(self, network: Network) -> tuple[int, Iterator[dict[str, Any]]]:
        """Return the priced step of median duration on `network`, and its trace events."""
        seconds = self.step_seconds([network])[0]
        median = int(np.argsort(seconds, kind="stable")[(len(seconds) - 1) // 2])
        step, profile = list(self.profiles.items())[median]
        timeline = simulate(self.schedule, profile, network, placement=self.placement(network), seed=median)
        return step, trace_events(timeline)

    def _check_alike(self, dense: Replay) -> None:
        if self.costs is not dense.costs and dense is not self:
            raise ReplayError(
                f"The runs in {self.run.folder} and {dense.run.folder} must be priced together, with the same compute: "
                "see `raysim.analysis.replay` and `raysim.analysis.in_company`."
            )
        for field in PRICED:
            own, theirs = self.row.get(field), dense.row.get(field)
            if own != theirs:
                raise ReplayError(
                    f"`{field}` of the run in {dense.run.folder} must be {own!r}, as of the run that it is compared with, "
                    f"but got {theirs!r}."
                )
