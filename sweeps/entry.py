"""The entry of a sweep into a cluster: its trials' share of the machines, and the wait for room for the first one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.config import ConfigError
from raysim.engine.cluster import lost_nodes, node_address
from raysim.engine.init import first_reason
from raysim.engine.occupancy import Waiting, room_sentence
from raysim.engine.resources import free_resources, total_resources
from sweeps.allotment import Allotment
from sweeps.room import Need, Share, choose_engine, fit
from sweeps.study import Study

SEE_S = 60.0  # for a node to look for a file
TRY_S = 0.5  # between two looks for room
FREED_S = 10.0  # how long a sweep waits for what a run that has just ended still holds


class Entry(NamedTuple):
    """The engine of a sweep's trials, their share of the machines, and the bound on their number where others share them."""

    need: Need
    share: Share
    processes: int
    allotment: Allotment | None

    def trials(self, going: int) -> int:
        """Return the number of trials that may go on at once, `going` of which do."""
        return self.share.jobs if self.allotment is None else self.allotment.trials(going)

    @property
    def trial_words(self) -> str:
        """A trial and the CPUs that it reserves."""
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return f"a trial of {processes} with {self.share.cpus:g} CPU{' each' if self.processes > 1 else ''}"


def enter(
    study: Study, workers: int, folder: Path | None, *, shared: bool, wait_s: float | None, check: Callable[[], None]
) -> Entry:
    """Return the share of the machines for trials of up to `workers` worker processes, once there is room for one trial.

    `folder`: the study's folder where it is a path, which all nodes must see. `shared`: the cluster is used by others, so that
    trials wait for what they hold, `wait_s` at most. `check` is called while it waits, and may raise. Raises ConfigError where
    there is no room.
    """
    limit_s = wait_s if wait_s is not None else FREED_S
    waiting, queue = Waiting(), _Queue()
    checked = folder is None
    try:
        while True:
            check()
            by_node = total_resources() if shared else free_resources()
            nodes = [node for node in by_node.values() if node.get("CPU")]
            if folder is not None and len(nodes) > 1 and not checked:
                _check_seen(folder)
                checked = True
                waiting.restart()  # the check starts a process on every node
            try:
                entry = _fit(study, workers, nodes, shared=shared)
            except ConfigError as error:  # the nodes of a cluster may be on their way
                if waiting.seconds >= (wait_s or 0.0):
                    raise
                lacks = str(error).rstrip(".")
                time.sleep(TRY_S)
            else:
                if not shared or queue.reached(entry.share.bundles(study.config({}), entry.need.engine)):
                    return entry
                lacks = f"{entry.trial_words} needs room"
            if waiting.seconds >= limit_s:
                raise ConfigError(f"{room_sentence(lacks)}.")
            waiting.tell(partial(room_sentence, lacks))
    finally:
        queue.leave()


def _fit(study: Study, workers: int, nodes: Sequence[dict[str, float]], *, shared: bool) -> Entry:
    base = study.config({})
    need = choose_engine(base, nodes) if study.engine == "auto" else Need(study.engine)
    share = fit(
        base, nodes, workers, engine=need.engine, jobs=study.jobs, growing=shared, memory_bytes=need.memory_bytes
    )
    processes = 1 if need.engine == "inline" else workers
    return Entry(need, share, processes, Allotment(share, processes, study.jobs, need.memory_bytes) if shared else None)


class _Queue:
    """A place in Ray's queue for the resources of one trial, by which others see that a sweep waits."""

    def __init__(self) -> None:
        self._group: PlacementGroup | None = None

    def reached(self, bundles: list[dict[str, float]]) -> bool:
        """Queue up, and return whether the resources were there within `TRY_S`."""
        if self._group is None:
            self._group = ray.util.placement_group(bundles)
        return bool(self._group.wait(TRY_S))

    def leave(self) -> None:
        """Leave the queue; the first trial asks for the resources itself."""
        if self._group is not None:
            ray.util.remove_placement_group(self._group)
            self._group = None


def _check_seen(folder: Path) -> None:
    """Raise ConfigError where a node of the cluster does not see the study's folder."""
    mark = folder / ".seen-by-all"
    mark.touch()

    @ray.remote(num_cpus=0)
    def sees(path: str) -> bool:
        return Path(path).is_file()

    try:
        for node in free_resources():
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            try:
                seen = ray.get(sees.options(scheduling_strategy=strategy).remote(str(mark.absolute())), timeout=SEE_S)
            except RayError as error:
                if lost_nodes([node]):
                    continue
                raise ConfigError(
                    f"Node {node_address(node)} of the cluster runs nothing: {first_reason(error)}."
                ) from None
            if not seen:
                raise ConfigError(
                    f"`out` must be a path that every node sees, or a URI, but node {node_address(node)} does not see {folder}."
                )
    finally:
        mark.unlink(missing_ok=True)
