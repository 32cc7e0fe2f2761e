"""The plan of a race: costs counted by hand, and draws of harm that agree with what a race has seen."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from raysim.analysis.comparison import race_plan
from raysim.analysis.comparison.harm_forecast import Observation
from raysim.analysis.comparison.race import DEVIATION, Evidence, Race
from raysim.analysis.comparison.race_plan import FreshStanding, RacePlan, Simulated, Standing, best, simulate_races

DRAWS = 3000


def test_smaller_budget_reduces_runs_and_chances():
    answered = {3: [2.0, 4.0, 4.1, math.inf], 5: [3.0, 4.5, 5.0, math.inf]}
    plans = Simulated(2, answered, {3: [2.0, 6.0, 7.0, 4.0], 5: [9.0, 10.0, 11.0, 12.0]}).within(400.0, 100.0)
    assert plans == {3: RacePlan(2, 3, 400.0, 3.5, 350.0, 0.5), 5: RacePlan(2, 5, 400.0, 4.0, 400.0, 0.25)}


@pytest.mark.parametrize(
    ("chances", "settings", "seeds"),
    [
        ({(8, 3): 0.5, (8, 5): 0.94, (8, 8): 0.96, (8, 13): 1.0}, 8, 8),  # fewest seeds within 5 % of the best
        ({(8, 3): 0.5, (4, 3): 0.96, (4, 5): 0.97, (2, 3): 1.0}, 4, 3),  # most settings before fewest seeds
        ({(8, 3): 0.0, (4, 3): 0.0, (1, 3): 0.0, (1, 5): 0.0}, 1, 3),  # no chance: as near to one as possible
    ],
)
def test_best_plan_has_most_settings_then_fewest_seeds_within_5_percent_of_best_chance(chances, settings, seeds):
    plan = best(RacePlan(count, each, 0.0, 0.0, 0.0, chance) for (count, each), chance in chances.items())
    assert (plan.settings, plan.seeds) == (settings, seeds)


@dataclass(frozen=True)
class Known(Standing):
    """A race whose final harms are given."""

    harms: dict[str, float] = field(default_factory=dict)

    def draw(self, race, rng):
        return self.harms, self.harms


def played(monkeypatch, known, *, spread=1e-6, seeds=5, margin=1.0):
    """Return until when a race of two first seeds is trained for an answer, and in all."""
    monkeypatch.setattr(race_plan, "COUNT", 1)
    found = simulate_races(Race(9, margin, len(known.running)), known, spread=spread, seeds=[seeds])
    return found.answered[seeds][0], found.total[seeds][0]


def test_runs_of_a_plan_are_counted_by_their_costs_and_parts(monkeypatch):
    """Five seeds of the fastest setting to the end and two of the next one; dense on as many seeds, as far as it lacks them."""
    seen = Observation((0.0, 0.0), 0.0)
    fresh = {name: Evidence(float(i)) for i, name in enumerate("ab")}
    harms = {"a": 0.0, "b": 0.0}
    new = Known(fresh, list("ab"), {"a": 1.0, "b": 3.0}, harms=harms)
    assert played(monkeypatch, new) == (pytest.approx(5 * 1 + 2 * 3 + 5),) * 2
    begun = {name: each._replace(observed=(seen, seen)) for name, each in fresh.items()}  # up to a fifth
    half = Known(begun, list("ab"), {"a": 1.0, "b": 3.0}, dense=2, harms=harms)
    assert played(monkeypatch, half) == (pytest.approx(5 * 1 + 2 * 3 - 0.2 * 2 * (1 + 3) + 3),) * 2
    starting = Known(
        fresh, list("ab"), {"a": 1.0, "b": 3.0}, start=0.25, harms=harms
    )  # a: 5 parts of 2 seeds, 2 of one
    assert played(monkeypatch, starting)[0] == pytest.approx(0.75 * (5 + 2 * 3) + 0.25 * (2 * 5 * (1 + 3) + 3) + 5)
    alone = Known(begun, ["b"], {"b": 3.0}, dense=9, harms={"b": 0.0})
    assert played(monkeypatch, alone) == (pytest.approx(5 * 3 - 0.2 * 2 * 3),) * 2


def test_race_of_harmful_settings_trains_little_and_recommends_none(monkeypatch):
    harmful = Known({"a": Evidence(0.0)}, ["a"], {"a": 1.0}, harms={"a": 60.0})
    answered, total = played(monkeypatch, harmful)
    assert math.isinf(answered)
    assert total < 2 * 0.4 + 2 + 1e-9


def test_simulated_harms_include_forecast_error():
    """Two settings of a job: the logarithms of harm over forecast have the mean, the spread and the correlation of `DEVIATION`."""
    early, last = Observation((90.0, 93.0), 90.0), Observation((29.0, 31.0), 30.0)
    evidence = {name: Evidence(1.0, (early, last)) for name in "ab"}
    standing, race, rng = Standing(evidence, ["a", "b"], {}), Race(5, 1.0, 2), np.random.default_rng(0)
    harms, forecasts = (
        np.array([list(each.values()) for each in drawn])
        for drawn in zip(*(standing.draw(race, rng) for _ in range(DRAWS)), strict=True)
    )
    tolerance = 4 / math.sqrt(DRAWS)
    assert np.mean(forecasts[:, 0]) == pytest.approx(30, abs=tolerance)
    assert np.std(forecasts[:, 0]) == pytest.approx(1, rel=tolerance)  # of two harms with a variance of 2
    off = np.log(harms / forecasts)
    spread = math.hypot(DEVIATION.between, DEVIATION.within)
    assert off.mean(axis=0) == pytest.approx([DEVIATION.mean] * 2, abs=tolerance)
    assert off.std(axis=0) == pytest.approx([spread] * 2, rel=tolerance)
    assert np.corrcoef(off.T)[0, 1] == pytest.approx((DEVIATION.between / spread) ** 2, abs=tolerance)


def test_race_prior_has_one_third_harmless_settings():
    race, rng, ratios = Race(5, 2.0, 6), np.random.default_rng(0), []
    for _ in range(DRAWS // 3):
        harms, forecasts = FreshStanding(6).draw(race, rng)
        assert sum(harm <= 1.0 for harm in harms.values()) == 2
        assert all(harm <= 1.0 or 3.0 <= harm <= 60.0 for harm in harms.values())
        ratios.append([math.log(harms[name] / forecasts[name]) for name in harms])
    some = [sum(harm <= 1.0 for harm in FreshStanding(3).draw(race, rng)[0].values()) for _ in range(DRAWS // 3)]
    assert np.mean(some) == pytest.approx(1, abs=0.1)  # of two in six; the standard deviation is 0.63
    assert set(some) == {0, 1, 2}
    tolerance = 4 / math.sqrt(DRAWS // 3)
    assert np.mean(ratios) == pytest.approx(DEVIATION.mean, abs=tolerance)
    assert np.corrcoef(np.array(ratios).T)[0, 1] == pytest.approx(0.5, abs=tolerance)
