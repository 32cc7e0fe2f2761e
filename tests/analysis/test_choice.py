"""The front, the safe settings, where they pay and what matters: on constructed data of known truth."""

import math
from typing import Any

import numpy as np
import optuna
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records_made import write_run, write_study
from report_runs import change_row

from raysim import analysis, train
from raysim.analysis import (
    AnalysisError,
    frontier,
    importance,
    in_company,
    load,
    natural_direction,
    replay,
)
from raysim.analysis.comparison.choice import is_promising
from raysim.analysis.comparison.contexts import AT_CHANCE, contexts
from raysim.analysis.comparison.race import Evidence, Race
from raysim.analysis.comparison.rule import judge, sample
from raysim.analysis.report.frontier import quality_blocks
from raysim.analysis.report.gather import gather
from raysim.analysis.report.page import Chart
from raysim.config import make_config
from raysim.config.identity import Setting
from raysim.network.presets import parse_network
from raysim.quality import MEASURES

POINTS = st.lists(st.tuples(*[st.integers(0, 6)] * 3), min_size=1, max_size=40)


@settings(max_examples=50)
@given(POINTS)
def test_frontier_is_undominated(points):
    frame = pd.DataFrame(points, columns=["loss", "accuracy", "wire_bytes"])
    front = set(frontier(frame, ["loss", "accuracy", "wire_bytes"]).index)
    for place, a in enumerate(points):
        beaten = any(b[0] <= a[0] and b[1] >= a[1] and b[2] <= a[2] and b != a for b in points)
        assert (place in front) is not beaten


def test_infeasible_trials_are_not_on_frontier():
    trials = pd.DataFrame({"objective.step_s": [1.0, 2.0, 3.0], "feasible": pd.array([False, True, None], "boolean")})
    assert frontier(trials, ["step_s"]).index.tolist() == [1]
    assert frontier(trials.drop(columns="feasible"), ["step_s"]).index.tolist() == [0]


def test_frontier_keeps_order_and_drops_rows_without_objective():
    frame = pd.DataFrame(
        {
            "objective.loss_on": [0.2, 0.1, np.nan, 0.3],
            "objective.step_s@100mbps": [1.0, 2.0, 0.1, 3.0],
            "trial": range(4),
        },
        index=[7, 5, 3, 1],
    )
    front = frontier(frame, ["loss_on", "step_s@100mbps"])
    assert front.index.tolist() == [5, 7]
    assert front.columns.tolist() == frame.columns.tolist()
    assert frontier(frame, {"loss_on": "maximize"}).index.tolist() == [1]
    assert frontier(frame[:0], ["loss_on"]).empty


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((["speed"],), "There is no column 'speed'. Known: objective.loss, objective.dice_on."),
        (
            (["dice_on"],),
            "`objective.dice_on` is a measure of your own: give its direction, as in {'objective.dice_on': 'maximize'}.",
        ),
        (([],), "`objectives` must name at least one column."),
        (({"loss": "down"},), "`objectives` must have the direction 'minimize' or 'maximize', but 'loss' has 'down'."),
    ],
)
def test_invalid_frontier_is_refused(arguments, sentence):
    with pytest.raises(AnalysisError) as error:
        frontier(pd.DataFrame({"objective.loss": [1.0], "objective.dice_on": [0.5]}), *arguments)
    assert str(error.value) == sentence


def test_objective_directions_follow_names():
    assert natural_direction("break_even_bps") == natural_direction("chance") == "maximize"
    assert natural_direction("final_accuracy_off") == natural_direction("compression_factor") == "maximize"
    assert natural_direction("time_to_target_s@worldwide") == natural_direction("objective.wire_bytes") == "minimize"


def make_runs(folder, accuracies, **changes):
    """Write runs of {setting: one accuracy a seed}, with compression on and off alike."""
    for place, (forward, values) in enumerate(accuracies.items()):
        for seed, accuracy in enumerate(values):
            status = "diverged" if accuracy is None else "finished"
            finals = (
                {} if accuracy is None else {"accuracy_on": accuracy, "accuracy_off": accuracy, "loss_on": 1 - accuracy}
            )
            options = {"tables": False, **changes}
            write_run(folder / f"{place}-s{seed}", forward=forward, seed=seed, status=status, finals=finals, **options)


def test_settings_are_safe_only_if_bound_is_within_margin(tmp_path):
    make_runs(
        tmp_path,
        {
            "Identity": [0.90, 0.92, 0.91, 0.93, 0.92],
            "TopK(0.5)": [0.899, 0.921, 0.910, 0.929, 0.92],  # as good, closely
            "TopK(0.3)": [0.80, 0.82, 0.80, 0.83, 0.82],  # ten points worse
            "TopK(0.2)": [0.85, 0.95, 0.88, 0.96, 0.94],  # as good on average, widely
            "TopK(0.1)": [0.90, 0.92],  # the same, of two seeds
            "TopK(0.05)": [None] * 5,
        },
    )
    results = load(tmp_path)
    found = analysis.settings(results).set_index("forward")
    assert found["verdict"].to_dict() == {
        "TopK(0.5)": "safe",
        "TopK(0.3)": "harmful",
        "TopK(0.2)": "undecided",
        "TopK(0.1)": "undecided",
        "TopK(0.05)": "harmful",
    }
    assert found.loc["TopK(0.3)", "harm"] == pytest.approx(10.2)
    assert found.loc["TopK(0.05)", "harm"] == pytest.approx(91.6)
    assert found.loc["TopK(0.1)", "lacking"] == "2 of at least 3 seeds"
    assert set(found["family"]) == {5}
    assert found.loc["TopK(0.1)", "seeds"] == 2
    assert set(found["within"]) == {0.5}
    assert set(found["unit"]) == {"points of accuracy"}
    assert found.loc["TopK(0.5)", "compression_factor"] == 10
    wide = analysis.settings(results, within=20.0).set_index("forward")["verdict"]
    assert wide[["TopK(0.5)", "TopK(0.3)", "TopK(0.2)"]].tolist() == ["safe"] * 3
    losses = analysis.settings(results, quality="loss").set_index("forward")
    assert losses.loc["TopK(0.3)", "unit"] == "% of loss"


@pytest.mark.parametrize("tables", [True, False], ids=["after steps", "before its first step"])
def test_a_diverged_run_counts_as_untrained_wherever_it_began(tmp_path, tables):
    """Also from weights whose first loss is lower than the final one of dense."""
    for forward in ("Identity", "TopK(0.1)"):
        for seed in range(4):
            diverged = forward != "Identity" and seed > 0
            ended: dict[str, Any] = {"status": "diverged", "tables": tables} if diverged else {}
            ended |= {} if diverged else {"finals": {"loss_on": 2.1 + seed / 1000}}
            folder = tmp_path / f"{forward}-s{seed}"
            write_run(folder, forward=forward, seed=seed, extra={"chance_loss": 4.0}, **ended)
    (row,) = analysis.settings(load(tmp_path), quality="loss").to_dict("records")
    assert (row["seeds"], row["diverged"]) == (3, 2)
    assert row["harm"] == pytest.approx(100 * (4.0 / 2.1 - 1) * 2 / 3, abs=0.1)
    assert row["verdict"] != "safe"


@pytest.mark.parametrize(("dense", "lacking"), [(0.1, AT_CHANCE), (0.9, "4 of 5 planned seeds")])
def test_dense_runs_that_learned_nothing_are_named_before_missing_seeds(tmp_path, dense, lacking):
    """As after a race whose settings left before their last seed: dense trained no model, and no more seeds will help."""
    study = write_study(tmp_path / "study", [{}], objectives={"accuracy_on": "maximize"})
    written = (study / "study.toml").read_text()
    (study / "study.toml").write_text(f"seeds = [0, 1, 2, 3, 4]\n{written}")
    make_runs(study / "trials", {"Identity": [dense] * 4, "TopK(0.1)": [dense] * 4})
    (row,) = analysis.settings(load(tmp_path)).to_dict("records")
    assert (row["verdict"], row["lacking"]) == ("undecided", lacking)


@pytest.mark.parametrize("dense", [0.1, 0.9], ids=["at chance", "above it"])
def test_nothing_is_promising_beside_dense_runs_that_learned_nothing(tmp_path, dense):
    make_runs(tmp_path, {"Identity": [dense] * 3, "TopK(0.1)": [dense - 0.005, dense, dense + 0.005]})
    (row,) = analysis.settings(load(tmp_path)).to_dict("records")
    assert row["verdict"] == "undecided"
    assert is_promising(row) is (dense > 0.5)


@pytest.mark.parametrize("losses", [[-1.0, -1.2, -1.1], [0.2, 0.0, 0.1]], ids=["negative", "zero"])
def test_harm_in_per_cent_of_nothing_is_no_verdict(tmp_path, losses):
    """Also if dense is above 0 on other seeds: those left would be the worst of dense."""
    study = write_study(tmp_path / "study", [{}], objectives={"loss_on": "minimize"})
    for forward in ("Identity", "TopK(0.1)"):
        for seed, loss in enumerate(losses):
            finals = {"loss_on": loss, "loss_off": loss}
            write_run(study / "trials" / f"{forward}-{seed}", forward=forward, seed=seed, finals=finals, tables=False)
    (row,) = analysis.settings(load(tmp_path)).to_dict("records")
    assert (row["verdict"], row["seeds"]) == ("undecided", 0)
    assert row["lacking"] == MEASURES["loss"].undefined(min(losses)) != ""
    assert not is_promising(row)


def test_a_result_that_is_no_number_is_named(tmp_path):
    make_runs(tmp_path, {"Identity": [0.9] * 4, "TopK(0.1)": [0.9, 0.9, 0.9]})
    write_run(tmp_path / "none", forward="TopK(0.1)", seed=3, finals={"accuracy_on": math.nan, "accuracy_off": 0.9})
    results = load(tmp_path)
    assert analysis.settings(results)["seeds"].tolist() == [3]
    assert (
        "The run none has no number as its final accuracy with compression on, and is not judged." in results.problems
    )


def test_nothing_is_safe_by_the_seeds_alone_that_have_a_number(tmp_path):
    make_runs(tmp_path, {"Identity": [0.9, 0.901, 0.902] * 2, "TopK(0.1)": [0.9, 0.901, 0.902, *[math.nan] * 2]})
    (row,) = analysis.settings(load(tmp_path)).to_dict("records")
    assert row["harm_high"] < row["within"]
    assert (row["verdict"], row["lacking"]) == ("undecided", "2 of 5 seeds have no number as their accuracy")


def test_a_seed_trained_again_for_want_of_a_number_counts(tmp_path):
    """Of several runs with a number, the first counts."""
    missing = {"accuracy_on": math.nan, "accuracy_off": 0.9}
    for name in ("Identity", "TopK(0.1)"):
        write_run(tmp_path / f"0-{name}", forward=name, seed=2, finals=missing, tables=False)
    make_runs(tmp_path / "1", {"Identity": [0.9] * 3, "TopK(0.1)": [0.8] * 3})
    make_runs(tmp_path / "2", {"Identity": [0.9] * 3, "TopK(0.1)": [0.5] * 3})
    (context,) = contexts(load(tmp_path))
    assert context.harms(Setting("TopK(0.1)")) == pytest.approx(dict.fromkeys(range(3), 10))


def test_runs_on_other_data_are_not_compared(tmp_path):
    """A file may change between the runs of dense and of a setting; older records do not say what they were trained on."""
    digests = {"Identity": "a", "TopK(0.5)": "a", "TopK(0.3)": "b", "TopK(0.2)": None}
    for i, (forward, digest) in enumerate(digests.items()):
        make_runs(tmp_path / str(i), {forward: [0.9, 0.91, 0.92]}, extra={"data_digest": digest})
    results = load(tmp_path)
    seeds = analysis.settings(results).set_index("forward")["seeds"]
    assert seeds.to_dict() == {"TopK(0.5)": 3, "TopK(0.3)": 0, "TopK(0.2)": 3}
    assert "cnn on digits: the data changed between runs, and only runs on equal data are compared." in results.problems


def test_settings_are_judged_by_the_objective_of_their_study(tmp_path):
    study = write_study(tmp_path / "study", [{}], objectives={"loss_on": "minimize", "accuracy_on": "maximize"})
    for seed in range(3):
        for name, forward, loss in (("dense", "Identity", 1.0), ("topk", "TopK(0.1)", 1.2)):
            finals = {"loss_on": loss + seed / 1000, "accuracy_on": 0.9}
            write_run(study / "trials" / f"{name}-s{seed}", finals=finals, forward=forward, seed=seed)
    (row,) = analysis.settings(load(tmp_path)).to_dict("records")
    assert (row["unit"], row["verdict"]) == ("% of loss", "harmful")
    assert row["harm"] == pytest.approx(20, abs=0.1)
    assert row["chance"] < 0.01
    assert not is_promising(row)
    assert is_promising(row | {"verdict": "undecided", "harm": 0.9})
    assert not is_promising(row | {"verdict": "undecided", "harm": 1.1})
    (tmp_path / "study" / "study.toml").unlink()
    (row,) = analysis.settings(load(tmp_path)).to_dict("records")
    assert row["unit"] == "points of accuracy"


def test_only_runs_alike_in_all_else_are_set_against_each_other(tmp_path):
    make_runs(tmp_path / "short", {"Identity": [0.5] * 3})
    make_runs(tmp_path / "long", {"TopK(0.5)": [0.9] * 3}, steps=5)
    results = load(tmp_path)
    found = analysis.settings(results)
    assert found["seeds"].tolist() == [0]
    assert found["verdict"].tolist() == ["undecided"]
    assert [context.label for context in contexts(results)] == ["cnn on digits, steps=4", "cnn on digits, steps=5"]


def test_runs_older_than_a_key_are_compared_as_by_its_default(tmp_path):
    make_runs(tmp_path / "old", {"Identity": [0.5] * 3})
    make_runs(tmp_path / "new", {"TopK(0.5)": [0.5] * 3})
    for folder in (tmp_path / "old").iterdir():
        change_row(folder, drop=("transport", "tf32", "optimizer.decay_every"))
    results = load(tmp_path)
    assert analysis.settings(results)["seeds"].tolist() == [3]
    assert set(results.runs["transport"]) == {"ray"}


def test_jobs_are_told_apart_by_keys_as_one_types_them(tmp_path):
    for place, cuts in enumerate((["block1"], ["block1", "block3"])):
        make_runs(tmp_path / str(place), {"Identity": [0.5] * 2}, cuts=cuts, num_stages=None)
    first, second = (context.label for context in contexts(load(tmp_path)))
    assert (first, second) == ("cnn on digits, cuts=['block1', 'block3']", "cnn on digits, cuts=['block1']")


def test_equal_boundaries_form_one_setting(tmp_path):
    write_run(tmp_path / "a", forward=["TopK(0.5)", "TopK(0.5)"], finals={"accuracy_on": 0.5})
    write_run(tmp_path / "b", forward=["TopK(0.5)", "Identity"], finals={"accuracy_on": 0.5}, seed=1)
    write_run(tmp_path / "none", seed=3)
    results = load(tmp_path)
    (context,) = contexts(results)
    assert set(context.settings) == {Setting("TopK(0.5)"), Setting('["TopK(0.5)", "Identity"]')}
    assert results.problems == ["The run none has no final evaluation, and is not compared."]


def test_lines_by_density_join_what_differs_from_dense_in_one_direction_alone(tmp_path):
    make_runs(tmp_path / "alone", {"Identity": [0.9], "TopK(0.1)": [0.8], "TopK(0.3)": [0.85]}, num_replicas=2)
    make_runs(tmp_path / "more", {"TopK(0.2)": [0.3]}, num_replicas=2, replica_gradient="PowerSGD(1)")
    material = gather(load(tmp_path), [parse_network("free")])
    (chart,) = quality_blocks(material.jobs[0], material)
    assert isinstance(chart, Chart)
    densities = {trace["name"]: trace["x"] for trace in chart.panels[0].traces}
    assert densities["compression on, this direction alone"] == [0.1, 0.3]
    assert densities["compression on, other changes too"] == [0.2]


def test_nothing_finished_gives_empty_tables(tmp_path):
    write_run(tmp_path / "a", status="running")
    results = load(tmp_path)
    assert analysis.settings(results).empty
    assert analysis.settings(results, networks="1gbps").empty
    assert {"setting", "verdict"} <= set(analysis.settings(results))


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    from configurations import SMALL

    folder = tmp_path_factory.mktemp("real")
    for name, change in {"dense": {}, "sparse": {"forward": "TopK(0.1)", "backward": "TopK(0.1)"}}.items():
        train(make_config({**SMALL, **change, "steps": 4}), engine="inline", out=folder / name)
    train(
        make_config({**SMALL, "profile_every_steps": 0, "forward": "TopK(0.1)"}),
        engine="inline",
        out=folder / "unpriced",
    )
    return folder


@pytest.mark.slow
def test_all_runs_are_priced_under_their_names_and_against_their_dense_ones(real):
    results = load(real)
    frame = replay(results, ["10mbps", "1gbps"], against="dense", target="accuracy=0")
    assert frame["run"].tolist() == ["dense", "dense", "sparse", "sparse"]
    sparse, dense = in_company([real / "sparse", real / "dense"])
    alone = replay(sparse, ["10mbps", "1gbps"], against=dense, target="accuracy=0")
    mine = frame[frame["run"] == "sparse"].reset_index(drop=True)
    pd.testing.assert_frame_equal(mine.drop(columns="run"), alone.drop(columns="run"))
    assert frame["speedup"][:2].tolist() == [1.0, 1.0]
    assert any("has no profiled actions" in problem for problem in results.problems)
    with pytest.raises(AnalysisError) as error:
        replay(real / "sparse", "1gbps", against="dense")
    assert str(error.value) == (
        "`against` = 'dense' needs the `Results` of `load`, in which each run has a dense counterpart."
    )


def test_break_even_is_the_bandwidth_at_which_both_are_equal(real):
    (row,) = analysis.settings(load(real), networks="1gbps").dropna(subset="step_s").to_dict("records")
    one, dense = in_company([real / "sparse", real / "dense"])
    even: Any = one.break_even_bps(dense, parse_network("1gbps"))
    assert (row["break_even_bps"], row["break_even_low_bps"], row["break_even_high_bps"]) == even
    expected = "always" if math.isinf(even.low) else "never" if even.high == 0 else "below" if even.low > 0 else None
    assert row["pays"] == (expected or "not distinguishable")
    assert row["speedup"] == row["dense_step_s"] / row["step_s"]
    assert row["priced"] == 1
    assert (row["forward"], row["backward"]) == ("TopK(0.1)", "TopK(0.1)")


def trials_of(count=40):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"param.a": rng.uniform(0, 1, count), "param.b": rng.integers(1, 9, count)})
    frame["param.kind"] = rng.choice(["x", "y"], count)
    frame["param.density"] = np.where(frame["param.kind"] == "x", rng.uniform(0.001, 1, count), np.nan)
    frame["objective.loss"] = 5 * frame["param.a"] + 0.05 * frame["param.b"]
    frame["objective.bytes"] = np.where(frame["param.kind"] == "x", 10 * frame["param.density"].fillna(0), 20)
    return frame


@pytest.mark.slow
def test_importance_is_found_for_each_objective():
    found = importance(trials_of())
    table = found.pivot(index="parameter", columns="objective", values="importance")
    assert table.loc["a", "loss"] > 0.9
    assert table.loc["kind", "bytes"] > 0.9
    assert table.loc["density", "bytes"] > 0.9
    everywhere = found[~found["conditional"]]
    assert everywhere.groupby("objective")["importance"].sum().tolist() == pytest.approx([1, 1])
    assert everywhere["trials"].unique().tolist() == [40]
    assert found[found["conditional"]]["parameter"].unique().tolist() == ["density"]


def test_importance_is_that_of_optuna_on_the_study_itself():
    space = {"a": optuna.distributions.FloatDistribution(0, 1), "b": optuna.distributions.IntDistribution(1, 8)}
    study = optuna.create_study()
    rng = np.random.default_rng(0)
    ends = [{"a": 0.0, "b": 1}, {"a": 1.0, "b": 8}]
    for params in [*ends, *({"a": rng.uniform(), "b": int(rng.integers(1, 9))} for _ in range(20))]:
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=space, value=params["a"] ** 2 + params["b"] / 9)
        )
    expected = optuna.importance.get_param_importances(
        study, evaluator=optuna.importance.FanovaImportanceEvaluator(seed=3)
    )
    frame = pd.DataFrame(
        [
            {"param.a": trial.params["a"], "param.b": trial.params["b"], "objective.0": trial.value}
            for trial in study.trials
        ]
    )
    found = importance(frame.assign(study="s"), seed=3)
    assert dict(found[["parameter", "importance"]].to_numpy()) == pytest.approx(expected)


def test_baselines_and_shared_results_are_not_trials():
    frame = trials_of().assign(study="s", baseline=False, same_as=pd.array([None] * 40, "Int64"))
    strange = frame.assign(**{"objective.loss": 1e6 * frame["param.b"]})
    both = pd.concat([frame, strange.assign(baseline=True), strange.assign(same_as=3)])
    pd.testing.assert_frame_equal(importance(frame, ["loss"]), importance(both, ["loss"]))
    assert importance(frame[:3]).empty
    with pytest.raises(AnalysisError) as error:
        importance(frame, ["mood"])
    assert str(error.value).startswith("There is no column 'mood'. Known: param.a,")


def test_eliminated_settings_count_in_report_family(tmp_path):
    """The bounds are those of the race that judged the same harms: its family has all settings that began."""
    for place, (forward, mean) in enumerate({"Identity": 0.9, "TopK(0.5)": 0.899}.items()):
        for seed in range(5):
            finals = {"accuracy_on": mean + 0.001 * ((seed * 7 + place * 3) % 5), "loss_on": 0.6}
            write_run(tmp_path / f"{place}-s{seed}", seed=seed, forward=forward, finals=finals)
    alone = analysis.settings(load(tmp_path)).iloc[0]
    for number in range(6):
        write_run(tmp_path / f"left-{number}", status="interrupted", forward=f"TopK(0.0{number + 1})")
    results = load(tmp_path)
    (row,) = analysis.settings(results).to_dict("records")
    assert row["family"] == 7
    (context,) = contexts(results)
    (setting,) = set(context.settings) - {Setting()}
    harms = tuple(context.harms(setting).values())
    race = Race(5, context.margin, 7, step=context.step)
    assert (race.safe({"only": Evidence(1.0, final=harms)}) == ["only"]) is (row["verdict"] == "safe")
    samples = [sample(dict(enumerate(harms)), step=context.step), *[sample({})] * 6]
    assert row["harm_high"] == pytest.approx(judge(samples, [context.margin] * 7)[0].bounds.high)
    assert row["harm_high"] > alone["harm_high"]
    reported = gather(results, [parse_network("free")]).judged
    assert {run: each["harm_high"] for run, each in reported.items()} == dict.fromkeys(row["runs"], row["harm_high"])


def test_settings_whose_confirmation_is_not_over_count_in_its_family(tmp_path):
    """The first of several to be confirmed is judged as one of them."""
    finals = {"Identity": [0.90, 0.92, 0.91], "TopK(0.5)": [0.899, 0.921, 0.910]}
    make_runs(tmp_path, finals)
    make_runs(tmp_path / "confirm", finals)
    (alone,) = analysis.settings(load(tmp_path)).to_dict("records")
    write_run(tmp_path / "confirm" / "begun", status="interrupted", forward="TopK(0.3)")
    (row,) = analysis.settings(load(tmp_path)).to_dict("records")
    assert (alone["family"], row["family"]) == (1, 2)
    assert row["harm_high"] > alone["harm_high"]


def test_a_race_and_a_report_agree_about_the_same_harms(tmp_path):
    """Also about settings that borrow the spread of one that left on its first seeds."""
    study = write_study(tmp_path / "study", [{}], objectives={"accuracy_on": "maximize"})
    written = (study / "study.toml").read_text()
    (study / "study.toml").write_text(f"seeds = [0, 1, 2]\n{written}")
    drops = {"Identity": [0, 0, 0], "TopK(0.5)": [1, 2, 3], "TopK(0.3)": [2, 2, 3], "TopK(0.1)": [-9, 12]}
    for forward, lost in drops.items():
        for seed, drop in enumerate(lost):
            finals = {"accuracy_on": 0.9 - drop / 1000, "loss_on": 0.6}
            write_run(study / "trials" / f"{forward}-s{seed}", seed=seed, forward=forward, finals=finals)
    results = load(tmp_path)
    (context,) = contexts(results)
    evidence = {
        str(setting): Evidence(1.0, final=tuple(context.harms(setting).values()))
        for setting in context.settings
        if setting != Setting()
    }
    agreed = set()
    for margin in (0.2, 0.45, 0.5, 0.55, 3.0):
        judged = analysis.settings(results, within=margin)
        safe = set(judged.loc[judged["verdict"] == "safe", "setting"])
        assert set(Race(3, margin, 3, step=context.step).safe(evidence)) == safe
        agreed.add(len(safe))
    assert agreed == {0, 2}


@pytest.mark.parametrize(("seeds", "share"), [(5, 1 / 2), pytest.param(13, 1 / 6, marks=pytest.mark.slow)])
def test_setting_beyond_its_plan_is_judged_as_in_race(tmp_path, seeds, share):
    """Five of 21 seeds were planned. The report spends the share of the error of the look, and the race the same."""
    study = write_study(tmp_path / "study", [{}], objectives={"accuracy_on": "maximize"})
    written = (study / "study.toml").read_text()
    (study / "study.toml").write_text(f"seeds = {list(range(21))}\nplanned_seeds = 5\n{written}")
    for place, (forward, mean) in enumerate({"Identity": 0.9, "TopK(0.5)": 0.8985}.items()):
        for seed in range(seeds):
            finals = {"accuracy_on": mean + 0.001 * ((seed * 7 + place * 3) % 5), "loss_on": 0.6}
            write_run(study / "trials" / f"{place}-s{seed}", seed=seed, forward=forward, finals=finals)
    results = load(tmp_path)
    (context,) = contexts(results)
    (setting,) = set(context.settings) - {Setting()}
    harms = context.harms(setting)
    assert len(harms) == seeds
    found = context.sample(harms, setting)
    assert (found.seeds, found.share) == (tuple(range(seeds)), pytest.approx(share))
    race = Race(seeds, context.margin, 1, step=context.step, planned=5)
    assert race.share == found.share
    (row,) = analysis.settings(results).to_dict("records")
    assert row["seeds"] == seeds
    edge = row["harm_high"]  # the least margin at which the report calls it safe
    for margin, safe in ((edge - 1e-6, False), (edge + 1e-6, True)):
        again = analysis.settings(results, within=margin).iloc[0]
        assert (again["verdict"] == "safe") is safe
        judged = Race(seeds, margin, 1, step=context.step, planned=5).safe(
            {"only": Evidence(1.0, final=tuple(harms.values()))}
        )
        assert (judged == ["only"]) is safe
