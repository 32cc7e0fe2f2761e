"""A study's rows and its Optuna study in sqlite agree, whatever happens in between; the rows are the truth."""

import random
from dataclasses import replace
from itertools import count
from typing import Any

import optuna
import pandas as pd
import pytest
from optuna.trial import TrialState
from studies import write_study
from trials import STATES, check_agree

from raysim.sweeps.ledger import Ledger
from raysim.sweeps.objectives import Figure
from raysim.sweeps.study_file import read_study
from raysim.sweeps.trial import TrialOutcome


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens the ledger of a study in a folder of its own, anew each time."""
    ledgers = []

    def open_(**changes):
        study = read_study(write_study(tmp_path, **changes))
        folder = tmp_path / "out"
        folder.mkdir(exist_ok=True)
        ledger = Ledger(study, folder)
        ledger.reconcile()
        ledgers.append(ledger)
        return ledger

    yield open_
    for ledger in ledgers:
        ledger.close()


def finished(accuracy=0.5, step_s=1.0, status="finished", error=None):
    if status != "finished":
        return TrialOutcome(status, 1.0, error, {})
    return TrialOutcome(status, 2.5, None, {"accuracy_on": Figure(accuracy), "step_s@100mbps": Figure(step_s)})


def begin(ledger):
    row, _ = ledger.next()
    ledger.begin(row, [f"trials/{row.trial}-s0"])
    return row


def test_baselines_come_first_and_the_budget_is_kept(opened):
    ledger = opened()
    names = []
    while (found := ledger.next()) is not None:
        row, config = found
        ledger.begin(row, [])
        names.append(row.name)
        ledger.end(row, finished(accuracy=len(names) / 10))
        assert repr(config.forward) == row.notation.split()[0].removeprefix("forward=").replace("dense", "Identity")
    assert names == ["dense", None, None, None]
    assert ledger.rows.distinct == 4
    check_agree(ledger)


def test_unfinished_trials_are_recorded_by_status_and_one_without_a_value_fails(opened):
    distinct: dict[str, Any] = {"space": {"forward": [f"TopK({density})" for density in (0.1, 0.2, 0.3)]}}
    distinct |= {"baselines": [{"name": "dense", "set": {"forward": "Identity"}}]}
    ledger = opened(**distinct, symbols=None, trials=None, sampler="grid")
    statuses = ["diverged", "failed", "pruned"]
    for status in statuses:
        ledger.end(begin(ledger), finished(status=status, error=f"why {status}"))
    outcome = finished()
    outcome.figures["step_s@100mbps"] = Figure(None, None, False)
    ledger.end(begin(ledger), outcome)
    frame = pd.read_parquet(ledger.rows.path)
    assert frame["status"].tolist() == [*statuses, "finished"]
    assert frame["error"].fillna("").tolist() == [*(f"why {status}" for status in statuses), ""]
    assert frame["name"].fillna("").tolist() == ["dense", "", "", ""]
    assert frame["baseline"].tolist() == [True, False, False, False]
    assert frame["objective.step_s@100mbps"].isna().all()
    assert frame["objective.accuracy_on"][3] == 0.5
    *trials, valueless = ledger.optuna.trials
    assert [trial.state for trial in trials] == [STATES.get(status, TrialState.FAIL) for status in statuses]
    assert [trial.user_attrs["error"] for trial in trials] == frame["error"].tolist()[:3]
    assert valueless.state == TrialState.FAIL


def test_the_same_configuration_is_not_trained_twice(opened):
    ledger = opened(
        space={"forward": ["Identity", "TopK(0.5)", "TopK(density=0.5)", "Plain(TopK(0.5))"]},
        symbols=None,
        trials=None,
        sampler="grid",
        sampler_seed=27,  # which leaves the points in their order
    )
    trained = []
    while (found := ledger.next()) is not None:
        trained.append(found[0].notation)
        ledger.begin(found[0], [f"trials/{found[0].trial}-s0"])
        ledger.end(found[0], finished(accuracy=len(trained) / 10))
    assert trained == ["dense", "forward=TopK(0.5)"]
    frame = pd.read_parquet(ledger.rows.path)
    assert frame["same_as"].fillna(-1).tolist() == [-1, 0, -1, 2, 2]
    assert frame["objective.accuracy_on"].tolist() == [0.1, 0.1, 0.2, 0.2, 0.2]
    assert frame["seconds"].tolist() == [2.5, 0, 2.5, 0, 0]
    assert frame["runs"].map(list).tolist() == [["trials/0-s0"]] * 2 + [["trials/2-s0"]] * 3
    check_agree(ledger)


def test_duplicate_of_running_trial_waits(opened):
    ledger = opened(
        space={"forward": ["TopK(0.5)", "TopK(density=0.5)", "Identity"]},
        symbols=None,
        sampler="grid",
        sampler_seed=27,
        trials=None,
        baselines=None,
    )
    first, _ = ledger.next()
    ledger.begin(first, [])
    other, _ = ledger.next()
    assert (other.trial, ledger.rows[1].status, ledger.rows[1].same_as) == (2, "waiting", 0)
    ledger.begin(other, [])
    check_agree(ledger)
    ledger.end(first, finished(status="diverged", error="NaN"))
    assert (ledger.rows[1].status, ledger.rows[1].error) == ("diverged", "NaN")
    ledger.end(other, finished())
    check_agree(ledger)


def test_grid_ends_with_its_last_point(opened):
    same, last = [f"TopK(0.5{'0' * n})" for n in range(27)], "TopK(0.1)"
    grid = {"sampler": "grid", "sampler_seed": 2, "trials": None, "baselines": None}  # the other one is far behind
    ledger = opened(space={"forward": [*same, last]}, symbols=None, **grid)
    while (found := ledger.next()) is not None:
        ledger.begin(found[0], [])
        ledger.end(found[0], finished())
    assert {row.notation for row in ledger.rows} == {"forward=TopK(0.5)", "forward=TopK(0.1)"}
    assert len(ledger.rows) == len(same) + 1


@pytest.mark.slow
def test_exhausted_space_ends_study(opened):
    ledger = opened(space={"forward": ["Identity", "TopK(0.5)"]}, symbols=None, trials=9)
    while (found := ledger.next()) is not None:
        ledger.begin(found[0], [])
        ledger.end(found[0], finished())
    assert ledger.rows.distinct == 2


def test_invalid_points_do_not_exhaust_a_space(opened):
    ledger, drawn = opened(baselines=[], space={"forward": ["Identity", "TopK(0.5)"]}, symbols=None, trials=9), count()
    ledger.study = replace(ledger.study, space=lambda trial: {"steps": 2 if next(drawn) >= 60 else -1})
    assert ledger.next()[0].trial == 60


def test_constraints_are_reported_and_beside_a_baseline(opened):
    ledger = opened(
        constraints=[
            {"objective": "accuracy_on", "within": 0.1, "of": "dense"},
            {"objective": "step_s@100mbps", "at_most": 2.0},
        ],
        space={"forward": "TopK({density})"},
        baselines=[{"name": "dense", "set": {"forward": "Identity"}}],
    )
    begun = begin(ledger)
    assert ledger.awaits_baseline()
    ledger.end(begun, finished(accuracy=0.8))
    assert not ledger.awaits_baseline()
    for accuracy, step_s in ((0.71, 1.0), (0.69, 1.0), (0.9, 2.5)):
        ledger.end(begin(ledger), finished(accuracy, step_s))
    frame = pd.read_parquet(ledger.rows.path)
    assert frame["feasible"].tolist() == [True, True, False, False]
    assert frame["constraint.accuracy_on within 0.1 of dense"].round(9).tolist() == [-0.1, -0.01, 0.01, -0.2]
    assert frame["constraint.step_s@100mbps <= 2"].tolist() == [-1.0, -1.0, -1.0, 0.5]
    assert sorted(trial.number for trial in ledger.optuna.best_trials) == [0]  # of 0 and 1, equal in seconds
    assert ledger.optuna.trials[2].constraints == pytest.approx(
        {"accuracy_on within 0.1 of dense": 0.01, "step_s@100mbps <= 2": -1.0}
    )


def test_a_baseline_without_a_value_ends_the_study_where_constraints_need_it(opened):
    ledger = opened(constraints=[{"objective": "accuracy_on", "within": 0.1, "of": "dense"}])
    ledger.end(begin(ledger), finished(status="diverged", error="NaN in the loss"))
    assert ledger.missing_baseline() == "The baseline dense, which `constraints` need, is diverged: NaN in the loss"


def test_interrupted_trials_resume_under_their_numbers(opened):
    ledger = opened()
    ledger.end(begin(ledger), finished())
    cut = [begin(ledger), begin(ledger)]
    texts = [(row.trial, row.notation, row.params) for row in cut]
    ledger.close()
    assert not ledger.optuna.get_trials(states=(TrialState.RUNNING,))
    again = opened()
    check_agree(again)
    found = [again.next()[0] for _ in range(2)]
    assert [(row.trial, row.notation, row.params) for row in found] == texts
    for row in found:
        again.begin(row, [])
        again.end(row, finished())
    check_agree(again)
    again.end(begin(again), finished())
    assert again.next() is None


@pytest.mark.parametrize(
    ("trials", "changes"),
    [
        pytest.param(13, {}, marks=pytest.mark.slow),  # TPE begins after ten
        pytest.param(6, {"sampler": "random"}, marks=pytest.mark.slow),
        (8, {"sampler": "nsga2", "population": 3}),
    ],
    ids=["tpe", "random", "nsga2"],
)
def test_a_resumed_study_draws_what_an_undisturbed_one_would(opened, tmp_path, trials, changes):
    """Also of samplers that keep more than parameters and values, such as the generations of NSGA-II."""
    density = {"low": 0.05, "high": 0.5}
    two = {"space": {key: f"TopK({{{key}}})" for key in ("forward", "backward")}, "baselines": None}  # for a crossover
    changes |= {**two, "symbols": {"forward": density, "backward": density}}

    def drawn(stops):
        ledger = opened(trials=trials, **changes)
        while (found := ledger.next()) is not None:
            row = found[0]
            ledger.begin(row, [])
            if row.trial in stops:
                stops.remove(row.trial)
                ledger.close()
                ledger = opened(trials=trials, **changes)
                continue
            ledger.end(row, finished(accuracy=0.1 + row.trial * 7 % 10 / 20, step_s=1 + row.trial * 3 % 7))
        return [row.notation for row in ledger.rows]

    broken = drawn([3, trials - 3])
    (tmp_path / "out").rename(tmp_path / "first")
    assert drawn([]) == broken


class KilledError(Exception):
    pass


@pytest.mark.parametrize(
    "sampler", ["tpe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grid", "random", "nsga2"))]
)
def test_killed_at_any_moment_no_trial_is_lost_or_counted_twice(opened, tmp_path, monkeypatch, sampler):
    """At any write of rows or of sqlite; and with sqlite lost or damaged."""
    chance = random.Random(sampler)
    changes = {"sampler": sampler, "trials": 6}
    if sampler == "grid":
        changes |= {"symbols": {"density": [0.5, 0.3, 0.1]}, "trials": None}
    budget, ended = 7 if sampler == "grid" else 6, []
    left = [0]

    def deadly(real):
        def method(*arguments, **options):
            left[0] -= 1
            if left[0] == 0:
                raise KilledError
            result = real(*arguments, **options)
            left[0] -= 1
            if left[0] == 0:
                raise KilledError
            return result

        return method

    from raysim.sweeps.trial_rows import Rows

    monkeypatch.setattr(Rows, "write", deadly(Rows.write))
    for name in ("set_trial_state_values", "create_new_trial", "set_trial_param", "set_trial_user_attr"):
        monkeypatch.setattr(optuna.storages.RDBStorage, name, deadly(getattr(optuna.storages.RDBStorage, name)))
    for attempt in range(13):
        left[0] = chance.randrange(1, 40) if attempt < 12 else 10**9
        if attempt % 3 == 1:
            (tmp_path / "out" / "optuna.db").unlink(missing_ok=True)
        elif attempt % 3 == 2:
            (tmp_path / "out" / "optuna.db").write_bytes(b"no database" * 1000)
        try:
            ledger = opened(**changes)
            while (found := ledger.next()) is not None:
                row = found[0]
                ledger.begin(row, [f"trials/{row.trial}-s0"])
                ledger.end(row, finished(accuracy=row.trial / 100))
            break
        except KilledError:
            ended += [0]
    left[0] = 10**9
    check_agree(ledger)
    rows = list(ledger.rows)
    assert all(row.ended for row in rows)
    fresh = [row.notation for row in rows if row.same_as is None]
    assert len(set(fresh)) == len(fresh) == (budget if sampler != "grid" else 7)
    assert [row.figures["accuracy_on"].value for row in rows if row.same_as is None] == [
        row.trial / 100 for row in rows if row.same_as is None
    ]
    assert len(ended) >= 1
