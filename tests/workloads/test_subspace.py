"""Boundaries in a subspace: what crosses is all there is, at full size nothing is lost, and what cannot be so is refused."""

from typing import Any

import pytest
import torch
from engines import losses_of, staged_gradients, start
from hf_variants import CAUSAL, TEXT
from pipelines import ADAM, PROJECTED, SUBSPACE

from raysim import load_weights, save_pretrained, train
from raysim.codecs import Quantize
from raysim.workloads import models as models_module
from raysim.workloads.data import DataShape, batch_ids, load_data
from raysim.workloads.hf_model import ADDED
from raysim.workloads.losses import CrossEntropy
from raysim.workloads.models import MODELS, NO_SUBSPACE
from raysim.workloads.partition import partition
from raysim.workloads.subspace import FORMS, Subspace, compact_tokens, out_of_subspace, whole_tokens

build_model: Any = models_module.build_model  # its results have fields of their own

BYTES = DataShape((16,), "int64", 256)
GPT = {"num_blocks": 3, "width": 16, "num_heads": 2}
LLAMAS = [family for family in CAUSAL if CAUSAL[family]["model_type"] in ADDED and "tied" not in family]
LLAMA: dict[str, Any] = {"name": "hf", "config": CAUSAL["llama"], "subspace": 4}
KINDS: dict[str, tuple[str, dict[str, Any], Any]] = {
    "gpt": ("gpt", GPT, BYTES),
    **{family: ("hf", {"config": CAUSAL[family]}, TEXT) for family in LLAMAS},
}


def subspace_of(model):
    return next(module for module in model.modules() if isinstance(module, Subspace))


def tokens_of(shape, batch=4):
    return torch.randint(shape.num_classes, (batch, *shape.input_shape), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
def test_subspace_of_full_width_spans_same_functions(kind):
    """It starts as the ordinary model of its seed, with the coordinates of that model's gradients."""
    name, options, shape = KINDS[kind]
    plain = build_model(name, options, shape, seed=0)
    found = build_model(name, {**options, "subspace": 16}, shape, seed=0)
    constants = subspace_of(found)
    x = tokens_of(shape)
    for model in (plain, found):
        CrossEntropy()(model(x), x).backward()
    torch.testing.assert_close(found(x), plain(x), rtol=1e-4, atol=1e-5)
    (place, *_) = ADDED["llama"] if name == "hf" else ("attention.projection",)
    expected = plain.block0.get_submodule(place).weight.grad
    inner = found.block0.block.get_submodule(place).weight.grad
    torch.testing.assert_close(inner, constants.basis.t() @ expected, rtol=1e-3, atol=1e-6)
    rows, whole = (
        next(module.weight.grad for module in model.embedding.modules() if isinstance(module, torch.nn.Embedding))
        for model in (found, plain)
    )
    torch.testing.assert_close(rows, whole @ constants.basis, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_boundary_carries_residual_stream(kind, form, monkeypatch):
    """At every boundary, before and after updates, decode(encode(x)) = x to rounding."""
    name, options, shape = KINDS[kind]
    model = build_model(name, {**options, "subspace": 4, "subspace_form": form}, shape, seed=0)
    encode, away = Subspace.encode, []

    def checked(self, x, tokens):
        code = encode(self, x, tokens)
        assert code.shape == (*x.shape[:2], 4)
        away.append(float(((self.decode(code, tokens) - x).norm() / x.norm()).detach()))
        return code

    monkeypatch.setattr(Subspace, "encode", checked)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = tokens_of(shape)
    for _ in range(3):
        optimizer.zero_grad()
        CrossEntropy()(model(x), x).backward()
        optimizer.step()
        if form == "projected":
            away.clear()
            model(x)
            assert max(away) > 1e-3  # Adam's step leaves the subspace
            away.clear()
        for module in model.modules():
            if hasattr(module, "constrain"):
                module.constrain()
    model(x)
    assert away
    assert max(away) < 1e-5


def test_stages_project_after_their_update(small):
    engine = start(small(**PROJECTED, **ADAM))
    losses_of(engine, 0)
    first = engine.workers[0].stages[0].module
    constants, block = subspace_of(first), first.block0.block
    for weight in (block.projection.linear.weight, block.attention.projection.linear.weight):
        torch.testing.assert_close(constants.project(weight.detach()), weight.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("model", "schedule"),
    [(PROJECTED["model"], "1F1B"), (PROJECTED["model"], "ZBH1"), (LLAMA, "ZBH1")],
    ids=["projected-1F1B", "projected-ZBH1", "llama-ZBH1"],
)
def test_staged_gradients_are_those_of_the_uncut_model(small, model, schedule):
    config = small(**{**PROJECTED, "model": model}, schedule=schedule)
    data = load_data(config.data.name, config.data.options, 0)
    model = build_model(config.model.name, config.model.options, data.shape, seed=0)
    ids = batch_ids(len(data.train), 16, seed=0, step=0)[1]
    for part in ids.reshape(4, 4):
        loss = CrossEntropy()(model(data.train.inputs(part, 0, 0, True)), data.train.targets(part))
        loss.backward(torch.tensor(0.25))
    found = staged_gradients(start(config))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(gradient, model.get_parameter(name).grad) for name, gradient in found.items())


def test_constants_come_from_the_seed_are_the_same_in_all_stages_and_in_no_checkpoint():
    options = {**GPT, "subspace": 4}
    one, again, other = (build_model("gpt", options, BYTES, seed) for seed in (0, 0, 1))
    assert not any("basis" in name or "subspace" in name for name in one.state_dict())
    assert not any("subspace" in name for name, _ in one.named_parameters())
    stages = partition(one, BYTES, num_stages=3, batch=4).stages
    for name, buffer in subspace_of(one).named_buffers():
        assert torch.equal(subspace_of(again).get_buffer(name), buffer)
        assert not torch.equal(subspace_of(other).get_buffer(name), buffer)
        assert all(torch.equal(subspace_of(stage).get_buffer(name), buffer) for stage in stages)
        held = {id(x) for module in stages[0].modules() for x in module.buffers() if x.shape == buffer.shape}
        assert len(held) == 1  # once a stage, however many of its layers use it
    basis = subspace_of(one).basis
    torch.testing.assert_close(basis.t() @ basis, torch.eye(4), rtol=0, atol=1e-6)


def test_initial_weights_are_independent_of_threads():
    options, before, states = (
        {"num_blocks": 2, "width": 192, "num_heads": 2, "subspace": 96},
        torch.get_num_threads(),
        [],
    )
    for threads in (1, 3):
        torch.set_num_threads(threads)
        model = build_model("gpt", options, BYTES, seed=0)
        assert torch.get_num_threads() == threads
        states.append([*model.state_dict().values(), *subspace_of(model).buffers()])
    torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_bytes_on_the_wire_are_the_coordinates_and_the_tokens(small, tmp_path):
    tokens = 4 * 16  # of a microbatch
    runs = {
        "plain": train(small(**SUBSPACE, steps=2), engine="inline", out=tmp_path / "plain"),
        "coded": train(small(**SUBSPACE, steps=2, forward="Quantize(8)"), engine="inline", out=tmp_path / "coded"),
    }
    sizes = {
        name: (sent["wire_bytes"] / 4).groupby("direction").agg(["min", "max"])  # of a microbatch
        for name, run in runs.items()
        for sent in [run.links.groupby(["step", "boundary", "direction"])[["wire_bytes"]].sum()]
    }
    coded = Quantize(8).encode(torch.randn(4, 16, 4)).array_bytes
    for name, direction, expected in [
        ("plain", "forward", tokens * (4 * 4 + 1)),
        ("plain", "backward", tokens * 4 * 4),
        ("coded", "forward", coded + tokens),
        ("coded", "backward", tokens * 4 * 4),
    ]:
        least, most = sizes[name].loc[direction]
        assert expected <= least <= most <= expected + 48  # headers
    assert runs["plain"].row["model.subspace"] == 4


def test_tokens_round_trip_in_fewest_bytes():
    for num_tokens, size in [(256, 1), (257, 2), (65_536, 2), (65_537, 4)]:
        tokens = torch.tensor([0, num_tokens // 2, num_tokens - 1])
        sent = compact_tokens(tokens, num_tokens)
        assert sent.element_size() == size
        assert torch.equal(whole_tokens(sent), tokens)


def test_subspace_llama_trains_and_exports_as_ordinary(small, tmp_path):
    from transformers import AutoModelForCausalLM

    run = train(small(**{**SUBSPACE, "model": LLAMA}, steps=2), engine="inline", out=tmp_path / "run")
    assert run.status == "finished"
    assert (run.links["wire_bytes"] / run.links["packets"]).max() < 4 * 16 * (4 * 4 + 1) + 48
    save_pretrained(run, tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    shape = DataShape((16,), "int64", 256, target_shape=(16,))
    layers = build_model("hf", {"config": CAUSAL["llama"], "subspace": 4}, shape, seed=0)
    layers.load_state_dict(load_weights(run.folder))
    x = tokens_of(shape)
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(x).logits, layers.eval()(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="An ordinary decoder cannot normalise outputs"):
        out_of_subspace(build_model("gpt", {**GPT, "subspace": 4, "subspace_form": "projected"}, BYTES, seed=0))
    model = build_model("gpt", {**GPT, "subspace": 4}, BYTES, seed=0)
    expected = model(tokens_of(BYTES))
    torch.testing.assert_close(out_of_subspace(model)(tokens_of(BYTES)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("gpt", "hf")])
def test_models_without_residual_stream_are_refused(name):
    with pytest.raises(ValueError, match=rf"`model.subspace` needs a decoder .* but `{name}` has .*\."):
        build_model(name, {"subspace": 4}, BYTES, seed=0)
    assert MODELS[name] in NO_SUBSPACE


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("gpt", {"subspace": 17}, "`model.subspace` must be at most the width of the model (16), but got 17."),
        ("gpt", {"subspace": 0}, "`model.subspace` must be an integer of at least 1, but got 0."),
        (
            "gpt",
            {"subspace": 4, "subspace_form": "exact"},
            "`model.subspace_form` must be one of reparametrised, projected",
        ),
        ("gpt", {"subspace_form": "projected"}, "`model.subspace_form` has no effect without `model.subspace`."),
        (
            "gpt",
            {"subspace": 4, "tied": True},
            "`model.subspace` cannot be combined with a head that is tied to the embedding",
        ),
        ("gpt", {"subspace": 4, "dropout": 0.1}, "`model.dropout` must be 0 with `model.subspace`"),
        ("hf", {"config": CAUSAL["llama"], "subspace": 17}, "at most the width of the model (16), but got 17."),
        (
            "hf",
            {"config": CAUSAL["llama tied"], "subspace": 4},
            "cannot be combined with a head that is tied to the embedding",
        ),
        (
            "hf",
            {"config": CAUSAL["gpt2 untied"], "subspace": 4},
            "as those of llama, mistral, qwen2, qwen3 do, but `model.config.model_type` is 'gpt2'.",
        ),
        ("hf", {"config": CAUSAL["llama"], "subspace": 4, "lora": {"rank": 2}}, "needs a new causal language model"),
        ("hf", {"path": "anywhere", "subspace": 4}, "needs a new causal language model"),
    ],
)
def test_unsupported_subspace_models_are_refused(name, options, sentence):
    with pytest.raises(ValueError) as refused:
        build_model(name, {**GPT, **options} if name == "gpt" else options, TEXT if name == "hf" else BYTES, seed=0)
    assert sentence in str(refused.value)
