"""Shapes of transformers: parameters equal to those of the models that transformers builds, operations to the formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raysim.forecast.families import FAMILIES, read_shape, shape_of
from raysim.forecast.shapes import ModelShape, _shares, count_values
from raysim.notation import InputError

LLAMA_3_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
PLAIN = {name: value for name, value in SMALL.items() if name not in ("num_key_value_heads", "head_dim")}
OWN: dict[str, dict[str, Any]] = {
    "gpt_neox": PLAIN,
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 48, "vocab_size": 100},
    "opt": PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_that_transformers_builds(family: str, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    values = OWN.get(family, SMALL) | {"model_type": family, "tie_word_embeddings": tied}
    try:
        config = transformers.AutoConfig.for_model(**values)
    except (KeyError, ValueError):
        pytest.skip(f"this transformers does not know {family}")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in {*model.parameters()})
    own = {name: value for name, value in config.to_dict().items() if name not in OWN["gpt2"]} | values
    assert shape_of(own).num_parameters == expected


def _built(values: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, sum(parameter.numel() for parameter in {*model.parameters()})


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_keys_have_the_defaults_of_their_class(family: str) -> None:
    """As in files that transformers writes, which leave out what its class already says."""
    own = OWN.get(family, SMALL)
    layers = "n_layer" if family == "gpt2" else "num_hidden_layers"
    cases = [{layers: 2}]
    for key in own:
        of_heads = key in ("num_attention_heads", "n_head", "hidden_size")
        dropped = {key, *(("hidden_size", "n_embd", "word_embed_proj_dim") if of_heads else ())}
        cases.append({layers: 2} | {name: value for name, value in own.items() if name not in dropped})
    for case in cases:
        needed = {"head_dim": 8} if family == "ministral" else {}  # without it transformers builds no model
        values = {"model_type": family, "pad_token_id": None, **case, **needed}
        model, expected = _built(values)
        shape = shape_of(values)
        assert shape.num_parameters == expected, case
        assert shape.length == min(model.config.max_position_embeddings, 8192)
        assert shape.active_experts == getattr(model.config, "num_experts_per_tok", 1)
    default = pytest.importorskip("transformers").AutoConfig.for_model(family)
    assert shape_of({"model_type": family}).layers == default.num_hidden_layers


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "mixtral", **SMALL, "num_experts": 4, "moe_intermediate_size": 8},
        {"model_type": "qwen3_moe", **SMALL, "num_local_experts": 4},
        {"model_type": "llama", **SMALL, "num_key_value_heads": None, "head_dim": None},
        {"model_type": "qwen2", **SMALL, "num_key_value_heads": None},
        {"model_type": "gpt2", **PLAIN},
        {"model_type": "gpt2", **OWN["gpt2"], "n_inner": None, "num_key_value_heads": 2},
        {"model_type": "gpt_neox", **SMALL, "head_dim": 16},
        {"model_type": "opt", **OWN["opt"], "num_key_value_heads": 2},
    ],
)
def test_model_config_aliases_and_nulls_are_read_like_transformers(values: dict[str, Any]) -> None:
    assert shape_of(values).num_parameters == _built(values)[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_forecast_counts_biases_of_the_class(family: str) -> None:
    for key in ("attention_bias", "mlp_bias", "use_bias", "enable_bias"):
        for biased in (True, False):
            values = OWN.get(family, SMALL) | {"model_type": family, key: biased}
            assert shape_of(values).num_parameters == _built(values)[1], (key, biased)


def test_llama_3_8b_has_its_published_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B | {"_name_or_path": "meta-llama/Meta-Llama-3-8B"}))
    for path in (tmp_path, tmp_path / "config.json"):
        shape = read_shape(str(path))
        assert shape is not None
        assert (shape.num_parameters, shape.length, shape.name) == (8_030_261_248, 8192, "Meta-Llama-3-8B")
    assert read_shape(str(tmp_path / "nothing")) is None


def test_operations_of_a_forward_are_those_of_the_formula() -> None:
    shape = ModelShape(layers=12, width=768, length=1024, vocabulary=50257, heads=12)
    tokens = 8 * 1024
    expected = tokens * (12 * (24 * 768**2 + 4 * 1024 * 768) + 2 * 768 * 50257)
    for num_stages in (1, 3, 12):
        stages = shape.stages(num_stages, 8)
        assert sum(stage.forward_flops for stage in stages) == expected
        weights = sum(2 * stage.weight_share * stage.forward_flops for stage in stages)
        assert weights == pytest.approx(expected - 12 * tokens * 4 * 1024 * 768, rel=1e-12)
        assert sum(stage.num_parameters for stage in stages) == shape.num_parameters


def test_only_active_experts_are_counted() -> None:
    dense = ModelShape(layers=1, width=64, length=16, vocabulary=10, heads=4, hidden=128, gated=True)
    mixed = ModelShape(
        layers=1, width=64, length=16, vocabulary=10, heads=4, hidden=64, gated=True, experts=8, active_experts=2
    )
    router = 2 * 16 * 8 * 64
    assert mixed.stages(1, 1)[0].forward_flops == dense.stages(1, 1)[0].forward_flops + router
    assert mixed.num_parameters == dense.num_parameters + (8 - 2) * 3 * 64 * 64 + 8 * 64


@given(st.integers(1, 200), st.integers(1, 200), st.floats(0, 50))
def test_every_block_is_in_one_stage_and_none_is_empty(layers: int, num_stages: int, head: float) -> None:
    if num_stages > layers:
        return
    shares = _shares(layers, num_stages, head)
    assert (sum(shares), len(shares)) == (layers, num_stages)
    assert min(shares) >= 1
    assert max(shares[:-1], default=layers) - min(shares[:-1], default=layers) <= 1


def test_a_tied_head_on_another_stage_is_a_second_copy() -> None:
    shape = ModelShape(layers=4, width=8, length=4, vocabulary=50, heads=2, tied=True)
    for num_stages in (1, 2, 4):
        copies = sum(count_values(stage.parameters) for stage in shape.stages(num_stages, 1)) - shape.num_parameters
        assert shape.tied_sizes(num_stages) == ((((0, num_stages - 1), copies),) if copies else ())
        assert copies == (400 if num_stages > 1 else 0)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"model_type": "mamba"}, r"^Unknown family `model_type` = 'mamba'\. .* Or give its shape: --layers"),
        ({"model_type": "lama"}, "Did you mean `llama`"),
        ({"num_hidden_layers": None}, "`num_hidden_layers` must be given"),
        ({"hidden_size": -4}, "`width` must be"),
        ({"hidden_size": "4096"}, "`hidden_size` must be an integer in the config, but got '4096'."),
        (
            {"mlp_only_layers": [0]},
            r"`mlp_only_layers` must be \[\] to count operations, but got \[0\]\. Give the shape",
        ),
        (
            {"do_layer_norm_before": False},
            "`do_layer_norm_before` must be true to count operations, but got False",
        ),
    ],
)
def test_configs_that_cannot_be_counted_are_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(InputError, match=rule):
        shape_of(LLAMA_3_8B | changes)
    with pytest.raises(InputError, match="`--length` must be at most the model's 8192 positions"):
        shape_of(LLAMA_3_8B, 10_000)
