"""Races in a sweep: rounds that resume to the same decisions, and real ones that leave the bits of whole runs."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from studies import BASE, write_study

from raysim.analysis import load, safe_set
from raysim.analysis.comparison.race import RUNGS, Race
from raysim.config import ConfigError
from raysim.quality import MEASURES
from raysim.records import Run
from raysim.sweeps.race_rounds import RaceRounds
from raysim.sweeps.runner import Sweep
from raysim.sweeps.study_file import read_study
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


def test_a_real_race_leaves_the_bits_of_whole_runs_and_resumes(ray, tmp_path):
    base = BASE | {"steps": 20, "evaluate_every_steps": 0}
    path = write_study(
        tmp_path,
        **(STUDY | {"base": base, "sampler": "grid", "trials": None, "engine": "inline", "jobs": 2}),
        baselines=[{"name": "dense", "set": {"forward": "Identity", "backward": "Identity"}}],
        space={"forward": ["Quantize(8)", "TopK(0.01)"]},
        symbols=None,
    )
    one = Sweep(read_study(path), out=tmp_path / "out")
    one.run()
    frame = pd.read_parquet(tmp_path / "out" / "trials.parquet").set_index("trial")
    assert frame.loc[0, "status"] == "finished"
    assert set(frame["status"]) <= {"finished", "pruned"}
    for row in frame[frame["status"] == "pruned"].itertuples():
        assert "of 20 steps on 2 seeds" in row.error or "slower than a safe setting" in row.error
    stopped = [Run(path.parent) for path in sorted((tmp_path / "out").glob("trials/*/run.parquet"))]
    assert {run.status for run in stopped} <= {"finished", "interrupted"}
    config = one.study.config({"forward": "Quantize(8)"})
    parts = next(run for run in stopped if run.row["forward"] == "Quantize(8)" and run.row["seed"] == 0)
    whole = train(config.model_copy(update={"seed": 0}), engine="inline", out=tmp_path / "whole")
    steps = len(parts.steps)
    pd.testing.assert_series_equal(parts.steps["loss"], whole.steps["loss"][:steps])
    decisions = pd.read_parquet(tmp_path / "out" / "race.parquet")
    (tmp_path / "out" / "optuna.db").unlink()
    again = Sweep(one.study, out=tmp_path / "out", resume=True)
    again.run()
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "out" / "race.parquet"), decisions)
    judged = safe_set(load(tmp_path / "out"))
    assert judged["family"].nunique() == 1
