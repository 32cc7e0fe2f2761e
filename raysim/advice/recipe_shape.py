"""The model of a recipe, cut into any number of stages: counted on its structure, as `raysim simulate` does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from raysim.advice.stage_cost import StageCost, Unit
from raysim.config import RunConfig
from raysim.forecast.structure import data_of, structure_of
from raysim.notation import InputError
from raysim.pipeline.prepare import task_of
from raysim.workloads.partition import partition


@dataclass(frozen=True)
class RecipeModel:
    """A recipe's model and data; the first call of `stages` builds its structure."""

    config: RunConfig

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.config.name

    @property
    def samples_name(self) -> str:
        """The samples' name in tables."""
        return "samples"

    @property
    def num_parameters(self) -> int:
        """Number of values that the model learns."""
        return self.stages(1, 1)[0].num_parameters

    @property
    def num_layers(self) -> int:
        """Most stages that the model can be cut into."""
        return _layers(self.config)

    def stages(self, num_stages: int, samples: int) -> list[StageCost]:
        """Return the costs of a microbatch at each of `num_stages` stages, cut as raysim cuts; raises InputError."""
        try:
            return list(_stages(self.config, num_stages, samples))
        except ValueError as error:
            raise InputError(str(error)) from None


@lru_cache(maxsize=1)
def _layers(config: RunConfig) -> int:
    shape, _ = data_of(config, [])
    return len(structure_of(config, shape, []))


@lru_cache(maxsize=64)
def _stages(config: RunConfig, num_stages: int, samples: int) -> tuple[StageCost, ...]:
    shape, _ = data_of(config, [])
    model = structure_of(config, shape, [])
    parts = partition(model, shape, num_stages=num_stages, batch=samples, loss=task_of(config, shape).loss)
    if any(boundary.several for boundary in parts.boundaries):
        raise InputError(f"Several tensors cross a boundary of {config.name}: `raysim simulate` prices them.")
    outputs = [*(boundary.shape for boundary in parts.boundaries), ()]
    found = []
    for stage, (module, used) in enumerate(zip(parts.stages, parts.footprints(two_parts=True), strict=True)):
        flops = float(parts.flops_forward[stage])
        layers = parts.shadow.layers[slice(*parts.spans[stage])]
        found.append(
            StageCost(
                forward_flops=flops,
                weight_flops=2 * flops * used.weight_share if stage else flops,
                parameters=Counter(tuple(parameter.shape) for parameter in module.parameters()),
                saved_bytes=used.saved,
                workspace_bytes=max(used.forward, used.backward, used.weights, used.first) - used.saved,
                output=outputs[stage],
                units=tuple(
                    Unit(float(layer.flops), sum(parameter.numel() for parameter in part.parameters()))
                    for layer, part in zip(layers, module.children(), strict=True)
                ),
            )
        )
    return tuple(found)
