"""Structure and stage costs of a recipe's model and data, without allocation or downloads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from raysim.codecs.codec import DTYPES
from raysim.config import RunConfig
from raysim.forecast.evidence import CONVOLUTIONAL, ELSEWHERE, RECURRENT, SCRATCH, TRANSFORMER, UNKNOWN, Scope
from raysim.forecast.shapes import StageCost, Unit
from raysim.forecast.timings import read_toml_or_json
from raysim.notation import InputError, check_integer
from raysim.pipeline.plan import tied_shapes
from raysim.pipeline.prepare import task_of
from raysim.workloads.data import DATASETS, load_data
from raysim.workloads.models import MODELS, bind_model, build_model, make_structure
from raysim.workloads.options import bind_options
from raysim.workloads.partition import Partition, partition
from raysim.workloads.splits import DataShape
from raysim.workloads.stage_costs import Shadow, named_layers

CIFAR = {
    "cifar10": (DataShape((3, 32, 32), "float32", 10), 50_000),
    "cifar100": (DataShape((3, 32, 32), "float32", 100), 50_000),
}
WIKITEXT2 = (50_257, 2_391_884)  # GPT-2's vocabulary, and the training text's length in its tokens
KINDS = {
    **dict.fromkeys(("gpt", "gpt2"), TRANSFORMER),
    **dict.fromkeys(("cnn", "resnet18", "resnet101", "vgg16"), CONVOLUTIONAL),
    "lstm": RECURRENT,
}
GPT2 = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}


def data_of(config: RunConfig, notes: list[str]) -> tuple[DataShape, int]:
    """Return the shape and number of training samples, without fetching data sets from the hub."""
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
    """Return the model with parameters that take no memory; a model in Python is built for real."""
    name, options = config.model.name, config.model.options
    if name not in MODELS:
        return build_model(name, options, shape, config.seed, config.cuts or (), config.stages)
    arguments = bind_model(name, MODELS[name], options, config.seed)
    if name == "gpt2":
        path = str(arguments.get("path", "gpt2"))
        if path in GPT2 and not Path(path).exists():
            notes.append(f"Model: {path} by its published size, its weights not read.")
            blocks, width, heads = GPT2[path]
            name = "gpt"
            arguments = {"num_blocks": blocks, "width": width, "num_heads": heads, "tied": True, "dropout": 0.1}
    return make_structure(name, MODELS[name], {"shape": shape, **arguments})


@dataclass(frozen=True)
class RecipeModel:
    """A recipe's model and data; the first call of `stages` builds its structure."""

    config: RunConfig
    samples_name: ClassVar[str] = "samples"

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.config.name

    @property
    def num_parameters(self) -> int:
        """Number of trained values of the model."""
        return self.stages(1, 1)[0].num_parameters

    @property
    def layers(self) -> int:
        """The maximum number of stages."""
        return len(_structure(self.config)[1])

    @property
    def num_steps(self) -> int:
        """Steps of the recipe's run, counted from its data if the run is given in epochs."""
        if self.config.steps is not None:
            return self.config.steps
        return (self.config.epochs or 0) * (data_of(self.config, [])[1] // self.config.batch_size)

    @property
    def scope(self) -> Scope:
        """The model's description for a lookup in raysim's findings; a path or a start means trained weights."""
        name, options = self.config.model.name, self.config.model.options
        trained = self.config.start is not None or name == "gpt2" or options.get("path") is not None
        return Scope(_kind(name, options), self.num_parameters, ELSEWHERE if trained else SCRATCH, self.name)

    @lru_cache(maxsize=64)  # noqa: B019  a model lives as long as its command
    def tied_sizes(self, num_stages: int) -> tuple[tuple[tuple[int, ...], int], ...]:
        """Return the stages of each tied parameter, and its number of values."""
        shapes = tied_shapes(_parts(self.config, num_stages, 1))
        return tuple((stages, math.prod(shape)) for stages, shape in shapes)

    def stages(self, num_stages: int, samples: int) -> list[StageCost]:
        """Return the costs of a microbatch at each of `num_stages` stages, cut as in a run; raises InputError."""
        try:
            return list(_stages(self.config, num_stages, samples))
        except ValueError as error:
            raise InputError(str(error)) from None


def _kind(name: str, options: Mapping[str, Any]) -> str:
    """Return the kind of a model, by its name; of transformers' models, by the type in their configuration."""
    if name != "hf":
        return KINDS.get(name, UNKNOWN)
    config = options.get("config") or options.get("path")
    if isinstance(config, str):
        file = Path(config).expanduser()
        file = file / "config.json" if file.is_dir() else file
        config = read_toml_or_json(file) if file.is_file() else {}
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    return CONVOLUTIONAL if kind in ("resnet", "convnext") else TRANSFORMER


@lru_cache(maxsize=1)
def _structure(config: RunConfig) -> tuple[DataShape, nn.Sequential]:
    shape, _ = data_of(config, [])
    return shape, structure_of(config, shape, [])


@lru_cache(maxsize=4)
def _shadow(config: RunConfig, samples: int) -> Shadow:
    shape, model = _structure(config)
    return Shadow(model, shape, samples, task_of(config, shape).loss)


def _parts(config: RunConfig, num_stages: int, samples: int) -> Partition:
    shape, model = _structure(config)
    return partition(model, shape, num_stages=num_stages, batch=samples, shadow=_shadow(config, samples))


@lru_cache(maxsize=64)
def _stages(config: RunConfig, num_stages: int, samples: int) -> tuple[StageCost, ...]:
    if config.bottleneck is not None:
        raise InputError(f"{config.name} has a `bottleneck`, which only `raysim simulate` prices.")
    parts = _parts(config, num_stages, samples)
    if any(boundary.several for boundary in parts.boundaries):
        raise InputError(f"{config.name} sends several tensors across a boundary, which only `raysim simulate` prices.")
    outputs = [*(boundary.shape for boundary in parts.boundaries), ()]
    stages = []
    footprints = parts.footprints(two_parts=True, dtype=DTYPES[config.dtype])
    for stage, (module, used) in enumerate(zip(parts.stages, footprints, strict=True)):
        flops = float(parts.flops_forward[stage])
        layers = parts.shadow.layers[slice(*parts.spans[stage])]
        stages.append(
            StageCost(
                forward_flops=flops,
                weight_share=used.weight_share,
                parameters=Counter(tuple(parameter.shape) for parameter in module.parameters()),
                saved_bytes=used.saved,
                workspace_bytes=max(used.forward, used.backward, used.weights, used.first) - used.saved,
                output=outputs[stage],
                units=tuple(
                    Unit(float(layer.flops), sum(parameter.numel() for parameter in part.parameters()))
                    for layer, part in zip(layers, named_layers(module).values(), strict=True)
                ),
            )
        )
    return tuple(stages)
