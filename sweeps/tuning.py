"""Ray Tune in a sweep: its settings, ASHA, the callbacks that stop it or report why trials wait, and its execution."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler

from raysim.engine.connection import first_reason
from raysim.engine.ray_internals import idle_nodes, is_starting, task_errors_as
from raysim.engine.resources import Waiting, shortage
from raysim.records import RecordsError, Run
from raysim.signals import ECHO_S, handled
from raysim.storage.places import Place
from raysim.sweeps.search import LOST_PROCESSES, LedgerSearch
from raysim.sweeps.study import Study
from raysim.sweeps.trial import SweepTrial
from raysim.sweeps.trial_rows import TrialRow
from raysim.training.events import Phases, to_stderr

LOOK_S = 1.0  # between two checks for starting trial processes, and between two updates of the display
NODES_S = 5.0  # between two checks of the cluster's nodes
START_S = 600.0  # limit for a process to start, beyond the wait for resources

# Settings of Tune: no output, no files besides our rows, and no snapshots.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # intermediate results have no loss
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": "600",
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",
}


@contextmanager
def tune_settings(settings: Mapping[str, str]) -> Iterator[None]:
    """Add settings of Tune to the environment, unless the user has set them."""
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


@dataclass
class Halt:
    """Cause of a sweep's early end: a signal, or a sentence."""

    signal: int | None = None
    reason: str | None = None

    @property
    def wanted(self) -> bool:
        return self.signal is not None or self.reason is not None

    def check_signal(self) -> None:
        """Raise KeyboardInterrupt, with its number, after a signal."""
        if self.signal is not None:
            raise KeyboardInterrupt(self.signal)


@contextmanager
def on_signals(halt: Halt) -> Iterator[None]:
    """End the sweep cleanly on the first Ctrl-C, SIGTERM or SIGHUP, and immediately on a second, after `ECHO_S`."""
    asked: list[float] = []

    def handle(number: int, frame: Any) -> None:
        if asked and time.monotonic() - asked[0] < ECHO_S:
            return
        if asked:
            raise KeyboardInterrupt
        asked.append(time.monotonic())
        halt.signal = number
        with suppress(OSError):  # the terminal may be closed
            print("\nending: running trials are kept for a resume", file=sys.stderr)

    with handled(handle):
        yield


class Stop(tune.Stopper):
    """Stop the experiment on a signal, or if the study cannot continue."""

    def __init__(self, halt: Halt, search: LedgerSearch) -> None:
        self._halt, self._search = halt, search

    def __call__(self, trial_id: str, result: Mapping[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        if self._halt.reason is None:
            folder = self._search.ledger.folder
            missing = None if (folder / "study.toml").is_file() else f"The study's folder {folder} no longer exists."
            self._halt.reason = self._search.problem or self._search.ledger.missing_baseline() or missing
        self._search.stopping |= self._halt.wanted
        return self._halt.wanted

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tune.stopper.NoopStopper, ()  # see LedgerSearch


class Watch(tune.Callback):
    """Tune callback that records why a trial was abandoned, and halts a sweep without running trials.

    `needs`: a trial's resources in words. `limit_s`: how long trials may wait for them. `shared`: the cluster has other users, and
    nodes that join and leave.
    """

    def __init__(
        self,
        halt: Halt,
        search: LedgerSearch,
        *,
        needs: str,
        limit_s: float,
        shared: bool,
        phases: Phases,
        on_look: Callable[[], None],
    ) -> None:
        self._halt, self._search = halt, search
        self._needs, self._limit_s = needs, limit_s
        self._phases, self._on_look = phases, on_look
        self._waiting = Waiting()  # for resources: no trial runs or starts
        self._idle = Waiting()  # no trial runs
        self._looked = time.monotonic()
        self._nodes = NodeWatch(to_stderr) if shared else None

    def on_trial_result(
        self, iteration: int, trials: list[Trial], trial: Trial, result: dict[str, Any], **info: Any
    ) -> None:
        self._phases.enter(None)

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        if self._nodes is not None:
            self._nodes.look()
        looks = time.monotonic() - self._looked >= LOOK_S
        if looks:
            self._looked = time.monotonic()
            self._on_look()
        if any(trial.status == Trial.RUNNING for trial in reversed(trials)):
            self._waiting.restart()
            self._idle.restart()
            return
        if looks and is_starting():
            self._waiting.restart()
        if self._nodes is not None:  # a local Ray has resources, but takes a while to start
            self._waiting.tell(partial(shortage, self._needs))
        if self._waiting.seconds > self._limit_s and self._halt.reason is None:
            self._halt.reason = f"No trial has had resources for {self._limit_s:g} s: {shortage(self._needs)}"
        elif self._idle.seconds > self._limit_s + START_S and self._halt.reason is None:
            self._halt.reason = (
                f"No trial has started for {self._idle.seconds:.0f} s, although its processes have their resources"
            )

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        row = self._search.row(trial.trial_id)
        if row is not None:
            to_stderr(f"trial {row.trial} restarts from its checkpoint: {_reason(trial)}")

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        lost = self._search.lost
        if lost is not None:
            lost.error = f"{lost.error}: {_reason(trial)}"
            self._search.ledger.rows.write()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return tune.Callback, ()  # see LedgerSearch


def _living_nodes() -> dict[str, str]:
    """Return the addresses of the cluster's living nodes, by their ids."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes if node["Alive"]}


class NodeWatch:
    """Report nodes that join the cluster or are lost.

    `say` prints a line; `nodes` returns the addresses of the living nodes by their ids, `idle` those that ended because nothing
    ran on them.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        nodes: Callable[[], dict[str, str]] = _living_nodes,
        idle: Callable[[], set[str]] = idle_nodes,
    ) -> None:
        self._say, self._nodes, self._idle = say, nodes, idle
        self._known = dict(nodes())
        self._looked = time.monotonic()

    def look(self) -> None:
        """Compare the nodes with the last check if that was at least `NODES_S` ago."""
        if time.monotonic() - self._looked >= NODES_S:
            self._looked = time.monotonic()
            self.compare()

    def compare(self) -> None:
        """Report the nodes that joined or were lost since the last check."""
        nodes = dict(self._nodes())
        gone = self._known.keys() - nodes.keys()
        idle = self._idle() if gone else set()
        loss = "is lost: the trials with stages on it restart from their checkpoints"
        for node in gone:
            self._say(f"node {self._known[node]} {'was idle, and the autoscaler ended it' if node in idle else loss}")
        for node in nodes.keys() - self._known.keys():
            self._say(f"node {nodes[node]} has joined")
        self._known = nodes


def make_scheduler(study: Study) -> ASHAScheduler | None:
    """Return ASHA, which stops trials by their loss at each evaluation; None without early stopping."""
    if study.early_stopping == "none":
        return None
    every = study.config({}).evaluate_every_steps
    return ASHAScheduler(
        *("evaluated_step", "loss_on", "min"), max_t=every * 10**6, grace_period=every, stop_last_trials=False
    )


def replay_evaluations(scheduler: ASHAScheduler, folder: Place, row: TrialRow, trial_id: str | None = None) -> None:
    """Replay a trial's earlier evaluations into the scheduler when a study is resumed; `trial_id`: Tune's, if it goes on."""
    controller: Any = None  # unused by the scheduler
    if not row.runs or row.same_as is not None or row.name is not None:
        return
    try:
        run = Run(folder / row.runs[0])
        evals, first = run.evals, int(run.row.get("first_step") or 0)
    except RecordsError:
        return
    past = Trial("past", stub=True, trial_id=trial_id)
    scheduler.on_trial_add(controller, past)
    shown = evals[(evals["mode"] == "on") & (evals["batchnorm"] == "running")]
    for step, loss in zip(shown["step"].tolist(), shown["loss"].tolist(), strict=True):
        scheduler.on_trial_result(controller, past, {"evaluated_step": step - first, "loss_on": loss})


def run_tune(
    search: LedgerSearch,
    scheduler: tune.schedulers.TrialScheduler | None,
    *,
    stop: Stop,
    watch: Watch,
    starting: int | None,
) -> None:
    """Run the trials of a search until it has no more, or `stop` ends them; `starting`: see `Allocation.starting`."""
    session = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
    scratch = search.ledger.folder / "tune"  # Tune's own files, including pickles, unused after the session
    shutil.rmtree(scratch, ignore_errors=True)  # of a killed session
    tuner = tune.Tuner(
        SweepTrial,
        tune_config=tune.TuneConfig(
            search_alg=search,
            scheduler=scheduler,
            num_samples=-1,
            reuse_actors=True,
            trial_name_creator=_short_name,
            trial_dirname_creator=_short_name,
        ),
        run_config=tune.RunConfig(
            name=session,
            storage_path=str(scratch.absolute()),
            stop=stop,
            failure_config=tune.FailureConfig(max_failures=LOST_PROCESSES),
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # a run keeps its own
            callbacks=[watch],
            verbose=0,
        ),
    )
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
    pending = {} if starting is None else {"TUNE_MAX_PENDING_TRIALS_PG": str(starting)}
    try:
        with task_errors_as(_as_loss), tune_settings(pending):
            tuner.fit()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _as_loss(error: Exception) -> Exception:
    """Convert an error of Ray itself to the loss of a trial's process, so that Tune retries the trial.

    For instance Ray kills a process whose node runs out of memory, and raises `OutOfMemoryError`.
    """
    if isinstance(error, RayError) and not isinstance(error, (RayActorError, RayTaskError)):
        return RayActorError(error_msg=first_reason(error))
    return error


def last_reason(text: str) -> str:
    r"""Return why a trial's process was last lost, from Tune's error file.

    >>> last_reason("Failure # 1\nThe actor died.\nFailure # 2\n1 worker(s) were killed due to the node running low on memory. See ...")
    '1 worker(s) were killed due to the node running low on memory'
    """
    last = text.rpartition("Failure # ")[2]
    if (memory := re.search(r"[^.\n]*running low on memory", last)) is not None:
        return memory[0].strip()
    line = next((line.strip() for line in reversed(last.splitlines()) if line.strip()), "")
    return re.sub(r"^[\w.]+Error: ", "", line)


def _reason(trial: Trial) -> str:
    file = trial.error_file
    return last_reason(Path(file).read_text(encoding="utf-8")) if file and Path(file).is_file() else "its process ended"


def _short_name(trial: Trial) -> str:
    return f"{trial.config['trial'].number}-{trial.trial_id}"
