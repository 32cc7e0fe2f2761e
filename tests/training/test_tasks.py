"""Runs of other tasks: their staged training is that of the uncut model, and their measures reach every table."""

import sys

import numpy as np
import pytest
import torch
from pipelines import GPT

from raysim.analysis import AnalysisError, frontier, load, replay, settings
from raysim.config import ConfigError, make_config
from raysim.pipeline.prepare import prepare
from raysim.training.checkpoint import load_weights
from raysim.training.train import train

MUON = {**GPT, "optimizer": {"name": "muon", "learning_rate": 1e-2, "weight_decay": 0.1}, "steps": 5, "batch_size": 8}


def weights(run):
    return load_weights(run.folder)


def test_muon_in_stages_and_replicas_is_muon_of_the_uncut_model(small, tmp_path):
    one = train(small(**MUON, num_stages=1, num_microbatches=4), engine="inline", out=tmp_path / "one")
    cut = train(small(**MUON, num_stages=4, num_microbatches=4), engine="inline", out=tmp_path / "cut")
    both = train(
        small(**MUON, num_stages=2, num_replicas=2, num_microbatches=2), engine="inline", out=tmp_path / "both"
    )
    assert cut.steps["loss"].tolist() == one.steps["loss"].tolist()
    assert both.steps["loss"].tolist() == pytest.approx(one.steps["loss"].tolist(), rel=1e-4)
    expected = weights(one)
    assert weights(cut).keys() == weights(both).keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(weights(cut)[name], x)
        torch.testing.assert_close(weights(both)[name], x, rtol=1e-2, atol=1e-4)


PADDED = """
import torch
def data():
    generator = torch.Generator().manual_seed(0)
    def rows(count):
        tokens = torch.randint(1, 11, (count, 9), generator=generator)
        kept = torch.arange(8) < torch.randint(1, 9, (count, 1), generator=generator)
        return [(row[:8], torch.where(keep, row[1:], -100)) for row, keep in zip(tokens, kept)]
    return rows(32), rows(12)
def mostly_unlabelled():
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    y = torch.where(torch.arange(64) % 8 == 0, (x[:, 0] > 0).long(), -100)
    return list(zip(x, y)), list(zip(x, y))
def unlabelled(split):
    pairs, _ = mostly_unlabelled()
    without = [(x, torch.tensor(-100)) for x, _ in pairs]
    return (without, pairs) if split == "training" else (pairs, without)
def worst(outputs, targets):
    return (outputs - targets).abs().amax()
worst.higher_is_better = False
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_task.py").write_text(PADDED)
    yield "my_task"
    sys.modules.pop("my_task", None)


def test_padding_is_ignored_for_any_microbatching(mine, small, tmp_path):
    changes = {"data": {"name": f"{mine}:data"}, "model": GPT["model"], "batch_size": 16, "steps": 4}
    whole = train(small(**changes, num_stages=1, num_microbatches=1), engine="inline", out=tmp_path / "whole")
    cut = train(small(**changes, num_stages=3, num_microbatches=8), engine="inline", out=tmp_path / "cut")
    assert cut.steps["loss"].tolist() == pytest.approx(whole.steps["loss"].tolist(), rel=1e-4)
    for name, x in weights(whole).items():
        torch.testing.assert_close(weights(cut)[name], x, rtol=1e-3, atol=1e-5)
    data = prepare(small(**changes, num_stages=1, num_microbatches=1)).data
    counted = int((data.test.targets(np.arange(12)) != -100).sum())
    assert set(cut.evals["predictions"]) == {counted}
    assert counted < 12 * 8
    assert cut.evals["loss"].tolist() == pytest.approx(whole.evals["loss"].tolist(), rel=1e-4)


@pytest.mark.parametrize("loss", ["cross_entropy", "tasks:plain_entropy"])
def test_unlabelled_samples_are_ignored_for_any_microbatching(mine, small, tmp_path, loss):
    """Of 16 samples two have a class, so most microbatches have none."""
    changes = {"data": {"name": f"{mine}:mostly_unlabelled"}, "model": {"name": "mlp", "width": 8}, "loss": loss}
    whole, cut = (
        train(small(**changes, num_stages=2, num_microbatches=m), engine="inline", out=tmp_path / str(m))
        for m in (1, 16)
    )
    assert cut.status == whole.status == "finished"
    assert cut.steps["loss"].tolist() == pytest.approx(whole.steps["loss"].tolist(), rel=1e-4)
    for name, x in weights(whole).items():
        torch.testing.assert_close(weights(cut)[name], x, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("split", ["training", "test"])
def test_data_without_valid_targets_are_refused(mine, small, tmp_path, split):
    """They would end as diverged, or as trained without a step."""
    config = small(data={"name": f"{mine}:unlabelled", "split": split}, model={"name": "mlp"}, num_stages=2)
    with pytest.raises(ConfigError, match=f"`data` must have {split} targets other than -100"):
        train(config, engine="inline", out=tmp_path / "run")


@pytest.fixture(scope="module")
def regressions(tmp_path_factory):
    """Return a folder of dense and compressed runs of a regression, three seeds each, and the table that they learn."""
    folder = tmp_path_factory.mktemp("regression")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4))
    rows = np.column_stack([x, x @ [30.0, -20.0, 10.0, 5.0] + 1000 + rng.normal(0, 0.5, 300)])
    np.savetxt(folder / "table.csv", rows, delimiter=",", header="a,b,c,d,price", comments="")
    values = {
        "data": {"name": "table", "path": str(folder / "table.csv"), "target": "price"},
        "model": {"name": "mlp", "width": 16},
        "num_stages": 2,
        "steps": 40,
        "profile_every_steps": 20,
        "evaluate_every_steps": 20,
    }
    for name, forward in (("dense", "Identity"), ("mild", "Quantize(8)")):
        for seed in range(3):
            out = folder / "runs" / f"{name}-{seed}"
            train(make_config({**values, "forward": forward, "seed": seed}), engine="inline", out=out)
    return folder


def test_regression_is_recorded_by_its_measures(regressions):
    results = load(regressions / "runs")
    runs = results.runs
    assert list(results.measures) == ["r2", "loss", "mae"]
    assert runs["final_r2_on"].min() > 0.9
    assert runs["final_mae_on"].max() < 10 < runs["chance_mae"].min()  # in units of the price
    assert runs["chance_r2"].abs().max() < 0.1
    assert {"r2", "mae"} <= set(results.evals.columns)
    assert results.evals["accuracy"].isna().all()


def test_regression_is_judged_by_its_measures(regressions):
    results = load(regressions / "runs")
    safe = settings(results)
    assert safe["unit"].tolist() == ["points of r2"]
    by_mae = settings(results, quality="mae", within=1000.0)
    assert by_mae["unit"].tolist() == ["% of mae"]
    assert by_mae["verdict"].tolist() == ["safe"]
    with pytest.raises(AnalysisError, match="`quality` must be one of auto, r2, loss, mae, but got 'accuracy'"):
        settings(results, quality="accuracy")
    priced = replay(results, ["100mbps"], target="r2=0.5")
    assert set(priced["steps_to_target_on"]) <= {20, 40}
    best = frontier(results.runs, ["final_r2_on", "final_mae_on"])
    assert best["final_r2_on"].max() == results.runs["final_r2_on"].max()
    assert best["final_mae_on"].min() == results.runs["final_mae_on"].min()


def test_custom_metric_is_a_column_with_direction(mine, regressions, tmp_path):
    base = {
        "data": {"name": "table", "path": str(regressions / "table.csv"), "target": "price"},
        "model": {"name": "mlp", "width": 8},
        "metrics": [f"{mine}:worst", "r2"],
        "num_stages": 2,
        "steps": 4,
    }
    for seed in (0, 1):
        run = train(make_config({**base, "seed": seed}), engine="inline", out=tmp_path / "runs" / str(seed))
    assert list(run.measures) == ["worst", "loss", "r2"]
    assert run.evals["worst"].iloc[-1] == run.row["final_worst_off"] > 0
    results = load(tmp_path / "runs")
    assert results.evals["worst"].notna().all()
    best = frontier(results.runs, ["final_worst_on"])
    assert best["final_worst_on"].tolist() == [results.runs["final_worst_on"].min()]


@pytest.mark.slow
def test_custom_data_loss_and_metric_reach_ray_workers(ray, small, tmp_path):
    changes = {
        "data": "tests.support.tasks:rows",
        "model": {"name": "mlp", "width": 8},
        "loss": "tests.support.tasks:smooth",
    }
    config = small(**changes, metrics=["tests.support.tasks:worst"], forward="TopK(0.3)", steps=3)
    inline, actors = (train(config, engine=engine, out=tmp_path / engine) for engine in ("inline", "ray"))
    assert actors.steps["loss"].tolist() == inline.steps["loss"].tolist()
    assert actors.evals[["loss", "worst"]].equals(inline.evals[["loss", "worst"]])
    assert actors.row["chance_worst"] == inline.row["chance_worst"] > 0
