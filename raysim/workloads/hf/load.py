"""The model `hf`: any model of transformers that is a chain of blocks, from a folder, from the hub, or from a configuration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn

from raysim.files import read_text
from raysim.notation import check_choice, suggestion
from raysim.workloads.hf.chain import chain
from raysim.workloads.hf.lora import add_lora
from raysim.workloads.hf.residual import with_subspace
from raysim.workloads.options import check_flag, check_hub, import_hub, local_or_hub
from raysim.workloads.splits import DataShape
from raysim.workloads.tokens import Bytes, HuggingFace

_CHECKED_TOKENS = 32


def hf(
    shape: DataShape,
    *,
    path: str | None = None,
    config: Mapping[str, Any] | str | None = None,
    attention: str | None = None,
    new_head: bool = False,
    lora: Mapping[str, Any] | None = None,
    subspace: int | None = None,
    subspace_form: str = "reparametrised",
) -> nn.Sequential:
    """Return a transformers model as the layers `embedding`, `block0`.., `head`.

    `path`: a folder of `save_pretrained` or a name on the hub. `config`: a table of the configuration's values, or the path
    of its file, for a model with random weights; with `path`, a table of values to change. Vocabulary, classes and picture
    size are the data's where `config` does not give them. `attention`: `sdpa` (the default where the
    model supports it) or `eager`. `new_head`: draw the head anew.
    `lora`: a table with `rank`, `alpha`, `dropout` and `targets`; all other weights are frozen. `subspace`: values a token at
    each boundary of a new Llama-like model, in the form `subspace_form`, see `raysim.workloads.subspace`.
    """
    if subspace is not None and (path is not None or lora is not None or task_of(shape) != "causal-lm"):
        raise ValueError(
            "`model.subspace` needs a new causal language model, of `model.config` alone: weights that were trained without a "
            "subspace have their full rank."
        )
    model = load_model(shape, path=path, config=config, attention=attention, new_head=new_head, lora=lora)
    layers = chain(model, shape.padding)
    with _quiet():
        _check_equal(model, layers, shape)
    return with_subspace(layers, model.config, subspace, subspace_form)


def load_model(
    shape: DataShape,
    *,
    path: str | None = None,
    config: Mapping[str, Any] | str | None = None,
    attention: str | None = None,
    new_head: bool = False,
    lora: Mapping[str, Any] | None = None,
) -> Any:
    """Return the model of `hf` as transformers has it, in float32; raises ValueError naming the option that is wrong."""
    if path is None and config is None:
        raise ValueError("`model.path` or `model.config` must be given with `model` = 'hf'.")
    if attention is not None:
        check_choice("model.attention", attention, ["sdpa", "eager"])
    check_flag("model.new_head", new_head)
    transformers = import_hub("transformers")
    with _quiet():
        settings = _configuration(path, config, shape)
        _check_fits(settings, shape, path or "the configuration")
        auto = getattr(transformers, _AUTO[task_of(shape)])
        if type(settings) not in auto._model_mapping:
            raise ValueError(
                f"A model of type {settings.model_type!r} has no {_NAMES[task_of(shape)]} in transformers."
            )
        if path is None:
            _check_size(auto, settings)
            try:
                model = auto.from_config(settings, attn_implementation=attention, dtype=torch.float32)
            except Exception as error:
                raise ValueError(f"`model.config` makes no model: {_reason(error)}.") from error
        else:
            _check_tokens(path, shape)
            model = _pretrained(auto, path, settings, attention, new_head)
    if lora is not None:
        add_lora(model, lora, trained=_head_names(model) if new_head else ())
    return model


_AUTO = {
    "causal-lm": "AutoModelForCausalLM",
    "texts": "AutoModelForSequenceClassification",
    "images": "AutoModelForImageClassification",
}
_NAMES = {
    "causal-lm": "causal language model",
    "texts": "classifier of texts",
    "images": "image classifier",
}


def task_of(shape: DataShape) -> str:
    """Return the task that data of a shape set: `causal-lm` where each token has a target, `texts` or `images` to classify."""
    if shape.input_dtype == "int64" and len(shape.input_shape) == 1:
        return "causal-lm" if shape.target_shape == shape.input_shape else "texts"
    if len(shape.input_shape) == 3:
        return "images"
    raise ValueError(
        f"Model `hf` needs text of (length,) or pictures of (channel, height, width), but the data has "
        f"{shape.input_shape} in {shape.input_dtype}. Choose another `model` or `data`."
    )


def _configuration(path: str | None, values: Mapping[str, Any] | str | None, shape: DataShape) -> Any:
    """Return transformers' configuration, with the data's sizes where the model is new."""
    transformers = import_hub("transformers")
    if path is None:
        given = _read(values)
        kind = given.pop("model_type", None)
        if kind not in transformers.CONFIG_MAPPING:
            raise ValueError(
                f"`model.config.model_type` must be a type of transformers, such as 'llama' or 'gpt2', but got {kind!r}."
                f"{suggestion(str(kind), transformers.CONFIG_MAPPING)}"
            )
        _check_keys(transformers.CONFIG_MAPPING[kind](), given)
        try:
            return transformers.CONFIG_MAPPING[kind](**_of_data(transformers.CONFIG_MAPPING[kind](), shape) | given)
        except Exception as error:
            raise ValueError(f"`model.config`: {_reason(error)}.") from error
    if values is not None and not isinstance(values, Mapping):
        raise ValueError(f"`model.config` must be a table of values to change with `model.path`, but got {values!r}.")
    place = local_or_hub("model.path", path)
    if not Path(place).is_dir():
        check_hub("`model.path`", place, "config.json")
    labels = {"num_labels": shape.num_classes} if task_of(shape) != "causal-lm" else {}
    try:
        found = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False)
        _check_keys(found, values or {})
        return transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **labels | dict(values or {}))
    except ValueError:
        raise
    except Exception as error:
        raise ValueError(f"`model.path` {path!r} cannot be loaded: {_reason(error)}.") from error


def _read(values: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """Return the values of a configuration, of a table or a JSON file."""
    if isinstance(values, Mapping):
        return dict(values)
    place = Path(str(values)).expanduser()
    place = place / "config.json" if place.is_dir() else place
    try:
        read = json.loads(read_text(place))
    except (OSError, ValueError) as error:
        raise ValueError(f"`model.config` {values!r} cannot be read: {error}.") from None
    if not isinstance(read, dict):
        raise ValueError(f"`model.config` {values!r} must hold a JSON object.")
    return {key: value for key, value in read.items() if key not in ("architectures", "transformers_version", "dtype")}


def _of_data(default: Any, shape: DataShape) -> dict[str, Any]:
    """Return the values of a configuration that a new model takes from the data."""
    if task_of(shape) != "images":
        special = [key for key in default.to_dict() if key.endswith("_token_id")]  # of another vocabulary
        found = {"vocab_size": _num_tokens(shape), **dict.fromkeys(special), "pad_token_id": shape.padding}
        return found | ({"num_labels": shape.num_classes} if task_of(shape) == "texts" else {})
    channels, height, _ = shape.input_shape
    sizes = {"num_channels": channels, "image_size": height}
    return {"num_labels": shape.num_classes, **{key: sizes[key] for key in sizes if hasattr(default, key)}}


def _check_keys(config: Any, values: Mapping[str, Any]) -> None:
    """Raise ValueError for a key that configurations of this type do not have."""
    known = {*config.to_dict(), *config.attribute_map, "num_labels"}
    for key in values:
        if key not in known:
            near = suggestion(key, known).replace("`", "`model.config.", 1)
            raise ValueError(f"Unknown key `model.config.{key}` of a model of type {config.model_type!r}.{near}")


def _check_fits(config: Any, shape: DataShape, where: str) -> None:
    """Raise ValueError where the data have more tokens, longer samples or other pictures than the model takes."""
    if task_of(shape) == "images":
        _check_pictures(config, shape, where)
        return
    length = shape.input_shape[0]
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ValueError(f"`data.length` must be at most the positions of {where!r} ({longest}), but got {length}.")
    if _num_tokens(shape) > config.vocab_size:
        raise ValueError(
            f"The data has {_num_tokens(shape)} tokens, but {where!r} knows {config.vocab_size}. "
            "Set `data.tokenizer` to the model's own."
        )


def _check_tokens(path: str, shape: DataShape) -> None:
    """Raise ValueError where text is read by bytes and the folder of the weights has a tokenizer of other tokens."""
    by_bytes = task_of(shape) != "images" and _num_tokens(shape) == Bytes.num_tokens
    if by_bytes and (Path(path) / "tokenizer.json").is_file() and HuggingFace(path).num_tokens != Bytes.num_tokens:
        raise ValueError(
            f"The data are read by bytes, but {path!r} has learned the tokens of a tokenizer. Set `data.tokenizer={path}`, of data "
            "that have this key."
        )


def _num_tokens(shape: DataShape) -> int:
    return shape.num_tokens or shape.num_classes


def _check_pictures(config: Any, shape: DataShape, where: str) -> None:
    channels, height, width = shape.input_shape
    sizes = getattr(config, "image_size", None)
    wanted = tuple(sizes) if isinstance(sizes, (list, tuple)) else (sizes, sizes)
    fixed = config.model_type not in _ANY_SIZE and sizes is not None
    if getattr(config, "num_channels", channels) != channels or (fixed and wanted != (height, width)):
        size = f" of {wanted[0]} x {wanted[1]}" if fixed else ""
        raise ValueError(
            f"The data has pictures of {channels} x {height} x {width}, but {where!r} takes {config.num_channels} channels{size}."
        )


_ANY_SIZE = ("convnext", "resnet")  # convolutions alone


def _pretrained(auto: Any, path: str, settings: Any, attention: str | None, new_head: bool) -> Any:
    place = local_or_hub("model.path", path)
    try:
        model, loaded = auto.from_pretrained(
            place,
            config=settings,
            attn_implementation=attention,
            dtype=torch.float32,
            trust_remote_code=False,
            ignore_mismatched_sizes=new_head,
            output_loading_info=True,
        )
    except Exception as error:
        raise ValueError(f"`model.path` {path!r} cannot be loaded: {_reason(error)}.") from error
    drawn = sorted({*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])})
    heads = tuple(f"{name}." for name in _head_names(model))
    lacking = [name for name in drawn if not (new_head and name.startswith(heads))]
    if lacking:
        fix = " Set `model.new_head = true` to draw it anew." if all(name.startswith(heads) for name in lacking) else ""
        raise ValueError(f"`model.path` {path!r} lacks the weights {', '.join(lacking[:3])}.{fix}")
    return model


def _head_names(model: Any) -> list[str]:
    """Return the names of the modules beside the base model."""
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]


def _check_size(auto: Any, settings: Any) -> None:
    """Raise ValueError where the parameters alone are more than this machine's memory, before any are made."""
    with torch.device("meta"):
        try:
            size = sum(parameter.nbytes for parameter in auto.from_config(settings).parameters())
        except Exception as error:
            raise ValueError(f"`model.config` makes no model: {_reason(error)}.") from error
    memory = psutil.virtual_memory().total
    if size > memory:
        raise ValueError(
            f"Model `hf` needs {size / 1e9:.1f} GB for its parameters, but this machine has {memory / 1e9:.1f} GB. "
            "Make the model smaller."
        )


def _check_equal(model: Any, layers: nn.Sequential, shape: DataShape) -> None:
    """Raise ValueError where the layers do not give the model's own logits, or a language model looks ahead."""
    kind = model.config.model_type
    if task_of(shape) == "images":
        x = torch.linspace(-1, 1, math.prod(shape.input_shape)).view(1, *shape.input_shape)
    else:
        x = torch.arange(min(shape.input_shape[0], _CHECKED_TOKENS))[None] % _num_tokens(shape)
    known = {}
    if shape.padding is not None:
        x[:, -1] = shape.padding
        known["attention_mask"] = (x != shape.padding).long()
    with torch.no_grad():
        expected, found = model.eval()(x, **known).logits, layers.eval()(x)
        if not torch.allclose(expected, found, rtol=1e-4, atol=1e-5):
            if shape.padding is not None:
                raise ValueError(
                    f"A model of type {kind!r} cannot be cut as a classifier of texts: its head looks for padding among the "
                    "tokens, which do not reach the last stage. Use an encoder, such as 'bert' or 'distilbert'."
                )
            raise ValueError(
                f"A model of type {kind!r} cannot be cut: its blocks in a row do not give the logits of the model."
            )
        if task_of(shape) == "causal-lm" and x.shape[1] > 1:
            x[:, -1] = (x[:, -1] + 1) % _num_tokens(shape)
            if not torch.allclose(expected[:, :-1], layers(x)[:, :-1], rtol=1e-4, atol=1e-5):
                raise ValueError(
                    f"A model of type {kind!r} cannot learn to predict the next token, since its attention sees all tokens. "
                    "Set `model.config.is_decoder = true` where the model has this key."
                )
    model.train()
    layers.train()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep progress bars and advice of transformers off the screen."""
    transformers = import_hub("transformers")
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(level)
        if bars:
            transformers.logging.enable_progress_bar()


def _reason(error: Exception) -> str:
    """Return an error of transformers in one line, without its advice on where to report it."""
    text = " ".join((str(error).strip() or type(error).__name__).split())
    return text.split(". ")[0].rstrip(".:")
