"""Modules with a forward of their own: split where submodules end, equal to the whole, or refused with the line."""

import pytest
import torch
from cut_models import train_cut
from engines import losses_of, staged_gradients, start, weights
from own_modules import (
    Asking,
    Bounding,
    Branches,
    Cast,
    Frozen,
    Halving,
    Masked,
    Moody,
    Network,
    Noisy,
    Skipping,
    Unbound,
    UNet,
    Weighing,
)
from torch import nn
from torch.nn import functional as F

from raysim import train
from raysim.random import derive_key
from raysim.workloads.data import DataShape, batch_ids, load_data
from raysim.workloads.models import build_model
from raysim.workloads.partition import partition
from raysim.workloads.traced_layers import traced

DIGITS = DataShape((1, 8, 8), "float32", 10)
INNER = ("first", "norm", "second")  # of a residual block


def test_chained_layers_equal_module_bit_for_bit():
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


def test_skips_cross_a_cut_by_the_names_of_their_submodules():
    torch.manual_seed(0)
    model = UNet(DIGITS)
    assert [name for name, _ in traced(model, DIGITS).named_children()] == ["stem", "head"]
    layers = traced(model, DIGITS, num_stages=4)
    names = [name for name, _ in layers.named_children()]
    assert names == [
        "stem",
        "down/0",
        "down/1",
        *(f"middle/{i}" for i in INNER),
        "middle",
        "up/0",
        "up/1",
        "up/1+",
        "head",
    ]
    named = traced(model, DIGITS, cuts=["down.0", "middle"])
    assert [name for name, _ in named.named_children()] == ["stem", "down/0", "middle", "head"]
    x = torch.randn(4, 1, 8, 8)
    assert list(layers[:2](x)) == ["stem", "down_0"]
    assert list(layers[:7](x)) == ["stem", "tanh", "middle"]
    for found in (layers, named):
        assert torch.equal(found(x), model(x))


def test_traced_forward_handles_any_batch_size():
    shape = DataShape((12,), "int64", 64, target_shape=(12,))
    model = Asking(shape)
    layers = traced(model, shape)
    assert [name for name, _ in layers.named_children()] == ["blocks/0", "blocks/1", "head"]
    for count in (1, 2, 5):
        tokens = torch.randint(64, (count, 12))
        assert torch.equal(layers(tokens), model(tokens))


def test_blocks_without_gradients_get_none():
    torch.manual_seed(0)
    model = Frozen(DIGITS)
    x, found = torch.randn(4, 1, 8, 8), []
    with torch.no_grad():
        layers = traced(model, DIGITS, cuts=["encoder.1"])
    for module in (layers, model):
        model.zero_grad()
        module(x).sum().backward()
        found.append(
            {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        )
    cut, whole = found
    assert cut.keys() == whole.keys()
    assert not any(name.startswith(("encoder.0", "encoder.1")) for name in whole)
    assert all(torch.equal(cut[name], x) for name, x in whole.items())


def test_cut_network_with_skips_has_uncut_gradients(small):
    cut = {"model": {"name": "own_modules:unet"}, "num_stages": None, "cuts": ["down.0", "middle"]}
    config = small(**cut, schedule="ZBH1")
    data = load_data(config.data.name, config.data.options, 0)
    torch.manual_seed(derive_key(0, "model"))
    model = UNet(data.shape)
    for microbatch in range(4):
        ids = batch_ids(len(data.train), 16, seed=0, step=0)[1][4 * microbatch : 4 * microbatch + 4]
        F.cross_entropy(model(data.train.inputs(ids, 0, 0, True)), data.train.targets(ids)).backward(torch.tensor(0.25))
    found = {name.split(".", 1)[1]: gradient for name, gradient in staged_gradients(start(config)).items()}
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, model.get_parameter(name).grad), name


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (Branches, r"Branches cannot be cut: .*own_modules\.py:\d+, `if x\.sum\(\) > 0:`: symbolically traced"),
        (Moody, r"Moody cannot be cut: its forward does not do the same in training and evaluation \(dropout = "),
        (Noisy, r"Noisy cannot be cut: its forward draws random numbers that would be the same in every step\. Use "),
        (Skipping, r"Skipping cannot be cut: its forward draws random numbers that would be the same in every step\. "),
        (
            Cast,
            r"Cast cannot be cut: .*own_modules\.py:\d+, `x = self\.stem\(x\)`: autocast in a forward would have no effect: set",
        ),
        (Halving, r"Halving cannot be cut: its forward computes a number from the number of samples, which .* / 506"),
        (
            Weighing,
            r"Weighing cannot be cut: its forward computes a number from the number of samples, which .*constant0: \(506",
        ),
        (
            Unbound,
            r"Unbound cannot be cut: its forward does not call `head`, whose `constrain\(\)` would be lost\. Put ",
        ),
        (
            Bounding,
            r"Bounding cannot be cut: its forward does not call itself, whose `constrain\(\)` would be lost\. Put ",
        ),
        (Masked, r"Masked cannot be cut: its forward needs more than one input, x and mask\."),
    ],
)
def test_uncuttable_code_is_refused_with_its_line(module, sentence):
    with pytest.raises(ValueError, match=sentence):
        traced(module(DIGITS), DIGITS)


def test_constraint_of_a_cut_module_holds_after_each_update(small):
    config = small(model="own_modules:bound", num_stages=2, steps=3, optimizer={"name": "sgd", "learning_rate": 10.0})
    engine = start(config)
    for step in range(3):
        losses_of(engine, step)
        (weight,) = [x for name, x in weights(engine, 0).items() if name.endswith("head.weight")]
        assert weight.norm(dim=1).max() <= 1 + 1e-6


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


class Row(nn.Module):
    """Residual blocks whose sums are in the forward of the whole."""

    def __init__(self, count=6):
        super().__init__()
        self.stem, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.blocks = nn.ModuleList([nn.Linear(32, 32) for _ in range(count)])

    def forward(self, x):
        x = self.stem(x.flatten(1))
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)


@pytest.mark.parametrize("num_stages", [2, 3, 5, 8])
def test_row_of_sums_is_cut_after_them(num_stages):
    torch.manual_seed(0)
    model = Row()
    layers = traced(model, DIGITS, num_stages=num_stages)
    assert [name for name, _ in layers.named_children()] == ["stem", *(f"blocks/{i}+" for i in range(6)), "head"]
    parts = partition(layers, DIGITS, num_stages=num_stages, batch=4)
    assert all(not boundary.several for boundary in parts.boundaries)
    x, targets = torch.randn(4, 1, 8, 8), torch.arange(4)
    error = F.cross_entropy(model(x), targets)
    error.backward()
    found, _ = train_cut(parts.stages, x, targets)
    assert torch.equal(found, error)
    staged = {name.split(".", 1)[1]: p.grad for stage in parts.stages for name, p in stage.named_parameters()}
    whole = {name: p.grad for name, p in model.named_parameters()}
    assert staged.keys() == whole.keys()
    assert all(torch.equal(staged[name], whole[name]) for name in whole)


def test_cut_may_be_named_after_or_within_a_sum():
    for cut, tensors in (("blocks.3+", 1), ("blocks.3", 2)):
        parts = partition(traced(Row(), DIGITS, cuts=[cut]), DIGITS, cuts=[cut], batch=4)
        assert parts.cuts == (cut.replace(".", "/"),)
        assert len(parts.boundaries[0].shapes) == tensors
