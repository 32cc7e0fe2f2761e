"""The race: forecasts of harm, and the decisions on them."""

from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from raysim.analysis.comparison.harm_forecast import Observation, delayed_harm, observe, training_harm
from raysim.analysis.comparison.race import DEVIATION, RUNGS, Evidence, Race, deviation_of
from raysim.analysis.comparison.statistics import bounds
from raysim.quality import MEASURES

ACCURACY, LOSS = MEASURES["accuracy"], MEASURES["loss"]
CHANCES = {"loss": np.log(10), "accuracy": 0.1}
STEPS = 1000
CURVE = 0.3 + 2.0 * np.exp(-np.arange(STEPS) / 300)


def test_a_classifier_at_chance_has_lost_all_its_points():
    assert training_harm(ACCURACY, [np.log(10)], [0.0], CHANCES) == pytest.approx(90.0)
    assert training_harm(ACCURACY, [1e6], [0.0], CHANCES) == pytest.approx(90.0)
    assert training_harm(LOSS, [1.5, 1.5], [1.0, 1.0], CHANCES) == pytest.approx(50.0)


def test_one_seed_far_beyond_chance_leaves_a_setting_surely_harmful():
    runs = [np.full(STEPS, loss) for loss in (4.0, 400.0)]
    seen = observe(ACCURACY, runs, [CURVE] * 2, STEPS // 2, CHANCES)
    race = Race(3, ACCURACY.margin, 1)
    assert [left.kind for left in race.exits({"far": Evidence(1.0, (seen,))}).values()] == ["harmful"]


@pytest.mark.parametrize("measure", MEASURES.values(), ids=MEASURES)
def test_equal_losses_are_no_harm_and_higher_ones_are(measure):
    assert training_harm(measure, CURVE, CURVE, CHANCES) == 0
    assert training_harm(measure, CURVE + 0.1, CURVE, CHANCES) > 0


@given(st.floats(0.3, 1.0), st.integers(100, STEPS))
def test_a_pure_delay_is_carried_to_the_end(share, step):
    """A setting that is always at `share` of the steps of dense ends at that share."""
    late = np.interp(share * np.arange(STEPS), np.arange(STEPS), CURVE)
    latter = slice(step // 2, step)
    forecast = delayed_harm(LOSS, float(np.mean(late[latter]) - np.mean(CURVE[latter])), CURVE, step, CHANCES)
    truth = training_harm(LOSS, late[int(0.8 * STEPS) :], CURVE[int(0.8 * STEPS) :], CHANCES)
    assert forecast == pytest.approx(truth, rel=0.15, abs=0.5)


@given(st.integers(2, STEPS), st.floats(0, 2), st.floats(0, 2))
def test_more_behind_is_no_less_harm(step, one, other):
    less, more = (delayed_harm(LOSS, behind, CURVE, step, CHANCES) for behind in sorted((one, other)))
    assert 0 <= less <= more


def test_the_least_forecast_counts():
    early, late = (observe(ACCURACY, [1.05 * CURVE] * 2, [CURVE] * 2, steps, CHANCES) for steps in (100, 500))
    assert early.forecast == fmean(early.harms) < early.delayed
    assert late.forecast == late.delayed < fmean(late.harms)


def run_race(race, truth, forecast, final):
    """Run a race to its end; return the exits, and the parts in order."""
    evidence = {name: Evidence(step_s=i) for i, name in enumerate(truth)}
    left, order = {}, []
    for parts in race.rounds(evidence, left):
        for part in parts:
            order.append(part)
            each = evidence[part.setting]
            if part.rung < len(RUNGS) - 1:
                seen = forecast(part.setting, part.rung, len(part.seeds))
                evidence[part.setting] = each._replace(observed=(*each.observed, seen))
            else:
                harms = tuple(final(part.setting, seed) for seed in part.seeds)
                evidence[part.setting] = each._replace(final=(*each.final, *harms))
    return left, order, evidence


def noisy(rng, truth, spread, ratios):
    """Return forecasts and final harms of settings: each forecast is off by the setting's ratio, each seed by `spread`."""

    def forecast(name, rung, seeds):
        mean = truth[name] / np.exp(ratios[name])
        harms = tuple(mean + spread * rng.standard_normal(seeds))
        return Observation(harms, float(np.mean(harms)))

    return forecast, lambda name, seed: truth[name] + spread * rng.standard_normal()


def simulate(truths, *, count=60, seeds=5, spread=0.2):
    """Return the kinds of exit of all settings of `count` simulated races, None for those that trained on all seeds."""
    kinds = []
    for number in range(count):
        rng = np.random.default_rng(number)
        truth = {f"s{i}": harm for i, harm in enumerate(truths)}
        job = DEVIATION.mean + DEVIATION.between * rng.standard_normal()
        ratios = {name: job + DEVIATION.within * rng.standard_normal() for name in truth}
        race = Race(seeds, margin=1.0, family=len(truth))
        left = run_race(race, truth, *noisy(rng, truth, spread, ratios))[0]
        kinds += [left[name].kind if name in left else None for name in truth]
    return kinds


def test_settings_at_the_margin_are_rarely_called_harmful():
    kinds = simulate([1.0] * 6)
    assert kinds.count("harmful") <= 0.05 * len(kinds)


def test_settings_of_great_harm_leave_and_harmless_ones_stay():
    assert set(simulate([30.0] * 4)) <= {"harmful", "hopeless"}
    kinds = simulate([0.0] * 4, spread=0.1)
    assert kinds.count("harmful") == 0
    assert kinds.count("hopeless") <= 0.05 * len(kinds)


def test_parts_of_a_setting_are_in_order_and_train_no_seed_twice():
    truth = {"a": 0.1, "b": 0.9, "c": 9.0}
    rng = np.random.default_rng(0)
    _, order, _ = run_race(Race(8, 1.0, 3), truth, *noisy(rng, truth, 0.2, dict.fromkeys(truth, 0.0)))
    for name in truth:
        parts = [part for part in order if part.setting == name]
        early = [part.rung for part in parts if part.rung < len(RUNGS) - 1]
        assert early == list(range(len(early)))
        ended = [seed for part in parts if part.rung == len(RUNGS) - 1 for seed in part.seeds]
        assert ended == list(range(len(ended)))


def test_slower_settings_leave_once_a_faster_one_is_safe():
    truth = dict.fromkeys(("fastest", "second", "third", "fourth"), 0.0)
    rng = np.random.default_rng(0)
    left, order, evidence = run_race(Race(5, 1.0, 4), truth, *noisy(rng, truth, 0.01, dict.fromkeys(truth, 0.0)))
    assert len(evidence["fastest"].final) == 5
    assert {name: left[name].kind for name in ("third", "fourth")} == {"third": "slower", "fourth": "slower"}
    assert max(part.rung for part in order if part.setting == "fourth") < len(RUNGS) - 1


@given(st.randoms(use_true_random=False))
def test_decisions_do_not_depend_on_the_order_of_evidence(random):
    rng = np.random.default_rng(random.randrange(2**32))
    evidence = {}
    for name in "abcdef":
        seen = [Observation(tuple(rng.normal(2, 2, 2)), float(rng.uniform(0, 9))) for _ in range(rng.integers(1, 5))]
        evidence[name] = Evidence(rng.uniform(), tuple(seen), tuple(rng.normal(1, 1, 2)) if len(seen) == 4 else ())
    names = list(evidence)
    random.shuffle(names)
    race, other = Race(5, 1.0, 6), {name: evidence[name] for name in names}
    assert race.exits(evidence) == {name: race.exits(other)[name] for name in evidence if name in race.exits(other)}
    assert race.next_parts(evidence, list(evidence)) == race.next_parts(other, names)


def test_forecasts_are_learned_from_settings_that_have_finished():
    seen = Observation((4.0, 4.1), 4.0)
    ended = {f"s{i}": Evidence(1.0, (seen,), (1.0, 1.0)) for i in range(20)}
    learned = deviation_of(0, ended)
    assert learned.mean == pytest.approx(np.log(1 / 4), abs=0.1)
    assert learned.between < DEVIATION.between
    assert deviation_of(0, {}).mean == DEVIATION.mean


@pytest.mark.parametrize(("seeds", "share"), [(5, 1 / 2), (8, 1 / 4), (13, 1 / 6), (21, 1 / 12)])
@pytest.mark.parametrize("family", [1, 6])
def test_a_look_after_five_planned_seeds_has_its_share_of_the_error_alone(seeds, share, family):
    """A setting is safe exactly if the bound at 5 % of its share, among the whole family, lies below the margin."""
    drawn = 0.3 * np.random.default_rng(seeds).standard_normal(seeds)
    race = Race(seeds, 1.0, family, planned=None if seeds == 5 else 5)
    assert race.share == pytest.approx(share)
    edge = 1.0 - bounds(drawn, 1 - 0.05 * share / family).high
    for shift, found in ((edge - 1e-6, ["a"]), (edge + 1e-6, [])):
        others = {f"left {i}": Evidence(0.5, (Observation((9.0, 9.0), 9.0),)) for i in range(family - 1)}
        assert race.safe({"a": Evidence(1.0, final=tuple(drawn + shift)), **others}) == found


def test_seeds_between_two_looks_count_for_nothing():
    race = Race(8, 1.0, 1, planned=5)
    fine, bad = (0.1, 0.0, 0.2, 0.1, 0.0), (3.0, 4.0)
    assert race.safe({"a": Evidence(1.0, final=fine)}) == race.safe({"a": Evidence(1.0, final=fine + bad)}) == ["a"]
    assert race.safe({"a": Evidence(1.0, final=(*fine, *bad, 5.0))}) == []
    assert Race(5, 1.0, 1).safe({"a": Evidence(1.0, final=fine[:4])}) == []


def test_a_setting_with_more_seeds_than_a_shortened_plan_has_had_its_verdict():
    seen = (Observation((9.0, 9.1), 9.0),) * 4
    for seeds, kinds in ((9, ["harmful"]), (5, []), (3, [])):
        exits = Race(seeds, 1.0, 2).exits({"a": Evidence(1.0, seen, (9.0, 9.2, 8.9, 9.1, 9.0))})
        assert [reason.kind for reason in exits.values()] == kinds
    near = (1.05, 0.95, 1.05, 0.95, 1.05)  # neither safe nor surely harmful
    for seeds, kinds in ((8, ["hopeless"]), (5, []), (3, [])):
        exits = Race(seeds, 1.0, 2).exits({"a": Evidence(1.0, seen, near)})
        assert [reason.kind for reason in exits.values()] == kinds


@pytest.mark.parametrize(("planned", "seeds", "family"), [(5, 5, 1), (5, 8, 1), (5, 8, 10), (3, 21, 4)])
def test_the_chance_of_safe_is_certain_once_all_but_the_verdict_is_known(planned, seeds, family):
    """With the last seed known, a mean at the rule's bound for this look and family divides 1 from 0."""
    drawn = 0.3 * np.random.default_rng(seeds).standard_normal(seeds)
    race = Race(seeds, 1.0, family, planned=planned)
    share = {5: 0.5, 8: 0.25, 21: 0.5 / 9}[seeds]
    half = stats.t.isf(0.05 * share / family, seeds - 1) * drawn.std(ddof=1) / np.sqrt(seeds)
    for shift, chance in ((-0.01, 1.0), (0.01, 0.0)):
        each = Evidence(1.0, (Observation((0.0, 0.0), 0.0),) * 4, tuple(drawn - drawn.mean() + 1.0 - half + shift))
        assert race.chance_safe(each, {"a": each}) == chance


def test_settings_of_equal_speed_stay_once_one_is_safe():
    seen = (Observation((0.1, 0.1), 0.1),)
    safe = Evidence(2.0, seen * 4, (0.1, 0.0, 0.2, 0.1, 0.0))
    exits = Race(5, 1.0, 3).exits({"safe": safe, "alike": Evidence(2.0, seen), "slower": Evidence(2.1, seen)})
    assert {name: reason.kind for name, reason in exits.items()} == {"slower": "slower"}
