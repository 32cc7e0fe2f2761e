"""Races in a sweep: rounds that resume to the same decisions, and real ones that leave the bits of whole runs."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from ray.tune.search import Searcher
from studies import BASE, write_study

from raysim.analysis.comparison.race import RUNGS, Race
from raysim.config import ConfigError
from raysim.quality import MEASURES
from raysim.records import Run
from raysim.sweeps.budget import Budget, Spending
from raysim.sweeps.budget_lines import spent_lines
from raysim.sweeps.ledger import Ledger
from raysim.sweeps.race_rounds import RaceRounds
from raysim.sweeps.race_search import RaceSearch
from raysim.sweeps.runner import Sweep
from raysim.sweeps.store import Store
from raysim.sweeps.study_file import read_study
from raysim.sweeps.trial import SweepTrial, TrialSpec
from raysim.training.train import train

STEPS, SEEDS, DENSE = 100, [3, 4, 5], 0
HARM = {1: 0.0, 2: 0.002, 3: 0.02, 4: 1.0}  # of the loss, by trial


@cache
def made_run(trial, seed):
    """Return what a race reads of a run to its end: losses that fall, above dense's by the trial's harm."""
    noise = np.random.default_rng(seed).normal(0, 0.01, STEPS)
    own = np.random.default_rng([trial, seed]).normal(0, 0.0005, STEPS)
    losses = (1 + HARM.get(trial, 0.0)) * (0.5 + 2 * np.exp(-np.arange(STEPS) / 30) + noise + own)
    evals = pd.DataFrame({"mode": [], "batchnorm": [], "step": [], "loss": []})
    row = {"final_loss_on": float(losses[-20:].mean()), "chance_loss": 2.5}
    return SimpleNamespace(steps=pd.DataFrame({"step": range(STEPS), "loss": losses}), evals=evals, row=row)


def made_rounds(folder, run_of=made_run):
    return RaceRounds(
        folder / "race.parquet",
        race=Race(len(SEEDS), MEASURES["loss"].margin, len(HARM)),
        seeds=SEEDS,
        dense=DENSE,
        entrants=list(HARM),
        measure=MEASURES["loss"],
        run_of=run_of,
        cost_of=lambda trials: {trial: float(trial) for trial in trials},
    )


def play(rounds, copies=None):
    """Play a race to its end; keep a copy of its file before and after every round."""
    while rounds.next_round():
        copies is None or copies.append(pq.read_table(rounds.file))
        rounds.end_round([])
        copies is None or copies.append(pq.read_table(rounds.file))
    return rounds


def test_a_race_separates_the_harmful_from_the_harmless(tmp_path):
    rounds = play(made_rounds(tmp_path))
    assert rounds.left[4].kind == "harmful"
    assert 1 not in rounds.left
    assert rounds.running == []
    frame = pd.read_parquet(rounds.file)
    assert frame["ended"].all()
    dense = frame[(frame["trial"] == DENSE) & (frame["decision"] == "train")]
    assert sorted(seed for seeds in dense["seeds"] for seed in seeds) == SEEDS
    assert (dense["share"] == 1).all()


@pytest.mark.parametrize(
    ("third", "harm", "end"),
    [
        (1.015, "+0.53", "not even 21 would be likely to decide."),
        (1.008, "+0.3", "13 would decide in four of five cases, for 20 min more."),
    ],
)
def test_what_all_seeds_left_undecided_is_named_with_the_seeds_that_would_decide(tmp_path, third, harm, end):
    """Two seeds of trial 1 look harmless and the third does not. No trial is left out of the counts."""

    def run_of(trial, seed):
        run = made_run(trial, seed)
        seconds = {"seconds": 60.0}
        if trial == 1:
            seconds["final_loss_on"] = made_run(DENSE, seed).row["final_loss_on"] * {3: 1.0, 4: 1.001, 5: third}[seed]
        return SimpleNamespace(steps=run.steps, evals=run.evals, row=run.row | seconds)

    rounds = play(made_rounds(tmp_path, run_of))
    spending = Spending(Budget.parse("1h"), jobs=1, gpus=0)
    lines = spent_lines(spending, rounds, dict.fromkeys(range(5), "TopK(0.1)"))
    assert len(rounds.left) + len(rounds.safe) + len(rounds.undecided) + len(rounds.running) == len(HARM)
    assert len(lines) == 1 + len(rounds.running) + len(rounds.undecided)
    assert rounds.undecided == [1]
    assert lines[1] == f"Undecided: trial 1, TopK(0.1): harm {harm} % of loss on 3 seeds; {end}"
    assert "Undecided on all seeds: 1 setting. Open: 0 settings." in lines[0]


def test_a_race_that_is_killed_anywhere_goes_on_to_the_same_decisions(tmp_path):
    copies = []
    whole = pq.read_table(play(made_rounds(tmp_path), copies).file)
    for i, copy in enumerate(copies):
        folder = tmp_path / str(i)
        folder.mkdir()
        pq.write_table(copy, folder / "race.parquet")
        assert pq.read_table(play(made_rounds(folder)).file).equals(whole)


def test_decisions_know_no_more_than_the_steps_of_their_part(tmp_path):
    """Whole runs and runs cut at the end of each part give the same race."""
    reached = {}

    def cut_run(trial, seed):
        run = made_run(trial, seed)
        share = reached.get((trial, seed), 1.0)
        return SimpleNamespace(steps=run.steps[: round(share * STEPS)], evals=run.evals, row=run.row)

    rounds = made_rounds(tmp_path, cut_run)
    while tasks := rounds.next_round():
        reached |= {(task.trial, task.seed): RUNGS[task.rung] for task in tasks}
        rounds.end_round([])
    (tmp_path / "whole").mkdir()
    assert pq.read_table(rounds.file).equals(pq.read_table(play(made_rounds(tmp_path / "whole")).file))


def test_a_trial_that_fails_is_out_and_the_others_go_on(tmp_path):
    rounds = made_rounds(tmp_path)
    rounds.next_round()
    rounds.end_round([1])
    assert 1 not in rounds.running
    assert made_rounds(tmp_path).failed == {1}
    assert all(task.trial != 1 for task in rounds.next_round())


STUDY = {
    "objectives": ["loss_on", "wire_bytes"],
    "sampler": None,
    "race": True,
    "seeds": [0, 1, 2],
    "trials": 4,
}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"seeds": [0, 1]}, "`race` needs at least 3 seeds, but got 2"),
        ({"race": {"first": 5}}, "`race` needs at least 5 seeds, but got 3"),
        ({"race": {"first": 1}}, "`race.first`"),
        ({"race": "yes"}, "`race`"),
        ({"baselines": []}, "`race` needs a baseline without compression"),
        ({"objectives": ["wire_bytes"]}, "`race` needs accuracy_on, loss_on or another quality"),
        ({"sampler": "tpe"}, "`sampler` must be grid or random, but got 'tpe'"),
        ({"early_stopping": "asha"}, "`race` stops trials itself"),
        (
            {
                "space": {"forward": ["Identity", "TopK(0.1)"], "optimizer.learning_rate": [0.1, 0.2]},
                "baselines": [{"name": "dense", "set": {"forward": "Identity", "optimizer.learning_rate": 0.1}}],
                "symbols": None,
            },
            "`optimizer.learning_rate` must be the same in all trials",
        ),
    ],
)
def test_a_race_that_cannot_be_is_refused(tmp_path, changes, sentence):
    with pytest.raises(ConfigError) as refused:
        read_study(write_study(tmp_path, **(STUDY | changes)))
    assert sentence in str(refused.value)


def test_a_race_is_part_of_the_study_and_asks_for_no_asha(tmp_path):
    study = read_study(write_study(tmp_path, **STUDY))
    assert (study.sampler, study.early_stopping) == ("random", "none")
    study.write(tmp_path)
    assert read_study(tmp_path / "study.toml").race == study.race
    assert read_study(write_study(tmp_path, **(STUDY | {"race": None})), race=True).race == study.race


class Part:
    """A part of Tune's, trained in this process."""

    def __init__(self, suggestion):
        self._trial = object.__new__(SweepTrial)
        self._trial._warm, self._trial._data = None, {}
        self._trial._begin(suggestion["trial"])

    def run(self):
        while not (result := self._trial.step()).get("done"):
            pass
        return result


def search_of(path, out, **changes):
    """Return the search of a race in a folder, without Tune; `lines` are what it says."""
    study = replace(read_study(path), **changes).with_seeds_of(out)
    out.mkdir(exist_ok=True)
    ledger, lines = Ledger(study, out), []
    ledger.reconcile()

    def planned(study):
        ledger.study = study
        study.write(out)

    def spec(row, config):
        row.engine = "inline"
        seeds, bundles = tuple(row.seeds), [{"CPU": 1.0}]
        return TrialSpec(row.trial, config, seeds, str(out), study.objectives, "inline", "auto", bundles)

    options: dict[str, Any] = {"gpus": 0.0, "on_plan": planned, "say": lines.append}
    return RaceSearch(ledger, lambda running: 2, spec, Store(out), **options), lines


def train_all(search, most=1000):
    """Train the parts of a race, two at a time and the last one first; stop after `most` of them, as if killed."""
    for i in range(most):
        begun = {}
        for name in (f"{i}-a", f"{i}-b"):
            suggestion = search.suggest(name)
            if suggestion == Searcher.FINISHED:
                break
            if suggestion is not None:
                begun[name] = Part(suggestion)
        if not begun:
            break
        for name, part in reversed(begun.items()):
            search.on_trial_complete(name, part.run())
    search.ledger.close()


def race_study(folder, **changes):
    base = BASE | {"steps": 20, "evaluate_every_steps": 0}
    space = {"forward": ["Quantize(8)", "TopK(0.01)"]}
    dense = {"name": "dense", "set": {"forward": "Identity", "backward": "Identity"}}
    options = {
        "base": base,
        "sampler": "grid",
        "trials": None,
        "engine": "inline",
        "space": space,
        "symbols": None,
        "baselines": [dense],
    }
    return write_study(folder, **(STUDY | options | changes))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The search and the folder of a race that was not disturbed."""
    folder = tmp_path_factory.mktemp("race")
    search, _ = search_of(race_study(folder), folder / "out")
    train_all(search)
    return search, folder


def test_parts_of_a_race_in_tune_end_in_rows(whole):
    search, folder = whole
    rows = {row.trial: row for row in search.ledger.rows}
    assert (rows[0].name, rows[0].status) == ("dense", "finished")
    assert rows[0].figures.keys() == {"loss_on", "wire_bytes"}
    assert {row.status for row in rows.values()} <= {"finished", "pruned"}
    assert all("of 20 steps on 2 seeds" in row.error for row in rows.values() if row.status == "pruned")
    for row in rows.values():
        assert row.runs == [f"trials/{row.trial}-s{seed}" for seed in row.seeds]
        assert all((folder / "out" / run / "run.parquet").is_file() for run in row.runs)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3, 5, 8])
def test_a_race_that_was_killed_resumes_to_the_same_decisions(whole, tmp_path, most):
    folder = whole[1]
    train_all(search_of(folder / "small.toml", tmp_path / "out")[0], most)
    train_all(search_of(folder / "small.toml", tmp_path / "out")[0])
    decisions = [pd.read_parquet(out / "race.parquet") for out in (tmp_path / "out", folder / "out")]
    pd.testing.assert_frame_equal(*decisions)


def test_a_run_trained_in_parts_has_the_bits_of_a_whole_one(whole, tmp_path):
    search, folder = whole
    parts = Run(folder / "out" / "trials" / "1-s0")
    config = search.ledger.study.config({"forward": "Quantize(8)"})
    run = train(config.model_copy(update={"seed": 0}), engine="inline", out=tmp_path / "run")
    columns = ["step", "loss", "wire_bytes"]
    assert len(parts.steps) >= 2
    pd.testing.assert_frame_equal(parts.steps[columns], run.steps[columns][: len(parts.steps)])


def test_a_plan_says_what_a_budget_buys_and_chooses_the_seeds(tmp_path):
    path = race_study(tmp_path, seeds=list(range(8)))
    search, lines = search_of(path, tmp_path / "out", budget=Budget.parse("1h"))
    train_all(search)
    assert lines[0].startswith("Budget 1h: a run takes")
    assert "2 settings and dense race on" in lines[0]
    assert "with half the budget" in lines[1]
    chosen = read_study(tmp_path / "out" / "study.toml").seeds
    assert chosen in {tuple(range(count)) for count in (3, 5, 8)}
    assert all(set(row.seeds) <= set(chosen) for row in search.ledger.rows)
    assert "of 1h spent. Decided:" in search.summary()[0]
    assert "Open: 0 settings" in search.summary()[0]


def test_a_budget_below_one_pair_is_refused_with_the_cost_of_a_pair(tmp_path):
    search, _ = search_of(race_study(tmp_path), tmp_path / "out", budget=Budget.parse(1e-3))
    train_all(search)
    assert search.refused.startswith("`budget` = '0.001' is below one pair of runs: dense and one setting on one seed")
    assert {run.name for run in (tmp_path / "out" / "trials").iterdir()} == {"0-s0"}


def test_a_race_whose_budget_is_spent_leaves_the_rest_open_and_goes_on_with_a_greater_one(tmp_path, monkeypatch):
    path, out = race_study(tmp_path), tmp_path / "out"
    left = iter([1e9, 1e9])
    monkeypatch.setattr(Spending, "remaining_s", lambda self, trained_s: next(left, 0.0))
    search, _ = search_of(path, out, budget=Budget.parse("1h"))
    train_all(search)
    assert any(line.startswith("Open: trial") for line in search.summary())
    assert {row.status for row in search.ledger.rows} >= {"finished", "running"}
    monkeypatch.undo()
    again, _ = search_of(path, out, budget=Budget.parse("2h"))
    train_all(again)
    assert "Open: 0 settings" in again.summary()[0]
    assert {row.status for row in again.ledger.rows} <= {"finished", "pruned"}


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


@pytest.mark.slow
def test_a_race_on_ray_makes_the_decisions_of_one_without(ray, whole, tmp_path):
    Sweep(read_study(whole[1] / "small.toml"), out=tmp_path / "ray").run()
    decisions = [pd.read_parquet(out / "race.parquet") for out in (tmp_path / "ray", whole[1] / "out")]
    pd.testing.assert_frame_equal(*decisions)
