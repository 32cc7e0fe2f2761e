"""Resources of a sweep's trials: the engine, the share of the machines that each reserves, and how many run at once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import ray

from raysim.config import ConfigError, RunConfig
from raysim.engine.ray_internals import cpus_by_driver
from raysim.engine.resources import GRAINS, free_resources, stages_that_fit, total_resources
from raysim.pipeline.prepare import prepare
from raysim.sweeps.study import workers

DRIVER = {"memory": 1.0}  # bundle of the trial actor, which only waits; a bundle cannot be empty
PROCESS_BYTES = 1 << 30  # of a trial's process beside its stages: Python, torch, and the data of small models
LOOK_S = 5.0  # between two looks at the cluster

Node = Mapping[str, float]  # a node's resources by kind, as Ray names them


class Share(NamedTuple):
    """Resources that each process of a trial reserves, and the number of trials at once."""

    cpus: float
    gpus: float
    jobs: int

    def bundles(self, config: RunConfig, engine: str) -> list[dict[str, float]]:
        """Return a trial's reservation: one process with the inline engine; on Ray its own, and one for each stage actor."""
        stage = {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})
        if engine == "inline":
            return [stage]
        return [dict(DRIVER), *[dict(stage) for _ in range(workers(config))]]


class Need(NamedTuple):
    """The engine of trials, and the memory in bytes of a trial whose stages share a process."""

    engine: str
    memory_bytes: int = 0


def choose_engine(config: RunConfig, nodes: Sequence[Node]) -> Need:
    """Return the engine for a study with `engine` = "auto", by its base.

    Both engines give the same bits. One process per trial avoids calls and copies between processes, so it is chosen
    unless stages use GPUs, or no node has enough memory for all stages together.
    """
    gpus = config.gpus_per_stage or (config.device != "cpu" and any(node.get("GPU") for node in nodes))
    if config.device == "cuda" or gpus:
        return Need("ray")
    try:
        plan = prepare(config).plan
    except ConfigError:  # such as data that only the nodes have: the trials will report it
        return Need("ray")
    stages_bytes = sum(plan.memories[stage].total_bytes for _, stage in plan.places)
    need = Need("inline", stages_bytes + PROCESS_BYTES)
    return need if any(node.get("memory", 0.0) >= need.memory_bytes for node in nodes) else Need("ray")


def fit(
    config: RunConfig,
    nodes: Sequence[Node],
    stages: int,
    *,
    engine: str,
    jobs: int | None,
    growing: bool,
    elastic: bool = False,
    memory_bytes: int = 0,
) -> Share:
    """Return a share of the free resources of `nodes` for trials of up to `stages` worker processes.

    The configuration's resources of a stage are kept. By default a stage gets one CPU, or an equal part if there are
    fewer. `growing`: the cluster may grow for more `jobs`. `elastic`: an autoscaler adds nodes, so a stage gets a whole CPU.
    `memory_bytes`: the memory of a trial in one process, which bounds the number of trials at once. Raises ConfigError if fewer
    than `jobs` trials fit, or none.
    """
    processes = 1 if engine == "inline" else stages
    cpus_free, gpus_free = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    cpus_given = config.cpus_per_stage if elastic or "cpus_per_stage" in config.model_fields_set else None
    if jobs is None:
        limits = [int(cpus_free / (processes * (cpus_given or 1.0)) + 1e-9)]
        if config.gpus_per_stage:
            limits.append(int(gpus_free / (processes * config.gpus_per_stage)))
        if memory_bytes:
            limits.append(_by_memory(nodes, memory_bytes))
        jobs = max(1, min(limits))
    gpus = _gpu_share(config, gpus_free, processes * jobs)
    for size in _cpu_shares(cpus_given, nodes, processes * jobs):
        cpus = max(_grains(size), 1) / GRAINS
        fits = sum(stages_that_fit(dict(node), cpus, gpus) for node in nodes) // processes
        if fits >= jobs:
            break
    if fits < (1 if growing else jobs):
        wanted = f"{cpus:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
        kind = f"1 process with {wanted}" if engine == "inline" else f"{processes} stages with {wanted} each"
        free = f"{cpus_free:g} CPU" + (f" and {gpus_free:g} GPU" if gpus_free else "")
        raise ConfigError(
            f"{jobs} trials of {kind} must fit into {free} on {len(nodes)} nodes, but {fits} do. "
            "Lower `jobs`, `cpus_per_stage` or `gpus_per_stage`, or use fewer stages."
        )
    return Share(cpus, gpus, jobs)


def _gpu_share(config: RunConfig, gpus_free: float, count: int) -> float:
    """Return the GPUs of each of `count` processes: as configured, or an equal part of at most one."""
    gpus = config.gpus_per_stage
    if gpus is None:
        gpus = min(1.0, gpus_free / count) if config.device != "cpu" else 0.0
        if config.device == "cuda" and not gpus:
            raise ConfigError("`device` = 'cuda' needs a GPU, and Ray has none free. Set `device` to 'auto' or 'cpu'.")
        gpus = 1 / -(-1 // gpus) if 0 < gpus < 1 else gpus  # a part that divides a GPU, so that none is cut
    return _grains(gpus) / GRAINS


def _cpu_shares(given: float | None, nodes: Sequence[Node], count: int) -> list[float]:
    """Return the CPUs that each of `count` processes may have, largest first: as configured, or parts of a node's CPUs."""
    if given is not None:
        return [given]
    first = min(1.0, sum(node.get("CPU", 0.0) for node in nodes) / count)
    parts = {node.get("CPU", 0.0) / divisor for node in nodes for divisor in range(1, count + 1)}
    return [first, *sorted((part for part in parts if part < first), reverse=True)]


def _by_memory(nodes: Iterable[Node], memory_bytes: int) -> int:
    return sum(int(node.get("memory", 0.0) // memory_bytes) for node in nodes)


def _grains(amount: float) -> int:
    """Return how many ten-thousandths a resource is, rounded down: parts must not add up to more than there is."""
    return int(amount * GRAINS + 1e-6)


def fair_limit(running: int, free: int, capacity: int, waiting: bool, others: int) -> int:
    """Return how many trials may run at once, if `running` do and `free` more have resources now.

    While another driver waits, a sweep starts no trial beyond its equal share of the cluster, whose `capacity` is counted in
    trials; it always keeps one.

    >>> fair_limit(running=6, free=0, capacity=6, waiting=False, others=1)
    6
    >>> fair_limit(running=6, free=0, capacity=6, waiting=True, others=1)
    3
    """
    limit = capacity // (1 + others) if waiting else running + free
    return max(1, min(limit, capacity))


class SharedCapacity:
    """The number of trials at once on a cluster that other drivers use too, and that grows and shrinks.

    `jobs` limits it, if given. `memory_bytes`: the memory of a trial in one process. `elastic`: an autoscaler starts nodes for trials
    that wait, so all `jobs` begin unless another driver waits.
    """

    def __init__(
        self, share: Share, processes: int, jobs: int | None, memory_bytes: int = 0, *, elastic: bool = False
    ) -> None:
        self._share = share
        self._processes = processes
        self._jobs = jobs
        self._memory_bytes = memory_bytes
        self.asks_for_all = elastic and jobs is not None
        """True if all `jobs` trials begin, so that an autoscaler sees the waiting ones."""
        self._own_job = ray.get_runtime_context().get_job_id()
        self._looked = time.monotonic()
        self._limit = share.jobs

    def trials(self, running: int) -> int:
        """Return the number of trials that may run at once, including the `running` trials."""
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            others = [driver for driver in cpus_by_driver() if driver.job != self._own_job]
            free, capacity = self.fitting(free_resources()), self.fitting(total_resources())
            waiting = any(driver.waiting > 0 for driver in others)
            limit = fair_limit(running, free, capacity, waiting, len(others))
            if self._jobs is not None:
                limit = self._jobs if self.asks_for_all and not waiting else min(limit, self._jobs)
            self._limit = limit
        return self._limit

    def fitting(self, by_node: Mapping[str, dict[str, float]]) -> int:
        """Return the number of trials that fit into the resources of nodes."""
        nodes = by_node.values()
        by_cpu = sum(stages_that_fit(node, self._share.cpus, self._share.gpus) for node in nodes) // self._processes
        return min(by_cpu, _by_memory(nodes, self._memory_bytes)) if self._memory_bytes else by_cpu
