"""The power of a confirmation: it is what the rule does to simulated seeds, and is told from the seeds that chose."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records_made import write_run

from raysim.analysis import load
from raysim.analysis.comparison.contexts import paired_spread
from raysim.analysis.comparison.rule import (
    CONFIDENCE,
    PairedSpread,
    chance_of_safe,
    judge,
    planned_share,
    sample,
    seeds_needed,
)
from raysim.analysis.comparison.statistics import priors
from raysim.sweeps.verdicts import show_power

MARGIN = 0.5
TRIES = 200

spreads = st.builds(PairedSpread, st.floats(0.05, 2), st.floats(0, 0.3), st.just(MARGIN), st.just(""), st.floats(0, 8))


@pytest.mark.parametrize(("harm", "seeds", "count"), [(0.0, 12, 1), (0.1, 30, 3), (0.3, 8, 1)])
def test_the_chance_is_the_share_of_simulated_confirmations_that_are_safe(harm, seeds, count):
    spread = PairedSpread(0.6, 0.0, MARGIN, "")
    rng = np.random.default_rng(seeds)
    safe = 0
    for _ in range(TRIES):
        harmful = [rng.normal(9, 0.6, seeds) for _ in range(count - 1)]  # the others need the mildest level, and fail
        drawn = [sample(dict(enumerate(one)), plan=range(seeds)) for one in (rng.normal(harm, 0.6, seeds), *harmful)]
        safe += judge(drawn, [MARGIN] * count)[0].where == "below"
    expected = chance_of_safe(spread, seeds, settings=count, harm=harm)
    assert abs(safe / TRIES - expected) < 4 * math.sqrt(expected * (1 - expected) / TRIES)


@pytest.mark.parametrize(("seeds", "count"), [pytest.param(3, 8, marks=pytest.mark.slow), (5, 4)])
def test_the_chance_with_borrowed_spread_is_no_more_than_the_share_that_is_safe(seeds, count):
    rng, deviation, safe, freedoms = np.random.default_rng(seeds), 0.2, 0, []
    for _ in range(TRIES):
        drawn = [sample(dict(enumerate(row)), plan=range(seeds)) for row in rng.normal(0, deviation, (count, seeds))]
        borrowed = priors([each.values for each in drawn], [0.0] * count, MARGIN)
        freedoms.append(borrowed[0].freedom)
        safe += judge(drawn, [MARGIN] * count, priors=borrowed)[0].where == "below"
    spread = PairedSpread(deviation, 0.0, MARGIN, "", float(np.median(np.array(freedoms))))
    alone = chance_of_safe(spread._replace(freedom=0.0), seeds, settings=count)
    assert alone + 0.2 < chance_of_safe(spread, seeds, settings=count) < safe / TRIES + 0.05


@given(spreads, st.integers(3, 60), st.integers(1, 5))
@settings(max_examples=50)
def test_at_the_margin_the_chance_is_at_most_the_level_of_the_rule(spread, seeds, count):
    level = (1 - CONFIDENCE) * planned_share(seeds) / count
    assert level / 4 < chance_of_safe(spread, seeds, settings=count, harm=MARGIN) < level


@given(spreads, st.integers(3, 60), st.integers(1, 4), st.floats(0, 0.4))
@settings(max_examples=50)
def test_more_seeds_help_and_more_settings_or_harm_do_not(spread, seeds, count, harm):
    chance = chance_of_safe(spread, seeds, settings=count, harm=harm)
    assert chance_of_safe(spread, seeds + 1, settings=count, harm=harm) >= chance - 2e-3
    assert chance_of_safe(spread, seeds, settings=count + 1, harm=harm) <= chance + 1e-4
    assert chance_of_safe(spread, seeds, settings=count, harm=harm + 0.05) <= chance + 1e-4


def test_seed_advice_for_decided_and_scarce_settings():
    certain = PairedSpread(0.0, 0.0, MARGIN, "")
    assert (chance_of_safe(certain, 3, settings=1), chance_of_safe(certain, 3, settings=1, harm=1.0)) == (1.0, 0.0)
    assert chance_of_safe(certain, 2, settings=1) == 0.0


def test_the_demo_has_the_seeds_for_a_decision():
    """With the spread of branches that was recorded over 16 seeds (0.35 points), for a setting as good as dense beside another."""
    (seeds,) = re.findall(
        r"sweep quickstart .*--seeds (\d+) --race", (Path(__file__).parents[2] / "Makefile").read_text()
    )
    assert chance_of_safe(PairedSpread(0.35, 100 / 360, MARGIN, ""), int(seeds), settings=2) > 0.9


def test_spread_is_of_differences_from_dense_and_chance_is_reported(tmp_path, capsys):
    accuracies = {"Identity": [0.95, 0.97, 0.96], "Quantize(8)": [0.95, 0.96, 0.97], "TopK(0.1)": [0.9, 0.8, 0.7]}
    for place, (forward, reached) in enumerate(accuracies.items()):
        for seed, accuracy in enumerate(reached):
            finals = {"loss_on": 0.1, "accuracy_on": accuracy}
            write_run(tmp_path / f"{place}-s{seed}", finals=finals, forward=forward, seed=seed, predictions=360)
    results = load(tmp_path)
    near = [f"1-s{seed}" for seed in range(3)]
    deviation = np.std([0, 1, -1], ddof=1)
    found = paired_spread(results, near)
    assert found == (pytest.approx(deviation), pytest.approx(100 / 360), MARGIN, "points of accuracy", 0.0)
    worse = np.std(100 * (np.array(accuracies["Identity"]) - accuracies["TopK(0.1)"]), ddof=1)
    pooled = paired_spread(results, [*near, "2-s0"]).deviation
    assert pooled == pytest.approx(math.sqrt((deviation**2 + worse**2) / 2))

    store = SimpleNamespace(out=str(tmp_path))
    sweep: Any = SimpleNamespace(
        store=store, rows=[SimpleNamespace(trial=1, runs=near), SimpleNamespace(trial=0, runs=["0-s0"])]
    )
    study = SimpleNamespace(seeds=range(3, 43), baselines=[SimpleNamespace(name=name) for name in ("dense", "trial-1")])
    confirmation: Any = SimpleNamespace(study=study)
    show_power(sweep, confirmation)
    sound, half = (chance_of_safe(found, 40, settings=1, harm=harm) for harm in (0, 0.25))
    assert capsys.readouterr().out == (
        "1 setting will be compared with dense on held-out seeds 3 to 42. With the spread of the seeds that chose, 1.00 points of "
        f"accuracy, a setting as good as dense is called safe with a chance of {sound:.0%}, and one that is 0.25 worse "
        f"with {half:.0%}.\n"
    )


def test_the_seeds_that_decide_grow_with_the_spread_and_near_the_margin():
    def needed(deviation, harm):
        return seeds_needed(PairedSpread(deviation, 0.0, 1.0, "% of loss"), settings=12, harm=harm)

    assert needed(0.1, 0.0) == 4
    assert 4 < needed(0.5, 0.0) < needed(0.9, 0.0)
    assert needed(6.9, 15.0) == needed(6.9, -13.0)  # harmful, or safe, by as much
    assert needed(9.0, 0.0) is None
    assert needed(math.nan, 0.0) is None
    count = needed(6.9, 15.0)
    assert chance_of_safe(PairedSpread(6.9, 0.0, 1.0, ""), count, settings=12, harm=-13.0) >= 0.8
    assert chance_of_safe(PairedSpread(6.9, 0.0, 1.0, ""), count - 1, settings=12, harm=-13.0) < 0.8
