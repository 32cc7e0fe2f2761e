"""Modules with a forward of their own: split where submodules end, equal to the whole, or refused with the line."""

import pytest
import torch
from own_modules import Branches, Masked, Moody, Network

from raysim import train
from raysim.workloads.data import DataShape
from raysim.workloads.models import build_model
from raysim.workloads.partition import partition
from raysim.workloads.traced import traced

DIGITS = DataShape((1, 8, 8), "float32", 10)


def test_layers_in_a_row_are_the_module_bit_for_bit():
    torch.manual_seed(0)
    model = Network(DIGITS)
    layers = traced(model, DIGITS)
    assert [name for name, _ in layers.named_children()] == [
        "stem",
        "encoder/0",
        "encoder/1",
        "encoder/2",
        "head",
        "output",
    ]
    x = torch.randn(4, 1, 8, 8)
    found, expected = layers(x), model(x)
    assert torch.equal(found, expected)
    pairs = [torch.autograd.grad(y.sum(), list(model.parameters())) for y in (found, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    assert torch.equal(layers.eval()(x[:2]), model.eval()(x[:2]))


def test_submodules_are_named_with_dots_in_cuts_and_parameters_at_both_ends_are_tied():
    layers = build_model("own_modules:network", {}, DIGITS, seed=0)
    parts = partition(layers, DIGITS, cuts=["encoder.0", "encoder.2"], batch=2)
    assert parts.cuts == ("encoder/0", "encoder/2")
    assert [(tie.stage, tie.other_stage, tie.other_name) for tie in parts.tied] == [(0, 2, "output.scale")]


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Branches, r"Branches cannot be cut: .*own_modules\.py:\d+, `if x\.sum\(\) > 0:`: symbolically traced"),
        (Moody, r"Moody cannot be cut: its forward does not do the same in training and evaluation \(dropout = "),
        (Masked, r"Masked cannot be cut: its forward needs more than one input, x and mask\."),
    ],
)
def test_what_cannot_be_cut_is_refused_with_its_line(module, sentence):
    with pytest.raises(ValueError, match=sentence):
        traced(module(DIGITS), DIGITS)


@pytest.mark.slow
def test_a_module_trains_on_both_engines_to_the_same_bits(ray, small, tmp_path):
    config = small(model="own_modules:network", num_stages=None, cuts=["encoder.0", "encoder.1"], steps=2)
    here = train(config, engine="inline", out=tmp_path / "inline")
    there = train(config, out=tmp_path / "ray")
    assert here.status == "finished"
    assert there.steps["loss"].tolist() == here.steps["loss"].tolist()


def test_a_model_of_transformers_that_a_function_returns_is_cut_between_its_blocks():
    shape = DataShape((8,), "int64", 32)
    layers = build_model("own_modules:transformer", {}, shape, seed=0)
    assert [name for name, _ in layers.named_children()] == ["embedding", "block0", "block1", "head"]
