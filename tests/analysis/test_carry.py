"""Harm carried to another size: by a law, or not, with the run that would allow it."""

import math
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from records_made import write_run
from report_runs import change_row
from typer.testing import CliRunner

from raysim.analysis import AnalysisError, carry, load
from raysim.analysis.comparison.carry import law_sentence
from raysim.analysis.comparison.sizes import size_families
from raysim.cli import app

SIZES = (100_000, 300_000, 1_000_000, 3_000_000)
TWO = (0, 1)  # seeds
LOCAL = {"num_replicas": 2, "replica_gradient": "DiLoCo(2)"}


def falling(size):
    return 6 * (size / SIZES[0]) ** -0.3


def write_family(folder, harms, sizes=SIZES, seeds=(0, 1, 2), name="family", change=lambda size: {}, **extra):
    """Write dense runs and runs of each setting at each size; `harms`: settings with their harm, in per cent, by size."""
    random = np.random.default_rng(0)
    for size in sizes:
        tokens = 2 * size
        common = {
            "num_stages": 2,
            "batch_size": 8,
            "data": "text",
            "model": {"name": "gpt", "width": 8 * (1 + size // 100_000)},
        }
        common |= {"data": {"name": "topics"}, "steps": 4} | change(size)
        for seed in seeds:
            dense = 4 * size**-0.05 + 0.02 * random.standard_normal()
            for setting, harm in [({}, None), *harms]:
                value = dense if harm is None else dense * (1 + (harm(size) + 0.05 * random.standard_normal()) / 100)
                if math.isnan(value):
                    continue
                number = len([*folder.glob("*")]) if folder.exists() else 0
                write_run(
                    folder / f"{name}-{number}",
                    finals={"loss_on": value, "loss_off": value},
                    extra={"num_parameters": size, "chance_loss": 5.5, **extra},
                    tables=False,
                    predictions=round(tokens / 32),
                    samples=1,
                    seed=seed,
                    **{**common, **({"num_replicas": 2} if any(s == LOCAL for s, _ in harms) else {}), **setting},
                )
    return folder


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    settings = [(LOCAL, falling), ({"forward": "Quantize(4)"}, lambda size: 2.0)]
    return write_family(tmp_path_factory.mktemp("carry") / "runs", settings)


@pytest.fixture(scope="module")
def loaded(family):
    return load(family)


def refusal(frame, part):
    (row,) = frame[frame["setting"].str.contains(part, regex=False)].to_dict("records")
    assert pd.isna(row["verdict"])
    assert math.isnan(row["harm"])
    return row["refusal"]


def test_harm_is_carried_by_a_power_of_the_size(loaded):
    frame = carry(loaded, 9e6).set_index("setting")
    row = frame.loc["replica_gradient=DiLoCo(2)"]
    assert row["harm_low"] < falling(9e6) < row["harm_high"]
    assert row["harm"] == pytest.approx(falling(9e6), rel=0.25)
    assert row["verdict"] == "harmful"
    assert (row["factor"], row["sizes"], row["seeds"]) == (3, 4, 3)
    assert row["disagree"]  # without size the harm of all sizes would be the mean
    assert "as a power of the size" in law_sentence(row)


def test_a_size_is_that_of_whole_runs_though_the_first_diverged(tmp_path):
    folder = write_family(tmp_path / "runs", [({"forward": "TopK(0.1)"}, lambda size: 2.0)], sizes=SIZES[:3])
    (whole,) = size_families(load(folder))
    change_row(
        folder / "family-1", status="diverged", steps_done=1
    )  # the first seed of the setting at the smallest size
    evals = folder / "family-1" / "evals.parquet"
    pq.write_table(pq.read_table(evals)[:0], evals)
    (family,) = size_families(load(folder))
    assert family.sizes == whole.sizes


def test_harm_between_sizes_is_carried_for_all_settings(loaded):
    frame = carry(loaded, 5e5)
    assert frame["refusal"].isna().all()
    assert set(frame["verdict"]) == {"harmful"}


@pytest.mark.parametrize(
    ("asked", "part", "words"),
    [
        ({"at": 9e6}, "Quantize(4)", ["One range for a whole tensor", "train it and dense at 9 M", "by row or block"]),
        ({"at": 9e6, "trained": True}, "DiLoCo", ["from scratch", "train it from trained weights, at three sizes"]),
        ({"at": 9e6, "stages": 8}, "DiLoCo", ["have 2 stages: train one size in 8 stages, too"]),
        ({"at": 9e6, "tokens": 18e7}, "DiLoCo", ["2 a parameter", "train one size with 10.0 times as many, too"]),
        ({"at": 1e12}, "DiLoCo", ["333,333 times beyond the largest", "train it and dense at", "or more"]),
        ({"at": 10}, "DiLoCo", ["10,000 times beyond the smallest", "or fewer"]),
    ],
)
def test_refusals_name_the_run_that_would_allow_them(loaded, asked, part, words):
    text = refusal(carry(loaded, **asked), part)
    assert [word for word in words if word not in text] == []


def test_harm_that_rises_and_falls_is_not_carried(tmp_path):
    bent = {SIZES[0]: 1.0, SIZES[1]: 4.0, SIZES[2]: 4.0, SIZES[3]: 1.0}
    frame = carry(load(write_family(tmp_path / "bent", [({"forward": "TopK(0.1)"}, bent.get)])), 9e6)
    assert "surely rises and falls" in refusal(frame, "TopK")


@pytest.mark.slow
def test_tokens_are_carried_once_a_size_was_trained_with_several(tmp_path):
    setting, folder = {"forward": "TopK(0.1)"}, tmp_path / "runs"
    write_family(folder, [(setting, lambda size: 2.0)])
    for times in (2, 8):
        longer, harm = {"steps": 4 * times}, 2.0 * times**0.4
        write_family(
            folder, [(setting, lambda size, harm=harm: harm)], SIZES[:1], change=lambda size, longer=longer: longer
        )
    (row,) = carry(load(folder), 9e6, tokens=9e6 * 8).to_dict("records")
    assert row["harm_low"] < 2 * 4**0.4 < row["harm_high"]


def test_one_seed_tells_no_law(tmp_path):
    frame = carry(load(write_family(tmp_path / "runs", [(LOCAL, falling)], seeds=(0,))), 9e6)
    assert "One seed" in refusal(frame, "DiLoCo")


def bad_folders(tmp_path):
    """Yield folders that tell no law, with a part of the sentence."""
    setting = {"forward": "TopK(0.1)"}
    lacking = [(setting, lambda size: math.nan if size == SIZES[1] else 1.0), (LOCAL, falling)]
    yield (
        write_family(tmp_path / "two", [(LOCAL, falling)], SIZES[:2], TWO),
        "needs at least 3 sizes of one family, but got 2",
    )
    other = write_family(
        tmp_path / "other",
        [(LOCAL, falling)],
        SIZES[:3],
        TWO,
        change=lambda size: {"data": {"name": "topics", "length": 8 + size // 100_000}},
    )
    yield other, "also differ in `data.length`"
    yield (
        write_family(tmp_path / "lacking", lacking, SIZES[:3], TWO),
        "forward=TopK(0.1) has no finished runs to compare with dense at 0.3 M",
    )
    yield write_family(tmp_path / "dense", [], SIZES[:3], TWO), "compressed and dense runs of the same seeds"
    yield (
        write_family(tmp_path / "old", [(LOCAL, falling)], SIZES[:3], TWO, num_parameters=None),
        "records no `num_parameters`",
    )


def test_a_size_trained_in_two_ways_is_refused(tmp_path):
    for name, rate in (("fast", 0.1), ("slow", 0.01)):
        write_family(
            tmp_path,
            [({"forward": "TopK(0.1)"}, lambda _, harm=50 * rate: harm)],
            SIZES[:3],
            name=name,
            change=lambda _, rate=rate: {"optimizer": {"learning_rate": rate}},
        )
    with pytest.raises(AnalysisError, match=r"two harms at 0.1 M .*learning_rate=0.01; .*learning_rate=0.1\): load"):
        carry(load(tmp_path), 2e6)


def report(*words):
    """Run `raysim report`, and return its exit code and what it printed in one line."""
    result = CliRunner().invoke(app, ["report", *map(str, words)])
    return result.exit_code, " ".join(result.output.split())


def test_bad_input_is_one_sentence(family, loaded, tmp_path):
    for folder, part in bad_folders(tmp_path):
        with pytest.raises(AnalysisError) as error:
            carry(load(folder), 9e6)
        assert part in str(error.value)
    code, printed = report(folder, "--at", "9e6")
    assert code == 2
    assert part in printed
    wrong: list[Any] = [0, -1, math.nan, math.inf, True, "1B"]
    for at in wrong:
        with pytest.raises(AnalysisError, match="`at` must be a number of parameters"):
            carry(loaded, at)
    assert report(family, "--stages", 4)[0] == 2


@pytest.mark.slow
def test_report_says_the_carried_harm(family, tmp_path):
    code, printed = report(family, "--at", "9e6", "--network", "1gbps", "--only", "--out", tmp_path / "page.html")
    assert code == 0
    assert "replica_gradient=DiLoCo(2): by a law from 0.1 M to 3 M" in printed
    assert "at 9 M" in printed
    assert "Carried to 9 M parameters" in (tmp_path / "page.html").read_text()
