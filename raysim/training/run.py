"""A training run from its first step to its records: steps, checkpoints, restarts."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from raysim.config import ConfigError, RunConfig
from raysim.engine.engine import Engine
from raysim.engine.inline import InlineEngine
from raysim.engine.nodes import StageSeconds, slow_node_warning, slow_start_warning
from raysim.engine.ray import RayEngine
from raysim.notation import described, text_of
from raysim.pipeline.errors import DivergedError, StageError, WorkerLostError
from raysim.pipeline.prepare import Workload, prepare
from raysim.pipeline.reports import StepFeedback, StepReport
from raysim.records import Recorder, RecordsError, Run
from raysim.records.tables import check_recordable
from raysim.training.branch import Parent, find_parent, recorded_origin
from raysim.training.checkpoint import (
    KEPT,
    Checkpoint,
    Resumable,
    check_data,
    checkpoints,
    find_resumable,
    write_checkpoint,
)
from raysim.training.evaluate import Evaluator
from raysim.training.events import Event, HopelessError, Interruption, Phases
from raysim.training.feedback import Clock, sensitivities
from raysim.training.rows import (
    breaks,
    device_columns,
    fidelity_warning,
    first_row,
    gradient_warning,
    loss_warning,
    plan_columns,
    result_columns,
    rows_of_step,
)
from raysim.training.start import check_start, is_unbegun, run_folder
from raysim.training.trackers import TrackedRun, Trackers
from raysim.workloads.data import Data

_ENGINES: dict[str, type[Engine]] = {"ray": RayEngine, "inline": InlineEngine}
LOSSES_IN_A_ROW = 3  # without a new step in between, the run fails: the cause will not go away
FLUSH_EVERY_S = 15.0
KEEP_EVERY_S = 240.0  # between checkpoints at most, so that a killed run loses less than five minutes


class Training:
    """One run: checked on construction, and trained by iterating over `events`.

    `engine`: a name, or a function that makes an engine from the workload. `data`: the run's data, if already loaded.
    `ending`: its signal ends the run at the next step, with a checkpoint. `wait_s`: seconds to wait for
    resources held by others. `dashboard`: start Ray's dashboard and print its address. `phases` show what the start waits for.
    `refuse` gets the engine with the first weights, and the loss by chance: a sentence from it ends the run before its first step.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        out: str | Path | None = None,
        engine: str | Callable[[Workload], Engine] = "ray",
        resume: bool = False,
        data: Data | None = None,
        ending: Interruption | None = None,
        wait_s: float = 0.0,
        dashboard: bool = False,
        phases: Phases | None = None,
        refuse: Callable[[Engine, float | None], str | None] | None = None,
    ) -> None:
        self._refuse = refuse
        self._check_start = partial(check_start, out, engine if isinstance(engine, str) else "ray", resume=resume)
        self._check_start()  # before the model is made; checked again under the lock
        self.config = config
        self._resume = resume
        self._began = time.perf_counter()
        self.run_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        self.folder = run_folder(out) if out is not None else Path("results") / config.name / self.run_id
        self._checkpoints = self.folder / "checkpoints"
        self.trackers = Trackers(config.report_to or (), self.folder / "tensorboard")
        self.recorder = Recorder(self.folder)
        self._ending = ending or Interruption()
        self._row = first_row(config, self.run_id)
        begun = Run(self.folder).row if resume and not is_unbegun(self.folder) else None
        has_state = begun is not None and bool(checkpoints(self._checkpoints))  # then its parent may be gone
        self._parent: Parent | None = None if has_state else find_parent(config, begun)
        self._resumable: Resumable | None = None
        self._checkpoint: Checkpoint | None = None
        self._reached = 0  # most steps done, over all restarts
        self._clock_zero: float | None = None  # when the workers were up
        self._signals = StepFeedback()  # of the last step
        self._stage_seconds = StageSeconds()
        self.phases = phases or Phases()
        self.phases.enter("the data and the model")
        self.workload = prepare(
            config, data, self._parent.origin(config) if self._parent else recorded_origin(begun or self._row)
        )
        self.plan = self.workload.plan
        self._parts = self._parent.parts(self.plan, self.workload.modules) if self._parent else None
        self.clock = Clock(self.plan)
        self.recorder.measures = tuple(measure.name for measure in self.plan.task.measures)
        parent = self._parent.row["run_id"] if self._parent else None
        self._row |= plan_columns(self.workload, parent)
        if self._parent:
            check_data(self._parent.row, self._row)
        self.engine = (_ENGINES[engine] if isinstance(engine, str) else engine)(self.workload)
        self.engine.wait_s, self.engine.dashboard = wait_s, dashboard
        self.engine.on_phase = self.phases.enter
        self.engine.check()
        self.phases.enter(None)
        self._row["engine"] = self.engine.kind
        check_recordable(self._row)
        self.evaluator = Evaluator(self.plan, self.engine, self.recorder, self._ending)

    def events(self) -> Generator[Event]:
        """Train, and yield events; the records are complete when the iteration ends, however it ends.

        Raises ConfigError immediately if the folder cannot be written, or holds anything but the run to resume. The iteration
        raises ConfigError if the stages do not fit, StageError if the model fails, WorkerLostError if workers die repeatedly at
        the same step, and passes on KeyboardInterrupt; the last three are also recorded. Raises HopelessError, and leaves no
        records, if `refuse` gives a reason.
        """
        try:
            self.recorder.lock()
            self._find_run()  # only under the lock: before, another process may have resumed it
            self.recorder.open()
        except BaseException as error:
            self.recorder.close()
            if isinstance(error, RecordsError):
                raise ConfigError(str(error)) from None
            raise
        return self._events()

    def _find_run(self) -> None:
        """Find the run to resume in the locked folder; raises ConfigError if it holds a different run or other files."""
        self._check_start()
        if self._resume and not is_unbegun(self.folder):
            self._resumable = find_resumable(self.folder, self.config, self._row, self.recorder)
            self._checkpoint = self._resumable.checkpoint
            self._row |= self._resumable.kept_columns()
            self.run_id = self._row["run_id"]

    def _events(self) -> Generator[Event]:
        before_s = float(self._row["seconds"])
        status, error_text = "failed", None
        try:
            self._ending.begin(self.config.grace_s)
            self.recorder.write_run(self._row)  # from here on a killed run can be resumed
            yield from self._warn_of_resume()
            identity = TrackedRun(self.run_id, self.folder.name, self.config.name)
            yield from self.trackers.followed(self._train(), self.config.flat(), identity)
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
        except HopelessError:
            status = "refused" if self._resumable is None else "interrupted"
            raise
        except SystemExit as error:
            error_text = described(error)
            raise StageError(f"{error_text}, by a call of the user's code") from error
        except Exception as error:
            error_text = text_of(error) or type(error).__name__
            raise
        finally:
            self._ending.finish()
            self.phases.enter(None)
            try:
                self.engine.close()
            finally:
                if status == "refused" and self._resumable is None:
                    self.recorder.discard()
                else:
                    seconds = before_s + time.perf_counter() - self._began
                    status = "failed" if status == "refused" else status
                    warning = self._row["warning"] or self.trackers.warning
                    self._row |= {"status": status, "error": error_text, "seconds": seconds, "warning": warning}
                    self._finish(compact=status in ("finished", "diverged"))
                    self.trackers.finish(self._row, over=status in ("finished", "diverged"))

    def _start(self, *, again: bool) -> str | None:
        """Start the workers, `again` after a loss; return a warning about slow nodes.

        The time until the workers are first up, and their nodes are measured, is recorded as the run's start.
        """
        if again:
            self.engine.restart()
        else:
            try:
                self.engine.start()
                self._row |= device_columns(self.engine)
            except ConfigError as error:  # no resources, GPU or cluster: nothing has been trained yet
                raise _RefusedError(str(error)) from None
        warning = self._record_nodes()
        self.phases.enter("the first step")
        self._ending.check()
        if self._clock_zero is None:
            self._clock_zero = time.perf_counter()
            self._row["start_s"] += self._clock_zero - self._began
            self._row["device_kind"] = self.engine.device_kind
        return warning

    def _warn(self, step: int, reason: str | None, **more: Any) -> Iterator[Event]:
        """Yield a warning event if there is a `reason`; the run's first warning is recorded."""
        if reason is not None:
            self._row["warning"] = self._row["warning"] or reason
            yield Event("warning", {"step": step, "reason": reason, **more})

    def _warn_of_resume(self) -> Iterator[Event]:
        """Remove damaged checkpoints, and warn about them and about a different processor; the run continues."""
        if self._resumable is not None:
            step = self._checkpoint.step if self._checkpoint else 0
            yield from self._warn(step, self._resumable.drop_damaged())
            yield from self._warn(step, self._resumable.other_processor(self._row))

    def _record_nodes(self) -> str | None:
        """Record each worker's node and its speed, if there are several nodes; return a warning about slow ones."""
        if self.engine.call_bytes is not None:
            self._row["call_bytes"] = self.engine.call_bytes
        speeds = self.engine.node_speeds()
        if not speeds:
            return None
        self._row |= {"nodes": [node for node, _ in speeds], "node_gflops": [speed for _, speed in speeds]}
        return slow_node_warning(dict(speeds)) or slow_start_warning(self.engine.node_reaches())

    def _train(self) -> Iterator[Event]:
        """Train to the end, restarting lost workers as long as there is progress between losses."""
        lost, losses, farthest = False, 0, -1
        while True:
            try:
                warning = self._start(again=lost)
                if self._row["warning"] is None:
                    yield from self._warn(self._reached, warning)
                yield from self._steps(self._restore())
                return
            except Exception as error:
                self._ending.check()  # the same signal may have ended the workers
                loss = error if isinstance(error, WorkerLostError) else self.engine.loss()
                if loss is None:
                    raise
                losses = 1 if self._reached > farthest else losses + 1
                farthest = self._reached
                if losses == LOSSES_IN_A_ROW or not self.engine.can_restart:
                    raise loss from None
                lost = True
                self._row["restarts"] += 1
                yield Event("restart", {"step": self._reached, "reason": str(loss)})

    def _steps(self, step: int) -> Iterator[Event]:
        """Train from `step` to the end, with checkpoints and evaluations when they are due."""
        every, chosen = self.config.checkpoint_every_steps, self.config.checkpoint_at_steps or ()
        last_flush = last_kept = time.monotonic()
        if step == self.plan.first_step and self._checkpoint is None:
            if self._refuse is not None and (why := self._refuse(self.engine, self._row.get("chance_loss"))):
                raise HopelessError(why)
            if step in chosen:
                self._keep(step)
        if self.evaluator.is_due(step):  # the run was interrupted between checkpoint and evaluation
            self.phases.enter(None)
            yield from self.evaluator.evaluate(step)
        while step < self.plan.end_step:
            yield from self._step(step)
            step += 1
            self._reached = max(self._reached, step)
            late = time.monotonic() - last_kept > KEEP_EVERY_S
            wanted = step == self.plan.end_step or step in chosen or self._ending.wanted
            if wanted or late or (every and (step % every == 0 or self.evaluator.is_due(step))):
                self._keep(step)  # before the evaluation, which may take long
                last_flush = last_kept = time.monotonic()
            elif time.monotonic() - last_flush > FLUSH_EVERY_S:
                self.recorder.flush()
                last_flush = time.monotonic()
            if step < self.plan.end_step:
                self._ending.check()
                if (leaving := self.engine.leaving()) is not None:
                    self._keep(step)
                    if self.engine.fits_elsewhere():
                        raise WorkerLostError(leaving)
            if self.evaluator.is_due(step):
                yield from self.evaluator.evaluate(step)
        if self.engine.device_kind == "cuda":
            self._row["device_peak_bytes"] = self.engine.device_peak_bytes()

    def _step(self, step: int) -> Iterator[Event]:
        """Train one step, record it, and compute the signals for the next one."""
        before = time.perf_counter()
        reports = self.engine.step(step, self._signals)
        self.phases.enter(None)
        seconds = time.perf_counter() - before
        measured = sensitivities(reports) if step >= self.config.compress_from else {}
        self._signals = StepFeedback(self.clock.step_s(reports, seconds), measured)
        row, links = self._record_step(step, reports, seconds)
        chance, warning = self._row.get("chance_loss"), None
        if self._row["warning"] is None:
            warning = self._row["warning"] = (
                gradient_warning(step, reports, self.workload.modules)
                or loss_warning(self.plan, step, row["loss"], chance)
                or fidelity_warning(self.plan, step, links)
                or self._stage_seconds.warning()
            )
        yield Event("step", row)
        yield from self._warn(step, warning, breaks=breaks(self.plan, step, row["loss"], chance, links))

    def _keep(self, step: int) -> None:
        """Write the records to disk, then the checkpoint at the start of `step`."""
        self.recorder.flush()
        parts = (self.engine.state_of(worker) for worker in range(self.engine.num_workers))  # one at a time in memory
        self._checkpoint = write_checkpoint(
            self._checkpoints,
            step,
            parts,
            self._signals,
            self.recorder.parts(),
            self.config.checkpoint_at_steps or (),
            KEPT if self.config.checkpoint_every_steps else 1,
        )
        self._offsets_s = self.engine.clock_offsets_s()  # clocks of other nodes drift

    def _restore(self) -> int:
        """Load the newest checkpoint into fresh workers, drop later records, and return the next step."""
        self._offsets_s = self.engine.clock_offsets_s()
        step, self._signals = self.plan.first_step, StepFeedback()
        if self._checkpoint:
            step, self._signals = self._checkpoint.step, self._checkpoint.signals()
            resumed, self._resumable = self._resumable, None  # its parts are large
            own = resumed.parts if resumed and resumed.checkpoint is self._checkpoint else self._checkpoint.parts()
            self.engine.load(step, own)
        elif self._parent:
            self.engine.load(step, self._parts or self._parent.parts(self.plan, self.workload.modules))
            self._signals = self._parent.signals(self.plan)
        self._parts = None  # they are large
        self.recorder.forget(step)
        self._reached = max(self._reached, step)
        return step

    def _record_step(
        self, step: int, reports: Sequence[StepReport], seconds: float
    ) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
        """Record the rows of a step; return its row of `steps` and its rows of `links`."""
        assert self._clock_zero is not None
        shifts_s = [offset + self._clock_zero for offset in self._offsets_s]
        tables = rows_of_step(self.plan, step, reports, seconds, shifts_s)
        for name, rows in tables.items():
            for row in rows:
                self.recorder.add(name, row)
        if "nodes" in self._row and self.engine.device_kind == "cpu":
            self._stage_seconds.add(self._row["nodes"], reports)
        return tables["steps"][0], tables["links"]

    def _finish(self, *, compact: bool) -> None:
        """Complete the records: one file per table if the run is over, parts if it can be resumed."""
        try:
            if compact:
                self.recorder.compact()
                self._row |= result_columns(Run(self.folder, Run(self.folder).row), self.recorder.measures)
            else:
                self.recorder.flush()
            self.recorder.write_run(self._row)
            if compact:
                self.recorder.drop_parts()
        finally:
            self.recorder.close()


class _RefusedError(Exception):
    """The run could not start, for example since its stages do not fit, and leaves nothing behind."""
