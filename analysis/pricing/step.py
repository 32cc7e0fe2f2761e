"""The price of a recorded run's step on any network, without training again.

A run's `actions.parquet` holds the bytes of every packet of its profiled steps, and the seconds of every action. Bytes are the
run's own; seconds are the job's, pooled over the runs in company (see `analysis.pricing.costs`). The simulator combines both
with a network. Training steps alone are priced: evaluations and checkpoints are left out. All figures are seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysim.analysis.comparison.targets import Target
from raysim.analysis.data.errors import ReplayError
from raysim.analysis.data.jobs import PRICED, Job
from raysim.analysis.data.recording import NO_KIND, Floats, Recording
from raysim.analysis.pricing.costs import RESAMPLES, Costs
from raysim.analysis.pricing.estimates import BOUNDS, Estimate, crossing
from raysim.analysis.pricing.notes import notes_of
from raysim.network.calibrate import Overheads
from raysim.network.calibration import calibrated_transport
from raysim.network.collectives import DIRECTIONS
from raysim.network.overlap import hidden, without_exchange
from raysim.network.placement import Placement
from raysim.network.profile import Profile, mean_profile
from raysim.network.simulate import Mixture, break_even_bps, simulate, step_seconds
from raysim.network.timeline import Timeline, WorkerTime
from raysim.network.topology import FREE, Network
from raysim.network.trace import trace_events
from raysim.network.uncertainty import with_model_error
from raysim.places import Place
from raysim.records import Run

LOWEST_BPS, HIGHEST_BPS = 1e5, 1e12  # between which a break-even is sought
PARTS = WorkerTime._fields[2:]
MODES = ("on", "off")


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
    of the job, or by default over this run alone. `transport`: "ray", "nccl", "gloo" or "bare", whose bytes, trips and seconds of a
    host are its own, whatever engine and load recorded the run. `compute` and `profile` make a `Recording` and `Costs` if these are
    not given.

    >>> Replay("results/none")
    Traceback (most recent call last):
    analysis.data.errors.ReplayError: There is no run in results/none: it has no run.parquet.
    """

    def __init__(
        self,
        run: Run | Place | str | Recording,
        *,
        costs: Costs | None = None,
        compute: str = "auto",
        profile: Profile | Path | str | None = None,
        transport: str = "ray",
    ) -> None:
        try:
            self.transport = calibrated_transport(transport)
        except ValueError as error:
            raise ReplayError(str(error)) from None
        self.recording = run if isinstance(run, Recording) else Recording(run, clock=compute)
        self.costs = costs if costs is not None else Costs([self.recording], profile)
        one = self.recording
        self.run, self.row, self.schedule, self.rows = one.run, one.row, one.schedule, one.rows
        self.num_stages, self.num_microbatches, self.num_replicas = (
            one.num_stages,
            one.num_microbatches,
            one.num_replicas,
        )
        self._step_s: dict[tuple[Network, ...], Floats] = {}
        self._resampled_s: dict[tuple[Network, ...], Floats] = {}
        self.overheads = Overheads(**self.transport.host.overheads(self.num_workers))
        seconds = self.costs.seconds(one.kinds)[0]
        recorded = list(one.profiles.values())
        self.profiles = {
            step: self._at(step, recorded[place], seconds, place) for step, place in one.priced_steps.items()
        }

    def __repr__(self) -> str:
        return f"Replay({str(self.run.folder)!r})"

    @property
    def job(self) -> Job:
        """The job of the run: others of the same are priced with the same compute."""
        return self.recording.job

    @property
    def num_workers(self) -> int:
        """Number of workers over all replicas, each of which has a host of its own where the network has as many."""
        return self.num_replicas * len(self.rows)

    @property
    def num_steps(self) -> int:
        """Steps that the run did."""
        return len(self.recording.steps)

    @property
    def recorded_step_s(self) -> float:
        """Mean seconds of the priced steps as they were recorded, where it ran."""
        steps = self.recording.steps
        return float(steps[steps["step"].isin(self.profiles)]["seconds"].mean())

    @property
    def wire_bytes(self) -> Floats:
        """Bytes of all packets of each priced step, tied gradients not among them."""
        return np.array([float(profile.wire_bytes.sum()) for profile in self.profiles.values()])

    @property
    def dense_bytes(self) -> Floats:
        """Bytes of the tensors in them."""
        return np.array([float(profile.dense_bytes.sum()) for profile in self.profiles.values()])

    def _at(self, step: int, profile: Profile, seconds: Floats, place: int) -> Profile:
        """Return a recorded step's profile with the prices of its kinds of work, and the collectives that end it."""
        one = self.recording
        compute, encode, decode = (
            np.where(codes[place] == NO_KIND, 0.0, seconds[codes[place]])
            for codes in (one.compute_codes, one.encode_codes, one.decode_codes)
        )
        kinds = one.average_kinds(step)
        method_s = np.zeros(self.num_stages)
        if kinds:
            method_s[list(kinds)] = self.costs.seconds(list(kinds.values()))[0]
        own = replace(
            profile,
            compute_s=compute,
            encode_s=encode,
            decode_s=decode,
            update_s=self.costs.updates()[0],
            method_s=method_s,
            transfers=one.transfers(step),
        )
        return own.over(self.transport, self.num_workers)

    @cached_property
    def resampled(self) -> list[Profile]:
        """The mean step at the estimate, then at each resample of the prices."""
        one, mean = self.recording, self.mean_profile
        seconds = self.costs.seconds(one.kinds)
        costs = [
            np.mean(np.where(codes == NO_KIND, 0.0, seconds[:, codes]), axis=1)
            for codes in (one.compute_codes, one.encode_codes, one.decode_codes)
        ]
        steps = [self.recording.average_kinds(step) for step in self.profiles]
        averages = np.zeros((1 + RESAMPLES, self.num_stages))
        for kinds in steps:
            for stage, kind in kinds.items():
                averages[:, stage] += self.costs.seconds([kind])[:, 0] / len(steps)
        overheads = {name: value * self.costs.host_factors() for name, value in self.overheads._asdict().items()}
        overheads["update_s"] = np.broadcast_to(self.costs.updates()[:, None], averages.shape)
        compute, encode, decode = costs
        return mean.at_seconds(compute_s=compute, encode_s=encode, decode_s=decode, method_s=averages, **overheads)

    @property
    def notes(self) -> list[str]:
        """Limits of the figures, a sentence each."""
        return notes_of(self)

    def placement(self, network: Network) -> Placement:
        """Return the hosts of the workers: spread evenly over the network's hosts, or one each where it names none."""
        return Placement.spread(self.num_workers, network.num_hosts)

    def step_seconds(self, networks: Sequence[Network]) -> Floats:
        """Return the seconds of every priced step on every network: shape (networks, steps)."""
        key = tuple(networks)
        if key not in self._step_s:
            self._step_s[key] = self._priced_seconds(networks)
        return self._step_s[key]

    def _priced_seconds(self, networks: Sequence[Network]) -> Floats:
        profiles, delay = list(self.profiles.values()), int(self.row.get("exchange_delay") or 0)
        seconds = self._seconds(profiles, networks)
        if not delay:
            return seconds
        quiet_s = self._seconds([without_exchange(profile) for profile in profiles], networks)
        codec_s = np.array([float(profile.method_s.max()) for profile in profiles])
        return hidden(seconds, quiet_s, np.broadcast_to(codec_s, seconds.shape), delay)

    @cached_property
    def exchanging(self) -> NDArray[np.bool_]:
        """True for each priced step in which replicas exchange something."""
        return np.array(
            [bool((profile.transfers["direction"] == DIRECTIONS[0]).any()) for profile in self.profiles.values()]
        )

    def step_s(self, networks: Sequence[Network]) -> list[Estimate]:
        """Return by network the seconds of a mean step."""
        means, resampled = self.step_seconds(networks).mean(axis=1), self.resampled_seconds(networks)
        return [Estimate.of(float(mean), values) for mean, values in zip(means, resampled, strict=True)]

    def resampled_seconds(self, networks: Sequence[Network]) -> Floats:
        """Return the seconds of a step by resamples of the recordings: shape (networks, resamples).

        Resamples of two runs with the same costs are paired. The error of the network model is in them, common to all runs.
        """
        key = tuple(networks)
        if key not in self._resampled_s:
            found = self._seconds(self.resampled, [FREE, *networks])
            mean = self.step_seconds([FREE, *networks]).mean(axis=1, keepdims=True)
            drawn = mean * found[:, 1:] / found[:, :1]
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
        """Return where the seconds of a step go on `network`, mean over the priced steps."""
        parts = np.zeros((self.num_workers, len(PARTS)))
        pipeline_s = utilisation = 0.0
        critical: dict[str, float] = {}
        for timeline in self.timelines(network):
            parts += [[getattr(worker, name) for name in PARTS] for worker in timeline.workers()]
            pipeline_s += timeline.pipeline_s
            utilisation += timeline.busiest
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
        """Return the steps after which an evaluation first reached `target`, by mode: links "on" and "off"; None where none did.

        Evaluations are every `evaluate_every_steps` steps, so that is how fine the answer is.
        """
        evals = self.recording.evals[self.recording.evals["batchnorm"] == "running"]
        if not len(evals):
            raise ReplayError(
                f"The run in {self.run.folder} has no evaluations to find {target} in: it is {self.row.get('status')}."
            )
        if target.metric not in evals or evals[target.metric].isna().all():
            raise ReplayError(
                f"The run in {self.run.folder} does not measure {target.metric}. It has {', '.join(self.run.measures)}."
            )
        found: dict[str, int | None] = {}
        for mode in MODES:
            rows = evals[evals["mode"] == mode].sort_values("step")
            reached = rows[target.reached(rows[target.metric])]
            found[mode] = int(reached["step"].iloc[0]) if len(reached) else None
        return found

    def best(self, target: Target, mode: str) -> float:
        """Return the best evaluation of the target's measure with links in `mode`."""
        rows = self.recording.evals
        evals = rows[(rows["batchnorm"] == "running") & (rows["mode"] == mode)][target.metric]
        return float(evals.max() if target.from_below else evals.min())

    def break_even_bps(self, dense: Replay, network: Network) -> Estimate | None:
        """Return the bandwidth below which a mean step is faster than the step of `dense`, on an otherwise equal `network`.

        0 where it never is, infinity where it always is (from 100 kbit/s to 1 Tbit/s). Below the interval's `low` it is faster
        in 95 % of the resamples; above its `high`, slower in as many. None where the network has no one bandwidth.
        """
        self._check_alike(dense)
        if isinstance(network.bandwidth_bps, tuple):
            return None
        placement = self.placement(network)
        even = break_even_bps(
            self.schedule,
            self.mixture,
            dense.mixture,
            network,
            placement=placement,
            dense_schedule=dense.schedule,
        )
        grid = np.geomspace(LOWEST_BPS, HIGHEST_BPS, 57)  # an eighth of a decade apart
        networks = [replace(network, bandwidth_bps=float(bandwidth), name="") for bandwidth in grid]
        ratios = dense.resampled_seconds(networks) / self.resampled_seconds(networks)
        low, high = np.quantile(ratios, BOUNDS, axis=1)
        ends = [crossing(grid, bound) for bound in (low, high)]
        return Estimate(even, min(even, ends[0]), max(even, ends[1]))

    @cached_property
    def mean_profile(self) -> Profile:
        """The mean of all priced steps."""
        return mean_profile(list(self.profiles.values()))

    @cached_property
    def mixture(self) -> Mixture:
        """The mean of the priced steps in which replicas exchange something, and that of the others, with their shares."""
        profiles = list(self.profiles.values())
        kinds = [
            [one for one, there in zip(profiles, self.exchanging, strict=True) if there == of] for of in (True, False)
        ]
        return [(len(kind) / len(profiles), mean_profile(kind)) for kind in kinds if kind]

    def trace(self, network: Network) -> tuple[int, Iterator[dict[str, Any]]]:
        """Return the priced step of median duration on `network`, and its trace events, for `raysim.network.trace.write_trace`."""
        seconds = self.step_seconds([network])[0]
        place = int(np.argsort(seconds, kind="stable")[(len(seconds) - 1) // 2])
        step, profile = list(self.profiles.items())[place]
        return step, trace_events(
            simulate(self.schedule, profile, network, placement=self.placement(network), seed=place)
        )

    def _check_alike(self, dense: Replay) -> None:
        if self.costs is not dense.costs and dense is not self:
            raise ReplayError(
                f"The runs in {self.run.folder} and {dense.run.folder} must be priced in company, with the same compute: "
                "see `analysis.replay` and `analysis.in_company`."
            )
        for field in PRICED:
            mine, theirs = self.row.get(field), dense.row.get(field)
            if mine != theirs:
                raise ReplayError(
                    f"`{field}` of the run in {dense.run.folder} must be {mine!r}, as of the one it is set against, but got {theirs!r}."
                )
