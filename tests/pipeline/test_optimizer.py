"""The learning rate is a pure function of the step, and the optimisers are torch's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from raysim.config import OptimizerConfig
from raysim.pipeline.optimizer import learning_rate, make_optimizer, slots_per_parameter


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


def test_constant() -> None:
    assert rates(OptimizerConfig(learning_rate=0.3), 5) == [0.3] * 5


def test_cosine_over_steps_is_torchs() -> None:
    ours = rates(OptimizerConfig(learning_rate=0.1, decay="cosine"), 37)
    assert ours == pytest.approx(of_torch(lambda o: CosineAnnealingLR(o, T_max=37), 37))


def test_cosine_between_epochs_is_torchs_stepped_once_an_epoch() -> None:
    """As the paper has it: T_max of 200 epochs in a run of 100, so that it only falls to 0.0051."""
    config = OptimizerConfig(learning_rate=0.01, decay="cosine", decay_every="epoch", decay_epochs=200)
    ours = rates(config, num_steps=100 * 3, steps_per_epoch=3)
    theirs = of_torch(lambda o: CosineAnnealingLR(o, T_max=200), 100, rate=0.01)
    assert ours == pytest.approx([rate for rate in theirs for _ in range(3)])
    assert ours[-1] == pytest.approx(0.0051, abs=5e-5)


def test_linear_with_and_without_warm_up_is_that_of_transformers() -> None:
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


def test_warm_up_rises_in_equal_steps_to_the_full_rate() -> None:
    for decay in ("constant", "cosine", "linear"):
        ours = rates(OptimizerConfig(learning_rate=0.8, warmup_steps=4, decay=decay), 20)
        assert ours[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8])
        assert max(ours) == pytest.approx(0.8)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
@pytest.mark.parametrize("every", ["step", "epoch"])
@pytest.mark.parametrize("warmup", [0, 3, 17])
@pytest.mark.parametrize("epochs", [None, 0.5, 2, 3.5])
def test_after_the_warm_up_it_falls_to_zero_and_stays(
    decay: str, every: str, warmup: int, epochs: float | None
) -> None:
    config = OptimizerConfig(
        learning_rate=1.0, decay=decay, decay_every=every, warmup_steps=warmup, decay_epochs=epochs
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


def test_it_depends_on_the_step_alone() -> None:
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


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_is_torchs(rule: str) -> None:
    config, reference = RULES[rule]
    ours, theirs = model(), model()
    optimizer, expected = make_optimizer(config, ours.parameters()), reference(theirs.parameters())
    assert optimizer is not None
    for step in range(5):
        for one, stepper in ((ours, optimizer), (theirs, expected)):
            stepper.zero_grad()
            one(torch.full((4, 3), 1.0 + step)).square().mean().backward()
            stepper.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    slots = [x for state in optimizer.state_dict()["state"].values() for x in state.values() if x is not None]
    kept = sum(x.numel() for x in slots if x.dim() > 0)
    assert kept == slots_per_parameter(config) * sum(p.numel() for p in ours.parameters())


def test_a_stage_without_parameters_has_no_optimiser() -> None:
    assert make_optimizer(OptimizerConfig(), []) is None
    assert make_optimizer(OptimizerConfig(), [nn.Parameter(torch.zeros(2), requires_grad=False)]) is None
