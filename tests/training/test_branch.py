"""A branch continues from a checkpoint of another run: with the parent's settings, to the parent's own bits."""

import importlib
from shutil import copytree

import pytest
import torch
from branches import same_steps
from configurations import SMALL
from pipelines import REPLICAS, RUNS, SUBSPACE, TIED, with_slow
from runs import break_off, same_records
from torch import nn

from raysim import Run, analysis, load_weights, train
from raysim.analysis.comparison.contexts import contexts
from raysim.config import ConfigError, make_config
from raysim.engine.inline import InlineEngine
from raysim.pipeline.plan import FIRST_PROFILED
from raysim.pipeline.state import unpack_tensors
from raysim.records import WARMUP_STEPS
from raysim.training.checkpoint import checkpoints
from raysim.training.run import Training

AT = 4


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A dense run of six steps with checkpoints at 0, 2 and 4."""
    values = {**SMALL, "checkpoint_at_steps": [0, 2, 4], "evaluate_every_steps": 2}
    return train(make_config(values), engine="inline", out=tmp_path_factory.mktemp("parent") / "run")


@pytest.mark.parametrize("name", with_slow(RUNS, *(RUNS.keys() - {"replicas-marina", "stashed"})))
def test_branch_with_parent_settings_equals_parent(small, tmp_path, name):
    """Memories of links and replicas, signals of adaptive methods, delayed weights and the learning rate all go on."""
    settings = {"clock": "100mbps", "profile": "T4", **RUNS[name], "evaluate_every_steps": 2}
    if "optimizer" in settings:
        settings["optimizer"] = {**settings["optimizer"], "decay": "cosine"}
    if "gpt" in str(settings.get("model")) or "tests" in str(settings.get("model")):
        settings["evaluate_every_steps"] = 3
    begun = train(small(**settings, checkpoint_at_steps=[AT]), engine="inline", out=tmp_path / "parent")
    branch = train(
        small(**settings, steps=6 - AT, start=f"{begun.folder}@{AT}"), engine="inline", out=tmp_path / "branch"
    )
    same_steps(branch, begun)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["feedback", "replicas-gravac"])
def test_branch_is_equal_on_both_engines(small, tmp_path, ray, name):
    settings = {**RUNS[name], "clock": "100mbps", "profile": "T4", "cpus_per_stage": 0.1}
    begun = train(small(**settings, checkpoint_at_steps=[AT]), engine="inline", out=tmp_path / "parent")
    branch = train(small(**settings, steps=2, start=f"{begun.folder}@{AT}"), engine="ray", out=tmp_path / "branch")
    assert branch.row["engine"] == "ray"
    same_steps(branch, begun)


@pytest.mark.slow
def test_branch_of_a_branch_keeps_first_plan(small, tmp_path):
    """Its learning rate, and constants of the model that are drawn from a seed and in no checkpoint."""
    settings = {**SUBSPACE, "optimizer": {"name": "adamw", "learning_rate": 1e-2, "decay": "linear"}}
    begun = train(small(**settings, checkpoint_at_steps=[2]), engine="inline", out=tmp_path / "a")
    first = train(small(**settings, seed=5, steps=2, start=f"{begun.folder}@2"), engine="inline", out=tmp_path / "b")
    second = train(small(**settings, seed=6, steps=2, start=str(first.folder)), engine="inline", out=tmp_path / "c")
    rates = [*begun.steps["learning_rate"][:2], *first.steps["learning_rate"], *second.steps["learning_rate"]]
    assert rates == begun.steps["learning_rate"].tolist()
    row = second.row
    assert (row["first_step"], row["rate_steps"], row["model_seed"]) == (4, 6, 0)
    assert (row["parent"], row["start"]) == (first.row["run_id"], str(first.folder))
    straight = train(small(**settings, seed=5, steps=4, start=f"{begun.folder}@2"), engine="inline", out=tmp_path / "d")
    same_twice = train(small(**settings, seed=5, steps=2, start=str(first.folder)), engine="inline", out=tmp_path / "e")
    same_steps(same_twice, straight)


def test_branches_of_a_seed_see_the_same_data_in_the_same_order(small, tmp_path, parent, monkeypatch):
    """A setting and dense are paired by seed: samples and dropout; other seeds see other orders, from the same state."""
    seen: dict[str, list[list[int]]] = {}
    states: dict[str, dict[str, torch.Tensor]] = {}
    for name, changes in {
        "dense": {"seed": 1},
        "setting": {"seed": 1, "forward": "TopK(0.1)"},
        "other": {"seed": 2},
    }.items():
        training = Training(small(**changes, steps=2, start=f"{parent.folder}@4"), engine="inline", out=tmp_path / name)  # type: ignore[arg-type]
        step, plan = InlineEngine.step, training.plan

        def taking(self, number, *arguments, name=name, plan=plan, step=step):
            if name not in states:
                states[name] = {
                    f"{index}.{key}": tensor.clone()
                    for worker in self.workers
                    for index, stage in worker.stages.items()
                    for key, tensor in stage.state().items()
                }
            seen.setdefault(name, []).append(plan.batch(number).tolist())
            return step(self, number, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(InlineEngine, "step", taking)
            list(training.events())
    assert seen["dense"] == seen["setting"] != seen["other"]
    assert all(torch.equal(states["dense"][key], states["other"][key]) for key in states["dense"])
    assert Run(tmp_path / "dense").steps["step"].tolist() == [4, 5]


def test_memories_start_empty_for_a_changed_compressor(small, tmp_path):
    """A branch from a parent with error feedback equals one from the same state without it, unless it goes on with it."""
    kept = {"forward": "ErrorFeedback(TopK(0.1))", "backward": "ErrorFeedback(TopK(0.1))"}
    begun = train(small(**kept, checkpoint_at_steps=[2]), engine="inline", out=tmp_path / "parent")
    residuals = {}
    for name, changes in {
        "same": kept,
        "other": {**kept, "forward": "ErrorFeedback(TopK(0.2))"},
    }.items():
        run = train(small(**changes, steps=1, start=f"{begun.folder}@2"), engine="inline", out=tmp_path / name)
        links = run.links
        residuals[name] = links[links["step"] == 2].groupby("direction")["residual_norm"].sum()
    parents = begun.links[begun.links["step"] == 2].groupby("direction")["residual_norm"].sum()
    assert residuals["same"].equals(parents)
    assert residuals["other"]["forward"] < parents["forward"]


def test_memories_start_empty_if_compression_starts_later(small, tmp_path):
    """In a branch that trains densely first; when the parent's compression began does not matter."""
    settings = {"forward": "ErrorFeedback(TopK(0.1))", "backward": "ErrorFeedback(TopK(0.1))"}
    begun = train(small(**settings, compress_from=1, steps=2), engine="inline", out=tmp_path / "parent")
    held = {}
    for step in (0, 3):
        config = small(**settings, compress_from=step, steps=2, start=str(begun.folder), checkpoint_at_steps=[3])
        branch = train(config, engine="inline", out=tmp_path / f"branch {step}")
        after_one = next(each for each in checkpoints(branch.folder / "checkpoints") if each.step == 3)  # type: ignore[arg-type]
        held[step] = any(name.startswith("link.") for part in after_one.parts() for name in unpack_tensors(part))
        assert branch.row["memories_from"] == (step or 1)
    assert held == {0: True, 3: False}


@pytest.mark.parametrize("pairs", [[(4096.0, 1.0), (1.0, 4096.0)], [(1.0, 1.0), (None, 1.0), (1.0, None)]])
def test_loss_scales_of_parent_and_branch_do_not_change_losses(pairs, small, tmp_path):
    """Gradients and their residuals are scaled alike, by powers of two; residuals begin anew if the scale changes."""
    losses = []
    for scales in pairs:
        settings = [{"backward": "ErrorFeedback(TopK(0.3))", "loss_scale": scale} for scale in scales]
        begun = train(small(**settings[0], steps=2), engine="inline", out=tmp_path / f"parent {scales}")
        config = small(**settings[1], steps=2, start=str(begun.folder))
        losses.append(train(config, engine="inline", out=tmp_path / f"branch {scales}").steps["loss"].tolist())
    assert all(other == losses[0] for other in losses)


def test_replicas_stay_equal_if_a_branch_no_longer_sums_tied_gradients_with_theirs(small, tmp_path):
    settings = {**REPLICAS, **TIED, "steps": 2, "tied_gradient": "ErrorFeedback(TopK(0.3))"}
    begun = train(small(**settings, fused_embedding=True), engine="inline", out=tmp_path / "parent")
    branch = train(small(**settings, start=str(begun.folder)), engine="inline", out=tmp_path / "branch")
    held: dict[str, list[torch.Tensor]] = {}
    for part in checkpoints(branch.folder / "checkpoints")[-1].parts():  # type: ignore[arg-type]
        for name, x in unpack_tensors(part).items():
            held.setdefault(name, []).append(x)
    assert all(torch.equal(first, second) for name, (first, second) in held.items() if ".model." in name)


@pytest.mark.parametrize("stop_after", [0, 3, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupted_branch_resumes_to_the_same_bits(small, tmp_path, parent, stop_after):
    config = small(
        seed=3,
        forward="EF21(TopK(0.2))",
        start=f"{parent.folder}@2",
        steps=4,
        checkpoint_at_steps=[4],
        evaluate_every_steps=2,
    )
    whole = train(config, engine="inline", out=tmp_path / "whole")
    assert [each.step for each in checkpoints(whole.folder / "checkpoints")] == [4, 6]  # type: ignore[arg-type]
    training = Training(config, engine="inline", out=tmp_path / "broken")
    if stop_after:
        break_off(training, stop_after)
    else:  # killed before its first checkpoint
        training.events()
        training.recorder.write_run(training._row)
        training.recorder.close()
    resumed = train(config, engine="inline", out=tmp_path / "broken", resume=True)
    assert resumed.row["resumed"] == 1
    assert resumed.row["parent"] == parent.row["run_id"]
    same_records(resumed, whole)


def test_branch_may_change_cut_and_schedule(small, tmp_path):
    """The loss of a dense model does not depend on its cuts."""
    settings = {"optimizer": {"name": "adamw", "learning_rate": 1e-2, "decay": "cosine"}, "deterministic": True}
    begun = train(small(**settings, checkpoint_at_steps=[4]), engine="inline", out=tmp_path / "parent")
    same, others = ["step", "loss", "learning_rate"], load_weights(begun.folder)
    others_of_four = {"schedule": "Interleaved1F1B(3)"}, {"num_stages": 1}, {"num_stages": 2, "schedule": "ZBH1"}
    for changes in (*others_of_four, {"num_stages": 4}):
        config = small(**settings, **changes, steps=2, start=f"{begun.folder}@4")
        branch = train(config, engine="inline", out=tmp_path / str(changes))
        assert branch.steps[same].values.tolist() == begun.steps[same].values.tolist()[4:]
        weights = load_weights(branch.folder)
        assert all(torch.equal(weights[name], others[name]) for name in others)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (TIED, "tied parameters"),
        # between two exchanges: each replica would take its own parameters for the agreed ones
        ({**REPLICAS, "replica_gradient": "DiLoCo(4)", "steps": 4, "checkpoint_at_steps": [2]}, "replicas that differ"),
    ],
)
def test_some_states_keep_their_cuts(small, tmp_path, settings, reason):
    begun = train(small(**{"steps": 2, **settings}), engine="inline", out=tmp_path / "parent")
    branch = {**settings, "steps": 2, "checkpoint_at_steps": None, "num_stages": 2, "start": f"{begun.folder}@2"}
    with pytest.raises(ConfigError, match=rf"^`cuts` must be .*, as in the run of `start`.* With {reason}"):
        train(small(**branch), engine="inline", out=tmp_path / "branch")


@pytest.mark.parametrize("changes", [{"num_stages": 2}, {"seed": 2}])
def test_methods_know_that_their_memories_start_empty(small, tmp_path, changes):
    """MARINA has no parameters of the parent's last step: the branch's first step sends gradients themselves.

    With the parent's seed, step 4 would not need these parameters.
    """
    settings = {**REPLICAS, "replica_gradient": "MARINA(Identity, probability=0.4, min_values=16)"}
    begun = train(small(**settings, steps=4), engine="inline", out=tmp_path / "parent")
    config = small(**settings, **changes, steps=2, start=str(begun.folder))
    branch = train(config, engine="inline", out=tmp_path / "branch")
    assert (branch.row["first_step"], branch.row["memories_from"]) == (4, 4)


def test_weights_predicted_for_another_schedule_are_not_read(small, tmp_path):
    """Another schedule has other delays: predicted versions start anew."""
    settings = {**RUNS["predicted"], "schedule": "1F1B", "forward": "Identity"}
    begun = train(small(**settings, steps=3), engine="inline", out=tmp_path / "parent")
    config = small(**{**settings, "schedule": "1F1B(ahead=2)"}, steps=2, start=str(begun.folder))
    assert train(config, engine="inline", out=tmp_path / "branch").status == "finished"


@pytest.mark.parametrize(
    ("changes", "start", "sentence"),
    [
        ({}, "{parent}@3", r"`start` must name a step with a checkpoint (0, 2, 4, 6), but got 3. To keep one there, train"),
        ({}, "{parent}x", "`start` must be the folder of a run, but got {parent}x. There is no run in"),
        ({}, "s3://bucket/run@2", "`start` must name a folder of this machine, but got s3://bucket/run@2"),
        ({}, "{parent}@", "`start` must be the folder of a run and the step of a checkpoint, such as results/dense@1200"),
        ({"model": {"name": "cnn", "width": 6}}, "{parent}", "`model.width` must be 4, as in the run of `start`, but got 6."),
        ({"bottleneck": 2}, "{parent}", "`bottleneck` must be left out, as in the run of `start`, but got '2'."),
        ({"batch_size": 32}, "{parent}", "`batch_size` must be 16, as in the run of `start`, but got 32."),
        ({"data": {"name": "digits"}}, "{parent}", "`data.test_samples` must be 20, as in the run of `start`, but got None."),
        ({"optimizer": {"learning_rate": 0.2, "momentum": 0.9}}, "{parent}@2", "`optimizer.learning_rate` must be 0.1"),
        ({"num_replicas": 2, "num_microbatches": 2}, "{parent}@2", "`num_replicas` must be 1, as in the run of `start`"),
        ({"checkpoint_at_steps": [1]}, "{parent}@2", "`checkpoint_at_steps` must be steps from 2 to 8, but got 1."),
    ],
)  # fmt: skip
def test_bad_starts_are_refused_before_anything_starts(small, tmp_path, parent, changes, start, sentence):
    with pytest.raises(ConfigError) as caught:
        train(small(**changes, start=start.format(parent=parent.folder)), engine="inline", out=tmp_path / "branch")
    assert str(caught.value).startswith(sentence.format(parent=parent.folder))
    assert not (tmp_path / "branch").exists()


def test_branch_may_not_exceed_planned_learning_rate(small, tmp_path):
    settings = {"optimizer": {"learning_rate": 0.1, "decay": "cosine"}}
    begun = train(small(**settings, checkpoint_at_steps=[4]), engine="inline", out=tmp_path / "parent")
    with pytest.raises(ConfigError, match=r"^`steps` must be at most 2 from step 4 on, since the learning rate"):
        train(small(**settings, steps=3, start=f"{begun.folder}@4"), engine="inline", out=tmp_path / "branch")


@pytest.mark.parametrize("every", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_records_of_a_branch_are_whole(small, tmp_path, parent, every):
    """Its tables have the steps that they must have, and it is compared with the branches of its start only."""
    for name, changes in (("dense", {}), ("topk", {"forward": "TopK(0.5)"})):
        values = {**changes, "profile_every_steps": every, "start": f"{parent.folder}@4"}
        train(small(**values), engine="inline", out=tmp_path / name)
    results = analysis.load(tmp_path, parent.folder.parent)
    assert results.problems == []
    sizes = [len(context.rows) for context in contexts(results)]
    assert sorted(sizes) == [1, 2]
    actions = results.actions
    assert set(actions[actions["run"].astype(str).str.contains("topk")]["step"]) == {
        step
        for step in range(4, 10)
        if step % every == every // 2 or 4 + WARMUP_STEPS <= step < 4 + WARMUP_STEPS + FIRST_PROFILED
    }


def test_a_damaged_parent_is_refused(small, tmp_path, parent):
    folder = copytree(parent.folder, tmp_path / "parent")
    file = folder / "checkpoints" / "step-00000002" / "worker-1.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"^`start`: The checkpoint .* is corrupt"):
        train(small(start=f"{folder}@2"), engine="inline", out=tmp_path / "branch")


def test_a_parent_of_another_model_is_refused(small, tmp_path, monkeypatch):
    """A model of the user's own may change between two runs, and its keys stay the same."""
    model = {"model": {"name": "tests.support.models:normed"}, "num_stages": None, "cuts": ["norm1", "norm2"]}
    begun = train(small(**model, steps=2), engine="inline", out=tmp_path / "parent")
    models = importlib.import_module("tests.support.models")  # as a configuration names it
    made = models.normed

    def longer(shape):
        return made(shape).append(nn.Linear(10, 10))

    monkeypatch.setattr(models, "normed", longer)
    with pytest.raises(
        ConfigError, match=r"^`start` must name a run of the same model, but `.*` is missing in its checkpoint"
    ):
        train(small(**model, start=str(begun.folder)), engine="inline", out=tmp_path / "branch")


def test_branch_with_checkpoint_needs_no_parent(small, tmp_path, parent):
    folder = copytree(parent.folder, tmp_path / "parent")
    config = small(start=f"{folder}@2", steps=4, checkpoint_every_steps=1)
    whole = train(config, engine="inline", out=tmp_path / "whole")
    break_off(Training(config, engine="inline", out=tmp_path / "broken"), 2)
    folder.rename(tmp_path / "gone")
    same_records(train(config, engine="inline", out=tmp_path / "broken", resume=True), whole)


def test_transformers_folder_as_start_suggests_keys(small, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError) as refused:
        train(small(start=str(tmp_path)), engine="inline", out=tmp_path / "branch")
    assert f"give `model=hf model.path={tmp_path}` to dense and all settings" in str(refused.value)
    assert not (tmp_path / "branch").exists()
