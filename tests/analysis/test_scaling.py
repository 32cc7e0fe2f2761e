"""Laws of size: published harms held out, coverage in simulated families, and limits."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from raysim import scaling
from raysim.scaling import LEVEL, HeldOut, Laws, Series, held_out, reach

ROUNDING = 0.1 / math.sqrt(12)  # of published harms
MARGIN = 1.0
LAWS = {
    "none": lambda t: np.ones_like(t),
    "power": lambda t: np.exp(-0.3 * t),
    "rising power": lambda t: np.exp(0.15 * t),
    "saturating": lambda t: 0.5 + 0.5 * np.exp(-0.5 * t),
    "linear in the logarithm": lambda t: 1 - 0.2 * t,
}


def published():
    """Return the published harms of DiLoCo by number of replicas, as logarithms of sizes and harms."""
    path = Path(__file__).parents[2] / "docs" / "measurements" / "local-steps-by-size.csv"
    frame = pd.read_csv(path, comment="#")
    return [(np.log(own["parameters"].to_numpy()), own["harm"].to_numpy()) for _, own in frame.groupby("replicas")]


def series(sizes, harms, errors):
    return Series(np.asarray(sizes, float)[:, None], np.asarray(harms, float), np.broadcast_to(errors, np.shape(harms)))


def published_beyond_550_million():
    """Return the harms carried from sizes up to 550 M to larger ones, each with the published harm."""
    tables = published()
    laws = Laws([series(sizes[:5], harms[:5], ROUNDING) for sizes, harms in tables], MARGIN)
    return [
        (laws.at(i, np.array([size])), harm)
        for i, (sizes, harms) in enumerate(tables)
        for size, harm in zip(sizes[5:], harms[5:], strict=True)
    ]


def spans_beyond_550_million():
    return [each.both.high - each.both.low for each, _ in published_beyond_550_million()]


def test_published_harms_up_to_550_million_predict_those_from_1_3_to_10_billion():
    cells = published_beyond_550_million()
    carried = [each for each, _ in cells]
    assert len(cells) == 14
    assert all(each.both.holds(harm) for each, harm in cells)
    assert all(each.weight > 0.95 for each in carried)  # a law without size misses eight replicas by a half
    assert max(each.both.high - each.both.low for each in carried) == pytest.approx(0.986, rel=0.01)  # points


@pytest.mark.slow
def test_finer_cells_and_grids_move_bounds_by_less_than_one_per_cent(monkeypatch):
    spans = spans_beyond_550_million()
    for name in ("_DRIFTS", "_SCATTERS"):
        low, high, cells = getattr(scaling, name)
        monkeypatch.setattr(scaling, name, (low, high, cells * 3 // 2))
    monkeypatch.setattr(scaling, "_MOST", scaling._MOST / 2)
    monkeypatch.setattr(scaling, "_LEAST", scaling._LEAST / 10)
    assert spans_beyond_550_million() == pytest.approx(spans, rel=0.01)


def test_published_harms_are_held_out_within_the_study():
    tables = published()
    predictions = list(held_out([series(sizes[:5], harms[:5], ROUNDING) for sizes, harms in tables], MARGIN))
    assert len(predictions) == 4 * (2 + 1)
    assert sum(each.holds for each in predictions) >= 0.8 * len(predictions)
    assert reach(predictions) == pytest.approx(math.log(550 / 180))


@pytest.mark.slow
@pytest.mark.parametrize(("families", "least", "most", "of_each"), [(5, 0.8, 1.0, 0.5), (24, 0.85, 0.97, 0.75)])
def test_bounds_hold_as_often_as_they_say(families, least, most, of_each):
    random = np.random.default_rng(5)
    sizes = np.linspace(11, 13.5, 5)
    inside = {"all": [], **{name: [] for name in LAWS}}
    for name, law in LAWS.items():
        for _ in range(families):
            levels = random.choice([1.0, 2.0, 4.0], 2)
            errors = [(0.1 + 0.08 * level) / math.sqrt(3) for level in levels]
            drifts = [0.08 * level * np.cumsum(np.r_[0, random.standard_normal(5)]) for level in levels]
            true = [level * law(np.r_[sizes, 14.8] - 11) + drift for level, drift in zip(levels, drifts, strict=True)]
            seen = [
                series(sizes, harm[:5] + error * random.standard_normal(5), error)
                for harm, error in zip(true, errors, strict=True)
            ]
            laws = Laws(seen, MARGIN)
            held = [laws.at(i, np.array([14.8])).both.holds(harm[5]) for i, harm in enumerate(true)]
            inside[name] += held
            inside["all"] += held
    assert least <= np.mean(inside.pop("all")) <= most
    assert min(np.mean(held) for held in inside.values()) > of_each


def test_harms_without_noise_are_found_again():
    sizes = np.log([1e5, 3e5, 1e6, 3e6])
    power, flat = (8 * np.exp(-0.3 * (sizes - sizes[0])), np.full(4, 2.0))
    carried = Laws([series(sizes, power, 0.01)], MARGIN).at(0, np.log([1e7]))
    assert carried.both.harm == pytest.approx(8 * 100**-0.3, rel=0.1)
    assert carried.exponent == pytest.approx(0.3, abs=0.05)
    constant = Laws([series(sizes, flat, 0.01)], MARGIN).at(0, np.log([1e7]))
    assert constant.both.harm == pytest.approx(2, rel=0.05)
    assert constant.weight < 0.5
    assert not constant.disagree


def test_bounds_widen_with_distance():
    sizes, harms = published()[3]
    laws = Laws([series(sizes[:5], harms[:5], ROUNDING)], MARGIN)
    widths = [
        interval.high - interval.low
        for interval in (laws.at(0, np.array([sizes[4] + distance])).both for distance in (0.0, 1.0, 2.0, 4.0))
    ]
    assert widths == sorted(widths)


def test_unit_of_size_does_not_matter():
    sizes, harms = published()[2]
    moved = [
        Laws([series(sizes[:5] + shift, harms[:5], 0.1)], MARGIN).at(0, np.array([22 + shift])) for shift in (0, 7)
    ]
    assert moved[0].both == pytest.approx(moved[1].both)


def test_reach_is_the_longest_distance_at_which_four_of_five_hold():
    inside, outside = 0.5, (1 - LEVEL) / 4
    held = [HeldOut(0, distance, inside) for distance in (1, 1, 2, 2)]
    assert reach(held) == 2
    assert reach([*held, HeldOut(0, 3, outside)]) == 3
    assert reach([*held, HeldOut(0, 3, outside), HeldOut(0, 3, outside)]) == 2
    assert reach([HeldOut(0, 1, outside)]) == 0
    assert reach([]) == 0
