"""Confirmation: a sweep chooses on its seeds, and other seeds judge the choice."""

from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pytest
from studies import write_study

from raysim.analysis import load, settings
from raysim.config import ConfigError
from raysim.records import Run, write_table
from raysim.sweeps.confirm import MOST, chosen, confirmation, confirming, fresh_seeds
from raysim.sweeps.objectives import Figure, Objective
from raysim.sweeps.progress import beforehand
from raysim.sweeps.runner import Sweep
from raysim.sweeps.space import grid_points
from raysim.sweeps.study_file import read_study
from raysim.sweeps.trial_rows import Rows, TrialRow, best_trials
from raysim.sweeps.verdicts import _near_chance, show_confirmation, show_result


def rows_of(accuracies):
    """Return ended trials of {forward: (accuracy, wire bytes)}, the first of which is the dense baseline."""
    return [
        TrialRow(
            place,
            [0, 1],
            notation=forward,
            name=None if place else "dense",
            status="finished",
            figures={"accuracy_on": Figure(accuracy), "wire_bytes": Figure(sent)},
            params={"forward": forward},
        )
        for place, (forward, (accuracy, sent)) in enumerate(accuracies.items())
    ]


def study_of(folder, **changes):
    objectives = ["accuracy_on", "wire_bytes"]
    space = {"forward": ["Identity", "TopK(0.5)", "TopK(0.3)", "TopK(0.2)", "TopK(0.1)", "Quantize(8)", "Quantize(4)"]}
    given = {"seeds": [0, 1], "confirm": 3, "objectives": objectives, "space": space, "symbols": None}
    return read_study(write_study(folder, **given | changes))


def test_near_dense_frontier_settings_are_confirmed(tmp_path):
    study = study_of(tmp_path)
    rows = rows_of(
        {
            "Identity": (0.9, 100.0),
            "TopK(0.5)": (0.9, 50.0),
            "TopK(0.3)": (0.898, 60.0),  # beaten by the one before
            "TopK(0.2)": (0.896, 20.0),
            "TopK(0.1)": (0.89, 10.0),  # a point worse
        }
    )
    assert [row.notation for row in chosen(study, rows)] == ["TopK(0.2)", "TopK(0.5)"]
    assert chosen(study, rows[1:]) == []
    many = rows_of(
        {"Identity": (0.9, 100.0)} | {f"TopK({d})": (0.8 + d, 50 + d) for d in (0.096, 0.097, 0.098, 0.1, 0.11)}
    )
    assert len(chosen(study, [*many, *rows_of({"x": (0, 0), "y": (0.0955, 1.0)})[1:]])) <= MOST  # type: ignore[arg-type]


def test_no_choice_is_confirmed_beside_a_dense_loss_of_zero_or_less(tmp_path):
    rows = rows_of({"Identity": (0, 0), "TopK(0.5)": (0, 0)})
    for row in rows:
        row.figures = {"loss_on": Figure(-1.0)}
    with pytest.raises(ConfigError, match=r"^Nothing to confirm: dense has a loss of -1, .* judge by another measure"):
        chosen(study_of(tmp_path, objectives=["loss_on"]), rows)


@pytest.mark.parametrize("raced", [{}, {"race": True}, {"budget": "40 EUR", "price_per_hour": 2.0}])
def test_the_confirmation_is_a_study_of_baselines_on_fresh_seeds(tmp_path, raced):
    study = replace(study_of(tmp_path, seeds=[4, 2, 3], **raced), planned_seeds=3 if "budget" in raced else None)
    second = confirmation(study, rows_of({"Identity": (0.9, 1.0), "TopK(0.5)": (0.9, 0.5)})[1:])
    assert fresh_seeds(study) == [5, 6, 7] == list(second.seeds)
    assert not set(second.seeds) & set(study.seeds)
    assert [(one.name, one.set) for one in second.baselines] == [
        ("dense", {"forward": "Identity"}),
        ("trial-1", {"forward": "TopK(0.5)"}),
    ]
    assert (second.most_trials, second.confirm, second.base) == (2, 0, study.base)
    assert second.race is None  # every setting is trained to the end, on every seed
    (tmp_path / "out").mkdir()
    second.write(tmp_path / "out")
    assert read_study(tmp_path / "out" / "study.toml").as_mapping() == second.as_mapping()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"confirm": 2}, "`confirm` must be 0 or at least 3 seeds, but got 2."),
        (
            {"baselines": [{"name": "sparse", "params": {"forward": "TopK(0.5)"}}]},
            "`confirm` needs a baseline without compression among `baselines`, but there is none.",
        ),
        (
            {"objectives": ["wire_bytes"]},
            "`confirm` needs accuracy_on, loss_on or another quality with compression on among `objectives`.",
        ),
    ],
)
def test_impossible_confirmation_is_refused(tmp_path, changes, sentence):
    with pytest.raises(ConfigError) as error:
        study_of(tmp_path, **changes)
    assert str(error.value) == sentence


@pytest.mark.slow
def test_a_confirmation_is_judged_alone_and_goes_on_where_it_was(ray, tmp_path, capsys):
    """A lossless setting is chosen; the dense runs are too short to have learned, so that even it is not called safe."""
    space = {"forward": ["Identity", "Nonzero"]}
    study = study_of(tmp_path, space=space, sampler="grid", trials=None, seeds=[0], engine="inline")
    first = Sweep(study, out=tmp_path / "out")
    first.run()
    second = confirming(first)
    assert [one.name for one in second.study.baselines] == ["dense", "trial-2"]
    second.run()
    folder = tmp_path / "out" / "confirm"
    frame = pd.read_parquet(folder / "trials.parquet")
    assert frame["status"].tolist() == ["finished"] * 2
    assert [list(seeds) for seeds in frame["seeds"]] == [[1, 2, 3]] * 2
    (row,) = settings(load(tmp_path / "out")).to_dict("records")
    assert (row["chose_on"], row["confirmed_on"], row["seeds"]) == ([0], [1, 2, 3], 3)
    assert row["harm"] == 0
    assert (row["verdict"], row["lacking"]) == ("undecided", "the dense runs are not surely above chance")
    show_confirmation(second)
    shown = capsys.readouterr().out
    assert "On 1gbps over Ray, stay dense: " in shown  # the report's verdict: a lossless setting is no faster there
    assert "CompressedLink" not in shown
    before = {name: Run(folder / name).row["run_id"] for runs in frame["runs"] for name in runs}
    again = confirming(
        SimpleNamespace(study=study, rows=first.rows, store=first.store, folder=first.folder, address=None, wait_s=0.0)  # type: ignore[arg-type]
    )
    again.run()
    assert {name: Run(folder / name).row["run_id"] for name in before} == before
    longer = replace(study, confirm=4)
    with pytest.raises(ConfigError) as error:
        confirming(
            SimpleNamespace(  # type: ignore[arg-type]
                study=longer, rows=first.rows, store=first.store, folder=first.folder, address=None, wait_s=0.0
            )
        )
    assert str(error.value) == "`confirm` must be 3, as when it began, but got 4."


def test_a_model_near_chance_is_on_no_frontier(tmp_path):
    rows = Rows(tmp_path, "small")
    for number, (accuracy, step_s) in enumerate([(0.12, 1.0), (0.95, 2.0)]):
        figures = {"accuracy_on": Figure(accuracy), "step_s@1gbps": Figure(step_s)}
        name = f"trials/{number}-s0"
        (tmp_path / name).mkdir(parents=True)
        reached = pa.table({"status": ["finished"], "final_accuracy_on": [accuracy], "chance_accuracy": [0.1]})
        write_table(reached, tmp_path / name / "run.parquet")
        rows.put(TrialRow(number, [0], status="finished", runs=[name], figures=figures))
    objectives = [Objective("accuracy_on"), Objective("step_s@1gbps")]
    sweep = SimpleNamespace(store=SimpleNamespace(place=lambda: tmp_path), study=SimpleNamespace(objectives=objectives))
    failed = {row.trial for row in rows if _near_chance(row, sweep)}  # type: ignore[arg-type]
    assert failed == {0}
    assert [row.trial for row in best_trials(rows, objectives)] == [1, 0]
    assert [row.trial for row in best_trials(rows, objectives, failed)] == [1]


def ended_sweep(folder, reached, **changes):
    """Return a sweep that has ended, of {forward: (loss, accuracy)} over two seeds; by chance 4 and 0.1. The first is dense."""
    study = study_of(folder, confirm=0, objectives=["loss_on", "step_s@100mbps"], **changes)
    rows = Rows(folder, "small")
    for number, (forward, (loss, accuracy)) in enumerate(reached.items()):
        runs = [f"trials/{number}-s{seed}" for seed in study.seeds]
        for run in runs:
            (folder / run).mkdir(parents=True)
            columns = {"status": "finished", "final_loss_on": loss, "chance_loss": 4.0}
            columns |= {"final_accuracy_on": accuracy, "chance_accuracy": 0.1}
            write_table(pa.table({name: [value] for name, value in columns.items()}), folder / run / "run.parquet")
        figures = {"loss_on": Figure(loss), "step_s@100mbps": Figure(1.0 + number)}
        name = None if number else "dense"
        rows.put(TrialRow(number, [0, 1], notation=forward, name=name, status="finished", runs=runs, figures=figures))
    store = SimpleNamespace(place=lambda: folder, out=str(folder))
    return SimpleNamespace(store=store, study=study, rows=rows, results=None, search=SimpleNamespace(summary=list))


def test_untrained_trials_are_judged_by_study_objective(tmp_path, capsys):
    show_result(ended_sweep(tmp_path, {"Identity": (2.9, 0.1), "TopK(0.5)": (3.4, 0.1), "TopK(0.1)": (3.9, 0.1)}))
    shown = capsys.readouterr().out
    assert "1 of 3 trials learned nothing: by loss less than 10 % better than chance (trial 2)." in shown
    assert "beaten" not in shown
    assert "Dense is among them" not in shown


def test_untrained_trials_dominate_nothing(tmp_path, capsys):
    show_result(ended_sweep(tmp_path, {"Identity": (3.9, 0.9), "TopK(0.5)": (3.95, 0.9)}))
    shown = capsys.readouterr().out
    assert "beaten" not in shown
    assert "(learned nothing)" in shown
    assert shown.count("learned nothing:") == 1
    assert "Dense is among them" in shown


def test_sweep_announces_undecidable_comparisons(tmp_path):
    space = {"forward": ["Identity", *(f"TopK(0.{digit})" for digit in range(1, 10))]}
    part = study_of(tmp_path, confirm=0, space=space, sampler="grid", trials=4)
    assert beforehand(part) == [
        "3 of 10 grid points, drawn with seed 0.",
        "2 seeds cannot support a verdict. Train at least 3, better 5, by `--seeds 5`, or judge the choice by `--confirm 5`.",
    ]
    assert beforehand(replace(part, trials=100, seeds=(0, 1, 2))) == []
    assert beforehand(replace(part, trials=100, confirm=3)) == []


def test_partial_grid_is_sampled_by_seed(tmp_path):
    space = {"forward": [f"TopK(0.{digit})" for digit in range(1, 10)], "backward": ["Identity", "TopK(0.5)"]}
    drawn = [
        study_of(tmp_path, confirm=0, space=space, baselines=None, sampler="grid", trials=6, sampler_seed=seed).grid
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    written = grid_points(study_of(tmp_path, confirm=0, space=space, baselines=None, sampler="grid", trials=6).space)
    assert drawn[0] != written
    assert sorted(map(str, drawn[0])) == sorted(map(str, written))
    assert {point["backward"] for point in drawn[0][:6]} == {"Identity", "TopK(0.5)"}
