"""Layers that detach their input or turn gradients off: the run says which parameters are not trained."""

import pytest
import torch

from raysim.training.train import train

MODULE = """
import torch
from torch import nn


class Detach(nn.Module):
    def forward(self, x):
        return x.detach()


class NoGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x):
        with torch.no_grad():
            return self.layer(x)


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.spare = nn.Linear(64, 64), nn.Linear(2, 2)

    def forward(self, x):
        return self.layer(x)


class Data(nn.Module):
    def forward(self, x):
        return x.data + 0


ODD = {"detach": Detach, "no_grad": NoGrad, "unused": Unused, "data": Data, "plain": nn.Identity}


def model(shape, kind, at, frozen=False):
    layers = [nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)]
    if frozen:
        for layer in layers[:at]:
            layer.requires_grad_(False)
    layers.insert(at, ODD[kind]())
    return nn.Sequential(*layers)
"""


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "ending_gradients.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def warning(folder, kind, at, *options, stages=2):
    model = ["model=ending_gradients:model", f"model.kind={kind}", f"model.at={at}"]
    cut = [f"num_stages={stages}", "steps=2", "evaluate_samples=64", *options]
    return train("digits-cnn", *model, *cut, out=folder, engine="inline").row["warning"]


@pytest.mark.parametrize(
    ("kind", "count", "stages", "options"),
    [
        ("detach", 4, 4, ["schedule=ZBH1"]),
        ("no_grad", 6, 4, ["num_replicas=2"]),
        ("no_grad", 6, 1, ["recompute=true"]),
        ("data", 4, 2, ["schedule=GPipe"]),
    ],
)
def test_run_reports_parameters_without_gradient(tmp_path, kind, count, options, stages):
    said = warning(tmp_path / "run", kind, 3, *options, stages=stages)
    assert said.startswith(f"Step 0: {count} of {6 + 2 * (kind == 'no_grad')} parameters get no gradient: `1.")


def test_per_microbatch_updates_are_reported(tmp_path):
    said = warning(tmp_path / "run", "detach", 3, "schedule=1F1B", "weights=Stashed")
    assert said.startswith("Step 0: 4 of 6 parameters get no gradient")


def test_model_without_gradients_is_reported(tmp_path):
    assert warning(tmp_path / "run", "detach", 4).startswith("Step 0: 6 of 6 parameters get no gradient")


def test_unused_parameters_are_named(tmp_path):
    said = warning(tmp_path / "run", "unused", 2)
    assert "2 of 10 parameters get no gradient: `2.spare.weight`, `2.spare.bias`." in said


@pytest.mark.parametrize("at", [1, 2, 3])
def test_sound_and_frozen_models_are_not_warned_about(tmp_path, at):
    assert warning(tmp_path / "plain", "plain", at) is None
    assert warning(tmp_path / "frozen", "detach", at, "model.frozen=true") is None


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["optimizer.weight_decay=0.1", "num_stages=1"],
        ["num_replicas=2", "optimizer.weight_decay=0.1", "num_stages=1"],
        ["num_replicas=2", "optimizer.weight_decay=0.1", "num_stages=1", "replica_gradient=ErrorFeedback(TopK(0.1))"],
    ],
)
def test_reported_parameters_are_the_unchanged_ones(tmp_path, options):
    from raysim.training.checkpoint import load_weights

    first, last = (load_weights(kept(tmp_path / str(steps), steps, *options)) for steps in (1, 3))
    same = {name for name in first if torch.equal(first[name], last[name])}
    assert same == {"1.weight", "1.bias", "2.weight", "2.bias"}


def kept(folder, steps, *options):
    model = ["model=ending_gradients:model", "model.kind=detach", "model.at=3"]
    keys = ["num_stages=2", f"steps={steps}", "evaluate_samples=64", *options]
    return train("digits-cnn", *model, *keys, out=folder, engine="inline").folder
