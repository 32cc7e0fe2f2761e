"""A backward in two parts: the bits of one, every kernel run once."""

import copy
from collections import OrderedDict

import pytest
import torch
from models import normed
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from raysim.workloads.feedforward_models import resnet18
from raysim.workloads.language_models import gpt
from raysim.workloads.splits import DataShape
from raysim.workloads.two_part_backward import find_branches, input_gradients, run_branches


class Again(nn.Module):
    """One layer used four times, and one parameter beside it."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.scale = nn.Parameter(torch.randn(8))

    def forward(self, x):
        for _ in range(4):
            x = x + self.norm(torch.relu(self.layer(x)))
        return x * self.scale


class Generated(nn.Module):
    """Weights that a small network makes of parameters: a branch with operations of its own."""

    def __init__(self):
        super().__init__()
        self.code, self.maker, self.after = nn.Parameter(torch.randn(3)), nn.Linear(3, 64), nn.Linear(8, 8)

    def forward(self, x):
        return self.after(torch.relu(x @ torch.tanh(self.maker(self.code)).view(8, 8)))


def block(dropout=0.0):
    return gpt(DataShape((16,), "int64", 256), num_blocks=1, width=16, num_heads=2, dropout=dropout).block0


def halves(model):
    """Return the layers after the first, which has whole numbers or data for its input."""
    return nn.Sequential(OrderedDict(list(model.named_children())[1:]))


MODELS = {
    "linear": (lambda: nn.Linear(8, 8), (5, 8)),
    "block": (block, (2, 16, 16)),
    "dropout": (lambda: block(0.3), (2, 16, 16)),
    "head": (lambda: gpt(DataShape((16,), "int64", 256), width=16, num_heads=2).head, (2, 16, 16)),
    "resnet": (lambda: halves(resnet18(DataShape((3, 32, 32), "float32", 10))), (2, 64, 8, 8)),
    "batchnorm": (lambda: halves(normed(DataShape((1, 8, 8), "float32", 10))), (4, 8, 8, 8)),
    "in-place": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)), (5, 8)),
    "used-again": (Again, (5, 8)),
    "generated": (Generated, (5, 8)),
    "none": (nn.ReLU, (5, 8)),
    "identity": (nn.Identity, (5, 8)),
    "frozen": (lambda: nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)), (5, 8)),
    "unused": (lambda: nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}), (5, 8)),
}


def forward(model, shape, seed, dtype=torch.float32):
    torch.manual_seed(seed)
    x = torch.randn(shape, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = model["a"](x) if isinstance(model, nn.ModuleDict) else model(x.clone() if isinstance(model, nn.ReLU) else x)
    return x, y, torch.randn_like(y)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=pytest.mark.slow if (name, dtype) == ("resnet", torch.bfloat16) else ())
        for name in MODELS
        for dtype in (torch.float32, torch.bfloat16)
    ],
)
def test_split_backward_equals_single_bit_for_bit(name, dtype):
    make, shape = MODELS[name]
    torch.manual_seed(1)
    joint = make().train()
    apart = copy.deepcopy(joint)
    waiting = []
    for seed in range(3):  # gradients add up over microbatches; the second parts come later, in order
        x, y, gradient = forward(joint, shape, seed, dtype)
        torch.autograd.backward(y, gradient)
        other, y, _ = forward(apart, shape, seed, dtype)
        before = [None if p.grad is None else p.grad.clone() for p in apart.parameters()]
        (found,), caught = input_gradients([y], [gradient], [other])
        assert torch.equal(found, x.grad)
        assert other.grad is None
        for parameter, old in zip(apart.parameters(), before, strict=True):  # nothing has moved yet
            assert parameter.grad is None if old is None else torch.equal(parameter.grad, old)
        waiting.append(caught)
    for caught in waiting:
        run_branches(caught)
        assert not caught
    for (where, one), other in zip(joint.named_parameters(), apart.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), where
        assert one.grad is None or torch.equal(one.grad, other.grad), where


@pytest.mark.parametrize("name", ["linear", "block", "head", "resnet", "batchnorm", "generated"])
def test_every_matrix_product_is_computed_once(name):
    make, shape = MODELS[name]
    model = make().train()
    counts = []
    x, y, gradient = forward(model, shape, 0)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(y, gradient)
    counts.append(counter.get_total_flops())
    x, y, gradient = forward(model, shape, 0)
    with FlopCounterMode(display=False) as counter:
        _, caught = input_gradients([y], [gradient], [x])
    first = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        run_branches(caught)
    assert first + counter.get_total_flops() == counts[0]
    assert 0.3 * counts[0] < first < 0.75 * counts[0]


def test_reused_weight_is_counted_again():
    model = Again()
    x, y, _ = forward(model, (5, 8), 0)
    branches = [{id(leaf) for leaf in branch.leaves} for branch in find_branches([y], [x])]
    assert branches == [{id(model.scale)}, {id(p) for p in (*model.layer.parameters(), *model.norm.parameters())}]


def test_weight_gradient_waits_without_path_to_input():
    layer, x = nn.Linear(8, 8), torch.randn(5, 8, requires_grad=True)
    y = layer(torch.ones(5, 8))
    (found,), caught = input_gradients([y], [torch.ones_like(y)], [x])
    assert found is None
    run_branches(caught)
    assert torch.equal(layer.bias.grad, torch.full((8,), 5.0))
