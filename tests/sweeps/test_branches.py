"""Studies that branch: one dense run is trained once, and every setting continues from it at every point."""

import pytest
from studies import BASE, write_study

from raysim.config import ConfigError
from raysim.records import Run
from raysim.sweeps.runner import Sweep
from raysim.sweeps.study_file import read_study
from raysim.sweeps.verdicts import show_result
from raysim.training.checkpoint import checkpoints

BRANCHED = {
    "base": {**BASE, "steps": 10},
    "sampler": "grid",
    "trials": None,
    "seeds": [1, 2, 3],
    "objectives": ["accuracy_on"],
    "space": {"forward": ["Identity", "TopK(0.1)"]},
    "symbols": None,
    "branches": {"at": [0, 0.5], "steps": 2},
}


def test_every_setting_is_trained_at_every_point(tmp_path):
    study = read_study(write_study(tmp_path, **BRANCHED))
    assert study.branch_steps == [0, 5]
    assert [baseline.name for baseline in study.baselines] == ["dense@0", "dense@5"]
    assert study.dense is study.baselines[0]
    drawn = [study.config(overrides) for _, overrides in study.drawn()]
    assert sorted((repr(config.start), repr(config.forward), config.steps) for config in drawn) == [
        (f"parent@{step}", forward, 2) for step in (0, 5) for forward in ("Identity", "TopK(0.1)")
    ]
    study.write(tmp_path)
    again = read_study(tmp_path / "study.toml")
    assert again.as_mapping() == study.as_mapping()


@pytest.mark.slow
def test_a_sweep_of_branches(ray, tmp_path, capsys):
    path = write_study(tmp_path, **BRANCHED)
    done = Sweep(read_study(path), out=tmp_path / "out")
    done.run()
    (parent,) = (tmp_path / "out" / "parent" / "trials").iterdir()
    kept = [each.step for each in checkpoints(parent / "checkpoints")]
    assert kept == [0, 5, 8, 10] or set(kept) >= {0, 5, 10}
    runs = {name: Run(tmp_path / "out" / name).row for row in done.rows if row.same_as is None for name in row.runs}
    assert len(runs) == 2 * 2 * 3
    assert {row["parent"] for row in runs.values()} == {Run(parent).row["run_id"]}
    assert sorted({(row["first_step"], row["steps_done"]) for row in runs.values()}) == [(0, 2), (5, 2)]
    show_result(done)
    shown = capsys.readouterr().out
    assert "Harm in points of accuracy, margin 0.5, by the steps that are compressed" in shown
    assert "forward=TopK(0.1)" in shown
    assert "Harm to the end is a sum of parts" in shown
    resumed = Sweep(read_study(path), out=tmp_path / "out", resume=True)
    resumed.run()
    assert resumed.began_with == len([row for row in done.rows if row.same_as is None])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"branches": {"at": [0, 0.9], "steps": 2}}, "`branches.steps` must be at most 1, from the last point (step 9) to the end of"),
        ({"branches": {"at": [0, 0.01], "steps": 2}}, "`branches.at` must give different steps of the 10 of the base, but got 0, 0."),
        ({"branches": {"at": [1.0], "steps": 2}}, "`branches.at.0` must be less than 1, but got 1.0."),
        ({"sampler": "random", "trials": 4}, "`branches` trains every setting at every point, so `sampler` must be grid"),
        ({"early_stopping": "asha"}, "`early_stopping` must be left out with `branches`, whose table judges each point."),
        ({"confirm": 3}, "`confirm` must be left out with `branches`, whose table judges each point."),
        (
            {"race": True},
            "`race` must be left out with `branches`, whose table judges each point. To race from one point, train dense with "
            "`checkpoint_at_steps`, and set `start=FOLDER@STEP` instead.",
        ),
        ({"base": {**BASE, "steps": 10, "start": "x@1"}}, "`branches` makes the run from which trials start: leave out `start`"),
        ({"base": {**{k: v for k, v in BASE.items() if k != "steps"}, "epochs": 3}}, "`branches` needs `steps` in the base"),
        (
            {"baselines": [{"name": "dense", "set": {"forward": "Identity", "steps": 3}}]},
            "The baseline dense@0: `steps` must be left out of `space` and `baselines`: `branches.steps` is that of every trial.",
        ),
        (
            {"space": {"forward": ["Identity", "TopK(0.1)"], "num_microbatches": [1, 2]}},
            "`params` of the baseline dense@0 must be a point of the space: The value of",
        ),
        ({"baselines": []}, "`branches` needs a baseline without compression among `baselines`, but there is none."),
    ],
)  # fmt: skip
def test_studies_without_valid_branch_are_refused(tmp_path, changes, sentence):
    with pytest.raises(ConfigError) as caught:
        read_study(write_study(tmp_path, **{**BRANCHED, **changes}))
    assert str(caught.value).startswith(sentence)


def test_a_bucket_is_refused(tmp_path):
    study = read_study(write_study(tmp_path, **BRANCHED))
    with pytest.raises(ConfigError, match=r"^`branches` needs a folder as `out`, not a bucket"):
        Sweep(study, out="s3://bucket/study")
