"""Searchers for Tune, backed by the ledger: of whole trials, and of the parts of a race.

Tune's own OptunaSearch works similarly (ask, run, tell), but reports trials stopped early as complete, leaves diverged
trials running forever, supports neither constraints nor names, hides Optuna's trial numbers, and is pickled as a whole.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from ray.tune.search import Searcher

from raysim.analysis.comparison.race import RUNGS, Race, RaceExit
from raysim.analysis.comparison.race_plan import usual_spread
from raysim.config import RunConfig
from raysim.records import Run
from raysim.sweeps.budget import Spending
from raysim.sweeps.ledger import Ledger
from raysim.sweeps.race_budget import RaceBudget
from raysim.sweeps.race_rounds import RaceRounds, RunPart
from raysim.sweeps.store import Store
from raysim.sweeps.study import Study
from raysim.sweeps.trial import (
    TrialOutcome,
    TrialSpec,
    finished_outcome,
    forecast_values,
    part_steps,
    step_costs,
    trial_folder,
)
from raysim.sweeps.trial_rows import TrialRow
from raysim.units import decimals, plural, two_digits

LOST_PROCESSES = 3  # restarts of a trial from its checkpoint after losing its processes


class LedgerSearch(Searcher):
    """A Tune searcher that suggests trials from the ledger and records their results there."""

    refused: str | None = None
    """Why the study cannot be had within its budget."""

    def __init__(
        self, ledger: Ledger, limit: Callable[[int], int], spec: Callable[[TrialRow, RunConfig], TrialSpec]
    ) -> None:
        super().__init__()
        self.ledger = ledger
        self._limit = limit  # maps the number of running trials to the number that may run
        self._spec = spec
        self._rows: dict[str, TrialRow] = {}  # by Tune's name of a trial
        self.progress: dict[int, float] = {}  # by Optuna's number
        self.stopping = False
        self.lost: TrialRow | None = None  # the last abandoned trial
        self.on_resume: Callable[..., None] = lambda row, trial_id=None: None  # called with each begun trial
        self.problem: str | None = None  # why the sweep cannot continue: its trials wait for a resume

    def suggest(self, trial_id: str) -> Any:
        running = len(self._rows)
        if self.stopping:
            return Searcher.FINISHED
        if running >= self._limit(running) or (running and self.ledger.awaits_baseline()):
            return None
        suggestion = self.ledger.next()
        if suggestion is None:
            return None if running else Searcher.FINISHED
        row, config = suggestion
        self.on_resume(row, trial_id)
        spec = self._spec(row, config)
        self.ledger.begin(row, spec.runs())
        self._rows[trial_id] = row
        return {"trial": spec}

    def row(self, trial_id: str) -> TrialRow | None:
        """Return the row of a Tune trial."""
        return self._rows.get(trial_id)

    def summary(self, before_s: float = 0.0) -> list[str]:
        """Return lines on the decisions of a race within its budget and on undecided settings; none without a budget.

        `before_s`: seconds spent before the race, of the budget for both.
        """
        return []

    def standing(self) -> str:
        """Return how far a race is, and the least harm so far; empty before it has begun."""
        return ""

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        row = self._rows[trial_id]
        self.progress[row.trial] = result.get("progress", 0.0)
        if "evaluated_step" in result:
            self.ledger.report(row, result["evaluated_step"], result)

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        row, result = self._rows.pop(trial_id), result or {}
        self.progress.pop(row.trial, None)
        if "disk_error" in result:
            self.problem, self.stopping = result["disk_error"], True
        elif "outcome" in result:
            self._end(row, result["outcome"])
        elif error:
            self.lost = row
            text = f"gave up after losing its processes {LOST_PROCESSES + 1} times"
            self._end(row, TrialOutcome("failed", self._elapsed_s(row), text, {}))
        else:
            self._stop(row, result)

    def _elapsed_s(self, row: TrialRow) -> float:
        return (datetime.now(UTC) - row.started_at).total_seconds() if row.started_at else 0.0

    def _end(self, row: TrialRow, outcome: TrialOutcome) -> None:
        """Record the outcome of a Tune trial."""
        self.ledger.end(row, outcome)

    def _stop(self, row: TrialRow, result: Mapping[str, Any]) -> None:
        """Record that a Tune trial was stopped."""
        if "evaluated_step" in result:
            self.ledger.report(row, result["evaluated_step"], result)
        self.ledger.end(row, TrialOutcome("pruned", self._elapsed_s(row), None, {}))

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a study is resumed from its rows, and nothing is unpickled."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Searcher, ()  # Tune pickles the searcher into its scratch folder: give it an empty one


class RaceSearch(LedgerSearch):
    """A Tune searcher of a race: each Tune trial is a part of a run, and each round ends with decisions in the ledger.

    `gpus`: per run. `on_plan` is called with the study on the seeds chosen by the plan of its budget; `say` prints a line.
    """

    def __init__(
        self,
        ledger: Ledger,
        limit: Callable[[int], int],
        spec: Callable[[TrialRow, RunConfig], TrialSpec],
        store: Store,
        *,
        gpus: float,
        on_plan: Callable[[Study], None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(ledger, limit, spec)
        self._store = store
        self._gpus, self._on_plan, self._say = gpus, on_plan, say
        self._configs: dict[int, RunConfig] = {}
        self._failed: dict[int, TrialOutcome] = {}
        self._queue: deque[RunPart] = deque()
        self._parts: dict[str, RunPart] = {}  # by Tune's name of a trial
        self._rounds: RaceRounds | None = None
        self._began_s = time.monotonic()

    @property
    def rounds(self) -> RaceRounds:
        """The rounds of the race, once it has begun."""
        if self._rounds is None:
            self._rounds = self._begin()
            self._settle_left()
        return self._rounds

    def suggest(self, trial_id: str) -> Any:
        running = len(self._rows)
        if self.stopping:
            return Searcher.FINISHED
        rounds = self.rounds
        if not self._queue and not running:
            self._queue.extend(self._next_tasks())
            if not self._queue:
                self._settle_left(over=True)
                for row in (self.ledger.rows[trial] for trial in (rounds.dense, *rounds.further)):
                    if row.status != "pruned":
                        self._finish(row)
                return Searcher.FINISHED
        if not self._queue or running >= self._limit(running):
            return None
        task = self._queue.popleft()
        row = self.ledger.rows[task.trial]
        spec = self._spec(row, self._configs[task.trial])
        row.seeds = rounds.trained_seeds(task.trial)
        self.ledger.begin(row, replace(spec, seeds=tuple(row.seeds)).runs())
        self._rows[trial_id], self._parts[trial_id] = row, task
        return {"trial": replace(spec, seeds=(task.seed,), objectives=(), watched=False, until=task.share)}

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        super().on_trial_complete(trial_id, result, error)
        part, outcome = self._parts.pop(trial_id), (result or {}).get("outcome")
        if part.share == 1.0 and outcome is not None and outcome.status == "finished":
            self._drop_checkpoints(part.trial, [part.seed])
            if part.trial == self.rounds.dense and (why := self.rounds.undefined(part.seed)):
                self.problem, self.stopping = f"A race compares settings with dense, but {why}", True
        if not self._rows and not self._queue and not self.stopping:
            self._end_round()

    def _drop_checkpoints(self, trial: int, seeds: Sequence[int]) -> None:
        """Remove the checkpoints of runs that will not continue, unless the study asks for checkpoints."""
        config = self._configs[trial]
        if not config.checkpoint_every_steps and config.checkpoint_at_steps is None:
            for seed in seeds:
                self._store.drop_checkpoints(trial_folder(trial, seed))

    def _end(self, row: TrialRow, outcome: TrialOutcome) -> None:
        if outcome.status in ("failed", "diverged", "pruned"):
            self._failed[row.trial] = outcome
        if outcome.status == "pruned":
            self._queue = deque(task for task in self._queue if task.trial != row.trial)

    def _elapsed_s(self, row: TrialRow) -> float:
        return 0.0  # all trials of a race start together

    def _stop(self, row: TrialRow, result: Mapping[str, Any]) -> None:
        """Leave the part for a resume, since the sweep is ending."""

    def summary(self, before_s: float = 0.0) -> list[str]:
        rounds = self._rounds
        return [] if rounds is None or rounds.budget is None else rounds.budget.summary(before_s)

    def standing(self) -> str:
        rounds = self._rounds
        if rounds is None:
            return ""
        text = f"{plural(len(rounds.running), 'setting')} open, {plural(rounds.ended_runs, 'run')} ended"
        if begun := sum(len(entry.seeds) for entry in rounds.parts if not entry.ended):
            text += f", {begun - len(self._queue) - len(self._rows)} of {begun} parts of this round trained"
        if (best := rounds.least_harmful) is None:
            return text
        harms = rounds.harms(best)
        harm, seeds = f"{two_digits(fmean(harms), '+')} {rounds.measure.unit}", plural(len(harms), "seed")
        return f"{text}; least harm so far {harm} on {seeds}: {self.ledger.rows[best].notation}"

    def _begin(self) -> RaceRounds:
        """Enter all trials of the study; return the rounds of the race, including those of earlier sessions."""
        study = self.ledger.study
        while (suggestion := self.ledger.next()) is not None:
            row = suggestion[0]
            row.seeds = row.seeds if row.runs else []
            self.ledger.begin(row, row.runs)
        drawn = [row for row in self.ledger.rows if row.notation]
        self._configs = {row.trial: study.config(study.overrides_at(row.params, row.name)) for row in drawn}
        rows = [row for row in drawn if row.same_as is None]
        assert study.race is not None
        assert study.dense is not None
        dense = next(row.trial for row in rows if row.name == study.dense.name)
        entrants = [row.trial for row in rows if row.trial != dense]
        measure = next(each.quality for each in study.objectives if each.quality is not None)
        return RaceRounds(
            self.ledger.folder / "race.parquet",
            race=Race(len(study.seeds), measure.margin, len(entrants), **vars(study.race)),
            seeds=study.seeds,
            dense=dense,
            entrants=entrants,
            measure=measure,
            run_of=self._run_of,
            cost_of=self._cost_of,
        )

    def _run_of(self, trial: int, seed: int) -> Run:
        return Run(self._store.place() / trial_folder(trial, seed))

    def _cost_of(self, trials: Sequence[int]) -> Mapping[int, float]:
        """Return each trial's cost of a step, by its first seed."""
        study = self.ledger.study
        runs = [self._run_of(trial, self.ledger.rows[trial].seeds[0]) for trial in trials]
        return dict(zip(trials, step_costs(study.objectives, runs, study.pricing, study.modules), strict=True))

    def _next_tasks(self) -> list[RunPart]:
        """Return the parts of the next round, planning first if there is a budget."""
        rounds = self.rounds
        if self.ledger.study.budget is not None and rounds.budget is None:
            if pilot := rounds.begin_pilot():
                return pilot
            rounds.budget = self._make_budget()
            if not rounds.begun:
                self.refused = rounds.budget.plan()
            elif self.ledger.study.planned_seeds != rounds.race.plan:  # killed between the two files
                self._on_plan(replace(self.ledger.study, planned_seeds=rounds.race.plan))
        if self.refused:
            return []
        tasks = rounds.next_round()
        self._settle_left()
        return tasks

    def _make_budget(self) -> RaceBudget:
        study, rounds = self.ledger.study, self.rounds
        assert study.budget is not None
        before_s = time.monotonic() - self._began_s + rounds.elapsed_s
        return RaceBudget(
            rounds,
            Spending(study.budget, jobs=max(1, self._limit(0)), gpus=self._gpus, before_s=before_s),
            spread=usual_spread(rounds.measure, branched=study.config({}).start is not None),
            notations={row.trial: row.notation for row in self.ledger.rows},
            say=self._say,
            on_plan=lambda seeds: self._on_plan(replace(study, planned_seeds=seeds)),
        )

    def _end_round(self) -> None:
        """Decide about the ended round, and end the trials that leave the race or are complete."""
        if (failed := self._failed.get(self.rounds.dense)) is not None:
            self.problem = f"Dense, with which a race pairs all trials, {failed.status}: {failed.error}"
            self.stopping = True
            return
        dropped = [trial for trial, outcome in self._failed.items() if outcome.status == "pruned"]
        self.rounds.end_round(self._failed.keys() - dropped, at_once=dropped)
        self._settle_left()

    def _settle_left(self, *, over: bool = False) -> None:
        """End the rows of trials that have left the race; if they may return, only once it is `over`."""
        rounds = self.rounds
        for trial, outcome in sorted(self._failed.items()):
            row = self.ledger.rows[trial]
            self._drop_checkpoints(trial, row.seeds)
            if outcome.status == "pruned":
                row.seeds, row.runs = [], []  # none was trained
            self.ledger.end(row, outcome)
        self._failed.clear()
        racing = {rounds.dense, *rounds.running}
        for row in list(self.ledger.rows):
            if row.ended or row.same_as is not None or not row.notation or row.trial in racing:
                continue
            if not over and self.ledger.study.budget is not None and rounds.may_return(row.trial):
                continue
            if row.trial in rounds.left:
                self._drop_checkpoints(row.trial, row.seeds)  # if it returns, then on other seeds
                why = self._why(row.trial, rounds.left[row.trial])
                self.ledger.end(row, TrialOutcome("pruned", self._seconds(row), why, {}), self._forecast(row))
            else:
                self._finish(row)

    def _why(self, trial: int, reason: RaceExit) -> str:
        rounds, measure = self.rounds, self.rounds.measure
        num_steps = len(self._run_of(rounds.dense, rounds.trained_seeds(rounds.dense)[0]).steps)
        where = f"after {part_steps(RUNGS[reason.rung], num_steps):,} of {num_steps:,} steps on {reason.seeds} seeds"
        harm = f"harm {reason.harm:+.3g} {measure.unit}"
        if reason.kind == "slower":
            return f"left {where}: slower than a safe setting"
        if reason.kind == "chance":
            return f"left {where}: dense is not clearly better than chance, so no setting can be called safe"
        if reason.kind == "harmful":
            bound = decimals(reason.bound, 2, rounds.race.margin)
            return f"dropped {where}: {harm}, in the end at least {bound}, and the margin is {rounds.race.margin:g}"
        chance = "below 1 %" if reason.bound < 0.01 else f"{100 * reason.bound:.0f} %"
        spread = rounds.race.spread(rounds.evidence[trial], rounds.evidence)
        return (
            f"given up {where}: {harm} with a spread of {spread:.2g} {measure.unit} over seeds, so a chance of {chance} that "
            f"{rounds.race.seeds} seeds show it to be within the margin of {rounds.race.margin:g}"
        )

    def _forecast(self, row: TrialRow) -> list[float]:
        """Return the objectives of a trial that leaves, as forecast for whole runs."""
        rounds, study = self.rounds, self.ledger.study
        dense = [self._run_of(rounds.dense, seed) for seed in rounds.trained_seeds(rounds.dense, least=1.0)]
        runs, harm = [self._run_of(row.trial, seed) for seed in row.seeds], rounds.left[row.trial].harm
        return forecast_values(study.objectives, runs, dense, rounds.measure, harm, study.pricing, study.modules)

    def _finish(self, row: TrialRow) -> None:
        """End the row of a trial trained on all of its seeds."""
        study, seconds = self.ledger.study, self._seconds(row)
        runs = [self._run_of(row.trial, seed) for seed in row.seeds]
        outcome = finished_outcome(study.objectives, runs, study.pricing, study.modules, seconds)
        if row.ended:
            row.figures, row.seconds = outcome.figures, outcome.seconds
            self.ledger.rows.write()
        else:
            self.ledger.end(row, outcome)

    def _seconds(self, row: TrialRow) -> float:
        return math.fsum(float(self._run_of(row.trial, seed).row["seconds"]) for seed in row.seeds)
