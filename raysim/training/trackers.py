"""Trackers: a run's configuration, curves and results in TensorBoard, Weights & Biases, MLflow or Trackio.

Only the process that drives a run tracks it. Each tool writes to its local store; its own environment variables (`WANDB_MODE`,
`MLFLOW_TRACKING_URI`, `TRACKIO_SPACE_ID`) name a server. A resumed run continues under its `run_id`.
"""

from __future__ import annotations

import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from raysim.config import ConfigError
from raysim.training.events import Event

FLUSH_S = 5.0  # between two flushes of TensorBoard's file while values arrive

Values = Mapping[str, float]


class TrackedRun(NamedTuple):
    """The names of a run in a tool."""

    run_id: str
    """The same in every session."""
    name: str
    """To show: that of its folder."""
    project: str


class Tracker(ABC):
    """A run in one tool. Errors of the tool, such as a missing package or a refusing server, are passed on."""

    package: ClassVar[str]
    """The tool's package, which is imported by `start`."""

    def __init__(self, folder: Path) -> None:
        """`folder`: the folder for the run's curves, if the tool writes them there."""
        self._folder = folder

    @abstractmethod
    def start(self, config: Mapping[str, Any], identity: TrackedRun) -> None:
        """Begin a run with its configuration by key, or continue the run with this identity."""

    @abstractmethod
    def log(self, step: int, values: Values) -> None:
        """Add values at a step."""

    @abstractmethod
    def finish(self, results: Values, *, finished: bool) -> None:
        """End the session. `results`: an ended run's results, else empty. `finished`: the run did not fail."""


class TensorBoard(Tracker):
    """A file of events in a folder, written in the caller's thread.

    `SummaryWriter` of tensorboardX writes in a thread, which dies when the disk is full; its caller then waits forever. This
    class raises OSError.
    """

    package = "tensorboardX"

    def start(self, config: Mapping[str, Any], identity: TrackedRun) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self._folder.mkdir(parents=True, exist_ok=True)
        self._config = config
        session = len(list(self._folder.iterdir()))  # two of one second would write the same file
        self._file = EventsWriter(str(self._folder / "events"), f".{session}")
        self._flushed = time.monotonic()

    def log(self, step: int, values: Values) -> None:
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._write(scalar(name, value), step)

    def finish(self, results: Values, *, finished: bool) -> None:
        from tensorboardX.summary import hparams

        if results:  # the page of hyperparameters
            for summary in hparams(dict(self._config), dict(results)):
                self._write(summary, 0)
            self.log(0, results)
        self._file.close()

    def _write(self, summary: Any, step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event as Entry

        self._file.write_event(Entry(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self._flushed >= FLUSH_S:
            self._file.flush()
            self._flushed = time.monotonic()


class WandB(Tracker):
    """A run of Weights & Biases, offline unless `WANDB_MODE` says otherwise: `wandb sync wandb/offline-*` uploads it."""

    package = "wandb"

    def start(self, config: Mapping[str, Any], identity: TrackedRun) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run = wandb.init(
            project=identity.project,
            id=identity.run_id,
            name=identity.name,
            config=dict(config),
            resume=None if mode == "offline" else "allow",
            mode=mode,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, values: Values) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, results: Values, *, finished: bool) -> None:
        self._run.summary.update(dict(results))
        self._run.finish(exit_code=0 if finished else 1)


class MLflow(Tracker):
    """A run of MLflow, found again by its tag `run_id`; local (`mlflow ui`) unless `MLFLOW_TRACKING_URI` names a server."""

    package = "mlflow"

    def start(self, config: Mapping[str, Any], identity: TrackedRun) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(identity.project)
        number = (
            experiment.experiment_id if experiment is not None else self._client.create_experiment(identity.project)
        )
        begun = self._client.search_runs([number], f"tags.run_id = '{identity.run_id}'", max_results=1)
        tags = {"run_id": identity.run_id}
        run = begun[0] if begun else self._client.create_run(number, tags=tags, run_name=identity.name)
        self._run_id = run.info.run_id
        if begun:
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            from mlflow.entities import Param

            params = [Param(key, str(value)) for key, value in config.items()]
            self._client.log_batch(self._run_id, params=params)

    def log(self, step: int, values: Values) -> None:
        from mlflow.entities import Metric

        now_ms = int(1000 * time.time())
        metrics = [Metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, results: Values, *, finished: bool) -> None:
        if results:
            self.log(0, results)
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "FAILED")


class Trackio(Tracker):
    """A run of Trackio, in its local database (`trackio show`)."""

    package = "trackio"

    def start(self, config: Mapping[str, Any], identity: TrackedRun) -> None:
        import trackio

        self._tool = trackio
        name = f"{identity.name}-{identity.run_id}"  # which is also its id
        with redirect_stdout(sys.stderr):
            trackio.init(identity.project, name=name, config=dict(config), resume="allow", embed=False)

    def log(self, step: int, values: Values) -> None:
        self._tool.log(dict(values), step=step)

    def finish(self, results: Values, *, finished: bool) -> None:
        with redirect_stdout(sys.stderr):
            if results:
                self._tool.log(dict(results))
            self._tool.finish()


_TOOLS: Mapping[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def check_trackers(names: Iterable[str]) -> None:
    """Raise ConfigError if the package of a tool in `report_to` is missing."""
    for name in names:
        package = _TOOLS[name].package
        if find_spec(package) is None:
            extra = package if name == "tensorboard" else f"'raysim[{name}]'"
            raise ConfigError(
                f"`report_to` = {name!r} needs the package {package}, which is not installed: `pip install {extra}`."
            )


class Trackers:
    """The trackers of a run: each event goes to all of them.

    TensorBoard's errors, of the disk, are raised. Another tool that fails is left out from then on, and `warning` says so: training
    does not depend on it. `folder` is TensorBoard's. Raises ConfigError if a tool's package is missing.
    """

    def __init__(self, names: Collection[str], folder: Path) -> None:
        check_trackers(names)
        self._all = [_TOOLS[name](folder) for name in names]
        self._last = -1  # the last step with values: a restart repeats steps
        self._started = False
        self.warning: str | None = None

    def _start(self, config: Mapping[str, Any], identity: TrackedRun) -> None:
        """Begin or continue the run in every tool."""
        plain = bool, int, float, str
        given = {key: value for key, value in config.items() if value is not None}
        known = {key: value if isinstance(value, plain) else str(value) for key, value in given.items()}
        self._started = True
        self._each("start", known, identity)

    def followed(self, events: Iterable[Event], config: Mapping[str, Any], identity: TrackedRun) -> Iterator[Event]:
        """Yield events after adding their values to every tool, from the first step on, and a warning if one fails."""
        for event in events:
            warned, values = self.warning, values_of(event)
            if values and not self._started:
                self._start(config, identity)
            if values and event.row["step"] >= self._last:
                self._last = event.row["step"]
                self._each("log", self._last, values)
            yield event
            if self.warning != warned:
                yield Event("warning", {"step": event.row["step"], "reason": self.warning})

    def finish(self, row: Mapping[str, Any], *, over: bool) -> None:
        """End the session in every tool, with the final figures in the run's row if the run is `over`."""
        finals = {name: value for name, value in row.items() if name.startswith("final_") and value is not None}
        results = {f"final/{name.removeprefix('final_')}": float(value) for name, value in finals.items() if over}
        if self._started:
            self._each("finish", results, finished=row["status"] == "finished")

    def _each(self, method: str, *arguments: Any, **options: Any) -> None:
        for tracker in list(self._all):
            try:
                getattr(tracker, method)(*arguments, **options)
            except Exception as error:
                if isinstance(tracker, TensorBoard):
                    raise
                self._all.remove(tracker)
                reason = " ".join(str(error).split()) or type(error).__name__
                self.warning = f"`report_to`: {tracker.package} has failed and gets no more values: {reason}"


def values_of(event: Event) -> dict[str, float]:
    """Return the values of an event by name: `train/` and a column of `steps`, or `eval/`, a measure and its mode."""
    row = event.row
    if event.kind == "step":
        return {f"train/{name}": float(value) for name, value in row.items() if name != "step" and value is not None}
    if event.kind == "eval" and row["batchnorm"] == "running":
        return {f"eval/{name}_{row['mode']}": float(row[name]) for name in event.measures}
    return {}
