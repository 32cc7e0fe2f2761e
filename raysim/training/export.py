"""Export a run's model to a folder that transformers can load."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raysim.config import ConfigError
from raysim.plugins import from_record
from raysim.records import Run
from raysim.training.checkpoint import load_weights
from raysim.workloads.data import load_data
from raysim.workloads.hf_layers import chain, original_names
from raysim.workloads.hf_model import add_lora, hf, load_model
from raysim.workloads.models import build_model
from raysim.workloads.options import bind_options
from raysim.workloads.subspace import out_of_subspace


def save_pretrained(run: Run | str | Path, folder: str | Path, *, adapter: bool = False) -> None:
    """Save a run's model like transformers' `save_pretrained`, with the weights of the newest checkpoint.

    LoRA matrices are merged into the weights, and an adapted head or embedding is untied; with `adapter` only the matrices are
    written, as peft does. A model with boundaries in a subspace becomes the equivalent ordinary model. The user's own data are
    loaded only inside `raysim.plugins.trusting`. Raises ConfigError if the run's model is not `hf` or has a bottleneck, if an
    adapter is not all that was trained, or if its data cannot be loaded; RecordsError or CheckpointError if its records or
    checkpoint cannot be read.
    """
    run = run if isinstance(run, Run) else Run(run)
    row = run.row
    if row.get("model") != "hf":
        raise ConfigError(
            f"Only a run with `model` = 'hf' can be exported, but the run in {run.folder} has {row.get('model')!r}."
        )
    options, data = _options(row, "model"), _options(row, "data")
    if row.get("bottleneck") is not None:
        raise ConfigError(
            f"The model in {run.folder} has layers of its `bottleneck`, which transformers does not know."
        )
    lora = options.pop("lora", None)
    if adapter and lora is None:
        raise ConfigError(f"The run in {run.folder} has no `model.lora`, and so no adapter.")
    if adapter and options.get("new_head"):
        raise ConfigError(
            f"The run in {run.folder} also trained a new head (`model.new_head`), which LoRA's adapter lacks. Export the whole model."
        )
    weights = load_weights(str(run.folder))
    try:
        with from_record():
            shape = load_data(str(row.get("data")), data, row["seed"]).shape
            if "subspace" in options:
                trained = build_model("hf", options, shape, row["seed"])
                trained.load_state_dict(weights)
                weights = out_of_subspace(trained).state_dict()
                options = {key: value for key, value in options.items() if key not in ("subspace", "subspace_form")}
            bind_options("model", "hf", hf, options)
            model = load_model(shape, **options)
        adapted = None if lora is None else add_lora(model, lora)
        layers = chain(model, shape.padding, shape.separator)
        layers.load_state_dict(weights)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"The run in {run.folder} cannot be exported: {error}") from None
    names = original_names(layers, model)
    with torch.no_grad():
        for name, buffer in layers.named_buffers():
            if name in names:  # BatchNorm statistics, which the layers copied
                model.get_buffer(names[name]).copy_(buffer)
    if adapted is None:
        model.save_pretrained(folder)
    elif adapter:
        with warnings.catch_warnings():
            # peft < 0.21 warns so about models without a folder
            warnings.filterwarnings("ignore", "Could not find a config file in  -")
            adapted.save_pretrained(folder)
    else:
        _untie(model)
        adapted.merge_and_unload().save_pretrained(folder)


def _untie(model: Any) -> None:
    """Give adapted layers that share their weights, such as a tied head, their own: a merge changes them in place."""
    named = list(model.named_parameters(remove_duplicate=False))
    holders = Counter(parameter for _, parameter in named)
    for name, parameter in named:
        layer, _, field = name.rpartition(".")
        if holders[parameter] > 1 and layer.endswith(".base_layer"):
            setattr(model.get_submodule(layer), field, nn.Parameter(parameter.detach().clone(), requires_grad=False))
            model.config.tie_word_embeddings = False


def _options(row: dict[str, Any], section: str) -> dict[str, Any]:
    """Return the recorded options of a run's model or data set."""
    prefix = f"{section}."
    return {
        key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix) and value is not None
    }
