"""One trial: a configuration, its seeds one after the other, each an ordinary run in a folder of its own.

Tune calls `step`, which trains until there is something to report. The actor is used again for trials of equal resources
(`reuse_actors`), with its warm stage actors and its data.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Generator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ray import tune

from raysim.config import ConfigError, RunConfig, make_config
from raysim.file_lock import is_locked
from raysim.pipeline.errors import StageError, WorkerLostError
from raysim.pipeline.state import CheckpointError
from raysim.plugins import modules_in, trusting
from raysim.records import RecordsError, Run
from raysim.sweeps.board import Board
from raysim.sweeps.objectives import Figure, Objective, by_transport, figures, priced
from raysim.sweeps.refusals import find_refusal
from raysim.sweeps.store import Store
from raysim.sweeps.warm_actors import RoomLostError, WarmActors, WarmEngine
from raysim.training.run import Training
from raysim.workloads.data import Data, load_data

if TYPE_CHECKING:
    from raysim.analysis import Replay

HEARTBEAT_S = 1.0  # at most between two words of a trial: Ctrl-C waits for the next one
COMPANY = 24  # other runs that a trial's prices are pooled with while the sweep goes
UNLOCK_S = 30.0  # seconds that processes of a killed sweep may still hold a run's folder


class Spec(NamedTuple):
    """A trial's settings, serialised for Ray Tune, which copies configurations and writes them to disk."""

    number: int
    values: dict[str, Any]  # of the run, seed apart
    seeds: list[int]
    out: str  # the study's folder or bucket
    objectives: list[dict[str, Any]]
    engine: str
    compute: str
    bundles: list[dict[str, float]]
    watched: bool = True  # whether evaluations may end it early: not a baseline
    folder: str = ""  # in which the sweep was started, where relative paths of data lead from

    def runs(self) -> list[str]:
        """Return the folders of the seeds' runs, in the study's."""
        return [f"trials/{self.number}-s{seed}" for seed in self.seeds]


class Outcome(NamedTuple):
    """The result of a finished trial, as JSON."""

    status: str
    seconds: float
    error: str | None
    figures: dict[str, Figure]


class SweepTrial(tune.Trainable):
    """A trial in Tune's hands."""

    def setup(self, config: dict[str, Any]) -> None:
        self._warm = WarmActors()
        self._data: dict[str, Data] = {}
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._end()
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        return next(self._reports)

    def cleanup(self) -> None:
        self._end()
        self._warm.dismiss()

    def _begin(self, config: dict[str, Any]) -> None:
        values = json.loads(config["spec"])
        self._spec = Spec(**values)
        if self._spec.folder and Path(self._spec.folder).is_dir():  # Tune has gone to a folder of its own
            os.chdir(self._spec.folder)
        self._store = Store(self._spec.out)
        self._reports = self._run()

    def _end(self) -> None:
        self._reports.close()  # a run that goes on is interrupted, and says so

    def _run(self) -> Generator[dict[str, Any], None, None]:
        """Yield the reports to Tune, the outcome last."""
        spec, runs, seconds = self._spec, list[Run](), 0.0
        status, error, found = "finished", None, dict[str, Figure]()
        for place, (seed, name) in enumerate(zip(spec.seeds, spec.runs(), strict=True)):
            try:
                folder = yield from self._train(seed, name, place)
            except RoomLostError:
                raise  # to Tune, which reserves room for the trial anew
            except Exception as failure:  # a model or a codec may fail in ways of its own: the sweep goes on
                refusal = find_refusal(failure, self._store.local)
                if refusal is not None:
                    yield {"done": True, "refused": refusal}
                    return
                known = isinstance(failure, (ConfigError, StageError, WorkerLostError, CheckpointError, RecordsError))
                text = str(failure) if known else f"{type(failure).__name__}: {failure}"
                status, error = "failed", _says(seed, spec.seeds, text)
                if not isinstance(failure, ConfigError):  # of which nothing has begun
                    self._warm.dismiss()
                break
            run = Run(folder)
            runs.append(run)
            seconds += float(run.row["seconds"])
            if run.status == "diverged":
                status, error = "diverged", _says(seed, spec.seeds, str(run.row["error"]))
                break
        if status == "finished":
            try:
                objectives = [Objective(**one) for one in spec.objectives]
                found = self._figures(objectives, runs)
            except ValueError as failure:  # ReplayError among them
                status, error = "failed", str(failure)
        outcome = Outcome(status, seconds, error, found)
        yield {"done": True, "outcome": json.dumps(outcome)}

    def _figures(self, objectives: list[Objective], runs: list[Run]) -> dict[str, Figure]:
        """Return every objective of the trial, priced over its own transport."""
        from raysim.analysis import Replay

        replays, found = self._priced(runs) if priced(objectives) else [], dict[str, Figure]()
        for transport, some in by_transport(objectives).items():
            over = [Replay(one.recording, costs=one.costs, transport=transport) for one in replays]
            found |= figures(some, runs, over)
        return {one.name: found[one.name] for one in objectives}

    def _priced(self, runs: list[Run]) -> list[Replay]:
        """Return the runs priced in company with the study's ended runs of this machine; prices are settled at the study's end."""
        from raysim.analysis import beside

        with trusting(*modules_in(repr(self._spec.values))):
            return beside(runs, most=COMPANY, compute=self._spec.compute)

    def _train(self, seed: int, name: str, place: int) -> Generator[dict[str, Any], None, Path]:
        """Train one seed, or go on with it; return its folder."""
        spec = self._spec
        _await_unlocked(self._store.local / name)
        folder = self._store.fetch(name)
        before = _status(folder)
        if before in ("finished", "diverged"):
            return folder
        config = make_config({**spec.values, "seed": seed})
        training = Training(
            config,
            out=folder,
            engine=partial(WarmEngine, warm=self._warm) if spec.engine == "ray" else "inline",
            resume=before is not None,
            data=self._load(config),
        )
        board = f"tensorboard/{Path(name).name}"
        with Board(self._store.local / board) as shown:
            total = training.plan.num_steps
            said, step = time.monotonic(), 0
            evaluated: dict[str, float] = {}
            for event in training.events():
                shown.show(event)
                if event.kind == "step":
                    step = event.row["step"] + 1
                elif event.kind == "eval" and event.row["batchnorm"] == "running":
                    evaluated |= {f"{metric}_{event.row['mode']}": event.row[metric] for metric in event.measures}
                progress = {"progress": (place + step / total) / len(spec.seeds), "seed": seed}
                if "loss_off" in evaluated and step < total:  # the last mode that is evaluated
                    self._store.send_run(name)
                    # Whether a trial goes on is decided on its first seed: the others would start the curve again.
                    yield {**progress, **({"evaluated_step": step, **evaluated} if spec.watched and not place else {})}
                    said, evaluated = time.monotonic(), {}
                elif time.monotonic() - said >= HEARTBEAT_S:
                    self._store.send_run(name)
                    yield progress
                    said = time.monotonic()
            shown.show_result(config, Run(folder))
        self._store.send(name)
        self._store.send(board)
        return folder

    def _load(self, config: RunConfig) -> Data:
        """Return the data, loaded once for all trials that read the same; splits are alike for every seed."""
        key = json.dumps([config.data.name, config.data.options], sort_keys=True, default=str)
        if key not in self._data:
            try:
                self._data = {key: load_data(config.data.name, config.data.options, config.seed)}
            except ValueError as error:
                raise ConfigError(str(error)) from None
        return self._data[key]


def _status(folder: Path) -> str | None:
    """Return the status of the run in a folder, None where there is none."""
    try:
        return Run(folder).status
    except RecordsError:
        return None


def _says(seed: int, seeds: list[int], text: str) -> str:
    return f"seed {seed}: {text}" if len(seeds) > 1 else text


def _await_unlocked(folder: Path) -> None:
    """Wait until no process of a sweep that was killed holds the run's folder; its Ray takes a moment to end."""
    deadline = time.monotonic() + UNLOCK_S
    while is_locked(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
