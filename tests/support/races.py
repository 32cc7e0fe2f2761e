"""Races on made runs: losses that fall, above dense's by a trial's harm."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from raysim.analysis.comparison import race_plan
from raysim.analysis.comparison.race import Race
from raysim.quality import MEASURES
from raysim.sweeps.budget import Budget, Spending
from raysim.sweeps.race_budget import RaceBudget
from raysim.sweeps.race_rounds import RaceRounds

STEPS, SEEDS, DENSE = 100, [3, 4, 5], 0
HARM = {1: 0.0, 2: 0.002, 3: 0.02, 4: 1.0}  # of the loss, by trial
RUN_S = 360.0  # of dense


@cache
def losses(trial, seed, harm):
    noise = np.random.default_rng(seed).normal(0, 0.01, STEPS)
    own = np.random.default_rng([trial, seed]).normal(0, 0.0005, STEPS)
    return (1 + harm) * (0.5 + 2 * np.exp(-np.arange(STEPS) / 30) + noise + own)


def made_run(trial, seed, *, harm=None, spread=0.0):
    """Return what a race reads of a run to its end. `spread`: of its harm over seeds."""
    mean = HARM.get(trial, 0.0) if harm is None else harm
    drawn = spread * np.random.default_rng([seed, trial]).standard_normal() if trial != DENSE else 0.0
    of_run = losses(trial, seed, mean + drawn)
    evals = pd.DataFrame({"predictions": [360.0], "samples": [360.0]})
    row = {"final_loss_on": float(of_run[-20:].mean()), "chance_loss": 2.5}
    return SimpleNamespace(steps=pd.DataFrame({"step": range(STEPS), "loss": of_run}), evals=evals, row=row)


def by_number(trials):
    return {trial: float(trial) for trial in trials}


def made_rounds(
    folder, run_of=made_run, *, seeds=SEEDS, entrants=tuple(HARM), measure=MEASURES["loss"], cost_of=by_number
):
    return RaceRounds(
        folder / "race.parquet",
        race=Race(len(seeds), measure.margin, len(entrants)),
        seeds=seeds,
        dense=DENSE,
        entrants=entrants,
        measure=measure,
        run_of=run_of,
        cost_of=cost_of,
    )


def play(rounds, copies=None):
    """Play a race to its end; keep a copy of its file before and after every round."""
    while rounds.next_round():
        copies is None or copies.append(pq.read_table(rounds.file))
        rounds.end_round([])
        copies is None or copies.append(pq.read_table(rounds.file))
    return rounds


def budget_race(folder, hours, harms, *, spread=0.003, usual=None, costs=None, seeds=21, stay=False, start=0.0):
    """Return a race within GPU hours after its first plan, and the lines that it says.

    `harms`, of the loss, and `costs`, over those of dense, by trial. `usual`: the spread that plans take for granted. `stay`: no
    setting leaves. `start`: seconds before the first step of each part. Its runs take as long as they say, so nothing depends on time.
    """
    lines, races = [], []

    def run_of(trial, seed):
        run = made_run(trial, seed, harm=harms.get(trial, 0.0), spread=spread)
        parts = races[0].trained(trial) if races else []
        shares = [entry.share for entry in parts if entry.ended and seed in entry.seeds]
        start_s = start * len(shares)
        seconds = {
            "start_s": start_s,
            "seconds": start_s + RUN_S * (costs or {}).get(trial, 1.0) * max(shares, default=0.1),
        }
        return SimpleNamespace(steps=run.steps, evals=run.evals, row=run.row | seconds)

    rounds = made_rounds(folder, run_of, seeds=list(range(seeds)), entrants=tuple(harms))
    races.append(rounds)
    if stay:
        rounds.race = replace(rounds.race, hopeless=0.0, error=1e-12)
    if rounds.begin_pilot():
        rounds.end_round([])
    rounds.budget = RaceBudget(
        rounds,
        Spending(Budget.parse(f"{hours} GPU hours"), jobs=1, gpus=1),
        spread=100 * (spread if usual is None else usual),
        notations={trial: f"T{trial}" for trial in harms},
        say=lines.append,
        on_plan=lambda seeds: None,
    )
    if not rounds.begun:
        assert rounds.budget.plan() is None
    return rounds, lines


@cache
def _fresh_races(count, race, settings, seeds, terms):
    return race_plan.fresh_races(race, settings, seeds=seeds, **dict(terms))


def fresh_races(race, settings, *, seeds, **terms):
    """Return simulated races, once for each question: they are most of the work of a plan."""
    return _fresh_races(race_plan.COUNT, race, settings, tuple(seeds), tuple(terms.items()))
