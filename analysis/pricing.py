"""What a recorded run would take on a network that one does not have, without training again.

A run's `actions.parquet` holds what every action of its profiled steps took and what every packet weighed: the simulator
puts these on any network. What calls and packets take beside that is calibrated on the run itself. Training steps alone are
priced: evaluations and checkpoints are left out. Seconds and bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.errors import ReplayError
from analysis.targets import METRICS, Target
from raysim.network.calibrate import Overheads, read_overheads
from raysim.network.exchange import tied_s
from raysim.network.network import Network
from raysim.network.placement import Placement
from raysim.network.profile import Profile, mean_profile, profiles_from_actions
from raysim.network.schedule import Custom, calls, parse_schedule
from raysim.network.simulate import break_even_bps, simulate, step_seconds
from raysim.network.timeline import Timeline
from raysim.network.torch_csv import rows_from_csv
from raysim.network.trace import trace_events
from raysim.notation import check_choice, check_integer
from raysim.places import Place
from raysim.records import RecordsError, Run

Floats = NDArray[np.float64]

WARMUP_STEPS = 2  # steps that load, compile and touch memory for the first time: not priced where others are profiled
MAX_STEPS = 100  # priced of the profiled ones, evenly spread: more would not move the mean
BUSY_CORES = 1.1  # wall over CPU seconds of compute from which on the stages are said to have shared cores
PARTS = ("compute_s", "codec_s", "overhead_s", "contention_s", "wait_s", "bubble_s")
MODES = ("on", "off")


@dataclass(frozen=True, eq=False)
class Split:
    """Where the seconds of a mean step went on one network."""

    workers: pd.DataFrame
    """A row a worker: its stages, and the seconds of `PARTS`, which add up to `pipeline_s`."""
    pipeline_s: float
    """From the first action to the last."""
    outside_s: float
    """Of the step outside of its actions: exchanging tied gradients, update, the driver."""
    utilisation: float
    """Share of the pipeline's time in which the busiest direction between two hosts moved bytes."""
    critical_s: dict[str, float]
    """Seconds of each kind on the critical path: what to make faster, and by how much at most."""


class Replay:
    """A recorded run, ready to be priced on any network.

    `compute`: "wall" takes the seconds as they passed; "cpu" takes the CPU seconds of compute, and the codecs' in
    proportion: what stages would have needed on cores of their own, where they shared some when they were recorded.
    `overheads`: "run" calibrates what calls and packets take on the run itself, "none" leaves it out (of a run recorded on a
    slow network, whose wires would count twice). `driver`: the host of Ray's driver, by way of which Ray sends packets under
    100 KiB; None lets them go straight. `max_steps` are priced at most.

    >>> Replay("results/none")
    Traceback (most recent call last):
    analysis.errors.ReplayError: There is no run in results/none: it has no run.parquet.
    """

    def __init__(
        self,
        run: Run | Place | str,
        *,
        compute: str = "wall",
        overheads: str = "run",
        driver: int | None = None,
        max_steps: int = MAX_STEPS,
    ) -> None:
        try:
            check_choice("compute", compute, ["wall", "cpu"])
            check_choice("overheads", overheads, ["run", "none"])
            self.driver = None if driver is None else check_integer("driver", driver, 0)
            self.run = run if isinstance(run, Run) else Run(run)
            self.row = self.run.row
            self.steps, self._evals, self._links = self.run.steps, self.run.evals, self.run.links
            actions = self.run.actions
            recorded_rows = self.row.get("schedule_rows")
            self.schedule = (
                Custom.of_rows(str(self.run.folder), rows_from_csv(recorded_rows))
                if recorded_rows
                else parse_schedule(self.row["schedule"])
            )
            self.num_stages, self.num_microbatches = int(self.row["num_stages"]), int(self.row["num_microbatches"])
        except RecordsError as error:
            raise ReplayError(str(error)) from None
        except KeyError as error:
            raise ReplayError(f"The run in {self.run.folder} lacks {error} in its run.parquet.") from None
        except ValueError as error:
            raise ReplayError(str(error)) from None
        self.num_profiled = int(actions["step"].nunique())
        if not self.num_profiled:
            raise ReplayError(
                f"The run in {self.run.folder} has no profiled actions to be priced: train it with `profile_every_steps` "
                f"of at least 1 and at most its steps, but it has {self.row.get('profile_every_steps')!r}."
            )
        actions = actions[actions["step"].isin(_chosen(actions["step"], max_steps))]
        columns: dict[str, NDArray[Any]] = {str(name): actions[name].to_numpy() for name in actions}
        try:
            self.rows = self.schedule.rows(self.num_stages, self.num_microbatches)
            self._owner = self.schedule.workers(self.num_stages)
            self.overheads = self._read_overheads(columns) if overheads == "run" else Overheads(0.0, 0.0, 0.0, 0.0)
            profiles = profiles_from_actions(columns, **self.overheads._asdict())
            if self.row.get("engine") == "ray":
                profiles = {step: profile.with_ray_messages() for step, profile in profiles.items()}
        except ValueError as error:
            raise ReplayError(f"{str(error).rstrip('.')} (in {self.run.folder}).") from None
        except KeyError as error:
            raise ReplayError(f"The actions in {self.run.folder} lack {error}, which the schedule has.") from None
        first = next(iter(profiles.values()))
        got = (first.num_stages, int(first.compute_s.shape[3]))
        if got != (self.num_stages, self.num_microbatches):
            raise ReplayError(
                f"The actions in {self.run.folder} must be of {self.num_stages} stages and {self.num_microbatches} microbatches, "
                f"but got {got[0]} and {got[1]}."
            )
        self.stretch = _stretch(profiles.values())
        self.compute = compute
        threads = int(self.row.get("threads_per_stage") or 1)
        priced = {k: _on_own_cores(p, threads) if compute == "cpu" else p for k, p in profiles.items()}
        self.num_replicas = int(self.row.get("num_replicas") or 1)
        self.profiles = {step: self._with_averages(step, profile) for step, profile in priced.items()}

    def __repr__(self) -> str:
        return f"Replay({str(self.run.folder)!r})"

    @property
    def num_workers(self) -> int:
        """Number of workers over all replicas, each of which has a host of its own where the network has as many."""
        return self.num_replicas * len(self.rows)

    @property
    def num_steps(self) -> int:
        """Steps that the run did."""
        return len(self.steps)

    @property
    def recorded_step_s(self) -> float:
        """Mean seconds of the priced steps as they were recorded, where it ran."""
        return float(self.steps[self.steps["step"].isin(self.profiles)]["seconds"].mean())

    @property
    def wire_bytes(self) -> Floats:
        """Bytes of all packets of each priced step, tied gradients not among them."""
        return np.array([float(profile.wire_bytes.sum()) for profile in self.profiles.values()])

    @property
    def dense_bytes(self) -> Floats:
        """Bytes of the tensors in them."""
        return np.array([float(profile.dense_bytes.sum()) for profile in self.profiles.values()])

    @cached_property
    def tied(self) -> pd.DataFrame:
        """By stage that owns tied parameters: `wire_bytes` that one replica's sends to the other owners a step, `rounds`."""
        return self._collective("tied", self.profiles)

    @cached_property
    def averaged(self) -> pd.DataFrame:
        """By stage: `wire_bytes` that one replica sends to average gradients, `rounds`, `encode_s` of its own work."""
        return self._collective("replica_gradient", self.profiles)

    def _collective(self, direction: str, steps: Iterable[int]) -> pd.DataFrame:
        """Return by stage what a replica does in a collective at the end of these steps: the slowest replica's, mean over steps."""
        rows = self._links[(self._links["direction"] == direction) & self._links["step"].isin(list(steps))]
        columns = ["wire_bytes", "rounds", "encode_s"]
        worst = rows.groupby(["step", "stage"])[columns].max()
        return worst.groupby("stage").mean()

    def _with_averages(self, step: int, profile: Profile) -> Profile:
        """Return a step's profile with what its replicas sent to average gradients."""
        sent = self._collective("replica_gradient", [step]).reindex(range(self.num_stages)).fillna(0.0)
        return replace(
            profile,
            sent_bytes=sent["wire_bytes"].to_numpy(np.float64),
            rounds=sent["rounds"].to_numpy(np.float64),
            method_s=sent["encode_s"].to_numpy(np.float64),
        )

    @property
    def notes(self) -> list[str]:
        """What the figures leave open, a sentence each."""
        notes = []
        if self.compute == "wall" and self.stretch > BUSY_CORES:
            notes.append(
                f"Compute took {self.stretch:.2f} times its CPU seconds. On CPUs this means that stages shared cores: "
                "`--compute cpu` prices them on cores of their own."
            )
        if self.row.get("engine") == "inline":
            notes.append(
                "Recorded with the inline engine, which moves no packets and updates its stages in turn: "
                "what Ray needs for a packet is not in the figures."
            )
        inlined = float(np.mean([_share_inlined(profile) for profile in self.profiles.values()]))
        if inlined and self.driver is None:
            notes.append(
                f"{inlined:.0%} of the packets were small enough for Ray to send them by way of the driver. "
                "They are priced as going straight: `--driver 0` prices the detour, the driver beside the first stage."
            )
        low, high = self.wire_bytes.min(), self.wire_bytes.max()
        if high > 1.01 * low:
            notes.append(f"The packets of a step varied between {low:,.0f} and {high:,.0f} bytes; times are means.")
        if self.num_replicas > 1:
            notes.append(
                f"{self.num_replicas} replicas average their gradients once all pipelines are done, with the bytes and rounds recorded."
            )
        return notes

    def placement(self, network: Network) -> Placement:
        """Return the hosts: workers spread evenly over those that the network names, else one each."""
        return replace(Placement.spread(self.num_workers, network.num_hosts), driver=self.driver)

    def step_seconds(self, networks: Sequence[Network], dense: Replay | None = None) -> Floats:
        """Return the seconds of every priced step on every network: shape (networks, steps).

        With `dense`, of this run's compute with the packets and codec times of that one, so that chance in the compute of two
        recordings decides nothing.
        """
        profiles = list(self.profiles.values())
        if dense is not None:
            self._check_alike(dense)
            other = dense.mean_profile
            profiles = [profile.with_packets_of(other) for profile in profiles]
        try:
            if self.driver is None:
                found = step_seconds(self.schedule, profiles, networks)
            else:
                each = [step_seconds(self.schedule, profiles, [n], placement=self.placement(n)) for n in networks]
                found = np.concatenate(each)
        except ValueError as error:
            raise ReplayError(str(error)) from None
        total: Floats = found + np.array([[self.tied_s(network)] for network in networks])
        return total

    def tied_s(self, network: Network) -> float:
        """Return the seconds in which the owners of tied parameters exchange their gradients, at the step's end."""
        if self.tied.empty:
            return 0.0
        worst = self.tied.max()
        return tied_s(
            network,
            self.placement(network).hosts,
            self.num_replicas,
            [self._owner[int(stage)] for stage in self.tied.index],
            float(worst["wire_bytes"]),
            float(worst["rounds"]),
            fused=bool(self.row.get("fused_embedding")),
        )

    def timelines(self, network: Network) -> Iterator[Timeline]:
        """Yield the simulated timeline of every priced step."""
        for seed, profile in enumerate(self.profiles.values()):
            yield simulate(self.schedule, profile, network, placement=self.placement(network), seed=seed)

    def split(self, network: Network) -> Split:
        """Return where the seconds of a step go on `network`, mean over the priced steps."""
        parts = np.zeros((self.num_workers, len(PARTS)))
        pipeline_s = outside_s = utilisation = 0.0
        critical: dict[str, float] = {}
        for timeline in self.timelines(network):
            parts += [[getattr(worker, name) for name in PARTS] for worker in timeline.workers()]
            pipeline_s += timeline.pipeline_s
            outside_s += timeline.step_s - timeline.pipeline_s
            utilisation += max((wire.utilisation for wire in timeline.wires()), default=0.0)
            for kind, seconds in timeline.explain().items():
                critical[kind] = critical.get(kind, 0.0) + seconds
        count = len(self.profiles)
        workers = pd.DataFrame(parts / count, columns=list(PARTS))
        per = len(self.rows)
        stages = [[s for s, worker in enumerate(self._owner) if worker == w % per] for w in range(self.num_workers)]
        workers.insert(0, "worker", range(self.num_workers))
        workers.insert(1, "stages", [", ".join(map(str, of_worker)) for of_worker in stages])
        return Split(
            workers=workers,
            pipeline_s=pipeline_s / count,
            outside_s=outside_s / count + self.tied_s(network),
            utilisation=utilisation / count,
            critical_s={kind: seconds / count for kind, seconds in critical.items()},
        )

    def steps_to_target(self, target: Target) -> dict[str, int | None]:
        """Return the steps after which an evaluation first reached `target`, by mode: links "on" and "off"; None where none did.

        Evaluations are every `evaluate_every_steps` steps, so that is how fine the answer is.
        """
        evals = self._evals[self._evals["batchnorm"] == "running"]
        if not len(evals):
            raise ReplayError(
                f"The run in {self.run.folder} has no evaluations to find {target} in: it is {self.row.get('status')}."
            )
        found: dict[str, int | None] = {}
        for mode in MODES:
            rows = evals[evals["mode"] == mode].sort_values("step")
            reached = rows[target.reached(rows[target.metric])]
            found[mode] = int(reached["step"].iloc[0]) if len(reached) else None
        return found

    def best(self, metric: str, mode: str) -> float:
        """Return the best evaluation with links in `mode`."""
        evals = self._evals[(self._evals["batchnorm"] == "running") & (self._evals["mode"] == mode)][metric]
        return float(evals.max() if METRICS[metric] == ">=" else evals.min())

    def break_even_bps(self, dense: Replay, network: Network) -> float | None:
        """Return the bandwidth below which a mean step is faster than with the packets of `dense`, all else of `network` kept.

        0 where it never is, infinity where it always is (from 100 kbit/s to 1 Tbit/s); None where the network has no one
        bandwidth.
        """
        self._check_alike(dense)
        if isinstance(network.bandwidth_bps, tuple):
            return None
        other = self.mean_profile.with_packets_of(dense.mean_profile)
        placement = self.placement(network)
        return break_even_bps(self.schedule, self.mean_profile, other, network, placement=placement)

    @cached_property
    def mean_profile(self) -> Profile:
        """The mean of all priced steps."""
        return mean_profile(list(self.profiles.values()))

    def trace(self, network: Network) -> tuple[int, Iterator[dict[str, Any]]]:
        """Return the priced step of median duration on `network`, and its trace events, for `raysim.network.trace.write_trace`."""
        seconds = self.step_seconds([network])[0]
        place = int(np.argsort(seconds, kind="stable")[(len(seconds) - 1) // 2])
        step, profile = list(self.profiles.items())[place]
        return step, trace_events(
            simulate(self.schedule, profile, network, placement=self.placement(network), seed=place)
        )

    def _check_alike(self, dense: Replay) -> None:
        for field in ("schedule", "num_stages", "num_microbatches", "batch_size", "model", "data", "engine"):
            mine, theirs = self.row.get(field), dense.row.get(field)
            if mine != theirs:
                raise ReplayError(
                    f"`{field}` of the run in {dense.run.folder} must be {mine!r}, as of the one it is set against, but got {theirs!r}."
                )
        if not np.allclose(dense.dense_bytes.mean(), self.dense_bytes.mean()):
            raise ReplayError(
                f"The run in {dense.run.folder} must carry tensors of {self.dense_bytes.mean():,.0f} bytes a step, as the one it is "
                f"set against, but got {dense.dense_bytes.mean():,.0f}."
            )

    def _read_overheads(self, columns: dict[str, NDArray[Any]]) -> Overheads:
        """Return what calls and packets took beside compute, codec and wire, from the run itself.

        Of the inline engine's gaps nothing can be learnt about packets: there only what calls and steps took is read.
        """
        seconds = dict(zip(self.steps["step"].tolist(), self.steps["seconds"].tolist(), strict=True))
        if self.row.get("engine") != "inline":
            return read_overheads(columns, self.rows, seconds)
        frame = pd.DataFrame({name: columns[name] for name in ("step", "start_s", "end_s")})
        busy = columns["decode_s"] + columns["compute_wall_s"] + columns["encode_s"]
        spare = (frame["end_s"] - frame["start_s"] - busy).sum() / frame["step"].nunique()
        num_calls = sum(len(calls(row, self.num_stages)) for row in self.rows)
        by_step = frame.groupby("step")
        spans = by_step["end_s"].max() - by_step["start_s"].min()
        outside = np.mean([seconds[step] - span for step, span in spans.items()])
        return Overheads(max(float(spare) / num_calls, 0.0), 0.0, 0.0, max(float(outside), 0.0))


def _chosen(steps: pd.Series[int], max_steps: int) -> list[int]:
    """Return at most `max_steps` of the profiled steps, evenly spread; those that warm up only where there are no others."""
    profiled = sorted(int(step) for step in steps.unique())
    warm = [step for step in profiled if step >= WARMUP_STEPS] or profiled
    places = np.linspace(0, len(warm) - 1, min(max_steps, len(warm))).astype(int)
    return [warm[place] for place in places]


def _stretch(profiles: Iterable[Profile]) -> float:
    """Return the wall over the CPU seconds of all compute; 1 where CPU seconds were not recorded."""
    wall = cpu = 0.0
    for profile in profiles:
        known = ~np.isnan(profile.cpu_s)
        wall += float(profile.compute_s[known].sum())
        cpu += float(profile.cpu_s[known].sum())
    return wall / cpu if cpu else 1.0


def _on_own_cores(profile: Profile, threads: int) -> Profile:
    """Return the profile with CPU seconds for wall seconds, a stage's codecs shortened as its compute is."""
    alone = np.where(np.isnan(profile.cpu_s), profile.compute_s, np.minimum(profile.cpu_s / threads, profile.compute_s))
    wall = profile.compute_s.sum(axis=(2, 3), keepdims=True)
    share = np.divide(alone.sum(axis=(2, 3), keepdims=True), wall, out=np.ones_like(wall), where=wall > 0)
    return replace(profile, compute_s=alone, decode_s=profile.decode_s * share, encode_s=profile.encode_s * share)


def _share_inlined(profile: Profile) -> float:
    packets = profile.wire_bytes > 0
    return float(profile.inlined[packets].mean()) if packets.any() else 0.0
