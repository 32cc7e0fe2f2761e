"""Harm by parts of training: sums follow the parts, and verdicts the rule."""

import itertools
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records_made import write_run
from report_runs import change_row, copy_run

from raysim import analysis
from raysim.analysis.comparison.branches import BranchFamily, BranchPart, branch_harms, families
from raysim.analysis.comparison.contexts import AT_CHANCE, ComparedRuns
from raysim.analysis.report import compose
from raysim.analysis.report.tables import has_branches, safe_from
from raysim.config import make_config
from raysim.config.identity import Setting
from raysim.quality import MEASURES
from raysim.training.train import train

TOPK = Setting("TopK(0.1)")
LEVELS = st.floats(-0.5, 0.5)


def part(first, end, harms, dense=2.0, measure="loss"):
    """Return a part in which each seed is `harms` worse than dense with compression on, and worse still with it off."""
    quality = MEASURES[measure]
    sign = -1 if quality.higher else 1
    rows = [
        {
            "run": f"{first}-{name}-{seed}",
            "setting": setting,
            "seed": seed,
            f"{measure}_on": dense + sign * worse,
            f"{measure}_off": dense + sign * (worse + (setting == TOPK)),
            f"chance_{measure}": 10.0,
            "predictions": 1000.0,
            "study": None,
            "confirms": False,
        }
        for name, setting, values in (("dense", Setting(), [0.0] * len(harms)), ("topk", TOPK, harms))
        for seed, worse in enumerate(values)
    ]
    return BranchPart(first, end, ComparedRuns("small", pd.DataFrame(rows), quality))


@given(st.lists(st.lists(LEVELS, min_size=3, max_size=3), min_size=1, max_size=5))
@settings(max_examples=20)
def test_the_sum_is_that_of_the_parts(levels):
    """Parts that cover all steps are added as they are, from every point on."""
    edges = [10 * i for i in range(len(levels) + 1)]
    parts = [part(first, end, harms) for first, end, harms in zip(edges[:-1], edges[1:], levels, strict=True)]
    family = BranchFamily("small", parts, edges[-1])
    for i in range(len(parts)):
        sums = family.sums(TOPK, edges[i], edges[-1])
        expected = 100 * np.sum(levels[i:], axis=0) / 2.0
        np.testing.assert_allclose(list(sums.values()), expected, atol=1e-9)


def test_a_short_part_stands_for_the_steps_until_the_next():
    """Harm per step is constant: 5 of 20 steps count four times, and an accuracy falls where a loss rises."""
    for measure, factor in (("loss", 50.0), ("accuracy", 100.0)):
        parts = [
            part(0, 5, [0.01, 0.02], measure=measure, dense=2.0),
            part(20, 30, [0.1, 0.1], measure=measure, dense=2.0),
        ]
        sums = BranchFamily("small", parts, 40).sums(TOPK, 0, 40)
        np.testing.assert_allclose(list(sums.values()), [factor * (0.04 + 0.2), factor * (0.08 + 0.2)])
    assert BranchFamily("small", parts, 40).sums(TOPK, 5, 40) == {}


def test_a_part_is_as_long_as_its_whole_runs_though_the_first_diverged(tmp_path):
    for first in (0, 4):
        for name, forward in (("a", "TopK(0.1)"), ("dense", "Identity")):
            for seed in range(3):
                folder = tmp_path / f"{first}-{name}-{seed}"
                finals = {"loss_on": 1.0 + (name == "a") / 100, "loss_off": 1.0}
                extra = {
                    "parent": "parent",
                    "first_step": first,
                    "rate_steps": 8,
                    "measures": '{"loss": {"higher": false, "points": false}}',
                }
                write_run(folder, finals=finals, extra=extra, seed=seed, forward=forward, start=f"parent@{first}")
                if (name, seed) == ("a", 0):
                    change_row(folder, status="diverged", steps_done=1)
    (family,) = families(analysis.load(tmp_path))
    assert [(part.first, part.end) for part in family.parts] == [(0, 4), (4, 8)]


def test_dense_must_be_above_chance_at_the_confidence_of_the_verdicts(tmp_path):
    for first, forward, seed in itertools.product((0, 4), ("TopK(0.1)", "Identity"), range(3)):
        loss = 0.9 + 0.2 * seed  # of a chance of 2.3
        extra = {"parent": "parent", "first_step": first, "rate_steps": 8}
        folder = tmp_path / f"{first}-{forward}-{seed}"
        write_run(folder, finals={"loss_on": loss}, extra=extra, seed=seed, forward=forward, start=f"parent@{first}")
    for confidence, lacking in ((0.95, ""), (0.9999, AT_CHANCE)):
        harms = branch_harms(analysis.load(tmp_path), quality="loss", confidence=confidence)
        assert {*harms["lacking"], *harms["rest_lacking"]} == {lacking}


@pytest.fixture(scope="module")
def branched(tmp_path_factory):
    """One dense run of twelve steps; branches at 0, 4 and 8, and the whole from 0; a second seed of each is a copy, changed."""
    from configurations import SMALL

    folder = tmp_path_factory.mktemp("branched")
    values = {
        **SMALL,
        "steps": 12,
        "num_stages": 2,
        "num_microbatches": 2,
        "optimizer": {"learning_rate": 0.05, "momentum": 0.9},
    }
    values |= {"data": {"name": "digits", "train_samples": 320, "test_samples": 50}, "checkpoint_every_steps": 0}
    values["profile_every_steps"] = 0  # nothing is priced
    parent = train(
        make_config(values | {"checkpoint_at_steps": [0, 4, 8], "seed": 9}), engine="inline", out=folder / "parent"
    )
    topk = {"forward": "TopK(0.05)", "backward": "TopK(0.05)"}
    for first, steps in ((0, 4), (4, 4), (8, 4), (0, 12)):
        for name, changes, factor in (("dense", {}, 1.01), ("topk", topk, 1.02)):
            config = make_config(values | changes | {"steps": steps, "start": f"{parent.folder}@{first}"})
            run = train(config, engine="inline", out=folder / "runs" / f"{name}-{first}-{steps}-0")
            finals = {
                key: factor * run.row[key] for key in run.row if re.fullmatch("final_(loss|accuracy)_(on|off)", key)
            }
            copy_run(run.folder, folder / "runs" / f"{name}-{first}-{steps}-1", seed=1, **finals)
    return folder / "runs"


@pytest.mark.slow
def test_each_part_and_the_rest_are_judged(branched):
    results = analysis.load(branched)
    assert results.problems == []
    harms = analysis.branch_harms(results)
    assert harms["setting"].unique().tolist() == ["forward=TopK(0.05) backward=TopK(0.05)"]
    assert harms[["first_step", "end_step", "seeds"]].values.tolist() == [[0, 4, 2], [4, 8, 2], [8, 12, 2]]
    assert harms["planned_steps"].tolist() == [12] * 3
    runs = results.runs.set_index("run")
    name = next(iter(results.measures))
    for first, harm in zip(harms["first_step"], harms["harm"], strict=True):
        on = {
            kind: runs[f"final_{name}_on"][[f"{kind}-{first}-4-{seed}" for seed in range(2)]]
            for kind in ("dense", "topk")
        }
        measure = results.measures[name]
        each = [measure.harm(b, a) for a, b in zip(on["dense"], on["topk"], strict=True)]
        assert harm == pytest.approx(np.mean(each))
    last = harms.iloc[-1]
    assert (last["rest_harm"], last["rest_harm_high"]) == pytest.approx((last["harm"], last["harm_high"]), nan_ok=True)


@pytest.mark.slow
def test_the_report_has_a_section(branched):
    page = compose(branched, ["100mbps"])
    (section,) = [section for section in page.sections if section.key == "branches"]
    assert section.title == "Where in training compression harms"
    unit = analysis.branch_harms(analysis.load(branched))["unit"].iloc[0]
    assert re.search(rf"harms most in steps \d+ to \d+ \(\+[\d.]+ {unit}\)", str(section.blocks[0]))


def test_no_part_of_a_better_setting_is_said_to_harm():
    part = {"setting": "a", "first_step": 0, "end_step": 4, "planned_steps": 4, "unit": "% of loss", "safe_from": 0}
    assert safe_from(pd.DataFrame([part | {"harm": -0.5}])) == "`a` is safe for all 4 steps."
    harmed = safe_from(pd.DataFrame([part | {"harm": 0.5}]))
    assert harmed == "`a` is safe for all 4 steps. It harms most in steps 0 to 4 (+0.50 % of loss)."


@pytest.mark.slow
def test_branches_from_one_step_have_no_section_of_their_own(branched, tmp_path):
    for run in branched.glob("*-4-*"):
        shutil.copytree(run, tmp_path / run.name)
    assert has_branches(analysis.load(tmp_path))
    for run in [*tmp_path.glob("*-0-4-*"), *tmp_path.glob("*-8-4-*")]:
        shutil.rmtree(run)
    assert not has_branches(analysis.load(tmp_path))


def test_runs_without_branches_have_none(report_runs):
    results = analysis.load(report_runs)
    assert len(analysis.branch_harms(results)) == 0
    assert not has_branches(results)
