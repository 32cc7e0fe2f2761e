"""Transformers models that were never made: every family, at any size, from its configuration alone."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_variants import CAUSAL, FAMILIES, TEXT
from typer.testing import CliRunner

from raysim import train
from raysim.cli import app
from raysim.config import read_config
from raysim.forecast.families import FAMILIES as SHAPES
from raysim.forecast.families import shape_of
from raysim.forecast.fleet import Fleet, HostLayout, Proposal
from raysim.forecast.forecast import forecast
from raysim.forecast.inputs import make_job
from raysim.forecast.structure import RecipeModel
from raysim.network.collectives import Transfers, transfers_from_columns
from raysim.pipeline.plan import tied_shapes
from raysim.workloads.hf_model import hf, load_model
from raysim.workloads.language_models import gpt2
from raysim.workloads.models import build_model, make_structure
from raysim.workloads.partition import partition

LLAMA = CAUSAL["llama"]
OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"config": config} for name, (config, _) in FAMILIES.items()},
    "lora": {"config": LLAMA, "lora": {"rank": 2}},
    "a subspace": {"config": LLAMA, "subspace": 4},
    "a projected subspace": {"config": LLAMA, "subspace": 4, "subspace_form": "projected"},
    "eager attention": {"config": LLAMA, "attention": "eager"},
}


def facts(layers, shape):
    parts = partition(layers, shape, num_stages=3, batch=2)
    parameters = [(name, x.shape, x.dtype, x.requires_grad) for name, x in layers.named_parameters()]
    footprints = [one._replace(constants=0) for one in parts.footprints()]  # masks with padding come and go
    return parameters, parts.cuts, parts.boundaries, parts.flops_forward, footprints, parts.tied


FAST = ("mixtral, with experts", "convnext", "lora")  # one of experts, pictures and frozen weights


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in FAST else pytest.mark.slow) for case in OPTIONS]
)
def test_model_structure_has_cost_of_model(case):
    options, shape = OPTIONS[case], FAMILIES[case][1] if case in FAMILIES else TEXT
    made = make_structure("hf", hf, {"shape": shape, **options})
    assert facts(made, shape) == facts(build_model("hf", options, shape, seed=0), shape)
    assert all(x.untyped_storage().nbytes() == x.itemsize for x in made.parameters())


def test_gpt2_cost_needs_no_weights(tmp_path):
    tokens = TEXT._replace(num_classes=64)
    load_model(tokens, config=CAUSAL["gpt2"]).save_pretrained(tmp_path)
    made = facts(build_model("gpt2", {"path": str(tmp_path)}, tokens, seed=0), tokens)
    (tmp_path / "model.safetensors").unlink()
    assert facts(make_structure("gpt2", gpt2, {"shape": tokens, "path": str(tmp_path)}), tokens) == made


@pytest.mark.parametrize(
    "family",
    ["vit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mixtral, with experts", "bert"))],
)
def test_texts_images_and_experts_are_forecast(family, monkeypatch):
    config, shape = FAMILIES[family]
    monkeypatch.setattr("raysim.forecast.forecast.data_of", lambda config, notes: (shape, 64))
    table = [f"model.config.{key}={json.dumps(value)}" for key, value in config.items()]
    found = forecast("hf", *table, "num_stages=3", "batch_size=8", "steps=2", device="A100")
    assert found.num_stages == 3
    assert all(found.flops_forward)


@pytest.mark.slow
def test_the_page_on_hugging_face_models_is_simulated(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "my-hugging-face-model.md").read_text()
    (tmp_path / "tiny.toml").write_text(re.search(r'```toml title="tiny.toml"\n(.*?)```', page, re.DOTALL)[1])
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["simulate", "tiny.toml", "--device", "A100", "--network", "1gbps"])
    assert done.exit_code == 0, done.output
    assert "tiny: 1F1B, 4 stages on 4 workers" in done.stdout
    load_model(TEXT._replace(num_classes=256), config=LLAMA).save_pretrained("weights-3")
    Path("weights-3/model.safetensors").unlink()
    words = ["model.path=weights-{seed}", "seed=3", "data=topics", "data.length=32", "num_stages=2"]
    done = CliRunner().invoke(app, ["simulate", "hf", *words, "--device", "A100", "--network", "1gbps"])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_a_model_of_eight_billion_parameters_takes_little_memory(tmp_path):
    width, layers, heads, keys, inner, vocabulary = 4096, 32, 32, 8, 14336, 128256
    length, samples, stages = 64, 4, 8
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "vocab_size": vocabulary}
    config = {"model_type": "llama", **sizes, "num_key_value_heads": keys, "intermediate_size": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = ["data=topics", f"data.length={length}", "data.train_samples=64", "data.test_samples=32"]
    words = [*data, f"model.path={tmp_path}", f"num_stages={stages}", "num_microbatches=4", "batch_size=16", "steps=4"]
    code = f"""
import json, re
from pathlib import Path
from raysim.forecast.forecast import forecast
found = forecast("hf", *{words!r}, device="A100")
weights = sum(memory.weights_bytes for memory in found.memories)
peak = re.search(r"VmHWM:\\s+([0-9]+) kB", Path("/proc/self/status").read_text())  # ru_maxrss knows the parent's too
print(json.dumps([sum(found.flops_forward), weights, int(peak[1])]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    flops, weights, kilobytes = json.loads(done.stdout)
    matrices = layers * (2 * width * width * (1 + keys / heads) + 3 * width * inner) + vocabulary * width
    tokens = samples * length
    assert flops == 2 * tokens * matrices + layers * 4 * samples * length**2 * width
    parameters = matrices + vocabulary * width + (2 * layers + 1) * width
    assert parameters == 8_030_261_248
    assert weights == pytest.approx(4 * parameters, rel=1e-4)  # beside them, what rotary embeddings keep
    assert kilobytes < 2e6


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name == "gemma" else pytest.mark.slow)
        for name in sorted(SHAPES.keys() & CAUSAL.keys())
    ],
)
def test_a_tied_embedding_is_found_without_its_model(family: str) -> None:
    for num_stages, tied in ((1, True), (3, True), (2, False)):
        config = {key: value for key, value in CAUSAL[family].items() if key != "word_embed_proj_dim"}
        config |= {"tie_word_embeddings": tied, "vocab_size": TEXT.num_classes}
        parts = partition(
            make_structure("hf", hf, {"shape": TEXT, "config": config}), TEXT, num_stages=num_stages, batch=2
        )
        assert shape_of(config, 8).tied_sizes(num_stages) == tuple(
            (at, math.prod(own)) for at, own in tied_shapes(parts)
        )


def across_workers(transfers: Transfers, owner: list[int]) -> list[tuple[Any, ...]]:
    """Return the transfers of tied parameters between workers, in order."""
    tied = transfers[transfers["direction"] == "tied"]
    owners = np.array(owner)
    far = owners[tied["source_stage"]] != owners[tied["target_stage"]]
    return sorted(tied[far | (tied["source_replica"] != tied["target_replica"])].tolist())


@pytest.mark.parametrize(
    ("schedule", "num_replicas"),
    [
        ("1F1B", 2),
        ("ZBV", 1),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("1F1B", 1), ("Interleaved1F1B(2)", 2))),
    ],
)
def test_advice_forecast_and_run_agree_on_tied_embedding_bytes(
    schedule: str, num_replicas: int, tmp_path: Path
) -> None:
    """Every transfer of a step that sums a tied embedding, on any layout and schedule."""
    config = read_config(
        "topics-gpt",
        [
            "model.tied=true",
            f"schedule={schedule}",
            "num_stages=4",
            f"num_replicas={num_replicas}",
            "num_microbatches=4",
            "model.width=16",
            "data.length=16",
            "data.train_samples=64",
            "data.test_samples=16",
            "batch_size=16",
            "steps=1",
            "profile_every_steps=1",
            "evaluate_every_steps=0",
        ],
    )
    plan = forecast(config, device="A100")
    workers = plan.num_workers
    job = make_job(
        RecipeModel(config),
        Fleet.parse(f"{workers * num_replicas}xA100"),
        schedule=schedule,
        batch=None,
        microbatch=None,
        efficiency=0.4,
        transport="nccl",
        recompute=False,
    )
    advised = job.step(Proposal(HostLayout(workers, num_replicas))).profile.transfers
    recorded = train(config, engine="inline", out=tmp_path / "run").collectives
    made = (
        transfers_from_columns({str(name): recorded[name].to_numpy() for name in recorded}) if len(recorded) else None
    )
    sent = across_workers(plan.steady.transfers, plan.owner)
    assert across_workers(advised, plan.owner) == sent
    assert (across_workers(made, plan.owner) if made is not None else []) == sent
    assert bool(sent) == (schedule != "ZBV")
