"""Cutting a model: a cut model is the uncut model, bit for bit; cuts are optimal; what is counted is what is there."""

import itertools

import pytest
import torch
from cut_models import BATCH, BYTES, DIGITS, MODELS, example, train_cut
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from raysim.values import BoundaryTensors
from raysim.workloads.data import DataShape
from raysim.workloads.losses import CrossEntropy
from raysim.workloads.models import build_model
from raysim.workloads.partition import TOLERANCE, Tied, balance, cheapest, cut_lines, partition
from raysim.workloads.stage_costs import LayerCost, Shadow, named_layers


@pytest.mark.parametrize("name", MODELS)
def test_cut_model_equals_uncut_bit_for_bit(name):
    model, shape, x, targets = example(name)
    names = list(named_layers(model))
    reference = build_model(*MODELS[name], seed=0)
    error = CrossEntropy()(reference(x), targets)
    error.backward()
    expected = {key: parameter.grad for key, parameter in reference.named_parameters(remove_duplicate=False)}
    choices = [[], *([cut] for cut in names[:-1:2]), names[:-1], names[1:-1:2]]
    for cuts in choices:
        parts = partition(model, shape, cuts=cuts, batch=BATCH)
        assert [key for stage in parts.stages for key in named_layers(stage)] == names
        assert parts.cuts == tuple(cuts)
        found, sent = train_cut(parts.stages, x, targets)
        assert torch.equal(found, error)
        assert tuple(one.shape for one in parts.boundaries) == tuple(tuple(x.shape) for x in sent[:-1])
        stages = [dict(stage.named_parameters()) for stage in parts.stages]
        for tie in parts.tied:
            first, second = stages[tie.stage][tie.name], stages[tie.other_stage][tie.other_name]
            assert torch.equal(first, second)
            first.grad = second.grad = first.grad + second.grad
        for stage in stages:
            for key, parameter in stage.items():
                assert torch.equal(parameter.grad, expected[key]), (cuts, key)


@pytest.mark.parametrize("name", MODELS)
def test_partition_leaves_model_and_random_state_alone_and_stages_own_their_parameters(name):
    model, shape, x, targets = example(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    parts = partition(model, shape, num_stages=3, batch=BATCH)
    assert torch.equal(torch.get_rng_state(), state)
    train_cut(parts.stages, x, targets)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    places = [{parameter.data_ptr() for parameter in stage.parameters()} for stage in [model, *parts.stages]]
    assert sum(map(len, places)) == len(set().union(*places))


# Where to cut


def price(costs, ends):
    """Return the largest stage, and the sum of squares of all."""
    scale = sum(second for _, second in costs) + 1
    sizes = [sum(first * scale + second for first, second in costs[a:b]) for a, b in itertools.pairwise([0, *ends])]
    return max(sizes), sum(size**2 for size in sizes)


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(1, 8),
)
def test_balanced_cut_is_first_optimum(costs, num_stages):
    num_stages = min(num_stages, len(costs))
    inner = itertools.combinations(range(1, len(costs)), num_stages - 1)
    expected = min(([*cuts, len(costs)] for cuts in inner), key=lambda ends: price(costs, ends))
    assert balance(costs, num_stages) == expected


def test_layers_without_operations_are_spread_by_their_bytes():
    model = nn.Sequential(*[nn.ReLU() for _ in range(6)], nn.Flatten(), nn.Linear(64, 10))
    parts = partition(model, DIGITS, num_stages=4, batch=2)
    assert [len(stage) for stage in parts.stages] == [2, 2, 3, 1]
    assert balance([(0, 1)] * 6, 3) == [2, 4, 6]


@pytest.mark.parametrize("name", MODELS)
def test_stage_costs_add_up_to_model(name):
    model, shape, _, _ = example(name)
    whole = partition(model, shape, num_stages=1, batch=BATCH)
    for num_stages in range(len(model), 0, -2):
        parts = partition(model, shape, num_stages=num_stages, batch=BATCH)
        assert len(parts.stages) == num_stages == len(parts.cuts) + 1
        assert sum(parts.flops_forward) == whole.flops_forward[0]
        tied = sum(parts.stages[tie.stage].get_parameter(tie.name).numel() for tie in parts.tied)
        assert sum(parts.num_parameters) == whole.num_parameters[0] + tied


# What is counted


def test_operations_are_those_of_the_formulas():
    width, length, tokens = 16, 16, 256
    model = build_model("gpt", {"num_blocks": 1, "width": width, "num_heads": 2}, BYTES, seed=0)
    per_token = 2 * 12 * width**2 + 4 * length * width
    parts = partition(model, BYTES, cuts=["embedding", "block0"], batch=BATCH)
    assert parts.flops_forward == (0, BATCH * length * per_token, BATCH * length * 2 * width * tokens)
    convolution = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.Flatten(), nn.Linear(320, 10))
    assert partition(convolution, DIGITS, num_stages=1, batch=2).flops_forward == (2 * 2 * (64 * 9 * 5 + 320 * 10),)


def test_the_share_of_weight_gradients_is_that_of_the_formulas():
    """Of a backward, 24 w^2 a token are of weights, as many of inputs, and attention has 10 l w more: the scores once again."""
    width, length = 16, 16
    model = build_model("gpt", {"num_blocks": 2, "width": width, "num_heads": 2}, BYTES, seed=0)
    parts = partition(model, BYTES, cuts=["embedding", "block0", "block1"], batch=BATCH)
    weights = 24 * width**2
    expected = weights / (2 * weights + 10 * length * width)
    assert parts.weight_shares() == pytest.approx((1.0, expected, expected, 0.5))


def really_saved(stage, x, targets=None):
    """Return the bytes of distinct memory that a real forward leaves: its input, its output, and what autograd keeps, without
    parameters and buffers."""
    state = {value.untyped_storage().data_ptr() for value in [*stage.parameters(), *stage.buffers()]}
    kept = {}

    def keep(value):
        kept[value.untyped_storage().data_ptr()] = value
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        y = stage(x)
        error = y if targets is None else CrossEntropy()(y, targets)
    assert error.requires_grad
    keep(x), keep(error)
    return sum(value.untyped_storage().nbytes() for place, value in kept.items() if place not in state), y


@pytest.mark.parametrize("name", [*MODELS, "gpt with dropout"])
def test_saved_bytes_are_what_autograd_keeps_of_real_tensors(name):
    model, shape, x, targets = example(name.removesuffix(" with dropout"))
    if name.endswith("dropout"):
        model = build_model("gpt", {"num_blocks": 3, "width": 16, "dropout": 0.2}, BYTES, seed=0)
    parts = partition(model, shape, num_stages=3, batch=BATCH)
    for stage, expected in zip(parts.stages, parts.footprints(), strict=True):
        found, y = really_saved(stage.train(), x, targets if stage is parts.stages[-1] else None)
        assert found == expected.saved
        x = y.detach().clone().requires_grad_()


def test_attention_memory_excludes_full_score_matrix():
    shape = DataShape((256,), "int64", 256)
    model = build_model("gpt", {"num_blocks": 1, "width": 16, "num_heads": 4}, shape, seed=0)
    assert partition(model, shape, cuts=["embedding", "block0"], batch=1).footprints()[1].saved < 4 * 4 * 256**2


def test_a_model_in_bfloat16_is_counted_in_bfloat16():
    model = build_model("cnn", {}, DIGITS, seed=0)
    wide = partition(model, DIGITS, num_stages=2, batch=BATCH)
    narrow = partition(model.to(torch.bfloat16), DIGITS, num_stages=2, batch=BATCH)
    of_loss = 4 * BATCH * 10 + 8 * BATCH + 8  # in float32 always: logarithms, targets, a count, the loss
    (first, last), (wide_first, wide_last) = ([one.saved for one in parts.footprints()] for parts in (narrow, wide))
    assert 2 * first == wide_first
    assert 2 * (last - of_loss) == wide_last - of_loss


# What is shared


def test_tied_parameters_are_named_once_for_each_other_stage():
    model, shape, _, _ = example("gpt tied")
    parts = partition(model, shape, cuts=["embedding", "block2"], batch=BATCH)
    assert parts.tied == (Tied(0, "embedding.token.weight", 2, "head.projection.weight"),)
    assert partition(model, shape, cuts=[], batch=BATCH).tied == ()
    linear = nn.Linear(64, 64)
    thrice = nn.Sequential(nn.Flatten(), linear, nn.ReLU(), linear, nn.ReLU(), linear)
    parts = partition(thrice, DIGITS, cuts=["2", "4"], batch=BATCH)
    assert parts.tied == tuple(
        (0, f"1.{key}", stage, f"{2 * stage + 1}.{key}") for stage in (1, 2) for key in ("weight", "bias")
    )


def test_sharing_within_a_stage_is_kept():
    model, shape, _, _ = example("gpt tied")
    (stage,) = partition(model, shape, num_stages=1, batch=BATCH).stages
    assert stage.embedding.token.weight is stage.head.projection.weight  # type: ignore[union-attr]


def test_a_shared_buffer_is_refused():
    norm = nn.BatchNorm1d(64)
    model = nn.Sequential(nn.Flatten(), norm, nn.ReLU(), norm, nn.Linear(64, 10))
    partition(model, DIGITS, cuts=["3"], batch=BATCH)
    with pytest.raises(
        ValueError, match=r"Buffer `1.running_mean` of stage 0 must not be in stage 1 too, as `3.running_mean`"
    ):
        partition(model, DIGITS, cuts=["2"], batch=BATCH)


# What is refused


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class Sum(nn.Module):
    def forward(self, x):
        return x.sum()


class Round(nn.Module):
    def forward(self, x):
        return x.long()


class Float(nn.Module):
    def forward(self, x):
        return x.float()


class Look(nn.Module):
    def forward(self, x):
        return x if x.sum().item() > 0 else -x


class Own(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize(
    ("num_stages", "cuts", "message"),
    [
        (8, None, "`num_stages` must be at most the number of layers (7), but got 8."),
        (0, None, "`num_stages` must be an integer of at least 1, but got 0."),
        (2, ["conv1"], "Exactly one of `num_stages` and `cuts` must be given."),
        (None, None, "Exactly one of `num_stages` and `cuts` must be given."),
        (
            None,
            ["conv9"],
            "`cuts` must name layers of the model (conv1, conv2, conv3, conv4, conv5, hidden, head), but got 'conv9'.",
        ),
        (None, ["head"], "`cuts` must leave a layer after the last cut, but got 'head', the last layer."),
        (
            None,
            ["conv3", "conv2"],
            "in the order of the layers (conv1, conv2, conv3, conv4, conv5, hidden, head), each once, but got [",
        ),
        (None, ["conv2", "conv2"], "each once, but got ['conv2', 'conv2']."),
        (None, "conv2", "`cuts` must be a list of names of layers, but got 'conv2'."),
    ],
)
def test_wrong_cuts_are_refused(num_stages, cuts, message):
    model = build_model("cnn", {}, DIGITS, seed=0)
    with pytest.raises(ValueError) as error:
        partition(model, DIGITS, num_stages=num_stages, cuts=cuts, batch=BATCH)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Linear(64, 10),
            "A model to be cut must be an nn.Sequential of layers, with no forward of its own, but got Linear.",
        ),
        (Own(nn.Flatten(), nn.Linear(64, 10)), "with no forward of its own, but got Own."),
        (nn.Sequential(), "A model to be cut must be an nn.Sequential of layers"),
        (nn.Sequential(nn.Flatten(), nn.Linear(65, 10)), "Layer `1` failed on a tensor of shape (4, 64): "),
        (
            nn.Sequential(nn.Flatten(), Pair(), nn.Linear(64, 10)),
            "Layer `1` must return one tensor, or a dictionary of named tensors, but got tuple.",
        ),
        (nn.Sequential(nn.Flatten(), Look(), nn.Linear(64, 10)), "Layer `1` failed on a tensor of shape (4, 64): "),
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 9)),
            "The last layer `1` must return a score for each class (10), but returns",
        ),
        (
            nn.Sequential(nn.Flatten(), Sum()),
            "Layer `1` must keep the samples (4) on the first axis, but returns the shape ().",
        ),
        (
            nn.Sequential(Round(), Float(), nn.Flatten(), nn.Linear(64, 10)),
            "Layer `0` must return floating-point numbers, so that",
        ),
        (nn.Sequential(nn.Flatten(0, 1), nn.Flatten(1), nn.Linear(64, 10)), None),
    ],
)
def test_unsupported_layer_is_named_in_refusal(model, message):
    cuts = [name for name, _ in model.named_children()][:-1] if isinstance(model, nn.Sequential) else []
    if message is None:
        assert tuple(one.shape for one in partition(model, DIGITS, cuts=cuts, batch=BATCH).boundaries) == (
            (4, 8, 8),
            (4, 64),
        )
        return
    with pytest.raises(ValueError) as error:
        partition(model, DIGITS, cuts=cuts, batch=BATCH)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_in_place_change_of_stage_input_is_refused():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(inplace=True), nn.Linear(64, 10))
    partition(model, DIGITS, cuts=["2"], batch=BATCH).footprints()
    with pytest.raises(ValueError, match=r"Layer `2` failed on a tensor of shape \(4, 64\): .*in-place"):
        partition(model, DIGITS, cuts=["1"], batch=BATCH).footprints()


def test_meta_model_holds_no_values():
    model = build_model("gpt", {"num_blocks": 1, "width": 64}, DataShape((1024,), "int64", 50_257), seed=0)
    shadow = Shadow(model, DataShape((1024,), "int64", 50_257), batch=10**6)  # 2e17 bytes of logits
    assert shadow.layers[-1].output.shape == (10**6, 1024, 50_257)


# Where fewer bytes cross


class Added(nn.Module):
    def forward(self, pair):
        return pair["x"] + pair["y"]


class Both(nn.Module):
    """Half of `x + f(x)`: returns both."""

    def __init__(self, width):
        super().__init__()
        self.f = nn.Linear(width, width)

    def forward(self, x):
        return {"x": x, "y": self.f(x).relu()}


class Late(nn.Module):
    """Half of `x + f(x)`: passes `x` on beside the place of f, which has no work."""

    def forward(self, x):
        return {"x": x, "y": x.relu()}


def rows_of(kinds, seed):
    """Return layers of residual blocks, linear layers and layers without work, and their shape."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = [nn.Flatten()]
    width = 64
    for kind, size in kinds:
        if kind == "residual":
            layers += [Both(width), Added()]
        elif kind == "linear":
            layers.append(nn.Linear(width, size))
            width = size
        elif kind == "idle":
            layers += [Late(), Added()]
        else:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers, nn.Linear(width, 10))


KINDS = st.lists(
    st.tuples(st.sampled_from(["residual", "linear", "idle", "relu"]), st.sampled_from([8, 32, 64])),
    min_size=2,
    max_size=4,
)


def check_cheapest(layers, balanced):
    """No other cuts within `TOLERANCE` send fewer bytes, and of those that send as few none move less."""
    work = [sum(layer.flops for layer in layers[:end]) for end in range(len(layers) + 1)]
    slack = TOLERANCE * max(work[b] - work[a] for a, b in itertools.pairwise([0, *balanced]))

    def price(ends):
        return sum(layers[end - 1].sent_bytes for end in ends), sum(
            a != b for a, b in zip(ends, balanced, strict=False)
        )

    inner = itertools.combinations(range(1, len(layers)), len(balanced) - 1)
    near = [
        ends for ends in inner if all(abs(work[a] - work[b]) <= slack for a, b in zip(ends, balanced[:-1], strict=True))
    ]
    found = cheapest(layers, balanced)
    assert tuple(found[:-1]) in near
    assert price(found[:-1]) == min(map(price, near))
    assert found[-1] == balanced[-1]
    return found


@given(KINDS, st.integers(2, 5))
def test_cut_sends_fewest_bytes_among_balanced_cuts(kinds, num_stages):
    layers = Shadow(rows_of(kinds, 0), DIGITS, 2, CrossEntropy()).layers
    balanced = balance([(layer.flops, layer.output_bytes) for layer in layers], min(num_stages, len(layers)))
    found = check_cheapest(layers, balanced)
    assert cheapest(layers, found) == found


WORK = st.sampled_from([0, 1, 2, 5, 10, 100, 500])


@given(st.lists(st.tuples(WORK, st.integers(0, 4)), min_size=2, max_size=9), st.data())
def test_cut_may_move_over_small_layers_by_one_percent(costs, data):
    layers = [
        LayerCost(str(place), work, BoundaryTensors({"": (2, 3)}, {}), {"": torch.float32}, size)
        for place, (work, size) in enumerate(costs)
    ]
    inner = data.draw(st.sets(st.integers(1, len(layers) - 1), min_size=1))
    check_cheapest(layers, [*sorted(inner), len(layers)])


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 3), torch.float32), ((2, 3), torch.int64), ((2, 3), torch.float32)],
    ids=["mixes samples", "has no gradient", "moves"],
)
def test_a_cut_moves_to_layers_that_keep_samples_and_have_a_gradient(shape, dtype):
    plain = BoundaryTensors({"": (2, 3)}, {})
    layers = [
        LayerCost("0", 100, plain, {"": torch.float32}, 10),
        LayerCost("1", 0, BoundaryTensors({"": shape}, {}), {"": dtype}, 1),
        LayerCost("2", 100, plain, {"": torch.float32}, 10),
    ]
    moves = shape == (2, 3) and dtype == torch.float32
    assert cheapest(layers, [1, 3]) == ([2, 3] if moves else [1, 3])


def test_cut_moved_after_a_sum_is_reported():
    model = rows_of([("residual", 0)] * 4, 0)
    parts = partition(model, DIGITS, num_stages=2, batch=2)
    assert parts.cuts == ("4",)
    given = partition(model, DIGITS, cuts=["3"], batch=2)
    assert given.cuts == ("3",)
    assert [given.cut_choices[0].other, *cut_lines(given.cut_choices)] == [
        parts.cut_choices[0].cut,
        "Cuts: after `3`, 2.05 kB; uncompressed, of a microbatch and back",
        "  `3` sends 2 tensors, 2.05 kB; a cut after `4` would send 1 tensor, 1.02 kB, for as much work",
    ]


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_stages_cut_after_sums_equal_uncut_model(num_stages):
    model, expected = (rows_of([("residual", 0)] * 4, 0) for _ in range(2))
    parts = partition(model, DIGITS, num_stages=num_stages, batch=BATCH)
    assert all(not boundary.several for boundary in parts.boundaries)
    x, targets = torch.randn(BATCH, 1, 8, 8), torch.arange(BATCH)
    error = CrossEntropy()(expected(x), targets)
    error.backward()
    found, _ = train_cut(parts.stages, x, targets)
    assert torch.equal(found, error)
    grads = {name: p.grad for stage in parts.stages for name, p in stage.named_parameters()}
    assert all(torch.equal(grads[name], p.grad) for name, p in expected.named_parameters())
