"""Models that do not give the same bits twice: the first layer that differs is named."""

import pytest
from typer.testing import CliRunner

from raysim.cli import app
from raysim.training.repeat import first_difference
from raysim.workloads.data import load_data

MODELS = """
import random
import torch
from torch import nn

class Random(nn.Module):  # Python's own generator, which nobody seeds
    def forward(self, x):
        return x * random.random()

class Counting(nn.Module):  # a state outside of parameters and buffers
    calls = 0
    def forward(self, x):
        Counting.calls += 1
        return x + Counting.calls

class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        return gradient * random.random()

class Gradient(nn.Module):
    def forward(self, x):
        return Backward.apply(x)

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return self.second(self.first(x) + random.random())

class Drawn(nn.Linear):
    def reset_parameters(self):
        nn.init.constant_(self.weight, random.random())
        nn.init.zeros_(self.bias)

def made(layer):
    def model(shape):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.5), layer(), nn.Linear(8, 10))
    return model

same, drawn, counting, gradient, inner = map(made, (nn.Identity, Random, Counting, Gradient, Inner))
initial = made(lambda: Drawn(8, 8))
"""

FOUND = {
    "same": None,
    "drawn": "the output of layer `4` in step 0, stage 1",
    "counting": "the output of layer `4` in step 0, stage 1",
    "inner": "the input of layer `4.second` in step 0, stage 1",
    "gradient": "`1.weight` of stage 0 after the update of step 0",
    "initial": "the initial value of `4.weight` in stage 1",
}


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "repeated_models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", FOUND)
def test_the_first_difference_is_named(models, small, name):
    config = small(model=f"repeated_models:{name}", num_stages=None, cuts=["1"])
    data = load_data(config.data.name, config.data.options, config.seed)
    assert first_difference(config, data) == FOUND[name]


def test_packet_mismatch_names_the_stage(small, monkeypatch):
    import itertools

    from raysim.codecs.quantize import Quantize

    calls, encode = itertools.count(), Quantize.encode

    def shifted(self, x, *arguments, **options):
        return encode(self, x + next(calls), *arguments, **options)

    monkeypatch.setattr(Quantize, "encode", shifted)
    config = small(forward="Quantize(8)")
    data = load_data(config.data.name, config.data.options, config.seed)
    assert first_difference(config, data) == "what the stage received in step 0, stage 1"


@pytest.mark.parametrize("name", ["same", "drawn"])
def test_the_command_checks_before_it_trains(models, tmp_path, name):
    keys = [f"model=repeated_models:{name}", "num_stages=2", "steps=2"]
    words = ["train", "digits-cnn", *keys, "--engine", "inline", "--out", str(tmp_path / "out"), "--check-repeat"]
    done = CliRunner().invoke(app, words)
    if FOUND[name] is None:
        assert done.exit_code == 0, done.stderr
        assert "The first 3 steps give the same bits when they are taken twice." in done.stderr
    else:
        assert done.exit_code == 1
        assert done.stderr.startswith("raysim: the run is not deterministic: the output of layer `4` in step 0, stage ")
        assert len(done.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "out").exists()
