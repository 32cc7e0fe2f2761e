"""A race in Tune: each of Tune's trials is a part of one run, and rounds of them end with decisions in the ledger."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.tune.search import Searcher

from raysim.analysis.comparison.race import RUNGS, Exit, Race
from raysim.analysis.data import ReplayError
from raysim.analysis.pricing.pooled import in_company
from raysim.config import RunConfig
from raysim.plugins import trusting
from raysim.records import Run
from raysim.sweeps.ledger import Ledger
from raysim.sweeps.objectives import Objective
from raysim.sweeps.race_rounds import RaceRounds, Task, exit_reason
from raysim.sweeps.search import LOST_PROCESSES, LedgerSearch
from raysim.sweeps.store import Store
from raysim.sweeps.trial import Outcome, TrialSpec, run_figures
from raysim.sweeps.trial_rows import TrialRow


class RaceSearch(LedgerSearch):
    """Tune's searcher of a race: it suggests the parts of a round, and ends trials by the decisions after it."""

    def __init__(
        self,
        ledger: Ledger,
        limit: Callable[[int], int],
        spec: Callable[[TrialRow, RunConfig], TrialSpec],
        store: Store,
    ) -> None:
        super().__init__(ledger, limit, spec)
        self._store = store
        self._configs: dict[int, RunConfig] = {}
        self._dense = -1
        self._tasks: dict[str, Task] = {}  # by Tune's name of a trial
        self._failed: dict[int, Outcome] = {}
        self._queue: deque[Task] = deque()
        self._rounds: RaceRounds | None = None

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
            self._queue.extend(rounds.next_round())
            if not self._queue:
                self._end(self.ledger.rows[self._dense])
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
        self.ledger.begin(row, replace(spec, seeds=tuple(row.seeds)).runs())
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

    def _begin(self) -> RaceRounds:
        """Take all trials of the study into the race; return its rounds, those of an earlier session among them."""
        study = self.ledger.study
        while (suggestion := self.ledger.next()) is not None:
            row, config = suggestion
            self._configs[row.trial] = config
            row.seeds = row.seeds if row.runs else []
            self.ledger.begin(row, row.runs)
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

    def _settle_left(self) -> None:
        """End the rows of trials that are no longer in the race."""
        rounds = self.rounds
        for trial, outcome in sorted(self._failed.items()):
            self.ledger.end(self.ledger.rows[trial], outcome)
        self._failed.clear()
        running = set(rounds.running)
        for row in list(self.ledger.rows):
            if row.ended or row.same_as is not None or not row.notation or row.trial in running | {self._dense}:
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
        if row.ended:
            return
        study, runs = self.ledger.study, [self._run_of(row.trial, seed) for seed in row.seeds]
        try:
            outcome = Outcome(
                "finished", self._seconds(row), None, run_figures(study.objectives, runs, study.compute, study.modules)
            )
        except ValueError as error:  # ReplayError among them
            outcome = Outcome("failed", self._seconds(row), str(error), {})
        self.ledger.end(row, outcome)

    def _seconds(self, row: TrialRow) -> float:
        return math.fsum(float(self._run_of(row.trial, seed).row["seconds"]) for seed in row.seeds)
