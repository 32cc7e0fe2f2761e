"""Room for trials: what each stage takes of the machine, how many trials fit at once, and the refusal where none does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raysim.config import ConfigError, RunConfig
from raysim.pipeline.ray_engine import room_for
from sweeps.study import workers

DRIVER = {"memory": 1.0}  # what the trial actor reserves beside its stages, as a bundle needs something: it only waits
GRAINS = 10_000  # in which Ray counts a resource


class Share(NamedTuple):
    """What a stage reserves, and how many trials go on at once."""

    cpus: float
    gpus: float
    jobs: int

    def bundles(self, config: RunConfig, engine: str) -> list[dict[str, float]]:
        """Return a trial's reservation: its own, and one for each stage actor."""
        stage = {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})
        if engine == "inline":
            return [stage]
        return [dict(DRIVER), *[dict(stage) for _ in range(workers(config))]]


def fit(
    config: RunConfig, nodes: Sequence[dict[str, float]], stages: int, *, engine: str, jobs: int | None, growing: bool
) -> Share:
    """Return a share of what `nodes` have free for trials of up to `stages` worker processes.

    What the configuration gives for a stage is kept, the rest fitted: a CPU a stage where there is, else an equal
    part. `growing`: the cluster may grow for more `jobs`. Raises ConfigError where not one trial fits, or not `jobs`.
    """
    actors = 1 if engine == "inline" else stages
    cpus_free, gpus_free = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    given = config.model_fields_set
    wanted_cpus = config.cpus_per_stage if "cpus_per_stage" in given else 1.0
    if jobs is None:
        by_cpu = int(cpus_free / (actors * wanted_cpus) + 1e-9)
        by_gpu = int(gpus_free / (actors * config.gpus_per_stage)) if config.gpus_per_stage else by_cpu
        wanted_jobs = max(1, min(by_cpu, by_gpu))
    else:
        wanted_jobs = jobs
    cpus, gpus = wanted_cpus, config.gpus_per_stage
    if "cpus_per_stage" not in given:
        cpus = min(1.0, cpus_free / (wanted_jobs * actors))
    if gpus is None:
        gpus = min(1.0, gpus_free / (wanted_jobs * actors)) if config.device != "cpu" else 0.0
        if config.device == "cuda" and not gpus:
            raise ConfigError("`device` = 'cuda' needs a GPU, and Ray has none free. Set `device` to 'auto' or 'cpu'.")
        gpus = 1 / -(-1 // gpus) if 0 < gpus < 1 else gpus  # a part that divides a GPU, so that none is cut
    gpus = _grains(gpus) / GRAINS
    sizes = [cpus]
    if "cpus_per_stage" not in given:  # a part of a node's CPUs, the greatest of which there are enough
        parts = {node.get("CPU", 0.0) / count for node in nodes for count in range(1, actors * wanted_jobs + 1)}
        sizes += sorted((part for part in parts if part < cpus), reverse=True)
    for size in sizes:
        cpus = max(_grains(size), 1) / GRAINS
        fits = sum(room_for(node, cpus, gpus) for node in nodes) // actors
        if fits >= wanted_jobs:
            break
    if fits < (1 if growing else wanted_jobs):
        asked = f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
        here = f"{cpus_free:g} CPU" + (f" and {gpus_free:g} GPU" if gpus_free else "")
        raise ConfigError(
            f"{wanted_jobs} trials of {actors} stages with {asked} each must fit into {here} on {len(nodes)} nodes, but {fits} do. "
            "Lower `jobs`, `cpus_per_stage` or `gpus_per_stage`, or use fewer stages."
        )
    return Share(cpus, gpus, wanted_jobs)


def _grains(amount: float) -> int:
    """Return how many ten-thousandths a resource is, rounded down: parts must not add up to more than there is."""
    return int(amount * GRAINS + 1e-6)
