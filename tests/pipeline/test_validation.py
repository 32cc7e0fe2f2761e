"""Post-validation: stages update before they know the norms of the others, and have the weights of a synchronous step."""

import math
from typing import Any

import pytest
import torch
from engines import losses_of, start
from pipelines import ADAM, GPT, REPLICAS, TIED, ZBV, with_slow

from raysim.pipeline.errors import DivergedError
from raysim.pipeline.reports import StepFeedback
from raysim.pipeline.stage import Stage
from raysim.pipeline.state import unpack_tensors
from raysim.pipeline.updates import Updates

STEPS = 3
RUNS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "h2": {"schedule": "ZBH2", "forward": "ErrorFeedback(TopK(0.2))"},
    "v": {"schedule": "ZBV", "num_stages": 4},
    "interleaved": {"schedule": "Interleaved1F1B(2)", "num_stages": 4},
    "custom": ZBV,
    "tied": TIED,
    "replicas": {**REPLICAS, "replica_gradient": "ErrorFeedback(TopK(0.2))"},
    "one-stage": {"num_stages": 1},
    "frozen": {**GPT, "model": {"name": "tests.support.models:frozen"}, "num_stages": None, "cuts": ["1"]},
}
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "adamw": ADAM["optimizer"],
    "adagrad": {"name": "adagrad", "learning_rate": 0.01},
    "adafactor": {"name": "adafactor", "learning_rate": 0.01},
    "nadam": {"name": "nadam", "learning_rate": 0.01, "weight_decay": 0.1},
    "muon": {"name": "muon", "learning_rate": 0.01},
}


@pytest.fixture
def restored(monkeypatch):
    """Return the list of the stages that took an update back."""
    stages, restore = [], Stage.restore
    monkeypatch.setattr(Stage, "restore", lambda stage, snapshot: (stages.append(stage), restore(stage, snapshot))[1])
    return stages


def tensors_of(engine):
    return {name: x for part in engine.state() for name, x in unpack_tensors(part).items()}


def trained(config, steps=STEPS):
    """Return the losses, the norms and the state after some steps."""
    engine = start(config)
    losses, norms = [], []
    for step in range(steps):
        reports = engine.step(step, StepFeedback())
        losses += [loss for report in reports for loss in report.losses]
        norms += [report.gradient_norm for report in reports]
    return losses, norms, tensors_of(engine)


def check_equal(one, other):
    assert one[:2] == other[:2]
    assert one[2].keys() == other[2].keys()
    assert all(torch.equal(one[2][name], x) for name, x in other[2].items())


def norms_of_stages(config):
    """Return the norms of the gradients of each stage of the first replica in the first step."""
    engine = start(config)
    squared = {}
    for worker in engine.workers[: len(engine.plan.rows)]:
        update = worker.update

        def catch(*arguments, worker=worker, update=update):
            squared.update({index: worker.updates.squared_norm(index) for index in worker.stages})
            return update(*arguments)

        worker.update = catch
    engine.step(0)
    return [math.sqrt(squared[index]) for index in sorted(squared)]


def with_clip(changes, clip_norm, optimizer):
    return {**changes, "optimizer": {**optimizer, "clip_norm": clip_norm}}


@pytest.mark.parametrize("run", with_slow(RUNS, "custom", "interleaved", "frozen"))
def test_weights_are_those_of_synchronous_steps(small, restored, run):
    """Whether no update is amended, all are put off, or the last stages' norms ask for one after the first have updated."""
    norms = norms_of_stages(small(**RUNS[run]))
    clips = [1e9, 1e-9] if run in ("1f1b", "one-stage") else []
    if len(norms) > 1:
        clips.append(math.sqrt((norms[0] ** 2 + sum(norm**2 for norm in norms)) / 2))
    for clip_norm in clips:
        changes = with_clip(RUNS[run], clip_norm, OPTIMIZERS["sgd"])
        taken_back = len(restored)
        check_equal(trained(small(**changes, weights="PostValidated")), trained(small(**changes)))
        late = clip_norm not in (1e9, 1e-9)
        assert (len(restored) > taken_back) == (late and run not in ("v", "custom"))


@pytest.mark.parametrize("optimizer", with_slow(OPTIMIZERS, "adagrad", "adafactor", "nadam"))
def test_a_rollback_restores_every_optimiser(small, restored, optimizer):
    config = small(**with_clip(GPT, None, OPTIMIZERS[optimizer]), steps=STEPS)
    norms = norms_of_stages(config)
    clip_norm = math.sqrt(norms[0] ** 2 + norms[-1] ** 2 / 2)
    changes = with_clip(GPT, clip_norm, OPTIMIZERS[optimizer])
    check_equal(trained(small(**changes, weights="PostValidated")), trained(small(**changes)))
    assert restored


def test_no_validation_without_clipping(small, restored):
    engine = start(small(weights="PostValidated"))
    assert all(type(worker.updates) is Updates for worker in engine.workers)
    check_equal(trained(small(weights="PostValidated")), trained(small()))
    assert not restored


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_that_are_not_finite_change_nothing(small, restored, stage):
    """The paper's second check: stages before the fault have updated, and take it back; the error is that of a synchronous step."""
    errors = []
    for weights in ("Synchronous", "PostValidated"):
        engine = start(small(**with_clip({}, 1e9, OPTIMIZERS["sgd"]), weights=weights))
        losses_of(engine, 0)
        before = tensors_of(engine)
        norm = engine.workers[stage].updates.squared_norm
        engine.workers[stage].updates.squared_norm = lambda index, norm=norm: norm(index) * math.nan
        with pytest.raises(DivergedError) as caught:
            engine.step(1)
        errors.append(str(caught.value))
        after = tensors_of(engine)
        assert all(
            torch.equal(x, before[name]) for name, x in after.items() if ".model." in name or "optimizer" in name
        )
    assert errors[0] == errors[1]
    assert len(restored) == stage  # those before it


def test_run_continues_from_state(small):
    changes = with_clip(RUNS["h2"], 0.5, OPTIMIZERS["adamw"])
    config = small(**changes, weights="PostValidated")
    engine = start(config)
    for step in range(2):
        engine.step(step, StepFeedback())
    resumed = start(config)
    resumed.load(2, engine.state())
    for each in (engine, resumed):
        each.step(2, StepFeedback())
    first, second = tensors_of(engine), tensors_of(resumed)
    assert all(torch.equal(first[name], x) for name, x in second.items())


def test_early_update_copies_are_released_after_step(small):
    engine = start(small(**with_clip({}, 1e9, OPTIMIZERS["sgd"]), weights="PostValidated"))
    engine.step(0)
    assert [worker.updates._snapshots for worker in engine.workers] == [{}] * len(engine.workers)
