"""Sweeps on a real Ray: what they leave behind, warm stages that remember nothing, and trials that fail."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pyarrow.parquet as pq
import pytest
from optuna.trial import TrialState
from ray.tune.experiment import Trial
from runs import same_records
from studies import BASE, write_study
from trials import check_agree

from raysim.config import ConfigError, make_config
from raysim.engine.inline import InlineEngine
from raysim.network.memory import StageMemory
from raysim.pipeline.prepare import prepare
from raysim.pipeline.reports import StepFeedback
from raysim.pipeline.state import unpack_tensors
from raysim.records import Run
from raysim.sweeps import allocation
from raysim.sweeps.allocation import choose_engine, count_bytes, fit
from raysim.sweeps.objectives import Objective, Pricing
from raysim.sweeps.runner import Sweep, SweepError
from raysim.sweeps.search import LedgerSearch
from raysim.sweeps.study_file import read_study
from raysim.sweeps.trial import SweepTrial, TrialSpec
from raysim.sweeps.trial_rows import TrialRow, best_trials
from raysim.sweeps.tuning import Watch, make_scheduler, replay_evaluations
from raysim.training.train import train

CPU: Pricing = {"compute": "cpu", "profile": None}


def sweep(path, out, **options):
    one = Sweep(read_study(path), out=out, **options)
    one.run()
    return one


def hyperparameters(folder):
    """Return the hyperparameters that TensorBoard reads of a run."""
    plugin_data_pb2 = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    content = accumulator.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    return plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info.hparams


def test_sweep_writes_runs_rows_and_study(ray, tmp_path):
    path = write_study(
        tmp_path,
        seeds=[0, 1],
        objectives=["accuracy_on", "step_s@100mbps", {"name": "time_to_target_s@1gbps", "target": "accuracy=1.0"}],
        space={"forward": ["Identity", "EF21(TopK(0.3))"], "optimizer.learning_rate": [0.1, 1e30]},
        symbols=None,
        sampler="grid",
        trials=None,
        baselines=[{"name": "dense", "params": {"forward": "Identity", "optimizer.learning_rate": 0.1}}],
        jobs=1,
    )
    done = sweep(path, tmp_path / "out")
    frame = pd.read_parquet(tmp_path / "out" / "trials.parquet")
    assert frame["trial"].tolist() == list(range(5))
    by_status = frame.groupby("status")["param.optimizer.learning_rate"].unique().map(list).to_dict()
    assert by_status == {"finished": [0.1], "diverged": [1e30]}
    assert frame["same_as"].notna().sum() == 1  # the dense point of the grid is the baseline
    assert "seed 0: step" in frame.loc[frame["status"] == "diverged", "error"].iloc[0]
    for row in frame[frame["status"] == "finished"].itertuples():
        runs = [Run(tmp_path / "out" / name) for name in row.runs]
        assert [run.status for run in runs] == ["finished"] * 2
        assert [run.row["seed"] for run in runs] == [0, 1]
        values = [run.row["final_accuracy_on"] for run in runs]
        assert frame.loc[row.trial, "objective.accuracy_on"] == pytest.approx(sum(values) / 2)
        assert frame.loc[row.trial, "spread.accuracy_on"] == pytest.approx(pd.Series(values).std())
        # A target not reached is null, and said to be.
        assert pd.isna(frame.loc[row.trial, "objective.time_to_target_s@1gbps"])
        assert frame.loc[row.trial, "reached.time_to_target_s@1gbps"] == False  # noqa: E712
    assert all(trial.state == TrialState.FAIL for trial in done.ledger.optuna.trials)
    assert pq.read_schema(tmp_path / "out" / "trials.parquet").metadata[b"raysim_schema_version"] == b"2"
    assert {path.name for path in (tmp_path / "out" / "tensorboard").iterdir()} >= {"0-s0", "0-s1"}
    assert hyperparameters(tmp_path / "out" / "tensorboard" / "0-s1")["seed"].number_value == 1
    assert read_study(tmp_path / "out" / "study.toml").as_mapping() == done.study.as_mapping()
    assert not list((tmp_path / "out").rglob("*.pkl"))  # of Tune


@pytest.mark.slow
def test_warm_trials_are_fresh_runs_bit_for_bit(ray, tmp_path):
    """Whatever ran before on the same stages: other codecs, memories, models, dropout, types."""
    gpt = {"model": "gpt", "model.num_blocks": 2, "model.width": 16, "model.num_heads": 2, "model.dropout": 0.2}
    text = {"data": "topics", "data.length": 16, "data.train_samples": 64, "data.test_samples": 16}
    variants = {
        "aqsgd": {"forward": "AQSGD(Quantize(4, rounding='stochastic'))", "backward": "EF21(TopK(0.3))"},
        "gpt": {**gpt, **text, "forward": "ErrorFeedback(RandomK(0.5))"},
        "feedback": {"forward": "ErrorFeedback(TopK(0.1))", "backward": "Quantize(2)", "num_microbatches": 2},
        "bfloat16": {"dtype": "bfloat16", "forward": "TopK(0.2)"},
    }
    path = write_study(
        tmp_path,
        space={"variants": variants},
        symbols=None,
        sampler="grid",
        trials=None,
        baselines=None,
        engine="ray",
        jobs=1,
    )
    done = sweep(path, tmp_path / "out")
    assert {row.status for row in done.rows} == {"finished"}
    for row in done.rows:
        config = done.study.config(variants[row.params["variant"]])
        fresh = train(config, engine="inline", out=tmp_path / f"fresh-{row.trial}")
        same_records(Run(tmp_path / "out" / row.runs[0]), fresh)


def test_relative_paths_lead_from_the_folder_of_the_sweep(tmp_path, monkeypatch):
    """Tune puts each trial into a folder of its own."""
    (tmp_path / "elsewhere").mkdir()
    rows = "\n".join(f"{i},{i % 7},{3.5 * i}" for i in range(64))
    (tmp_path / "table.csv").write_text(f"a,b,price\n{rows}\n")
    data = {"name": "table", "path": "table.csv", "target": "price"}
    config = make_config({**BASE, "name": "small", "data": data, "model": "mlp", "steps": 6, "profile_every_steps": 2})
    objectives = (Objective("r2_on"),)
    spec = TrialSpec(0, config, (0,), str(tmp_path), objectives, "inline", CPU, [], folder=str(tmp_path))
    monkeypatch.chdir(tmp_path / "elsewhere")
    status, _, error, figures = outcome_and_shown(spec)[0]
    assert (status, error) == ("finished", None)
    assert figures["r2_on"].value == Run(tmp_path / "trials" / "0-s0").row["final_r2_on"]


def outcome_and_shown(spec):
    """Train a trial here; return its outcome and the steps of the evaluations that it shows to ASHA."""
    trial, shown = SweepTrial({"trial": spec}), []
    while not (result := trial.train())["done"]:
        shown += [result["evaluated_step"]] if "evaluated_step" in result else []
    return result["outcome"], shown


def test_asha_counts_the_steps_of_the_trial_and_judges_it_once_at_each(tmp_path):
    config = make_config({**BASE, "name": "small", "steps": 8, "checkpoint_at_steps": [6]})
    dense = train(config, out=tmp_path / "dense", engine="inline")
    spec = TrialSpec(0, config, (0,), str(tmp_path), (), "inline", CPU, [])
    branch = replace(spec, number=1, config=config.changed(start=f"{dense.folder}@6", checkpoint_at_steps=None))
    assert [outcome_and_shown(each)[1] for each in (spec, branch)] == [[2, 4, 6], [2, 4, 6]]

    scheduler = make_scheduler(read_study(write_study(tmp_path, early_stopping="asha")))
    resumed, other = (Trial("past", stub=True, trial_id=name) for name in ("resumed", "other"))
    for number in (1, 1, 1):  # ended before, as good as the one that goes on
        replay_evaluations(scheduler, tmp_path, TrialRow(number, [0], runs=branch.runs()))
    replay_evaluations(scheduler, tmp_path, TrialRow(1, [0], runs=branch.runs()), "resumed")
    for trial, decision in ((resumed, "CONTINUE"), (other, "STOP")):  # the first was judged before
        scheduler.on_trial_add(None, trial)
        assert scheduler.on_trial_result(None, trial, {"evaluated_step": 2, "loss_on": 99.0}) == decision


@pytest.mark.slow
def test_stages_are_used_again_and_thrown_away_after_a_failure(ray, tmp_path):
    class Probe(SweepTrial):  # here, and not above: workers cannot import a test
        def warm(self):
            import ray

            ids = [ray.get(actor.__ray_call__.remote(lambda stage: id(stage))) for actor in self._warm.actors]
            return self._warm.made, ids

    bundles = [{"memory": 1.0}, {"CPU": 1}, {"CPU": 1}]
    group = ray.util.placement_group(bundles)
    ray.get(group.ready(), timeout=60)
    place = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, 0, True)

    def spec(number, **changes):
        config = make_config({**BASE, "name": "small"} | changes)
        objectives = (Objective("loss_on"),)
        return {"trial": TrialSpec(number, config, (0,), str(tmp_path), objectives, "ray", CPU, bundles)}  # type: ignore[arg-type]

    trial = ray.remote(Probe).options(num_cpus=0, scheduling_strategy=place).remote(spec(0))
    try:

        def outcome():
            while not (result := ray.get(trial.train.remote(), timeout=120))["done"]:
                pass
            return result["outcome"]

        assert outcome()[0] == "finished"
        first = ray.get(trial.warm.remote(), timeout=60)
        assert first[0] == 1
        assert ray.get(trial.reset.remote(spec(1, forward="TopK(0.1)")), timeout=60)
        assert outcome()[0] == "finished"
        assert ray.get(trial.warm.remote(), timeout=60) == first
        ray.get(trial.reset.remote(spec(2, optimizer={"learning_rate": 1e30})), timeout=60)
        assert outcome()[0] == "diverged"
        ray.get(trial.reset.remote(spec(3)), timeout=60)
        assert outcome()[0] == "finished"
        assert ray.get(trial.warm.remote(), timeout=60) == first
        same_records(Run(tmp_path / "trials" / "3-s0"), Run(tmp_path / "trials" / "0-s0"))
        ray.get(trial.reset.remote(spec(6, model={"name": "tests.support.models:broken"})), timeout=60)
        failed = outcome()
        assert failed[0] == "failed"
        assert "no luck" in failed[2]
        assert ray.get(trial.warm.remote(), timeout=60) == (1, [])
        # Cut off in the middle, as a scheduler does: the run says so, the next one is as fresh as any.
        ray.get(trial.reset.remote(spec(4, steps=200)), timeout=60)
        ray.get(trial.train.remote(), timeout=60)
        ray.get(trial.reset.remote(spec(5)), timeout=60)
        assert Run(tmp_path / "trials" / "4-s0").status == "interrupted"
        assert outcome()[0] == "finished"
        same_records(Run(tmp_path / "trials" / "5-s0"), Run(tmp_path / "trials" / "0-s0"))
    finally:
        ray.get(trial.stop.remote(), timeout=60)
        ray.kill(trial)
        ray.util.remove_placement_group(group)


@pytest.mark.slow
def test_trials_that_fail_are_recorded_with_their_reason(ray, tmp_path):
    variants = {
        "too-many": {"data.train_samples": 8},
        "no-module": {"model": "nowhere:build"},
        "good": {"forward": "TopK(0.1)"},
    }
    path = write_study(
        tmp_path, space={"variants": variants}, symbols=None, sampler="grid", trials=None, baselines=None
    )
    done = sweep(path, tmp_path / "out")
    rows = {row.params["variant"]: row for row in done.rows}
    assert [rows[name].status for name in variants] == ["failed", "failed", "finished"]
    assert "`batch_size` must be at most the number of training samples (8)" in rows["too-many"].error
    assert "nowhere" in rows["no-module"].error
    check_agree(done.ledger)


@pytest.mark.slow
def test_a_failed_baseline_ends_a_study_whose_constraints_need_it(ray, tmp_path):
    path = write_study(
        tmp_path,
        baselines=[{"name": "dense", "set": {"optimizer.learning_rate": 1e30}}],
        constraints=[{"objective": "accuracy_on", "within": 0.01, "of": "dense"}],
    )
    with pytest.raises(SweepError, match="The baseline dense, which `constraints` need, is diverged"):
        sweep(path, tmp_path / "out")
    assert len(pd.read_parquet(tmp_path / "out" / "trials.parquet")) == 1


@pytest.mark.slow
def test_asha_prunes_poor_trials(ray, tmp_path):
    path = write_study(
        tmp_path,
        space={"optimizer.learning_rate": [0.1, 0.05, 1e-9, 1e-8, 1e-7]},
        symbols=None,
        sampler="random",
        trials=5,
        objectives=["loss_on"],
        early_stopping="asha",
        baselines=None,
        base=BASE | {"steps": 20},
        jobs=1,
        sampler_seed=3,
    )
    done = sweep(path, tmp_path / "out")
    pruned = [row for row in done.rows if row.status == "pruned" and row.same_as is None]
    assert pruned
    for row in pruned:
        assert len(Run(tmp_path / "out" / row.runs[0]).steps) < 20
        assert done.ledger.optuna.trials[row.trial].state == TrialState.PRUNED
        assert done.ledger.optuna.trials[row.trial].intermediate_values
    best = best_trials(done.rows, done.study.objectives)
    assert len(best) == 1
    assert TrialState.RUNNING not in [trial.state for trial in done.ledger.optuna.trials]


@pytest.mark.slow
def test_trials_that_run_at_once_start_side_by_side(ray, tmp_path, monkeypatch):
    """The second is asked for before the processes of the first have come up."""
    happened = []
    suggest = LedgerSearch.suggest

    def asked(self, trial_id):
        found = suggest(self, trial_id)
        happened.extend(["asked"] if isinstance(found, dict) else [])
        return found

    monkeypatch.setattr(LedgerSearch, "suggest", asked)
    monkeypatch.setattr(Watch, "on_trial_start", lambda self, **info: happened.append("up"), raising=False)
    done = sweep(write_study(tmp_path, engine="inline", jobs=2, trials=3), tmp_path / "out")
    assert [row.status for row in done.rows] == ["finished"] * 3
    assert happened[:3] == ["asked", "asked", "up"]
    assert "TUNE_MAX_PENDING_TRIALS_PG" not in os.environ


@pytest.mark.slow
def test_trials_are_equal_on_both_engines(ray, tmp_path):
    """Small models are trained in one process where the study leaves it open: the same quality and bytes, bit for bit."""
    objectives = ["accuracy_on", "loss_on", "loss_off", "wire_bytes"]
    done = {}
    for engine in ("auto", "ray"):
        (tmp_path / engine).mkdir()
        path = write_study(tmp_path / engine, engine=engine, trials=4, objectives=objectives, sampler_seed=2)
        done[engine] = sweep(path, tmp_path / engine / "out")
    for one, other in zip(done["auto"].rows, done["ray"].rows, strict=True):
        assert (one.engine, other.engine) == ("inline", "ray")
        assert (one.status, one.notation, one.figures) == (other.status, other.notation, other.figures)
        runs = [Run(tmp_path / engine / "out" / one.runs[0]) for engine in done]
        assert [run.row["engine"] for run in runs] == ["inline", "ray"]
        same_records(*runs)
    assert done["auto"].allocation.share.jobs > done["ray"].allocation.share.jobs


@pytest.mark.parametrize(
    ("nodes", "jobs", "changes", "expected"),
    [
        ([{"CPU": 2.0}], None, {}, (0.5, 0.0, 1)),
        ([{"CPU": 2.0}], 2, {}, (0.25, 0.0, 2)),
        ([{"CPU": 16.0}], None, {}, (1.0, 0.0, 4)),
        ([{"CPU": 2.0}, {"CPU": 2.0}], None, {"cpus_per_stage": 0.5}, (0.5, 0.0, 2)),
        ([{"CPU": 1.0}, {"CPU": 2.0}], None, {}, (0.6666, 0.0, 1)),
        ([{"CPU": 1.5}, {"CPU": 1.5}], 1, {}, (0.75, 0.0, 1)),
        ([{"CPU": 16.0, "GPU": 2.0}], 2, {}, (1.0, 0.25, 2)),
        ([{"CPU": 16.0, "GPU": 8.0}], 1, {}, (1.0, 1.0, 1)),
        ([{"CPU": 16.0, "GPU": 2.0}], 3, {"device": "cpu"}, (1.0, 0.0, 3)),
    ],
)
def test_stage_count_fits_available_resources(nodes, jobs, changes, expected):
    config = make_config({**BASE, "num_stages": 4, **changes})
    share = fit(config, nodes, 4, engine="ray", jobs=jobs, growing=False)
    assert (round(share.cpus, 4), round(share.gpus, 4), share.jobs) == (
        pytest.approx(expected[0], abs=2e-4),
        *expected[1:],
    )


@pytest.mark.parametrize(
    ("nodes", "jobs", "changes"),
    [
        ([{"CPU": 2.0}], None, {"cpus_per_stage": 3}),
        ([{"CPU": 2.0}], 3, {"cpus_per_stage": 0.5}),
        ([{"CPU": 8.0, "GPU": 1.0}], None, {"gpus_per_stage": 0.5}),
    ],
)
def test_misfit_overrides_are_refused(nodes, jobs, changes):
    config = make_config({**BASE, "num_stages": 4, **changes})
    with pytest.raises(ConfigError, match="must fit into"):
        fit(config, nodes, 4, engine="ray", jobs=jobs, growing=False)


@pytest.mark.parametrize(
    ("node", "changes", "engine", "jobs"),
    [
        ({"CPU": 4.0, "memory": 64e9}, {}, "inline", 4),
        ({"CPU": 4.0, "memory": 2.5e9}, {}, "inline", 2),  # at once as many as have memory
        ({"CPU": 4.0, "memory": 1e8}, {}, "ray", 2),
        ({"CPU": 4.0, "GPU": 2.0, "memory": 64e9}, {}, "ray", 2),
        ({"CPU": 4.0, "GPU": 2.0, "memory": 64e9}, {"device": "cpu"}, "inline", 4),
        ({"CPU": 4.0, "memory": 64e9}, {"data": {"name": "text", "path": "nowhere.txt"}}, "ray", 2),
    ],
)
def test_trials_share_a_process_if_capacity_allows(node, changes, engine, jobs):
    config = make_config({**BASE, **changes})
    need = choose_engine(config, [node], lambda: count_bytes(config).memory)
    assert need.engine == engine
    share = fit(config, [node], 2, jobs=None, growing=False, **need._asdict())
    assert share.jobs == jobs


@pytest.mark.parametrize(
    ("given", "memory", "engine", "jobs"),
    [
        ("auto", 7.5e9, "inline", 1),
        ("inline", 7.5e9, "inline", 1),
        ("auto", 7e9, "ray", 1),
        ("ray", 7e9, "ray", 1),
        ("ray", 13e9, "ray", 2),
        ("inline", 100e9, "inline", 4),
    ],
)
def test_as_many_trials_run_at_once_as_have_memory(monkeypatch, given, memory, engine, jobs):
    """Of 6.3 GB each, with two stages of half a CPU."""
    memories = [StageMemory(stage, saved_bytes=3_150_000_000, in_flight=1) for stage in range(2)]
    plan = SimpleNamespace(memories=memories, places=[(0, 0), (0, 1)], worker=lambda _, stage: stage)
    monkeypatch.setattr(allocation, "prepare", lambda config: SimpleNamespace(plan=plan))
    config, nodes = make_config({**BASE, "cpus_per_stage": 0.5}), [{"CPU": 4.0, "memory": memory}]
    need = choose_engine(config, nodes, lambda: count_bytes(config).memory, given)
    share = fit(config, nodes, 2, jobs=None, growing=False, **need._asdict())
    assert (need.engine, min(share.jobs, 4)) == (engine, jobs)
    assert fit(config, nodes, 2, jobs=4, growing=False, **need._asdict()).jobs == 4


@pytest.mark.parametrize(
    ("optimizer", "changes"),
    [("sgd", {}), ("adamw", {"num_replicas": 2}), ("adamw", {"num_stages": 4, "schedule": "Interleaved1F1B(2)"})],
)
def test_memory_of_a_trial_has_a_resumed_checkpoint(optimizer, changes):
    """The workers' state, the checkpoint, and the largest part twice: for small batches this is more than a step takes."""
    values = {"batch_size": 8, "num_microbatches": 4, "optimizer": {"name": optimizer, "learning_rate": 0.1}}
    workload = prepare(make_config({**BASE, "model": {"name": "cnn", "width": 256}, **values, **changes}))
    engine = InlineEngine(workload)
    engine.start()
    engine.step(0, StepFeedback())
    states = [unpack_tensors(part).values() for part in engine.state()]
    tensors = [sum(x.nbytes for x in state if x.ndim) for state in states]  # without Adam's numbers of steps
    counted = count_bytes(workload.plan.config)
    assert counted.checkpoint >= sum(tensors)
    assert counted.memory >= 2 * (sum(tensors) + max(tensors))


@pytest.mark.slow
def test_sweep_exceeding_capacity_is_refused_before_trials(ray, tmp_path):
    path = write_study(tmp_path, base=BASE | {"cpus_per_stage": 9}, engine="ray")
    with pytest.raises(ConfigError, match="1 trials of 2 stages with 9 CPU each must fit into"):
        sweep(path, tmp_path / "out")
