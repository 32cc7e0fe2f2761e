"""Laws of weight policies: what each pass reads, what an update adds, and what a stage keeps."""

import copy

import pytest
import torch
from codec_variants import normal
from engines import losses_of, start, weights
from weight_variants import CURVATURE, DELAYED, KNOWN, MICROBATCHES, MOMENTUM, RATE, VARIANTS, parabola

from raysim.config import OptimizerConfig
from raysim.pipeline.optimizer import directions, make_optimizer
from raysim.pipeline.prepare import prepare
from raysim.pipeline.stage import Stage
from raysim.schedules import OneFOneB, Unflushed
from raysim.schedules.weights import parse_weights
from raysim.values import UNNAMED

variants = pytest.mark.parametrize("text", VARIANTS)
delayed = pytest.mark.parametrize("text", DELAYED)
PLAIN = {"optimizer": {"learning_rate": 0.1, "momentum": 0.0}}


def test_every_policy_has_a_variant() -> None:
    assert {type(parse_weights(text)) for text in VARIANTS} == set(KNOWN.values())


@variants
def test_notation(text) -> None:
    policy = parse_weights(text)
    assert repr(policy) == text
    assert parse_weights(repr(policy)) == policy


# Delays.


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("per", [1, 3, 6])
def test_delays_are_counted_on_the_actions_of_a_long_row(ahead, extra, per) -> None:
    """By hand: a forward sees the updates whose last backward came before it."""
    schedule, num_stages, num_microbatches = OneFOneB(extra_warmup=extra, ahead=ahead), 4, 6
    found = Unflushed(schedule).delays(num_stages, num_microbatches, per)
    for stage in range(num_stages):
        row = schedule.row(stage, num_stages, 10 * num_microbatches)
        backwards, seen = 0, {}
        for action in row:
            if action.op == "F":
                seen[action.microbatch] = backwards // per
            backwards += action.op == "B"
        last = range(9 * num_microbatches, 10 * num_microbatches)
        assert found[stage] == [m // per - seen[m] for m in last]


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_microbatches", [1, 2, 8])
def test_1f1b_delays_a_stage_by_the_stages_behind_it(num_stages, num_microbatches) -> None:
    schedule = Unflushed(OneFOneB())
    for stage, found in enumerate(schedule.delays(num_stages, num_microbatches)):
        assert found == [num_stages - 1 - stage] * num_microbatches
    assert schedule.in_flight(num_stages) == list(range(num_stages, 0, -1))


def test_all_stages_read_the_version_before_the_newest_with_two_buffers(small) -> None:
    assert small(weights="DoubleBuffered").weight_delays() == [[1] * 4] * 3
    assert small(weights="DoubleBuffered", num_stages=1).weight_delays() == [[0] * 4]


# Numbers.


@delayed
def test_one_stage_is_synchronous_bit_for_bit(small, text) -> None:
    """Nothing is delayed; one update a microbatch is the synchronous run of batches as small."""
    one = start(small(weights=text, num_stages=1))
    if parse_weights(text).updates_each_microbatch:
        other = start(small(num_stages=1, num_microbatches=1, batch_size=4, steps=24))
    else:
        other = start(small(num_stages=1))
    losses = [loss for step in range(4) for loss in losses_of(one, step)]
    assert losses == [loss for step in range(16 * 4 // other.plan.config.batch_size) for loss in losses_of(other, step)]
    for name, x in weights(one, 0).items():
        assert torch.equal(x, weights(other, 0)[name])


@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}, {"name": "adam"}, {"name": "adamw", "amsgrad": True}],
)
def test_directions_are_the_last_update_over_minus_the_rate(options) -> None:
    x = torch.nn.Parameter(torch.ones(5))
    optimizer = make_optimizer(OptimizerConfig(learning_rate=RATE, **options), [("x", x)])
    for scale in (10.0, 0.1, 0.1):  # of gradients whose squares fall
        before, x.grad = x.detach().clone(), scale * normal(5, seed=int(scale))
        optimizer.step()
        torch.testing.assert_close(RATE * directions(optimizer, [("x", x)])["x"], before - x.detach())


def recurrence(text: str, delay: int, updates: int, *, per_step: bool) -> list[float]:
    """Return the weight of a parabola after every update, in plain numbers; `delay` is that of each gradient."""
    w, v, d = [1.0], [0.0], 0.0
    kept = 0.135 if "decay" not in text else 0.5
    kept = kept ** (1 / max(delay, 1))
    for u in range(updates):
        read = max(u - delay, 0)
        at, rate = w[read], RATE
        if "Predicted" in text:
            at -= delay * RATE * v[read]
        if "PipeMare" in text:
            steps = int(text.partition("(")[2].split(",")[0].rstrip(")"))
            step = u if per_step else u // MICROBATCHES
            rate /= max(delay, 1) ** (1 - min(step / steps, 1))
            at = w[u] - delay * d
        v.append(MOMENTUM * v[u] + CURVATURE * at)
        w.append(w[u] - rate * v[u + 1])
        d = kept * d + (1 - kept) * (w[u + 1] - w[u])
    return w


@pytest.mark.parametrize("text", [text for text in VARIANTS if parse_weights(text).updates_each_microbatch])
@pytest.mark.parametrize("extra", [0, 4])
def test_a_parabola_follows_its_recurrence_at_every_stage(text, extra) -> None:
    """W[u+1] = W[u] - rate grad f(W[u - delay]), with momentum, the delay by the stages behind."""
    for stage in range(4):
        found = parabola(text, stage, 4, schedule=f"1F1B(extra_warmup={extra})")
        expected = recurrence(text, 3 - stage + extra, 8 * MICROBATCHES, per_step=False)
        assert found == pytest.approx(expected[::MICROBATCHES], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("text", "delay"), [("Synchronous", 0), ("DoubleBuffered", 1)])
def test_a_parabola_with_one_update_a_step_follows_its_recurrence_at_every_stage(text, delay) -> None:
    for stage in range(4):
        assert parabola(text, stage, 4) == pytest.approx(recurrence(text, delay, 8, per_step=True), rel=1e-5)


@pytest.mark.parametrize("stage", range(4))
def test_a_step_s_gradient_is_the_mean_over_the_versions_that_its_microbatches_read(stage) -> None:
    """3 - stage of four microbatches go forward before the update of the step before."""
    found = parabola("Stashed(update='step')", stage, 4)
    w, v, late = [1.0], 0.0, (3 - stage) / MICROBATCHES
    for t in range(8):
        v = MOMENTUM * v + CURVATURE * (late * w[max(t - 1, 0)] + (1 - late) * w[t])
        w.append(w[t] - RATE * v)
    assert found == pytest.approx(w, rel=1e-5)


def test_two_buffers_update_by_the_gradient_at_the_version_before_bit_for_bit(small) -> None:
    """W(t+1) = W(t) - rate grad f(W(t-1)), the gradient from a synchronous run at W(t-1)."""
    config = small(weights="DoubleBuffered", **PLAIN)
    engine, history = start(config), []
    for step in range(5):
        history.append({name: x.detach().clone() for name, x in weights(engine, 0).items()})
        engine.step(step)
        reference = start(small(**PLAIN))
        for name, x in weights(reference, 0).items():
            x.data.copy_(history[max(step - 1, 0)][name])
        for worker in reference.workers:
            worker._begin(step)
        gradients = gradients_by_stage(reference, step)
        for name, x in weights(engine, 0).items():
            expected = torch.nn.Parameter(history[-1][name].clone())
            expected.grad = gradients[name]
            torch.optim.SGD([expected], lr=0.1, fused=True).step()
            assert torch.equal(x, expected), f"{name} after step {step}"


def gradients_by_stage(engine, step):
    """Return the gradients just before the update of a step, by stage and name."""
    found = {}
    for worker in engine.workers:
        update = worker.update

        def catch(*arguments, worker=worker, update=update):
            for index, stage in worker.stages.items():
                found.update({f"{index}.{name}": x.clone() for name, x in stage.gradients().items()})
            return update(*arguments)

        worker.update = catch
    engine.step(step)
    return found


@pytest.mark.parametrize("recompute", [False, True])
def test_staged_gradients_are_those_of_the_uncut_model_at_mixed_versions(small, recompute) -> None:
    """PipeDream: microbatch u goes through stage s with the weights after u - delay of s updates."""
    config = small(weights="Stashed", recompute=recompute, **PLAIN)
    engine = start(config)
    plan, data, modules = engine.plan, engine.workload.data.train, copy.deepcopy(engine.workload.modules)
    versions = [[{name: x.detach().clone() for name, x in module.named_parameters()} for module in modules]]
    for update in range(12):
        step, microbatch = divmod(update, 4)
        epoch, ids = plan.microbatch(step, microbatch)
        read = [versions[max(update - 2 + stage, 0)][stage] for stage in range(3)]
        leaves = [{name: x.clone().requires_grad_() for name, x in of_stage.items()} for of_stage in read]
        y = data.inputs(ids, epoch, config.seed, True)
        for module, own in zip(modules, leaves, strict=True):
            y = torch.func.functional_call(module, own, (y,))
        plan.task.loss(y, data.targets(ids), None).backward()
        versions.append(
            [
                {name: x - 0.1 * own[name].grad for name, x in of_stage.items()}
                for of_stage, own in zip(versions[-1], leaves, strict=True)
            ]
        )
    for step in range(3):
        engine.step(step)
    for name, x in weights(engine, 0).items():
        stage, _, parameter = name.partition(".")
        torch.testing.assert_close(x.detach(), versions[-1][int(stage)][parameter], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recompute", [False, True])
def test_pipemare_goes_back_through_corrected_weights(small, recompute) -> None:
    """The gradient of the input is by the newest weights less the delay times their movement, that of the weights by the
    activations of the forward."""
    torch.manual_seed(0)
    config = small(weights="PipeMare(1)", recompute=recompute, **PLAIN)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
    stage = Stage(module, config, torch.device("cpu"), first=False, last=False, delays=[2] * 4)
    inputs, sent = torch.randn(12, 6, 3), torch.randn(12, 6, 2)
    before, movement, kept = None, {}, 0.135**0.5
    for u in range(12):
        if u % 4 == 0:
            stage.begin(u // 4)
        read = stage.versions.of_forward(u % 4)
        stage.forward(u % 4, {UNNAMED: inputs[u]}, 0)
        newest = {name: x.detach().clone() for name, x in module.named_parameters()}
        if before is not None:
            movement = {
                name: kept * movement.get(name, 0) + (1 - kept) * (x - before[name]) for name, x in newest.items()
            }
        before = newest
        w = {name: x - 2 * movement.get(name, 0) for name, x in newest.items()}
        hidden = torch.tanh(inputs[u] @ read["0.weight"].T + read["0.bias"])
        inner = (sent[u] @ w["2.weight"]) * (1 - hidden**2)
        torch.testing.assert_close(stage.backward(u % 4, {UNNAMED: sent[u]})[UNNAMED], inner @ w["0.weight"])
        torch.testing.assert_close(stage.gradients()["2.weight"], sent[u].T @ hidden)
        torch.testing.assert_close(stage.gradients()["0.weight"], inner.T @ inputs[u])
        stage.update(0.1)
    assert movement


# What is kept.


@delayed
def test_a_stage_keeps_the_versions_that_its_longest_delay_needs_and_memory_promises(small, text) -> None:
    engine = start(small(weights=text, model={"name": "mlp", "width": 8}))
    for step in range(4):
        engine.step(step)
    for worker in engine.workers:
        for index, stage in worker.stages.items():
            longest = max(engine.plan.weight_delays[index])
            assert stage.versions.num_kept == longest + 1
            kept = sum(x.nbytes for x in stage.versions.state().values())
            promised = engine.plan.memories[index].versions_bytes
            own = sum(x.nbytes for x in stage.module.parameters())
            assert kept == promised - (own if "PipeMare" in text and longest else 0)  # the weights of one backward


@delayed
def test_a_stage_without_weights_has_no_versions(small, text) -> None:
    engine = start(small(weights=text, model={"name": "tests.support.models:flat"}, num_stages=None, cuts=["0", "1"]))
    losses = [loss for step in range(3) for loss in losses_of(engine, step)]
    assert len(losses) == 3 * MICROBATCHES
    assert engine.plan.memories[0].versions_bytes == 0


def test_microbatches_of_the_next_steps_are_in_flight_too(small) -> None:
    """One microbatch a step: with a flush one is in flight, without one as many as there are stages from here on."""
    flushed, found = (
        prepare(small(weights=text, num_microbatches=1)).plan.memories for text in ("Synchronous", "Stashed")
    )
    assert [memory.in_flight for memory in flushed] == [1, 1, 1]
    assert [memory.in_flight for memory in found] == [3, 2, 1]


# Refusals.
