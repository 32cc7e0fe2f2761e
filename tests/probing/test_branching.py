"""Branches in a user's own loop: the training goes on as if they had not been, and dense ones are its own next steps."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from raysim.nn import CompressedLink
from raysim.probing import Branch, TrainingSnapshot, branches, probe

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
}


class Loop:
    """A training with dropout, BatchNorm, a learning-rate schedule, and noise of three generators in its data."""

    def __init__(self, optimizer="adamw", links=()):
        torch.manual_seed(0)
        np.random.seed(1)
        random.seed(2)
        body = [nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Linear(16, 4)]
        self.model = nn.Sequential(*body)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.rate = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.losses = []

    def batch(self, step):
        return torch.randn(8, 16, generator=torch.Generator().manual_seed(step))

    def step(self, batch):
        noise = float(np.random.rand()) + random.random()
        self.model.train()
        loss = self.model(batch + 0.01 * noise).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.rate.step()
        return loss

    def run(self, first, end):
        self.losses += [self.step(self.batch(i)).item() for i in range(first, end)]
        return self


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 3])
def test_branch_leaves_training_unchanged(optimizer, at):
    """Losses, parameters, buffers and slots, bit for bit; dense branches take the steps that follow."""
    plain, loop = Loop(optimizer).run(0, 8), Loop(optimizer).run(0, at)
    cuts = [loop.model[2], loop.model[4]]
    taken = branches(
        loop.model,
        cuts,
        ["Identity", "TopK(0.1)", "ErrorFeedback(TopK(0.1))", "Identity"],
        loop.step,
        [loop.batch(i) for i in range(at, at + 4)],
        [loop.optimizer, loop.rate],
    )
    loop.run(at, 8)
    assert loop.losses == plain.losses
    for name, x in plain.model.state_dict().items():
        assert torch.equal(loop.model.state_dict()[name], x), name
    assert taken[0].losses == taken[-1].losses == tuple(plain.losses[at : at + 4])
    assert taken[1].losses != taken[0].losses
    assert [each.candidate for each in taken] == ["Identity", "TopK(0.1)", "ErrorFeedback(TopK(0.1))", "Identity"]


def test_a_candidate_is_a_model_with_links():
    """The losses are those of the same model trained with `CompressedLink`s at the cuts."""
    loop = Loop()
    (taken,) = branches(
        loop.model,
        [loop.model[2]],
        ["Quantize(3)"],
        loop.step,
        [loop.batch(i) for i in range(4)],
        [loop.optimizer, loop.rate],
    )
    linked = Loop()
    layers = list(linked.model)
    linked.model = nn.Sequential(*layers[:3], CompressedLink("Quantize(3)", "Quantize(3)"), *layers[3:])
    assert taken.losses == tuple(linked.run(0, 4).losses)


@pytest.mark.parametrize(("own", "dense", "harm"), [(3.0, 2.0, 50.0), (-1.0, -2.0, math.nan), (1.0, 0.0, math.nan)])
def test_harm_is_a_share_of_the_dense_loss_which_must_be_above_zero(own, dense, harm):
    setting, reference = Branch("TopK(0.1)", (9.0, own)), Branch("Identity", (9.0, dense))
    assert setting.harm(reference) == pytest.approx(harm, nan_ok=True)


def test_gradients_and_modes_are_restored():
    loop = Loop()
    loop.model(loop.batch(0)).sum().backward()
    loop.model[3].eval()
    before = [parameter.grad.clone() for parameter in loop.model.parameters()]
    snapshot = TrainingSnapshot(loop.model, [loop.optimizer])
    loop.step(loop.batch(1))
    snapshot.restore()
    assert all(torch.equal(p.grad, kept) for p, kept in zip(loop.model.parameters(), before, strict=True))
    assert [module.training for module in loop.model] == [True, True, True, False, True, True]
    assert loop.optimizer.state == {}


class Centred(nn.Module):
    """Replaces a buffer, instead of writing to it."""

    mean: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(dim=0)
        return x - self.mean


def test_a_buffer_that_a_step_replaces_is_restored():
    def centred():
        loop = Loop()
        loop.model[1] = Centred()
        return loop

    plain, loop = centred().run(0, 4), centred()
    batches, state = [loop.batch(i) for i in range(4)], [loop.optimizer, loop.rate]
    taken = branches(loop.model, [loop.model[2]], ["TopK(0.1)", "Identity"], loop.step, batches, state)
    assert taken[1].losses == tuple(plain.losses)
    assert loop.run(0, 4).losses == plain.losses


def test_a_slot_is_copied_without_the_rest_of_its_storage():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.bias] = {"flat": torch.arange(1000.0)[10:12]}
    ((slots, _),) = [kept for _, kept in TrainingSnapshot(model, [optimizer])._optimizers]
    copied = slots[model.bias]["flat"]
    assert copied.tolist() == [10.0, 11.0]
    assert copied.untyped_storage().nbytes() == copied.nbytes


def test_state_is_restored_after_an_error():
    plain, loop = Loop().run(0, 4), Loop().run(0, 2)

    def failing(batch):
        loop.step(batch)
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        branches(loop.model, [loop.model[2]], ["TopK(0.1)"], failing, [loop.batch(9)], [loop.optimizer, loop.rate])
    assert loop.run(2, 4).losses == plain.losses


def test_a_probe_branches_between_its_steps(tmp_path):
    """It takes the probe's cuts and candidates, says the cost first, and the probe's own samples go on."""
    plain, loop, told = Loop().run(0, 6), Loop(), []
    with probe(loop.model, ["2"], ["TopK(0.1)", "Quantize(4)"], out=tmp_path / "probe", steps=6, every=1) as probing:
        loop.run(0, 3)
        batches = [loop.batch(i) for i in range(3, 6)]
        taken = probing.branch(loop.step, batches, [loop.optimizer, loop.rate], say=told.append)
        loop.run(3, 6)
    assert loop.losses == plain.losses
    assert [each.candidate for each in taken] == ["Identity", "TopK(0.1)", "Quantize(4)"]
    assert taken[0].losses == tuple(plain.losses[3:])
    assert taken[0].harm(taken[0]) == 0
    (sentence,) = told
    assert sentence.startswith("Branching: 3 settings of 3 steps each take the time of 9 steps of the training, and ")
    assert len([path for path in (tmp_path / "probe").iterdir() if (path / "run.parquet").exists()]) == 3


def test_bad_input():
    loop = Loop()
    with pytest.raises(ValueError, match="`batches` must hold at least one batch"):
        branches(loop.model, [loop.model[2]], ["TopK(0.1)"], loop.step, [])
