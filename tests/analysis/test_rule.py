"""The rule of all verdicts, by simulation: bounds cover, families and repeated looks are safe, and all tables agree."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raysim_findings.verdicts import findings
from records_made import write_run
from scipy import stats

from raysim import analysis
from raysim.analysis import load
from raysim.analysis.comparison.rule import (
    LOOKS,
    MOST_SEEDS,
    PLANNED,
    RULE,
    at_chance,
    judge,
    look_at,
    looks_after,
    planned_share,
    sample,
    seeds_to_decide,
)
from raysim.analysis.comparison.statistics import (
    bounds,
    highest_rate,
    holm,
    p_value,
    priors,
    studentise,
)

MARGIN = 0.5
ALPHA = 0.05
STEP = 100 / 360  # points of accuracy, on the 360 samples of the digits' test split
FAST, SLOW = 400, 20_000


def accuracy_harms(rng, tries, seeds, harm, spread):
    """Return differences of accuracies in steps of 1/360, (tries, seeds), whose mean is `harm`: seeds share their luck."""
    luck = 97 + rng.normal(0, 1, (tries, seeds))
    worse = luck - harm + rng.normal(0, spread, (tries, seeds))
    return np.round(luck / STEP) * STEP - np.round(worse / STEP) * STEP


def sigma(rate, tries):
    return math.sqrt(rate * (1 - rate) / tries)


def misses(tries, seeds, spread, share, harm=MARGIN):
    """Return how often each one-sided bound misses the true harm, at the level of a look."""
    rng = np.random.default_rng(seeds)
    drawn = [bounds(row, 1 - ALPHA * share, STEP) for row in accuracy_harms(rng, tries, seeds, harm, spread)]
    return np.mean([one.high < harm for one in drawn]), np.mean([one.low > harm for one in drawn])


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_bounds_cover_accuracies_in_steps(seeds):
    for miss in misses(FAST, seeds, 0.4, 1.0):
        assert miss < ALPHA + 3 * sigma(ALPHA, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, PLANNED, 0.3])
@pytest.mark.parametrize("spread", [0.02, 0.05, 0.1, 0.2, 0.4, 1.0])
@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_bounds_cover_at_every_spread_and_level(seeds, spread, share):
    for miss in misses(4000, seeds, spread, share):
        assert miss < 1.15 * ALPHA * share + 3 * sigma(ALPHA * share, 4000)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5, 8, 13, 21, 40])
def test_bounds_of_a_skewed_quantity_miss_at_about_the_stated_rate(seeds):
    """The upper bound at skewness 1, at most 3.2 % for 2.5 %, and the lower one at none."""
    rng, shape = np.random.default_rng(seeds), 4.0
    for side, drawn, most in (
        ("below", rng.gamma(shape, size=(SLOW, seeds)) - shape, 0.032),
        ("above", rng.normal(size=(SLOW, seeds)), 0.025),
    ):
        missed = np.mean(studentise(drawn).p_value(0.0, side) < ALPHA / 2)  # type: ignore[arg-type]
        assert 0.8 * ALPHA / 2 < missed < most + 3 * sigma(most, SLOW)


@given(st.integers(2, 12), st.floats(-3, 3), st.floats(0.01, 1))
@settings(max_examples=50)
def test_equal_differences_keep_an_interval(seeds, value, step):
    found = bounds([value] * seeds, 0.95, step)
    assert found.low < found.mean < found.high
    # If one seed in so many were a step off, all would be equal with a chance of 5 %: the bound reaches that far.
    assert found.high - found.mean > step * (1 - ALPHA ** (1 / seeds))


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9), st.floats(-2, 2), st.floats(0.001, 0.4))
@settings(max_examples=80)
def test_a_p_value_is_the_level_at_which_the_bound_passes(differences, threshold, level):
    p = p_value(differences, threshold, "below", 0.1)
    if abs(p - level) > 1e-9:
        assert bounds(differences, 1 - level, 0.1).beyond(threshold, "below") is (p < level)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(max_examples=80)
def test_holm_matches_definition(p_values):
    levels = holm(p_values, ALPHA)
    ordered = sorted(p_values)
    count = next((place for place, p in enumerate(ordered) if p >= ALPHA / (len(ordered) - place)), len(ordered))
    assert sum(p < level for p, level in zip(p_values, levels, strict=True)) == count
    assert all(ALPHA / len(p_values) <= level <= ALPHA for level in levels)


def false_safe(tries, family, seeds, spread=0.4, *, corrected=True):
    """Return how often some setting of a family is called safe whose true harm is the margin for all."""
    rng = np.random.default_rng(family)
    hits = 0
    for _ in range(tries):
        drawn = [
            sample(dict(enumerate(row)), plan=range(seeds), step=STEP) for row in _family(rng, family, seeds, spread)
        ]
        groups = [drawn] if corrected else [[one] for one in drawn]
        hits += any(found.where == "below" for group in groups for found in judge(group, [MARGIN] * len(group), ALPHA))
    return hits / tries


def _family(rng, family, seeds, spread):
    """Return harms of one study, (family, seeds): all settings are compared with the same dense runs."""
    luck = 97 + rng.normal(0, 1, seeds)
    dense = np.round((luck + rng.normal(0, spread / math.sqrt(2), seeds)) / STEP) * STEP
    others = luck - MARGIN + rng.normal(0, spread / math.sqrt(2), (family, seeds))
    return dense - np.round(others / STEP) * STEP


@pytest.mark.parametrize("family", [1, 10])
def test_no_family_is_called_safe_too_often(family):
    assert false_safe(200, family, 5) < ALPHA * PLANNED + 3 * sigma(ALPHA * PLANNED, 200)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [3, 5, 8])
@pytest.mark.parametrize("family", [10, 30, 100])
def test_large_families_are_called_safe_no_more_often(family, seeds):
    level = ALPHA * PLANNED
    assert false_safe(600, family, seeds) < level + 3 * sigma(level, 600)
    if family == 100 and seeds > 3:
        assert false_safe(100, family, seeds, corrected=False) > level  # each by itself: chance finds one


def stopped_when_safe(tries, spread=0.4, most=30):
    """Return how often a setting at the margin is called safe by somebody who looks after every seed, and stops then."""
    rng = np.random.default_rng(0)
    hits = 0
    for row in accuracy_harms(rng, tries, most, MARGIN, spread):
        looks = (sample(dict(enumerate(row[:count])), step=STEP) for count in range(1, most + 1))
        hits += any(judge([one], [MARGIN], ALPHA)[0].where == "below" for one in looks)
    return hits / tries


def test_optional_stopping_keeps_error_level():
    assert stopped_when_safe(150, most=13) < ALPHA + 3 * sigma(ALPHA, 150)


@pytest.mark.slow
def test_adding_seeds_up_to_thirty_keeps_the_level():
    assert stopped_when_safe(2500) < ALPHA + 3 * sigma(ALPHA, 2500)


@pytest.mark.slow
@pytest.mark.parametrize("family", [10, 30, 100])
def test_confirmation_on_fresh_seeds_keeps_error_rate(family):
    """The setting that looks best of many is judged on five seeds that did not choose it."""
    rng, tries, hits = np.random.default_rng(family), 1500, 0
    for _ in range(tries):
        best = _family(rng, family, 3, 0.4).mean(axis=1).argmin()
        fresh = _family(rng, family, 5, 0.4)[best]
        hits += judge([sample(dict(enumerate(fresh)), plan=range(5), step=STEP)], [MARGIN], ALPHA)[0].where == "below"
    assert hits / tries < ALPHA * PLANNED + 3 * sigma(ALPHA * PLANNED, tries)


def test_a_harmless_setting_is_found_safe():
    """The power that is left: no harm at all, eight planned seeds, one of ten settings."""
    rng, tries, hits = np.random.default_rng(1), 100, 0
    for _ in range(tries):
        family = _family(rng, 10, 8, 0.4)
        family[0] -= MARGIN
        drawn = [sample(dict(enumerate(row)), plan=range(8), step=STEP) for row in family]
        borrowed = priors(family, [STEP] * 10, MARGIN)
        hits += judge(drawn, [MARGIN] * 10, ALPHA, priors=borrowed)[0].where == "below"
    assert hits / tries > 0.3


@pytest.mark.parametrize("planned", [*range(14), 20, 21, 31, 44])
def test_plan_and_interim_analyses_spend_exactly_the_error(planned):
    """As seeds are added to a plan, one by one: each share that is spent, once."""
    plan, spent = range(planned), {}
    for seeds in range(planned, 60):
        found = sample(dict.fromkeys(range(seeds), 0.1), plan=plan, grown=seeds > planned > 0)
        if not found.lacking:
            assert spent.setdefault(found.seeds, found.share) == found.share
    assert sum(spent.values()) == pytest.approx(1)
    assert len(spent) == len(looks_after(planned)) + (planned >= min(LOOKS))


def test_interim_analyses_before_plan_decide_nothing():
    effects = dict.fromkeys(range(30), 0.1)
    assert sample(effects, plan=range(5)).share == PLANNED
    assert sample(dict.fromkeys(range(7), 0.1), plan=range(5), grown=True).seeds == tuple(range(5))
    assert sample(dict.fromkeys(range(8), 0.1), plan=range(5), grown=True).share == pytest.approx(0.25)
    assert sample(dict.fromkeys(range(2, 9), 0.1), plan=range(5), grown=True).lacking == "3 of 5 planned seeds"
    assert sample(effects, plan=range(MOST_SEEDS)).share == planned_share(MOST_SEEDS) == 1


def test_interim_analyses_follow_rule():
    assert [look_at(seeds) for seeds in (0, 2, 3, 4, 5, 12, 13, 40)] == [0, 0, 3, 3, 5, 8, 13, 21]
    assert all(str(count) in RULE for count in LOOKS)


@given(st.integers(0, 40), st.integers(1, 40), st.floats(0.5, 0.99))
def test_rate_bound_is_exact(events, trials, confidence):
    """At the bound, so few events have the chance that remains."""
    events = min(events, trials)
    bound = highest_rate(events, trials, confidence)
    assert events / trials <= bound <= 1
    if events < trials:
        assert stats.binom.cdf(events, trials, bound) == pytest.approx(1 - confidence)


def test_seeds_count_as_they_were_planned():
    effects = dict(enumerate([0.1, 0.2, 0.3, 0.1, 0.2, 9.0]))
    assert sample(effects).seeds == (0, 1, 2, 3, 4)
    assert sample(effects, plan=[0, 1, 5]).seeds == (0, 1, 5)
    assert sample(effects, plan=[0, 1, 7]).lacking == "2 of 3 planned seeds"
    assert sample({0: 0.1}, plan=[0]).lacking == sample({0: 0.1}).lacking == "1 of at least 3 seeds"
    assert sample(effects, step=math.nan).lacking == "the number of predictions is not recorded"
    assert sample(effects, grown=True).share == pytest.approx(sample(effects).share / 2)  # of a study of unknown seeds
    assert sample({**effects, 0: math.nan}).seeds == (1, 2, 3, 4, 5)


def test_models_at_chance_have_no_skill():
    assert at_chance([0.0, 1.0, -1.0, 0.5, 2.0])
    assert at_chance([90.0, 91.0])  # of two seeds, nobody knows
    assert at_chance([9.0, 12.0, 11.0])
    assert not at_chance([40.0, 42.0, 41.0])
    assert at_chance([math.nan] * 5)


def test_suggested_seeds_decide_in_80_percent():
    first = np.array([0.0, 1.0, 2.0, 1.0, 0.5])
    count = seeds_to_decide(first, 0.0)  # type: ignore[arg-type]
    assert count in LOOKS
    rng, level = np.random.default_rng(0), ALPHA * LOOKS[count]
    drawn = rng.normal(first.mean(), first.std(ddof=1), (1000, count))
    assert np.mean([p_value(row, 0.0, "above") < level for row in drawn]) > 0.75
    assert seeds_to_decide([0.0, 1.0, -1.0], 0.0) is None
    assert seeds_to_decide([0.3], 0.0) == 3


def write_runs(folder, accuracies, seeds=5, **changes):
    for place, (forward, mean) in enumerate(accuracies.items()):
        for seed in range(seeds):
            accuracy = mean + 0.001 * ((seed * 7 + place * 3) % 5)
            finals = {"accuracy_on": accuracy, "accuracy_off": accuracy, "loss_on": 1.5 - mean, "loss_off": 1.5 - mean}
            setting = {"forward": forward, "backward": forward} if forward != "Identity" else {}
            write_run(folder / f"{place}-s{seed}", seed=seed, finals=finals, tables=False, **setting, **changes)


@pytest.mark.parametrize(
    ("accuracy", "verdict"),
    [(0.902, "safe"), (0.7, "harmful"), (0.897, "undecided"), pytest.param(0.893, "undecided", marks=pytest.mark.slow)],
)
def test_settings_and_claims_are_judged_alike(tmp_path, accuracy, verdict):
    """One setting beside dense: the same bounds and the same verdict in `settings`, and of the claim that is about it."""
    write_runs(tmp_path, {"Identity": 0.9, "AQSGD(TopK(0.3))": accuracy})
    results = load(tmp_path)
    (row,) = analysis.settings(results).to_dict("records")
    claim = next(one for one in findings(results) if one.claim.name == "aq-sgd-topk")
    (comparison,) = (one for one in claim.comparisons if one.part == "30 % does no harm")
    assert (row["harm"], row["harm_low"], row["harm_high"]) == pytest.approx(
        (comparison.effect, comparison.low, comparison.high)
    )
    told = {"supported": "safe", "contradicted": "harmful", "undecided": "undecided"}
    assert row["verdict"] == told[comparison.verdict] == verdict
    assert row["seeds"] == comparison.seeds == 5


def test_accuracy_on_few_samples_has_resolution_limit(tmp_path):
    """Equal at all seeds: on 36,000 predictions that is something, on 36 it says little."""
    for predictions, verdict in ((36_000, "safe"), (36, "undecided"), (None, "undecided")):
        folder = tmp_path / str(predictions)
        write_runs(folder, {"Identity": 0.9}, predictions=predictions)
        for seed in range(5):
            accuracy = 0.9 + 0.001 * ((seed * 7) % 5)
            finals = {"accuracy_on": accuracy, "accuracy_off": accuracy, "loss_on": 0.6, "loss_off": 0.6}
            write_run(
                folder / f"1-s{seed}",
                seed=seed,
                forward="TopK(0.5)",
                finals=finals,
                predictions=predictions,
                tables=False,
            )
        (row,) = analysis.settings(load(folder)).to_dict("records")
        assert row["verdict"] == verdict
        assert row["harm_low"] < row["harm"] < row["harm_high"] or predictions is None


def test_confirmation_alone_judges_what_was_chosen(tmp_path):
    """Chosen on lucky seeds, which say that it is safe: the fresh ones say otherwise, and they alone count."""
    write_runs(tmp_path, {"Identity": 0.9, "TopK(0.5)": 0.9, "TopK(0.3)": 0.9})
    assert set(analysis.settings(load(tmp_path))["verdict"]) == {"safe"}
    for place, (forward, mean) in enumerate({"Identity": 0.9, "TopK(0.5)": 0.8}.items()):
        for seed in range(5, 10):
            accuracy = mean + 0.001 * (seed % 3)
            finals = {"accuracy_on": accuracy, "accuracy_off": accuracy, "loss_on": 1.5 - mean, "loss_off": 1.5 - mean}
            setting = {} if forward == "Identity" else {"forward": forward, "backward": forward}
            write_run(tmp_path / "confirm" / f"{place}-s{seed}", seed=seed, finals=finals, tables=False, **setting)
    found = analysis.settings(load(tmp_path)).set_index("forward")
    assert found.loc["TopK(0.5)", ["verdict", "seeds", "family"]].tolist() == ["harmful", 5, 1]
    assert found.loc["TopK(0.5)", "chose_on"] == [0, 1, 2, 3, 4]
    assert found.loc["TopK(0.5)", "confirmed_on"] == [5, 6, 7, 8, 9]
    assert found.loc["TopK(0.3)", ["verdict", "lacking"]].tolist() == ["undecided", "its choice was not confirmed"]


def test_selection_seeds_can_only_show_harm(tmp_path):
    """A setting that nobody confirms is harmful where it surely is, and never safe; two families share the error of harm."""
    write_runs(tmp_path, {"Identity": 0.9, "TopK(0.5)": 0.9, "TopK(0.3)": 0.9, "TopK(0.01)": 0.2})
    alone = analysis.settings(load(tmp_path)).set_index("forward")
    for forward in ("Identity", "TopK(0.5)"):
        for seed in range(5, 10):
            finals = {"accuracy_on": 0.9, "accuracy_off": 0.9, "loss_on": 0.6, "loss_off": 0.6}
            setting = {} if forward == "Identity" else {"forward": forward, "backward": forward}
            write_run(tmp_path / "confirm" / f"{forward}-s{seed}", seed=seed, finals=finals, tables=False, **setting)
    found = analysis.settings(load(tmp_path)).set_index("forward")
    assert found["verdict"].to_dict() == {"TopK(0.5)": "safe", "TopK(0.3)": "undecided", "TopK(0.01)": "harmful"}
    assert found["lacking"].to_dict() == {
        "TopK(0.5)": "",
        "TopK(0.3)": "its choice was not confirmed",
        "TopK(0.01)": "",
    }
    assert found["confirmed_on"].map(len).to_dict() == {"TopK(0.5)": 5, "TopK(0.3)": 0, "TopK(0.01)": 0}
    assert found.loc["TopK(0.01)", "harm_low"] < alone.loc["TopK(0.01)", "harm_low"]


@pytest.mark.parametrize("family", [1, 10])
def test_choice_and_confirmation_keep_harmful_error_rate(family):
    """All settings harm by exactly the margin: the candidates, and the best candidate on fresh seeds."""
    rng, tries, hits = np.random.default_rng(family), 200, 0
    for _ in range(tries):
        first = _family(rng, family, 5, 0.4)
        fresh = _family(rng, family, 5, 0.4)[first.mean(axis=1).argmin()][None]
        for harms in (first, fresh):
            drawn = [sample(dict(enumerate(row)), plan=range(5), step=STEP) for row in harms]
            found = judge(drawn, [MARGIN] * len(drawn), ALPHA, alpha_above=ALPHA / 2)
            hits += any(one.where == "above" for one in found)
    assert hits / tries < ALPHA * PLANNED + 3 * sigma(ALPHA * PLANNED, tries)
