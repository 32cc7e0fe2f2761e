"""One trial: a configuration and its seeds one after the other, each an ordinary run in its own folder.

Tune calls `step`, which trains until there is something to report. The actor is reused for trials with equal resources
(`reuse_actors`), including its warm stage actors and its data.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Collection, Generator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from ray import tune

from raysim.config import ConfigError, RunConfig
from raysim.engine.nodes import LABEL
from raysim.limits import release_memory
from raysim.network.presets import parse_network
from raysim.pipeline.errors import StageError, WorkerLostError
from raysim.pipeline.state import CheckpointError
from raysim.plugins import modules_in, trusting
from raysim.quality import Measure
from raysim.records import RecordsError, Run
from raysim.screening.verdicts import HOPELESS, why_hopeless
from raysim.storage.files import is_locked
from raysim.sweeps.objectives import Figure, Objective, Pricing, any_priced, cost_among, figures
from raysim.sweeps.store import Store, find_disk_error
from raysim.sweeps.warm_engine import ResourcesLostError, WarmActors, WarmEngine
from raysim.training.checkpoint import checkpoints
from raysim.training.events import HopelessError, Interruption
from raysim.training.run import Training
from raysim.training.trackers import Trackers
from raysim.workloads.data import Data, load_data

if TYPE_CHECKING:
    from raysim.analysis import Replay

HEARTBEAT_S = 1.0  # longest time between two reports of a trial; Ctrl-C waits for the next one
POOLED_RUNS = 24  # other runs whose compute is pooled with a trial's for its price while the sweep runs
UNLOCK_S = 30.0  # seconds for which processes of a killed sweep may still lock a run's folder


@dataclass(frozen=True)
class TrialSpec:
    """A trial's settings, as passed by Ray Tune to its process."""

    number: int
    config: RunConfig = field(repr=False)
    """Of the run, with any seed."""
    seeds: tuple[int, ...]
    out: str
    """The study's folder, as every node finds it, or its bucket."""
    objectives: tuple[Objective, ...] = field(repr=False)
    engine: str
    pricing: Pricing = field(repr=False)
    bundles: list[dict[str, float]] = field(repr=False)
    """The reservation in Ray: see `Share.bundles`."""
    watched: bool = True
    """Whether evaluations may end the trial early: not for a baseline."""
    folder: str = ""
    """Where the sweep was started: relative paths of data are relative to it."""
    until: float = 1.0
    """Share of the steps after which to stop, with a checkpoint."""
    screens: bool = False
    """Whether a setting that breaks trained weights at once ends before its first step."""

    def runs(self) -> list[str]:
        """Return the folders of the seeds' runs, relative to the study's."""
        return [trial_folder(self.number, seed) for seed in self.seeds]


def trial_folder(trial: int, seed: int) -> str:
    """Return the folder of a trial's run, relative to the study's."""
    return f"trials/{trial}-s{seed}"


class TrialOutcome(NamedTuple):
    """The result of a finished trial, or of a part of one."""

    status: str
    """One of `trial_rows.ENDED`, or "stopped" before the end of the steps."""
    seconds: float
    error: str | None
    figures: dict[str, Figure]


LARGE_BYTES = 1 << 30  # of a run's stages, after which a second is well spent on what is left of it


class SweepTrial(tune.Trainable):
    """A trial run by Tune, whose parameters are {"trial": TrialSpec}."""

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the reservation of a trial, at the run's placement."""
        spec: TrialSpec = config["trial"]
        placement = spec.config.placement
        strategy = "SPREAD" if placement == "spread" else "PACK"
        if placement in ("spread", "pack"):
            return tune.PlacementGroupFactory(spec.bundles, strategy=strategy)
        labelled = {LABEL: f"in({','.join(parse_network(placement).sites)})"}
        return tune.PlacementGroupFactory(
            spec.bundles, strategy=strategy, bundle_label_selector=[{}, *[labelled] * (len(spec.bundles) - 1)]
        )

    def setup(self, config: dict[str, Any]) -> None:
        self._warm = WarmActors()
        self._data: dict[str, Data] = {}
        self._is_large = False
        self._begin(config["trial"])

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._end()
        self._begin(new_config["trial"])
        return True

    def step(self) -> dict[str, Any]:
        return next(self._reports)

    def cleanup(self) -> None:
        self._end()
        self._warm.dismiss()

    def _begin(self, spec: TrialSpec) -> None:
        self._spec = spec
        if spec.folder and Path(spec.folder).is_dir():  # Tune has changed the working directory
            os.chdir(spec.folder)
        self._store = Store(spec.out)
        self._reports = self._run()

    def _end(self) -> None:
        self._reports.close()  # interrupts a running run, which records it
        if self._is_large:  # else the next run would take its memory beside that of this one
            release_memory()

    def _run(self) -> Generator[dict[str, Any], None, None]:
        """Yield the reports to Tune, the outcome last."""
        spec, runs, seconds = self._spec, list[Run](), 0.0
        began = time.monotonic()
        status, error = "finished", None
        for i, (seed, name) in enumerate(zip(spec.seeds, spec.runs(), strict=True)):
            try:
                folder = yield from self._train(seed, name, i)
            except HopelessError as why:
                yield {"done": True, "outcome": TrialOutcome("pruned", time.monotonic() - began, str(why), {})}
                return
            except ResourcesLostError:
                raise  # to Tune, which reserves resources for the trial again
            except Exception as failure:  # user models and codecs may raise anything: the sweep continues
                disk_error = find_disk_error(failure, self._store.local)
                if disk_error is not None:
                    yield {"done": True, "disk_error": disk_error}
                    return
                known = isinstance(failure, (ConfigError, StageError, WorkerLostError, CheckpointError, RecordsError))
                text = str(failure) if known else f"{type(failure).__name__}: {failure}"
                status, error = "failed", _of_seed(seed, spec.seeds, text)
                if not isinstance(failure, ConfigError):  # raised before actors are used
                    self._warm.dismiss()
                break
            run = Run(folder)
            runs.append(run)
            if spec.until < 1 and run.status != "diverged":
                status = "stopped"
                continue
            seconds += float(run.row["seconds"])
            if run.status == "diverged":
                status, error = "diverged", _of_seed(seed, spec.seeds, str(run.row["error"]))
                break
        if status == "finished" and spec.objectives:
            modules = modules_in(repr(spec.config.flat()))
            outcome = finished_outcome(spec.objectives, runs, spec.pricing, modules, seconds)
        else:
            outcome = TrialOutcome(status, seconds, error, {})
        yield {"done": True, "outcome": outcome}

    def _train(self, seed: int, name: str, i: int) -> Generator[dict[str, Any], None, Path]:
        """Train the `i`-th seed, or continue its run; return its folder."""
        spec = self._spec
        _await_unlocked(self._store.local / name)
        folder = self._store.fetch(name)
        before = _status(folder)
        if before in ("finished", "diverged"):
            return folder
        ending = Interruption()
        config = spec.config.model_copy(update={"seed": seed})
        curves_name = f"tensorboard/{Path(name).name}"
        tools = dict.fromkeys(("tensorboard", *(config.report_to or ())))
        training = Training(
            config,
            out=folder,
            engine=partial(WarmEngine, warm=self._warm) if spec.engine == "ray" else "inline",
            resume=before is not None,
            data=self._load(config),
            ending=ending,
            refuse=why_hopeless if spec.screens and i == 0 else None,
        )
        self._is_large = sum(each.total_bytes for each in training.plan.memories) > LARGE_BYTES
        training.trackers = Trackers(tools, self._store.inside(curves_name))  # TensorBoard's in the study's folder
        first, end = training.plan.first_step, training.plan.end_step
        until = first + part_steps(spec.until, end - first)
        if spec.until < 1 and any(each.step >= until for each in checkpoints(folder / "checkpoints")):
            return folder
        reported, step = time.monotonic(), first
        evaluated: dict[str, float] = {}
        with suppress(KeyboardInterrupt) if until < end else nullcontext():  # raised by a run that is asked to end
            for event in training.events():
                if event.kind == "step":
                    step = event.row["step"] + 1
                    ending.signal = signal.SIGINT if step == until < end else ending.signal
                elif event.kind == "warning" and event.row.get("breaks") and spec.screens and until < end:
                    raise HopelessError(f"{HOPELESS}: {event.row['reason']}")
                elif event.kind == "eval" and event.row["batchnorm"] == "running":
                    evaluated |= {f"{metric}_{event.row['mode']}": event.row[metric] for metric in event.measures}
                progress = {"progress": (i + (step - first) / (end - first)) / len(spec.seeds), "seed": seed}
                if "loss_off" in evaluated and step < end:  # the last evaluated mode
                    self._store.send_run(name)
                    # Early stopping is decided on the first seed: the others would start the curve again.
                    shown = {"evaluated_step": step - first, **evaluated}
                    yield {**progress, **(shown if spec.watched and not i else {})}
                    reported, evaluated = time.monotonic(), {}
                elif time.monotonic() - reported >= HEARTBEAT_S:
                    self._store.send_run(name)
                    yield progress
                    reported = time.monotonic()
        self._store.send(name)
        if until == end:
            self._store.send(curves_name)
        return folder

    def _load(self, config: RunConfig) -> Data:
        """Return the data, loaded once for all trials that share it; splits do not depend on the seed."""
        key = json.dumps([config.data.name, config.data.options], sort_keys=True, default=str)
        if key not in self._data:
            try:
                self._data = {key: load_data(config.data.name, config.data.options, config.seed)}
            except ValueError as error:
                raise ConfigError(str(error)) from None
        return self._data[key]


def trial_figures(
    objectives: Sequence[Objective], runs: Sequence[Run], pricing: Pricing, modules: Collection[str]
) -> dict[str, Figure]:
    """Return every objective of a trial. Prices are preliminary, pooled with the runs finished on this machine, until the study ends.

    `modules` are trusted, see `raysim.plugins`. Raises ReplayError if a run cannot be priced.
    """
    from raysim.analysis import Replay, beside

    pooled = list[Replay]()
    if any_priced(objectives):
        with trusting(*modules):
            pooled = beside(runs, most=POOLED_RUNS, **pricing)

    def replays(transport: str) -> list[tuple[Replay, None]]:
        return [(Replay(each.recording, costs=each.costs, transport=transport), None) for each in pooled]

    return figures(objectives, runs, replays)


def finished_outcome(
    objectives: Sequence[Objective], runs: Sequence[Run], pricing: Pricing, modules: Collection[str], seconds: float
) -> TrialOutcome:
    """Return the outcome of a trial trained to its end: failed if its steps cannot be priced."""
    try:
        return TrialOutcome("finished", seconds, None, trial_figures(objectives, runs, pricing, modules))
    except ValueError as error:  # ReplayError among them
        return TrialOutcome("failed", seconds, str(error), {})


def step_costs(
    objectives: Sequence[Objective], runs: Sequence[Run], pricing: Pricing, modules: Collection[str]
) -> list[float]:
    """Return the cost of a step of each run: its price, or its bytes if no objective is a price.

    It is 0 without either, and if the run does not show it yet: before its first exchange of replicas or compressed step.
    """
    from raysim.analysis import Replay, ReplayError
    from raysim.analysis.data.recording import Recording
    from raysim.analysis.runs.job_costs import JobCosts

    cost = cost_among(objectives)
    if cost is None:
        return [0.0] * len(runs)
    if cost.network is None or cost.transport is None:
        return [_step_bytes(run) for run in runs]
    seconds, recordings = [0.0] * len(runs), dict[int, Recording]()
    with trusting(*modules):
        for i, run in enumerate(runs):
            with suppress(ReplayError):
                recordings[i] = Recording(run, clock=pricing["compute"])
        with suppress(ReplayError):
            costs = JobCosts(recordings.values(), pricing["profile"])
            for i, recording in recordings.items():
                priced = Replay(recording, costs=costs, transport=cost.transport)
                seconds[i] = priced.step_s([cost.network])[0].value
    return seconds


def _step_bytes(run: Run) -> float:
    """Return the mean bytes of a run's last compressed steps, in whole periods of its exchanges; 0 if it has fewer."""
    period = int(run.row.get("exchange_period") or 1)
    steps = run.steps[run.steps["step"] >= int(run.row.get("compress_from") or 0)]
    count = len(steps) - len(steps) % period
    return float(steps["wire_bytes"].tail(count).mean()) if count else 0.0


def forecast_values(
    objectives: Sequence[Objective],
    runs: Sequence[Run],
    dense: Sequence[Run],
    measure: Measure,
    harm: float,
    pricing: Pricing,
    modules: Collection[str],
) -> list[float]:
    """Extrapolate the objectives of unfinished `runs` to whole runs; empty if one is unknown.

    Quality is taken from `dense` runs and worsened by `harm` in the unit of `measure`; the steps to come send what the last ones did.
    """
    priced_ones = tuple(each for each in objectives if each.network is not None)
    try:
        known = trial_figures(priced_ones, runs, pricing, modules) if priced_ones else {}
    except ValueError:  # ReplayError among them: no step is profiled yet
        return []
    values: list[float | None] = []
    for objective in objectives:
        reached: list[Any] = [run.row.get(f"final_{objective.name}") for run in dense]
        if objective.name == "wire_bytes":
            count, sent = len(dense[0].steps), [run.steps["wire_bytes"] for run in runs]
            coming = [(count - len(each)) * _step_bytes(run) for each, run in zip(sent, runs, strict=True)]
            values.append(fmean(float(each.sum()) + more for each, more in zip(sent, coming, strict=True)))
        elif objective.quality == measure and None not in reached:
            values.append(measure.harmed(fmean(map(float, reached)), harm))
        else:
            values.append(known[objective.name].value if objective.name in known else None)
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return finite if len(finite) == len(values) else []


def part_steps(share: float, num_steps: int) -> int:
    """Return the steps of a part that ends at a share of a run's steps: at least one."""
    return max(1, round(share * num_steps))


def _status(folder: Path) -> str | None:
    """Return the status of the run in a folder, None if there is none."""
    try:
        return Run(folder).status
    except RecordsError:
        return None


def _of_seed(seed: int, seeds: tuple[int, ...], text: str) -> str:
    return f"seed {seed}: {text}" if len(seeds) > 1 else text


def _await_unlocked(folder: Path) -> None:
    """Wait until no process of a killed sweep locks the run's folder; its Ray takes a moment to end."""
    deadline = time.monotonic() + UNLOCK_S
    while is_locked(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
