"""Laws of replicas: together they are one pipeline on the whole batch, and they never part."""

import pytest
import torch
from engines import losses_of, staged_gradients, start, weights
from pipelines import ADAM, DROPOUT, GPT, REPLICAS, RUNS, TIED, shares

from raysim.pipeline.errors import StageError
from raysim.pipeline.groups import TIED_TABLE, chunk_bytes, ring_bytes
from raysim.pipeline.prepare import prepare

APART = {"replicas-gossip", "replicas-apart"}
REPLICATED = [name for name in RUNS if RUNS[name].get("num_replicas", 1) > 1 and name not in APART]


def all_reduce_bytes(*arguments):
    """Return the bytes of the member that sends most: a chunk to each other one, and its own sum to all of them."""
    chunks = chunk_bytes(*arguments)
    return max(sum(chunks) + (len(chunks) - 2) * own for own in chunks)


@pytest.mark.parametrize(
    ("num_replicas", "kind"),
    [
        (4, {}),
        (2, {**DROPOUT, **ADAM}),
        (4, TIED),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, {}), (4, {**DROPOUT, **ADAM}), (2, TIED), (2, GPT), (4, GPT))
        ),
    ],
)
def test_replicas_equal_one_pipeline_on_the_whole_batch(small, kind, num_replicas):
    """The same microbatches, dropout masks among them, on as many pipelines: only the order of sums differs."""
    one = start(small(num_microbatches=4, **kind))
    several = start(small(num_replicas=num_replicas, num_microbatches=4 // num_replicas, **kind))
    for step in range(2):
        expected, found = losses_of(one, step), losses_of(several, step)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    for replica in range(num_replicas):
        for (name, parameter), other in zip(weights(several, replica).items(), weights(one, 0).values(), strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("run", shares(5, names=REPLICATED))
def test_replicas_never_part(small, run):
    engine = start(small(**RUNS[run]))
    for step in range(3):
        engine.step(step)
    first = weights(engine, 0)
    for replica in range(1, engine.plan.num_replicas):
        assert all(torch.equal(first[name], x) for name, x in weights(engine, replica).items())


MARINA = "MARINA(Identity, probability=1e-9)"  # gradients at two steps' parameters in every step but the first


@pytest.mark.parametrize(
    "kind",
    [{"schedule": "ZBH1", "recompute": True}, TIED, pytest.param({**GPT, "num_stages": 2}, marks=pytest.mark.slow)],
)
def test_marina_on_all_samples_at_once_is_the_mean(small, kind):
    """Where every step has the same samples, g(x_0) + the differences since is g(x_t), which takes the gradients at x_{t-1}."""
    runs = [
        start(small(**{**REPLICAS, **kind, "batch_size": 64, "replica_gradient": method}))
        for method in ("Identity", MARINA)
    ]
    for step in range(3):
        expected, found = (losses_of(engine, step) for engine in runs)
        torch.testing.assert_close(torch.tensor(found).mean(), torch.tensor(expected).mean(), rtol=1e-4, atol=1e-5)
    for name, parameter in weights(runs[0], 0).items():
        torch.testing.assert_close(weights(runs[1], 0)[name], parameter, rtol=1e-3, atol=1e-4, msg=name)


def test_a_twin_step_gives_the_gradients_of_both_and_leaves_no_other_trace(small):
    """At equal parameters both are equal bit for bit, dropout masks among them; statistics are those of one pass."""
    for kind in (
        {**DROPOUT},
        {"model": {"name": "tests.support.models:normed"}, "num_stages": None, "cuts": ["norm1", "norm2"]},
        {"model": {"name": "tests.support.models:in_place"}, "num_stages": None, "cuts": ["2"]},
    ):
        config = small(**{**REPLICAS, **kind, "replica_gradient": MARINA, "optimizer": {"learning_rate": 0.0}})
        twin, single = start(config), start(config.changed(replica_gradient="Identity"))
        for step in range(2):
            reports = [engine.step(step) for engine in (twin, single)]
            assert [r.losses for r in reports[0]] == [r.losses for r in reports[1]]
        sent = [sum(link.wire_bytes for r in each for link in r.links if link.sender) for each in reports]
        counts = [sum(link.packets for r in each for link in r.links if link.sender) for each in reports]
        assert counts[0] == counts[1]
        assert 0 <= 2 * sent[1] - sent[0] <= 8 * counts[0]  # one header for both
        for one, other in zip(twin.workers, single.workers, strict=True):
            for a, b in zip(one.stages.values(), other.stages.values(), strict=True):
                assert all(
                    torch.equal(x, y)
                    for x, y in zip(a.module.state_dict().values(), b.module.state_dict().values(), strict=True)
                )
        first = twin.workers[: len(twin.plan.rows)]  # of one replica, to before its averages and update
        for worker in first:
            worker.averaging.run = lambda *_: iter(())
        twin._together(range(len(first)), "run", 2, None)
        for worker in first:
            for stage in worker.stages.values():
                present, previous = stage.gradients(), stage.extra_gradients()
                assert present.keys() == previous.keys()
                assert all(torch.equal(present[name], x) for name, x in previous.items())


def test_an_evaluation_of_the_mean_leaves_the_last_steps_parameters(small):
    """A twin step takes gradients there, at all stages, also if the replicas of another stage differ."""
    marina = MARINA.replace(")", ", min_values=16)")
    config = small(**REPLICAS, num_stages=2, replica_gradient=[marina, "PowerGossip(min_values=16)"])
    plain, evaluated = start(config), start(config)
    for step in range(3):
        evaluated.evaluate("on")
        assert losses_of(plain, step) == losses_of(evaluated, step)
    assert all(
        torch.equal(x, y) for x, y in zip(weights(plain, 0).values(), weights(evaluated, 0).values(), strict=True)
    )


def test_the_memory_of_two_passes_is_stated(small):
    """Weights, gradients, what is saved for backwards and packets are there twice; what the optimiser keeps is not."""
    single, twin = (
        prepare(small(**REPLICAS, replica_gradient=method)).plan.memories
        for method in ("Identity", "MARINA(Natural, min_values=16)")
    )
    for one, two in zip(single, twin, strict=True):
        for name in ("gradients_bytes", "saved_bytes", "packet_bytes"):
            assert getattr(two, name) == 2 * getattr(one, name) > 0
        assert two.weights_bytes == 2 * one.weights_bytes  # the model has no buffers
        assert two.optimizer_bytes == one.optimizer_bytes > 0
        assert two.residuals_bytes > one.residuals_bytes == 0  # the estimate


def test_a_method_that_fails_is_named(small, monkeypatch):
    engine = start(small(**REPLICAS, replica_gradient="PowerSGD(1)"))

    def failing(self, gradients, memory, context):
        yield from ()
        raise ArithmeticError("no luck")

    monkeypatch.setattr(type(engine.plan.replica_methods[0]), "average", failing)
    with pytest.raises(StageError) as caught:
        engine.step(0)
    assert str(caught.value) == "stage 0, averaging of step 0: ArithmeticError: no luck"


def test_fused_owners_equal_the_sum_of_averages(small):
    config = {**REPLICAS, **TIED, **ADAM}
    apart, fused = (staged_gradients(start(small(**config, fused_embedding=on))) for on in (False, True))
    for name, gradient in fused.items():
        torch.testing.assert_close(gradient, apart[name], rtol=1e-5, atol=1e-7, msg=name)


def test_memory_of_fused_owners_is_counted_once(small):
    """Fused parameters are no replica method's matter, and it remembers nothing of them."""
    config = {**REPLICAS, **TIED, **ADAM, "replica_gradient": "ErrorFeedback(TopK(0.1))"}
    apart, fused = (prepare(small(**config, fused_embedding=on)).plan for on in (False, True))
    for stage, _ in fused.tied[0]:
        table = 4 * 256 * 16  # float32
        less = apart.memories[stage].residuals_bytes - fused.memories[stage].residuals_bytes
        assert less == table


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_fused_owners_send_what_a_ring_over_all_of_them_does(small, num_replicas):
    """(2D - 1) / D of the table from each, against (3D - 2) / D of two all-reduces (optimus_cc: 5)."""
    size = 256 * 16
    config = {**TIED, "num_replicas": num_replicas, "num_microbatches": 1}
    sent = {}
    for fused in (False, True) if num_replicas > 1 else (False,):
        engine = start(small(**config, **({"fused_embedding": True} if fused else {})))
        reports = engine.step(0)
        accounts = [group for report in reports for group in report.groups]
        sent[fused] = sum(group.wire_bytes for group in accounts if group.tied)
        members = 2 * (num_replicas if fused else 1)
        assert sent[fused] == 2 * num_replicas * all_reduce_bytes("sum", size, members, TIED_TABLE)
        assert 0 < sent[fused] / (2 * num_replicas * ring_bytes(size, members)) - 1 < 0.01  # but for the headers
    if num_replicas > 1:
        averaged = 2 * num_replicas * ring_bytes(size, num_replicas)
        ratio = (averaged + sent[False]) / sent[True]
        assert ratio == pytest.approx((3 * num_replicas - 2) / (2 * num_replicas - 1), rel=0.01)


def test_every_sample_is_seen_once(small):
    plan = prepare(small(num_replicas=2, num_microbatches=2)).plan
    whole = prepare(small(num_microbatches=1)).plan.microbatch(1, 0)[1]
    parts = [plan.microbatch(1, m, replica)[1] for replica in range(2) for m in range(2)]
    assert [id for part in parts for id in part] == list(whole)


def test_dense_averages_send_what_a_ring_does(small):
    engine = start(small(num_replicas=4, num_microbatches=1))
    groups = [group for report in engine.step(0) for group in report.groups]
    values = sum(parameter.numel() for parameter in weights(engine, 0).values())
    headers = sum(group.wire_bytes for group in groups) - 4 * 2 * 3 * values  # 2 (D - 1) / D from each of D, 4 bytes
    assert 0 < headers <= 16 * sum(group.packets for group in groups)
    for stage, modules in enumerate(engine.workload.modules):
        values = sum(parameter.numel() for parameter in modules.parameters())
        table = engine.plan.replica_methods[stage].table(dict(modules.named_parameters()))
        sent = max(group.wire_bytes for group in groups if group.stage == stage)
        assert sent == (all_reduce_bytes("dense", values, 4, table) if values else 0)
    assert {group.num_rounds for group in groups} == {2}
