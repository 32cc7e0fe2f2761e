"""Races in a sweep: rounds that resume to the same decisions, and real ones that leave the bits of whole runs."""

import re
from dataclasses import replace
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import optuna
import pandas as pd
import pyarrow.parquet as pq
import pytest
from optuna.trial import TrialState
from races import DENSE, SEEDS, STEPS, made_rounds, made_run, play
from ray.tune.search import Searcher
from studies import BASE, write_study

from raysim.analysis.comparison.race import Evidence
from raysim.analysis.data.folders import StudyFile
from raysim.analysis.report import compose
from raysim.analysis.report.page import Table
from raysim.config import ConfigError, make_config
from raysim.quality import MEASURES
from raysim.records import Run
from raysim.sweeps.budget import Budget, Spending
from raysim.sweeps.ledger import Ledger
from raysim.sweeps.runner import Sweep
from raysim.sweeps.search import RaceSearch
from raysim.sweeps.store import Store
from raysim.sweeps.study_file import read_study
from raysim.sweeps.trial import SweepTrial, TrialOutcome, TrialSpec
from raysim.training.train import train


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


def test_race_killed_at_any_point_resumes_to_same_decisions(tmp_path):
    copies = []
    whole = pq.read_table(play(made_rounds(tmp_path), copies).file)
    for i, copy in enumerate(copies):
        folder = tmp_path / str(i)
        folder.mkdir()
        pq.write_table(copy, folder / "race.parquet")
        assert pq.read_table(play(made_rounds(folder)).file).equals(whole)


def test_a_race_beside_a_dense_model_near_chance_ends_with_its_planned_seeds_and_calls_nothing_safe(tmp_path):
    def near_chance(trial, seed):
        run = made_run(trial, seed)
        return SimpleNamespace(steps=run.steps, evals=run.evals, row=run.row | {"chance_loss": 0.62})

    copies = []
    sure, unsure = play(made_rounds(tmp_path)), made_rounds(tmp_path / "near", near_chance)
    (tmp_path / "near").mkdir()
    play(unsure, copies)
    assert sure.safe
    assert (unsure.safe, unsure.running) == ([], [])
    assert {exit.kind for exit in unsure.left.values()} >= {"chance"}
    assert "slower" not in {exit.kind for exit in unsure.left.values()}
    assert unsure.ended_runs <= sure.ended_runs
    for i, copy in enumerate(copies):
        (folder := tmp_path / str(i)).mkdir()
        pq.write_table(copy, folder / "race.parquet")
        again = play(made_rounds(folder, near_chance))
        assert pq.read_table(again.file).equals(copies[-1])
        assert (again.safe, again.left) == ([], unsure.left)


def test_a_setting_of_unknown_speed_is_not_judged_by_it_until_its_exchange_is_known(tmp_path):
    """Trial 1 exchanges once in a run, and is the slower one of two safe settings."""

    def late(trials):
        return {trial: 2.0 if trial == 2 else 9.0 * bool(rounds.trained_seeds(1, least=0.7)) for trial in trials}

    rounds = made_rounds(tmp_path, entrants=(1, 2), cost_of=late)
    copies = []
    play(rounds, copies)
    assert 2 in rounds.safe
    assert 2 not in rounds.left
    assert {trial: each.step_s for trial, each in rounds.evidence.items()} == {1: 9.0, 2: 2.0}
    for i, copy in enumerate(copies):
        (folder := tmp_path / str(i)).mkdir()
        pq.write_table(copy, folder / "race.parquet")
        rounds = made_rounds(folder, entrants=(1, 2), cost_of=late)
        assert pq.read_table(play(rounds).file).equals(copies[-1])


@pytest.mark.parametrize("loss", [0.0, -1.5, 0.1])
def test_a_race_says_that_dense_has_no_loss_to_take_a_share_of(tmp_path, monkeypatch, loss):
    def at(trial, seed):
        run = made_run(trial, seed)
        return SimpleNamespace(steps=run.steps, evals=run.evals, row=run.row | {"final_loss_on": loss})

    rounds = made_rounds(tmp_path, at, measure=MEASURES["loss"])
    first, *others = rounds.next_round()
    assert first == (DENSE, SEEDS[0], 1.0)
    assert rounds.undefined(first.seed) == MEASURES["loss"].undefined(loss)
    search = RaceSearch.__new__(RaceSearch)  # once the first run has ended, with the others of the round to come
    search.__dict__ |= {"_rounds": rounds, "_rows": {"one": SimpleNamespace(trial=DENSE)}, "_parts": {"one": first}}
    search.__dict__ |= {"_queue": others, "progress": {}, "stopping": False, "problem": None}
    for name in ("_end", "_drop_checkpoints"):
        monkeypatch.setattr(search, name, lambda *_: None)
    search.on_trial_complete("one", {"outcome": TrialOutcome("finished", 1.0, None, {})})
    assert search.stopping is (loss <= 0)
    assert (search.problem or "").endswith(MEASURES["loss"].undefined(loss))


@pytest.mark.parametrize(("name", "column"), [("accuracy", "predictions"), ("exact_match", "samples")])
def test_a_race_calls_nothing_safe_by_answers_too_few_to_show_the_margin(tmp_path, name, column):
    """Equal shares of 64 answers hide 1.6 points; the report knows it, and the race ends settings by the same rule."""
    for count, safe in ((64, []), (64_000, [1])):

        def counted(trial, seed, count=count):
            run = made_run(trial, seed)
            evals = pd.DataFrame([{"predictions": 10**9, "samples": 10**9, column: count}])
            reached = {f"final_{name}_on": 0.75, f"chance_{name}": 0.1}
            return SimpleNamespace(steps=run.steps, evals=evals, row=run.row | reached)

        (folder := tmp_path / str(count)).mkdir()
        rounds = play(made_rounds(folder, counted, entrants=(1,), measure=MEASURES[name]))
        assert rounds.safe == safe
        assert rounds.race.step == MEASURES[name].step(count)


def test_decisions_use_only_their_steps(tmp_path):
    """Whole runs and runs cut at the end of each part give the same race."""
    reached = {}

    def cut_run(trial, seed):
        run = made_run(trial, seed)
        share = reached.get((trial, seed), 1.0)
        return SimpleNamespace(steps=run.steps[: round(share * STEPS)], evals=run.evals, row=run.row)

    rounds = made_rounds(tmp_path, cut_run)
    while tasks := rounds.next_round():
        reached |= {(task.trial, task.seed): task.share for task in tasks}
        rounds.end_round([])
    (tmp_path / "whole").mkdir()
    assert pq.read_table(rounds.file).equals(pq.read_table(play(made_rounds(tmp_path / "whole")).file))


def test_failed_trial_is_dropped_and_others_continue(tmp_path):
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
def test_invalid_race_is_refused(tmp_path, changes, sentence):
    with pytest.raises(ConfigError) as refused:
        read_study(write_study(tmp_path, **(STUDY | changes)))
    assert sentence in str(refused.value)


def test_race_is_in_study_and_excludes_asha(tmp_path):
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
    study = replace(read_study(path), **changes)
    if (out / "study.toml").is_file():
        study = study.resumed(out)
    out.mkdir(exist_ok=True)
    ledger, lines = Ledger(study, out), []
    ledger.reconcile()

    def planned(study):
        ledger.study = study
        study.write(out)

    def spec(row, config):
        row.engine = "inline"
        seeds, bundles = tuple(row.seeds), [{"CPU": 1.0}]
        same: dict[str, Any] = {
            "objectives": study.objectives,
            "engine": "inline",
            "pricing": study.pricing,
            "screens": study.screens,
        }
        return TrialSpec(row.trial, config, seeds, str(out), bundles=bundles, **same)

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
    base = BASE | {"model": "mlp", "steps": 20, "evaluate_every_steps": 0, "checkpoint_every_steps": 0}
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
    """The search and the folder of a race that was not disturbed, and what it said of itself after the first parts and at the end."""
    folder = tmp_path_factory.mktemp("race")
    search, _ = search_of(race_study(folder), folder / "out")
    lines = [search.standing()]
    for most in (1, 1, 1, 1000):
        train_all(search, most)
        lines.append(search.standing())
    return search, folder, lines


def test_parts_of_a_race_in_tune_end_in_rows(whole):
    search, folder, _ = whole
    rows = {row.trial: row for row in search.ledger.rows}
    assert (rows[0].name, rows[0].status) == ("dense", "finished")
    assert rows[0].figures.keys() == {"loss_on", "wire_bytes"}
    assert {row.status for row in rows.values()} <= {"finished", "pruned"}
    assert all("of 20 steps on 2 seeds" in row.error for row in rows.values() if row.status == "pruned")
    for row in rows.values():
        assert row.runs == [f"trials/{row.trial}-s{seed}" for seed in row.seeds]
        assert all((folder / "out" / run / "run.parquet").is_file() for run in row.runs)


def test_a_race_says_what_is_open(whole):
    _, folder, lines = whole
    assert lines[0] == ""
    words = r"\d settings? open, \d+ runs? ended(, \d+ of \d+ parts of this round trained)?"
    assert all(re.fullmatch(words, each) for each in lines[1:]), lines
    trained = [each.partition(" ended, ")[2] for each in lines[1:4]]
    assert trained == ["2 of 6 parts of this round trained", "4 of 6 parts of this round trained", ""]
    ended = sum(Run(path).status == "finished" for path in folder.glob("out/trials/*"))
    assert lines[-1] == f"0 settings open, {ended} runs ended"


def test_the_least_harmful_setting_that_has_not_left_is_named(whole, tmp_path, monkeypatch):
    search = whole[0]
    rounds = made_rounds(tmp_path)
    assert rounds.least_harmful is None
    harms = ((0.5, 0.7), (-0.1, 0.3), (-2.0, -3.0))
    worse, best, out = rounds.running[:3]
    rounds.evidence |= {trial: Evidence(0.0, final=each) for trial, each in zip((worse, best, out), harms, strict=True)}
    rounds.failed.add(out)
    assert rounds.least_harmful == best
    monkeypatch.setattr(search, "_rounds", rounds)
    monkeypatch.setattr(search, "ledger", SimpleNamespace(rows={best: SimpleNamespace(notation="forward=Sign")}))
    assert search.standing().endswith("; least harm so far +0.1 % of loss on 2 seeds: forward=Sign")


def test_a_race_keeps_no_checkpoint_from_which_nothing_starts(whole, tmp_path):
    assert not [*whole[1].glob("out/trials/*/checkpoints")]
    search, _ = search_of(race_study(tmp_path), tmp_path / "out")
    train_all(search, most=2)  # killed: dense and settings are at their first rung
    left = {path.parts[-3] for path in tmp_path.glob("out/trials/*/checkpoints/step-*")}
    runs = {path.name: Run(path) for path in tmp_path.glob("out/trials/*")}
    assert left == {name for name, run in runs.items() if run.status != "finished"}


def test_optuna_shows_every_trial_of_a_race_with_its_setting_and_values(whole):
    search, folder, _ = whole
    (study,) = optuna.get_all_study_summaries(f"sqlite:///{folder / 'out' / 'optuna.db'}")
    trials = optuna.load_study(study_name=study.study_name, storage=f"sqlite:///{folder / 'out' / 'optuna.db'}").trials
    states = {"finished": TrialState.COMPLETE, "pruned": TrialState.PRUNED}
    dense, *others = search.ledger.rows
    harms = {trial: left.harm for trial, left in search.rounds.left.items()}
    assert harms  # the study has a setting that leaves
    for row in (dense, *others):
        trial = trials[row.trial]
        assert (trial.state, trial.params) == (states[row.status], row.params)
        loss, size = trial.values
        if row.trial in harms:
            assert trial.user_attrs["values"] == "a forecast at the exit from the race"
            assert search.rounds.measure.harm(loss, dense.value("loss_on")) == pytest.approx(harms[row.trial])
            assert 0 < size < dense.value("wire_bytes")
        else:
            assert [loss, size] == [row.value("loss_on"), row.value("wire_bytes")]


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 3, 5, 8])
def test_a_race_that_was_killed_resumes_to_the_same_decisions(whole, tmp_path, most):
    folder = whole[1]
    train_all(search_of(folder / "small.toml", tmp_path / "out")[0], most)
    train_all(search_of(folder / "small.toml", tmp_path / "out")[0])
    decisions = [pd.read_parquet(out / "race.parquet") for out in (tmp_path / "out", folder / "out")]
    pd.testing.assert_frame_equal(*decisions)


@pytest.fixture(scope="module")
def screened(tmp_path_factory):
    """A race from trained weights with massive activations, and its folder."""
    folder = tmp_path_factory.mktemp("screened")
    base = {
        "model": "massive:model",
        "data": "massive:texts",
        "num_stages": 3,
        "batch_size": 8,
        "num_microbatches": 2,
        "steps": 2,
        "evaluate_every_steps": 0,
        "optimizer": {"name": "sgd", "learning_rate": 1e-9},
    }
    train(make_config(base | {"name": "dense", "checkpoint_at_steps": [2]}), engine="inline", out=folder / "d")
    space = {"forward": ["Quantize(8)", "Quantize(8, per='block', block=8)"]}
    base = base | {"start": f"{folder / 'd'}@2"}
    path = race_study(folder, base=base, space=space)
    search, _ = search_of(path, folder / "out")
    train_all(search)
    return search, folder


def test_a_race_drops_what_breaks_trained_weights_before_a_step(screened, tmp_path):
    search, folder = screened
    broken, kept = (row for row in search.ledger.rows if row.name is None)
    if broken.params["forward"] != "Quantize(8)":
        broken, kept = kept, broken
    assert broken.status == "pruned"
    assert broken.error.startswith("hopeless at once: loss ")
    assert not broken.runs
    assert {run.name.partition("-")[0] for run in (folder / "out" / "trials").iterdir()} == {"0", str(kept.trial)}
    assert "hopeless at once" not in (kept.error or "")
    frame = pd.read_parquet(folder / "out" / "race.parquet")
    assert list(frame[frame["decision"] == "at once"]["trial"]) == [broken.trial]
    assert search.rounds.race.family == 1
    copytree(folder / "out", tmp_path / "out")
    search.ledger.study.write(tmp_path / "out")
    dropped = next(each for each in compose(tmp_path / "out", ["free"]).blocks(Table) if each.key == "dropped")
    assert broken.error in set(dropped.frame["reason"])


def test_a_resumed_race_screens_nothing_again(screened, tmp_path, monkeypatch):
    folder = screened[1]
    copytree(folder / "out", tmp_path / "out")
    monkeypatch.setattr("raysim.sweeps.trial.why_hopeless", lambda *_: pytest.fail("screened again"))
    search, _ = search_of(folder / "small.toml", tmp_path / "out")
    train_all(search)
    assert search.rounds.race.family == 1
    assert (tmp_path / "out" / "race.parquet").read_bytes() == (folder / "out" / "race.parquet").read_bytes()


def test_studies_of_several_seeds_screen(tmp_path):
    path = race_study(tmp_path)
    assert read_study(path).screens
    assert not read_study(path, screen=False).screens
    assert not read_study(write_study(tmp_path), seeds=1).screens
    assert read_study(write_study(tmp_path), seeds=2).screens
    assert not read_study(write_study(tmp_path, screen=False), seeds=2).screens


def test_a_run_trained_in_parts_has_the_bits_of_a_whole_one(whole, tmp_path):
    search, folder, _ = whole
    parts = Run(folder / "out" / "trials" / "1-s0")
    config = search.ledger.study.config({"forward": "Quantize(8)"})
    run = train(config.model_copy(update={"seed": 0}), engine="inline", out=tmp_path / "run")
    columns = ["step", "loss", "wire_bytes"]
    assert len(parts.steps) >= 2
    pd.testing.assert_frame_equal(parts.steps[columns], run.steps[columns][: len(parts.steps)])


def test_a_budget_below_one_pair_is_refused_with_the_cost_of_a_pair(tmp_path):
    search, _ = search_of(race_study(tmp_path), tmp_path / "out", budget=Budget.parse(1e-3))
    train_all(search)
    assert search.refused.startswith("`budget` = '0.001' is below one pair of runs: dense and one setting on one seed")
    assert {run.name for run in (tmp_path / "out" / "trials").iterdir()} == {"0-s0"}


@pytest.mark.slow
def test_a_race_out_of_budget_resumes_with_a_larger_one_whose_plan_chooses_the_seeds(tmp_path, few_simulations):
    path, out = race_study(tmp_path, seeds=list(range(5))), tmp_path / "out"
    left = iter([1e9, 1e9])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spending, "remaining_s", lambda self, trained_s: next(left, 0.0))
        search, lines = search_of(path, out, budget=Budget.parse("1h"))
        train_all(search)
    assert lines[0].startswith("Budget 1h: a run takes")
    assert "2 settings and dense race on" in lines[0]
    assert "with half the budget" in lines[1]
    assert any(line.startswith("Open: trial") for line in search.summary())
    last = search.summary()[-1]
    assert last.startswith("The budget ended the race: ")
    assert (
        words := re.search(
            r"decided by (\d+) seeds each in [\d.]+ (?:s|min|h) more: add `--resume --budget (\d+min)`", last
        )
    )
    assert int(words[1]) == len(search.rounds.seeds)
    assert Budget.parse(words[2]).seconds > 0
    assert {row.status for row in search.ledger.rows} >= {"finished", "running"}
    again, _ = search_of(path, out, budget=Budget.parse("2h"))
    train_all(again)
    assert "of 2h spent. Decided:" in again.summary()[-1]
    assert "Open: 0 settings" in again.summary()[-1]
    assert {row.status for row in again.ledger.rows} <= {"finished", "pruned"}
    study = read_study(out / "study.toml")
    assert study.seeds == tuple(range(5))
    assert study.planned_seeds in {3, 5}
    assert StudyFile(out).seeds == study.seeds[: study.planned_seeds]
    planned = [row for row in again.ledger.rows if row.trial not in again.rounds.further and row.name is None]
    assert all(len(row.seeds) <= study.planned_seeds for row in planned)


@pytest.mark.slow
def test_a_race_on_ray_makes_the_decisions_of_one_without(ray, whole, tmp_path):
    Sweep(read_study(whole[1] / "small.toml"), out=tmp_path / "ray").run()
    decisions = [pd.read_parquet(out / "race.parquet") for out in (tmp_path / "ray", whole[1] / "out")]
    pd.testing.assert_frame_equal(*decisions)
