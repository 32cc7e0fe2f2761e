"""Models: what they are made of, that they depend on the seed alone, and what is refused."""

import inspect
import math
import shutil
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from raysim.quality import MEASURES
from raysim.workloads import models as models_module
from raysim.workloads.data import DataShape, batch_ids, load_data
from raysim.workloads.losses import CrossEntropy
from raysim.workloads.metrics import Accuracy
from raysim.workloads.models import MODELS, gpt, gpt2
from raysim.workloads.options import DEPTHS, num_layers

build_model: Any = models_module.build_model  # its results have fields of their own

DIGITS = DataShape((1, 8, 8), "float32", 10)
CIFAR = DataShape((3, 32, 32), "float32", 10)
BYTES = DataShape((16,), "int64", 256)
SMALL = {
    "cnn": (DIGITS, {"width": 4}),
    "resnet18": (CIFAR, {}),
    "gpt": (BYTES, {"num_blocks": 2, "width": 32}),
    "lstm": (BYTES, {"width": 16}),
    "mlp": (DIGITS, {"width": 16}),
}


def inputs_of(shape, batch=2):
    torch.manual_seed(1)
    if shape.input_dtype == "int64":
        return torch.randint(shape.num_classes, (batch, *shape.input_shape))
    return torch.randn(batch, *shape.input_shape)


@pytest.mark.parametrize("options", [{}, {"num_blocks": 3}, {"num_layers": 5}, {"num_blocks": 2, "subspace": 8}])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_layer_count_needs_no_model(name, options):
    shape = SMALL.get(name, (CIFAR, {}))[0]
    if name not in DEPTHS:
        assert name in ("gpt2", "hf")  # whose folders tell
        assert num_layers(name, options) is None
        return
    taken = {key: value for key, value in options.items() if key in inspect.signature(MODELS[name]).parameters}
    found = num_layers(name, taken)
    if "subspace" in taken:
        assert found is None
    else:
        assert found == len(build_model(name, {**taken, "width": 8}, shape, seed=0))


@pytest.mark.parametrize("name", SMALL)
def test_model_depends_only_on_seed_and_keeps_random_state(name):
    shape, options = SMALL[name]
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_model(name, options, shape, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, other = (build_model(name, options, shape, seed) for seed in (0, 1))
    pairs = list(zip(first.parameters(), again.parameters(), strict=True))
    assert pairs
    assert all(torch.equal(x, y) for x, y in pairs)
    assert any(not torch.equal(x, y) for x, y in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", SMALL)
def test_layers_are_named_and_take_and_return_one_tensor(name):
    shape, options = SMALL[name]
    model = build_model(name, options, shape, seed=0)
    assert not any(child.isdigit() for child, _ in model.named_children())
    x = inputs_of(shape)
    for layer in model:
        x = layer(x)
        assert isinstance(x, torch.Tensor)
        assert len(x) == 2
    assert x.shape == ((2, 10) if shape.input_dtype == "float32" else (2, 16, 256))


@pytest.mark.parametrize("image", [(1, 8, 8), (3, 32, 32), (1, 7, 9), (2, 1, 1)])
def test_the_cnn_takes_images_of_any_size(image):
    model = build_model("cnn", {"width": 2}, DataShape(image, "float32", 3), seed=0)
    assert len(model) >= 6
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert model(torch.zeros(2, *image)).shape == (2, 3)


@pytest.mark.slow
def test_the_cnn_learns_the_digits():
    data = load_data("digits", {}, seed=0)
    model = build_model("cnn", {}, data.shape, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(300):
        epoch, ids = batch_ids(len(data.train), 64, 0, step)
        error = CrossEntropy()(model(data.train.inputs(ids, epoch, 0, training=True)), data.train.targets(ids))
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    ids = np.arange(len(data.test))
    with torch.no_grad():
        logits = model(data.test.inputs(ids, 0, 0, training=False))
    right, asked = Accuracy(MEASURES["accuracy"]).sums(logits, data.test.targets(ids))
    assert right / asked > 0.95


def test_resnet18_is_that_of_the_papers():
    model = build_model("resnet18", {}, CIFAR, seed=0)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962
    assert [name for name, _ in model.named_children()] == ["conv1", "layer1", "layer2", "layer3", "layer4", "linear"]
    x = inputs_of(CIFAR)
    shapes = []
    for layer in model:
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    assert shapes[1:4] == [(64, 32, 32), (128, 16, 16), (256, 8, 8)]
    assert (model[:2](inputs_of(CIFAR)) >= 0).all()  # cuts are behind a ReLU


def test_resnet18_pools_as_the_papers_average_over_4x4():
    model = build_model("resnet18", {}, CIFAR, seed=0).eval()
    with torch.no_grad():
        features = model[:5](inputs_of(CIFAR))
        assert torch.allclose(model[5][0](features), F.avg_pool2d(features, 4).flatten(1), atol=1e-6)


@pytest.mark.parametrize("width", [3, 16])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnet18_has_the_parameters_of_the_formula_at_any_width(width, norm):
    model = build_model("resnet18", {"width": width, "norm": norm}, CIFAR, seed=0)
    convolutions = 9 * (3 * width + 4 * width**2)  # the stem and layer1
    norms = 5 * width
    for inputs, outputs in ((width, 2 * width), (2 * width, 4 * width), (4 * width, 8 * width)):
        convolutions += 9 * (inputs * outputs + 3 * outputs**2) + inputs * outputs
        norms += 5 * outputs
    assert sum(parameter.numel() for parameter in model.parameters()) == convolutions + 2 * norms + 8 * width * 10 + 10


def test_group_norm_keeps_samples_independent():
    x = inputs_of(CIFAR, batch=3)
    outputs = {}
    for norm in ("batch", "group"):
        model = build_model("resnet18", {"width": 8, "norm": norm}, CIFAR, seed=0).train()
        outputs[norm] = torch.allclose(model(x)[:2], model(x[:2]), atol=1e-5)
    assert outputs == {"batch": False, "group": True}


def test_vgg16_is_that_of_the_papers_at_a_narrower_width():
    model = build_model("vgg16", {"width": 4}, CIFAR, seed=0)
    sizes = [module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert sizes == [4, 4, 8, 8, 16, 16, 16, 32, 32, 32, 32, 32, 32]
    assert [module.out_features for module in model.modules() if isinstance(module, nn.Linear)] == [256, 256, 10]


def test_a_narrow_vgg16_starts_with_outputs_as_large_as_those_of_a_wide_one():
    spreads = {}
    for width in (4, 8, 16):
        models = [build_model("vgg16", {"width": width}, CIFAR, seed=seed).eval() for seed in range(4)]
        spreads[width] = np.mean([model(inputs_of(CIFAR)).detach().std() for model in models])
    assert max(spreads.values()) < 1.5 * min(spreads.values()), spreads  # eight times, were their weights as large


@pytest.mark.parametrize("tied", [False, True])
def test_gpt_has_the_parameters_of_the_formula(tied):
    blocks, width, length, tokens = 3, 32, 16, 256
    model = gpt(BYTES, num_blocks=blocks, width=width, num_heads=2, tied=tied)
    block = 12 * width**2 + 13 * width
    expected = blocks * block + (tokens + length) * width + 2 * width + (0 if tied else tokens * width)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected
    assert (model.head.projection.weight is model.embedding.token.weight) == tied  # type: ignore[union-attr]


def test_gpt_is_causal_and_starts_at_chance():
    model = build_model("gpt", {"num_blocks": 2, "width": 32}, BYTES, seed=0).eval()
    x = inputs_of(BYTES)
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    logits, others = model(x), model(changed)
    assert torch.equal(logits[:, :9], others[:, :9])
    assert not torch.equal(logits[:, 9], others[:, 9])
    assert CrossEntropy()(logits, x).item() == pytest.approx(math.log(256), abs=0.05)


def test_gpt_drops_out_in_training_only():
    model = build_model("gpt", {"num_blocks": 1, "width": 32, "dropout": 0.5}, BYTES, seed=0)
    x = inputs_of(BYTES)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


@pytest.mark.parametrize("shape", [(5, 7), (5, 3, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_is_the_mean_cross_entropy_in_float32(shape, dtype):
    torch.manual_seed(0)
    logits, targets = torch.randn(shape, dtype=dtype), torch.randint(7, shape[:-1])
    chosen = logits.float().log_softmax(-1).gather(-1, targets.unsqueeze(-1))
    assert torch.allclose(CrossEntropy()(logits, targets), -chosen.mean())
    assert Accuracy(MEASURES["accuracy"]).sums(logits, targets)[0] == (logits.argmax(-1) == targets).sum()


# GPT-2 through transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=300, n_positions=24, n_embd=32, n_layer=3, n_head=4)
    path = tmp_path_factory.mktemp("gpt2")
    model = transformers.GPT2LMHeadModel(config)
    for parameter in model.parameters():  # biases and norms too: at their start they would hide a mistake
        nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path)
    return path


def test_gpt2_gives_the_logits_and_gradients_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    ours = build_model("gpt2", {"path": str(folder)}, BYTES, seed=0).eval()
    assert [name for name, _ in ours.named_children()] == ["embedding", "block0", "block1", "block2", "head"]
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    x = inputs_of(BYTES)
    logits, expected = ours(x), theirs(x).logits
    assert torch.allclose(logits, expected, atol=1e-5)
    CrossEntropy()(logits, x).backward()
    CrossEntropy()(expected, x).backward()
    assert ours.head.projection.weight is ours.embedding.token.weight
    assert torch.allclose(ours.embedding.token.weight.grad, theirs.transformer.wte.weight.grad, atol=1e-6)
    theirs_block, ours_block = theirs.transformer.h[1], ours.block1
    assert torch.allclose(ours_block.expansion.weight.grad, theirs_block.mlp.c_fc.weight.grad.t(), atol=1e-6)


def test_gpt2_dropout_follows_config_or_option(folder):
    x = inputs_of(BYTES)
    model = gpt2(BYTES, path=str(folder))
    rates = {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
    assert rates == {0.1}
    assert model.block0.attention.attention_dropout == 0.1  # type: ignore[union-attr]
    assert not torch.equal(model.train()(x), model(x))
    silent = gpt2(BYTES, path=str(folder), dropout=0.0).train()
    assert torch.equal(silent(x), model.eval()(x))


def test_gpt2_is_refused_for_unsuitable_data(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"`data.length` must be at most the positions of '.*' \(24\), but got 25\."):
        gpt2(DataShape((25,), "int64", 256), path=str(folder))
    with pytest.raises(ValueError, match=r"The data has 301 tokens, but '.*' knows 300. Set `data.tokenizer`"):
        gpt2(DataShape((16,), "int64", 301), path=str(folder))
    transformers.BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1).save_pretrained(
        tmp_path / "bert"
    )
    with pytest.raises(ValueError, match=r"`model.path` must hold a GPT-2, but '.*' holds a bert\."):
        gpt2(BYTES, path=str(tmp_path / "bert"))
    odd = transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, activation_function="relu")
    odd.save_pretrained(tmp_path / "odd")
    with pytest.raises(
        ValueError, match=r"`activation_function` of the GPT-2 in .* must be 'gelu_new', but is 'relu'\."
    ):
        gpt2(BYTES, path=str(tmp_path / "odd"))
    transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1).save_pretrained(tmp_path / "empty")
    with pytest.raises(ValueError, match=r"`model.path` '.*empty' cannot be loaded: .*\."):
        gpt2(BYTES, path=str(tmp_path / "empty"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match=r"`model.path` '.*nothing' cannot be loaded: "):
        gpt2(BYTES, path=str(tmp_path / "nothing"))


def test_a_gpt2_that_lacks_weights_is_refused(folder, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    shutil.copytree(folder, tmp_path / "part")
    weights = safetensors.load_file(folder / "model.safetensors")
    lacking = {name: weight for name, weight in weights.items() if "h.1.ln_2" not in name}
    safetensors.save_file(lacking, tmp_path / "part" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the weights transformer.h.1.ln_2.bias, transformer.h.1.ln_2.weight\."):
        gpt2(BYTES, path=str(tmp_path / "part"))


def test_an_optional_library_that_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(
        ValueError, match=r"`transformers` is needed and cannot be imported: `pip install raysim\[hub\]`\."
    ):
        gpt2(BYTES, path=str(tmp_path))


# Models of the user's own


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that writes a module into the current folder and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])

    def write(body):
        name = f"own_{abs(hash(tmp_path))}"
        (tmp_path / f"{name}.py").write_text("import torch\nfrom torch import nn\n" + body)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    yield write
    for name in [name for name in sys.modules if name.startswith("own_") and name[4:].isdigit()]:
        del sys.modules[name]


def test_custom_model_is_imported_from_current_folder(own):
    name = own("def net(width, depth=2):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, width * depth))\n")
    model = build_model(f"{name}:net", {"width": 5}, DIGITS, seed=0)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert torch.equal(model[1].weight, build_model(f"{name}:net", {"width": 5}, DIGITS, seed=0)[1].weight)


def test_custom_model_receives_shape_if_requested(own):
    name = own("def net(shape):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, shape.num_classes))\n")
    assert build_model(f"{name}:net", {}, DIGITS, seed=0)[1].out_features == 10


def test_invalid_custom_model_is_refused_in_one_sentence(own):
    name = own(
        "def module():\n    return 5\ndef broken():\n    return nn.Sequential(1 / 0)\nvalue = 3\n"
        "def net(width):\n    return nn.Sequential(nn.Linear(64, width))\n"
    )
    cases = {
        f"{name}:module": rf"Model `{name}:module` must return an nn.Module, but got int\.",
        f"{name}:broken": rf"Model `{name}:broken` failed: ZeroDivisionError: division by zero\.",
        f"{name}:value": rf"Model `{name}:value` cannot be imported: `{name}` has no function `value`\.",
        f"{name}:net": rf"`model.width` must be given with `model = '{name}:net'`\.",
        "no_such_package:net": r"Model `no_such_package:net` cannot be imported: ModuleNotFoundError: No module named 'no_such_",
    }
    for model, message in cases.items():
        with pytest.raises(ValueError, match=message):
            build_model(model, {}, DIGITS, seed=0)
    with pytest.raises(ValueError, match=rf"Unknown option `model.depth` of `{name}:net`. Known: model.width\."):
        build_model(f"{name}:net", {"width": 10, "depth": 1}, DIGITS, seed=0)


@pytest.mark.parametrize(
    ("name", "options", "shape", "message"),
    [
        (
            "cnm",
            {},
            DIGITS,
            "Unknown model 'cnm'. Known: cnn, gpt, gpt2, hf, lstm, mlp, resnet101, resnet18, vgg16; your own is written",
        ),
        ("cnn", {"wdth": 3}, DIGITS, "Unknown option `model.wdth` of `cnn`. Known: model.width."),
        (
            "resnet18",
            {"depth": 3},
            CIFAR,
            "Unknown option `model.depth` of `resnet18`. Known: model.norm, model.width.",
        ),
        ("resnet18", {"width": 0}, CIFAR, "`model.width` must be an integer of at least 1, but got 0."),
        ("resnet18", {"norm": "layer"}, CIFAR, "`model.norm` must be one of batch, group, but got 'layer'."),
        ("cnn", {"width": 0}, DIGITS, "`model.width` must be an integer of at least 1, but got 0."),
        ("cnn", {"width": "wide"}, DIGITS, "`model.width` must be an integer of at least 1, but got 'wide'."),
        (
            "cnn",
            {},
            BYTES,
            "Model `cnn` needs images of (channel, height, width) in float32, but the data has (16,) in int64.",
        ),
        ("gpt", {}, DIGITS, "Model `gpt` needs text of (length,) in int64, but the data has (1, 8, 8) in float32."),
        ("gpt", {"width": 130}, BYTES, "`model.width` must be a multiple of `model.num_heads` (4), but got 130."),
        ("gpt", {"dropout": 1.5}, BYTES, "`model.dropout` must be in [0, 1], but got 1.5."),
        ("gpt", {"tied": "yes"}, BYTES, "`model.tied` must be true or false, but got 'yes'."),
        ("gpt", {"num_blocks": 0}, BYTES, "`model.num_blocks` must be an integer from 1 to 1024, but got 0."),
        (
            "gpt2",
            {"path": "/nowhere"},
            BYTES,
            "`model.path` must be a folder that exists or a hub name, but got '/nowhere'.",
        ),
        ("gpt2", {"path": 3}, BYTES, "`model.path` must be a folder that exists or a hub name, but got 3."),
    ],
)
def test_a_wrong_model_is_refused(name, options, shape, message):
    with pytest.raises(ValueError) as error:
        build_model(name, options, shape, seed=0)
    assert message in str(error.value)
