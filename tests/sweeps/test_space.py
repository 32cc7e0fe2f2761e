"""Laws of spaces: what is drawn is what the grammar says, every time; a grid is all of it, once."""

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import FixedTrial

from raysim.compressors import parse
from raysim.config import ConfigError
from raysim.sweeps.space import Space, grid_points, random_points

KEYS = {
    "forward": {"none": "{codec}", "EF": "ErrorFeedback({codec}, key='{key}')"},
    "backward": ["Identity", "{codec}"],
    "num_microbatches": [2, 4],
    "shared_indices": False,
    "optimizer.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True},
}
SYMBOLS = {
    "codec": ["TopK({density})", "Quantize({bits})"],
    "density": {"low": 0.01, "high": 0.5, "log": True},
    "bits": {"low": 2, "high": 8},
    "key": ["slot", "link"],
}


def test_only_active_parameters_are_drawn():
    for params, overrides in random_points(Space(KEYS, SYMBOLS), 60):
        assert ("forward.key" in params) == (params["forward"] == "EF")
        assert ("forward.density" in params) == (params["forward.codec"] == "TopK({density})")
        assert ("backward.codec" in params) == (params["backward"] == "{codec}")
        assert overrides.keys() == KEYS.keys()
        assert overrides["shared_indices"] is False
        parse(overrides["forward"])
        parse(overrides["backward"])


@given(st.integers(0, 2**31 - 1))
def test_parameters_draw_the_same_again(seed):
    """So that rows of a study suffice to go on with it."""
    space = Space(KEYS, SYMBOLS)
    trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed)).ask()
    drawn = space(trial)
    again = FixedTrial(dict(trial.params))
    assert space(again) == drawn
    assert set(again.distributions) == set(trial.params)


def test_numbers_from_ranges_are_written_short_and_from_lists_as_they_are():
    space = Space({"forward": "TopK({density})"}, {"density": {"low": 0.01, "high": 0.5}})
    assert space(FixedTrial({"forward.density": 0.0123456}))["forward"] == "TopK(0.0123)"
    space = Space({"forward": "TopK({density})"}, {"density": [0.0123456, 0.5]})
    assert space(FixedTrial({"forward.density": 0.0123456}))["forward"] == "TopK(0.0123456)"


def test_symbol_may_repeat_in_every_key():
    space = Space({"forward": "TopK({.density})", "backward": "EF21(TopK({.density}))"}, {"density": [0.5, 0.1]})
    assert [space(FixedTrial(point)) for point in grid_points(space)] == [
        {"forward": "TopK(0.5)", "backward": "EF21(TopK(0.5))"},
        {"forward": "TopK(0.1)", "backward": "EF21(TopK(0.1))"},
    ]


def test_boundaries_may_be_drawn_separately():
    space = Space({"forward": {"each": ["Identity", "Quantize({bits})"]}, "num_stages": [2, 3]}, {"bits": [2, 8]})
    grid = grid_points(space)
    assert len(grid) == 3 + 9  # one boundary, or two
    assert {len(space(FixedTrial(point))["forward"]) for point in grid} == {1, 2}
    assert {"num_stages": 3, "forward.0": "Identity", "forward.1": "Quantize({bits})", "forward.1.bits": 8} in grid


def test_variants_choose_sets_of_keys():
    space = Space(
        {
            "schedule": "GPipe",
            "variants": {
                "apart": {"backward": ["Identity", "Quantize(8)"]},
                "shared": {"forward": "TopK(0.1)", "shared_indices": True},
            },
        }
    )
    assert [(point, space(FixedTrial(point))) for point in grid_points(space)] == [
        ({"variant": "apart", "backward": "Identity"}, {"schedule": "GPipe", "backward": "Identity"}),
        ({"variant": "apart", "backward": "Quantize(8)"}, {"schedule": "GPipe", "backward": "Quantize(8)"}),
        ({"variant": "shared"}, {"schedule": "GPipe", "forward": "TopK(0.1)", "shared_indices": True}),
    ]


def test_grid_has_every_point_once():
    keys = {name: spec for name, spec in KEYS.items() if name != "optimizer.learning_rate"}
    space = Space(keys, {**SYMBOLS, "density": {"low": 0.1, "high": 0.5, "step": 0.2}, "bits": {"low": 2, "high": 3}})
    grid = grid_points(space)
    codecs = 3 + 2
    assert len(grid) == (codecs + 2 * codecs) * (1 + codecs) * 2
    assert len({tuple(sorted(point.items())) for point in grid}) == len(grid)
    assert {point.get("forward.density") for point in grid} == {None, 0.1, 0.3, 0.5}


@given(st.integers(-50, 50), st.integers(1, 40), st.integers(1, 30), st.integers(0, 3))
def test_points_of_a_range_are_the_decimals_up_to_its_end(low, step, count, places):
    low, step, high = (value / 10**places for value in (low, step, low + step * count))
    grid = grid_points(Space({"x": {"low": float(low), "high": float(high), "step": step}}))
    assert [point["x"] for point in grid] == [round(low + i * step, places) for i in range(count + 1)]


@pytest.mark.parametrize(
    ("keys", "symbols", "sentence"),
    [
        ({"forward": []}, {}, "`space.forward` must have at least one choice, but got none."),
        ({"forward": {}}, {}, "`space.forward` must have at least one choice, but got none."),
        (
            {"forward": "TopK({k})"},
            {},
            "`space.forward` has the placeholder {k}, which `symbols` must define. Known: none.",
        ),
        ({"forward": "{a}"}, {"a": "{b}", "b": ["{a}"]}, "`symbols.a` must not form a cycle, but {a} does."),
        ({"steps": {"low": 5, "high": 5}}, {}, "`space.steps` must have `low` below `high`, but got 5 and 5."),
        ({"steps": {"low": 5}}, {}, "`space.steps.high` must be a number, but got None."),
        (
            {"steps": {"low": 5, "high": 9, "lgo": True}},
            {},
            "Unknown key `space.steps.lgo` of a range. Known: low, high, log, step.",
        ),
        (
            {"steps": {"low": 0, "high": 9, "log": True}},
            {},
            "`space.steps.low` must be more than 0 with `log`, but got 0.",
        ),
        (
            {"steps": {"low": 1, "high": 9, "step": 0}},
            {},
            "`space.steps.step` must be a positive number, without `log`, but got 0.",
        ),
        (
            {"forward": ["Identity", "Identity"]},
            {},
            "`space.forward` must have different choices, but got ['Identity', 'Identity'].",
        ),
        (
            {"forward": [["Identity"]]},
            {},
            "`space.forward` must list numbers, strings or booleans, but got ['Identity']. Name other choices in a table.",
        ),
        ({"variants": {"a": "b"}}, {}, "`space.variants` must be a table of tables of keys, but got {'a': 'b'}."),
    ],
)
def test_a_wrong_space_is_named(keys, symbols, sentence):
    with pytest.raises(ConfigError) as caught:
        Space(keys, symbols)
    assert str(caught.value) == sentence


def test_a_grid_of_a_range_without_a_step_is_refused():
    with pytest.raises(ConfigError) as caught:
        grid_points(Space({"forward": "TopK({density})"}, SYMBOLS))
    assert str(caught.value) == "A grid needs a `step` or a list of choices for `forward.density`, but got a range."


def test_a_grid_that_never_ends_is_refused():
    with pytest.raises(ConfigError, match="A grid must have at most 10,000 points"):
        grid_points(Space({f"key{index}": {"low": 1, "high": 9} for index in range(9)}))
