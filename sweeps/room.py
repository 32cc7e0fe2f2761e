"""Room for trials: the engine that they run on, a stage's share of the machine, and how many trials fit at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raysim.config import ConfigError, RunConfig
from raysim.engine.resources import GRAINS, room_for
from raysim.pipeline.plan import prepare
from raysim.sweeps.study import workers

DRIVER = {"memory": 1.0}  # bundle of the trial actor, which only waits; a bundle cannot be empty
PROCESS_BYTES = 1 << 30  # of a trial's process beside its stages: Python, torch, and the data of small models


class Share(NamedTuple):
    """Resources that a stage reserves, and the number of trials at once."""

    cpus: float
    gpus: float
    jobs: int

    def bundles(self, config: RunConfig, engine: str) -> list[dict[str, float]]:
        """Return a trial's reservation: its own, and one for each stage actor."""
        stage = {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})
        if engine == "inline":
            return [stage]
        return [dict(DRIVER), *[dict(stage) for _ in range(workers(config))]]


class Need(NamedTuple):
    """The engine of trials, and the bytes that one takes of a node's memory where all its stages share a process."""

    engine: str
    memory_bytes: int = 0


def choose_engine(config: RunConfig, nodes: Sequence[dict[str, float]]) -> Need:
    """Return the engine for a study that leaves it open, by its base.

    Both give the same bits. One process a trial has no calls and copies between processes, so it is chosen unless stages
    would have GPUs, or no node has memory for all stages together.
    """
    if config.device == "cuda" or (config.device != "cpu" and any(node.get("GPU") for node in nodes)):
        return Need("ray")
    try:
        plan = prepare(config).plan
    except ConfigError:  # such as data that only the nodes have: the trials will tell
        return Need("ray")
    stages_bytes = sum(plan.memories[stage].total_bytes for _, stage in plan.places)
    need = Need("inline", stages_bytes + PROCESS_BYTES)
    return need if any(node.get("memory", 0.0) >= need.memory_bytes for node in nodes) else Need("ray")


def fit(
    config: RunConfig,
    nodes: Sequence[dict[str, float]],
    stages: int,
    *,
    engine: str,
    jobs: int | None,
    growing: bool,
    memory_bytes: int = 0,
) -> Share:
    """Return a share of the free resources of `nodes` for trials of up to `stages` worker processes.

    The configuration's resources of a stage are kept. The others are fitted: a CPU a stage where there is one, otherwise an equal
    part. `growing`: the cluster may grow for more `jobs`. `memory_bytes`: of a trial in one process, which bounds the number of
    trials at once. Raises ConfigError where not one trial fits, or not `jobs`.
    """
    actors = 1 if engine == "inline" else stages
    cpus_free, gpus_free = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    given = config.model_fields_set
    wanted_cpus = config.cpus_per_stage if "cpus_per_stage" in given else 1.0
    if jobs is None:
        by_cpu = int(cpus_free / (actors * wanted_cpus) + 1e-9)
        by_gpu = int(gpus_free / (actors * config.gpus_per_stage)) if config.gpus_per_stage else by_cpu
        by_memory = sum(int(node.get("memory", 0.0) // memory_bytes) for node in nodes) if memory_bytes else by_cpu
        wanted_jobs = max(1, min(by_cpu, by_gpu, by_memory))
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
        kind = f"1 process with {asked}" if engine == "inline" else f"{actors} stages with {asked} each"
        here = f"{cpus_free:g} CPU" + (f" and {gpus_free:g} GPU" if gpus_free else "")
        raise ConfigError(
            f"{wanted_jobs} trials of {kind} must fit into {here} on {len(nodes)} nodes, but {fits} do. "
            "Lower `jobs`, `cpus_per_stage` or `gpus_per_stage`, or use fewer stages."
        )
    return Share(cpus, gpus, wanted_jobs)


def _grains(amount: float) -> int:
    """Return how many ten-thousandths a resource is, rounded down: parts must not add up to more than there is."""
    return int(amount * GRAINS + 1e-6)
