"""Generated answers: against a loop over the uncut model with its own codecs, and what cannot generate."""

from typing import Any

import numpy as np
import pytest
import torch
from engines import losses_of, start
from pipelines import ANSWERS, ZBV, with_slow
from runs import same_records

from raysim.analysis import load
from raysim.analysis.comparison.contexts import contexts
from raysim.codecs import Identity
from raysim.config import ConfigError
from raysim.pipeline.prepare import prepare
from raysim.random import derive_key
from raysim.training.run import Training
from raysim.training.train import train
from raysim.workloads.task import Task

CASES: dict[str, dict[str, Any]] = {
    "addition": {"data": {"name": "addition", "digits": 1, "train_samples": 64, "test_samples": 30}},
    "brackets": {"data": {**ANSWERS["data"], "length": 7, "train_samples": 200, "test_samples": 41}},
    "whole": {"data": {**ANSWERS["data"], "whole": True}},
    "interleaved": {"schedule": "Interleaved1F1B(2)", "num_stages": 4},
    "folded": {**ZBV, "data": ANSWERS["data"]},
    "one-stage": {"num_stages": 1, "forward": "Identity"},
}


def answered(engine, mode):
    """Return which answers are right, which would be after right tokens, and the tokens that count.

    From the stages' modules in a row, a codec at each boundary, token by token.
    """
    plan, test = engine.plan, engine.workload.data.test
    stages = {i: stage.module for worker in engine.workers for i, stage in worker.stages.items()}
    right, forced, tokens = [], [], []
    for batch in range(plan.num_test_batches):
        ids = plan.evaluation_ids("test", batch)
        given, targets = test.inputs(ids, 0, 0, False), test.targets(ids)
        text, scored = given.clone(), torch.full_like(targets, -1)
        counts = targets != -100
        counts[:, : engine.workload.data.shape.given] = False
        places = np.flatnonzero((test.targets(np.arange(len(test))) != -100).any(0).numpy())
        places = places[places >= engine.workload.data.shape.given]
        for place in range(places[0], places[-1] + 1):
            x = text[:, : place + 1]
            for index in range(plan.num_stages):
                with torch.no_grad():
                    x = stages[index].eval()(x)
                if index < plan.num_stages - 1:
                    compressor = plan.compressors[0][index][""][0]
                    codec = Identity() if mode == "off" else compressor.evaluation(mode, {})
                    x = codec.encode(x, derive_key(plan.config.seed, "generation", index, batch, place)).decode("cpu")
            scored[:, place] = x[:, -1].argmax(-1)
            if place + 1 < text.shape[1]:
                text[:, place + 1] = torch.where(~counts[:, place], given[:, place + 1], scored[:, place])
        tokens.append(scored[counts])
        right += ((scored == targets) | ~counts).all(1).tolist()
        with torch.no_grad():
            y = given
            for index in range(plan.num_stages):
                y = stages[index](y)
        forced += ((y.argmax(-1) == targets) | ~counts).all(1).tolist()
        for stage in stages.values():
            stage.train()
    return right, forced, torch.cat(tokens)


@pytest.mark.parametrize("case", with_slow(CASES, "addition", "brackets", "folded", "one-stage"))
def test_answers_are_those_of_the_model_generated_token_by_token(small, case, monkeypatch):
    generated: list[torch.Tensor] = []
    sums = Task.generated_sums

    def noted(task, texts, targets):
        counts = targets != -100
        counts[:, : engine.workload.data.shape.given] = False
        generated.append(texts[counts])
        return sums(task, texts, targets)

    monkeypatch.setattr(Task, "generated_sums", noted)
    quick = {
        "num_microbatches": 4 if case == "folded" else 2,
        "forward": "Quantize(3, rounding='stochastic')",
        "optimizer": {"name": "adamw", "learning_rate": 2e-2},
    }
    engine = start(small(**{**ANSWERS, **quick, **CASES[case]}))
    for step in range(40):
        losses_of(engine, step)
    for mode in ("on", "off"):
        right, forced, tokens = answered(engine, mode)
        generated.clear()
        total = engine.evaluate(mode)
        assert torch.equal(torch.cat(generated), tokens)  # wrong answers too, which read what was generated before
        assert total.samples == len(right)
        assert engine.plan.task.results(total.sums)["exact_match"] == sum(right) / len(right)
        if mode == "off":  # a causal model that is right so far reads the same text as in training
            assert right == forced
    assert 0 < sum(right) < len(right)


def test_a_resumed_run_has_the_same_records_of_whole_answers(small, tmp_path):
    config = small(**ANSWERS, forward="Quantize(2, rounding='stochastic')", steps=4, evaluate_every_steps=2)
    whole = train(config, engine="inline", out=tmp_path / "whole")
    events = Training(config, engine="inline", out=tmp_path / "cut").events()
    for event in events:
        if event.kind == "eval":  # the first of two
            break
    events.close()
    resumed = train(config, engine="inline", out=tmp_path / "cut", resume=True)
    same_records(resumed, whole)
    assert len(whole.evals) == 4
    assert set(whole.evals["samples"]) == {13}
    assert whole.evals["predictions"].min() > 13
    (context,) = contexts(load(tmp_path / "whole"))
    assert (context.quality.name, context.step) == ("exact_match", 100 / 13)


def test_models_without_generation_are_refused(small):
    with pytest.raises(
        ConfigError, match="needs a model for texts of any length, but `model` failed on 5 of 10 tokens"
    ):
        prepare(small(**{**ANSWERS, "model": {"name": "tests.support.models:of_one_length"}}))
