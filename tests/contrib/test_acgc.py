"""AC-GC's error budget on links (Evans, Aamodt 2021): the measured sensitivity, the bound that follows from it, and its guarantee."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from codec_variants import normal
from compressor_variants import MICROBATCHES, context, message
from engines import start
from pipelines import DROPOUT, RUNS
from raysim_contrib.acgc import ACGC, TALLY
from raysim_contrib.error_bounded import ErrorBounded
from raysim_contrib.sensitivity import Sensitivity
from torch import Tensor, nn

from raysim import Run, train
from raysim.codecs import Identity
from raysim.codecs.message import wire_bytes
from raysim.compressors import StepFacts
from raysim.forecast.link_costs import link_costs
from raysim.pipeline.link import Link
from raysim.pipeline.reports import StepFeedback
from raysim.pipeline.stage import Stage
from raysim.schedules.actions import Action
from raysim.training.feedback import sensitivities
from raysim.values import UNNAMED, BoundaryTensors

CPU = torch.device("cpu")


def norm2(x: Tensor) -> float:
    return float(x.double().square().sum())


# What the receiving stage measures.


class Twice(nn.Module):
    """Two layers of one input, and a third behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.after = nn.Linear(6, 4), nn.Linear(6, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(torch.tanh(self.one(x)) * self.other(x))


class Behind(nn.Module):
    """A linear layer behind a norm, and one behind that: neither is given what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(6), nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(self.norm(x))))


class Late(nn.Module):
    """One layer runs before the one that is given what arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.direct = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.norm(x)) + self.direct(x)


# layers, shape of the input, and the layers that read it, with the values of it in a channel of their outputs
STAGES: dict[str, tuple[Any, tuple[int, ...], dict[str, float]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)), (4, 6), {"0": 1}),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.Flatten()),
        (4, 2, 8, 8),
        {"0": 9 / 4},
    ),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 4, 5, stride=2), nn.Flatten()), (4, 2, 9), {"0": 5 / 2}),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 3, (1, 2, 3), stride=(1, 1, 2))), (2, 2, 4, 4, 5), {"0": 6 / 2}),
    "two": (Twice, (4, 6), {"one": 1, "other": 1}),
    "behind": (Behind, (4, 6), {"first": 1}),
    "late": (Late, (4, 6), {"direct": 1}),
    "frozen": (lambda: nn.Sequential(nn.Linear(6, 5).requires_grad_(False), nn.Linear(5, 3)), (4, 6), {"1": 1}),
    "alone": (lambda: nn.Linear(6, 3), (4, 6), {"": 1}),
}


def stage_of(module: nn.Module, config) -> Stage:
    return Stage(module, config, CPU, first=False, last=False)


def run_stage(stage: Stage, shape: tuple[int, ...], order: list[Action]) -> None:
    """Run actions of one stage, on inputs and gradients that are those of the microbatch."""
    outputs: dict[int, Any] = {}
    apart = any(action.op == "W" for action in order)
    for action in order:
        m = action.microbatch
        if action.op == "F":
            outputs[m] = stage.forward(m, {UNNAMED: normal(*shape, seed=m)}, key=m)[UNNAMED]
        elif action.op == "W":
            stage.backward_weights(m)
        else:
            (stage.backward_input if apart else stage.backward)(m, {UNNAMED: normal(*outputs[m].shape, seed=50 + m)})


ORDERS = {
    "GPipe": [("F", 0), ("F", 1), ("F", 2), ("B", 0), ("B", 1), ("B", 2)],
    "1F1B": [("F", 0), ("B", 0), ("F", 1), ("B", 1), ("F", 2), ("B", 2)],
    "ZBH1": [("F", 0), ("F", 1), ("B", 0), ("W", 0), ("F", 2), ("B", 1), ("B", 2), ("W", 1), ("W", 2)],
}


def by_autograd(module: nn.Module, shape: tuple[int, ...], readers: dict[str, float]) -> float:
    """S by the formula, of gradients that autograd is asked for directly."""
    outputs: list[tuple[float, Tensor]] = []
    layers = {name: module.get_submodule(name) for name in readers}
    handles = [
        layer.register_forward_hook(lambda layer, x, y, uses=readers[name]: outputs.append((uses, y)))
        for name, layer in layers.items()
    ]
    weights: list[Any] = [layer.weight for layer in layers.values()]
    above, below = [torch.zeros_like(weight) for weight in weights], 0.0
    for m in range(3):
        outputs.clear()
        y = module(normal(*shape, seed=m).requires_grad_())
        wanted = [y for _, y in outputs]
        found = torch.autograd.grad(y, [*weights, *wanted], normal(*y.shape, seed=50 + m))
        for total, gradient in zip(above, found, strict=False):
            total += gradient
        below += sum(uses * norm2(gradient) for (uses, _), gradient in zip(outputs, found[len(weights) :], strict=True))
    for handle in handles:
        handle.remove()
    return sum(norm2(total) for total in above) / below


@pytest.mark.parametrize("name", STAGES)
def test_s_is_the_formula_over_autograd_s_gradients(small, name) -> None:
    make, shape, readers = STAGES[name]
    torch.manual_seed(0)
    module = make()
    rectified = [layer for layer in module.modules() if isinstance(layer, nn.ReLU)]
    for layer in rectified:
        layer.inplace = False  # autograd is asked for gradients of tensors that these would change
    expected = by_autograd(module, shape, readers)
    for layer in rectified:
        layer.inplace = True
    found = set()
    sensitivity = Sensitivity(module)
    for recompute in (False, True):
        for order in ORDERS.values():
            stage = stage_of(module, small(recompute=recompute))
            run_stage(stage, shape, [Action(1, op, m) for op, m in order])
            found.add(sensitivity.take())
            module.zero_grad(set_to_none=True)
    (one,) = found
    assert one == pytest.approx(expected, rel=1e-5)


def test_evaluation_and_what_broke_off_leave_nothing(small) -> None:
    module = nn.Sequential(nn.Linear(6, 5))
    sensitivity, stage = Sensitivity(module), stage_of(module, small())
    order = [Action(1, op, m) for op, m in ORDERS["1F1B"]]
    run_stage(stage, (4, 6), order)
    expected = sensitivity.take()
    module.zero_grad()
    run_stage(stage, (4, 6), order[:4])
    sensitivity.clear()
    module.zero_grad()
    stage.infer({UNNAMED: normal(4, 6)})
    run_stage(stage, (4, 6), order)
    assert sensitivity.take() == expected
    assert sensitivity.take() is None  # nothing since


@pytest.mark.parametrize("scale", [0.0, math.inf, math.nan])
def test_gradients_of_zero_and_infinity_tell_nothing(scale: float) -> None:
    module = nn.Sequential(nn.Linear(6, 5))
    sensitivity = Sensitivity(module)
    module(normal(4, 6).requires_grad_()).backward(torch.full((4, 5), scale))
    assert sensitivity.take() is None


def measured(config, steps: int = 1) -> list[dict[str, float]]:
    """Return what the stages of a run measure in each of its first steps, each facts what the one before says."""
    engine, signals, found = start(config), StepFeedback(), []
    for step in range(steps):
        reports = engine.step(step, signals)
        signals = StepFeedback(sensitivities=sensitivities(reports))
        found.append(dict(signals.sensitivities))
    return found


@pytest.mark.parametrize(
    "kind",
    [{**DROPOUT, "dtype": "bfloat16"}, {"optimizer": {"learning_rate": 0.1, "clip_norm": 0.01}}, RUNS["batchnorm"]],
    ids=["dropout", "clip", "batchnorm"],
)
def test_schedules_and_recomputation_measure_the_same(small, kind) -> None:
    expected = measured(small(**kind, forward="ACGC(0.1)"), 2)
    assert all(list(step) == ["0/0/forward", "0/1/forward"] for step in expected)
    assert len({value for step in expected for value in step.values()}) == 4
    for changes in ({"schedule": "GPipe"}, {"schedule": "ZBH1", "recompute": True}):
        assert measured(small(**kind, **changes, forward="ACGC(0.1)"), 2) == expected


def test_replicas_measure_their_own_before_they_average(small) -> None:
    """What a replica measures is what a pipeline of its microbatches alone would, though replicas send much less than all."""
    config = small(num_replicas=2, num_microbatches=2, forward="ACGC(0.1)", replica_gradient="TopK(0.1)")
    (both,) = measured(config)
    (dense,) = measured(config.changed(replica_gradient="Identity"))
    assert both == dense
    assert len(set(both.values())) == len(both) == 4


def test_only_stages_behind_such_a_link_are_watched(small) -> None:
    engine = start(small(forward=["Identity", "ACGC(0.1)"]))
    stages = {index: stage for worker in engine.workers for index, stage in worker.stages.items()}
    hooked = {
        index
        for index, stage in stages.items()
        if any(layer._forward_hooks or layer._forward_pre_hooks for layer in stage.module.modules())
    }
    assert hooked == {2}
    assert [boundary for report in engine.step(0) for boundary in report.sensitivities] == [1]


# The bound.


@pytest.mark.parametrize("sensitivity", [1e-12, 0.3, 60.0, 1e9])
def test_the_bound_is_the_formula(sensitivity: float) -> None:
    allowed = 0.1 * sensitivity / (2 * 900)
    whole = ACGC(0.1).bound(sensitivity, 900)
    assert whole == pytest.approx(math.sqrt(3 * allowed), rel=1e-15)
    assert ACGC(0.05).bound(sensitivity, 900) == pytest.approx(
        whole / math.sqrt(2), rel=1e-15
    )  # half a bit, as in the paper
    assert ACGC(0.025).bound(sensitivity, 900) == whole / 2
    assert ACGC(0.1).bound(sensitivity, 3600) == whole / 2


class Sender:
    """One end of a link, step by step; each is facts S of the step before."""

    def __init__(self, budget: float = 0.1) -> None:
        self.link = Link(ACGC(budget), 0, "forward", sender=True, device=CPU)

    def step(self, step: int, sensitivity: float | None = None, dtype: torch.dtype = torch.float32):
        """Send the messages of a step; return their packets, the decision and the bound that follows."""
        self.sent = [self.link.send(message(step, m, dtype), context(step, m)) for m in range(MICROBATCHES)]
        packets = [self.link.unpack(one) for one in self.sent]
        (decision,) = self.link.end_step(StepFacts(sensitivity=sensitivity)).decisions
        return packets, decision, float(self.link.state[TALLY][0])


def test_a_step_is_sent_as_it_is_until_a_bound_is_known() -> None:
    sender = Sender()
    values = sum(message(0, m).numel() for m in range(MICROBATCHES))
    assert sender.link.unpack(sender.link.send_evaluation(message(0), "on", 1)).codec == Identity()
    for step, sensitivity in enumerate([None, 0.0, math.nan, math.inf, 2.0]):
        packets, decision, bound = sender.step(step, sensitivity)
        assert all(packet.codec == Identity() for packet in packets)
        assert decision.branch == "dense"
        assert decision.factor == values * 4 / (values * 4 + sum(len(one[0]) for one in sender.sent))
    assert bound == ACGC(0.1).bound(2.0, values)
    assert decision.reason.startswith(f"no value may be off by more than {bound:.4g} in the next step")
    assert sender.link.unpack(sender.link.send_evaluation(message(0), "on", 1)).codec == ErrorBounded(bound)
    for step, sensitivity in enumerate([None, 0.0, math.nan, math.inf, 1e300], start=5):
        packets, decision, kept = sender.step(step, sensitivity)
        assert all(packet.codec == ErrorBounded(bound) for packet in packets)
        assert decision.branch == "bounded"
        assert decision.factor == sum(p.dense_bytes for p in packets) / sum(
            wire_bytes(sender.link.table.pack(p)) for p in packets
        )
        assert kept == bound
    _, _, following = sender.step(10, 8.0)
    assert following == 2 * bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_value_is_off_by_more_than_the_bound(dtype: torch.dtype) -> None:
    sender = Sender(0.5)
    _, _, bound = sender.step(0, 40.0, dtype)
    for step in range(1, 5):
        packets, _, following = sender.step(step, 40.0 / 4**step, dtype)
        for m, packet in enumerate(packets):
            x = message(step, m, dtype)
            rounding = torch.finfo(dtype).eps * (float(x.abs().max()) + bound)
            assert float((packet.decode().double() - x.double()).abs().max()) <= bound + rounding
        assert following == bound / 2 or step == 1
        bound = following


@pytest.mark.parametrize("budget", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("layers", ["linear", "conv"])
def test_gradients_of_weights_are_off_by_no_more_than_the_budget(small, budget: float, layers: str) -> None:
    """Of a stage of a real pipeline, with S measured on the same data and the gradients behind the layer held as they are."""
    cut = {"linear": {"cuts": ["hidden"]}, "conv": {"cuts": ["conv2"]}}
    config = small(num_stages=None, **cut[layers], forward=f"ACGC({budget})", num_microbatches=4)
    engine = start(config)
    worker = engine.workers[1]
    module = worker.stages[1].module
    reader = next(layer for layer in module.modules() if isinstance(layer, (nn.Linear, nn.Conv2d)))
    seen: list[list[Tensor]] = []

    def hold(layer: nn.Module, arguments: tuple[Tensor, ...], y: Tensor) -> None:
        if torch.is_grad_enabled():
            held = [arguments[0].detach().clone()]
            seen.append(held)
            y.register_hook(lambda gradient: held.append(gradient.clone()))

    for step in range(3):
        seen.clear()
        watched = reader.register_forward_hook(hold)
        (found,) = [s for report in engine.step(step) for s in report.sensitivities.values()]
        watched.remove()
        bound = ACGC(budget).bound(found, sum(x.numel() for x, _ in seen))
        assert bound is not None

        def gradient_with(codec, seen=seen) -> Tensor:
            total = torch.zeros_like(reader.weight)
            for x, gradient in seen:
                y = reader(codec.encode(x).decode())
                total += torch.autograd.grad(y, reader.weight, gradient)[0]
            return total

        exact = gradient_with(Identity())
        off = norm2(gradient_with(ErrorBounded(bound)) - exact) / norm2(exact)
        assert 0 < off <= budget


# On a pipeline.


def test_two_steps_are_dense_and_the_others_bounded(small, tmp_path) -> None:
    run: Run = train(small(forward="ACGC(0.1)", steps=6), engine="inline", out=tmp_path / "run")
    decisions = run.decisions
    assert len(decisions) == 12  # a step and boundary
    assert set(decisions["where"]) == {"forward"}
    assert decisions.groupby("step")["branch"].agg(set).tolist() == [{"dense"}] * 2 + [{"bounded"}] * 4
    assert (
        decisions["factor"][decisions["step"] < 2].between(0.99, 1, inclusive="left").all()
    )  # a header beside the values
    assert (decisions["factor"][decisions["step"] >= 2] > 2.0).all()
    links = run.links[run.links["direction"] == "forward"].set_index(["step", "boundary"])
    mine = decisions.set_index(["step", "boundary"])
    assert (links["dense_bytes"] / links["wire_bytes"]).to_dict() == pytest.approx(mine["factor"].to_dict())
    known = decisions[decisions["step"] > 0]["reason"]
    assert known.str.contains("moves by at most 0.1 of its squared norm").all()
    assert "before gradients" in decisions["reason"].iloc[0]


def test_a_smaller_budget_sends_more(small) -> None:
    sent = []
    for budget in (1.0, 0.1, 0.01):
        engine, signals = start(small(forward=f"ACGC({budget})")), StepFeedback()
        for step in range(3):
            reports = engine.step(step, signals)
            signals = StepFeedback(sensitivities=sensitivities(reports))
        sent.append(sum(a.wire_bytes for r in reports for a in r.links if a.sender and a.direction == "forward"))
    assert sent == sorted(sent)
    assert len(set(sent)) == 3


def test_a_stage_that_reads_by_no_layer_is_sent_everything(small) -> None:
    """The middle stage only flattens: nothing tells what an error there does."""
    config = small(model={"name": "tests.support.models:unread"}, num_stages=None, cuts=["0", "1"], forward="ACGC(0.1)")
    assert [list(step) for step in measured(config, 2)] == [["0/1/forward"]] * 2


def test_before_a_run_its_messages_are_priced_as_they_are(small) -> None:
    notes: list[str] = []
    costs = link_costs(small(forward="ACGC(0.1)"), [BoundaryTensors({"": (4, 6)}, {})] * 2, None, notes)
    assert 0 < costs[0].wire_bytes - costs[0].dense_bytes <= 8  # the header
    assert notes[0].startswith("ACGC(0.1) follows the gradients of a run")
