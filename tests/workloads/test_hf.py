"""Models of transformers: cut into stages they compute what transformers computes, and what cannot be cut is refused."""

import json
import pkgutil
import re
from collections import Counter
from typing import Any

import pytest
import torch
from engines import staged_gradients
from hf_variants import CAUSAL, EACH_KIND, FAMILIES, PADDED, PICTURES, TEXT
from pipelines import with_slow
from tokenizers import ByteLevelBPETokenizer, Tokenizer, models
from torch import nn

from raysim import load_weights, save_pretrained, train
from raysim.config import ConfigError, make_config
from raysim.engine.inline import InlineEngine
from raysim.pipeline.plan import averaged_shapes
from raysim.pipeline.prepare import prepare
from raysim.random import derive_key
from raysim.values import argument_of, floats, only_float, value_of
from raysim.workloads.data import Data, DataShape, batch_ids
from raysim.workloads.hf_layers import chain, original_names
from raysim.workloads.hf_model import hf, load_model
from raysim.workloads.models import build_model
from raysim.workloads.partition import partition

BATCH = 8


def example(shape, batch=BATCH):
    generator = torch.Generator().manual_seed(1)
    if shape is TEXT:
        tokens = torch.randint(shape.num_classes, (batch, shape.input_shape[0] + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    if shape is PADDED:
        x = torch.randint(1, shape.num_tokens, (batch, shape.input_shape[0]), generator=generator)
        lengths = torch.arange(batch) % shape.input_shape[0] + 1
        x[torch.arange(shape.input_shape[0]) >= lengths[:, None]] = shape.padding
        return x, torch.randint(shape.num_classes, (batch,), generator=generator)
    x = torch.randn(batch, *shape.input_shape, generator=generator)
    return x, torch.randint(shape.num_classes, (batch,), generator=generator)


class Made:
    """Samples that are there already."""

    def __init__(self, x, targets):
        self.x, self.y = x, targets

    def __len__(self):
        return len(self.x)

    def inputs(self, ids, epoch, key, training):
        return self.x[ids]

    def targets(self, ids):
        return self.y[ids]


def plain_model(config, shape, seed=0):
    """Return the model as transformers has it, with the weights of a run of that seed."""
    with torch.random.fork_rng():
        torch.manual_seed(derive_key(seed, "model"))
        return load_model(shape, config=config)


def mask_of(x):
    """Return what transformers wants to know of padding."""
    return {"attention_mask": (x != PADDED.padding).long()} if not x.is_floating_point() else {}


def transformers_loss(model, x, targets):
    if model.config.num_labels == PADDED.num_classes:
        return model(x, labels=targets, **mask_of(x)).loss
    if targets.dim() == 2:  # a language model's targets are shifted already
        return model(x, labels=targets, shift_labels=targets.contiguous()).loss
    return model(x, labels=targets).loss


@pytest.mark.parametrize("family", FAMILIES)
def test_chained_layers_equal_model_bit_for_bit(family):
    config, shape = FAMILIES[family]
    model = load_model(shape, config=config)
    layers = chain(model, shape.padding)
    x, targets = example(shape)
    logits = model(x, **(mask_of(x) if shape is PADDED else {})).logits
    assert torch.equal(layers(x), logits)
    transformers_loss(model, x, targets).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    nn.functional.cross_entropy(layers(x).flatten(0, -2), targets.flatten()).backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert found
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


LAYOUTS = [(2, "1F1B"), (3, "ZBH1"), (4, "ZBH1"), (4, "1F1B")]


def run_of(config, **changes):
    return {
        "model": {"name": "hf", "config": config},
        "num_stages": 4,
        "batch_size": BATCH,
        "num_microbatches": 4,
        "steps": 1,
        **changes,
    }


def engine_of(run, shape):
    engine = InlineEngine(prepare(make_config(run), Data(Made(*example(shape)), Made(*example(shape)), shape)))
    engine.start()
    return engine


@pytest.mark.parametrize("of", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", EACH_KIND)
def test_stages_in_a_pipeline_give_the_loss_and_the_gradients_of_the_model(family, of):
    """Each family in one of `of` layouts."""
    """Bit for bit, but for rounding where sums have another order: in the gradients of tied weights, and in ConvNeXt, whose
    activations are strided in the uncut model and contiguous when they arrive.
    """
    if family == "opt" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
        pytest.skip("OPT's positions read a number from a tensor, which fake tensors of torch 2.9 refuse")
    if "experts" in family and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11):
        pytest.skip("transformers reads the address of a tensor before torch 2.11, and fake tensors have none")
    config, shape = FAMILIES[family]
    x, targets = example(shape)
    model = plain_model(config, shape)
    losses = []
    for microbatch in range(4):
        ids = batch_ids(BATCH, BATCH, seed=0, step=0)[1][2 * microbatch : 2 * microbatch + 2]
        loss = transformers_loss(model, x[ids], targets[ids])
        losses.append(loss.item())
        loss.backward(torch.tensor(0.25))  # of four microbatches
    names = original_names(chain(model, shape.padding), model)
    tied = {*model.all_tied_weights_keys, *model.all_tied_weights_keys.values()}
    for num_stages, schedule in LAYOUTS[[*FAMILIES].index(family) % of :: of]:
        engine = engine_of(run_of(config, num_stages=num_stages, schedule=schedule), shape)
        reports, step = [], engine.step
        engine.step = lambda *arguments, step=step, reports=reports: reports.extend(step(*arguments))
        found = staged_gradients(engine)
        engine.close()
        assert [loss for report in reports for loss in report.losses] == losses
        assert {names[name] for name in found} >= {name for name, p in model.named_parameters() if p.grad is not None}
        for name, gradient in found.items():
            expected = model.get_parameter(names[name]).grad
            if names[name] in tied or family == "convnext":
                assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())), name
            else:
                assert torch.equal(gradient, expected), name


def counted(function, calls, name):
    def call(*args, **kwargs):
        calls[name] += 1
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("family", "names", "changes", "first", "later"),
    [
        ("llama", ["create_causal_mask", "LlamaRotaryEmbedding.forward"], {}, 2, 0),  # once in each stage
        ("resnet", ["ResNetModel.forward"], {"hidden_sizes": [4, 8, 8], "depths": [1, 1, 1]}, 2, 0),  # for two shapes
        ("bert", ["create_bidirectional_mask"], {}, 8, 8),  # every microbatch has padding of its own
    ],
)
def test_blocks_compute_their_arguments_once_for_each_shape_or_mask(family, names, changes, first, later, monkeypatch):
    """The embedding and the head run the model's own forward for every microbatch, with its masks and rotary embeddings."""
    config, shape = FAMILIES[family]
    engine = engine_of(run_of({**config, **changes}, num_stages=2, num_microbatches=4, steps=3), shape)
    calls = Counter()
    for name in names:
        path = f"transformers.models.{family}.modeling_{family}.{name}"
        monkeypatch.setattr(path, counted(pkgutil.resolve_name(path), calls, name))
    for step, blocks in enumerate([first, later, later]):
        calls.clear()
        engine.step(step)
        assert calls == dict.fromkeys(names, 2 * 4 + blocks)
    engine.close()


LORA = {"rank": 2, "targets": ["q_proj", "v_proj", "up_proj"]}
LORA_OF_HEAD = {"rank": 2, "targets": ["q_proj", "lm_head"]}  # whose weights are the embedding's in a tied model
LORA_OF_EMBEDDING = {"rank": 2, "targets": ["embed_tokens"]}


def test_lora_trains_and_counts_only_its_matrices():
    model = {"name": "hf", "config": FAMILIES["llama tied"][0], "lora": LORA}
    run = run_of(
        FAMILIES["llama tied"][0], model=model, num_replicas=2, num_microbatches=2, optimizer={"name": "adamw"}
    )
    workload = prepare(make_config(run), Data(Made(*example(TEXT)), Made(*example(TEXT)), TEXT))
    assert workload.plan.tied == ()  # frozen copies stay equal by themselves
    for stage, (module, memory) in enumerate(zip(workload.modules, workload.plan.memories, strict=True)):
        adapters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        assert all("lora_" in name for name in adapters)
        size = sum(p.nbytes for p in adapters.values())
        assert memory.gradients_bytes == size
        assert memory.optimizer_bytes == 2 * size
        assert memory.weights_bytes >= sum(p.nbytes for p in module.parameters())
        assert averaged_shapes(stage, module, workload.plan.config, workload.plan.tied).keys() == adapters.keys()
    assert any(memory.gradients_bytes for memory in workload.plan.memories)


def test_gradients_under_lora_are_those_of_peft():
    config = FAMILIES["llama"][0]
    x, targets = example(TEXT)
    with torch.random.fork_rng():
        torch.manual_seed(derive_key(0, "model"))
        model = load_model(TEXT, config=config, lora=LORA)
    for microbatch in range(4):
        ids = batch_ids(BATCH, BATCH, seed=0, step=0)[1][2 * microbatch : 2 * microbatch + 2]
        transformers_loss(model, x[ids], targets[ids]).backward(torch.tensor(0.25))
    names = original_names(chain(model), model)
    engine = engine_of(run_of(config, model={"name": "hf", "config": config, "lora": LORA}), TEXT)
    found = staged_gradients(engine)
    engine.close()
    assert found
    assert all(torch.equal(gradient, model.get_parameter(names[name]).grad) for name, gradient in found.items())


@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(None, id="whole", marks=pytest.mark.slow),
        pytest.param(LORA, id="lora"),
        pytest.param(LORA_OF_HEAD, id="head", marks=pytest.mark.slow),
        pytest.param(LORA_OF_EMBEDDING, id="embedding", marks=pytest.mark.slow),
    ],
)
def test_a_finished_run_is_saved_for_transformers_with_its_logits(lora, tmp_path):
    from transformers import AutoModelForCausalLM

    config = {**CAUSAL["llama tied"], "max_position_embeddings": 16}
    model = {"name": "hf", "config": config, **({"lora": lora} if lora else {})}
    data = {"name": "topics", "length": 12, "train_samples": 32, "test_samples": 8}
    run = train(
        make_config(
            run_of(config, model=model, data=data, steps=3, optimizer={"name": "adamw", "learning_rate": 1e-2})
        ),
        engine="inline",
        out=tmp_path / "run",
    )
    save_pretrained(run, tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    layers = hf(DataShape((12,), "int64", 256, target_shape=(12,)), config=config, lora=lora)
    layers.load_state_dict(load_weights(run.folder))
    x = torch.arange(24).view(2, 12)
    with torch.no_grad():
        expected = layers.eval()(x)
        found = loaded.eval()(x).logits
    assert torch.equal(found, expected) if lora is None else torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    again = train(  # and continues from there
        make_config(run_of(config, model={"name": "hf", "path": str(tmp_path / "saved")}, data=data)),
        engine="inline",
        out=tmp_path / "again",
    )
    assert again.status == "finished"
    if lora is LORA:
        save_pretrained(run, tmp_path / "adapter", adapter=True)
        assert (tmp_path / "adapter" / "adapter_config.json").is_file()


def test_adapter_without_its_trained_head_is_refused(tmp_path):
    data = {"name": "topics", "length": 12, "train_samples": 32, "test_samples": 8}
    load_model(DataShape((12,), "int64", 256, target_shape=(12,)), config=CAUSAL["llama"]).save_pretrained(tmp_path)
    model = {"name": "hf", "path": str(tmp_path), "lora": LORA, "new_head": True}
    run = train(make_config(run_of({}, model=model, data=data)), engine="inline", out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"also trained a new head .* which LoRA's adapter lacks"):
        save_pretrained(run, tmp_path / "adapter", adapter=True)


def test_a_classifier_of_padded_texts_sends_its_mask_in_bits():
    config = FAMILIES["bert"][0]
    engine = engine_of(run_of(config, forward="Quantize(8)"), PADDED)
    plan = engine.workload.plan
    assert [one.exact_bytes for one in plan.boundaries] == [{"mask": 3}] * 3  # of 2 x 12 bits
    reports = engine.step(0)
    engine.close()
    sent = [link for report in reports for link in report.links if link.sender and link.direction == "forward"]
    hidden, masks = ([link for link in sent if link.tensor == name] for name in ("hidden", "mask"))
    assert len(hidden) == len(masks) == 3
    assert all(0 < link.dense_bytes / link.packets - 4 * 2 * 12 * 16 < 64 for link in hidden)
    assert all(link.dense_bytes == link.wire_bytes == 3 * link.packets for link in masks)


def test_batchnorm_statistics_are_saved_too(tmp_path):
    from transformers import AutoModelForImageClassification

    config = FAMILIES["resnet"][0]
    data = {"name": "digits", "train_samples": 32, "test_samples": 8}
    run = train(make_config(run_of(config, data=data, num_stages=3, steps=2)), engine="inline", out=tmp_path / "run")
    save_pretrained(run, tmp_path / "saved")
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "saved")
    weights = load_weights(run.folder)
    assert torch.equal(
        loaded.resnet.embedder.embedder.normalization.running_mean,
        weights["embedding.model.resnet.embedder.embedder.normalization.running_mean"],
    )
    assert loaded.resnet.embedder.embedder.normalization.running_mean.any()


LLAMA = CAUSAL["llama"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "`model.path` or `model.config` must be given with `model` = 'hf'."),
    "a type": (
        {"config": {"model_type": "lama"}},
        "such as 'llama' or 'gpt2', but got 'lama'. Did you mean `llama`?",
    ),
    "a key": (
        {"config": {**LLAMA, "hiden_size": 3}},
        "of a model of type 'llama'. Did you mean `model.config.hidden_size`?",
    ),
    "a value": ({"config": {**LLAMA, "hidden_size": "x"}}, "`model.config`: Validation error for field 'hidden_size'"),
    "a vocabulary": (
        {"config": {**LLAMA, "vocab_size": 20}},
        "The data has 64 tokens, but 'the configuration' knows 20.",
    ),
    "a length": (
        {"config": {**LLAMA, "max_position_embeddings": 8}},
        "at most the positions of 'the configuration' (8), but got 12.",
    ),
    "a folder": ({"path": "/nowhere"}, "`model.path` must be a folder that exists or a hub name, but got '/nowhere'."),
    "a file": ({"config": "nowhere.json"}, "`model.config` 'nowhere.json' cannot be read"),
    "an encoder-decoder": (
        {"config": {"model_type": "t5"}},
        "A model of type 't5' has no causal language model in transformers.",
    ),
    "blocks that are skipped at random": (
        {"config": {"model_type": "opt", "layerdrop": 0.1}},
        "A model of type 'opt' cannot be cut with `layerdrop`, which skips blocks at random: set it to 0.",
    ),
    "an unknown layout": (
        {"config": {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 2}},
        "A model of type 'mamba' cannot be cut: its configuration has no pipeline plan of transformers",
    ),
    "attention that looks ahead": (
        {
            "config": {
                "model_type": "bert",
                "hidden_size": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 16,
            }
        },
        "A model of type 'bert' cannot learn to predict the next token",
    ),
    "a size": (
        {"config": {**LLAMA, "hidden_size": 400_000, "num_hidden_layers": 90}},
        "GB for its parameters and their copies in stages, but this",
    ),
    "attention": (
        {"config": LLAMA, "attention": "flash"},
        "`model.attention` must be one of sdpa, eager, but got 'flash'.",
    ),
    "a loss of routers": (
        {"config": {**FAMILIES["mixtral, with experts"][0], "output_router_logits": True}},
        "adds a loss of its routers, which a run does not compute: set `model.config.output_router_logits` to false.",
    ),
    "positions after padding": (
        {"config": {**FAMILIES["roberta"][0], "is_decoder": True}},
        "A model of type 'roberta' numbers positions from its padding token: set `model.config.pad_token_id` to a token that the data",
    ),
    "positions up to the padding": (
        {"config": {**FAMILIES["roberta"][0], "is_decoder": True, "pad_token_id": 60, "max_position_embeddings": 72}},
        "`data.length` must be at most the positions of 'the configuration' (11), but got 12.",
    ),
    "a rank": (
        {"config": LLAMA, "lora": {"rank": 0}},
        "`model.lora.rank` must be an integer of at least 1, but got 0.",
    ),
    "an option of lora": (
        {"config": LLAMA, "lora": {"rnk": 1}},
        "Known: rank, alpha, dropout, targets. Did you mean `model.lora.rank`?",
    ),
    "targets": ({"config": LLAMA, "lora": {"targets": ["wq"]}}, "`model.lora.targets` fits no layers of a llama"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_options_are_refused_in_one_sentence(case):
    options, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        build_model("hf", options, TEXT, seed=0)
    assert str(caught.value).count("\n") == 0


def test_head_reading_padding_tokens_is_refused(capfd):
    with pytest.raises(
        ValueError, match=r"A model of type 'llama' cannot be cut as a classifier of texts: its head looks"
    ):
        hf(PADDED, config=LLAMA)
    assert not capfd.readouterr().err  # transformers has advice of its own


def test_decoder_folder_is_refused_as_classifier_first(tmp_path):
    """Not for its missing head, nor for its missing padding token, which would not help."""
    load_model(TEXT, config=FAMILIES["qwen3"][0]).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"A model of type 'qwen3' cannot be cut as a classifier of texts: its head looks"
    ):
        hf(PADDED, path=str(tmp_path))


LLAMA_3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
FILES: dict[str, dict[str, Any]] = {  # keys of public files, some of older versions of transformers
    "llama 2": {**LLAMA, "rope_scaling": None, "pretraining_tp": 1, "torch_dtype": "float16"},
    "llama 3": {**LLAMA, "rope_theta": 5e5, "rope_scaling": {**LLAMA_3, "rope_type": "llama3"}},
    "qwen2": {**FAMILIES["qwen2"][0], "rope_theta": 1e6, "use_mrope": False, "use_sliding_window": False},
    "qwen3_moe": {**FAMILIES["qwen3_moe, with experts"][0], "head_dim": 8, "rope_theta": 1e6, "max_window_layers": 48},
    "mistral": {**LLAMA, "model_type": "mistral", "rope_theta": 1e5, "use_sliding_window": False},
    "gemma3": {**CAUSAL["gemma3, two kinds of layers"], "rope_local_base_freq": 1e3, "sliding_window_pattern": 2},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "rotary_emb_base": 500,
        "rotary_pct": 0.5,
    },
    "phi3": {**CAUSAL["phi3"], "rope_theta": 1e5, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
    "gpt2": {**CAUSAL["gpt2"], "n_ctx": 1024, "task_specific_params": {"text-generation": {"do_sample": True}}},
    "bert": {**FAMILIES["bert"][0], "is_decoder": True, "position_embedding_type": "absolute"},
}


@pytest.mark.parametrize("name", FILES)
def test_config_file_builds_same_model_as_transformers(name, tmp_path):
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    entries = {
        **FILES[name],
        "vocab_size": 64,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
        "architectures": ["Own"],
        "transformers_version": "4.43.0",
        "use_cache": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(entries))
    own = load_model(TEXT, config=str(tmp_path / "config.json"))
    theirs = AutoModelForCausalLM.from_config(
        CONFIG_MAPPING[entries["model_type"]].from_dict(entries), dtype=torch.float32
    )
    theirs.load_state_dict(own.state_dict())  # raises if a shape differs
    x = torch.arange(24).view(2, 12)
    with torch.no_grad():
        assert torch.equal(own.eval()(x).logits, theirs.eval()(x).logits)


def test_a_misspelled_key_of_a_file_is_refused(tmp_path):
    for key, meant in {"hiden_size": "hidden_size", "rope_tetha": "rope_theta"}.items():
        (tmp_path / "config.json").write_text(json.dumps({**LLAMA, key: 16}))
        with pytest.raises(
            ValueError, match=rf"Unknown key `model\.config\.{key}` .* Did you mean `model\.config\.{meant}`"
        ):
            hf(TEXT, config=str(tmp_path))


def test_weights_that_do_not_match_are_refused(tmp_path):
    small, other = {**LLAMA, "num_hidden_layers": 2}, {"num_hidden_layers": 3}
    load_model(TEXT, config=small).save_pretrained(tmp_path / "small")
    with pytest.raises(ValueError, match="lacks the weights"):
        hf(TEXT, path=str(tmp_path / "small"), config=other)
    load_model(PICTURES, config=FAMILIES["vit"][0]).save_pretrained(tmp_path / "vit")
    hundred = PICTURES._replace(num_classes=100)
    with pytest.raises(ValueError, match=r"`model\.path` .* cannot be loaded|lacks the weights"):
        hf(hundred, path=str(tmp_path / "vit"))
    assert hf(hundred, path=str(tmp_path / "vit"), new_head=True)[-1].model.classifier.out_features == 100  # type: ignore[union-attr]
    with pytest.raises(ValueError, match=r"The data has images of 3 x 32 x 32, but .* takes 3 channels of 16 x 16\."):
        hf(PICTURES._replace(input_shape=(3, 32, 32)), path=str(tmp_path / "vit"))


def test_seed_in_the_path_stands_for_the_seed_of_the_run(tmp_path):
    for seed in (0, 1):
        torch.manual_seed(seed)
        load_model(TEXT, config=LLAMA).save_pretrained(tmp_path / f"weights-{seed}")
    path = str(tmp_path / "weights-{seed}")
    for seed in (0, 1):
        found = build_model("hf", {"path": path}, TEXT, seed).state_dict()
        expected = hf(TEXT, path=str(tmp_path / f"weights-{seed}")).state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(
        ValueError, match=r"`model\.path` must be a folder that exists or a hub name, but got '.*weights-2'\."
    ):
        build_model("hf", {"path": path}, TEXT, seed=2)


def test_tokenizer_models_refuse_byte_data(tmp_path):
    by_bytes = TEXT._replace(num_classes=256)
    load_model(by_bytes, config={**LLAMA, "vocab_size": 300}).save_pretrained(tmp_path)
    assert len(hf(by_bytes, path=str(tmp_path))) > 1
    for count in (256, 300):
        vocabulary = {f"t{index}": index for index in range(count)}
        Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(tmp_path / "tokenizer.json"))
        if count == 256:  # the data may be read by it
            assert len(hf(by_bytes, path=str(tmp_path))) > 1
            continue
        with pytest.raises(ValueError, match=r"read as bytes, but .* Add `data\.tokenizer=.*`\.$"):
            hf(by_bytes, path=str(tmp_path))
        assert len(hf(TEXT._replace(num_classes=300), path=str(tmp_path))) > 1


@pytest.mark.parametrize("model", ["hf", "gpt2"])
def test_bytes_are_refused_by_models_with_gpt2s_two_files(tmp_path, monkeypatch, model):
    by_bytes = TEXT._replace(num_classes=256)
    load_model(by_bytes, config={**FAMILIES["gpt2"][0], "vocab_size": 300}).save_pretrained(tmp_path / "weights")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(build_model(model, {"path": "~/weights"}, by_bytes, seed=0)) > 1
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(["some words of a text, in a text"], vocab_size=270, show_progress=False)
    made.save_model(str(tmp_path / "weights"))
    with pytest.raises(ValueError, match=r"read as bytes, but '~/weights' .* Add `data\.tokenizer=~/weights`\.$"):
        build_model(model, {"path": "~/weights"}, by_bytes, seed=0)


FAMILIES_OF_MEMORY = ("gpt2", "llama tied", "gemma2, two kinds of layers", "vit", "resnet", "bert")


@pytest.mark.parametrize("family", with_slow(FAMILIES_OF_MEMORY, *(set(FAMILIES_OF_MEMORY) - {"llama tied", "bert"})))
def test_estimated_saved_memory_equals_autograd(family):
    """Counted on fake tensors beforehand, and on real ones here: masks and rotary embeddings among them."""
    config, shape = FAMILIES[family]
    layers = hf(shape, config=config)
    parts = partition(layers, shape, num_stages=2, batch=2)
    x, targets = example(shape, 2)
    for stage, module in enumerate(parts.stages):
        name, hidden = only_float(value_of(x))
        x = argument_of({**value_of(x), name: hidden.detach().requires_grad_(stage > 0)})
        kept = {}
        held = {tensor.untyped_storage().data_ptr() for tensor in [*module.parameters(), *module.buffers()]}

        def keep(tensor, kept=kept, held=held):
            place = tensor.untyped_storage()
            if place.data_ptr() not in held:
                kept[place.data_ptr()] = (place.nbytes(), tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = module(x)
            if stage == 1:
                loss = nn.functional.cross_entropy(y.flatten(0, -2), targets.flatten())
        for tensor in [*floats(value_of(x)).values(), *([loss] if stage == 1 else floats(value_of(y)).values())]:
            keep(tensor)
        saved = sum(size for size, _ in kept.values())
        assert saved == pytest.approx(parts.footprints()[stage].saved, rel=0.1), (family, stage)
        x = y
    loss.backward()
