"""One sweep from its first trial to its last: Tune runs the trials, Optuna chooses them, our rows record their outcomes."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path

import ray

from raysim import analysis
from raysim.config import ConfigError, RunConfig
from raysim.config.run_fields import Start
from raysim.engine.connection import check_address, end_ray, join_cluster, start_ray
from raysim.engine.watch import RayWatch, end_process
from raysim.limits import usable_cpus
from raysim.pipeline.errors import WorkerLostError
from raysim.plugins import trusting
from raysim.storage.places import in_bucket
from raysim.sweeps.allocation import Allocation, allocate, full_disk
from raysim.sweeps.ledger import Ledger
from raysim.sweeps.search import LedgerSearch, RaceSearch
from raysim.sweeps.store import Store, find_database_error, find_disk_error
from raysim.sweeps.study import FILES, PARENT, Study
from raysim.sweeps.study_checks import check_here
from raysim.sweeps.trial import TrialSpec
from raysim.sweeps.trial_rows import Rows, TrialRow
from raysim.sweeps.tuning import (
    SETTINGS,
    Halt,
    Stop,
    Watch,
    make_scheduler,
    on_signals,
    replay_evaluations,
    run_tune,
    tune_settings,
)
from raysim.training.events import Phases

PATIENCE_S = 3.0  # seconds in which the main thread must end a watch on lost servers: it does if Ray does not start
SEND_S = 10.0  # least interval between two copies of sqlite to a bucket


class SweepError(Exception):
    """A sweep cannot continue; the message is one sentence."""


class Sweep:
    """A study and its folder, checked on construction and run by `run`.

    `out` is the study's folder, or the URI of one in a bucket; by default `results/<name>/<time>`. `wait_s`: how long to wait for
    resources on a cluster with other users; by default a cluster without free resources is refused. Raises ConfigError, by field
    and rule, before Ray starts.
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
            raise ConfigError("`resume` needs `out`, the folder of the study to resume.")
        self.study = study
        self.address = address or os.environ.get("RAY_ADDRESS")
        self.wait_s = wait_s
        self.dashboard = dashboard
        self.dashboard_url: str | None = None
        if self.address and not ray.is_initialized():
            check_address(self.address, "`address`")
        if study.branches is not None and in_bucket(out or ""):
            raise ConfigError(
                "`branches` needs a folder as `out`, not a bucket: trials read the dense run's checkpoints."
            )
        stamp = f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
        self.store = Store.checked(out if out is not None else Path("results") / study.name / stamp)
        self.folder = self.store.local
        self.halt = Halt()
        self.say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)
        """Prints a line."""
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever a row has changed, and every second while trials run."""
        self.phases = Phases()
        """Reports the phases of the start."""
        self.on_lost: Callable[[str], None] = lambda loss: end_process(f"{loss}. To continue, resume the sweep.")
        """Called with a sentence when Ray's servers are lost: it ends the process, as Ray would without explanation."""
        self.results: analysis.Results | None = None
        """The records of its runs, once they are settled."""
        self.began_with = 0  # configurations ended in earlier sessions
        self.resumed = resume
        self._check_folder()  # before Ray starts, and again under the lock
        if not self.address:
            check_here(study)

    def _check_folder(self) -> None:
        """Raise ConfigError if the folder holds anything but the study to resume."""
        if self.resumed and not self.store.is_unbegun():
            for name in FILES:
                self.store.fetch_file(name)
            self.study = self.study.resumed(self.folder)
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
        return self.ledger.rows

    def run(self, on_begin: Callable[[], None] = lambda: None) -> None:
        """Run trials until the budget is spent, or until a signal; `on_begin` is called when Ray and its resources are ready.

        Raises ConfigError if no trial gets resources, SweepError if the study cannot continue; ended trials are kept.
        """
        with self._locked(), tune_settings(SETTINGS), on_signals(self.halt), self.phases:
            try:
                self._run(on_begin)
            except KeyboardInterrupt:
                if self.halt.signal is None:  # raised by a caller; a start interrupted by a signal has its number
                    raise
            except Exception as error:
                self.halt.reason = (
                    self.halt.reason
                    or find_disk_error(error, self.folder)
                    or find_database_error(error, self.folder / "optuna.db")
                )
                if not self.halt.wanted:  # a signal may have ended Ray as well
                    raise
        self.halt.check_signal()
        if self.halt.reason is not None:
            raise SweepError(self.halt.reason)

    def _run(self, on_begin: Callable[[], None]) -> None:
        for name in ("trials.parquet", "optuna.db", "race.parquet"):
            if self.resumed and self.store.remote:
                self.store.fetch_file(name)
        self.study.write(self.folder)
        self.ledger = Ledger(self.study, self.folder, self._changed)
        self._sent = -SEND_S
        refused = False
        try:
            self.ledger.reconcile()
            self.began_with = sum(row.ended and row.same_as is None for row in self.rows)
            if self.halt.signal is None:
                with self._ray():
                    self.phases.enter(None)
                    self._train_parent()
                    self.allocation = self._allocate()
                    on_begin()
                    self.phases.enter("the first trial's processes, its data and its first step")
                    self._tune()
            if self.halt.reason is None:
                self._settle()
        except ConfigError:
            refused = not self.resumed and not len(self.rows)  # nothing has begun
            raise
        finally:
            self.ledger.close()
            self._release_trials()
            if refused:
                self.store.clear()
            else:
                self._send(always=True)

    def _train_parent(self) -> None:
        """Train the dense run from which trials branch, unless it exists; raises SweepError if it fails."""
        if self.study.branches is None:
            return
        out = self.folder.absolute() / PARENT
        self.phases.enter("the dense run from which trials branch")
        begun = (out / "study.toml").is_file()
        dense = Sweep(self.study.parent(), out=out, resume=begun, address=self.address, wait_s=self.wait_s)
        dense.on_lost = self.on_lost
        dense.run()
        (row,) = dense.rows
        if row.status != "finished":
            raise SweepError(f"the dense run from which trials branch {row.status}: {row.error}")
        self._parent = str(out / row.runs[0])
        self.phases.enter(None)

    def _settle(self) -> None:
        if any(row.status == "finished" for row in self.rows):
            with (
                suppress(analysis.AnalysisError),
                trusting(*self.study.modules),
            ):  # the bucket does not answer now: the rows are marked as not settled
                self.results = analysis.load(self.store.out if self.store.remote else self.folder)
                self.ledger.settle(self.results)

    def _tune(self) -> None:
        if self.study.race is None:
            self.search = LedgerSearch(self.ledger, self.allocation.trials, self._spec)
        else:
            self.search = RaceSearch(
                self.ledger,
                self.allocation.trials,
                self._spec,
                self.store,
                gpus=self.allocation.share.gpus * self.allocation.processes,
                on_plan=self._planned,
                say=lambda line: self.say(line),
            )
        scheduler = make_scheduler(self.study)
        if scheduler is not None and self.resumed:
            self.search.on_resume = partial(replay_evaluations, scheduler, self.store.place())
            for row in self.rows:
                if row.ended:
                    self.search.on_resume(row)
        watch = Watch(
            self.halt,
            self.search,
            needs=self.allocation.needs,
            limit_s=self.wait_s or self.study.config({}).timeout_s,
            shared=bool(self.address),
            phases=self.phases,
            on_look=self.on_change,
        )
        stop = Stop(self.halt, self.search)
        run_tune(self.search, scheduler, stop=stop, watch=watch, starting=self.allocation.starting)
        if self.search.refused is not None:
            raise ConfigError(self.search.refused)

    def _planned(self, study: Study) -> None:
        """Continue with the number of seeds chosen by the plan of a budget."""
        first = self.study.planned_seeds is None  # later plans find some of their checkpoints on the disk
        self.study = self.ledger.study = study
        self.study.write(self.folder)
        if first and (full := full_disk(study, self.allocation.checkpoint_bytes, self.folder)):
            self.say(full)

    def _spec(self, row: TrialRow, config: RunConfig) -> TrialSpec:
        row.engine = self.allocation.engine
        if self.study.branches is not None and config.start is not None:
            config = config.changed(start=Start(self._parent, config.start.step))
        return TrialSpec(
            number=row.trial,
            config=config,
            seeds=tuple(row.seeds),
            out=self._out,
            objectives=self.study.objectives,
            engine=row.engine,
            pricing=self.study.pricing,
            bundles=self.allocation.share.bundles(config, row.engine),
            watched=row.name is None,
            screens=self.study.screens,
            folder=str(Path.cwd()),
        )

    def _allocate(self) -> Allocation:
        shared, check = self.address is not None, self.halt.check_signal
        return allocate(self.study, self._out, shared=shared, wait_s=self.wait_s, check=check)

    @property
    def _out(self) -> str:
        """The study's folder as seen by every node."""
        return self.store.out if self.store.remote else str(self.folder.absolute())

    @contextmanager
    def _ray(self) -> Iterator[None]:
        """Connect to Ray: the Ray of this process, the cluster of the address, or a new Ray on this machine."""
        if ray.is_initialized():
            yield
            return
        self.phases.enter("Ray's servers")
        if self.address:
            watch = join_cluster(self.address, "`address`", self._abandon, 0.0)
        else:
            # The plan of a trial needs it, and Ray's start leaves this process idle. No daemon: a process that ends while one
            # imports may hang or crash.
            threading.Thread(target=import_module, args=("torch._dynamo",)).start()
            try:
                watch = start_ray(
                    num_cpus=usable_cpus(), dashboard=self.dashboard, on_lost=self._abandon, patience_s=PATIENCE_S
                )
            except WorkerLostError as error:
                raise SweepError(f"the sweep failed: {error}") from None
        self.dashboard_url = watch.dashboard_url
        try:
            yield
        finally:
            end_ray(watch)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the study's folder, and check it again: another process may have used it until now."""
        with self.store.locked():
            self._check_folder()
            if self.store.remote and not self.resumed:
                self.store.clear()  # files left on this machine by another study with this URI
            yield

    def _abandon(self, watch: RayWatch) -> None:
        """Leave the rows ready for a resume while the main thread waits in Ray for lost servers."""
        self._release_trials()
        with suppress(OSError):
            self._send(always=True)
        self.on_lost(watch.sentence)

    def _release_trials(self) -> None:
        """Mark running trials as waiting for a resume."""
        for row in self.ledger.running:
            row.status = "waiting"
        self.rows.write()

    def _changed(self) -> None:
        self._send()
        self.on_change()

    def _send(self, *, always: bool = False) -> None:
        """Copy the rows to the bucket, and sqlite now and then; the rows first, since they are authoritative."""
        if not self.store.remote:
            return
        for name in (*FILES, "trials.parquet", "race.parquet"):
            if (self.folder / name).is_file():
                self.store.send(name)
        if always or time.monotonic() - self._sent > SEND_S:
            self.store.send("optuna.db")
            self._sent = time.monotonic()
