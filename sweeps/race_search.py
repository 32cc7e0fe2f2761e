"""A race in Tune: each of Tune's trials is a part of one run, and rounds of them end with decisions in the ledger."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from optuna.trial import FixedTrial
from ray.tune.search import Searcher

from raysim.analysis.comparison.race import RUNGS, Exit, Race
from raysim.analysis.comparison.race_plan import usual_spread
from raysim.analysis.data import ReplayError
from raysim.analysis.runs.prices import in_company
from raysim.config import RunConfig
from raysim.plugins import trusting
from raysim.records import Run
from raysim.sweeps.budget import Spending
from raysim.sweeps.ledger import Ledger
from raysim.sweeps.objectives import Objective
from raysim.sweeps.race_budget import RaceBudget
from raysim.sweeps.race_lines import exit_reason, spent_lines
from raysim.sweeps.race_rounds import RaceRounds, Task
from raysim.sweeps.search import LOST_PROCESSES, LedgerSearch
from raysim.sweeps.store import Store
from raysim.sweeps.study import Study
from raysim.sweeps.trial import Outcome, TrialSpec, run_figures
from raysim.sweeps.trial_rows import TrialRow


class RaceSearch(LedgerSearch):
    """Tune's searcher of a race: it suggests the parts of a round, and ends trials by the decisions after it.

    `gpus`: of a run. `on_plan` is called with the study on the seeds that the plan of its budget chose; `say` prints a line.
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
        self.refused: str | None = None
        """Why the race cannot be had within its budget."""
        self._configs: dict[int, RunConfig] = {}
        self._dense = -1
        self._tasks: dict[str, Task] = {}  # by Tune's name of a trial
        self._failed: dict[int, Outcome] = {}
        self._queue: deque[Task] = deque()
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
                for row in (self.ledger.rows[trial] for trial in (self._dense, *rounds.further)):
                    if row.status != "pruned":
                        self._end(row)
                return Searcher.FINISHED
        if not self._queue or running >= self._limit(running):
            return None
        task = self._queue.popleft()
        row = self.ledger.rows[task.trial]
        last = task.rung == len(RUNGS) - 1
        spec = replace(
            self._spec(row, self._configs[task.trial]),
            seeds=(task.seed,),
            objectives=(),
            watched=False,
            until=1.0 if last else RUNGS[task.rung],
        )
        row.seeds = rounds.trained_seeds(task.trial)
        runs = replace(spec, seeds=tuple(row.seeds)).runs()
        if row.ended:  # for more seeds than its verdict, or than in an earlier session
            row.runs = runs
            self.ledger.rows.write()
        else:
            self.ledger.begin(row, runs)
        self._rows[trial_id], self._tasks[trial_id] = row, task
        return {"trial": spec}

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        row, result = self._rows.pop(trial_id), result or {}
        self._tasks.pop(trial_id)
        self.progress.pop(row.trial, None)
        if "disk_error" in result:
            self.problem, self.stopping = result["disk_error"], True
        elif "outcome" in result:
            outcome: Outcome = result["outcome"]
            if outcome.status in ("failed", "diverged"):
                self._failed[row.trial] = outcome
        elif error:
            self.lost = row
            text = f"gave up after losing its processes {LOST_PROCESSES + 1} times"
            self._failed[row.trial] = Outcome("failed", 0.0, text, {})
        else:  # the sweep is ending, and the part waits for a resume
            return
        if not self._rows and not self._queue and not self.stopping:
            self._end_round()

    def _next_tasks(self) -> list[Task]:
        """Return the parts of the next round, after a plan if there is a budget."""
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
        spending = Spending(
            study.budget,
            jobs=max(1, self._limit(0)),
            gpus=self._gpus,
            before_s=time.monotonic() - self._began_s + rounds.elapsed_s,
        )
        return RaceBudget(
            rounds,
            spending,
            spread=usual_spread(rounds.measure, branched=study.config({}).start is not None),
            notations={row.trial: row.notation for row in self.ledger.rows},
            say=self._say,
            on_plan=lambda seeds: self._on_plan(replace(study, planned_seeds=seeds)),
        )

    def summary(self) -> list[str]:
        """Return what the race has decided within its budget, and what is open, a line each; none without a budget."""
        rounds = self._rounds
        return [] if rounds is None or rounds.budget is None else spent_lines(rounds.budget)

    def _begin(self) -> RaceRounds:
        """Take all trials of the study into the race; return its rounds, those of an earlier session among them."""
        study = self.ledger.study
        while (suggestion := self.ledger.next()) is not None:
            row = suggestion[0]
            row.seeds = row.seeds if row.runs else []
            self.ledger.begin(row, row.runs)
        for row in self.ledger.rows:
            if row.notation:
                self._configs[row.trial] = study.config(study.overrides(FixedTrial(row.params), row.name))
        rows = [row for row in self.ledger.rows if row.same_as is None and row.notation]
        assert study.race is not None
        assert study.dense is not None
        self._dense = next(row.trial for row in rows if row.name == study.dense.name)
        entrants = [row.trial for row in rows if row.trial != self._dense]
        measure = next(each.quality for each in study.objectives if each.quality is not None)
        race = Race(len(study.seeds), measure.margin, len(entrants), **vars(study.race))
        return RaceRounds(
            self.ledger.folder / "race.parquet",
            race=race,
            seeds=study.seeds,
            dense=self._dense,
            entrants=entrants,
            measure=measure,
            run_of=self._run_of,
            cost_of=self._cost_of,
        )

    def _run_of(self, trial: int, seed: int) -> Run:
        return Run(self._store.place() / f"trials/{trial}-s{seed}")

    def _cost_of(self, trials: Sequence[int]) -> Mapping[int, float]:
        """Return what the study's first objective that is no quality costs in a step of trials: all 0 without one."""
        cost = next((each for each in self.ledger.study.objectives if not each.evaluates), None)
        runs = {trial: self._run_of(trial, self.ledger.rows[trial].seeds[0]) for trial in trials}
        if cost is not None and cost.network is not None:
            try:
                return self._prices(cost, runs)
            except ReplayError:  # no profiled step yet: bytes are known at once
                pass
        if cost is None:
            return dict.fromkeys(trials, 0.0)
        return {trial: float(run.steps["wire_bytes"].mean()) for trial, run in runs.items()}

    def _prices(self, cost: Objective, runs: Mapping[int, Run]) -> dict[int, float]:
        study = self.ledger.study
        with trusting(*study.modules):
            replays = in_company(list(runs.values()), compute=study.compute, transport=cost.transport)
            assert cost.network is not None
            return {trial: replay.step_s([cost.network])[0].value for trial, replay in zip(runs, replays, strict=True)}

    def _end_round(self) -> None:
        """Decide on the round that has ended, and end the trials that leave the race, or are at their end."""
        rounds = self.rounds
        if self._dense in self._failed:
            why = self._failed[self._dense]
            self.problem = f"Dense, with which a race pairs all trials, {why.status}: {why.error}"
            self.stopping = True
            return
        rounds.end_round(list(self._failed))
        self._settle_left()

    def _settle_left(self, *, over: bool = False) -> None:
        """End the rows of trials that have left the race; if they may return, only once it is `over`."""
        rounds = self.rounds
        for trial, outcome in sorted(self._failed.items()):
            self.ledger.end(self.ledger.rows[trial], outcome)
        self._failed.clear()
        running = set(rounds.running)
        for row in list(self.ledger.rows):
            if row.ended or row.same_as is not None or not row.notation or row.trial in running | {self._dense}:
                continue
            if not over and self.ledger.study.budget is not None and rounds.may_return(row.trial):
                continue
            reason = rounds.left.get(row.trial)
            if reason is None:
                self._end(row)
            else:
                text = self._reason(reason)
                self.ledger.end(row, Outcome("pruned", self._seconds(row), text, {}))

    def _reason(self, reason: Exit) -> str:
        dense = self._run_of(self._dense, self.rounds.trained_seeds(self._dense)[0])
        return exit_reason(reason, self.rounds.measure, num_steps=len(dense.steps), margin=self.rounds.race.margin)

    def _end(self, row: TrialRow) -> None:
        """End a row that trained on all of its seeds."""
        study, runs = self.ledger.study, [self._run_of(row.trial, seed) for seed in row.seeds]
        try:
            outcome = Outcome(
                "finished", self._seconds(row), None, run_figures(study.objectives, runs, study.compute, study.modules)
            )
        except ValueError as error:  # ReplayError among them
            outcome = Outcome("failed", self._seconds(row), str(error), {})
        if row.ended:
            row.figures, row.seconds = outcome.figures, outcome.seconds
            self.ledger.rows.write()
        else:
            self.ledger.end(row, outcome)

    def _seconds(self, row: TrialRow) -> float:
        return math.fsum(float(self._run_of(row.trial, seed).row["seconds"]) for seed in row.seeds)
