"""Choosing and stopping trials in Tune: a searcher backed by the ledger, and ASHA.

Tune's own OptunaSearch works alike (ask, run, tell), but reports trials stopped early as complete, leaves diverged
trials running forever, supports neither constraints nor names, hides Optuna's trial numbers, and is pickled as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher

from raysim.config import RunConfig
from raysim.records import RecordsError, Run
from raysim.storage.places import Place
from raysim.sweeps.ledger import Ledger
from raysim.sweeps.study import Study
from raysim.sweeps.trial import Outcome, TrialSpec
from raysim.sweeps.trial_rows import Rows, TrialRow

LOST_PROCESSES = 3  # times that a trial starts again from its checkpoint after losing its processes


class LedgerSearch(Searcher):
    """Tune's searcher: it suggests trials of the ledger, and records their results there."""

    def __init__(
        self, ledger: Ledger, limit: Callable[[int], int], spec: Callable[[TrialRow, RunConfig], TrialSpec]
    ) -> None:
        super().__init__()
        self.ledger = ledger
        self._limit = limit  # by the number of running trials, the number that may run
        self._spec = spec
        self._rows: dict[str, TrialRow] = {}  # by Tune's name of a trial
        self.progress: dict[int, float] = {}  # by Optuna's number
        self.stopping = False
        self.lost: TrialRow | None = None  # the last trial that was given up
        self.problem: str | None = None  # for which the sweep cannot go on: its trials wait for a resume

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
        spec = self._spec(row, config)
        self.ledger.begin(row, spec.runs())
        self._rows[trial_id] = row
        return {"trial": spec}

    def row(self, trial_id: str) -> TrialRow | None:
        """Return the row of one of Tune's trials."""
        return self._rows.get(trial_id)

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
            self.ledger.end(row, result["outcome"])
        else:
            if not error and "evaluated_step" in result:
                self.ledger.report(row, result["evaluated_step"], result)
            seconds = (datetime.now(UTC) - row.started_at).total_seconds() if row.started_at else 0.0
            text = f"gave up after losing its processes {LOST_PROCESSES + 1} times" if error else None
            self.lost = row if error else None
            self.ledger.end(row, Outcome("failed" if error else "pruned", seconds, text, {}))

    def save(self, checkpoint_path: str) -> None:
        """Save nothing: a study is resumed from its rows, and nothing is unpickled."""

    def restore(self, checkpoint_path: str) -> None:
        """Restore nothing."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Searcher, ()  # Tune pickles the searcher into its scratch folder: an empty one


def make_scheduler(study: Study) -> ASHAScheduler | None:
    """Return ASHA, which stops trials by their loss at each evaluation; None without early stopping."""
    if study.early_stopping == "none":
        return None
    every = study.config({}).evaluate_every_steps
    return ASHAScheduler(
        *("evaluated_step", "loss_on", "min"), max_t=every * 10**6, grace_period=every, stop_last_trials=False
    )


def replay_evaluations(scheduler: ASHAScheduler, rows: Rows, folder: Place) -> None:
    """Replay earlier evaluations into the scheduler when a study is resumed."""
    controller: Any = None  # which the scheduler does not ask
    for row in rows:
        if row.runs and row.same_as is None and row.name is None:
            past = Trial("past", stub=True)
            try:
                evals = Run(folder / row.runs[0]).evals
            except RecordsError:
                continue
            scheduler.on_trial_add(controller, past)
            shown = evals[(evals["mode"] == "on") & (evals["batchnorm"] == "running")]
            for step, loss in zip(shown["step"].tolist(), shown["loss"].tolist(), strict=True):
                scheduler.on_trial_result(controller, past, {"evaluated_step": step, "loss_on": loss})
