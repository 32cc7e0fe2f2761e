"""A training run from its first step to its records: steps, evaluations, checkpoints, restarts."""

from __future__ import annotations

import math
import platform
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from raysim.config import ConfigError, RunConfig, as_row, keys_of, make_config, read_config
from raysim.engine.base import Engine
from raysim.engine.inline import InlineEngine
from raysim.engine.ray import RayEngine
from raysim.pipeline.errors import DivergedError, WorkerLostError
from raysim.pipeline.plan import Workload, prepare
from raysim.pipeline.reports import StepReport
from raysim.pipeline.signals import Signals
from raysim.pipeline.state import CheckpointError
from raysim.quality import write_measures
from raysim.records import SCHEMA_VERSION, Recorder, RecordsError, Run
from raysim.schedules.csv import rows_to_csv
from raysim.schedules.families import Custom
from raysim.training.budgets import Budgets, sensitivities
from raysim.training.checkpoint import (
    Checkpoint,
    checkpoints,
    newest_whole,
    read_checkpoint,
    read_signals,
    write_checkpoint,
)
from raysim.training.clock import Clock
from raysim.training.ending import Ending
from raysim.training.fidelity import fidelity_warning
from raysim.training.progress import print_progress
from raysim.training.start import check_start, is_unbegun, run_folder
from raysim.training.tables import action_rows, collective_rows, decision_rows, link_rows, step_row
from raysim.workloads.chance import chance
from raysim.workloads.data import Data

_ENGINES: dict[str, type[Engine]] = {"ray": RayEngine, "inline": InlineEngine}
LOSSES_IN_A_ROW = 3  # without a new step between them, and the run fails: the cause will not go away
FLUSH_EVERY_S = 15.0
KEEP_EVERY_S = 240.0  # between checkpoints at most, so that a kill loses less than five minutes


class Event(NamedTuple):
    """Something to show while a run goes: a row of `steps` or `evals`, how far an evaluation is, a restart and its reason, or a
    warning."""

    kind: str  # "step", "evaluating", "eval", "restart" or "warning"
    row: Mapping[str, Any]
    measures: tuple[str, ...] = ()  # in the row of an evaluation


def train(
    config: RunConfig | Mapping[str, Any] | str | Path = "digits-cnn",
    *overrides: str,
    out: str | Path | None = None,
    engine: str = "ray",
    resume: bool = False,
    progress: bool | None = None,
) -> Run:
    """Train a pipeline and return its run, whose tables are DataFrames.

    `config`: a RunConfig, nested values, a recipe's name or a TOML file; the latter two changed by `key=value` texts.
    `out` is the run's own folder, `results/<name>/<run_id>` where not given. `resume` goes on from the newest
    checkpoint in `out`. `progress` prints lines on the error stream while it trains; by default in a notebook and at an
    interactive prompt. Raises ConfigError, before anything starts, where the input is wrong; a run that diverges
    returns and says so in its status; one that is interrupted says how to go on.

    >>> import tempfile
    >>> run = train("digits-cnn", "steps=4", "forward=TopK(0.1)", engine="inline", out=tempfile.mkdtemp())
    >>> run.status, len(run.steps), run.evals["mode"].tolist()
    ('finished', 4, ['on', 'off'])
    """
    if isinstance(config, (str, Path)):
        config = read_config(config, overrides)
    elif overrides:
        raise ConfigError(
            f"Overrides change a recipe or a file, but `config` is {type(config).__name__}: change it there."
        )
    if not isinstance(config, RunConfig):
        config = make_config(config)
    training = Training(config, out=out, engine=engine, resume=resume)
    try:
        if hasattr(sys, "ps1") if progress is None else progress:
            print_progress(training)
        else:
            for _ in training.events():
                pass
    except KeyboardInterrupt as interruption:
        interruption.add_note(f"To go on, train with the same arguments and out={str(training.folder)!r}, resume=True.")
        raise
    return Run(training.folder)


class Training:
    """One run: checked when made, done by iterating over `events`.

    `engine`: a name, or what makes one, such as of actors that outlive the run. `data`: loaded before, for many runs. `ending`: it
    asks for the end of the run, at the next step and with a checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        out: str | Path | None = None,
        engine: str | Callable[[Workload], Engine] = "ray",
        resume: bool = False,
        data: Data | None = None,
        ending: Ending | None = None,
    ) -> None:
        check_start(out, engine if isinstance(engine, str) else "ray", resume=resume)
        resume = resume and out is not None and not is_unbegun(run_folder(out))
        self._ending = ending or Ending()
        self._faults: list[str] = []  # of newer checkpoints than that which it goes on from
        self.config = config
        self._began = time.perf_counter()
        self.run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        self.folder = run_folder(out) if out is not None else Path("results") / config.name / self.run_id
        self.recorder = Recorder(self.folder)
        self._row = self._first_row()
        self._checkpoint: Checkpoint | None = None
        self._parts: list[Any] | None = None
        self._resumed = resume
        self._reached = 0  # the most steps done, over all restarts
        self._clock_zero: float | None = None  # when the workers were up
        self._signals = Signals()  # of the last step
        if resume:
            self._find_resumable()
        self.workload = prepare(config, data)
        self.plan = self.workload.plan
        self.clock = Clock(self.plan)
        self._budgets = Budgets(self.plan, self.clock.network)
        self._row |= {"cuts": list(self.plan.cuts), "num_stages": self.plan.num_stages}
        self._row["measures"] = write_measures(self.plan.task.measures)
        self._row |= {f"chance_{name}": value for name, value in chance(self.workload.data, self.plan.task).items()}
        self.recorder.measures = tuple(measure.name for measure in self.plan.task.measures)
        custom = isinstance(config.parsed_schedule, Custom)  # whose file may change, or stay behind
        self._row["schedule_rows"] = rows_to_csv(self.plan.rows) if custom else None
        if resume:
            self._check_same("cuts", self._recorded_cuts, self._row["cuts"])
            if self._row["schedule_rows"] != self._recorded_rows:
                raise ConfigError(
                    f"`schedule` must have the rows of the run to resume, but {config.schedule} has others now."
                )
        self.engine = (_ENGINES[engine] if isinstance(engine, str) else engine)(self.workload)
        self.engine.check()
        self._row["engine"] = self.engine.kind

    def events(self) -> Generator[Event]:
        """Yield events while the run trains; the records are complete when the iteration ends, however it ends.

        Raises ConfigError at once where the folder cannot be written. The iteration raises ConfigError where the stages
        have no room, StageError where the model fails, WorkerLostError where workers die at one step again and again,
        and passes on KeyboardInterrupt; the last three are in the records too.
        """
        try:
            self.recorder.open()
        except RecordsError as error:
            raise ConfigError(str(error)) from None
        return self._events()

    def _events(self) -> Generator[Event]:
        before_s = float(self._row["seconds"])
        status, error_text = "failed", None
        try:
            self._ending.begin(self.config.grace_s)
            self.recorder.write_run(self._row)  # from here on a run that is killed can be resumed
            yield from self._go_back()
            yield from self._train()
            status = "finished"
        except DivergedError as error:
            status, error_text = "diverged", str(error)
            self._row |= {"diverged_step": error.step, "diverged_at": f"{error.action}: {error.where}"}
        except (KeyboardInterrupt, GeneratorExit):
            status = "interrupted"
            raise
        except _RefusedError as error:
            status = "refused"
            raise ConfigError(str(error)) from None
        except Exception as error:
            error_text = str(error) or type(error).__name__
            raise
        finally:
            self._ending.finish()
            try:
                self.engine.close()
            finally:
                if status == "refused" and not self._resumed:
                    self.recorder.discard()
                else:
                    seconds = before_s + time.perf_counter() - self._began
                    status = "failed" if status == "refused" else status
                    self._row |= {"status": status, "error": error_text, "seconds": seconds}
                    self._finish(compact=status in ("finished", "diverged"))

    def _start(self, *, again: bool) -> None:
        """Bring up the workers, `again` after a loss; the time until they first are up is the start of the run."""
        if again:
            self.engine.restart()
        else:
            try:
                self.engine.start()
                self._record_device()
            except ConfigError as error:  # no room, no GPU, no such cluster: nothing has happened yet
                raise _RefusedError(str(error)) from None
        self._ending.check()
        if self._clock_zero is None:
            self._clock_zero = time.perf_counter()
            self._row["start_s"] += self._clock_zero - self._began
            self._row["device_kind"] = self.engine.device_kind

    def _go_back(self) -> Iterator[Event]:
        """Say which checkpoints are damaged, and remove them: the run goes on from the one before."""
        if not self._faults:
            return
        assert self._checkpoint is not None
        for newer in checkpoints(self._checkpoints):
            if newer.step > self._checkpoint.step:
                shutil.rmtree(newer.path)
        reason = f"{' '.join(self._faults)} The run goes on from step {self._checkpoint.step}, and does again what came after it."
        self._row["warning"] = self._row["warning"] or reason
        yield Event("warning", {"step": self._checkpoint.step, "reason": reason})

    def _record_device(self) -> None:
        """Note which GPU computes, after it was found to do for the run; raises ConfigError where it does not."""
        facts = self.engine.check_devices()
        if facts is not None:
            self._row |= {"device_name": facts.name, "device_capability": facts.capability}
            self._row |= {"driver": facts.driver, "cuda": facts.cuda}
            self._row["device_forecast_bytes"] = self.engine.device_forecast_bytes()

    def _train(self) -> Iterator[Event]:
        """Train to the end, over as many losses of workers as it takes while there is progress between them."""
        lost, losses, farthest = False, 0, -1
        while True:
            try:
                self._start(again=lost)
                yield from self._steps(self._restore())
                return
            except WorkerLostError as error:
                self._ending.check()  # the same signal may have ended the workers
                losses = 1 if self._reached > farthest else losses + 1
                farthest = self._reached
                if losses == LOSSES_IN_A_ROW or not self.engine.can_restart:
                    raise
                lost = True
                self._row["restarts"] += 1
                yield Event("restart", {"step": self._reached, "reason": str(error)})

    def _steps(self, step: int) -> Iterator[Event]:
        every = self.config.checkpoint_every_steps
        last_flush = last_kept = time.monotonic()
        if self._evaluates(step):  # after the checkpoint that this goes on from, see below
            yield from self._evaluate(step)
        while step < self.plan.num_steps:
            before = time.perf_counter()
            reports = self.engine.step(step, self._signals)
            seconds = time.perf_counter() - before
            self._signals = Signals(
                self.clock.step_s(reports, seconds), self._budgets.floors(reports), sensitivities(reports)
            )
            warned = self._row["warning"] is not None
            yield Event("step", self._record_step(step, reports, seconds))
            if not warned and self._row["warning"] is not None:
                yield Event("warning", {"step": step, "reason": self._row["warning"]})
            step += 1
            self._reached = max(self._reached, step)
            late = time.monotonic() - last_kept > KEEP_EVERY_S
            wanted = step == self.plan.num_steps or self._ending.wanted
            if wanted or (every and (step % every == 0 or late or self._evaluates(step))):
                self._keep(step)  # before an evaluation, which may take longer than the steps it would lose
                last_flush = last_kept = time.monotonic()
            elif time.monotonic() - last_flush > FLUSH_EVERY_S:
                self.recorder.flush()
                last_flush = time.monotonic()
            if step < self.plan.num_steps:
                self._ending.check()
            if self._evaluates(step):
                yield from self._evaluate(step)
        if self.engine.device_kind == "cuda":
            self._row["device_peak_bytes"] = self.engine.device_peak_bytes()

    def _evaluates(self, step: int) -> bool:
        """Return whether an evaluation follows the first `step` steps."""
        every = self.config.evaluate_every_steps
        return step == self.plan.num_steps or bool(step and every and step % every == 0)

    def _keep(self, step: int) -> None:
        """Write the records, then the checkpoint in which `step` begins: what it stands for is on disk before it."""
        self.recorder.flush()
        parts = (self.engine.state_of(worker) for worker in range(self.engine.num_workers))  # one in memory
        self._checkpoint = write_checkpoint(
            self._checkpoints, step, parts, self._signals.as_json(), self.recorder.parts()
        )
        self._offsets_s = self.engine.clock_offsets_s()  # clocks of other nodes drift

    def _restore(self) -> int:
        """Give fresh workers the newest checkpoint's state and drop what comes after it; return the step to go on with."""
        self._offsets_s = self.engine.clock_offsets_s()
        step, self._signals = 0, Signals()
        if self._checkpoint:
            step = self._checkpoint.step
            parts = self._parts if self._parts is not None else read_checkpoint(self._checkpoint)
            self.engine.load(step, parts)
            self._parts = None
            signals = read_signals(self._checkpoint)
            self._signals = Signals.from_json(signals) if signals else Signals()
        self.recorder.forget(step)
        self._reached = max(self._reached, step)
        return step

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _find_resumable(self) -> None:
        """Check that the folder holds this very run, and read its newest checkpoint."""
        old = Run(self.folder).row
        recorded = {key for key in old if key.partition(".")[0] in RunConfig.model_fields}
        for key in sorted(recorded | set(self.config.flat())):
            if key not in keys_of("place") | {"cuts", "num_stages"}:
                self._check_same(key, old.get(key), self._row.get(key))
        self._recorded_cuts, self._recorded_rows = old["cuts"], old.get("schedule_rows")
        self.run_id = old["run_id"]
        kept = ("run_id", "started_at", "restarts", "seconds", "start_s", "warning")
        self._row |= {key: old[key] for key in kept if key in old}
        self._row["resumed"] = old["resumed"] + 1
        try:
            found, self._faults = newest_whole(self._checkpoints, self.recorder.check_parts)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        if found is not None:
            self._checkpoint, self._parts = found

    def _check_same(self, key: str, old: object, new: object) -> None:
        if old != new:
            raise ConfigError(f"`{key}` must be {old!r}, as in the run to resume, but got {new!r}.")

    def _first_row(self) -> dict[str, Any]:
        return as_row(self.config) | {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("raysim", "torch", "ray", "numpy")},
            "status": "running",
            "restarts": 0,
            "resumed": 0,
            "diverged_step": None,
            "diverged_at": None,
            "warning": None,
            "error": None,
            "seconds": 0.0,
            "start_s": 0.0,  # of `seconds`, before the first step of each start
        }

    def _record_step(self, step: int, reports: Sequence[StepReport], seconds: float) -> dict[str, Any]:
        """Keep the rows of a step; return that of `steps`."""
        links = link_rows(self.plan, step, reports)
        row = step_row(self.plan, step, reports, links, seconds)
        self.recorder.add("steps", row)
        for link in links:
            self.recorder.add("links", link)
        if self._row["warning"] is None:
            self._row["warning"] = fidelity_warning(self.plan, step, links)
        for transfer in collective_rows(self.plan, step, reports):
            self.recorder.add("collectives", transfer)
        for decision in decision_rows(self.plan, step, reports):
            self.recorder.add("decisions", decision)
        assert self._clock_zero is not None
        shifts = [offset + self._clock_zero for offset in self._offsets_s]
        for action in action_rows(step, reports, shifts):
            self.recorder.add("actions", action)
        return row

    @property
    def engine_name(self) -> str:
        """The kind of the engine: "ray" or "inline"."""
        return str(self._row["engine"])

    @property
    def evaluations(self) -> list[tuple[str, str]]:
        """The modes of links and the BatchNorm statistics under which the weights of a step are evaluated, in turn."""
        forward = [mode for method, _ in self.plan.compressors for mode in method.evaluation_modes]
        modes = [*dict.fromkeys(["on", *forward]), "off"]
        statistics = ["running", "estimated"] if self.config.evaluate_batchnorm_batches else ["running"]
        return [(mode, batchnorm) for batchnorm in statistics for mode in modes]

    def _evaluate(self, step: int) -> Iterator[Event]:
        """Evaluate the same weights with links on and off, and again with BatchNorm statistics estimated under each mode."""
        for turn, (mode, batchnorm) in enumerate(self.evaluations):
            before = time.perf_counter()
            where = {"step": step, "mode": mode, "batchnorm": batchnorm}
            yield Event("evaluating", where | {"turn": turn, "samples": 0})
            if batchnorm == "estimated":
                batches = min(self.config.evaluate_batchnorm_batches, self.plan.steps_per_epoch)
                self.engine.batchnorm("estimate")
                self.engine.evaluate(mode, "train", batches)
                self.engine.batchnorm("use")
            for total in self.engine.evaluating(mode):
                self._ending.check()
                yield Event("evaluating", where | {"turn": turn, "samples": total.samples})
            if batchnorm == "estimated":
                self.engine.batchnorm("restore")
            figures = self.plan.task.results(total.sums)
            if not math.isfinite(figures["loss"]):
                raise DivergedError(step, f"evaluation with compression {mode}", "loss")
            row = where | figures | {"seconds": time.perf_counter() - before}
            self.recorder.add("evals", row)
            yield Event("eval", row, self.recorder.measures)

    def _finish(self, *, compact: bool) -> None:
        """Bring the records to their end: one file a table where the run is over, parts where it can be resumed."""
        try:
            self._write_end(compact=compact)
        finally:
            self.recorder.close()

    def _write_end(self, *, compact: bool) -> None:
        if compact:
            self.recorder.compact()
            run = Run(self.folder)
            steps, evals = run.steps, run.evals
            totals = {"wire_bytes": int(steps["wire_bytes"].sum()), "dense_bytes": int(steps["dense_bytes"].sum())}
            self._row |= totals | {"steps_done": len(steps)}
            if len(steps):
                self._row["final_train_loss"] = float(steps["loss"].iloc[-1])
            for row in evals[evals["step"] == len(steps)].to_dict("records"):
                suffix = row["mode"] if row["batchnorm"] == "running" else f"{row['mode']}_estimated"
                self._row |= {f"final_{name}_{suffix}": row[name] for name in self.recorder.measures}
        else:
            self.recorder.flush()
        self.recorder.write_run(self._row)
        if compact:
            self.recorder.drop_parts()


class _RefusedError(Exception):
    """The stages have no place: the run has not begun, and leaves nothing behind."""
