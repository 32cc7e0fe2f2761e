"""Language models: a decoder of any size, GPT-2 with its trained weights, and an LSTM as in papers on gradient compression."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raysim.notation import check_integer, check_real
from raysim.workloads.hf_config import check_fits, check_tokens
from raysim.workloads.options import check_boolean, import_hub, local_or_hub, reason_of
from raysim.workloads.splits import DataShape
from raysim.workloads.subspace import in_subspace

MOST_LAYERS = 1024  # limit for models whose depth is an option


def gpt(
    shape: DataShape,
    *,
    num_blocks: int = 4,
    width: int = 128,
    num_heads: int = 4,
    dropout: float = 0.0,
    tied: bool = False,
    subspace: int | None = None,
    subspace_form: str = "reparametrised",
) -> nn.Sequential:
    """Return a decoder laid out and initialised as GPT-2 (Radford et al. 2019): `embedding`, `block0`.., `head`.

    Length and vocabulary come from the data. `tied`: embedding and head share one parameter. `subspace`: values per token
    at each boundary, in the form `subspace_form`, see `raysim.workloads.subspace`.

    >>> from raysim.workloads.splits import DataShape
    >>> model = gpt(DataShape((64,), "int64", 256), num_blocks=2)
    >>> [name for name, _ in model.named_children()]
    ['embedding', 'block0', 'block1', 'head']
    """
    num_blocks = check_integer("model.num_blocks", num_blocks, 1, MOST_LAYERS)
    width = check_integer("model.width", width, 1)
    num_heads = check_integer("model.num_heads", num_heads, 1)
    dropout = check_real("model.dropout", dropout, 0, 1)
    if width % num_heads:
        raise ValueError(f"`model.width` must be a multiple of `model.num_heads` ({num_heads}), but got {width}.")
    check_boolean("model.tied", tied)
    length = _text_length("gpt", shape)
    model = _assemble(length, shape.num_classes, num_blocks, width, num_heads, (dropout, dropout, dropout))
    _initialise(model, num_blocks)
    if tied:
        _tie(model)
    return in_subspace(model, subspace, subspace_form, added=("attention.projection", "projection"))


def gpt2(shape: DataShape, *, path: str = "gpt2", dropout: float | None = None) -> nn.Sequential:
    """Return GPT-2 with the weights of `path`, a local folder or a hub name: `embedding`, `block0`.., `head`.

    The layers are raysim's own and give the same logits as transformers' `GPT2LMHeadModel`. `dropout`, if given,
    replaces the rates of the folder's configuration.
    """
    model = gpt2_structure(shape, path=path, dropout=dropout)
    check_tokens(path, shape)
    model.load_state_dict(_gpt2_weights(path), assign=True)
    if _gpt2_config(path).tie_word_embeddings:
        _tie(model)
    return model


def gpt2_structure(shape: DataShape, *, path: str = "gpt2", dropout: float | None = None) -> nn.Sequential:
    """Return the layers of `gpt2` on the meta device, from the configuration in `path` alone."""
    _text_length("gpt2", shape)
    if dropout is not None:
        dropout = check_real("model.dropout", dropout, 0, 1)
    config = _gpt2_config(path)
    check_fits(config, shape, path)
    rates = (config.embd_pdrop, config.resid_pdrop, config.attn_pdrop) if dropout is None else (dropout,) * 3
    with torch.device("meta"):
        model = _assemble(config.n_positions, config.vocab_size, config.n_layer, config.n_embd, config.n_head, rates)
    if config.tie_word_embeddings:
        _tie(model)
    return model


class TokenEmbedding(nn.Module):
    """Token plus position embeddings: maps (batch, length) to (batch, length, width)."""

    def __init__(self, length: int, num_tokens: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(num_tokens, width)
        self.position = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.token(x) + self.position.weight[: x.shape[1]])
        return y


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, num_heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_dropout = attention_dropout
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(2, (3, self.num_heads, -1))  # (batch, length, 3, head, its width)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind()
        rate = self.attention_dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=rate, is_causal=True)
        z: Tensor = self.dropout(self.projection(y.transpose(1, 2).flatten(2)))
        return z


class DecoderBlock(nn.Module):
    """Attention and a perceptron, each with a norm before it and a residual connection."""

    def __init__(self, width: int, num_heads: int, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout, attention_dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expansion = nn.Linear(width, 4 * width)
        self.projection = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        y = F.gelu(self.expansion(self.norm2(x)), approximate="tanh")
        z: Tensor = x + self.dropout(self.projection(y))
        return z


class TokenHead(nn.Module):
    """The last norm and the logits of the tokens: (batch, length, token)."""

    def __init__(self, num_tokens: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.projection = nn.Linear(width, num_tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.projection(self.norm(x))
        return y


def _assemble(
    length: int, num_tokens: int, num_blocks: int, width: int, num_heads: int, rates: Sequence[float]
) -> nn.Sequential:
    """Return the uninitialised layers; `rates` are the dropout rates of embedding, residuals and attention."""
    layers: dict[str, nn.Module] = {"embedding": TokenEmbedding(length, num_tokens, width, rates[0])}
    for i in range(num_blocks):
        layers[f"block{i}"] = DecoderBlock(width, num_heads, *rates[1:])
    layers["head"] = TokenHead(num_tokens, width)
    return nn.Sequential(OrderedDict(layers))


def _initialise(model: nn.Sequential, num_blocks: int) -> None:
    """Initialise as GPT-2 does: standard deviation 0.02, less for layers that add to the residual stream, biases zero."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            added = name.startswith("block") and name.endswith("projection")
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * num_blocks) if added else 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _tie(model: nn.Sequential) -> None:
    embedding, head = model.get_submodule("embedding.token"), model.get_submodule("head.projection")
    head.weight = embedding.weight


def _text_length(name: str, shape: DataShape, samples: str = "text") -> int:
    if len(shape.input_shape) != 1 or shape.input_dtype != "int64":
        raise ValueError(
            f"Model `{name}` needs {samples} of (length,) in int64, "
            f"but the data has {shape.input_shape} in {shape.input_dtype}. Choose another `model` or `data`."
        )
    return shape.input_shape[0]


# transformers' name within a block -> ours, and whether its weight is stored transposed
_GPT2_BLOCK = {
    "ln_1": ("norm1", False),
    "attn.c_attn": ("attention.query_key_value", True),
    "attn.c_proj": ("attention.projection", True),
    "ln_2": ("norm2", False),
    "mlp.c_fc": ("expansion", True),
    "mlp.c_proj": ("projection", True),
}


def _gpt2_config(path: str) -> Any:
    """Return the configuration; raises ValueError if it is not a GPT-2 of our layout."""
    source = local_or_hub("model.path", path)
    transformers = import_hub("transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise ValueError(f"`model.path` {path!r} cannot be loaded: {reason_of(error)}.") from error
    if config.model_type != "gpt2":
        raise ValueError(f"`model.path` must hold a GPT-2, but {path!r} holds a {config.model_type}.")
    expected = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "add_cross_attention": (False,),
        "layer_norm_epsilon": (1e-5,),
        "n_inner": (None, 4 * config.n_embd),
        "scale_attn_by_inverse_layer_idx": (False,),
        "scale_attn_weights": (True,),
    }
    for field, values in expected.items():
        if getattr(config, field) not in values:
            raise ValueError(
                f"`{field}` of the GPT-2 in {path!r} must be {values[0]!r}, but is {getattr(config, field)!r}."
            )
    return config


def _gpt2_weights(path: str) -> dict[str, Tensor]:
    """Return the weights under our names, in float32."""
    source = local_or_hub("model.path", path)
    transformers = import_hub("transformers")
    try:
        model, loaded = transformers.GPT2LMHeadModel.from_pretrained(source, output_loading_info=True)
    except Exception as error:
        raise ValueError(f"`model.path` {path!r} cannot be loaded: {reason_of(error)}.") from error
    missing = sorted(set(loaded["missing_keys"]) - {"lm_head.weight"})
    if missing:
        raise ValueError(f"`model.path` {path!r} lacks the weights {', '.join(missing[:3])}.")
    state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    weights = {
        "embedding.token.weight": state["transformer.wte.weight"],
        "embedding.position.weight": state["transformer.wpe.weight"],
        "head.norm.weight": state["transformer.ln_f.weight"],
        "head.norm.bias": state["transformer.ln_f.bias"],
        "head.projection.weight": state["lm_head.weight"],
    }
    for index in range(model.config.n_layer):
        for hub_name, (name, transposed) in _GPT2_BLOCK.items():
            weight = state[f"transformer.h.{index}.{hub_name}.weight"]
            weights[f"block{index}.{name}.weight"] = weight.t().contiguous() if transposed else weight
            weights[f"block{index}.{name}.bias"] = state[f"transformer.h.{index}.{hub_name}.bias"]
    return weights


def lstm(shape: DataShape, *, width: int = 256, num_layers: int = 2, dropout: float = 0.0) -> nn.Sequential:
    """Return an embedding, `num_layers` LSTM layers of `width` (Zaremba et al. 2014, 1409.2329) and a linear head.

    Every sample starts from a zero state: nothing carries over from one block of text to the next. The GraVAC paper uses
    2 layers of width 1,500 on blocks of 35 tokens.

    >>> [name for name, _ in lstm(DataShape((35,), "int64", 256), width=8).named_children()]
    ['embedding', 'lstm1', 'lstm2', 'head']
    """
    _text_length("lstm", shape, "tokens")
    width = check_integer("model.width", width, 1)
    num_layers = check_integer("model.num_layers", num_layers, 1, MOST_LAYERS)
    dropout = check_real("model.dropout", dropout, 0, 1)
    layers: dict[str, nn.Module] = {
        "embedding": nn.Sequential(nn.Embedding(shape.num_classes, width), nn.Dropout(dropout))
    }
    for index in range(1, num_layers + 1):
        layers[f"lstm{index}"] = nn.Sequential(RecurrentLayer(width), nn.Dropout(dropout))
    layers["head"] = nn.Linear(width, shape.num_classes)
    model = nn.Sequential(OrderedDict(layers))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -(width**-0.5), width**-0.5)
    return model


class RecurrentLayer(nn.Module):
    """One LSTM layer, starting from a zero state; its last state is dropped."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.lstm(x)[0]
        return y
