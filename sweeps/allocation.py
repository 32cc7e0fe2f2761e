"""The resources of a sweep at its start: its share of the machines, and the wait until the first trial fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.config import ConfigError
from raysim.engine.connection import first_reason, lost_nodes, node_address
from raysim.engine.resources import Demand, Waiting, free_resources, shortage, total_resources
from raysim.storage.places import PlaceError, in_bucket, open_system
from raysim.sweeps.study import Study
from raysim.sweeps.trial_resources import Need, Share, SharedCapacity, choose_engine, fit

ANSWER_S = 60.0  # for a node to look for a file
TRY_S = 0.5  # between two attempts to get resources
FREED_S = 10.0  # that a sweep waits for the resources of a run that has just ended


class Allocation(NamedTuple):
    """The engine of a sweep's trials, their share of the machines, and how many may run at once."""

    engine: str
    share: Share
    processes: int
    """Of each trial."""
    capacity: SharedCapacity | None
    """The changing number of trials at once, on a cluster with other users."""
    now: int
    """Trials that fitted at the start: fewer than `share.jobs` beside other users, or before further nodes join."""

    def trials(self, running: int) -> int:
        """Return the number of trials that may run at once, including the `running` trials."""
        return self.share.jobs if self.capacity is None else self.capacity.trials(running)

    @property
    def needs(self) -> str:
        """The resources of a trial, in words."""
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return f"a trial needs {processes} with {self.share.cpus:g} CPU{' each' if self.processes > 1 else ''}"


def allocate(
    study: Study, workers: int, out: str, *, shared: bool, wait_s: float | None, check: Callable[[], None]
) -> Allocation:
    """Return the share of the machines for trials of up to `workers` worker processes, once one trial fits.

    `out`: the study's folder, visible to all nodes, or its URI. `shared`: the cluster has other users; trials wait at
    most `wait_s` seconds for free resources, by default the base's `timeout_s` while an autoscaler starts nodes. `check` is called
    during the wait, and may raise. Raises ConfigError if no trial fits.
    """
    growing_s = wait_s or study.config({}).timeout_s
    waiting = Waiting()
    seen: set[str] = set()
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
                allocation = _fit(study, workers, shared=shared, elastic=elastic)
            except ConfigError as error:  # the nodes of a cluster may be on their way
                if waiting.seconds >= (growing_s if elastic else wait_s or 0.0):
                    raise ConfigError(f"{str(error).rstrip('.')}{demand.words}.") from None
                lacks = str(error).rstrip(".")
                if not elastic or demand.reached(_first_bundles(study, workers), TRY_S):
                    time.sleep(TRY_S)
            else:
                bundles = allocation.share.bundles(study.config({}), allocation.engine)
                if not shared or demand.reached(bundles, TRY_S):
                    return allocation
                lacks = allocation.needs
            if waiting.seconds >= limit_s:
                raise ConfigError(f"{shortage(lacks, demand)}.")
            waiting.tell(partial(shortage, lacks, demand))


def _fit(study: Study, workers: int, *, shared: bool, elastic: bool) -> Allocation:
    base, free = study.config({}), free_resources()
    nodes = [node for node in (total_resources() if shared else free).values() if node.get("CPU")]
    need = choose_engine(base, nodes) if study.engine == "auto" else Need(study.engine)
    share = fit(base, nodes, workers, jobs=study.jobs, growing=shared, elastic=elastic, **need._asdict())
    processes = 1 if need.engine == "inline" else workers
    if not shared:
        return Allocation(need.engine, share, processes, None, share.jobs)
    capacity = SharedCapacity(share, processes, study.jobs, need.memory_bytes, elastic=elastic)
    now = max(1, min(share.jobs, capacity.fitting(free)))
    return Allocation(need.engine, share, processes, capacity, now)


def _first_bundles(study: Study, workers: int) -> list[dict[str, float]]:
    """Return what one trial reserves, for an autoscaler to start nodes that can hold it."""
    base = study.config({})
    nodes = [node for node in total_resources().values() if node.get("CPU")] or [{"memory": math.inf}]
    engine = choose_engine(base, nodes).engine if study.engine == "auto" else study.engine
    gpus = base.gpus_per_stage if base.gpus_per_stage is not None else float(base.device == "cuda")
    return Share(base.cpus_per_stage, gpus, 1).bundles(base, engine)


def _check_seen(out: str, by: Iterable[str]) -> None:
    """Raise ConfigError if one of these nodes does not see the study's folder, or does not reach its bucket."""
    mark = None if in_bucket(out) else Path(out) / ".seen-by-all"
    if mark is not None:
        mark.touch()

    @ray.remote(num_cpus=0)
    def find_problem(mark: Path | None, out: str) -> str | None:
        if mark is not None:
            return None if mark.is_file() else ""
        try:
            open_system(out)
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
