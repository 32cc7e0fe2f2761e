"""The ledger of a sweep: Optuna's study chooses trials, and our rows record their outcomes.

The rows are the truth: a trial ends in its row first, and the study is told after it.
"""

from __future__ import annotations

import math
import sqlite3
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FixedTrial, FrozenTrial, TrialState, create_trial

from raysim.config import ConfigError, RunConfig
from raysim.records import RecordsError, Run
from raysim.sweeps.objectives import Figure, by_transport, figures, priced
from raysim.sweeps.rows import Rows, TrialRow
from raysim.sweeps.study import Study
from raysim.sweeps.trial import Outcome

if TYPE_CHECKING:
    from raysim.analysis import Results

MOST_REPEATS = 25  # suggestions in a row that bring nothing new, and the space counts as searched

TOLD = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED}


def make_sampler(study: Study, number: int) -> BaseSampler:
    """Return the sampler of trial `number`, seeded by the number, so that a resumed study draws the same trials."""
    seed = (study.sampler_seed + 7919 * number) % 2**32
    if study.sampler == "nsga2":
        return NSGAIISampler(population_size=study.population, seed=seed)
    if study.sampler == "tpe":
        with warnings.catch_warnings():  # `group`: one model for each branch of a conditional space
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return TPESampler(n_startup_trials=study.startup_trials, multivariate=True, group=True, seed=seed)
    return RandomSampler(seed=seed)


def _is_whole(database: Path) -> bool:
    """Return whether a file of sqlite is undamaged, or not there; raises sqlite3.OperationalError where it cannot be used now."""
    if not database.is_file():
        return True
    try:
        with closing(sqlite3.connect(database, timeout=60)) as connection:
            return bool(connection.execute("PRAGMA integrity_check").fetchone() == ("ok",))
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        return False


class Ledger:
    """A study's rows and its Optuna study, kept consistent as trials are asked, begun, ended and told.

    `rows` is written first. `reconcile` brings the study in sqlite, whatever its state, into agreement with the rows.
    """

    def __init__(self, study: Study, folder: Path, on_change: Callable[[], None] = lambda: None) -> None:
        self.study = study
        self.folder = folder
        self.rows = Rows(folder, study.name)
        self.rows.read()
        self._on_change = on_change
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        database = folder / "optuna.db"
        if not _is_whole(database):
            database.unlink()  # `reconcile` makes it anew of the rows
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
        """Let go of sqlite."""
        self._storage.remove_session()
        self._storage.engine.dispose()

    # The queue: baselines, then the points of a grid; Optuna keeps it.

    def enqueue(self) -> None:
        """Put baselines and the points of a grid into the queue, unless they are in it."""
        there = {trial.user_attrs.get("queued") for trial in self.optuna.get_trials(deepcopy=False)}
        wanted: list[tuple[str, dict[str, Any], str | None]] = [
            (f"baseline {one.name}", dict(one.params or {}), one.name) for one in self.study.baselines
        ]
        wanted += [(f"point {index}", dict(point), None) for index, point in enumerate(self.study.grid)]
        for queued, params, name in wanted:
            if queued not in there:
                attributes = {"queued": queued} | ({"baseline": name} if name is not None else {})
                self.optuna.enqueue_trial(params, user_attrs=attributes)

    def reconcile(self) -> None:
        """Replay finished rows into the Optuna study after a crash, and put unfinished trials back into the queue.

        An unfinished trial keeps its number and its parameters, and waits again. If it were marked as failed and a copy enqueued,
        the sampler would learn from every interruption as from a failure.
        """
        for repeat in [row for row in self.rows if row.status == "waiting" and row.same_as is not None]:
            self.rows.drop(repeat.trial)  # asked again, it is recognised again
        if not self._agrees():
            self._rebuild()
        for trial in self.optuna.get_trials(deepcopy=False):
            row = self.rows.get(trial.number)
            if row is not None and row.ended and not trial.state.is_finished():
                self._tell(row)
            elif trial.state == TrialState.RUNNING:
                self._storage.set_trial_state_values(trial._trial_id, TrialState.WAITING)
        for unended in self.running:
            unended.status = "waiting"
        self.rows.write()
        self.enqueue()

    def _agrees(self) -> bool:
        """Return whether sqlite holds every trial of the rows, and none ended that they do not know."""
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
        """Rebuild the study in sqlite from the rows: it was lost, or is older or newer than they are."""
        optuna.delete_study(study_name=self.study.name, storage=self._storage)
        self.optuna = self._open()
        last = max((row.trial for row in self.rows), default=-1)
        for number in range(last + 1):
            row = self.rows.get(number)
            attributes = self._attributes(row) if row is not None else {}
            if row is None or not row.ended:  # no row: asked, and never begun
                self.optuna.enqueue_trial(row.params if row is not None else {}, user_attrs=attributes)
                continue
            drawn, state = FixedTrial(row.params), self._state(row)
            if row.params:
                self._overrides(drawn, row.name)
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

    def _attributes(self, row: TrialRow) -> dict[str, Any]:
        if row.name is not None:
            return {"queued": f"baseline {row.name}", "baseline": row.name}
        return {"queued": f"point {self.study.grid.index(row.params)}"} if row.params in self.study.grid else {}

    @staticmethod
    def _facts(row: TrialRow) -> dict[str, Any]:
        """Return the attributes of a trial in the dashboard."""
        facts = {"notation": row.notation, "status": row.status, "same_as": row.same_as, "error": row.error}
        return {name: fact for name, fact in facts.items() if fact is not None}

    def _overrides(self, trial: Any, baseline: str | None) -> Mapping[str, Any]:
        overrides = self.study.overrides(trial, baseline)
        if isinstance(overrides, Mapping):
            return overrides
        raise ConfigError(f"The function `space` must return a table of keys and values, but got {overrides!r}.")

    # Trials.

    @property
    def running(self) -> list[TrialRow]:
        """Rows of trials that go on now."""
        return [row for row in self.rows if row.status == "running"]

    def next(self) -> tuple[TrialRow, RunConfig] | None:
        """Return the row of the next trial and its configuration; None where the budget is spent or the space exhausted."""
        for _ in range(MOST_REPEATS):
            waiting = self.optuna.get_trials(deepcopy=False, states=(TrialState.WAITING,))
            begun = any(self.rows.get(trial.number) is not None for trial in waiting)
            spent = self.rows.distinct >= self.study.budget
            if (spent and not begun) or (self.study.sampler == "grid" and not waiting):
                return None
            number = waiting[0].number if waiting else len(self.optuna.get_trials(deepcopy=False))
            self.optuna.sampler = make_sampler(self.study, number)
            trial = self.optuna.ask()
            baseline = trial.user_attrs.get("baseline")
            row = self.rows.get(trial.number) or TrialRow(trial.number, list(self.study.seeds), name=baseline)
            row.started_at = row.started_at or datetime.now(UTC)
            try:
                overrides = self._overrides(trial, baseline)
                row.params = dict(trial.params)
                config = self.study.config(overrides)
            except ConfigError as error:
                row.params = dict(trial.params)
                self.end(row, Outcome("failed", 0.0, str(error), {}))
                continue
            row.notation, row.status = self.study.notation(config), "running"
            same = next((one for one in self.rows if one.notation == row.notation and one.same_as is None), None)
            if same is None or same.trial == row.trial:
                return row, config
            self._share(row, same)
        return None

    def _share(self, row: TrialRow, same: TrialRow) -> None:
        """Give a row the results of the trial of the same configuration, now or when it has some."""
        row.same_as, row.runs, row.engine = same.trial, same.runs, same.engine
        if same.ended:
            self.end(row, Outcome(same.status, 0.0, same.error, same.figures))
        else:
            row.status = "waiting"
            self._put(row)

    def begin(self, row: TrialRow, runs: list[str]) -> None:
        """Record that a trial has begun."""
        row.status, row.runs = "running", runs
        self._put(row)

    def end(self, row: TrialRow, outcome: Outcome) -> None:
        """Record the outcome of a trial, and of the trials that wait for it; then tell the study."""
        row.status, row.error, row.figures = outcome.status, outcome.error, dict(outcome.figures)
        row.settled = False if priced(self.study.objectives) and row.figures else None
        row.seconds = outcome.seconds
        row.constraints = self._constraints(row)
        self._put(row)
        self._tell(row)
        for other in self.rows:
            if other.same_as == row.trial and other.status == "waiting":
                self.end(other, outcome._replace(seconds=0.0))

    def settle(self, results: Results) -> None:
        """Price all finished trials again, with the compute of all runs; figures on the way used the runs that had ended by then.

        Optuna keeps the figures by which it chose; the rows get the final ones.
        """
        from raysim.analysis import AnalysisError, dense_partners

        if not priced(self.study.objectives):
            return
        partners = dense_partners(results)
        for row in self.rows:
            if row.status != "finished" or row.same_as is not None:
                continue
            try:
                runs = [Run(results.path(run)) for run in row.runs]
                found: dict[str, Figure] = {}
                for transport, some in by_transport(self.study.objectives).items():
                    price = partial(results.replay, compute=self.study.compute, transport=transport)
                    replays = [price(run) for run in row.runs]
                    dense = [price(partners[run]) if run in partners else None for run in row.runs]
                    found |= figures(some, runs, replays, dense)
            except (AnalysisError, RecordsError):  # a run that is gone keeps its figures
                continue
            row.figures = {one.name: found[one.name] for one in self.study.objectives}
            row.settled, row.compute = True, replays[0].costs.source
        for row in self.rows:
            if row.same_as is not None and row.status == "finished":
                same = self.rows[row.same_as]
                row.figures, row.settled, row.compute = dict(same.figures), same.settled, same.compute
            row.constraints = self._constraints(row)
        self.rows.write()
        self._on_change()

    def report(self, row: TrialRow, step: int, evaluated: Mapping[str, float]) -> None:
        """Show a value on the way in the dashboard: Optuna keeps them for one objective only."""
        name = self.study.objectives[0].name
        if len(self.study.objectives) == 1 and name in evaluated:
            trial_id = self._frozen(row.trial)._trial_id
            self._storage.set_trial_intermediate_value(trial_id, step, evaluated[name])

    def lacking(self) -> str | None:
        """Return why the study cannot go on: a baseline that its constraints need has no value."""
        for constraint in self.study.constraints:
            for row in self.rows:
                named = row.name is not None and row.name == constraint.of
                if named and row.ended and self._value(row, constraint.objective) is None:
                    reason = row.error or f"it has no {constraint.objective}"
                    return f"The baseline {row.name}, which `constraints` need, is {row.status}: {reason}"
        return None

    def awaits_baseline(self) -> bool:
        """Return whether constraints need a baseline that goes on still."""
        needed = {constraint.of for constraint in self.study.constraints} - {None}
        ended = {row.name for row in self.rows if row.ended}
        begun = {row.name for row in self.rows}
        return bool((needed - ended) & begun)

    def _constraints(self, row: TrialRow) -> dict[str, float]:
        found = {}
        for constraint in self.study.constraints:
            value = self._value(row, constraint.objective)
            reference = None
            if constraint.of is not None:
                baseline = (
                    row if row.name == constraint.of else next((r for r in self.rows if r.name == constraint.of), None)
                )
                reference = None if baseline is None else self._value(baseline, constraint.objective)
                if reference is None:
                    continue
            if value is not None:
                objective = next(one for one in self.study.objectives if one.name == constraint.objective)
                found[constraint.name] = constraint.value(objective, value, reference)
        return found

    @staticmethod
    def _value(row: TrialRow, objective: str) -> float | None:
        return row.figures.get(objective, Figure(None)).value

    def _put(self, row: TrialRow) -> None:
        self.rows.put(row)
        self._on_change()

    def _frozen(self, number: int) -> FrozenTrial:
        return self.optuna.get_trials(deepcopy=False)[number]

    def _state(self, row: TrialRow) -> TrialState:
        """Return the state to tell Optuna: a trial without a value, such as a target not reached, failed for the sampler."""
        state = TOLD.get(row.status, TrialState.FAIL)
        return TrialState.FAIL if state == TrialState.COMPLETE and self._values(row) is None else state

    def _values(self, row: TrialRow) -> list[float] | None:
        values = [self._value(row, objective.name) for objective in self.study.objectives]
        known = [value for value in values if value is not None and math.isfinite(value)]
        return known if len(known) == len(values) else None

    def _tell(self, row: TrialRow) -> None:
        trial = self._frozen(row.trial)
        if trial.state == TrialState.WAITING:  # an earlier session's, told by it to none
            self._storage.set_trial_state_values(trial._trial_id, TrialState.RUNNING)
        for name, value in row.constraints.items():
            self._storage.set_trial_system_attr(trial._trial_id, f"constraints:{name}", value)
        for name, fact in self._facts(row).items():
            self._storage.set_trial_user_attr(trial._trial_id, name, fact)
        state = self._state(row)
        self.optuna.tell(row.trial, self._values(row) if state == TrialState.COMPLETE else None, state=state)
