"""The model `hf`: any transformers model that is a chain of blocks, from a folder, the hub, or a configuration.

It may be fine-tuned with LoRA through peft: low-rank matrices trained next to frozen weights (Hu et al. 2021, 2106.09685).
"""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from raysim.notation import check_choice, check_integer, check_real, suggestion
from raysim.plugins import check_trusted
from raysim.workloads.hf_config import (
    check_fits,
    check_tokens,
    configuration,
    first_sentence,
    num_tokens,
    refusal,
    task_kind,
)
from raysim.workloads.hf_layers import chain, types_input
from raysim.workloads.options import check_boolean, import_hub, local_or_hub, reason_of
from raysim.workloads.splits import DataShape
from raysim.workloads.subspace import in_subspace
from raysim.workloads.weightless import check_memory_of_parameters, hollow_parameters

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
    trust_remote_code: bool = False,
) -> nn.Sequential:
    """Return a transformers model as the layers `embedding`, `block0`.., `head`.

    `path`: a folder of `save_pretrained` or a name on the hub. `config`: a table of the configuration's values, or the
    path of its file, for a model with random weights; with `path`, a table of values to change. Vocabulary, classes and
    image size default to the data's. `attention`: `sdpa` (the default if the model supports it) or `eager`. `new_head`:
    initialise a new head. `lora`: a table with `rank`, `alpha`, `dropout` and `targets`; all other weights are frozen.
    `subspace`: values per token at each boundary of a new Llama-like model, in the form `subspace_form`, see
    `raysim.workloads.subspace`. `trust_remote_code`: run the Python files in `path`, for a model missing from
    transformers.
    """
    source = ModelSource(path, config, attention, new_head, lora, trust_remote_code)
    return _layers(shape, source, subspace, subspace_form)


def hf_structure(
    shape: DataShape, *, subspace: int | None = None, subspace_form: str = "reparametrised", **options: Any
) -> nn.Sequential:
    """Return the layers of `hf` without reading or initialising weights; see `hollow_parameters`.

    A config.json in `path` is enough. Logits are not checked, since this needs weights.
    """
    with hollow_parameters():
        return _layers(shape, ModelSource(**options), subspace, subspace_form, weights=False)


class ModelSource(NamedTuple):
    """The options of `hf` that describe the model itself."""

    path: str | None = None
    config: Mapping[str, Any] | str | None = None
    attention: str | None = None
    new_head: bool = False
    lora: Mapping[str, Any] | None = None
    trust_remote_code: bool = False


def _layers(
    shape: DataShape, source: ModelSource, subspace: int | None, subspace_form: str, *, weights: bool = True
) -> nn.Sequential:
    if subspace is not None and (source.path is not None or source.lora is not None or task_kind(shape) != "causal-lm"):
        raise ValueError(
            "`model.subspace` needs a new causal language model, of `model.config` alone: weights that were trained without a "
            "subspace have their full rank."
        )
    model = load_model(shape, weights=weights, **source._asdict())
    layers = chain(model, shape.padding, shape.separator)
    if weights:
        with _quiet():
            _check_equal(model, layers, shape)
    kind = model.config.model_type
    if subspace is not None and kind not in ADDED:
        raise ValueError(
            f"`model.subspace` needs blocks that add to one residual stream as those of {', '.join(ADDED)} do, but "
            f"`model.config.model_type` is {kind!r}."
        )
    return in_subspace(layers, subspace, subspace_form, added=ADDED.get(kind, ()))


def load_model(shape: DataShape, *, weights: bool = True, **options: Any) -> Any:
    """Return the transformers model of `hf`, in float32; raises ValueError naming the wrong option.

    `options`: those of `ModelSource`. Without `weights`, the weights in `path` are not read; combine it with `hollow_parameters`
    for models of any size.
    """
    source = ModelSource(**options)
    if source.path is None and source.config is None:
        raise ValueError("`model.path` or `model.config` must be given with `model` = 'hf'.")
    if source.attention is not None:
        check_choice("model.attention", source.attention, ["sdpa", "eager"])
    check_boolean("model.new_head", source.new_head)
    if check_boolean("model.trust_remote_code", source.trust_remote_code):
        check_trusted("model.trust_remote_code", CODE_OF_MODELS)
    transformers = import_hub("transformers")
    with _quiet():
        settings = configuration(source.path, source.config, shape, source.trust_remote_code)
        check_fits(settings, shape, source.path or "the configuration")
        auto, kind = _AUTO[task_kind(shape)]
        auto = getattr(transformers, auto)
        custom = source.trust_remote_code and auto.__name__ in (getattr(settings, "auto_map", None) or {})
        if type(settings) not in auto._model_mapping and not custom:
            raise ValueError(f"A model of type {settings.model_type!r} has no {kind} in transformers.")
        if task_kind(shape) == "texts" and not custom:
            _check_classifier(auto._model_mapping[type(settings)], settings.model_type)
        if source.path is not None:
            check_tokens(source.path, shape)
        if weights:
            with hollow_parameters():
                check_memory_of_parameters("hf", _made(auto, source, copy.deepcopy(settings)))
        make = _pretrained if weights and source.path is not None else _made
        model = make(auto, source, settings)
    if source.lora is not None:
        add_lora(model, source.lora, trained=_head_names(model) if source.new_head else ())
    return model


CODE_OF_MODELS = "transformers_modules"  # the package to which transformers copies the code of model folders

_AUTO: dict[str, tuple[Any, str]] = {
    "causal-lm": ("AutoModelForCausalLM", "causal language model"),
    "texts": ("AutoModelForSequenceClassification", "classifier of texts"),
    "images": ("AutoModelForImageClassification", "image classifier"),
}


def _check_classifier(model: type[nn.Module], kind: str) -> None:
    """Raise ValueError if a classifier of texts reads its input tokens, as decoders do to find the last one before padding."""
    if "pad_token_id" in inspect.getsource(model.forward):
        raise ValueError(
            f"A model of type {kind!r} cannot be cut as a classifier of texts: its head looks for padding among the "
            "tokens, which do not reach the last stage. Use an encoder, such as 'bert' or 'distilbert'."
        )


def _made(auto: Any, source: ModelSource, settings: Any) -> Any:
    """Return a new model made from a configuration."""
    try:
        return auto.from_config(
            settings,
            attn_implementation=source.attention,
            dtype=torch.float32,
            trust_remote_code=source.trust_remote_code,
        )
    except Exception as error:
        if source.path is not None:
            raise refusal(source.path, error) from error
        raise ValueError(f"No model can be made from `model.config`: {first_sentence(error)}.") from error


def _pretrained(auto: Any, source: ModelSource, settings: Any) -> Any:
    assert source.path is not None
    try:
        model, loaded = auto.from_pretrained(
            local_or_hub("model.path", source.path),
            config=settings,
            attn_implementation=source.attention,
            dtype=torch.float32,
            ignore_mismatched_sizes=source.new_head,
            output_loading_info=True,
            trust_remote_code=source.trust_remote_code,
        )
    except Exception as error:
        raise refusal(source.path, error) from error
    drawn = sorted({*loaded["missing_keys"], *(key for key, *_ in loaded["mismatched_keys"])})
    heads = tuple(f"{name}." for name in _head_names(model))
    lacking = [name for name in drawn if not (source.new_head and name.startswith(heads))]
    if lacking:
        fix = " Set `model.new_head = true` to draw it anew." if all(name.startswith(heads) for name in lacking) else ""
        raise ValueError(f"`model.path` {source.path!r} lacks the weights {', '.join(lacking[:3])}.{fix}")
    return model


def _head_names(model: Any) -> list[str]:
    """Return the names of the modules outside the base model."""
    return [name for name, _ in model.named_children() if name != model.base_model_prefix]


def _check_equal(model: Any, layers: nn.Sequential, shape: DataShape) -> None:
    """Raise ValueError if the layers do not reproduce the model's logits, or a language model sees later tokens."""
    kind = model.config.model_type
    if task_kind(shape) == "images":
        x = torch.linspace(-1, 1, math.prod(shape.input_shape)).view(1, *shape.input_shape)
    else:
        x = torch.arange(min(shape.input_shape[0], _CHECKED_TOKENS))[None] % num_tokens(shape)
    known = {}
    if shape.padding is not None:
        x[:, -1] = shape.padding
        if shape.separator is not None:
            x[:, x.shape[1] // 2] = shape.separator
        mask = x != shape.padding
        known = {"attention_mask": mask.long()} | types_input(model, x, shape.separator, mask)
    with torch.no_grad():
        expected = model.eval()(x, **known).logits
        if not torch.allclose(expected, layers.eval()(x), rtol=1e-4, atol=1e-5):
            raise ValueError(
                f"A model of type {kind!r} cannot be cut: its blocks, run in sequence, do not reproduce its logits."
            )
        if task_kind(shape) == "causal-lm" and x.shape[1] > 1:
            x[:, -1] = (x[:, -1] + 1) % num_tokens(shape)
            if not torch.allclose(expected[:, :-1], layers(x)[:, :-1], rtol=1e-4, atol=1e-5):
                raise ValueError(
                    f"A model of type {kind!r} cannot learn to predict the next token, since its attention sees all tokens. "
                    "Set `model.config.is_decoder = true` if the model has this key."
                )
    model.train()
    layers.train()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars and advice of transformers."""
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


_OPTIONS = ("rank", "alpha", "dropout", "targets")


def add_lora(model: Any, options: Mapping[str, Any], trained: Sequence[str] = ()) -> Any:
    """Add LoRA adapters to a transformers model, freeze its other weights, and return the peft model.

    `options`: `rank` (8), `alpha` (twice the rank), `dropout` (0), and `targets`, the names of the linear layers to adapt (default:
    peft's choice for the model's type). `trained`: submodules to train fully, such as a new head. Raises ValueError
    naming the wrong option.
    """
    if not isinstance(options, Mapping):
        raise ValueError(f"`model.lora` must be a table such as {{rank = 8}}, but got {options!r}.")
    for option in options:
        if option not in _OPTIONS:
            near = suggestion(option, _OPTIONS).replace("`", "`model.lora.", 1)
            raise ValueError(f"Unknown option `model.lora.{option}`. Known: {', '.join(_OPTIONS)}.{near}")
    rank = check_integer("model.lora.rank", options.get("rank", 8), 1)
    targets = options.get("targets")
    if targets is not None and not (
        isinstance(targets, (list, tuple)) and all(isinstance(each, str) for each in targets)
    ):
        raise ValueError(f"`model.lora.targets` must be a list of names of linear layers, but got {targets!r}.")
    peft = import_hub("peft")
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=check_real("model.lora.alpha", options.get("alpha", 2 * rank), 0, float("inf"), open_low=True),
        lora_dropout=check_real("model.lora.dropout", options.get("dropout", 0.0), 0, 1),
        target_modules=list(targets) if targets is not None else None,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft warns about layers with transposed weights, but handles them
            adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        kind = model.config.model_type
        raise ValueError(f"`model.lora.targets` fits no layers of a {kind}: {reason_of(error)}.") from error
    for name in trained:
        model.get_submodule(name).requires_grad_(True)
    return adapted


ADDED = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), ("block.self_attn.o_proj", "block.mlp.down_proj"))
"""Names, within a block, of the layers whose output is added to the residual stream without norm, gain or scale."""
