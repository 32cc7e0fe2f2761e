"""The searcher that Tune asks for configurations, and tells their outcomes: a view of the ledger.

Tune's own OptunaSearch has the same idea (ask, run, tell), but it tells a trial that was stopped early as complete, leaves a
diverged trial running for ever, knows neither constraints nor names, hides Optuna's numbers, and is pickled whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from ray.tune.search import Searcher

from raysim.config import RunConfig
from raysim.sweeps.ledger import Ledger
from raysim.sweeps.objectives import Figure
from raysim.sweeps.rows import TrialRow
from raysim.sweeps.trial import Outcome


class LedgerSearch(Searcher):
    """Searcher of Tune: it gives configurations and takes results."""

    def __init__(
        self,
        ledger: Ledger,
        jobs: Callable[[int], int],
        spec: Callable[[TrialRow, RunConfig], Mapping[str, Any]],
    ) -> None:
        super().__init__()
        self.ledger = ledger
        self._jobs = jobs  # of the number of trials that go on, the number that may
        self._spec = spec
        self._rows: dict[str, TrialRow] = {}  # by Tune's name of a trial
        self.progress: dict[int, float] = {}  # by Optuna's
        self.stopping = False
        self.lost: TrialRow | None = None  # given up last
        self.refused: str | None = None  # by the operating system: the trial that met it waits for a resume

    def suggest(self, trial_id: str) -> Any:
        going = len(self._rows)
        if self.stopping:
            return Searcher.FINISHED
        if going >= self._jobs(going):
            return None
        if going and self.ledger.awaits_baseline():
            return None
        found = self.ledger.next()
        if found is None:
            return None if going else Searcher.FINISHED
        row, config = found
        spec = self._spec(row, config)
        self.ledger.begin(row, spec["runs"])
        self._rows[trial_id] = row
        return {"spec": json.dumps(spec["spec"])}

    def row(self, trial_id: str) -> TrialRow | None:
        """Return the row of one of Tune's trials."""
        return self._rows.get(trial_id)

    def on_trial_result(self, trial_id: str, result: Mapping[str, Any]) -> None:
        row = self._rows[trial_id]
        self.progress[row.trial] = result.get("progress", 0.0)
        if "evaluated_step" in result:
            self.ledger.report(row, result["evaluated_step"], result)

    def on_trial_complete(self, trial_id: str, result: Mapping[str, Any] | None = None, error: bool = False) -> None:
        row = self._rows.pop(trial_id)
        self.progress.pop(row.trial, None)
        if result is not None and "refused" in result:
            self.refused, self.stopping = result["refused"], True
        elif result is not None and "outcome" in result:
            status, seconds, text, figures = json.loads(result["outcome"])
            found = {name: Figure(*figure) for name, figure in figures.items()}
            self.ledger.end(row, Outcome(status, seconds, text, found))
        else:
            if not error and result is not None and "evaluated_step" in result:
                self.ledger.report(row, result["evaluated_step"], result)
            seconds = (datetime.now(UTC) - row.started_at).total_seconds() if row.started_at else 0.0
            text = "its processes were lost again and again" if error else None
            self.lost = row if error else None
            self.ledger.end(row, Outcome("failed" if error else "pruned", seconds, text, {}))

    def save(self, checkpoint_path: str) -> None:
        """Keep nothing: the rows are kept, and no resume unpickles anything."""

    def restore(self, checkpoint_path: str) -> None:
        """Nothing was kept."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Searcher, ()  # Tune pickles the searcher into its scratch folder: an empty one
