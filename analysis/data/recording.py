"""The records of one run as arrays: its actions step by step, and its samples of the cost of each kind of work."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raysim.analysis.data import ReplayError
from raysim.analysis.data.reading import check_actions, check_seconds, check_tables
from raysim.analysis.data.work import (
    NO_KIND,
    UPDATE,
    Floats,
    Kind,
    WorkCodes,
    extra_work_of,
    octaves_of,
    recorded_compressors,
    work_codes,
)
from raysim.config.identity import IDENTITY, SYNCHRONOUS, device_kind
from raysim.network.collectives import (
    EXCHANGES,
    Transfers,
    as_transfers,
    spread_evenly,
    transfers_from_columns,
    whole_bytes,
)
from raysim.network.recorded import profiles_from_actions
from raysim.notation import check_choice
from raysim.plugins import from_record
from raysim.records import WARMUP_STEPS, RecordsError, Run
from raysim.records.run import exceeds_dense
from raysim.schedules.actions import rows_from_csv
from raysim.schedules.families import Custom, Schedule, parse_schedule
from raysim.schedules.weights import parse_weights
from raysim.storage.places import Place

CLOCKS = ("auto", "cpu", "wall")


class CostSamples(NamedTuple):
    """Recorded seconds of one kind of work, and the step of each."""

    seconds: Floats
    steps: NDArray[np.int64]


class Recording:
    """One recorded run: rows and bytes of its priced steps, and samples of the cost of each kind of work.

    At most `max_steps` of the profiled steps are read, evenly spread. `clock`: "cpu" samples CPU seconds of compute, "wall"
    seconds as they passed, "auto" the first on CPUs and the second on GPUs, whose work is waited for. `row`: that of the run's
    `run.parquet`, if it has been read. Raises ReplayError if the run cannot be priced.
    """

    def __init__(
        self, run: Run | Place | str, *, clock: str = "auto", max_steps: int = 100, row: Mapping[str, Any] | None = None
    ) -> None:
        try:
            check_choice("compute", clock, CLOCKS)
            self.run = run if isinstance(run, Run) else Run(run, row)
            self.row = self.run.row
            self.steps, self.links = self.run.steps, self.run.links
            actions, self._transfers = self.run.actions, self.run.collectives
        except ValueError as error:  # RecordsError among them
            raise ReplayError(str(error)) from None
        if actions.empty:
            raise ReplayError(
                f"The run in {self.run.folder} has no profiled actions to be priced: train it with `profile_every_steps` "
                f"of at least 1, but it has {self.row.get('profile_every_steps')!r}."
            )
        try:
            self._prepare(actions, clock, max_steps)
        except KeyError as error:
            raise ReplayError(f"The run in {self.run.folder} cannot be priced: it lacks {error}.") from None
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            reason = str(error).rstrip(".") or type(error).__name__
            raise ReplayError(f"The run in {self.run.folder} cannot be priced: {reason}.") from error

    def _prepare(self, actions: pd.DataFrame, clock: str, max_steps: int) -> None:
        """Compute the basis of prices; raises any arithmetic, type or value error if the run contradicts itself."""
        check_actions(self.row, actions)
        self.num_stages, self.num_microbatches = int(self.row["num_stages"]), int(self.row["num_microbatches"])
        self.num_replicas = int(self.row.get("num_replicas") or 1)
        self.first_step = int(self.row.get("first_step") or 0)
        self.compress_from = int(self.row.get("compress_from") or 0)
        self.threads = int(self.row.get("threads_per_stage") or 1)
        self.schedule = self._schedule()
        period = int(self.row.get("exchange_period") or 1)
        if len(self.steps) < period:
            raise ValueError(f"it has {len(self.steps)} of the {period} steps in which its replicas exchange once")
        actions = actions[actions["step"] >= self.compress_from]
        if actions.empty:
            raise ValueError(f"it has no profiled step from `compress_from` = {self.compress_from} on")
        profiled = sorted(int(step) for step in actions["step"].unique())
        warm = [step for step in profiled if step >= self.first_step + WARMUP_STEPS] or profiled
        chosen = np.linspace(0, len(warm) - 1, min(max_steps, len(warm))).astype(int)
        actions = actions[actions["step"].isin([warm[i] for i in chosen])]
        self.links = self.links[self.links["step"] >= self.compress_from]
        tables = {"steps": self.steps, "actions": actions, "links": self.links, "collectives": self._transfers}
        check_tables(self.row, tables)
        self._columns: dict[str, NDArray[Any]] = {str(name): actions[name].to_numpy() for name in actions}
        self.rows = self.schedule.rows(self.num_stages, self.num_microbatches)
        self.owner = self.schedule.workers(self.num_stages)
        self.profiles = profiles_from_actions(self._columns)
        first = next(iter(self.profiles.values()))
        got = (first.num_stages, int(first.compute_s.shape[3]))
        if got != (self.num_stages, self.num_microbatches):
            raise ValueError(
                f"its actions must be of {self.num_stages} stages and {self.num_microbatches} microbatches, "
                f"but are of {got[0]} and {got[1]}"
            )
        self.job = str(self.row["job"])
        self.clock = ("cpu" if device_kind(self.row) == "cpu" else "wall") if clock == "auto" else clock
        check_seconds(self.samples)

    def _schedule(self) -> Schedule:
        """Return the recorded schedule; its name and that of the weights come from the record."""
        rows = self.row.get("schedule_rows")
        recorded = Custom.of_rows(str(self.run.folder), rows_from_csv(rows)) if rows else None
        with from_record():
            weights = parse_weights(self.row.get("weights") or SYNCHRONOUS)
            return weights.order(recorded or parse_schedule(self.row["schedule"]))

    def __repr__(self) -> str:
        return f"Recording({str(self.run.folder)!r})"

    @cached_property
    def evals(self) -> pd.DataFrame:
        """One row for each evaluation, by the BatchNorm statistics of training; raises ReplayError if they cannot be read."""
        try:
            return self.run.evals[self.run.evals["batchnorm"] == "running"]
        except RecordsError as error:
            raise ReplayError(str(error)) from None

    @cached_property
    def step_numbers(self) -> NDArray[np.int64]:
        """The priced steps."""
        return np.array(list(self.profiles), np.int64)

    @cached_property
    def priced_steps(self) -> dict[int, int]:
        """The steps whose mean is priced, each with the index of the profiled step with its actions.

        These are the profiled steps. If replicas exchange only in some steps, they are the run's last steps, as many as a period
        has.
        """
        period, done = int(self.row.get("exchange_period") or 1), self.first_step + len(self.steps)
        if period == 1:
            return {step: i for i, step in enumerate(self.profiles)}
        return {step: i % len(self.profiles) for i, step in enumerate(range(done - period, done))}

    def stacked(self, name: str) -> Floats:
        """Return a cost of every priced step: axes (step, replica, stage, op, microbatch)."""
        return np.stack([getattr(profile, name) for profile in self.profiles.values()])

    @cached_property
    def work(self) -> WorkCodes:
        """The kind of work of each action."""
        return work_codes(
            self.step_numbers.tolist(),
            self.stacked("wire_bytes"),
            self.stacked("dense_bytes"),
            split_backwards={
                (action.stage, action.microbatch) for row in self.rows for action in row if action.op == "W"
            },
            extra_work=extra_work_of(self._columns),
            compressors=recorded_compressors(self.links),
            shared_indices=bool(self.row.get("shared_indices")),
        )

    @cached_property
    def samples(self) -> dict[Kind, CostSamples]:
        """The recorded samples of each kind of work."""
        wall, cpu = self.stacked("compute_s"), self.stacked("cpu_s") / self.threads
        decode, encode = self.stacked("decode_s"), self.stacked("encode_s")
        compute = wall if self.clock == "wall" else np.where(np.isnan(cpu), wall, np.minimum(cpu, wall))
        compute = compute + np.where(self.work.decode == NO_KIND, decode, 0.0)  # reading the data is compute
        steps = np.broadcast_to(self.step_numbers[:, None, None, None, None], wall.shape)
        samples = {}
        for codes, seconds in ((self.work.compute, compute), (self.work.encode, encode), (self.work.decode, decode)):
            for code in np.unique(codes[codes != NO_KIND]):
                same = codes == code
                samples[self.work.kinds[code]] = CostSamples(seconds[same], steps[same])
        averages = self._averages
        for kind, rows in averages.groupby("kind") if len(averages) else ():
            known = self.step_numbers
            nearest = np.searchsorted(known, rows["step"].to_numpy(np.int64)).clip(max=len(known) - 1)
            samples[kind] = CostSamples(rows["encode_s"].to_numpy(np.float64), known[nearest])
        return samples | self._updates

    def averaging_kind_by_stage(self, step: int) -> dict[int, Kind]:
        """Return for each stage the kind of work of averaging its gradients in a step."""
        rows = self._averages_by_step.get(step, self._averages[:0])
        return {int(stage): kind for stage, kind in zip(rows["stage"], rows["kind"], strict=True)}

    @cached_property
    def _averages_by_step(self) -> dict[int, pd.DataFrame]:
        averages = self._averages
        parts = averages.groupby("step") if len(averages) else ()
        return {int(rows["step"].iloc[0]): rows for _, rows in parts}

    @cached_property
    def _averages(self) -> pd.DataFrame:
        """One row for each priced step and stage: seconds of local work to average gradients on the slowest replica."""
        links = self.links
        averages = links[(links["direction"] == "replica_gradient") & links["step"].isin(self.priced_steps)]
        averages = averages[averages["rounds"] != 0]
        if averages.empty:
            return pd.DataFrame({name: [] for name in ("step", "stage", "kind", "encode_s", "codec", "dense_bytes")})
        rows = averages.sort_values("encode_s").drop_duplicates(["step", "stage"], keep="last").reset_index(drop=True)
        octaves = octaves_of(rows["dense_bytes"], rows["wire_bytes"]).tolist()
        kinds = [
            ("average", codec, int(stage), octave)
            for codec, stage, octave in zip(rows["codec"], rows["stage"], octaves, strict=True)
        ]
        return rows.assign(kind=pd.Series(kinds, rows.index, dtype=object))

    @property
    def shares_caches(self) -> bool:
        """True if workers ran in parallel processes on a CPU, as with Ray, and not in turn in one process."""
        on_ray = self.row.get("engine") != "inline" and device_kind(self.row) == "cpu"
        return on_ray and len(self.rows) * self.num_replicas > 1

    @cached_property
    def _updates(self) -> dict[Kind, CostSamples]:
        """The seconds of the optimiser's update of a stage: the slowest worker's, shared by its stages.

        If an inline run did not record them, they are its time outside of actions, in which its workers update in turn; a run on
        Ray then has none.
        """
        steps = self.steps[self.steps["step"].isin(self.step_numbers)]
        recorded = steps["update_s"].to_numpy(np.float64) / np.bincount(self.owner).max()
        if len(steps) and not np.isnan(recorded).any():
            return {UPDATE: CostSamples(recorded, steps["step"].to_numpy(np.int64))}
        if self.row.get("engine") != "inline":
            return {}
        numbers, index = np.unique(self._columns["step"].astype(np.int64), return_inverse=True)
        begin, end = np.full(len(numbers), np.inf), np.full(len(numbers), -np.inf)
        np.minimum.at(begin, index, self._columns["start_s"])
        np.maximum.at(end, index, self._columns["end_s"])
        seconds = self._step_seconds()
        outside = np.array([seconds[step] for step in numbers.tolist()]) - (end - begin)
        return {UPDATE: CostSamples(np.maximum(outside, 0.0) / (self.num_replicas * self.num_stages), numbers)}

    def _step_seconds(self) -> dict[int, float]:
        """Return the seconds of each step without the averaging of replicas, which has a price of its own.

        In one process replicas average in turn, so their seconds add up; actors average at the same time.
        """
        seconds = dict(zip(self.steps["step"].tolist(), self.steps["seconds"].tolist(), strict=True))
        averages = self.links[self.links["direction"] == "replica_gradient"]
        if len(averages):
            averaging = averages.groupby("step")["encode_s"]
            spent = averaging.sum() if self.row.get("engine") == "inline" else averaging.max()
            for step, spent_s in zip(spent.index.tolist(), spent.tolist(), strict=True):
                seconds[step] -= spent_s
        return seconds

    @cached_property
    def _priced_transfers(self) -> tuple[NDArray[np.int64], Transfers]:
        """The recorded transfers of all priced steps, and the step of each."""
        if self._transfers.empty:
            return np.empty(0, np.int64), as_transfers([])
        rows = self._transfers[self._transfers["step"].isin(self.priced_steps)]
        columns = {str(name): rows[name].to_numpy() for name in rows}
        return columns["step"], transfers_from_columns(columns)

    @cached_property
    def knows_totals_alone(self) -> bool:
        """True for a run with collectives but no table of transfers, as earlier versions recorded it."""
        return self._transfers.empty and not set(EXCHANGES).isdisjoint(self.links["direction"])

    @property
    def more_than_dense(self) -> str | None:
        """A sentence if replicas send more than an uncompressed all-reduce would, else None."""
        return exceeds_dense(self.links, self.num_replicas)

    def averaged_bytes(self, step: int) -> dict[str, Any]:
        """Return `gradient_bytes` and `bucketed_bytes` of a `Profile`, by stage: bytes averaged uncompressed, and in buckets.

        An uncompressed average of gradients may leave in buckets; a compressed one may if the record says so.
        """
        rows = self._averages_by_step.get(step, self._averages[:0])
        dense, bucketed = np.zeros(self.num_stages), np.zeros(self.num_stages)
        for stage, codec, sent in zip(rows["stage"], rows["codec"], rows["dense_bytes"], strict=True):
            size = whole_bytes(sent, self.num_replicas)
            dense[int(stage)] = size if codec == IDENTITY else 0.0
            bucketed[int(stage)] = size if codec == IDENTITY or self.row.get("averages_by_bucket") else 0.0
        return {"gradient_bytes": dense, "bucketed_bytes": bucketed}

    def collective_bytes(self, direction: str) -> float:
        """Return the bytes of all transfers of one direction in a mean priced step."""
        return float(self._collective_bytes(direction).sum()) / len(self.priced_steps)

    def exchange_bytes(self) -> float | None:
        """Return the mean bytes of the steps with an exchange of replicas; None if all priced steps have one, or none."""
        sent = self._collective_bytes("replica_gradient")
        sent = sent[sent > 0]
        return float(sent.mean()) if 0 < len(sent) < len(self.priced_steps) else None

    def _collective_bytes(self, direction: str) -> pd.Series[float]:
        rows = self.links[(self.links["direction"] == direction) & self.links["step"].isin(self.priced_steps)]
        return rows.groupby("step")["wire_bytes"].sum()

    def transfers(self, step: int) -> Transfers:
        """Return the transfers of the collectives of a priced step: as recorded, else the slowest replica's total, evenly split."""
        if not self.knows_totals_alone:
            steps, transfers = self._priced_transfers
            own: Transfers = transfers[steps == step]
            return own
        links = self.links[self.links["step"] == step]
        averages, sums = (
            links[links["direction"] == direction].groupby("stage")[["wire_bytes", "rounds"]].max()
            for direction in EXCHANGES
        )
        replicas = range(self.num_replicas)
        groups = []
        for sent in averages.reset_index().to_dict("records"):
            stage = int(sent["stage"])
            groups.append((EXCHANGES[0], stage, [(replica, stage) for replica in replicas], sent))
        if len(sums):
            owners, sent = [int(stage) for stage in sums.index], sums.max().to_dict()
            fused = [replicas] if self.row.get("fused_embedding") else [[replica] for replica in replicas]
            groups += [(EXCHANGES[1], owners[0], list(product(together, owners)), sent) for together in fused]
        spread = [
            spread_evenly(direction, stage, members, float(sent["wire_bytes"]), int(sent["rounds"]))
            for direction, stage, members, sent in groups
        ]
        return np.concatenate([as_transfers([]), *spread])
