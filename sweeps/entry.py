"""The entry of a sweep into a cluster: its trials' share of the machines, and the wait for room for the first one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
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
from raysim.places import PlaceError, in_bucket, open_system
from raysim.sweeps.allotment import Allotment
from raysim.sweeps.room import Need, Share, choose_engine, fit
from raysim.sweeps.study import Study

SEE_S = 60.0  # for a node to look for a file
TRY_S = 0.5  # between two looks for room
FREED_S = 10.0  # how long a sweep waits for what a run that has just ended still holds


class Entry(NamedTuple):
    """The engine of a sweep's trials, their share of the machines, and the bound on their number where others share them."""

    need: Need
    share: Share
    processes: int
    allotment: Allotment | None
    now: int
    """Trials that had room when the sweep entered; fewer than `share.jobs` beside others, or before further nodes join."""

    def trials(self, going: int) -> int:
        """Return the number of trials that may go on at once, `going` of which do."""
        return self.share.jobs if self.allotment is None else self.allotment.trials(going)

    @property
    def trial_words(self) -> str:
        """A trial and the CPUs that it reserves."""
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return f"a trial of {processes} with {self.share.cpus:g} CPU{' each' if self.processes > 1 else ''}"


def enter(
    study: Study, workers: int, out: str, *, shared: bool, wait_s: float | None, check: Callable[[], None]
) -> Entry:
    """Return the share of the machines for trials of up to `workers` worker processes, once there is room for one trial.

    `out`: the study's folder, which all nodes must see, or its URI, which all must reach. `shared`: the cluster is used by others,
    so that trials wait for what they hold, `wait_s` at most. `check` is called while it waits, and may raise. Raises ConfigError
    where there is no room.
    """
    limit_s = wait_s if wait_s is not None else FREED_S
    waiting, queue = Waiting(), _Queue()
    checked = not shared  # a Ray of this process's own sees what it sees
    try:
        while True:
            check()
            free = free_resources()
            by_node = total_resources() if shared else free
            nodes = [node for node in by_node.values() if node.get("CPU")]
            if not checked:
                _check_seen(out)
                checked = True
                waiting.restart()  # the check starts a process on every node
            try:
                entry = _fit(study, workers, nodes, free, shared=shared)
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


def _fit(
    study: Study,
    workers: int,
    nodes: Sequence[dict[str, float]],
    free: Mapping[str, dict[str, float]],
    *,
    shared: bool,
) -> Entry:
    base = study.config({})
    need = choose_engine(base, nodes) if study.engine == "auto" else Need(study.engine)
    share = fit(
        base, nodes, workers, engine=need.engine, jobs=study.jobs, growing=shared, memory_bytes=need.memory_bytes
    )
    processes = 1 if need.engine == "inline" else workers
    if not shared:
        return Entry(need, share, processes, None, share.jobs)
    allotment = Allotment(share, processes, study.jobs, need.memory_bytes)
    return Entry(need, share, processes, allotment, max(1, min(share.jobs, allotment.room(free))))


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


def _check_seen(out: str) -> None:
    """Raise ConfigError if a node of the cluster does not see the study's folder, or does not reach its bucket."""
    mark = None if in_bucket(out) else Path(out) / ".seen-by-all"
    if mark is not None:
        mark.touch()

    @ray.remote(num_cpus=0)
    def lacks(mark: Path | None, out: str) -> str | None:
        if mark is not None:
            return None if mark.is_file() else ""
        try:
            open_system(out)
        except PlaceError as error:
            return str(error)
        return None

    try:
        asked = {
            lacks.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(mark, out): node
            for node in free_resources()
        }
        left, deadline = list(asked), time.monotonic() + SEE_S
        while left:  # the first that lacks it ends the wait for the others
            ready, _ = ray.wait(left, timeout=max(0.0, deadline - time.monotonic()))
            first = (ready or left)[0]
            left.remove(first)
            _check_answer(first, asked[first], out)
    finally:
        if mark is not None:
            mark.unlink(missing_ok=True)


def _check_answer(answer: ray.ObjectRef[str | None], node: str, out: str) -> None:
    """Raise ConfigError if a living node lacks the study's place, or has not answered."""
    try:
        lacks = ray.get(answer, timeout=TRY_S)
    except RayError as error:
        if lost_nodes([node]):
            return
        raise ConfigError(f"Node {node_address(node)} of the cluster runs nothing: {first_reason(error)}.") from None
    if lacks is None:
        return
    if in_bucket(out):
        raise ConfigError(
            f"`out` must be a bucket that every node reaches, but on node {node_address(node)} {lacks.rstrip('.')}. Give the "
            "credentials to every node (docs/clusters.md)."
        )
    raise ConfigError(
        f"`out` must be a path that every node sees, or a URI, but node {node_address(node)} does not see {out}."
    )
