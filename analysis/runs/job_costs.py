"""One price for each kind of work in a job, pooled over the runs that did it, and its uncertainty.

Other load on the machine only lengthens an action: caches are shared, clock rates fall. So the price of a kind of
compute is a low quantile of all its recorded samples, over all runs. Codecs are measured in wall-clock time, each in a
few runs only: their samples are divided by the *stretch* of their run, the ratio of its compute to the job's. Load
stretches both alike: in digits-cnn's runs beside three busy processes, compute took 1.21 to 1.27 times as long as on a
quiet machine, and codecs 1.14 to 1.24 times.

The interval is from a Bayesian bootstrap (Rubin 1981): runs, and the steps within each, are weighted at random, with the same
weights for all runs that are priced together. Costs that two prices share, such as compute, then cancel in their ratio.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raysim.analysis.data import ReplayError
from raysim.analysis.data.recording import Recording
from raysim.analysis.data.work import NO_KIND, UPDATE, Floats, Kind
from raysim.analysis.runs.estimates import RESAMPLES, random_factors, random_weights, weighted_quantile
from raysim.network.profile import Profile
from raysim.network.transport import Transport
from raysim.schedules.arrays import OPS

QUANTILE = 0.1
"""Of the samples of a kind. In one process with the machine to itself the median of digits-cnn's compute varied by 26 %
from run to run and the 10 % quantile by 16 %; beside three busy processes they rose by 33 % and by 8 %."""
MOST_SAMPLES = 5_000  # of one kind, evenly thinned: more would not move a quantile
QUANTILES = np.concatenate([[QUANTILE], np.random.default_rng(2).uniform(0.02, 0.25, RESAMPLES)])
"""Quantile of the estimate, then of each resample: the share of disturbed samples is unknown, so the interval covers several."""
SESSION = 0.05
"""Standard deviation of the logarithm of all seconds from one session to another, which runs recorded together cannot show: three
recordings of one study within minutes gave 6.8, 7.0 and 7.5 ms of compute. It is common to all prices of one pool."""
UNEVEN = 0.06
"""The same of one codec's seconds beside compute: sessions stretch the two alike to within 6 %. With both spreads, the intervals of two
loaded sessions and another quiet one held 62 of the 63 speed-ups of the quiet one that they were compared with."""
SHARED, SHARED_CODECS = 0.2, 0.45
"""The same of compute and of codecs, together and towards less, if worker processes shared a CPU's caches and cores: a price is of
stages with a machine each. In one process digits-cnn's compute took 2.6 ms in place of Ray's 3.6, and a worker's codecs 1.3 in place of
2.7, which are the lower ends of 90 % intervals of these widths."""
HOST = 0.15
"""The same of a transport's seconds on a host: an assumption. Two calibrations in a row on a quiet machine differed by 4 % a hop."""
OWN_CLOCK = ("compute", "update")  # families timed by CPU seconds, or by a GPU's clock: load does not stretch them


class JobCosts:
    """The cost of each kind of work in the runs of one job.

    `profile` is a file written by `raysim profile`, or its contents, whose compute replaces the recorded one. Raises ReplayError if
    runs are of different jobs, or the profile is of another job.
    """

    def __init__(self, recordings: Iterable[Recording], profile: Profile | Path | str | None = None) -> None:
        self.recordings = sorted(recordings, key=lambda recording: str(recording.run.folder))
        jobs = {recording.job for recording in self.recordings}
        if len(jobs) != 1:
            raise ReplayError(f"Runs that share their compute must be of one job, but got {len(jobs)}.")
        self.clock = self.recordings[0].clock
        together = any(recording.shares_caches for recording in self.recordings)
        spreads = (SHARED, SHARED_CODECS) if together else (0.0, 0.0)
        self._session, self._codec_session = (
            random_factors((3,), SESSION) * np.minimum(random_factors((4,), spread), 1.0) for spread in spreads
        )
        self._named = None if profile is None else str(profile) if not isinstance(profile, Profile) else profile.source
        self._given = None if profile is None else self._read(profile)
        self._tables: dict[Kind, Floats] = {}
        self._of_steps: dict[int, Floats] = {}

    @property
    def source(self) -> str:
        """The source of the compute seconds, as text for tables."""
        if self._named is not None:
            return f"profile {self._named}"
        count = len(self.recordings)
        return "recorded in this run alone" if count == 1 else f"pooled over {count} runs"

    @property
    def method(self) -> str:
        """The method by which compute seconds are estimated, a sentence."""
        codecs = "codec seconds are pooled over the runs that used each codec"
        if self._named is not None:
            return (
                f"Compute: {self.source}; {codecs}. Intervals: 90 %, by the spread of recorded steps and the error of the network "
                "model."
            )
        seconds = "CPU seconds" if self.clock == "cpu" else "seconds as they passed"
        return (
            f"Compute: {self.source}, the {QUANTILE:.0%} quantile of {seconds} of each kind of action; {codecs}. "
            "Intervals: 90 %, by the spread of recorded runs and steps, and the error of the network model."
        )

    def seconds(self, kinds: Sequence[Kind]) -> Floats:
        """Return the seconds of each kind: the estimate, then `RESAMPLES` resamples; shape (1 + resamples, kinds)."""
        return np.stack([self._table(kind) for kind in kinds], axis=1) if kinds else np.zeros((1 + RESAMPLES, 0))

    def updates(self) -> Floats:
        """Return the seconds of each stage's update (1 + resamples, stage): the estimate first; zeros if no run recorded them."""
        seconds: Floats = np.zeros((1 + RESAMPLES, self.recordings[0].num_stages))
        if self._given is not None:
            return seconds + self._given.update_s
        return seconds + self._table(UPDATE)[:, None] if self.knows_updates else seconds

    @property
    def knows_updates(self) -> bool:
        """True if the seconds of the optimiser's update were recorded, or are in the given profile."""
        return self._given is not None or any(UPDATE in recording.samples for recording in self.recordings)

    def _table(self, kind: Kind) -> Floats:
        if kind[0] == "compute" and self._given is not None:
            return np.full(1 + RESAMPLES, self._of_profile(kind))
        return self._recorded(kind)

    def _recorded(self, kind: Kind) -> Floats:
        if kind not in self._tables:
            uneven = self._session
            if kind[0] not in OWN_CLOCK:
                uneven = self._codec_session * random_factors((2, zlib.crc32(repr(kind).encode())), UNEVEN)
            self._tables[kind] = self._pooled(kind) * uneven
        return self._tables[kind]

    def _pooled(self, kind: Kind) -> Floats:
        values, weights = [], []
        for i, recording in enumerate(self.recordings):
            if kind not in recording.samples:
                continue
            seconds, steps = recording.samples[kind]
            stretch = np.ones(1) if kind[0] in OWN_CLOCK else self._stretches[i]
            thin = slice(None, None, 1 + len(seconds) * len(self.recordings) // MOST_SAMPLES)
            values.append(seconds[None, thin] / stretch[:, None])
            weights.append(self._run_weights[:, [i]] * self._step_weights(i, steps[thin]))
        return weighted_quantile(np.concatenate(values, axis=1), np.concatenate(weights, axis=1), QUANTILES)

    @cached_property
    def _stretches(self) -> list[Floats]:
        """The ratio of each run's compute seconds to the pooled ones, over the kinds of work in that run."""
        stretches = []
        for i, recording in enumerate(self.recordings):
            own, pooled = np.zeros(1 + RESAMPLES), np.zeros(1 + RESAMPLES)
            for kind, (seconds, steps) in recording.samples.items():
                if kind[0] == "compute":
                    thin = slice(None, None, 1 + len(seconds) // MOST_SAMPLES)
                    own += weighted_quantile(seconds[None, thin], self._step_weights(i, steps[thin]), QUANTILES)
                    pooled += self._recorded(kind) / self._session
            stretches.append(np.where(pooled > 0, own / np.where(pooled > 0, pooled, 1.0), 1.0))
        return stretches

    @cached_property
    def _run_weights(self) -> Floats:
        return random_weights((0,), len(self.recordings))

    def _step_weights(self, i: int, steps: NDArray[np.int64]) -> Floats:
        """Return the weight of each sample of recording `i`: of its step, or of itself if there is only one step."""
        known = self.recordings[i].step_numbers
        if len(known) == 1:
            return random_weights((1, i), len(steps))
        if i not in self._of_steps:
            self._of_steps[i] = random_weights((1, i), len(known))
        return self._of_steps[i][:, np.searchsorted(known, steps)]

    def _read(self, profile: Profile | Path | str) -> Profile:
        try:
            given = profile if isinstance(profile, Profile) else Profile.load(profile)
            split = any(
                kind[2] == "W" for recording in self.recordings for kind in recording.work.kinds if kind[0] == "compute"
            )
            row = self.recordings[0].row
            samples = int(row["batch_size"]) // int(row["num_microbatches"] * row["num_replicas"])
            given.check_run(self.recordings[0].num_stages, samples)
            given.check_messages(next(iter(self.recordings[0].profiles.values())).dense_bytes[0, :-1, 0].mean(axis=-1))
            if split and given.compute_s.shape[2] == 2:
                raise ReplayError(
                    "`profile` times each backward as a whole, but these runs compute weight gradients separately. Record the profile "
                    "with their schedule, or set the weight gradients' share: `Profile.load(FILE).split_backward(SHARE).save(FILE)`."
                )
        except ValueError as error:
            raise ReplayError(str(error)) from None
        return given

    def _of_profile(self, kind: Kind) -> float:
        """Return the mean seconds of a kind of compute in the given profile."""
        assert self._given is not None
        _, stage, letter, split, extra = kind
        if extra:
            raise ReplayError(
                f"`profile` holds plain steps, but runs here took {extra} ones: price them without `profile`."
            )
        op, given = OPS.index(letter), self._given
        seconds = given.compute_s[:, stage, op]
        receives = stage > 0 if op == 0 else stage < given.num_stages - 1 if op == 1 else False
        seconds = seconds if receives else seconds + given.decode_s[:, stage, op]
        if op == 1 and not split and given.compute_s.shape[2] == 3:
            seconds = seconds + given.compute_s[:, stage, 2]
        return float(seconds.mean())


# --- steps to simulate: a recording's bytes with the seconds of its job ------------------------------------------------------


def priced_profiles(
    recording: Recording, costs: JobCosts, transport: Transport, num_workers: int
) -> dict[int, Profile]:
    """Return the profile of each priced step over a transport: its own bytes, and its job's seconds for each kind of work."""
    work, recorded = recording.work, list(recording.profiles.values())
    seconds = costs.seconds(work.kinds)[0]
    profiles = {}
    for step, i in recording.priced_steps.items():
        compute, encode, decode = (
            np.where(codes[i] == NO_KIND, 0.0, seconds[codes[i]]) for codes in (work.compute, work.encode, work.decode)
        )
        averages = recording.averaging_kind_by_stage(step)
        method_s = np.zeros(recording.num_stages)
        if averages:
            method_s[list(averages)] = costs.seconds(list(averages.values()))[0]
        own = replace(
            recorded[i],
            compute_s=compute,
            encode_s=encode,
            decode_s=decode,
            update_s=costs.updates()[0],
            method_s=method_s,
            transfers=recording.transfers(step),
            **recording.averaged_bytes(step),
        )
        profiles[step] = own.over(transport, num_workers)
    return profiles


def resampled_profiles(
    recording: Recording, costs: JobCosts, mean: Profile, overheads: dict[str, float], steps: Sequence[int]
) -> list[Profile]:
    """Return the mean step at the estimate, then at each resample of the prices; `overheads` are a host's seconds by name."""
    work = recording.work
    seconds = costs.seconds(work.kinds)
    compute, encode, decode = (
        np.mean(np.where(codes == NO_KIND, 0.0, seconds[:, codes]), axis=1)
        for codes in (work.compute, work.encode, work.decode)
    )
    averages = np.zeros((1 + RESAMPLES, recording.num_stages))
    for kinds in [recording.averaging_kind_by_stage(step) for step in steps]:
        for stage, kind in kinds.items():
            averages[:, stage] += costs.seconds([kind])[:, 0] / len(steps)
    drawn = {name: value * random_factors((4,), HOST) for name, value in overheads.items()}
    drawn["update_s"] = costs.updates()
    return mean.at_seconds(compute_s=compute, encode_s=encode, decode_s=decode, method_s=averages, **drawn)
