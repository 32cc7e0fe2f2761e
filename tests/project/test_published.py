"""The page of published measurements is what its program computes, and keeps its own rules."""

import statistics
import tomllib

import make_published
import pytest
from make_published import DATA, errors, fit, ratios, regrets
from published_predictions import KINDS, resnet50

from raysim.forecast.shapes import count_values

CONTENT = tomllib.loads(DATA.read_text(encoding="utf-8"))
TABLES = {table["name"]: table for table in CONTENT["tables"]}


@pytest.mark.slow
def test_published_page_matches_program():
    for path, text in make_published.written(CONTENT).items():
        assert path.read_text(encoding="utf-8") == text, "run `python docs/make_published.py`"


DEAR = {"PowerSGD in torch", "Zero Bubble Pipeline Parallelism", "Megatron Bridge, FP8", "DT-FM's placements"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in DEAR)) for name in TABLES])
def test_every_table_has_a_source_and_at_most_one_constant(name):
    table = TABLES[name]
    assert table["kind"] in KINDS
    assert any(mark in table["source"] for mark in ("(2", "#", "page"))
    assert "fitted_words" in table or "fitted" not in table
    cells = errors(table, 1.0 if table["kind"] != "bandwidth" else 100.0)
    fitted = [cell for cell in cells if cell[-1]]
    assert bool(fitted) == ("fitted" in table)
    assert len(fitted) < len(cells)


@pytest.mark.slow
@pytest.mark.parametrize(("column", "aim"), [("1F1B", 0.03), ("interleaved", 0.05), ("ZB-2p", 0.05)])
def test_zero_bubble_is_predicted_within_tolerance(column, aim):
    table = TABLES["Zero Bubble Pipeline Parallelism"]
    shares = [
        abs(predicted / measured - 1) for _, each, measured, predicted, _ in errors(table, fit(table)) if each == column
    ]
    assert len(shares) == 6
    assert statistics.fmean(shares) <= aim


def test_sharded_replicas_are_predicted_within_three_percent():
    table = TABLES["torchtitan, Llama 3.1 8B with FSDP"]
    for _, _, measured, predicted, _ in errors(table, 0.0):
        assert measured < predicted < 1.03 * measured


@pytest.mark.slow
def test_delayed_averages_are_predicted_within_their_aim():
    table = TABLES["DUO: averages under the whole next step"]
    shares = [
        abs(predicted / measured - 1) for *_, measured, predicted, fitted in errors(table, fit(table)) if not fitted
    ]
    assert len(shares) == 11
    assert statistics.median(shares) <= 0.08


@pytest.mark.slow
def test_placements_are_ranked_as_measured_with_nothing_fitted():
    table = TABLES["DT-FM's placements"]
    cells = errors(table, 0.0)
    assert regrets(table, cells) == [0.0] * 15
    shares = {group: each.values() for group, each in ratios(table, cells).items()}
    assert all(abs(predicted / measured - 1) < 0.08 for measured, predicted in shares["worldwide"])
    assert all(1 < predicted < 1.1 * measured for each in shares.values() for measured, predicted in each)
    assert statistics.median(abs(predicted / measured - 1) for _, _, measured, predicted, _ in cells) < 0.15


def test_ratio_is_of_the_mean_of_other_rows_to_the_first():
    table = {"rows": [{"name": name, "group": "g"} for name in ("a", "b", "c")]}
    cells = [(name, "x", measured, 2.0, False) for name, measured in (("a", 1.0), ("b", 2.0), ("c", 4.0))]
    assert ratios(table, cells) == {"g": {"x": (3.0, 1.0)}}


def test_regret_is_of_the_measured_choice():
    columns = {"choice": "columns", "best": "highest", "rows": [{"name": "a"}]}
    cells = [("a", "slow", 10.0, 9.0, False), ("a", "fast", 12.0, 8.0, False)]
    assert regrets(columns, cells) == [pytest.approx(0.2)]
    rows = {
        "choice": "rows",
        "best": "lowest",
        "rows": [{"name": "a", "group": "g"}, {"name": "b", "group": "g"}, {"name": "c"}],
    }
    cells = [("a", "net", 2.0, 1.0, False), ("b", "net", 1.6, 3.0, False), ("c", "net", 0.1, 0.1, False)]
    assert regrets(rows, cells) == [pytest.approx(0.25)]


def test_resnet50_has_its_published_size():
    assert count_values(resnet50()) == 25_557_032
