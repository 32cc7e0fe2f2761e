"""Shapes of the models that a `config.json` of transformers describes.

Neither torch nor transformers is imported. Keys missing in a config have the defaults of its class in transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from raysim.forecast.shapes import UNNAMED, ModelShape
from raysim.forecast.timings import read_toml_or_json
from raysim.notation import InputError, known_words
from raysim.storage.files import is_file

LONGEST = 8192  # default tokens of a training sequence, if the model has more positions
WEIGHTS = ("*.safetensors", "*.bin")
"""Files of trained weights beside a config."""
_ATTENTION = {"attention_bias": ("qkv", "out")}
_ALL = ("qkv", "out", "ffn")


class Family(NamedTuple):
    """Properties of a `model_type` of transformers besides the sizes in its config."""

    sizes: Mapping[str, int]
    """Defaults by field, as in `NAMES`; a missing field follows from the others, as in `ModelShape`."""
    gated: bool = True
    norm: int = 1
    """Vectors of a norm: 1, or 2 with a bias."""
    norms: int = 2
    """Norms over the width in each block."""
    head_norms: str = ""
    """"head": norms of queries and keys over a head's width; "full": over all heads."""
    biases: tuple[str, ...] = ()
    """Parts with biases by default: qkv, out, ffn."""
    optional_biases: Mapping[str, tuple[str, ...]] = {}
    """Keys of the config that add biases to parts, or remove them."""
    tied: bool = False
    """The head shares the embedding's weights by default."""
    positions: int | None = None
    """Learned positions in addition to the config's; None if positions are not learned."""
    grouped: bool = True
    """True if the class allows fewer key and value heads, and a head width independent of the width."""
    hidden_name: str = "intermediate_size"
    """Key of the width within the feed-forward part."""


def _sizes(
    layers: int, width: int, heads: int, hidden: int, vocabulary: int, positions: int, **more: int
) -> dict[str, int]:
    names = {"layers": layers, "width": width, "heads": heads, "hidden": hidden, "vocabulary": vocabulary}
    return {**names, "positions": positions, **more}


_LLAMA = Family(_sizes(32, 4096, 32, 11_008, 32_000, 2048), optional_biases={**_ATTENTION, "mlp_bias": ("ffn",)})
_MISTRAL = Family(_sizes(32, 4096, 32, 14_336, 32_000, 131_072, kv_heads=8))
_GEMMA2 = Family(
    _sizes(26, 2304, 8, 9216, 256_000, 8192, kv_heads=4, head_width=256), norms=4, tied=True, optional_biases=_ATTENTION
)
_QWEN2 = Family(_sizes(32, 4096, 32, 22_016, 151_936, 32_768, kv_heads=32), biases=("qkv",))

FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "granite": _LLAMA,
    "smollm3": _LLAMA._replace(sizes=_sizes(36, 2048, 16, 11_008, 128_256, 32_768, kv_heads=4), tied=True),
    "phi3": Family(_sizes(32, 3072, 32, 8192, 32_064, 4096)),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "mixtral": Family({**_MISTRAL.sizes, "experts": 8, "active_experts": 2}),
    "gemma": Family(
        _sizes(28, 3072, 16, 24_576, 256_000, 8192, kv_heads=16, head_width=256), tied=True, optional_biases=_ATTENTION
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA2._replace(
        sizes={**_GEMMA2.sizes, "vocabulary": 262_208, "positions": 131_072}, head_norms="head"
    ),
    "qwen2": _QWEN2,
    "qwen3": Family({**_QWEN2.sizes, "head_width": 128}, head_norms="head", optional_biases=_ATTENTION),
    "qwen3_moe": Family(
        _sizes(24, 2048, 32, 768, 151_936, 32_768, kv_heads=4, experts=128, active_experts=8),
        head_norms="head",
        optional_biases=_ATTENTION,
        hidden_name="moe_intermediate_size",
    ),
    "olmo2": Family(_sizes(32, 4096, 32, 11_008, 50_304, 2048), head_norms="full", optional_biases=_ATTENTION),
    "starcoder2": Family(
        _sizes(30, 3072, 24, 12_288, 49_152, 4096, kv_heads=2),
        gated=False,
        norm=2,
        biases=_ALL,
        optional_biases={"use_bias": _ALL},
        tied=True,
    ),
    "gpt2": Family(
        {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50_257, "positions": 1024},
        gated=False,
        norm=2,
        biases=_ALL,
        tied=True,
        positions=0,
        grouped=False,
        hidden_name="n_inner",
    ),
    "gpt_neox": Family(
        _sizes(44, 6144, 64, 24_576, 50_432, 2048),
        gated=False,
        norm=2,
        biases=_ALL,
        optional_biases=_ATTENTION,
        grouped=False,
    ),
    "opt": Family(
        _sizes(12, 768, 12, 3072, 50_272, 2048),
        gated=False,
        norm=2,
        biases=_ALL,
        optional_biases={"enable_bias": _ALL},
        tied=True,
        positions=2,
        grouped=False,
        hidden_name="ffn_dim",
    ),
}
"""Supported families; tests compare each, and its defaults, with the models built by transformers."""

NAMES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "width": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "head_width": ("head_dim",),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts"),
    "active_experts": ("num_experts_per_tok",),
    "positions": ("max_position_embeddings", "n_positions"),
}


_COUNTED = {
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "do_layer_norm_before": True,
    "layer_norm_elementwise_affine": True,
    "add_cross_attention": False,
}
"""Keys with the only value whose models are counted."""


def read_shape(path: str, length: int | None = None) -> ModelShape | None:
    """Read the shape from a transformers `config.json` or a folder with one; None if the path is neither.

    `length`: tokens of a training sequence, by default the model's positions, at most `LONGEST`. Raises InputError.
    """
    file = Path(path) / "config.json" if not path.endswith(".json") else Path(path)
    if not is_file(file):
        return None
    values = read_toml_or_json(file)
    if not isinstance(values, dict) or "model_type" not in values:
        raise InputError(
            f"{file} must be a config of transformers with `model_type`. Give --layers, --width, --length, --vocabulary."
        )
    name = str(values.get("_name_or_path") or file.absolute().parent.name)
    shape = shape_of(values, length, name=name.rstrip("/").rsplit("/", 1)[-1])
    return replace(shape, trained=any(any(file.parent.glob(pattern)) for pattern in WEIGHTS))


def shape_of(values: Mapping[str, Any], length: int | None = None, *, name: str = UNNAMED) -> ModelShape:
    """Return the shape given by a config's values; raises InputError."""
    kind = str(values["model_type"])
    family = FAMILIES.get(kind)
    if family is None:
        raise InputError(
            f"Unknown family `model_type` = {kind!r}.{known_words(kind, FAMILIES)} Or give its shape: --layers, --width, --length, "
            "--vocabulary."
        )
    names = {**NAMES, "hidden": (family.hidden_name,)}
    if not family.grouped:
        names |= {"kv_heads": (), "head_width": ()}
    sizes = {field: _size(values, names[field], family.sizes.get(field, 0)) for field in names}
    if values.get("word_embed_proj_dim") not in (None, sizes["width"]):
        raise InputError(
            "`word_embed_proj_dim` must be `hidden_size`. Give the shape: --layers, --width, --length, --vocabulary."
        )
    for key, value in _COUNTED.items():
        if values.get(key, value) not in (value, None):
            raise InputError(
                f"`{key}` must be {json.dumps(value)} to count operations, but got {values[key]!r}. Give the shape: --layers, "
                "--width, --length, --vocabulary."
            )
    missing = [field for field in ("layers", "width", "heads", "vocabulary") if not sizes[field]]
    if missing:
        raise InputError(f"`{NAMES[missing[0]][0]}` must be given in the config.")
    positions = sizes.pop("positions")
    own = length or min(positions or LONGEST, LONGEST)
    if positions and own > positions:
        raise InputError(f"`--length` must be at most the model's {positions} positions, but got {own}.")
    try:
        given: dict[str, Any] = {field: size for field, size in sizes.items() if size}
        plain = ModelShape(**given, length=own, gated=family.gated, name=name)
        return replace(
            plain,
            vectors=_vectors(family, plain, values),
            last_vectors=(plain.width,) * family.norm,
            positions=0 if family.positions is None else positions + family.positions,
            tied=bool(values.get("tie_word_embeddings", family.tied)),
        )
    except ValueError as error:
        raise InputError(f"{error} (in the config of {name})") from None


def _size(values: Mapping[str, Any], names: Sequence[str], default: int) -> int:
    """Return a size in a config, by any of its names: 0 if it is null, `default` if it is missing."""
    for name in names:
        if name in values:
            value = values[name]
            if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
                raise InputError(f"`{name}` must be an integer in the config, but got {value!r}.")
            return value or 0
    return default


def _vectors(family: Family, shape: ModelShape, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the lengths of the norms and biases of a block."""
    own, shared = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    lengths = [shape.width] * (family.norms * family.norm)
    biases = {*family.biases}
    for key, parts in family.optional_biases.items():
        given = values.get(key)
        biases = biases | {*parts} if given is True else biases - {*parts} if given is False else biases
    if "qkv" in biases:
        lengths += [own, shared, shared]
    if "out" in biases:
        lengths += [shape.width]
    if "ffn" in biases:
        lengths += [shape.hidden] * (2 if shape.gated else 1) + [shape.width]
    lengths += {"": [], "head": [shape.head_width] * 2, "full": [own, shared]}[family.head_norms]
    return tuple(lengths)
