"""Structure of a model and of its data without their numbers: what a run would train on, at no cost of memory or downloads."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from raysim.config import RunConfig
from raysim.notation import check_integer
from raysim.workloads.data import DATASETS, load_data
from raysim.workloads.models import MODELS, bind_model, build_model, make_structure
from raysim.workloads.options import bind_options
from raysim.workloads.splits import DataShape

CIFAR = {
    "cifar10": (DataShape((3, 32, 32), "float32", 10), 50_000),
    "cifar100": (DataShape((3, 32, 32), "float32", 100), 50_000),
}
WIKITEXT2 = (50_257, 2_391_884)  # tokens that GPT-2 knows, and that the training text has: as the tokeniser counts them
GPT2 = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}


def data_of(config: RunConfig, notes: list[str]) -> tuple[DataShape, int]:
    """Return the shape and number of training samples; of the sets that come from the hub without fetching them."""
    name, options = config.data.name, config.data.options
    if name not in (*CIFAR, "wikitext2") or options.get("path") is not None:
        data = load_data(name, options, config.seed)
        return data.shape, len(data.train)
    options = bind_options("data", name, DATASETS[name], options)
    notes.append(f"Data: {name} by its published size, not read.")
    if name in CIFAR:
        shape, count = CIFAR[name]
    else:
        length = check_integer("data.length", options.get("length", 1024), 1)
        shape, count = DataShape((length,), "int64", WIKITEXT2[0]), WIKITEXT2[1] // length
    wanted = options.get("train_samples")
    return shape, count if wanted is None else check_integer("data.train_samples", wanted, 1, count)


def structure_of(config: RunConfig, shape: DataShape, notes: list[str]) -> nn.Sequential:
    """Return the model with parameters that have a shape and take no memory; models of the user's own are built for real."""
    name, options = config.model.name, config.model.options
    if name not in MODELS:
        return build_model(name, options, shape, config.seed, config.cuts or (), config.stages)
    arguments = bind_model(name, MODELS[name], options, config.seed)
    if name == "gpt2":
        path = str(arguments.get("path", "gpt2"))
        if path in GPT2 and not Path(path).exists():
            notes.append(f"Model: {path} by its published size, its weights not read.")
            blocks, width, heads = GPT2[path]
            name, arguments = (
                "gpt",
                {"num_blocks": blocks, "width": width, "num_heads": heads, "tied": True, "dropout": 0.1},
            )
    return make_structure(name, MODELS[name], {"shape": shape, **arguments})
