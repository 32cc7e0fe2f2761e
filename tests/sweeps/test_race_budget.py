"""The budget of a race: its forms, plans that are made again as it goes, and what it leaves open."""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from races import DENSE, HARM, RUN_S, budget_race, made_rounds, made_run, play

from raysim.analysis.comparison import race_plan
from raysim.analysis.comparison.race import Evidence
from raysim.analysis.comparison.rule import looks_after, sample
from raysim.config import ConfigError
from raysim.sweeps.budget import Budget, Spending
from raysim.sweeps.race_budget import RaceBudget


@pytest.mark.parametrize(
    ("given", "price", "sentence"),
    [
        ("soon", None, "`budget` must be a time such as 90min"),
        ("0h", None, "`budget` must be a time"),
        ("3 fortnights", None, "`budget` must be a time"),
        ("2 GPU", None, "`budget` must be a time"),
        ("40 EUR", None, "add `--price-per-hour`"),
        ("3h", 2.0, "`price_per_hour` is for a `budget` in money"),
    ],
)
def test_a_budget_that_cannot_be_is_one_sentence(given, price, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Budget.parse(given, price)


def test_gpu_hours_count_the_gpus_of_all_runs():
    spending = Spending(Budget.parse("2 GPU hours"), jobs=4, gpus=2.0)
    assert spending.total_s == 3600
    assert spending.remaining_s(600.0) == 3000
    with pytest.raises(ConfigError, match="needs GPUs"):
        Spending(Budget.parse("2 GPU hours"), jobs=4, gpus=0.0)


@pytest.mark.parametrize(
    ("third", "family", "harm", "end"),
    [
        (1.015, 4, "+0.53", "not even 21 would be likely to decide."),
        (1.008, 4, "+0.3", "13 would decide in four of five cases, for 20 min more."),
        (1.008, 40, "+0.3", "21 would decide in four of five cases, for 36 min more."),
    ],
)
def test_what_all_seeds_left_undecided_is_named_with_the_seeds_that_would_decide(tmp_path, third, family, harm, end):
    """Two seeds of trial 1 look harmless and the third does not. No trial is left out of the counts."""

    def run_of(trial, seed):
        run = made_run(trial, seed)
        seconds = {"seconds": 60.0}
        if trial == 1:
            seconds["final_loss_on"] = made_run(DENSE, seed).row["final_loss_on"] * {3: 1.0, 4: 1.001, 5: third}[seed]
        return SimpleNamespace(steps=run.steps, evals=run.evals, row=run.row | seconds)

    rounds = play(made_rounds(tmp_path, run_of))
    rounds.race = replace(rounds.race, family=family)
    lines = RaceBudget(
        rounds,
        Spending(Budget.parse("1h"), jobs=1, gpus=0),
        spread=0.3,
        notations=dict.fromkeys(range(5), "TopK(0.1)"),
        say=print,
        on_plan=print,
    ).summary()
    assert len(rounds.left) + len(rounds.safe) + len(rounds.undecided) + len(rounds.running) == len(HARM)
    assert len(lines) == 1 + len(rounds.running) + len(rounds.undecided)
    assert rounds.undecided == [1]
    assert lines[0] == f"Undecided: trial 1, TopK(0.1): harm {harm} % of loss on 3 seeds; {end}"
    assert "Undecided on all seeds: 1 setting. Open: 0 settings." in lines[-1]


def test_settings_that_wait_beside_a_dense_model_near_chance_would_not_be_decided_by_more(tmp_path, few_simulations):
    lines = {}
    for at_chance in (False, True):
        (folder := tmp_path / str(at_chance)).mkdir()
        rounds, _ = budget_race(folder, 6, {1: 0.0, 2: 0.0})
        rounds.waiting = {2}
        rounds.race = replace(rounds.race, at_chance=at_chance)
        lines[at_chance] = rounds.budget.summary()
    assert any(line.startswith("Open: trial 2, T2, not begun: its") for line in lines[False])
    assert "add `--resume" in lines[False][-1]
    (line,) = lines[True]
    assert line.endswith("Decided: 2 left because dense is near chance. Open: 0 settings.")


def test_a_budget_to_go_on_has_the_time_before_the_race(tmp_path, few_simulations):
    """Prices and a screen of a decision take of the same budget."""
    rounds, _ = budget_race(tmp_path, 6, {1: 0.0, 2: 0.0})
    rounds.budget.spending = Spending(Budget.parse("1h"), jobs=1, gpus=0)
    alone, after = (
        int(rounds.budget.summary(before_s)[-1].partition("--budget ")[2].partition("min")[0])
        for before_s in (0.0, 600.0)
    )
    assert after == alone + 10


@pytest.mark.parametrize("gpus", [1.0, 3.0, 700.0])
def test_the_gpu_hours_to_go_on_are_enough(tmp_path, few_simulations, gpus):
    rounds, _ = budget_race(tmp_path, 0.3, {1: 0.0, 2: 0.0})
    rounds.budget.spending = Spending(Budget.parse("1 GPU hours"), jobs=1, gpus=gpus)
    said = rounds.budget.summary()[-1].partition("--budget '")[2].partition("'")[0]
    left_s = Spending(Budget.parse(said), jobs=1, gpus=gpus).remaining_s(rounds.budget.trained_s)
    assert left_s >= max(map(rounds.budget.finish_s, rounds.running)) > 0


def plans_of(rounds):
    """Return the numbers of seeds of the plans in a race's file, in order."""
    frame = pd.read_parquet(rounds.file)
    return frame.loc[frame["decision"] == "plan", "seeds"].map(len).tolist()


def test_a_plan_has_fewer_seeds_once_settings_are_seen_to_cost_more_than_dense(tmp_path, few_simulations):
    harms = {1: 0.0, 2: 0.006, 3: 0.02, 4: 1.0}
    rounds, lines = budget_race(tmp_path, 2, harms, costs=dict.fromkeys(harms, 3.0))
    play(rounds)
    first, *_, last = plans_of(rounds)
    assert last < first
    assert any("by harm and cost so far" in line for line in lines)
    assert rounds.safe == [1]  # with the first plan there was no time for a verdict


def test_a_trial_that_its_planned_seeds_would_not_decide_returns_for_a_later_look(tmp_path, few_simulations):
    rounds, _ = budget_race(tmp_path, 8, {1: 0.002}, spread=0.009, usual=0.1)
    left = []
    while rounds.next_round():
        left += [reason.kind for reason in rounds.end_round([]).values()]
    assert left[0] == "hopeless"
    assert list(rounds.further) == [1]
    assert len(rounds.harms(1)) > rounds.race.plan
    again, _ = budget_race(tmp_path, 8, {1: 0.002}, spread=0.009, usual=0.1)
    assert (again.left, again.further, again.safe) == (rounds.left, rounds.further, rounds.safe)


def test_a_trial_with_more_seeds_than_a_shortened_plan_goes_to_no_look_below_them(tmp_path, few_simulations):
    rounds, _ = budget_race(tmp_path, 8, {1: 0.002, 2: 0.002}, spread=0.009, usual=0.1)
    rounds.next_round()
    rounds.end_round([])
    rounds.plan_seeds(3)
    harms = (0.1, 1.8, -0.4, 0.3, 1.6, 0.2, -0.9, 0.4)
    rounds.evidence = {trial: Evidence(float(trial), final=harms) for trial in (1, 2)}
    assert rounds.undecided == [1, 2]
    rounds.next_round()
    assert list(rounds.further) == [1]
    assert rounds.further[1] >= 8


def at_a_plan_of_five(folder, harms):
    """Return a race of five planned seeds in which trials have these final harms, by trial, the slower ones later."""
    rounds, lines = budget_race(folder, 8, dict.fromkeys(harms, 0.002), spread=0.009, usual=0.1)
    rounds.next_round()
    rounds.end_round([])
    rounds.plan_seeds(5)
    rounds.evidence = {trial: Evidence(float(trial), final=final) for trial, final in harms.items()}
    return rounds, lines


UNSURE = (0.1, 1.0, -0.4, 0.9, -0.2)


def test_the_fastest_undecided_trial_goes_further_alone_and_once(tmp_path, few_simulations):
    rounds, _ = at_a_plan_of_five(tmp_path, {1: UNSURE, 2: UNSURE})
    assert {task.trial for task in rounds.next_round()} >= {1}
    assert list(rounds.further) == [1]
    assert rounds.race.planned == 5
    assert rounds.race.share == looks_after(5)[rounds.further[1]]


def test_no_trial_slower_than_a_safe_one_goes_further(tmp_path, few_simulations):
    rounds, _ = at_a_plan_of_five(tmp_path, {1: (0.0, 0.1, 0.0, 0.1, 0.0), 2: UNSURE})
    assert (rounds.safe, rounds.undecided) == ([1], [2])
    assert rounds.next_round() == []
    assert rounds.further == {}


def test_a_trial_that_no_look_is_likely_to_call_safe_goes_no_further(tmp_path, few_simulations):
    rounds, _ = at_a_plan_of_five(tmp_path, {1: (1.3, 0.9, 1.2, 0.8, 1.1)})
    assert rounds.undecided == [1]
    assert rounds.next_round() == []


def test_a_look_that_the_budget_cannot_pay_is_not_begun(tmp_path, few_simulations, monkeypatch):
    rounds, _ = at_a_plan_of_five(tmp_path, {1: UNSURE})
    eight_s = rounds.budget.finish_s(1, 8)
    monkeypatch.setattr(RaceBudget, "left_s", eight_s - 1)
    assert rounds.next_round() == []
    monkeypatch.setattr(RaceBudget, "left_s", eight_s + 1)
    assert rounds.next_round() != []
    assert rounds.further == {1: 8}


def test_no_more_seeds_are_asked_for_than_the_study_has(tmp_path, few_simulations):
    rounds, _ = at_a_plan_of_five(tmp_path, {1: UNSURE})
    rounds.all_seeds = rounds.all_seeds[:7]  # the next look needs 8
    assert rounds.next_round() == []


def test_a_shortened_plan_is_judged_as_a_plan_after_a_trial_went_further(tmp_path, few_simulations):
    rounds, _ = at_a_plan_of_five(tmp_path, {1: UNSURE, 2: UNSURE})
    rounds.go_further(1, 8)
    assert (rounds.is_complete(1), rounds.is_complete(2)) == (False, True)
    assert rounds.undecided == [2]
    rounds.plan_seeds(3)
    assert (rounds.race.plan, rounds.race.seeds, rounds.race.share) == (3, 3, 0.5)


def test_a_plan_is_shortened_as_little_as_the_budget_asks_and_never_after_a_verdict_on_it(tmp_path, few_simulations):
    rounds, _ = at_a_plan_of_five(tmp_path, {1: UNSURE[:2], 2: UNSURE[:2]})
    budget = rounds.budget
    rounds.plan_seeds(8)
    assert budget._shorter(1, budget.finish_s(1, 6)) == 6
    assert budget._shorter(1, budget.finish_s(1, 3)) == 3
    assert budget._shorter(1, budget.finish_s(1, 3) - 1) == 0
    rounds.evidence[1] = Evidence(1.0, final=UNSURE[:4])
    assert budget._shorter(1, budget.finish_s(1, 3)) == 0  # below the seeds that it has
    rounds.evidence[2] = Evidence(2.0, final=(*UNSURE, 0.3, 0.1, 0.2))
    assert budget._shorter(1, budget.finish_s(1, 6)) == 0


MANY = dict.fromkeys(range(1, 9), 0.0)
LATE = {1: 1.0, 2: 1.0, 3: 1.0, 4: 0.0, 5: 0.0}


def waits_of(rounds):
    """Return the trials in a race's file that were told to wait, and those with a part."""
    frame = pd.read_parquet(rounds.file)
    return [set(frame.loc[frame["decision"] == decision, "trial"]) for decision in ("waits", "train")]


def test_small_budget_races_first_settings_of_study_to_verdict(tmp_path, few_simulations):
    """Eight settings on 3 seeds take more than ten runs; eight runs are paid, of which dense takes three."""
    rounds, lines = budget_race(tmp_path, 0.8, MANY)
    play(rounds)
    waiting, begun = waits_of(rounds)
    assert waiting == set(range(len(MANY) - len(waiting) + 1, 9))
    assert f"{8 - len(waiting)} of 8 settings and dense race on 3 seeds" in lines[0]
    assert rounds.safe
    assert {DENSE, *rounds.safe} <= begun
    assert set(rounds.waiting) == set(MANY) - begun
    assert sum("not begun" in line for line in rounds.budget.summary()) == len(rounds.waiting)
    assert f"Open: {len(rounds.running)} settings" in rounds.budget.summary()[-1]
    assert set(rounds.waiting) <= set(rounds.running)


def shortened(rounds, lines):
    """The plan that the leading setting cannot end has fewer seeds before a verdict."""
    assert plans_of(rounds) == [5, 3]
    assert lines[-1] == (
        "Planned again after 18 min: 3 seeds in place of 5, since 5 of trial 1, T1, would take 90 min more, and 60 min are left."
    )
    assert rounds.safe == [1]
    assert rounds.budget.trained_s <= 1.3 * 3600


def further(rounds, lines):
    """The remaining budget takes the undecided setting to its next look."""
    (trial, count), *_ = rounds.further.items()
    assert count in looks_after(rounds.race.plan)
    assert len(rounds.harms(trial)) == count
    assert f"trial {trial}, T{trial}, undecided on {rounds.race.plan} seeds, goes on to {count}" in lines[-1]
    judged = sample(dict(enumerate(rounds.harms(trial))), plan=range(rounds.race.plan), grown=True)
    assert judged.share == looks_after(rounds.race.plan)[count]


def entered(rounds, lines):
    """Waiting settings enter once the first ones, so harmful that they leave at once, have left time."""
    waiting, begun = waits_of(rounds)
    assert waiting == {3, 4, 5}
    assert {3, 4} <= begun
    assert any("waiting settings on 3 seeds, in the" in line for line in lines)
    assert set(rounds.safe) & {4, 5}


@pytest.mark.parametrize("each", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("happened", "hours", "terms", "count"),
    [
        (shortened, 1.3, {"harms": {1: 0.0, 2: 0.0}, "costs": {1: 2.5, 2: 2.5}}, 5),
        (further, 6, {"harms": {1: 0.0}, "spread": 0.009, "usual": 0.1}, 20),
        (entered, 0.8, {"harms": LATE}, 5),
    ],
)
def test_race_within_a_budget_killed_anywhere_resumes_to_same_decisions(
    tmp_path, happened, hours, terms, count, each, monkeypatch
):
    monkeypatch.setattr(race_plan, "COUNT", count)
    copies = []
    race, lines = budget_race(tmp_path, hours, **terms)
    happened(play(race, copies), lines)
    whole = pq.read_table(race.file).drop(["elapsed_s"])
    for i, copy in enumerate([*copies[::each], copies[-1]]):
        folder = tmp_path / str(i)
        folder.mkdir()
        pq.write_table(copy, folder / "race.parquet")
        resumed = play(budget_race(folder, hours, **terms)[0])
        assert pq.read_table(resumed.file).drop(["elapsed_s"]).equals(whole)
        assert (resumed.race, resumed.further, resumed.safe) == (race.race, race.further, race.safe)


def test_the_seconds_of_parts_and_of_what_is_left_add_up_to_those_of_all_runs(tmp_path, few_simulations):
    """Each part starts anew: a run in five parts takes five starts."""
    rounds, _ = budget_race(tmp_path, 3, {1: 0.0}, costs={1: 2.0}, start=20.0, seeds=3)
    budget = rounds.budget
    assert budget.run_s(DENSE) == pytest.approx(RUN_S + 20.0)
    left, before = math.inf, budget.trained_s
    while rounds.next_round():
        rounds.end_round([])
        assert left >= budget.trained_s - before - 1e-6
        left, before = budget.finish_s(1), budget.trained_s
    seconds = sum(rounds.run_of(trial, seed).row["seconds"] for trial in (DENSE, 1) for seed in range(3))
    assert budget.trained_s == pytest.approx(seconds)
    assert budget.finish_s(1) == 0


@settings(max_examples=2)
@given(
    hours=st.floats(0.5, 8),
    costs=st.lists(st.floats(0.3, 5), min_size=8, max_size=8),
    harms=st.lists(st.sampled_from([0.0, 0.005, 0.01, 0.1]), min_size=3, max_size=8),
    spread=st.sampled_from([0.001, 0.01]),
)
def test_no_plan_spends_more_than_the_budget_and_a_first_part(tmp_path_factory, hours, costs, harms, spread):
    """What a run costs is known after its first part alone."""
    folder = tmp_path_factory.mktemp("race")
    by_trial = dict(enumerate(costs, start=1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(race_plan, "COUNT", 3)
        rounds, _ = budget_race(folder, hours, dict(enumerate(harms, start=1)), spread=spread, costs=by_trial)
        play(rounds)
    first_parts_s = 2 * 0.1 * RUN_S * sum(costs)
    assert rounds.budget.trained_s <= max(hours * 3600, first_parts_s + 2.1 * RUN_S) + 1e-6
    assert all(len(rounds.harms(trial)) >= 3 for trial in rounds.safe)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_plans_that_are_made_again_call_few_settings_at_the_margin_safe(tmp_path_factory, monkeypatch):
    """200 races of one or three settings whose harm is the margin: none leaves early, whatever it shows."""
    monkeypatch.setattr(race_plan, "COUNT", 5)
    false, changed, count = 0, 0, 200
    for number in range(count):
        rng = np.random.default_rng(number)
        trials = [1 + 10 * number + i for i in range(rng.choice([1, 3]))]
        costs = {trial: float(np.exp(rng.normal(0.3, 0.6))) for trial in trials}
        hours, spread = float(np.exp(rng.uniform(0, 2))), float(rng.choice([0.002, 0.004, 0.008]))
        harms = dict.fromkeys(trials, 0.01)
        rounds, _ = budget_race(
            tmp_path_factory.mktemp("race"), hours, harms, spread=spread, usual=0.4, costs=costs, stay=True
        )
        play(rounds)
        false += bool(rounds.safe)
        changed += len(plans_of(rounds)) > 1 or bool(rounds.further)
    assert changed > count / 4
    assert false <= 0.05 * count + 2 * np.sqrt(0.05 * 0.95 * count)
