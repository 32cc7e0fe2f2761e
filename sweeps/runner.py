"""One sweep from its first trial to its last: Tune runs the trials, Optuna chooses them, our rows record their outcomes."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler

from raysim import analysis
from raysim.config import ConfigError, RunConfig
from raysim.engine.cluster import check_address, join_cluster
from raysim.engine.head import RayWatch, end_process
from raysim.engine.init import end_ray, start_ray
from raysim.limits import usable_cpus
from raysim.pipeline.errors import WorkerLostError
from raysim.plugins import trusting
from raysim.records import RecordsError, Run
from raysim.sweeps.callbacks import Stop, Watch
from raysim.sweeps.checking import check_data, check_metrics
from raysim.sweeps.entry import Entry, enter
from raysim.sweeps.ledger import Ledger
from raysim.sweeps.lost import losses_are_retried
from raysim.sweeps.objectives import as_mapping
from raysim.sweeps.refusals import find_database_error, find_refusal
from raysim.sweeps.room import Share
from raysim.sweeps.rows import Rows, TrialRow
from raysim.sweeps.search import LedgerSearch
from raysim.sweeps.store import Store
from raysim.sweeps.study import Study, most_workers
from raysim.sweeps.surroundings import SETTINGS, ending_in_order, tune_settings
from raysim.sweeps.trial import Spec, SweepTrial
from raysim.training.phases import Phases

LOST_PROCESSES = 3  # times that a trial whose processes are lost starts again from its checkpoint
PATIENCE_S = 3.0  # seconds in which the main thread must end a watch on lost servers: it does if Ray does not start
SEND_S = 10.0  # at least between two copies of sqlite to a bucket


class SweepError(Exception):
    """A sweep cannot go on: one sentence."""


class Sweep:
    """A study and its folder: checked when made, done by `run`.

    `out` is the study's folder, or the URI of one in a bucket; `results/<name>` with a stamp where not given. `wait_s`: how
    long to wait for room on a cluster that others use; where not given, a cluster without room is refused. Raises ConfigError,
    by field and rule, before Ray starts.
    """

    def __init__(
        self,
        study: Study,
        *,
        out: str | Path | None = None,
        resume: bool = False,
        address: str | None = None,
        dashboard: bool = False,
        wait_s: float | None = None,
    ) -> None:
        if resume and out is None:
            raise ConfigError("`resume` needs `out`, the folder of the study to go on with.")
        self.study = study
        self.address = address or os.environ.get("RAY_ADDRESS")
        self.wait_s = wait_s
        self.dashboard = dashboard
        self.dashboard_url: str | None = None
        if self.address and not ray.is_initialized():
            check_address(self.address, "`address`")
        stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
        self.store = Store.checked(out if out is not None else Path("results") / study.name / stamp)
        self.folder = self.store.local
        self.signal: int | None = None  # that asked for the end
        self.reason: str | None = None  # why the study cannot go on
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever a row has changed, and every second while trials go on."""
        self.phases = Phases()
        """Told what the start waits for."""
        self.on_lost: Callable[[str], None] = lambda loss: end_process(f"{loss}. To go on, resume the sweep.")
        """Called with a sentence when Ray's servers are lost: it ends the process, as Ray would without a word."""
        self.results: analysis.Results | None = None
        """The records of its runs, once they are settled."""
        self.began_with = 0  # configurations that an earlier session has ended
        self.resumed = resume
        self._check_folder()  # before Ray starts; what counts is the look under the lock
        self._workers = most_workers(study)
        if not self.address:  # a cluster may have modules and files that this machine has not
            check_metrics(study)
            check_data(study)

    def _check_folder(self) -> None:
        """Raise ConfigError if the folder holds anything but the study to resume."""
        if self.resumed and not self.store.is_unbegun():
            for name in ("study.toml", "space.py"):
                self.store.fetch_file(name)
            self.study.check_same(self.folder)
        elif not (self.store.is_empty() or self.store.is_unbegun()):
            raise ConfigError(
                f"The folder {self.store.out} is not empty. Give another `out`, or `resume` the study in it."
            )

    @property
    def begun(self) -> bool:
        """True if the folder holds a study that can be resumed."""
        return (self.folder / "study.toml").is_file()

    @property
    def rows(self) -> Rows:
        """The rows of the study."""
        return self.ledger.rows

    def run(self, on_begin: Callable[[], None] = lambda: None) -> None:
        """Run trials until the budget is spent, or Ctrl-C; `on_begin` is called when Ray is there.

        Raises ConfigError where the trials have no room, SweepError where the study cannot go on; what ended stays.
        """
        with self._locked(), tune_settings(SETTINGS), ending_in_order(self._interrupt), self.phases:
            try:
                self._run(on_begin)
            except KeyboardInterrupt:
                if self.signal is None:  # of a caller; a start that a signal broke off has the signal's number
                    raise
            except Exception as error:
                self.reason = (
                    self.reason
                    or find_refusal(error, self.folder)
                    or find_database_error(error, self.folder / "optuna.db")
                )
                if self.signal is None and self.reason is None:  # a signal may have ended Ray as well
                    raise
        if self.signal is not None:
            raise KeyboardInterrupt(self.signal)
        if self.reason is not None:
            raise SweepError(self.reason)

    def _run(self, on_begin: Callable[[], None]) -> None:
        for name in ("trials.parquet", "optuna.db"):
            if self.resumed and self.store.remote:
                self.store.fetch_file(name)
        self.study.write(self.folder)
        self.ledger = Ledger(self.study, self.folder, self._changed)
        self._sent = -SEND_S
        refused = False
        try:
            self.ledger.reconcile()
            self.began_with = sum(row.ended and row.same_as is None for row in self.rows)
            if self.signal is None:
                with self._ray():
                    self.phases.enter(None)
                    self.entry = self._enter()
                    on_begin()
                    self.phases.enter("the first trial's processes, its data and its first step")
                    self._tune()
            if self.reason is None:
                self._settle()
        except ConfigError:
            refused = not self.resumed and not len(self.rows)  # nothing has begun
            raise
        finally:
            self.ledger.close()
            for row in self.ledger.running:
                row.status = "waiting"  # for a resume
            self.rows.write()
            if refused:
                self.store.clear()
            else:
                self._send(always=True)

    def _settle(self) -> None:
        """Settle the prices of the study, with the records of all its runs."""
        if any(row.status == "finished" for row in self.rows):
            with (
                suppress(analysis.AnalysisError),
                trusting(*self.study.modules),
            ):  # of a bucket that does not answer now: the rows say that they are not settled
                self.results = analysis.load(self.store.out if self.store.remote else self.folder)
                self.ledger.settle(self.results)

    def _interrupt(self, number: int) -> None:
        self.signal = number

    def _tune(self) -> None:
        self.search = LedgerSearch(self.ledger, self.entry.trials, self._spec)
        session = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}"
        scratch = self.folder / "tune"  # Tune's own files, pickles among them, which nobody reads after the session
        shutil.rmtree(scratch, ignore_errors=True)  # of one that was killed
        scheduler = self._scheduler()
        if scheduler is not None and self.resumed:
            self._replay(scheduler)
        tuner = tune.Tuner(
            tune.with_resources(SweepTrial, _placement),
            tune_config=tune.TuneConfig(
                search_alg=self.search,
                scheduler=scheduler,
                num_samples=-1,
                reuse_actors=True,
                trial_name_creator=_short_name,
                trial_dirname_creator=_short_name,
            ),
            run_config=tune.RunConfig(
                name=session,
                storage_path=str(scratch.absolute()),
                stop=Stop(self),
                failure_config=tune.FailureConfig(max_failures=LOST_PROCESSES),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),  # a run keeps its own
                callbacks=[Watch(self)],
                verbose=0,
            ),
        )
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        try:
            with losses_are_retried(), tune_settings(self._pending()):
                tuner.fit()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _pending(self) -> Mapping[str, str]:
        """Return Tune's setting for the number of trials whose actors may start side by side: all that run at once.

        By default Tune starts one after another. On a shared cluster this default stays, so that other drivers see which trials wait.
        """
        return {} if self.entry.allotment is not None else {"TUNE_MAX_PENDING_TRIALS_PG": str(self.share.jobs)}

    def _spec(self, row: TrialRow, config: RunConfig) -> Mapping[str, Any]:
        row.engine = self.engine
        values = config.model_dump(mode="json", exclude_unset=False)
        spec = Spec(
            number=row.trial,
            values=_plain(values),
            seeds=row.seeds,
            out=self._out,
            objectives=[as_mapping(one) for one in self.study.objectives],
            engine=self.engine,
            compute=self.study.compute,
            bundles=self.share.bundles(config, self.engine),
            watched=row.name is None,
            folder=str(Path.cwd()),
        )
        return {"spec": spec._asdict(), "runs": spec.runs()}

    def _scheduler(self) -> ASHAScheduler | None:
        if self.study.early_stopping == "none":
            return None
        every = self.study.config({}).evaluate_every_steps
        return ASHAScheduler(
            *("evaluated_step", "loss_on", "min"), max_t=every * 10**6, grace_period=every, stop_last_trials=False
        )

    def _replay(self, scheduler: ASHAScheduler) -> None:
        """Show the scheduler the evaluations of earlier sessions, so that it goes on deciding by them."""
        controller: Any = None  # which it does not ask
        place = self.store.place()
        for row in self.rows:
            if row.runs and row.same_as is None and row.name is None:
                past = Trial("past", stub=True)
                try:
                    evals = Run(place / row.runs[0]).evals
                except RecordsError:
                    continue
                scheduler.on_trial_add(controller, past)
                shown = evals[(evals["mode"] == "on") & (evals["batchnorm"] == "running")]
                for step, loss in zip(shown["step"].tolist(), shown["loss"].tolist(), strict=True):
                    scheduler.on_trial_result(controller, past, {"evaluated_step": step, "loss_on": loss})

    def _enter(self) -> Entry:
        """Return a trial's share of the machines, once there is room for one trial."""

        def check() -> None:
            if self.signal is not None:
                raise KeyboardInterrupt(self.signal)

        return enter(
            self.study, self._workers, self._out, shared=self.address is not None, wait_s=self.wait_s, check=check
        )

    @property
    def _out(self) -> str:
        """The study's place, by which every node finds it."""
        return self.store.out if self.store.remote else str(self.folder.absolute())

    @property
    def share(self) -> Share:
        """Each trial's share of the machines, known once it runs."""
        return self.entry.share

    @property
    def engine(self) -> str:
        """The engine of trials, known once it runs."""
        return self.entry.need.engine

    @contextmanager
    def _ray(self) -> Iterator[None]:
        """Connect to Ray: the Ray of this process, the cluster of the address, or a new Ray on this machine."""
        if ray.is_initialized():
            yield
            return
        self.phases.enter("Ray's servers")
        if self.address:
            connected = join_cluster(self.address, "`address`", self._abandon)
        else:
            # The plan of a trial needs it, and Ray's start leaves this process idle. No daemon: a process that ends while one
            # imports may hang or crash.
            threading.Thread(target=import_module, args=("torch._dynamo",)).start()
            try:
                connected = start_ray(
                    num_cpus=usable_cpus(), dashboard=self.dashboard, on_lost=self._abandon, patience_s=PATIENCE_S
                )
            except WorkerLostError as error:
                raise SweepError(f"the sweep failed: {error}") from None
        self.dashboard_url = connected.dashboard_url
        try:
            yield
        finally:
            end_ray(connected.watch)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the study's folder, and look at it again: until now another process may have swept there."""
        with self.store.locked():
            self._check_folder()
            if self.store.remote and not self.resumed:
                self.store.clear()  # of files that another study with this URI left on this machine
            yield

    def _abandon(self, watch: RayWatch) -> None:
        """Leave the rows as a resume needs them, without the main thread, which waits in Ray for servers that are lost."""
        for row in self.ledger.running:
            row.status = "waiting"
        self.rows.write()
        with suppress(OSError):
            self._send(always=True)
        self.on_lost(watch.sentence)

    def _changed(self) -> None:
        self._send()
        self.on_change()

    def _send(self, *, always: bool = False) -> None:
        """Copy the rows to the bucket, sqlite now and then; the rows first, since they are the truth."""
        if not self.store.remote:
            return
        for name in ("study.toml", "space.py", "trials.parquet"):
            if (self.folder / name).is_file():
                self.store.send(name)
        if always or time.monotonic() - self._sent > SEND_S:
            self.store.send("optuna.db")
            self._sent = time.monotonic()


def _placement(config: Mapping[str, Any]) -> tune.PlacementGroupFactory:
    spec = json.loads(config["spec"])
    strategy = "SPREAD" if spec["values"]["placement"] == "spread" else "PACK"
    return tune.PlacementGroupFactory(spec["bundles"], strategy=strategy)


def _short_name(trial: Trial) -> str:
    return f"{json.loads(trial.config['spec'])['number']}-{trial.trial_id}"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values without unset ones, as a file would hold them."""
    found = {}
    for key, value in values.items():
        if value is not None:
            found[key] = _plain(value) if isinstance(value, Mapping) else value
    return found
