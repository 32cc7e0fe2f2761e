"""Per-sample scores: they add up to the evaluation, and part the spread of harm into its sources."""

import numpy as np
import pandas as pd
import pytest
from configurations import SMALL
from records_made import write_run

from raysim import Run, train
from raysim.analysis import load, pack, sample_harms, settings
from raysim.analysis.comparison.samples import sample_sentence
from raysim.config import make_config
from raysim.records import Recorder

JOBS = {
    "classes": SMALL,
    "top five": SMALL | {"metrics": ["top5_accuracy", "accuracy"]},
    "a short last batch": SMALL | {"batch_size": 12},
    "tokens": SMALL
    | {
        "model": {"name": "gpt", "width": 16, "num_heads": 2, "num_blocks": 3},
        "data": {"name": "topics", "length": 16, "train_samples": 64, "test_samples": 20},
    },
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_scores_add_up_to_the_recorded_evaluation(tmp_path, job):
    run = train(make_config(job | {"steps": 4, "forward": "TopK(0.3)"}), engine="inline", out=tmp_path / "run")
    scores, evals = run.samples, run.evals
    final = evals[(evals["mode"] == "on") & (evals["step"] == evals["step"].max())].iloc[0]
    assert len(scores) == 20
    assert scores["predictions"].sum() == final["predictions"]
    assert scores["sample"].tolist() == list(range(len(scores)))
    assert set(scores["step"]) == {final["step"]}
    assert np.average(scores["loss"].astype(float), weights=scores["predictions"]) == pytest.approx(
        final["loss"], rel=1e-5
    )
    assert scores["right"].sum() / scores["predictions"].sum() == final["accuracy"]


def parted(seeds, samples, *, training, test, own, count=200):
    """Return the mean squares of `sample_harms` on drawn scores, by column."""
    from raysim.analysis.comparison.samples import _parted
    from raysim.quality import MEASURES

    rng, rows = np.random.default_rng(0), []
    for _ in range(count):
        harms = training * rng.normal(size=(seeds, 1)) + test * rng.normal(size=samples)
        harms = harms + own * rng.normal(size=(seeds, samples))
        scores = [
            tuple(
                pd.DataFrame({"loss": loss, "right": np.nan, "predictions": 1})
                for loss in (np.ones(samples) + harm / 100, np.ones(samples))
            )
            for harm in harms
        ]
        rows.append(_parted(scores, MEASURES["loss"]))
    return (pd.DataFrame(rows)[["deviation", "of_training", "of_samples", "another_test"]] ** 2).mean()


@pytest.mark.parametrize(("training", "test", "own"), [(1.0, 5.0, 10.0), (0.0, 0.0, 10.0), (2.0, 10.0, 0.1)])
def test_the_parts_of_the_spread_are_those_that_were_drawn(training, test, own):
    seeds, samples = 5, 100
    found = parted(seeds, samples, training=training, test=test, own=own)
    assert found["deviation"] == pytest.approx(training**2 + own**2 / samples, rel=0.2)
    assert found["of_samples"] == pytest.approx(own**2 / samples, rel=0.1)
    assert found["of_training"] == pytest.approx(training**2, rel=0.3, abs=0.5)
    assert found["another_test"] == pytest.approx(test**2 / samples, rel=0.1, abs=0.05)


def test_harm_is_that_of_the_verdict_and_packs_keep_it(tmp_path):
    for place, forward in enumerate(["Identity", "TopK(0.02)"]):
        for seed in (0, 1, 2):
            config = make_config(SMALL | {"forward": forward, "backward": forward, "seed": seed, "steps": 6})
            train(config, engine="inline", out=tmp_path / "runs" / f"{place}-s{seed}")
    results = load(tmp_path / "runs")
    (row,) = sample_harms(results).to_dict("records")
    (judged,) = settings(results).to_dict("records")
    assert row["harm"] == pytest.approx(judged["harm"])
    assert (row["seeds"], row["samples"]) == (3, results.evals["predictions"].max())
    changed = results.samples.merge(results.runs[["run", "seed", "forward"]], on="run")
    net = changed.pivot_table(index="sample", columns="forward", values="right", aggfunc="sum").astype(int)
    fewer = net["TopK(0.02)"] - net["Identity"]
    assert (row["worse"], row["better"]) == ((fewer < 0).sum(), (fewer > 0).sum())
    assert f"samples right less often than with dense: {row['worse']}," in sample_sentence(row)
    pack(tmp_path / "runs", tmp_path / "packed")
    pd.testing.assert_frame_equal(sample_harms(load(tmp_path / "packed")), sample_harms(results))


def test_records_without_scores_say_nothing_of_samples(tmp_path):
    for place, forward in enumerate(["Identity", "TopK(0.5)"]):
        for seed in range(3):
            write_run(
                tmp_path / f"{place}-s{seed}", seed=seed, forward=forward, finals={"accuracy_on": 0.9, "loss_on": 0.5}
            )
    results = load(tmp_path)
    assert sample_harms(results).empty
    assert len(settings(results)) == 1
    assert Run(tmp_path / "0-s0").samples.empty
    assert not results.problems


def test_a_resumed_run_has_each_sample_once(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.open()
    recorder.write_run({"schema_version": 2, "seed": 0, "status": "running"})
    for _ in range(2):  # killed after its last evaluation, and resumed at an earlier step
        for sample in range(3):
            recorder.add("samples", {"step": 9, "sample": sample, "loss": 0.5, "right": 1, "predictions": 1})
        recorder.flush()
        kept = Run(tmp_path).samples["sample"].tolist()
        recorder.forget(6)
    assert kept == [0, 1, 2]
    recorder.close()
