"""Resources of a Ray cluster: each node's capacity for stages, the drivers that hold the rest, and waiting for more."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from raysim.config import ConfigError, RunConfig
from raysim.engine.ray_internals import DriverCpus, Scaling, cpus_by_driver, draining_nodes, free_by_node, scaling
from raysim.limits import MemoryLimit
from raysim.network.memory import StageMemory, check_memory
from raysim.pipeline.errors import WorkerLostError

GRAINS = 10_000  # units of a resource in Ray
AT_FIRST_S = 5.0  # for a run that has just ended to free its resources
AGAIN_S = 30.0  # for lost workers to free their resources before they are restarted
TRY_S = 0.5  # wait for a placement group in each try
SHOWN_COMMAND = 80  # characters of another driver's command
SHOWN_REASON = 200  # characters of a cloud's error message
FIRST_S = 10.0  # of waiting before the first message
EVERY_S = 30.0  # between further messages
LOOK_S = 1.0  # between two looks at the autoscaler
LAUNCH_S = 30.0  # without a new or starting node, the autoscaler counts as exhausted


def check_memories(
    memories: Sequence[StageMemory], capacity: MemoryLimit | Mapping[Any, int], nodes: Sequence[str] | None = None
) -> None:
    """Raise ConfigError, with the arithmetic, if the stages on a node need more than its memory.

    `capacity`: the limit of this machine, or the bytes of each node.
    """
    try:
        check_memory(memories, capacity.size if isinstance(capacity, MemoryLimit) else capacity, nodes)
    except ValueError as error:
        limit = f" {str(capacity)[0].upper()}{str(capacity)[1:]}." if isinstance(capacity, MemoryLimit) else ""
        raise ConfigError(f"{error}{limit}") from None


def total_resources() -> dict[str, dict[str, float]]:
    """Return the resources of each living node of the cluster, ordered by address."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    alive.sort(key=lambda node: ([part.zfill(3) for part in node["NodeManagerAddress"].split(".")], node["NodeID"]))
    return {node["NodeID"]: dict(node["Resources"]) for node in alive}


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each living node that is not about to leave, ordered by address."""
    free, leaving = free_by_node(), draining_nodes()
    return {node: free.get(node, {}) for node in total_resources() if node not in leaving}


def equal_share(count: int) -> float:
    """Return an equal share of a GPU for `count` stages, rounded down to Ray's resolution of 1/10,000.

    Ray rounds to nearest, so six shares of 1/6 would exceed one GPU.

    >>> equal_share(4), equal_share(6)
    (0.25, 0.1666)
    """
    return (GRAINS // count) / GRAINS


def gpus_of_stage(
    config: RunConfig, num_workers: int, free: Mapping[str, Mapping[str, float]], *, elastic: bool = False
) -> float:
    """Return the GPUs of each stage: as configured, or an equal share of all free ones, at most one.

    `elastic`: an autoscaler may add GPUs; if none is free, it adds one per stage. Raises ConfigError if the stages need a GPU but
    none is free or can be added.
    """
    if config.gpus_per_stage is not None:
        return config.gpus_per_stage
    total = sum(resources.get("GPU", 0.0) for resources in free.values())
    if config.device == "cuda" and total < 1:
        if elastic:
            return 1.0
        raise ConfigError("`device` = 'cuda' needs a GPU, and Ray has none free. Set `device` to 'auto' or 'cpu'.")
    return equal_share(-(-num_workers // int(total))) if total >= 1 and config.device != "cpu" else 0.0


def stages_that_fit(free: dict[str, float], cpus: float, gpus: float) -> int:
    """Return how many stages fit on a node. A stage's fraction of a GPU must come from a single GPU."""
    gpus = round(gpus * GRAINS) / GRAINS
    fits = free.get("CPU", 0.0) / cpus
    if gpus:
        whole, rest = divmod(free.get("GPU", 0.0), 1)
        fits = min(fits, whole * int(1 / gpus + 1e-9) + rest / gpus if gpus <= 1 else whole / gpus)
    return int(fits + 1e-9)


def workers_that_fit(free: Mapping[str, dict[str, float]], cpus: float, gpus: float) -> dict[str, int]:
    """Return how many workers, each with these CPUs and GPUs, fit in each node's free resources."""
    return {node: stages_that_fit(resources, cpus, gpus) for node, resources in free.items()}


def wait_for_capacity(
    config: RunConfig, num_workers: int, gpus: float | None, wait_s: float
) -> tuple[dict[str, dict[str, float]], float]:
    """Wait until all workers fit, and return the free resources of each node and the GPUs of each worker.

    `gpus`: GPUs of each worker in a restart, None at the first start. Missing resources are requested from an autoscaler.
    Raises ConfigError (WorkerLostError in a restart) if workers do not fit in time: within `wait_s`, at least the few seconds
    in which ended workers free their resources, or within the run's `timeout_s` while an autoscaler starts nodes.
    """
    again, waiting = gpus is not None, Waiting()
    limit_s = max(wait_s, min(AGAIN_S if again else AT_FIRST_S, config.timeout_s))
    with Demand() as demand:
        while True:
            free = free_resources()
            if gpus is None:
                gpus = gpus_of_stage(config, num_workers, free, elastic=config.device == "cuda" and demand.elastic)
            fitting = sum(workers_that_fit(free, config.cpus_per_stage, gpus).values())
            if fitting >= num_workers:
                return free, gpus
            wanted = f"{config.cpus_per_stage:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
            needed = f"{num_workers} workers of {wanted} each do not fit: there is capacity for {fitting}"
            bundle = {"CPU": config.cpus_per_stage} | ({"GPU": gpus} if gpus else {})
            if demand.elastic and demand.reached([bundle] * num_workers, TRY_S):
                demand.leave()
                time.sleep(TRY_S)  # until Ray reports them as free
            if waiting.seconds >= (max(limit_s, wait_s or config.timeout_s) if demand.growing else limit_s):
                sentence = (
                    f"{shortage(needed, demand)}. Lower `cpus_per_stage` or `gpus_per_stage`, or use fewer stages."
                )
                raise WorkerLostError(sentence) if again else ConfigError(sentence)
            waiting.tell(partial(shortage, needed, demand))
            time.sleep(0.1 if waiting.seconds < AGAIN_S else 1.0)  # killed actors free their resources a moment later


def describe_driver(driver: DriverCpus) -> str:
    """Describe a driver by its user, command (without the path of Python), address and CPUs."""
    command = re.sub(r"^.*?(/raysim|-m raysim\.cli)(?= )", "raysim", driver.command)
    command = command if len(command) <= SHOWN_COMMAND else f"{command[:SHOWN_COMMAND]}..."
    return f"{f'{driver.user}: ' if driver.user else ''}`{command}` on {driver.address} ({driver.held:g} CPU)"


def shortage(needed: str, demand: Demand | None = None) -> str:
    """Describe a shortage: `needed`, the cluster's free CPUs, the drivers that hold the rest, and the autoscaler's answer."""
    import ray

    own = ray.get_runtime_context().get_job_id()
    total = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    others = [describe_driver(driver) for driver in cpus_by_driver() if driver.held and driver.job != own]
    by = f"; the rest is held by {' and '.join(others)}: `--wait SECONDS` waits for it" if others else ""
    return f"{needed}; {free:g} of {total:g} CPU are free{by}{demand.words if demand is not None else ''}"


class Waiting:
    """Prints the reason for a wait after `FIRST_S` seconds, then every `EVERY_S`.

    >>> waiting = Waiting(print)
    >>> waiting.tell(lambda: "nothing is said at once")
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or (lambda line: print(line, file=sys.stderr, flush=True))
        self.restart()

    def restart(self) -> None:
        """Restart the wait from zero."""
        self._began = time.monotonic()
        self._next_s = FIRST_S

    @property
    def seconds(self) -> float:
        """Seconds waited so far."""
        return time.monotonic() - self._began

    def tell(self, sentence: Callable[[], str]) -> None:
        """Print the sentence if a message is due."""
        if self.seconds >= self._next_s:
            self._next_s = self.seconds + EVERY_S
            self._say(f"waiting for room since {self.seconds:.0f} s: {sentence()}")


class Demand(AbstractContextManager["Demand"]):
    """A driver's request for missing resources in Ray's queue, visible to autoscalers and other drivers.

    It is a placement group: several drivers can each have one, and it ends with its driver. With
    `ray.autoscaler.sdk.request_resources` a cluster keeps only the last call, which also counts resources already held.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._bundles: list[dict[str, float]] = []
        self._asked_s = 0.0  # Unix time
        self._progress = 0.0  # when a node last started or joined
        self._num_nodes = 0
        self._looked = -LOOK_S
        self._scaling: Scaling | None = None

    def __exit__(self, *error: object) -> None:
        self.leave()

    @property
    def elastic(self) -> bool:
        """True if an autoscaler may add nodes to the cluster."""
        self._look()
        return self._scaling is not None

    def reached(self, bundles: Sequence[dict[str, float]], wait_s: float) -> bool:
        """Queue for resources; return whether they came within `wait_s` seconds. If so, they are held until `leave`."""
        import ray

        if self._group is None or self._bundles != list(bundles):
            self.leave()
            self._bundles = list(bundles)
            self._group = ray.util.placement_group(self._bundles)
            self._asked_s, self._progress = time.time(), time.monotonic()
        return bool(self._group.wait(wait_s))

    def leave(self) -> None:
        """Leave the queue, and release held resources."""
        import ray

        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None

    @property
    def growing(self) -> bool:
        """True while an autoscaler may still add nodes: it has shown progress in the last `LAUNCH_S` seconds, or was not asked."""
        return self.elastic and (self._group is None or time.monotonic() - self._progress <= LAUNCH_S)

    @property
    def words(self) -> str:
        """The autoscaler's answer to the demand, as the end of a sentence; "" without an autoscaler."""
        if not self.elastic or self._scaling is None:
            return ""
        if self._scaling.starting:
            count = sum(self._scaling.starting.values())
            kinds = ", ".join(sorted(self._scaling.starting))
            return f"; the autoscaler starts {count} node{'s' if count > 1 else ''} ({kinds})"
        if self._scaling.failures:
            return f"; the autoscaler cannot start a node: {self._scaling.failures[-1][:SHOWN_REASON].rstrip('.')}"
        if self.growing:
            return "; the autoscaler is asked for nodes"
        return (
            "; the autoscaler starts no node for them: no type of node fits, or all are at their maximum (`ray status`)"
        )

    def _look(self) -> None:
        """Read the autoscaler's report, at most every `LOOK_S` seconds."""
        import ray

        if time.monotonic() - self._looked < LOOK_S:
            return
        self._scaling = scaling(self._asked_s) or self._scaling  # a head may be slow to answer
        num_nodes = sum(node["Alive"] for node in ray.nodes())  # type: ignore[no-untyped-call]
        report = self._scaling
        if num_nodes > self._num_nodes or (report is not None and (report.starting or report.failures)):
            self._progress = time.monotonic()
        self._num_nodes = num_nodes
        self._looked = time.monotonic()
