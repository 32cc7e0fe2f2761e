"""The rule's errors by simulation: settings at the margin are rarely called safe, whatever the shape of their differences."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdict_rates import (
    FAMILIES,
    LEVEL,
    SEEDS,
    SHAPES,
    diverging_rate,
    false_rate,
    job,
    looked_rate,
    p_values,
    rejected,
    safe_share,
)

from raysim.analysis.comparison.statistics import ALONE, MOST, bounds, holm, p_value, priors, similar

REQUIRED = {"normal": 0.05, "t(3)": 0.05, "skewness 1": 0.05, "skewness 2": 0.07}
"""Most errors by shape. The nominal rate of a plan is 2.5 %."""
FAST, SLOW = 2_000, 60_000


def within(rate, most, tries):
    return rate < most + 3 * math.sqrt(most * (1 - most) / tries)


def by_turns(shapes, families):
    """Return shapes, numbers of settings and of seeds, each with noise that settings share or, by turns, without."""
    grid = itertools.product(shapes, families, SEEDS)
    return [(*case, shared) for case, shared in zip(grid, itertools.cycle((False, True)), strict=False)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("shape", REQUIRED)
@pytest.mark.parametrize("settings", FAMILIES)
def test_few_settings_at_the_margin_are_called_safe(settings, shape, shared):
    assert within(false_rate(shape, settings, 3, FAST, shared=shared), REQUIRED[shape], FAST)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "settings", "seeds", "shared"), by_turns(REQUIRED, FAMILIES))
def test_settings_at_the_margin_are_called_safe_no_more_often_than_stated(shape, settings, seeds, shared):
    tries = SLOW // settings
    assert within(false_rate(shape, settings, seeds, tries, shared=shared), REQUIRED[shape], tries)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "settings", "seeds", "shared"), by_turns(("normal", "t(3)", "skewness 1"), (2, 5, 20))
)
def test_settings_of_different_spread_are_called_safe_no_more_often(shape, settings, seeds, shared):
    tries = SLOW // settings
    assert within(false_rate(shape, settings, seeds, tries, shared=shared, varied=True), 0.05, tries)


@pytest.mark.slow
@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("settings", FAMILIES)
@pytest.mark.parametrize("shape", REQUIRED)
def test_settings_at_the_margin_are_called_harmful_no_more_often_than_stated(shape, settings, seeds):
    tries = SLOW // settings
    assert within(false_rate(shape, settings, seeds, tries, side="above", varied=True), 0.035, tries)


def test_pooled_spread_of_many_settings_needs_fewer_seeds():
    plain = {"moderated": False, "guarded": False}
    for settings, seeds, least in ((20, 3, 0.8), (5, 3, 0.85), (20, 5, 0.97)):
        now = safe_share(0.22, settings, seeds, 300)
        assert now > max(least, safe_share(0.22, settings, seeds, 300, **plain))


@given(st.integers(2, 12), st.integers(2, 8), st.integers(0, 2**32))
def test_borrowed_spread_is_independent_of_order_and_unit(settings, seeds, seed):
    rng = np.random.default_rng(seed)
    harms: Any = rng.normal(0, 0.3, (settings, seeds))
    found = priors(harms, [0.01] * settings, 0.5)
    turned = priors(harms[::-1], [0.01] * settings, 0.5)[::-1]
    scaled = priors(1000 * harms, [10.0] * settings, 500.0)
    for one, other, large in zip(found, turned, scaled, strict=True):
        assert one == pytest.approx(other)
        assert large == pytest.approx(one._replace(variance=1e6 * one.variance if one != ALONE else 1.0))
        assert 0 <= one.freedom <= MOST


@given(st.integers(2, 20), st.integers(3, 8), st.integers(0, 2**32))
def test_borrowed_spread_never_narrows_observed_error(settings, seeds, seed):
    """Borrowing adds degrees of freedom; it takes nothing from the spread of the setting itself."""
    harms: Any = np.random.default_rng(seed).normal(0, 0.3, (settings, seeds))
    for values, prior in zip(harms, priors(harms, [0.0] * settings, 0.5), strict=True):
        alone, borrowed = bounds(values, 0.5 + 1e-9), bounds(values, 0.975, 0.0, prior)
        assert borrowed.high >= borrowed.mean == alone.mean
        assert borrowed.high - borrowed.mean >= 1.96 * values.std(ddof=1) / math.sqrt(seeds)


def test_extreme_and_dense_like_settings_do_not_share_spread():
    rng = np.random.default_rng(0)
    near: Any = rng.normal(0, 0.2, (5, 5))
    harmful: Any
    exact: Any
    single: Any
    harmful, exact, single = rng.normal(30, 9, 5), rng.normal(0, 1e-6, 5), np.array([0.1])
    found = priors([*near, harmful, exact, single], [0.0] * 8, 1.0)
    assert found[5:] == [ALONE] * 3 or ((found[5], found[7]) == (ALONE, ALONE) and found[6].freedom == 0)
    assert all(prior.freedom > 0 for prior in found[:5])
    assert found[:5] == priors([*near, exact], [0.0] * 6, 1.0)[:5]
    assert priors([near[0], harmful], [0.0] * 2, 1.0) == [ALONE] * 2
    assert not similar(np.array([np.nan, 5.1, -3.1]), 1.0).any()


def test_other_seeds_lend_spread():
    rng = np.random.default_rng(0)
    choices: Any
    confirmed: Any
    choices, confirmed = rng.normal(0, 0.2, (6, 4)), rng.normal(0, 0.2, (1, 5))
    (alone,) = priors(confirmed, [0.0], 1.0)
    (lent,) = priors(confirmed, [0.0], 1.0, [(values, 0.0) for values in choices])
    assert alone == ALONE
    assert lent.freedom > 2
    assert p_value(confirmed[0], 1.0, "below", 0.0, lent) < p_value(confirmed[0], 1.0, "below")


def test_simulation_matches_rule():
    """Vectorised as above, and by the functions that give verdicts."""
    rng = np.random.default_rng(0)
    for harms in 0.3 * job(rng, "normal", 5, 6, 4, shared=True, varied=True):
        p = p_values(harms[None], 1.0)[0]
        borrowed = priors(harms, [0.0] * 6, 1.0)
        assert p == pytest.approx(
            [p_value(row, 1.0, "below", 0.0, each) for row, each in zip(harms, borrowed, strict=True)]
        )
        levels = holm(list(p), LEVEL)
        assert list(rejected(p[None], LEVEL)[0]) == [value < level for value, level in zip(p, levels, strict=True)]


def test_simulated_shapes_are_standardised():
    for name, shape in SHAPES.items():
        drawn = shape(np.random.default_rng(0), 400_000)
        assert drawn.mean() == pytest.approx(0, abs=0.01)
        assert name == "t(3)" or drawn.std() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize(
    ("settings", "seeds", "low", "high"), [(1, 5, 0.54, 0.64), (1, 16, 0.14, 0.23), (5, 8, 0.9, 0.97)]
)
def test_unobserved_divergence_is_called_safe_at_documented_rate(settings, seeds, low, high):
    assert low < diverging_rate(settings, seeds, 1000) < high


@pytest.mark.parametrize(
    ("shape", "settings", "most"), [("normal", 1, 0.05), ("skewness 1", 1, 0.075), ("skewness 2", 5, 0.14)]
)
def test_interim_analyses_have_documented_error_rate(shape, settings, most):
    assert looked_rate(shape, settings, 5, 1500) < most
