"""Learned bottlenecks: layers like others, whose code crosses in place of what they were given."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from cut_models import BATCH, MODELS, example, train_cut
from engines import start, weights
from pipelines import with_slow
from torch import nn

from raysim.config import ConfigError, read_config
from raysim.training.train import train
from raysim.workloads.bottleneck import with_bottleneck
from raysim.workloads.data import DataShape
from raysim.workloads.losses import CrossEntropy
from raysim.workloads.partition import partition
from raysim.workloads.stage_costs import named_layers

CODE = 3


def features(shape):
    return shape[1] if len(shape) == 4 else shape[-1]


@pytest.mark.parametrize("name", MODELS)
def test_staged_gradients_are_those_of_the_whole_and_counts_add_up(name):
    model, shape, x, targets = example(name)
    plain = partition(model, shape, num_stages=3, batch=BATCH)
    parts = partition(model, shape, num_stages=3, batch=BATCH, bottleneck=CODE, seed=5)
    widths = [features(crossing) for crossing in (one.shape for one in plain.boundaries)]
    assert parts.cuts == tuple(f"{cut}_encoder" for cut in plain.cuts)
    for code, dense, width in zip(
        *([one.shape for one in each.boundaries] for each in (parts, plain)), widths, strict=True
    ):
        assert features(code) == CODE
        assert math.prod(code) * width == math.prod(dense) * CODE
    # 2 hc parameters and as many multiplications a position and boundary, half of them at either end
    ends = [[plain.boundaries[b].shape for b in (stage - 1, stage) if 0 <= b < 2] for stage in range(3)]
    for stage, crossing in enumerate(ends):
        more = sum(CODE * features(dense) for dense in crossing)
        assert parts.num_parameters[stage] == plain.num_parameters[stage] + more
        assert parts.num_parameters[stage] == sum(p.numel() for p in parts.stages[stage].parameters())
        flops = 2 * CODE * sum(math.prod(dense) for dense in crossing)
        assert parts.flops_forward[stage] == plain.flops_forward[stage] + flops
    assert len(parts.tied) == len(plain.tied)

    whole = nn.Sequential(*(layer for stage in parts.stages for layer in named_layers(stage).values()))
    error = CrossEntropy()(whole(x), targets)
    parameters = [list(stage.parameters()) for stage in parts.stages]
    expected = torch.autograd.grad(error, [p for stage in parameters for p in stage])
    found, sent = train_cut(parts.stages, x, targets)
    assert torch.equal(found, error)
    assert tuple(one.shape for one in parts.boundaries) == tuple(tuple(code.shape) for code in sent[:-1])
    for parameter, gradient in zip([p for stage in parameters for p in stage], expected, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("name", with_slow(MODELS, "resnet18"))
@pytest.mark.parametrize("form", ["residual", "orthonormal"])
def test_other_forms_have_whole_gradients_and_own_paths(name, form):
    model, shape, x, targets = example(name)
    parts = partition(model, shape, num_stages=3, batch=BATCH, bottleneck=CODE, bottleneck_form=form, seed=5)
    layers: list[Any] = [layer for stage in parts.stages for layer in named_layers(stage).values()]
    for encoder, decoder in pairwise(layers):
        if (type(encoder).__name__, type(decoder).__name__) not in {
            ("ResidualLinear", "ResidualLinear"),
            ("Encoder", "Decoder"),
        }:
            continue
        wide, narrow = (encoder.weight.shape[::-1]) if form == "residual" else encoder.basis.shape
        if wide < narrow:
            continue
        value = torch.randn(2, wide, generator=torch.Generator().manual_seed(1))
        code = encoder(value)
        assert torch.equal(encoder(value.view(2, wide, 1, 1))[..., 0, 0], code)
        if form == "residual":  # at first the identity on the first features alone
            assert torch.equal(code, value[:, :narrow])
            assert torch.equal(decoder(code), value * (torch.arange(wide) < narrow))
        else:  # the projection onto the span of the basis, which keeps what lies there
            assert torch.allclose(encoder.basis.t() @ encoder.basis, torch.eye(narrow), atol=1e-6)
            assert torch.allclose(encoder(decoder(code)), code, atol=1e-5)
    whole = nn.Sequential(*layers)
    error = CrossEntropy()(whole(x), targets)
    parameters = [p for stage in parts.stages for p in stage.parameters()]
    expected = torch.autograd.grad(error, parameters)
    found, _ = train_cut(parts.stages, x, targets)
    assert torch.equal(found, error)
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert sum("coder" in each.name for each in parts.tied) == (2 if form == "orthonormal" else 0)


def test_shared_basis_stays_orthonormal_and_equal_at_both_ends(small):
    engine = start(small(num_stages=3, bottleneck=2, bottleneck_form="orthonormal", optimizer={"learning_rate": 0.5}))
    first = {}
    for step in range(3):
        engine.step(step)
        held = {name: p.detach() for name, p in weights(engine, 0).items() if name.endswith("basis")}
        assert len(held) == 4
        first = first or held
        for basis in held.values():
            assert torch.allclose(basis.t() @ basis, torch.eye(2), atol=1e-6)
        for boundary in range(2):
            sender, receiver = (
                b
                for name, b in held.items()
                if name.startswith((f"{boundary}.", f"{boundary + 1}.")) and len(b) == 4 * (boundary + 1)
            )
            assert torch.equal(sender, receiver)


def test_weights_come_from_the_seed_and_the_boundary_alone():
    model, shape, _, _ = example("gpt")
    state = torch.get_rng_state()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    parts = [partition(model, shape, num_stages=3, batch=BATCH, bottleneck=CODE, seed=seed) for seed in (0, 0, 1)]
    later = partition(model, shape, num_stages=3, batch=2 * BATCH, bottleneck=[0, CODE], seed=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    weights = [
        {key: value for stage in part.stages for key, value in stage.state_dict().items() if "coder" in key}
        for part in [*parts, later]
    ]
    assert len(weights[0]) == 4
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert not any(torch.equal(weights[0][key], weights[2][key]) for key in weights[0])
    assert set(weights[3]) == {key for key in weights[0] if key.startswith(parts[0].cuts[1].removesuffix("_encoder"))}
    assert all(torch.equal(weights[0][key], weights[3][key]) for key in weights[3])
    for weight in weights[0].values():
        assert float(weight.abs().max()) <= math.sqrt(6 / sum(weight.shape))
        assert float(weight.var()) == pytest.approx(2 / sum(weight.shape), rel=0.4)


def test_wire_bytes_fall_by_the_factor_and_codecs_act_on_the_code(small, tmp_path):
    runs = {
        name: train(small(steps=2, num_stages=3, **change), engine="inline", out=tmp_path / name)  # type: ignore[arg-type]
        for name, change in {
            "plain": {},
            "narrow": {"bottleneck": 2},
            "one": {"bottleneck": [0, 2]},
            "coded": {"bottleneck": 2, "forward": "Quantize(8)"},
        }.items()
    }
    sums = {
        name: run.links.groupby(["direction", "boundary"])[["wire_bytes", "dense_bytes"]].sum()
        for name, run in runs.items()
    }
    plain, narrow, one, coded = (sums[name]["wire_bytes"] for name in ("plain", "narrow", "one", "coded"))
    for direction in ("forward", "backward"):
        # the cnn of width 4 has 4 channels at its first cut, and 8 at the second
        assert plain[direction, 0] == pytest.approx(2 * narrow[direction, 0], rel=0.01)  # but for the headers
        assert plain[direction, 1] == pytest.approx(4 * narrow[direction, 1], rel=0.02)
        assert (one[direction, 0], one[direction, 1]) == (plain[direction, 0], narrow[direction, 1])
    assert sums["coded"]["dense_bytes"].equals(sums["narrow"]["dense_bytes"])
    assert coded["forward", 0] < narrow["forward", 0] / 3.5
    assert [runs[name].row["bottleneck"] for name in runs] == [None, "2", "[0, 2]", "2"]
    assert list(runs["one"].row["cuts"]) == [runs["plain"].row["cuts"][0], runs["plain"].row["cuts"][1] + "_encoder"]


@pytest.mark.parametrize(
    ("bottleneck", "message"),
    [
        (4, "`bottleneck` must be less than the features that cross (4 after layer `conv2`), but got 4."),
        ([2], "`bottleneck` must be one number or a list with one per boundary (2), not all 0, but got [2]."),
        ([0, 0], "`bottleneck` must be one number or a list with one per boundary (2), not all 0, but got [0, 0]."),
        (0, "`bottleneck` must be at least 1, but got 0."),
        ([1, -2], "`bottleneck.1` must be at least 0, but got -2."),
        (True, "`bottleneck` must be a number or a text, not a boolean, but got True."),
    ],
)
def test_invalid_bottleneck_is_refused(small, tmp_path, bottleneck, message):
    with pytest.raises(ConfigError) as caught:
        train(small(bottleneck=bottleneck), engine="inline", out=tmp_path)
    assert str(caught.value) == message
    with pytest.raises(ConfigError, match=r"`bottleneck` has no effect with one stage"):
        read_config("digits-cnn", ["num_stages=1", "bottleneck=2"])


def test_shapes_and_names_that_do_not_fit_are_refused():
    flat = nn.Sequential(nn.Flatten(0), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=r"works on features .* but layer `0` returns the shape \(2, 8, 1, 1, 1\)"):
        with_bottleneck(flat, [("0", (2, 8, 1, 1, 1))], 2, seed=0)
    taken = nn.Sequential()
    taken.add_module("a", nn.Linear(8, 8))
    taken.add_module("a_encoder", nn.Linear(8, 10))
    with pytest.raises(ValueError, match="adds a layer `a_encoder`, but the model has one of that name"):
        partition(taken, DataShape((8,), "float32", 10), cuts=["a"], batch=2, bottleneck=2)
