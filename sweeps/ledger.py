"""The ledger of a sweep: Optuna's study chooses trials, and our rows record their outcomes.

The rows are authoritative: the end of a trial is written to its row first, then to Optuna's study.
"""

from __future__ import annotations

import math
import sqlite3
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from itertools import count, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.storages import RDBStorage
from optuna.trial import FixedTrial, FrozenTrial, TrialState, create_trial

from raysim.config import ConfigError, RunConfig
from raysim.records import RecordsError, Run
from raysim.sweeps.objectives import any_priced, figures
from raysim.sweeps.study import Study
from raysim.sweeps.trial import TrialOutcome
from raysim.sweeps.trial_rows import Rows, TrialRow

if TYPE_CHECKING:
    from raysim.analysis import Replay, Results

MOST_REPEATS = 25  # repeated suggestions, after which a space that is no grid counts as exhausted
MOST_DRAWS = 500  # for one trial, most of them invalid

FORECAST = "a forecast at the exit from the race"
STATES = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED}


def _is_whole(database: Path) -> bool:
    """Return whether an sqlite file is intact; raises sqlite3.OperationalError if it is unavailable."""
    try:
        with closing(sqlite3.connect(database, timeout=60)) as connection:
            return bool(connection.execute("PRAGMA integrity_check").fetchone() == ("ok",))
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        return False


def _of_baseline(name: str) -> dict[str, str]:
    """Return the attributes of a baseline in Optuna's study."""
    return {"queued": f"baseline {name}", "baseline": name}


class Ledger:
    """A study's rows and its Optuna study in sqlite, kept consistent as trials begin and end.

    `rows` is written first. `reconcile` brings Optuna's study, whatever its state, into agreement with the rows.
    """

    def __init__(self, study: Study, folder: Path, on_change: Callable[[], None] = lambda: None) -> None:
        self.study, self.folder = study, folder
        self.rows = Rows(folder, study.name)
        self.rows.read()
        self._on_change = on_change
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        database = folder / "optuna.db"
        if database.is_symlink() or (database.is_file() and not _is_whole(database)):
            database.unlink()  # `reconcile` rebuilds it from the rows
        self._storage = RDBStorage(f"sqlite:///{database}", engine_kwargs={"connect_args": {"timeout": 60}})
        self.optuna = self._open()

    def _open(self) -> optuna.Study:
        study = optuna.create_study(
            storage=self._storage,
            study_name=self.study.name,
            directions=["minimize" if objective.minimize else "maximize" for objective in self.study.objectives],
            load_if_exists=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            study.set_metric_names([objective.name for objective in self.study.objectives])
        return study

    def close(self) -> None:
        """Put trials that did not end back into Optuna's queue, and close its storage."""
        with suppress(optuna.exceptions.StorageInternalError):  # of a full disk: the next session does it
            for trial in self.optuna.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
                self._put_back(trial)
        self._storage.remove_session()
        self._storage.engine.dispose()

    # The queue: baselines, then the points of a grid; Optuna keeps it.

    def enqueue(self) -> None:
        """Enqueue baselines and the points of a grid, unless they are enqueued already."""
        known = {trial.user_attrs.get("queued") for trial in self.optuna.get_trials(deepcopy=False)}
        wanted = [(each.params or {}, _of_baseline(each.name)) for each in self.study.baselines]
        wanted += [(point, {"queued": f"point {i}"}) for i, point in enumerate(self.study.grid)]
        for params, attributes in wanted:
            if attributes["queued"] not in known:
                self.optuna.enqueue_trial(dict(params), user_attrs=attributes)

    def reconcile(self) -> None:
        """Replay finished rows into the Optuna study after a crash, and put unfinished trials back into the queue.

        An unfinished trial keeps its number and parameters, and is enqueued again. If it were marked as failed and a
        copy enqueued, the sampler would treat every interruption as a failure.
        """
        for repeat in [row for row in self.rows if row.status == "waiting" and row.same_as is not None]:
            self.rows.drop(repeat.trial)  # it will be suggested, and recognised, again
        if not self._agrees():
            self._rebuild()
        for trial in self.optuna.get_trials(deepcopy=False):
            row = self.rows.get(trial.number)
            if row is not None and row.ended and not trial.state.is_finished():
                self._tell(row)
            elif trial.state == TrialState.RUNNING:
                self._put_back(trial)
        for unended in self.running:
            unended.status = "waiting"
        self.rows.write()
        self.enqueue()

    def _put_back(self, trial: FrozenTrial) -> None:
        self._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)

    def _agrees(self) -> bool:
        """Return whether sqlite holds every trial of the rows, and no finished trial without a row."""
        trials = self.optuna.get_trials(deepcopy=False)
        if any(row.trial >= len(trials) for row in self.rows):
            return False
        for trial in trials:
            row = self.rows.get(trial.number)
            if trial.state.is_finished() and (row is None or not row.ended or self._state(row) != trial.state):
                return False
            if row is not None and trial.params and trial.params != row.params:
                return False
        return True

    def _rebuild(self) -> None:
        """Rebuild a lost, older or newer sqlite study from the rows."""
        optuna.delete_study(study_name=self.study.name, storage=self._storage)
        self.optuna = self._open()
        last = max((row.trial for row in self.rows), default=-1)
        for number in range(last + 1):
            row = self.rows.get(number)
            attributes = self._attributes(row) if row is not None else {}
            if row is None or not row.ended:  # no row: suggested but never begun
                self.optuna.enqueue_trial(row.params if row is not None else {}, user_attrs=attributes)
                continue
            drawn, state = FixedTrial(row.params), self._state(row)
            if row.params:
                self.study.overrides(drawn, row.name)
            self.optuna.add_trial(
                create_trial(
                    state=state,
                    values=self._values(row) if state == TrialState.COMPLETE else None,
                    params=row.params,
                    distributions={name: drawn.distributions[name] for name in row.params},
                    user_attrs=attributes | self._facts(row),
                    system_attrs={f"constraints:{name}": value for name, value in row.constraints.items()},
                )
            )

    def _attributes(self, row: TrialRow) -> dict[str, str]:
        if row.name is not None:
            return _of_baseline(row.name)
        return {"queued": f"point {self.study.grid.index(row.params)}"} if row.params in self.study.grid else {}

    @staticmethod
    def _facts(row: TrialRow) -> dict[str, Any]:
        """Return a trial's attributes for the dashboard."""
        facts = {"notation": row.notation, "status": row.status, "same_as": row.same_as, "error": row.error}
        return {name: fact for name, fact in facts.items() if fact is not None}

    # Trials.

    @property
    def running(self) -> list[TrialRow]:
        return [row for row in self.rows if row.status == "running"]

    def next(self) -> tuple[TrialRow, RunConfig] | None:
        """Return the row and the configuration of the next trial; None if the budget is spent or the space is exhausted."""
        of_grid, repeats = self.study.sampler == "grid", 0
        for _ in count() if of_grid else range(MOST_DRAWS):
            if repeats == MOST_REPEATS and not of_grid:
                return None
            waiting = self.optuna.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            begun = any(self.rows.get(trial.number) is not None for trial in waiting)
            spent = self.rows.distinct >= self.study.most_trials
            if (spent and not begun) or (of_grid and not waiting):
                return None
            number = waiting[0].number if waiting else len(self.optuna.get_trials(deepcopy=False))
            self.optuna.sampler = self.study.make_sampler(number)
            trial = self.optuna.ask()
            baseline = trial.user_attrs.get("baseline")
            row = self.rows.get(trial.number) or TrialRow(trial.number, list(self.study.seeds), name=baseline)
            row.started_at = row.started_at or datetime.now(UTC)
            try:
                config = self.study.config(self.study.overrides(trial, baseline))
            except ConfigError as error:
                row.params = dict(trial.params)
                self.end(row, TrialOutcome("failed", 0.0, str(error), {}))
                continue
            row.params = dict(trial.params)
            row.notation, row.status = self.study.notation(config), "running"
            alike = (other for other in self.rows if other.notation == row.notation and other.same_as is None)
            same = next(alike, row)
            if same.trial == row.trial:
                return row, config
            self._share(row, same)
            repeats += 1
        return None

    def _share(self, row: TrialRow, same: TrialRow) -> None:
        """Copy the results of the trial with the same configuration, now or when that trial ends."""
        row.same_as, row.runs, row.engine = same.trial, same.runs, same.engine
        if same.ended:
            self.end(row, TrialOutcome(same.status, 0.0, same.error, same.figures))
        else:
            row.status = "waiting"
            self._put(row)

    def begin(self, row: TrialRow, runs: list[str]) -> None:
        """Record the runs of a trial; an ended one continues with more seeds than its verdict has."""
        row.status, row.runs = row.status if row.ended else "running", runs
        self._put(row)

    def end(self, row: TrialRow, outcome: TrialOutcome, forecast: Sequence[float] = ()) -> None:
        """Record the outcome of a trial and of its repeats, and report it to Optuna.

        `forecast`: the objectives of a trial that ended early, only for Optuna's dashboard.
        """
        row.status, row.error, row.figures = outcome.status, outcome.error, dict(outcome.figures)
        row.settled = False if any_priced(self.study.objectives) and row.figures else None
        row.seconds = outcome.seconds
        row.constraints = self._constraints(row)
        self._put(row)
        self._tell(row, forecast)
        for other in self.rows:
            if other.same_as == row.trial and other.status == "waiting":
                self.end(other, outcome._replace(seconds=0.0), forecast)

    def _put(self, row: TrialRow) -> None:
        self.rows.put(row)
        self._on_change()

    def settle(self, results: Results) -> None:
        """Reprice all finished trials with the compute of all runs; earlier prices used only the runs ended by then.

        Optuna keeps the figures on which its choices were based; the rows get the final figures.
        """
        from raysim.analysis import AnalysisError, dense_partners

        if not any_priced(self.study.objectives):
            return
        partners = dense_partners(results)
        for row in self.rows:
            if row.status == "finished" and row.same_as is None:
                with suppress(AnalysisError, RecordsError):  # a trial with a missing run keeps its figures
                    self._price(row, results, partners)
        for row in self.rows:
            if row.same_as is not None and row.status == "finished":
                same = self.rows[row.same_as]
                row.figures, row.settled, row.compute = dict(same.figures), same.settled, same.compute
            row.constraints = self._constraints(row)
        self.rows.write()
        self._on_change()

    def _price(self, row: TrialRow, results: Results, partners: Mapping[str, str]) -> None:
        """Settle the figures of a trial; `partners` are the dense runs to compare its runs with."""

        def replay(run: str, transport: str) -> Replay:
            return results.replay(run, **self.study.pricing, transport=transport)

        def replays(transport: str) -> list[tuple[Replay, Replay | None]]:
            dense = {run: replay(partners[run], transport) for run in row.runs if run in partners}
            return [(replay(run, transport), dense.get(run)) for run in row.runs]

        row.figures = figures(self.study.objectives, [Run(results.path(run)) for run in row.runs], replays)
        transport = next(each.transport for each in self.study.objectives if each.transport is not None)
        row.settled, row.compute = True, replay(row.runs[0], transport).costs.source

    def report(self, row: TrialRow, step: int, evaluated: Mapping[str, float]) -> None:
        """Show an intermediate value in the dashboard; Optuna keeps them for studies of one objective only."""
        name = self.study.objectives[0].name
        if len(self.study.objectives) == 1 and name in evaluated:
            trial_id = self._frozen(row.trial)._trial_id
            self._storage.set_trial_intermediate_value(trial_id, step, evaluated[name])

    # Constraints, and the baselines that they need.

    def missing_baseline(self) -> str | None:
        """Return why the study cannot continue: a baseline needed by its constraints has no value."""
        for constraint, row in product(self.study.constraints, self.rows):
            named = row.name is not None and row.name == constraint.of
            if named and row.ended and row.value(constraint.objective) is None:
                reason = row.error or f"it has no {constraint.objective}"
                return f"The baseline {row.name}, which `constraints` need, is {row.status}: {reason}"
        return None

    def awaits_baseline(self) -> bool:
        """Return whether constraints need an unfinished baseline."""
        needed = {constraint.of for constraint in self.study.constraints} - {None}
        ended = {row.name for row in self.rows if row.ended}
        begun = {row.name for row in self.rows}
        return bool((needed - ended) & begun)

    def _constraints(self, row: TrialRow) -> dict[str, float]:
        """Return a trial's violation of each constraint with known figures."""
        objectives = {objective.name: objective for objective in self.study.objectives}
        broken = {}
        for constraint in self.study.constraints:
            value = row.value(constraint.objective)
            named = (other for other in (row, *self.rows) if other.name == constraint.of)
            baseline = next(named, None) if constraint.of is not None else None
            reference = None if baseline is None else baseline.value(constraint.objective)
            if value is not None and (constraint.of is None or reference is not None):
                broken[constraint.name] = constraint.value(objectives[constraint.objective], value, reference)
        return broken

    # Optuna's study.

    def _frozen(self, number: int) -> FrozenTrial:
        return self.optuna.get_trials(deepcopy=False)[number]

    def _state(self, row: TrialRow) -> TrialState:
        """Return Optuna's state of a trial; without a value, as for an unreached target, it counts as failed for the sampler."""
        state = STATES.get(row.status, TrialState.FAIL)
        return TrialState.FAIL if state == TrialState.COMPLETE and self._values(row) is None else state

    def _values(self, row: TrialRow) -> list[float] | None:
        values = [row.value(objective.name) for objective in self.study.objectives]
        known = [value for value in values if value is not None and math.isfinite(value)]
        return known if len(known) == len(values) else None

    def _tell(self, row: TrialRow, forecast: Sequence[float] = ()) -> None:
        trial = self._frozen(row.trial)
        if trial.state == TrialState.WAITING:  # from an earlier session that did not report it
            self._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
        for name, value in row.constraints.items():
            self._storage.set_trial_system_attr(trial._trial_id, f"constraints:{name}", value)
        for name, fact in self._facts(row).items():
            self._storage.set_trial_user_attr(trial._trial_id, name, fact)
        state = self._state(row)
        if state == TrialState.PRUNED and forecast:  # which `tell` refuses
            self._storage.set_trial_user_attr(trial._trial_id, "values", FORECAST)
            self._storage.set_trial_state_values(trial._trial_id, state, forecast)
            return
        self.optuna.tell(row.trial, self._values(row) if state == TrialState.COMPLETE else None, state=state)
