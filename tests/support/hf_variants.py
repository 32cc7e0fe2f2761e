"""Tiny transformers models of every family, as tables of `model.config`."""

import pytest

from raysim.workloads.data import DataShape

TEXT = DataShape((12,), "int64", 64, target_shape=(12,))
PADDED = DataShape((12,), "int64", 5, num_tokens=64, padding=0)
PICTURES = DataShape((3, 16, 16), "float32", 10)

_BASE = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 32}
_GROUPED = {**_BASE, "num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 4}

CAUSAL = {
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 4,
        "n_head": 4,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
    "gpt2 untied": {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 4,
        "n_head": 4,
        "tie_word_embeddings": False,
        "resid_pdrop": 0,
        "embd_pdrop": 0,
        "attn_pdrop": 0,
    },
    "llama": {"model_type": "llama", **_GROUPED},
    "llama tied": {"model_type": "llama", **_GROUPED, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_GROUPED},
    "qwen3": {"model_type": "qwen3", **_HEADS},
    "mistral, a window of 5 tokens": {"model_type": "mistral", **_GROUPED, "sliding_window": 5},
    "gemma": {"model_type": "gemma", **_HEADS},
    "gemma2, two kinds of layers": {"model_type": "gemma2", **_HEADS, "sliding_window": 5},
    "gemma3, two kinds of layers": {"model_type": "gemma3_text", **_HEADS, "sliding_window": 5},
    "phi": {"model_type": "phi", **_BASE},
    "phi3": {"model_type": "phi3", **_GROUPED},
    "opt": {
        "model_type": "opt",
        "hidden_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "ffn_dim": 32,
        "word_embed_proj_dim": 8,
        "dropout": 0,
    },
    "mixtral, with experts": {"model_type": "mixtral", **_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe, with experts": {
        "model_type": "qwen3_moe",
        **_HEADS,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
    },
    "granite, with multipliers": {
        "model_type": "granite",
        **_GROUPED,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
    },
}

IMAGES = {
    "vit": {"model_type": "vit", **_BASE, "patch_size": 8},
    "resnet": {
        "model_type": "resnet",
        "embedding_size": 4,
        "hidden_sizes": [4, 8],
        "depths": [1, 1],
        "layer_type": "basic",
    },
    "convnext": {"model_type": "convnext", "hidden_sizes": [4, 8], "depths": [1, 1], "num_stages": 2},
}

_NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
TEXTS = {
    "bert": {"model_type": "bert", **_BASE, **_NO_DROPOUT},
    "distilbert": {
        "model_type": "distilbert",
        "dim": 16,
        "n_layers": 4,
        "n_heads": 4,
        "hidden_dim": 32,
        "dropout": 0,
        "attention_dropout": 0,
        "seq_classif_dropout": 0,
    },
    "roberta": {"model_type": "roberta", **_BASE, **_NO_DROPOUT},
}

FAMILIES = {
    **{name: (config, TEXT) for name, config in CAUSAL.items()},
    **{name: (config, PICTURES) for name, config in IMAGES.items()},
    **{name: (config, PADDED) for name, config in TEXTS.items()},
}

APART = (  # each is cut, or counted, in a way of its own
    "gpt2",
    "llama tied",
    "gemma3, two kinds of layers",
    "opt",
    "mixtral, with experts",
    "convnext",
    "bert",
)
EACH_KIND = [name if name in APART else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
