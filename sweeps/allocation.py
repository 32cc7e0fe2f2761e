"""Resources of a sweep: engine and share of its trials, how many run in parallel, and the wait until the first fits."""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.config import ConfigError, RunConfig
from raysim.engine.connection import first_reason, lost_nodes, node_address
from raysim.engine.ray_internals import cpus_by_driver
from raysim.engine.resources import GRAINS, Demand, Waiting, free_resources, shortage, stages_that_fit, total_resources
from raysim.pipeline.prepare import prepare
from raysim.storage.places import PlaceError, check_answers, in_bucket
from raysim.sweeps.study import Study, workers
from raysim.training.checkpoint import KEPT
from raysim.units import apart, format_bytes, plural

DRIVER = {"memory": 1.0}  # bundle of the trial actor, which only waits; a bundle cannot be empty
PROCESS_BYTES = 1 << 30  # of a trial's process beside its stages: Python, torch, and the data of small models
LOOK_S = 5.0  # between two checks of the cluster
ANSWER_S = 60.0  # limit for a node to check for a file
TRY_S = 0.5  # between two attempts to get resources
FREED_S = 10.0  # wait for the resources of a run that has just ended

Node = Mapping[str, float]  # a node's resources by kind, as Ray names them


class Share(NamedTuple):
    """Resources that each process of a trial reserves, and the number of parallel trials."""

    cpus: float
    gpus: float
    jobs: int

    def bundles(self, config: RunConfig, engine: str) -> list[dict[str, float]]:
        """Return a trial's bundles: one process with the inline engine; on Ray the trial actor and one per stage actor."""
        stage = {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})
        if engine == "inline":
            return [stage]
        return [dict(DRIVER), *[dict(stage) for _ in range(workers(config))]]


class Need(NamedTuple):
    """The engine of trials, and a trial's memory in bytes: 0 if it is unknown, or is GPU memory."""

    engine: str
    memory_bytes: int = 0


def choose_engine(
    config: RunConfig, nodes: Sequence[Node], stages_bytes: Callable[[], int], given: str = "auto"
) -> Need:
    """Return the `given` engine, or for "auto" the one that suits the study's base, with the memory of its trials.

    Both engines give bit-identical results. One process per trial avoids calls and copies between processes, so it is chosen
    unless stages use GPUs, or no node has enough memory for all stages together. `stages_bytes` counts that, see `count_bytes`.
    """
    other = Need("ray" if given == "auto" else given)
    gpus = config.gpus_per_stage or (config.device != "cpu" and any(node.get("GPU") for node in nodes))
    if config.device == "cuda" or gpus or not stages_bytes():
        return other
    inline = Need("inline", stages_bytes() + PROCESS_BYTES)
    fits = any(node.get("memory", 0.0) >= inline.memory_bytes for node in nodes)
    return inline if given == "inline" or (given == "auto" and fits) else Need("ray", stages_bytes())


class TrialBytes(NamedTuple):
    """Bytes of a trial: zeros if this machine cannot build it, for instance without its data."""

    memory: int = 0
    checkpoint: int = 0


def count_bytes(config: RunConfig) -> TrialBytes:
    """Return the bytes of a trial in memory, and of one of its checkpoints.

    A trial holds its model, of which its stages are copies, and the most of a step or of a resume: the state, the checkpoint read,
    and the largest worker's part of it twice more, as bytes and as tensors. Writing a checkpoint takes no more.
    """
    try:
        plan = prepare(config).plan
    except ConfigError:  # the trials will report it
        return TrialBytes()
    parts: Counter[int] = Counter()  # by worker
    for replica, stage in plan.places:
        parts[plan.worker(replica, stage)] += plan.memories[stage].checkpoint_bytes
    checkpoint = sum(parts.values())
    step = sum(plan.memories[stage].total_bytes for _, stage in plan.places)
    model = sum(memory.weights_bytes for memory in plan.memories)
    return TrialBytes(model + max(step, 2 * (checkpoint + max(parts.values()))), checkpoint)


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

    Resources configured for a stage are kept. By default a stage gets one CPU, or an equal share if there are
    fewer. `growing`: the cluster may grow for more `jobs`. `elastic`: an autoscaler adds nodes, so a stage gets a whole CPU.
    `memory_bytes`: the memory of a trial, which bounds the number of parallel trials unless `jobs` is given. Raises ConfigError
    if fewer than `jobs` trials fit, or none.
    """
    processes = 1 if engine == "inline" else stages
    cpus_free, gpus_free = (sum(node.get(kind, 0.0) for node in nodes) for kind in ("CPU", "GPU"))
    cpus_given = config.cpus_per_stage if elastic or "cpus_per_stage" in config.model_fields_set else None
    if jobs is None:
        limits = [int(cpus_free / (processes * (cpus_given or 1.0)) + 1e-9)]
        if config.gpus_per_stage:
            limits.append(int(gpus_free / (processes * config.gpus_per_stage)))
        if memory_bytes:
            limits.append(_by_memory(engine, nodes, memory_bytes))
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
    """Return the GPUs of each of `count` processes: as configured, or an equal share of at most one."""
    gpus = config.gpus_per_stage
    if gpus is None:
        gpus = min(1.0, gpus_free / count) if config.device != "cpu" else 0.0
        if config.device == "cuda" and not gpus:
            raise ConfigError("`device` = 'cuda' needs a GPU, and Ray has none free. Set `device` to 'auto' or 'cpu'.")
        gpus = 1 / -(-1 // gpus) if 0 < gpus < 1 else gpus  # 1/n of a GPU, so that no share spans two
    return _grains(gpus) / GRAINS


def _cpu_shares(given: float | None, nodes: Sequence[Node], count: int) -> list[float]:
    """Return the CPUs available to each of `count` processes, largest first: as configured, or shares of a node's CPUs."""
    if given is not None:
        return [given]
    first = min(1.0, sum(node.get("CPU", 0.0) for node in nodes) / count)
    parts = {node.get("CPU", 0.0) / divisor for node in nodes for divisor in range(1, count + 1)}
    return [first, *sorted((part for part in parts if part < first), reverse=True)]


def _by_memory(engine: str, nodes: Iterable[Node], memory_bytes: int) -> int:
    """Return how many trials fit into the memory of nodes; the stages of one may lie on several, unless they share a process."""
    free = [node.get("memory", 0.0) for node in nodes]
    return int(sum(free) // memory_bytes) if engine == "ray" else sum(int(each // memory_bytes) for each in free)


def _grains(amount: float) -> int:
    """Return a resource in ten-thousandths, rounded down so that shares never add up to more than the total."""
    return int(amount * GRAINS + 1e-6)


def fair_limit(running: int, free: int, capacity: int, waiting: bool, others: int) -> int:
    """Return how many trials may run in parallel, given `running` trials and resources for `free` more.

    While another driver waits, a sweep starts no trials beyond its equal share of the cluster's `capacity`, in trials;
    it always keeps one.

    >>> fair_limit(running=6, free=0, capacity=6, waiting=False, others=1)
    6
    >>> fair_limit(running=6, free=0, capacity=6, waiting=True, others=1)
    3
    """
    limit = capacity // (1 + others) if waiting else running + free
    return max(1, min(limit, capacity))


@dataclass
class Allocation:
    """The engine of a sweep's trials, their share of the machines, and how many may run in parallel.

    `processes`: processes per trial. `shared`: the cluster has other drivers and may grow or shrink, so the number of parallel
    trials changes; `jobs` limits it, if given. `memory_bytes`: the memory of a trial, or 0. `elastic`: an autoscaler starts
    nodes for waiting trials, so all `jobs` begin unless another driver waits. `checkpoint_bytes`: bytes of one run's
    checkpoint, or 0 if unknown.
    """

    engine: str
    share: Share
    processes: int
    jobs: int | None = None
    memory_bytes: int = 0
    shared: bool = False
    elastic: bool = False
    checkpoint_bytes: int = 0

    def __post_init__(self) -> None:
        self._looked, self._limit = time.monotonic(), self.share.jobs
        self.now = max(1, min(self.share.jobs, self._fitting(free_resources()))) if self.shared else self.share.jobs
        """Trials that fit at the start: fewer than `share.jobs` beside other users, or before further nodes join."""

    @property
    def starting(self) -> int | None:
        """Number of trials that may start together; None to start one by one, so that others see which trials wait."""
        return self.share.jobs if not self.shared or (self.elastic and self.jobs is not None) else None

    def trials(self, running: int) -> int:
        """Return the number of trials that may run in parallel, including the `running` trials."""
        if self.shared and time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            own_job = ray.get_runtime_context().get_job_id()
            others = [driver for driver in cpus_by_driver() if driver.job != own_job]
            waiting = any(driver.waiting > 0 for driver in others)
            free, capacity = self._fitting(free_resources()), self._fitting(total_resources())
            self._limit = fair_limit(running, free, capacity, waiting, len(others))
            if self.jobs is not None:
                self._limit = self.jobs if self.elastic and not waiting else min(self._limit, self.jobs)
        return self._limit

    def _fitting(self, by_node: Mapping[str, dict[str, float]]) -> int:
        """Return the number of trials that fit into the resources of nodes."""
        nodes = by_node.values()
        by_cpu = sum(stages_that_fit(node, self.share.cpus, self.share.gpus) for node in nodes) // self.processes
        return min(by_cpu, _by_memory(self.engine, nodes, self.memory_bytes)) if self.memory_bytes else by_cpu

    @property
    def needs(self) -> str:
        """Description of a trial's resources."""
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return f"a trial needs {processes} with {self.share.cpus:g} CPU{' each' if self.processes > 1 else ''}"


def allocate(study: Study, out: str, *, shared: bool, wait_s: float | None, check: Callable[[], None]) -> Allocation:
    """Wait until one trial fits, and return the allocation of the study's trials.

    `out`: the study's folder, visible to all nodes, or its URI. `shared`: the cluster has other users; trials wait at
    most `wait_s` seconds for free resources, by default the base's `timeout_s` while an autoscaler starts nodes. `check` is called
    during the wait, and may raise. Raises ConfigError if no trial fits.
    """
    growing_s = wait_s or study.config({}).timeout_s
    waiting = Waiting()
    seen: set[str] = set()
    counted = cache(partial(count_bytes, study.config({})))  # builds the model: once, not at each try

    def stages_bytes() -> int:
        return counted().memory

    with Demand() as demand:
        while True:
            check()
            if shared and (unseen := free_resources().keys() - seen):
                _check_seen(out, unseen)
                seen |= unseen
                waiting.restart()  # the check starts a process on every node
            elastic = shared and demand.growing
            limit_s = growing_s if elastic else (FREED_S if wait_s is None else wait_s)
            try:
                allocation = _fit(study, stages_bytes, shared=shared, elastic=elastic)
            except ConfigError as error:  # nodes of the cluster may still be starting
                if waiting.seconds >= (growing_s if elastic else wait_s or 0.0):
                    raise ConfigError(f"{str(error).rstrip('.')}{demand.words}.") from None
                lacks = str(error).rstrip(".")
                if not elastic or demand.reached(_first_bundles(study, stages_bytes), TRY_S):
                    time.sleep(TRY_S)
            else:
                bundles = allocation.share.bundles(study.config({}), allocation.engine)
                if not shared or demand.reached(bundles, TRY_S):
                    return replace(allocation, checkpoint_bytes=counted().checkpoint)
                lacks = allocation.needs
            if waiting.seconds >= limit_s:
                raise ConfigError(f"{shortage(lacks, demand)}.")
            waiting.tell(partial(shortage, lacks, demand))


def _fit(study: Study, stages_bytes: Callable[[], int], *, shared: bool, elastic: bool) -> Allocation:
    base = study.config({})
    nodes = [node for node in (total_resources() if shared else free_resources()).values() if node.get("CPU")]
    engine, memory_bytes = need = choose_engine(base, nodes, stages_bytes, study.engine)
    stages = study.most_workers
    share = fit(base, nodes, stages, jobs=study.jobs, growing=shared, elastic=elastic, **need._asdict())
    processes = 1 if engine == "inline" else stages
    bound = 0 if study.jobs else memory_bytes  # who gives a number of jobs knows their memory
    return Allocation(engine, share, processes, study.jobs, bound, shared=shared, elastic=elastic)


def _first_bundles(study: Study, stages_bytes: Callable[[], int]) -> list[dict[str, float]]:
    """Return the bundles of one trial, so that an autoscaler starts large enough nodes."""
    base = study.config({})
    nodes = [node for node in total_resources().values() if node.get("CPU")] or [{"memory": math.inf}]
    gpus = base.gpus_per_stage if base.gpus_per_stage is not None else float(base.device == "cuda")
    return Share(base.cpus_per_stage, gpus, 1).bundles(
        base, choose_engine(base, nodes, stages_bytes, study.engine).engine
    )


def _check_seen(out: str, by: Iterable[str]) -> None:
    """Raise ConfigError if one of these nodes cannot see the study's folder or reach its bucket."""
    mark = None if in_bucket(out) else Path(out) / ".seen-by-all"
    if mark is not None:
        mark.unlink(missing_ok=True)  # a link there could lead anywhere
        mark.touch(exist_ok=False)

    @ray.remote(num_cpus=0)
    def find_problem(mark: Path | None, out: str) -> str | None:
        if mark is not None:
            return None if mark.is_file() else ""
        try:
            check_answers(out)
        except PlaceError as error:
            return str(error)
        return None

    try:
        nodes = {
            find_problem.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                mark, out
            ): node
            for node in by
        }
        left, deadline = list(nodes), time.monotonic() + ANSWER_S
        while left:  # the first problem ends the wait for the others
            ready, _ = ray.wait(left, timeout=max(0.0, deadline - time.monotonic()))
            answer = (ready or left)[0]
            left.remove(answer)
            _check_answer(answer, nodes[answer], out)
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)


def _check_answer(answer: ray.ObjectRef[str | None], node: str, out: str) -> None:
    """Raise ConfigError if a living node has a problem with the study's folder, or has not answered."""
    try:
        problem = ray.get(answer, timeout=TRY_S)
    except RayError as error:
        if lost_nodes([node]):
            return
        raise ConfigError(f"Node {node_address(node)} of the cluster runs nothing: {first_reason(error)}.") from None
    if problem is None:
        return
    if in_bucket(out):
        raise ConfigError(
            f"`out` must be a bucket that every node reaches, but on node {node_address(node)} {problem.rstrip('.')}. Give the "
            "credentials to every node (docs/clusters.md)."
        )
    raise ConfigError(
        f"`out` must be a path that every node sees, or a URI, but node {node_address(node)} does not see {out}."
    )


def full_disk(study: Study, checkpoint_bytes: int, folder: Path) -> str | None:
    """Return a sentence if the checkpoints of a study's runs, of so many bytes each, may exceed the free space of its folder.

    A race without `checkpoint_every_steps` keeps checkpoints of runs that may continue: none of dense, which trains each run to
    its end.
    """
    every, seeds = study.config({}).checkpoint_every_steps, study.planned_seeds or len(study.seeds)
    thin = study.race is not None and not every
    runs = (study.most_trials - thin) * seeds
    needed, free = runs * checkpoint_bytes * (KEPT if every else 1), shutil.disk_usage(folder).free
    if needed <= free:
        return None
    fix = "" if study.race is None or thin else ", or `checkpoint_every_steps` = 0 for the least"
    sizes = apart(format_bytes, needed, free)
    return (
        f"Checkpoints of {plural(runs, 'run')} may take {sizes[0]}, but {folder} has {sizes[1]} free: make room, "
        f"or give another folder{fix}."
    )
