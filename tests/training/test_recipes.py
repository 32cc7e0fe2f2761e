"""Every recipe, on files of the real formats made here: what a newcomer without a hub would give by `data.path`."""

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raysim import train
from raysim.config import read_config
from raysim.network.memory import check_memory
from raysim.pipeline.prepare import prepare
from raysim.pipeline.stage_memory import stage_memories
from raysim.workloads.models import build_model
from raysim.workloads.partition import partition
from raysim.workloads.splits import DataShape


@pytest.fixture(scope="module")
def cifar(tmp_path_factory):
    """Return a folder with train and test Parquet of the hub's columns, noise in JPEG."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("cifar")
    chance = np.random.default_rng(0)
    for split, count in (("train", 256), ("test", 40)):
        rows = []
        for index in range(count):
            buffer = io.BytesIO()
            Image.fromarray(chance.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(buffer, format="JPEG")
            image = {"bytes": buffer.getvalue(), "path": None}
            rows.append({"img": image, "label": index % 10, "fine_label": index % 100})
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """Return folders with a tiny GPT-2 and its tokenizer, and with text files named as WikiText's."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    model, text = tmp_path_factory.mktemp("gpt2"), tmp_path_factory.mktemp("text")
    GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=16, n_head=2, n_positions=64, vocab_size=300)).save_pretrained(model)
    vocabulary = {token: index for index, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    for name in ("train", "valid", "test"):
        (text / f"{name}.txt").write_text("\n".join(f"line {number} of the {name} text" for number in range(300)))
    return model, text


@pytest.mark.parametrize("recipe", ["resnet18-cifar10", "resnet18-cifar10-m4"])
def test_resnet18_has_the_papers_cuts(recipe, cifar):
    workload = prepare(read_config(recipe, [f"data.path={cifar}"]))
    rows = workload.plan.config.batch_size // workload.plan.config.num_microbatches
    assert tuple(one.shape for one in workload.plan.boundaries) == (
        (rows, 64, 32, 32),
        (rows, 128, 16, 16),
        (rows, 256, 8, 8),
    )
    sizes = [sum(p.numel() for p in module.parameters()) for module in workload.modules]
    assert sizes == [149_824, 525_568, 2_099_712, 8_398_858]


def test_gravac_models_have_published_sizes(cifar):
    """170 and 528 MB (table 1); the latter has a head of 1,000 classes there, of which CIFAR-100 needs 100."""
    sizes = {}
    for recipe, classes in (("resnet101-cifar10", 10), ("vgg16-cifar100", 100)):
        model = read_config(recipe, [f"data.path={cifar}"]).model
        with torch.device("meta"):
            layers = build_model(model.name, model.options, DataShape((3, 32, 32), "float32", classes), 0)
        sizes[recipe] = sum(p.nbytes for p in layers.parameters()) / 1e6
    assert sizes["resnet101-cifar10"] == pytest.approx(170, abs=1)
    assert sizes["vgg16-cifar100"] + 4e-6 * 900 * 4097 == pytest.approx(553, abs=1)  # 528 MiB


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["resnet101-cifar10", "vgg16-cifar100"])
def test_gravacs_models_train(recipe, cifar, tmp_path):
    changes = ["num_replicas=2", "batch_size=4", "steps=2", "data.test_samples=4", "evaluate_every_steps=0"]
    method = "replica_gradient=GraVAC(10, 1000, window=1)"
    run = train(recipe, f"data.path={cifar}", method, *changes, engine="inline", out=tmp_path / "run")
    assert run.status == "finished"
    assert len(run.decisions) == 2
    assert np.isfinite(run.steps["loss"]).all()


@pytest.mark.slow
def test_topics_lstm_learns(tmp_path):
    run = train("topics-lstm", "steps=300", engine="inline", out=tmp_path / "run")
    assert run.evals["loss"].iloc[-1] < 3.0  # from log 256 = 5.5; bytes alone give 3.3
    assert run.decisions["factor"].nunique() > 1


def test_aqsgd_memory_on_cifar10_is_22_9_gb_per_end(cifar):
    """The paper's data set by its counts alone: 50,000 rows of 65,536, 32,768 and 16,384 values."""
    config = read_config("resnet18-cifar10", [f"data.path={cifar}", "forward=AQSGD(Quantize(4))"])
    shape = prepare(config).data.shape
    parts = partition(build_model("resnet18", {}, shape, 0), shape, cuts=config.cuts, batch=128)
    memories = stage_memories(config, parts, num_samples=50_000)
    with pytest.raises(ValueError, match=r"13\.1 GB reference copies") as caught:
        check_memory(memories, 24 * 2**30)
    assert sum(memory.references_bytes for memory in memories) == 2 * 50_000 * (65_536 + 32_768 + 16_384) * 4
    assert "AQSGD's `capacity`" in str(caught.value)


@pytest.mark.slow
def test_resnet18_trains_on_ray(ray, cifar, tmp_path):
    run = train(
        *["resnet18-cifar10", f"data.path={cifar}", "epochs=1", "forward=TopK(0.05)", "backward=TopK(0.1)"],
        out=tmp_path / "run",
    )
    assert run.status == "finished"
    assert len(run.steps) == 2
    assert np.isfinite(run.steps["loss"]).all()
    factors = run.links.groupby("direction")[["dense_bytes", "wire_bytes"]].sum()
    assert (factors["dense_bytes"] / factors["wire_bytes"]).round(1).to_dict() == {"forward": 16.7, "backward": 8.6}


@pytest.mark.slow
def test_gpt2_trains_on_ray(ray, gpt2, tmp_path):
    model, text = gpt2
    run = train(
        *["gpt2-wikitext2", f"model.path={model}", f"data.path={text}", f"data.tokenizer={model}", "data.length=32"],
        *["epochs=1", "forward=TopK(0.1)", "shared_indices=true", "data.train_samples=64", "data.test_samples=8"],
        out=tmp_path / "run",
    )
    assert run.status == "finished"
    assert len(run.steps) == 8
    tied = run.links[run.links["direction"] == "tied"]
    headers = tied.groupby("step")["wire_bytes"].sum() - 2 * 300 * 16 * 4
    assert headers.between(1, 16 * 4).all()  # of four messages
    backward = run.links[run.links["direction"] == "backward"]
    headers = backward["wire_bytes"] - 8 * 52 * 4  # 8 samples, a tenth of 32 x 16 values each, and no positions
    assert headers.between(backward["packets"], 8 * backward["packets"]).all()


@pytest.mark.slow
def test_a_model_of_transformers_trains_by_its_recipe(gpt2, tmp_path):
    model, text = gpt2
    run = train(
        *["hf", f"model.path={model}", "data=text", f"data.path={text / 'train.txt'}", f"data.tokenizer={model}"],
        *["data.length=16", "data.train_samples=16", "data.test_samples=4", "forward=Quantize(8)"],
        engine="inline",
        out=tmp_path / "run",
    )
    assert run.status == "finished"
    assert run.row["num_stages"] == 4
    assert np.isfinite(run.steps["loss"]).all()


@pytest.mark.slow
def test_digits_reach_0_9_within_their_steps(ray, tmp_path):
    """The issue's own command, on both engines: the same losses bit for bit."""
    arguments = ["digits-cnn", "forward=TopK(0.1)", "backward=Quantize(8)"]
    on_ray = train(*arguments, out=tmp_path / "ray")
    inline = train(*arguments, engine="inline", out=tmp_path / "inline")
    assert on_ray.row["final_accuracy_on"] > 0.9
    assert on_ray.steps["loss"].tolist() == inline.steps["loss"].tolist()


@pytest.mark.slow
def test_topics_gpt_learns(tmp_path):
    run = train("topics-gpt", "forward=Quantize(4)", "backward=Quantize(8)", engine="inline", out=tmp_path / "run")
    final = run.evals.iloc[-2:]
    assert (final["loss"] < 2.6).all()  # from log 256 = 5.5


@pytest.mark.slow
def test_optimus_cc_recipe_has_all_parts(tmp_path):
    """Messages of the epilogue are compressed, those before them are not; embeddings are summed once; late stages stay dense."""
    run = train("optimus-cc", "steps=40", engine="inline", out=tmp_path / "run")
    links = run.links[run.links["step"] == 20]
    backward = links[(links["direction"] == "backward") & (links["replica"] == 0)].set_index("boundary")
    dense = 2 * 64 * 128 * 4  # of a message: 2 samples of 64 positions
    small = 4 * (2 * 64 + 128) * 4  # rank 4
    for boundary in range(3):
        compressed = 3 - boundary  # min(P - s, M)
        expected = compressed * small + (8 - compressed) * dense
        assert 8 < backward.loc[boundary, "wire_bytes"] - expected <= 8 * 12  # a header each
    replicas = links[(links["direction"] == "replica_gradient") & (links["replica"] == 0)].set_index("stage")
    factors = replicas["dense_bytes"] / replicas["wire_bytes"]
    assert (factors.loc[:2] > 2).all()
    assert factors.loc[3] == pytest.approx(1, rel=1e-3)  # but for the headers
    assert set(links[links["direction"] == "tied"]["stage"]) == {0, 3}
    assert run.evals["loss"].iloc[-1] < 3.6


@pytest.mark.slow
def test_a_gpt_learns_to_add(tmp_path):
    run = train("addition-gpt", engine="inline", out=tmp_path / "run")
    last = run.evals.iloc[-1]
    assert last["exact_match"] >= 0.85  # 0.90, 0.98 and 0.99 with seeds 0 to 2
    assert run.row["chance_exact_match"] < 0.05
