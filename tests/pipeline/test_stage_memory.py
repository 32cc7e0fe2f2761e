"""The memory of a worker as it trains, beside the plan's count: storages of torch, from the operation that makes them to their end."""

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from raysim.config import make_config
from raysim.engine.inline import InlineEngine
from raysim.pipeline.groups import average_together
from raysim.pipeline.prepare import prepare
from raysim.replication import parse_replica_method
from raysim.replication.method import ReplicaContext
from raysim.workloads.stage_costs import Alive

BASE = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
TEXT = {"name": "topics", "length": 64, "train_samples": 64, "test_samples": 8}
DIGITS = {"name": "digits", "train_samples": 64, "test_samples": 8}
MODELS = {
    "llama": ({"model_type": "llama", **BASE, "num_key_value_heads": 2}, TEXT),
    "qwen2": ({"model_type": "qwen2", **BASE, "num_key_value_heads": 2}, TEXT),
    "gpt2": ({"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4}, TEXT),  # with a tied embedding
    "vit": ({"model_type": "vit", **BASE, "patch_size": 2}, DIGITS),
    "resnet": (
        {"model_type": "resnet", "embedding_size": 16, "hidden_sizes": [32, 64, 64, 64], "depths": [1, 1, 1, 1]},
        DIGITS,
    ),
}
RUNS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, GPipe": {"schedule": "GPipe"},
    "llama, two stages a worker": {"schedule": "Interleaved1F1B(2)"},
    "llama, weights' backward apart": {"schedule": "ZBH1"},
    "llama, computed again": {"recompute": True},
    "llama, computed again, weights' backward apart": {"recompute": True, "schedule": "ZBH1"},
    "llama, bfloat16": {"dtype": "bfloat16"},
    "llama, clipped": {"optimizer": {"name": "sgd", "clip_norm": 1.0}},
    "llama, more microbatches": {"num_microbatches": 8},
    "qwen2, adamw": {"optimizer": {"name": "adamw"}},
    "gpt2, adamw": {"optimizer": {"name": "adamw"}},
    "vit, momentum": {"optimizer": {"name": "sgd", "momentum": 0.9}},
    "vit, weights' backward apart": {"schedule": "ZBH1"},
    "resnet": {},
    "resnet, GPipe": {"schedule": "GPipe"},
    "resnet, weights' backward apart": {"schedule": "ZBH1"},
}

BOUNDED = {  # of many microbatches between B and W, or of backwards of both kinds, the count is a bound
    "llama, twice the warm-up": {"schedule": "ZBH2"},
    "llama, along a V": {"schedule": "ZBV"},
    "llama, along a V, backwards of both kinds": {"schedule": "DualPipeV"},
    "llama, updates to be validated": {"weights": "PostValidated", "optimizer": {"name": "adamw", "clip_norm": 1e9}},
}


def config_of(name):
    model, data = MODELS[name.partition(",")[0]]
    common = {"num_stages": 4, "batch_size": 32, "num_microbatches": 4, "steps": 2, "profile_every_steps": 0}
    codecs = {"forward": "Quantize(8)", "backward": "Quantize(8)"}
    return make_config(
        {"model": {"name": "hf", "config": model}, "data": data, **common, **codecs, **{**RUNS, **BOUNDED}[name]}  # type: ignore[dict-item]
    )


def peaks(engine):
    """Return, by worker, the most bytes of storages that are alive at once in the second step."""
    found = []
    for worker in engine.workers:
        alive = Alive()
        found.append(alive)

        def watch(owner, name, alive=alive):
            action = getattr(owner, name)

            def run(*arguments):
                with alive:
                    for x in tree_leaves(arguments):
                        if isinstance(x, torch.Tensor):
                            alive.add(x)
                    return action(*arguments)

            setattr(owner, name, run)

        watch(worker.updates, "squared_norm")
        for stage in worker.stages.values():
            for tensor in [*stage.module.parameters(), *stage.module.buffers()]:
                alive.add(tensor)
            for name in ("forward", "backward", "backward_input", "backward_weights", "snapshot", "update"):
                watch(stage, name)
    engine.step(0)
    for alive in found:
        alive.begin()
    engine.step(1)
    return [alive.most_made for alive in found]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "vit, momentum" else pytest.mark.slow) for name in RUNS]
)
def test_worker_memory_equals_forecast(name):
    promised, found = promise_of(name)
    assert found == [pytest.approx(each, rel=0.01) for each in promised]


@pytest.mark.slow
@pytest.mark.parametrize("name", BOUNDED)
def test_worker_memory_is_at_most_forecast(name):
    promised, found = promise_of(name)
    for held, most in zip(found, promised, strict=True):
        assert 0.8 * most <= held <= 1.005 * most


@pytest.mark.parametrize(
    "notation",
    [
        "Identity",
        "TopK(0.05)",
        "Quantize(8)",
        "TwoShot(Quantize(8))",
        "ErrorFeedback(TopK(0.05))",
        "PowerSGD(2)",
        "PowerSGD(2, error='own')",
        "EF21(TopK(0.1))",
        "DiLoCo(1)",
        "DiLoCo(1, codec=Quantize(4))",
    ],
)
def test_an_exchange_takes_about_its_forecast(notation):
    method = parse_replica_method(notation)
    shapes = {f"layer {i}": (40, 64) for i in range(12)}
    gradients = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(2)]
    memories = [method.begin(each) for each in gradients]
    for step in range(3):
        contexts = [ReplicaContext(replica, 2, step, 0, steps_per_epoch=3, seed=0) for replica in range(2)]
        with Alive(tree_leaves((gradients, memories))) as alive:
            averaged, _ = average_together(method, gradients, memories, contexts)
        memories = [each.memory for each in averaged]
        del averaged
    promised = 2 * method.exchange_bytes(shapes)
    assert 0.5 * promised <= alive.most <= 1.1 * promised


def test_replicas_exchange_beside_no_activations(small):
    data = {"name": "digits", "train_samples": 600, "test_samples": 8}
    keys = {"model": {"name": "cnn", "width": 32}, "data": data, "num_replicas": 2, "num_stages": 2}
    small_batch, large_batch = (prepare(small(**keys, batch_size=size)).plan.memories for size in (16, 512))
    assert all(memory.exchange_bytes == 2 * memory.gradients_bytes for memory in small_batch)
    assert all(memory.in_flight == 0 for memory in small_batch)
    assert large_batch[0].exchange_bytes == 0 < large_batch[0].in_flight


@pytest.mark.parametrize(
    ("keys", "least"),
    [
        ({}, 0.95),
        ({"optimizer": {"name": "adamw"}}, 0.95),
        ({"optimizer": {"name": "sgd", "momentum": 0.9}, "num_replicas": 2}, 0.95),
        ({"forward": "ErrorFeedback(TopK(0.1))"}, 0.9),
        ({"forward": "EF21(TopK(0.1))", "backward": "EF21(TopK(0.1))"}, 0.7),  # promised at both ends, kept once
        ({"forward": "AQSGD(Quantize(4))"}, 0.5),
    ],
)
def test_checkpoint_is_at_most_as_promised(small, keys, least):
    engine = InlineEngine(prepare(small(model={"name": "cnn", "width": 32}, **keys)))
    engine.start()
    for step in range(2):
        engine.step(step)
    written = sum(engine.state_of(worker).nbytes for worker in range(engine.num_workers))
    promised = sum(engine.plan.memories[stage].checkpoint_bytes for _, stage in engine.plan.places)
    engine.close()
    assert least * promised <= written <= 1.05 * promised


def promise_of(name):
    """Return, by worker, the bytes that a run may hold and those that it holds."""
    engine = InlineEngine(prepare(config_of(name)))
    engine.start()
    promised = [0] * len(engine.workers)
    for memory, owner in zip(engine.plan.memories, engine.plan.owners, strict=True):
        promised[owner] += memory.total_bytes - memory.messages_bytes  # packets are no tensors
    found = peaks(engine)
    engine.close()
    return promised, found


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"name": "cnn", "width": 6}},
        {"num_microbatches": 2},
    ],
)
def test_costs_counted_for_another_run_of_the_process_change_nothing(small, monkeypatch, changes):
    prepare(small())
    after = prepare(small(**changes)).plan
    monkeypatch.setattr("raysim.pipeline.prepare._SHADOWS", {})
    alone = prepare(small(**changes)).plan
    assert (after.memories, after.boundaries, after.flops_forward) == (
        alone.memories,
        alone.boundaries,
        alone.flops_forward,
    )
