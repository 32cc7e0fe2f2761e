"""Configurations of transformers models: checks against the data, and the modules at which a model can be cut.

Many configurations name the embedding, blocks and final norm in a pipeline plan (`base_model_pp_plan`); `LAYOUTS` describes
models without a plan in the same terms.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from raysim.notation import suggestion
from raysim.storage.files import read_text
from raysim.workloads.options import check_hub, import_hub, local_or_hub
from raysim.workloads.splits import DataShape
from raysim.workloads.tokenizers import Bytes, HuggingFace, files_in


def task_kind(shape: DataShape) -> str:
    """Return the task for data of this shape: `causal-lm` if each token has a target, else `texts` or `images` (classification)."""
    if shape.input_dtype == "int64" and len(shape.input_shape) == 1:
        return "causal-lm" if shape.target_shape == shape.input_shape else "texts"
    if len(shape.input_shape) == 3:
        return "images"
    raise ValueError(
        f"Model `hf` needs text of (length,) or images of (channel, height, width), but the data has "
        f"{shape.input_shape} in {shape.input_dtype}. Choose another `model` or `data`."
    )


def configuration(
    path: str | None, values: Mapping[str, Any] | str | None, shape: DataShape, trust_remote_code: bool
) -> Any:
    """Return the transformers configuration; a new model gets the sizes of the data."""
    transformers = import_hub("transformers")
    if path is None:
        given = _read(values)
        kind = given.pop("model_type", None)
        if kind not in transformers.CONFIG_MAPPING:
            raise ValueError(
                f"`model.config.model_type` must be a type of transformers, such as 'llama' or 'gpt2', but got {kind!r}."
                f"{suggestion(str(kind), transformers.CONFIG_MAPPING)}"
            )
        default = transformers.CONFIG_MAPPING[kind]()
        _check_keys(default, given, new=True, of_file=not isinstance(values, Mapping))
        try:
            return type(default)(**_of_data(default, shape) | given)
        except Exception as error:
            raise ValueError(f"`model.config`: {first_sentence(error)}.") from error
    if values is not None and not isinstance(values, Mapping):
        raise ValueError(f"`model.config` must be a table of values to change with `model.path`, but got {values!r}.")
    source = local_or_hub("model.path", path)
    if not Path(source).is_dir():
        check_hub("`model.path`", source, "config.json")
    labels = {"num_labels": shape.num_classes} if task_kind(shape) != "causal-lm" else {}

    def load(**changes: Any) -> Any:
        try:
            return transformers.AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **changes)
        except Exception as error:
            raise refusal(path, error) from error

    _check_keys(load(), values or {})
    return load(**labels | dict(values or {}))


def _read(values: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return configuration values from a table or a JSON file."""
    if isinstance(values, Mapping):
        return dict(values)
    file = Path(str(values)).expanduser()
    file = file / "config.json" if file.is_dir() else file
    try:
        entries = json.loads(read_text(file))
    except (OSError, ValueError) as error:
        raise ValueError(f"`model.config` {values!r} cannot be read: {error}.") from None
    if not isinstance(entries, dict):
        raise ValueError(f"`model.config` {values!r} must hold a JSON object.")
    of_weights = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")
    return {key: entries[key] for key in entries if key not in of_weights}


def _of_data(default: Any, shape: DataShape) -> dict[str, Any]:
    """Return the configuration values that a new model takes from the data."""
    if task_kind(shape) != "images":
        special = [key for key in default.to_dict() if key.endswith("_token_id")]  # they belong to another vocabulary
        tokens = {"vocab_size": num_tokens(shape), **dict.fromkeys(special), "pad_token_id": shape.padding}
        return tokens | ({"num_labels": shape.num_classes} if task_kind(shape) == "texts" else {})
    channels, height, _ = shape.input_shape
    sizes = {"num_channels": channels, "image_size": height}
    return {"num_labels": shape.num_classes, **{key: sizes[key] for key in sizes if hasattr(default, key)}}


def _check_keys(config: Any, values: Mapping[str, Any], *, new: bool = False, of_file: bool = False) -> None:
    """Raise ValueError for a key unknown to configurations of this type.

    A `new` configuration may have keys of older versions of transformers, and keys that only the model's code reads. A
    configuration file may have any key that does not look misspelled, as in transformers.
    """
    known = {*config.to_dict(), *config.attribute_map, "num_labels"}
    if new and hasattr(config, "rope_parameters"):
        known |= {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    for key in values:
        if key in known or (new and _reads(config, key)):
            continue
        if of_file and not difflib.get_close_matches(key, known, n=1, cutoff=_MISSPELLED):
            continue
        near = suggestion(key, known).replace("`", "`model.config.", 1)
        raise ValueError(f"Unknown key `model.config.{key}` of a model of type {config.model_type!r}.{near}")


_MISSPELLED = 0.9  # least similarity to a known key


def _reads(config: Any, key: str) -> bool:
    """Return whether a type's configuration or model reads a key that is not among its values."""
    name = re.escape(key)
    read = re.compile(rf"""\bconfig\.{name}\b|(?:\bconfig, |\bkwargs\.(?:get|pop)\()"{name}\"""")
    of_config = type(config).__module__
    for module in dict.fromkeys((of_config, of_config.replace(".configuration_", ".modeling_"))):
        with suppress(ImportError, OSError):
            if read.search(inspect.getsource(importlib.import_module(module))):
                return True
    return False


def check_fits(config: Any, shape: DataShape, where: str) -> None:
    """Raise ValueError if the model does not fit the data's vocabulary, sample length or image size, or has a loss of its own."""
    if getattr(config, "output_router_logits", False):
        raise ValueError(
            f"{where!r} adds a loss of its routers, which a run does not compute: set `model.config.output_router_logits` to false."
        )
    if task_kind(shape) == "images":
        _check_pictures(config, shape, where)
        return
    length = shape.input_shape[0]
    longest = getattr(config, "max_position_embeddings", None)
    if config.model_type in _POSITIONS_AFTER_PADDING:
        if config.pad_token_id is None:
            raise ValueError(
                f"A model of type {config.model_type!r} numbers positions from its padding token: set `model.config.pad_token_id` to a "
                "token that the data do not use."
            )
        longest -= config.pad_token_id + 1
    if longest is not None and length > longest:
        raise ValueError(f"`data.length` must be at most the positions of {where!r} ({longest}), but got {length}.")
    if num_tokens(shape) > config.vocab_size:
        raise ValueError(
            f"The data has {num_tokens(shape)} tokens, but {where!r} knows {config.vocab_size}. "
            "Set `data.tokenizer` to the model's own."
        )


def check_tokens(path: str, shape: DataShape) -> None:
    """Raise ValueError if text is read as bytes although the weights come with a different tokenizer."""
    if task_kind(shape) == "images" or num_tokens(shape) != Bytes.num_tokens:
        return
    folder = Path(local_or_hub("model.path", path))
    if folder.is_dir() and not any(files_in(folder)):
        return
    try:
        own = HuggingFace(path)
    except ValueError:
        if (folder / "tokenizer.json").is_file():
            raise
        return  # it needs code of its own, or the hub has none or does not answer
    if own.num_tokens != Bytes.num_tokens:
        raise ValueError(
            f"The data are read as bytes, but {path!r} was trained with a tokenizer. Add `data.tokenizer={path}`."
        )


def num_tokens(shape: DataShape) -> int:
    """Return the vocabulary size of the inputs."""
    return shape.num_tokens or shape.num_classes


def _check_pictures(config: Any, shape: DataShape, where: str) -> None:
    channels, height, width = shape.input_shape
    sizes = getattr(config, "image_size", None)
    wanted = tuple(sizes) if isinstance(sizes, (list, tuple)) else (sizes, sizes)
    fixed = config.model_type not in _ANY_SIZE and sizes is not None
    if getattr(config, "num_channels", channels) != channels or (fixed and wanted != (height, width)):
        size = f" of {wanted[0]} x {wanted[1]}" if fixed else ""
        raise ValueError(
            f"The data has images of {channels} x {height} x {width}, but {where!r} takes {config.num_channels} channels{size}."
        )


_POSITIONS_AFTER_PADDING = ("roberta",)
_ANY_SIZE = ("convnext", "resnet")  # convolutions alone


def refusal(path: str, error: Exception) -> ValueError:
    """Return the error for an unloadable folder, with the remedy if it needs the folder's Python code."""
    if "trust_remote_code" in str(error):
        return ValueError(
            f"`model.path` {path!r} needs Python code of its own to be run. If you trust it, set `model.trust_remote_code = true`."
        )
    return ValueError(f"`model.path` {path!r} cannot be loaded: {first_sentence(error)}.")


def first_sentence(error: Exception) -> str:
    """Return a transformers error in one line, without the request to report it."""
    text = " ".join((str(error).strip() or type(error).__name__).split())
    return text.split(". ")[0].rstrip(".:")


class ModelLayout(NamedTuple):
    """Names of submodules of a base model, in the order of its forward."""

    before: tuple[str, ...]  # modules before the first block, such as the embedding
    blocks: str  # the `nn.ModuleList` of blocks; the model may be cut between any two of them
    after: tuple[str, ...]  # modules after the last block, such as the final norm


_BERT = ModelLayout(("embeddings",), "encoder.layer", ("pooler",))

LAYOUTS = {
    "bert": _BERT,
    "convnext": ModelLayout(("embeddings",), "encoder.stages", ("layernorm",)),
    "distilbert": ModelLayout(("embeddings",), "transformer.layer", ()),
    "gpt2": ModelLayout(("wte", "wpe", "drop"), "h", ("ln_f",)),
    "opt": ModelLayout(
        ("decoder.embed_tokens", "decoder.embed_positions", "decoder.project_in"),
        "decoder.layers",
        ("decoder.final_layer_norm", "decoder.project_out"),
    ),
    "resnet": ModelLayout(("embedder",), "encoder.stages", ("pooler",)),
    "roberta": _BERT,
    "vit": ModelLayout(("embeddings",), "layers", ("layernorm", "pooler")),
}


def model_layout(config: Any, base: nn.Module) -> ModelLayout:
    """Return the layout of a base model; raises ValueError if this kind of model is unknown or cannot be cut."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"A model of type {kind!r} cannot be cut: it has an encoder and a decoder.")
    if hasattr(config, "vision_config") or hasattr(config, "audio_config"):
        raise ValueError(f"A model of type {kind!r} cannot be cut: it takes more than one kind of input.")
    if getattr(config, "layerdrop", 0):
        raise ValueError(
            f"A model of type {kind!r} cannot be cut with `layerdrop`, which skips blocks at random: set it to 0."
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise ValueError(f"A model of type {kind!r} cannot be cut: its blocks share keys and values.")
    if kind in LAYOUTS:
        return LAYOUTS[kind]
    plan = list(getattr(config, "base_model_pp_plan", None) or ())
    lists = [name for name in plan if isinstance(getattr(base, name, None), nn.ModuleList)]
    if len(lists) != 1:
        known = ", ".join(sorted(LAYOUTS))
        raise ValueError(
            f"A model of type {kind!r} cannot be cut: its configuration has no pipeline plan of transformers, and raysim "
            f"knows only the layouts of {known}."
        )
    i = plan.index(lists[0])
    return ModelLayout(tuple(plan[:i]), lists[0], tuple(plan[i + 1 :]))
