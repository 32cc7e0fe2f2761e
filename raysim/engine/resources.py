"""The resources of a Ray cluster: the capacity of its nodes for stages, and the drivers that hold the rest."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from raysim.config import ConfigError, RunConfig
from raysim.engine.demand import Demand
from raysim.engine.ray_internals import DriverCpus, cpus_by_driver, draining_nodes, free_by_node
from raysim.limits import MemoryLimit
from raysim.network.memory import StageMemory, check_memory
from raysim.pipeline.errors import WorkerLostError

GRAINS = 10_000  # of a resource in Ray
AT_FIRST_S = 5.0  # that workers wait for resources of a run that has just ended
AGAIN_S = 30.0  # that restarted workers wait for the resources of their predecessors
TRY_S = 0.5  # that a position in Ray's queue is looked at
SHOWN = 80  # characters of another driver's command
FIRST_S = 10.0  # of waiting, after which the first message comes
EVERY_S = 30.0  # between further messages


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
    """Return the resources of each living node of the cluster, by their addresses in order."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    alive.sort(key=lambda node: ([part.zfill(3) for part in node["NodeManagerAddress"].split(".")], node["NodeID"]))
    return {node["NodeID"]: dict(node["Resources"]) for node in alive}


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each living node of the cluster that is to stay, in the order of their addresses."""
    free, leaving = free_by_node(), draining_nodes()
    return {node: free.get(node, {}) for node in total_resources() if node not in leaving}


def equal_share(count: int) -> float:
    """Return the share of a GPU of each of `count` stages, rounded down to the ten-thousandths in which Ray counts.

    Ray rounds to the nearest: six times a sixth would be more than one.

    >>> equal_share(4), equal_share(6)
    (0.25, 0.1666)
    """
    return (GRAINS // count) / GRAINS


def gpus_of_stage(
    config: RunConfig, num_workers: int, free: Mapping[str, Mapping[str, float]], *, elastic: bool = False
) -> float:
    """Return the GPUs of each stage: as configured, or an equal share of all free ones, at most one.

    `elastic`: an autoscaler may add GPUs, one for each stage if none is free. Raises ConfigError if the stages need a GPU and there
    will be none.
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
    """Return how many stages fit on a node. A fraction of a GPU is of one GPU: rests of several do not add up."""
    gpus = round(gpus * GRAINS) / GRAINS
    fits = free.get("CPU", 0.0) / cpus
    if gpus:
        whole, rest = divmod(free.get("GPU", 0.0), 1)
        fits = min(fits, whole * int(1 / gpus + 1e-9) + rest / gpus if gpus <= 1 else whole / gpus)
    return int(fits + 1e-9)


def workers_that_fit(free: Mapping[str, dict[str, float]], cpus: float, gpus: float) -> dict[str, int]:
    """Return how many workers of some CPUs and GPUs each node can hold, by its free resources."""
    return {node: stages_that_fit(resources, cpus, gpus) for node, resources in free.items()}


def wait_for_capacity(
    config: RunConfig, num_workers: int, gpus: float | None, wait_s: float
) -> tuple[dict[str, dict[str, float]], float]:
    """Return the free resources of each node, enough for all workers, and the GPUs of each worker.

    `gpus` of workers that start again, None of others. An autoscaler is asked for what is missing. Raises ConfigError if there is not
    enough within `wait_s` seconds, or the few that others need to end, or the run's `timeout_s` while an autoscaler starts nodes;
    WorkerLostError if workers start again.
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
            asked = f"{config.cpus_per_stage:g} CPU" + (f" and {gpus:g} GPU" if gpus else "")
            needed = f"{num_workers} workers of {asked} each need room, and there is room for {fitting}"
            bundle = {"CPU": config.cpus_per_stage} | ({"GPU": gpus} if gpus else {})
            if demand.elastic and demand.reached([bundle] * num_workers, TRY_S):
                demand.leave()
                time.sleep(TRY_S)  # until they are seen as free for the workers
            if waiting.seconds >= (max(limit_s, wait_s or config.timeout_s) if demand.growing else limit_s):
                sentence = (
                    f"{shortage(needed, demand)}. Lower `cpus_per_stage` or `gpus_per_stage`, or use fewer stages."
                )
                raise WorkerLostError(sentence) if again else ConfigError(sentence)
            waiting.tell(partial(shortage, needed, demand))
            time.sleep(0.1 if waiting.seconds < AGAIN_S else 1.0)  # killed actors free theirs a moment later


def described(driver: DriverCpus) -> str:
    """Return a driver by its user, command without the path of Python, address and CPUs."""
    command = re.sub(r"^.*?(/raysim|-m raysim\.cli)(?= )", "raysim", driver.command)
    command = command if len(command) <= SHOWN else f"{command[:SHOWN]}..."
    return f"{f'{driver.user}: ' if driver.user else ''}`{command}` on {driver.address} ({driver.held:g} CPU)"


def shortage(needed: str, demand: Demand | None = None) -> str:
    """Return `needed`, the free CPUs of the cluster, the drivers that hold the others, and what an autoscaler does about it."""
    import ray

    own = ray.get_runtime_context().get_job_id()
    total = ray.cluster_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    others = [described(driver) for driver in cpus_by_driver() if driver.held and driver.job != own]
    by = f"; the rest is held by {' and '.join(others)}: `--wait SECONDS` waits for it" if others else ""
    return f"{needed}; {free:g} of {total:g} CPU are free{by}{demand.words if demand is not None else ''}"


class Waiting:
    """Prints the reason for waiting after `FIRST_S` seconds, then every `EVERY_S`.

    >>> waiting = Waiting(print)
    >>> waiting.tell(lambda: "nothing is said at once")
    """

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or _to_stderr
        self.restart()

    def restart(self) -> None:
        """Start the wait again from zero."""
        self._began = time.monotonic()
        self._next_s = FIRST_S

    @property
    def seconds(self) -> float:
        """Seconds waited so far."""
        return time.monotonic() - self._began

    def tell(self, sentence: Callable[[], str]) -> None:
        """Print the sentence, if it is due."""
        if self.seconds >= self._next_s:
            self._next_s = self.seconds + EVERY_S
            self._say(f"waiting for room since {self.seconds:.0f} s: {sentence()}")


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
