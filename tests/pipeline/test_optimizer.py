"""The learning rate is a pure function of the step, and the optimisers are torch's."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR

from raysim.config import ConfigError, OptimizerConfig, make_config
from raysim.config.fields import OPTIMIZERS
from raysim.pipeline.optimizer import find_elementwise, learning_rate, make_optimizer, slot_values


def rates(config: OptimizerConfig, num_steps: int, steps_per_epoch: int = 10, until: int | None = None) -> list[float]:
    return [learning_rate(config, step, steps_per_epoch, num_steps) for step in range(until or num_steps)]


def of_torch(make, num_steps: int, rate: float = 0.1) -> list[float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)
    scheduler = make(optimizer)
    found = []
    for _ in range(num_steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def test_constant_learning_rate() -> None:
    assert rates(OptimizerConfig(learning_rate=0.3), 5) == [0.3] * 5


def test_cosine_by_step_equals_torch() -> None:
    ours = rates(OptimizerConfig(learning_rate=0.1, decay="cosine"), 37)
    assert ours == pytest.approx(of_torch(lambda o: CosineAnnealingLR(o, T_max=37), 37))


def test_cosine_by_epoch_equals_torch() -> None:
    """As the paper has it: T_max of 200 epochs in a run of 100, so that it only falls to 0.0051."""
    config = OptimizerConfig(learning_rate=0.01, decay="cosine", decay_every="epoch", decay_epochs=200)
    ours = rates(config, num_steps=100 * 3, steps_per_epoch=3)
    theirs = of_torch(lambda o: CosineAnnealingLR(o, T_max=200), 100, rate=0.01)
    assert ours == pytest.approx([rate for rate in theirs for _ in range(3)])
    assert ours[-1] == pytest.approx(0.0051, abs=5e-5)


def test_linear_decay_equals_transformers() -> None:
    for warmup in (0, 5):

        def share(step: int, warmup: int = warmup) -> float:  # get_linear_schedule_with_warmup
            if step < warmup:
                return step / max(1, warmup)
            return max(0.0, (40 - step) / max(1, 40 - warmup))

        config = OptimizerConfig(learning_rate=0.1, decay="linear", warmup_steps=warmup)
        theirs = of_torch(lambda o, share=share: LambdaLR(o, share), 41)
        ours = rates(config, 40)
        assert ours[warmup:] == pytest.approx(theirs[warmup:40])
        assert ours[:warmup] == pytest.approx(theirs[1 : warmup + 1])  # ours never takes a step of length zero


@pytest.mark.parametrize("warmup", [0, 2, 7])
def test_one_cycle_equals_torch(warmup: int) -> None:
    config = OptimizerConfig(learning_rate=0.1, decay="one-cycle", warmup_steps=warmup)
    share = warmup / 40 if warmup else 0.3
    theirs = of_torch(lambda o: OneCycleLR(o, 0.1, total_steps=40, pct_start=share, cycle_momentum=False), 40)
    assert rates(config, 40) == pytest.approx(theirs)


def test_warm_up_rises_in_equal_steps_to_the_full_rate() -> None:
    for decay in ("constant", "cosine", "linear"):
        ours = rates(OptimizerConfig(learning_rate=0.8, warmup_steps=4, decay=decay), 20)
        assert ours[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
        assert max(ours) == pytest.approx(0.8)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize(("warmup", "epochs"), [(0, None), (0, 0.5), (3, 2), (3, None), (17, 2), (17, 3.5)])
def test_learning_rate_falls_to_zero_after_warm_up(decay: Any, every: Any, warmup: int, epochs: float | None) -> None:
    config = OptimizerConfig(
        learning_rate=1.0,
        decay=decay,
        decay_every=every,
        warmup_steps=warmup,
        decay_epochs=epochs,
    )
    length = 50 if epochs is None else epochs * 10
    if warmup >= length:
        return  # there is no room to fall in
    ours = rates(config, num_steps=50, steps_per_epoch=10, until=80)
    falling = ours[max(0, warmup - 1) :]
    assert all(0 <= rate <= 1 for rate in ours)
    assert falling == sorted(falling, reverse=True)
    end = math.ceil(length / 10) * 10 if every == "epoch" else math.ceil(length)
    assert set(ours[max(end, warmup) :]) <= {0.0}
    if length >= 10:
        assert ours[int(min(length, 50)) - 1] > 0  # and not before
    if every == "epoch":
        for start in range(0, 80, 10):
            assert len(set(ours[max(start, warmup) : start + 10])) <= 1


def test_learning_rate_depends_only_on_step() -> None:
    config = OptimizerConfig(decay="cosine", warmup_steps=3)
    ours = rates(config, 30)
    assert [learning_rate(config, step, 10, 30) for step in reversed(range(30))] == ours[::-1]


def model() -> nn.Linear:
    linear = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) / 7)
    return linear


RULES = {
    "sgd": (OptimizerConfig(learning_rate=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd, all options": (
        OptimizerConfig(learning_rate=0.1, momentum=0.9, weight_decay=5e-4),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=5e-4),
    ),
    "adamw": (
        OptimizerConfig(name="adamw", learning_rate=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0),
    ),
    "adamw, all options": (
        OptimizerConfig(name="adamw", learning_rate=0.01, weight_decay=0.1, betas=(0.8, 0.95), epsilon=1e-4),
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.1),
    ),
}


# every other rule with torch's defaults, and with an option of its own
OWN: dict[str, dict[str, Any]] = {
    "adadelta": {"rho": 0.8},
    "adafactor": {"beta2_decay": -0.5},
    "adagrad": {"initial_accumulator_value": 0.1},
    "adam": {"amsgrad": True},
    "adamax": {"betas": [0.8, 0.95]},
    "asgd": {"t0": 1},
    "nadam": {"momentum_decay": 0.01},
    "radam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
    "rmsprop": {"centered": True, "momentum": 0.5},
    "rprop": {"etas": [0.4, 1.3]},
    "sgd": {"nesterov": True, "momentum": 0.9},
}
KINDS = {kind.__name__.lower(): kind for kind in vars(torch.optim).values() if isinstance(kind, type)}
for _name, _options in OWN.items():
    for _given in ({}, _options):
        RULES[f"{_name} {_given}"] = (
            OptimizerConfig(name=_name, learning_rate=0.01, **_given),
            lambda p, name=_name, given=_given: KINDS[name](p, lr=0.01, **given),  # type: ignore[misc]
        )


def test_optimizers_and_options_match_torch() -> None:
    general = {"params", "lr", "foreach", "maximize", "capturable", "differentiable", "fused"}
    found = {}
    for name, kind in KINDS.items():
        if issubclass(kind, torch.optim.Optimizer) and name not in ("optimizer", "lbfgs", "sparseadam"):
            options = set(inspect.signature(kind).parameters) - general
            found[name] = {"epsilon" if option == "eps" else option for option in options}
    found["adafactor"] -= {"epsilon"}  # a pair, whose first entry is the machine's
    found["muon"] |= {"betas"}  # of the AdamW beside it
    assert {name: set(options) for name, options in OPTIMIZERS.items()} == found


@pytest.mark.parametrize("rule", RULES)
def test_optimizer_equals_torch(rule: str) -> None:
    config, reference = RULES[rule]
    ours, theirs = model(), model()
    optimizer, expected = make_optimizer(config, ours.named_parameters()), reference(theirs.parameters())
    assert optimizer is not None
    for step in range(5):
        for one, stepper in ((ours, optimizer), (theirs, expected)):
            stepper.zero_grad()
            one(torch.full((4, 3), 1.0 + step)).square().mean().backward()
            stepper.step()
    for own, expected_own in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, expected_own, rtol=1e-6, atol=1e-7)
    slots = [x for state in optimizer.state_dict()["state"].values() for x in state.values() if x is not None]
    kept = sum(x.numel() for x in slots if x.dim() > 0)
    assert kept == sum(slot_values(config, p.shape) for p in ours.parameters())


def test_a_stage_without_parameters_has_no_optimiser() -> None:
    assert make_optimizer(OptimizerConfig(), []) is None
    assert make_optimizer(OptimizerConfig(), [("a", nn.Parameter(torch.zeros(2), requires_grad=False))]) is None


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 11))


def muon_names(stages, tied=()) -> list[set[str]]:
    apart = find_elementwise(stages, tied)
    return [{n for n, _ in s.named_parameters()} - names for s, names in zip(stages, apart, strict=True)]


def test_muon_takes_matrices_but_those_of_embeddings_and_of_the_last_layer() -> None:
    whole = blocks()
    assert muon_names([whole]) == [{"1.weight", "3.weight"}]
    assert muon_names([whole[:2], whole[2:]]) == [{"1.weight"}, {"3.weight"}]
    assert muon_names([whole[:2], whole[2:]], [[(0, "0.weight"), (1, "3.weight")]]) == [{"1.weight"}, set()]
    assert muon_names([nn.Sequential(*list(whole[:3]), whole[3:])]) == [{"1.weight", "3.3.weight"}]  # type: ignore[call-overload]


def test_muon_and_adamw_steps_equal_torch() -> None:
    ours, theirs = blocks(), blocks()
    (apart,) = find_elementwise([ours], ())
    config = OptimizerConfig(name="muon", learning_rate=0.02, weight_decay=0.1, momentum=0.9, betas=(0.8, 0.95))
    optimizer = make_optimizer(config, ours.named_parameters(), apart)
    named = dict(theirs.named_parameters())
    matrices = [named.pop(name) for name in ("1.weight", "3.weight")]
    pair: list[Any] = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(named.values(), lr=0.02, weight_decay=0.1, betas=(0.8, 0.95), fused=True),
    ]
    again, resumed = copy.deepcopy(ours), None
    for step in range(4):
        if step == 2:  # another optimiser takes the state over
            again.load_state_dict(ours.state_dict())
            resumed = make_optimizer(config, again.named_parameters(), apart)
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for one, steppers in ((ours, [optimizer]), (theirs, pair), *([(again, [resumed])] if resumed else [])):
            one.zero_grad()
            one(torch.arange(4) + step).square().mean().backward()
            for stepper in steppers:
                stepper.step()
    for first, other, third in zip(ours.parameters(), theirs.parameters(), again.parameters(), strict=True):
        assert torch.equal(first, other)
        assert torch.equal(first, third)
    kept = sum(x.numel() for slots in optimizer.state_dict()["state"].values() for x in slots.values() if x.dim())
    assert kept == sum(slot_values(config, p.shape, elementwise=n in apart) for n, p in ours.named_parameters())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "adamwq"}, "`optimizer.name`: Unknown optimiser 'adamwq'. Did you mean `adamw`?"),
        (
            {"name": "lbfgs"},
            "`optimizer.name` cannot be 'lbfgs' in a pipeline, since it computes the loss several times",
        ),
        ({"name": "adam", "nesterov": True}, "Unknown key `optimizer.nesterov`. Known: "),
        (
            {"name": "rprop", "weight_decay": 0.1},
            "`optimizer.weight_decay` has no effect with `optimizer.name` = 'rprop'",
        ),
        ({"name": "sgd", "nesterov": 1}, "`optimizer.nesterov` must be true or false, but got 1."),
        ({"name": "rprop", "etas": [0.5]}, "`optimizer.etas` must be a list of 2 numbers, but got [0.5]."),
        ({"name": "muon", "adjust_lr_fn": "x"}, "`optimizer.adjust_lr_fn` must be 'original' or 'match_rms_adamw'"),
        ({"name": "asgd", "alpha": "x"}, "`optimizer.alpha` must be a number, but got 'x'."),
    ],
)
def test_unknown_optimizer_options_are_refused(values, message) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config({"steps": 1, "optimizer": values})
    assert str(caught.value).startswith(message)
