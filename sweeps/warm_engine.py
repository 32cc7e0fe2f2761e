"""The engine on Ray with warm stage actors: they live as long as the trial actor that owns them, and serve one run after another."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysim.engine.actor import start_actor
from raysim.engine.nodes import nodes_of_workers
from raysim.engine.ray import RayEngine
from raysim.engine.resources import check_memories
from raysim.pipeline.averaging import warm_run
from raysim.pipeline.prepare import Workload
from raysim.workloads.data import Data

LOOK_S = 1.0  # between two checks of the placement group of starting actors
REPLACE_S = 10.0  # for which a trial keeps its other bundles while waiting for a lost one


class ResourcesLostError(Exception):
    """The remaining nodes have no resources for a stage of a lost node: the trial must reserve again."""


class WarmActors:
    """The stage actors of one trial actor, made on first use, and again after any failure."""

    def __init__(self) -> None:
        self.actors: list[Any] = []
        self.made = 0  # how often actors were created
        self._data: tuple[Data, Any] | None = None

    def gather(self, count: int) -> list[Any]:
        """Return `count` actors, in the bundles after the first of this actor's placement group."""
        if len(self.actors) != count:
            self.dismiss()
            group = _group()
            self.made += 1
            for i in range(1, count + 1):
                bundle = group.bundle_specs[i]
                self.actors.append(
                    start_actor(
                        num_cpus=bundle.get("CPU", 0.0),
                        num_gpus=bundle.get("GPU", 0.0),
                        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i),
                    )
                )
        return self.actors

    def await_start(self, answers: Sequence[Any], limit_s: float) -> None:
        """Wait at most `limit_s` until all actors have answered, or one has failed.

        Raises ResourcesLostError if the placement group lacks a lost bundle for `REPLACE_S`: otherwise two trials that each hold
        CPUs needed by the other would wait forever.
        """
        group, deadline, complete = _group(), time.monotonic() + limit_s, time.monotonic()
        while ray.wait(list(answers), num_returns=len(answers), timeout=LOOK_S)[1] and time.monotonic() < deadline:
            if ray.util.placement_group_table(group)["state"] == "CREATED":
                complete = time.monotonic()
            elif time.monotonic() - complete > REPLACE_S:
                raise ResourcesLostError(f"no node had resources for its lost stages for {REPLACE_S:g} s")

    @property
    def gpus(self) -> float:
        return float(_group().bundle_specs[1].get("GPU", 0.0))

    def data(self, data: Data) -> Any:
        """Return a reference to `data`, stored once for all runs with the same data."""
        if self._data is None or self._data[0] is not data:
            self._data = (data, ray.put(data))
        return self._data[1]

    def dismiss(self) -> None:
        """End the actors; others are made on the next use."""
        for actor in self.actors:
            with suppress(Exception):  # a lost cluster has no actors
                ray.kill(actor)
        self.actors = []


def _group() -> PlacementGroup:
    group = ray.util.get_current_placement_group()
    assert group is not None
    return group


class WarmEngine(RayEngine):
    """The engine on Ray with actors that outlive it."""

    def __init__(self, workload: Workload, warm: WarmActors) -> None:
        super().__init__(workload)
        self._warm = warm

    def check(self) -> None:
        """Check nothing: the placement group reserves resources, and `start` checks memory when the actors' nodes are known."""

    def start(self) -> None:
        if self.incarnation:  # after a loss
            self._warm.dismiss()
        hosts = self._warm.gather(self.num_workers)
        self._nodes = []  # not known yet
        answers = [host.whereabouts.remote() for host in hosts]
        self._warm.await_start(answers, self.plan.config.timeout_s)
        places = self._fetch(answers)
        free = defaultdict[str, list[Any]](list)
        for host, (node, _) in sorted(zip(hosts, places, strict=True), key=lambda pair: pair[1][0]):
            free[node].append(host)
        self._nodes = nodes_of_workers(self.workload, {node: len(actors) for node, actors in free.items()})
        self._actors = [free[node].pop(0) for node in self._nodes]
        if not self._warm.gpus:
            check_memories(self.all_memories, dict(places), self.by_stage(self._nodes))
        warm_run(self.plan)  # see RayEngine
        self._enlist()

    def _store(self) -> tuple[Any, list[Any], Any]:
        modules = [self._modules(worker) for worker in range(self.num_workers)]
        return ray.put(self.plan), modules, self._warm.data(self.workload.data)

    def fits_elsewhere(self) -> bool:
        """Return False: the bundles of a placement group stay until their node is gone."""
        return False

    @property
    def device_kind(self) -> str:
        return "cuda" if self._warm.gpus else "cpu"

    def close(self) -> None:
        """Leave the actors to the next run."""
        self._actors = []
