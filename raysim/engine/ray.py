"""The engine on Ray: one actor per worker; the actors exchange packets directly."""

from __future__ import annotations

import math
import os
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from raysim.config import ConfigError
from raysim.engine.actor import pickle_model_code, start_actor
from raysim.engine.connection import (
    PATIENCE_S,
    check_address,
    dashboard_sentence,
    end_ray,
    first_reason,
    join_cluster,
    lost_nodes,
    node_address,
    start_ray,
)
from raysim.engine.delivery import find_limits
from raysim.engine.engine import Engine, Ref
from raysim.engine.nodes import Reach, check_on_one_node, nodes_of_workers
from raysim.engine.ray_internals import draining_nodes
from raysim.engine.resources import check_memories, free_resources, wait_for_capacity, workers_that_fit
from raysim.engine.watch import RayWatch
from raysim.limits import node_memory, usable_cpus
from raysim.pipeline.averaging import warm_run
from raysim.pipeline.errors import DivergedError, StageError, WorkerLostError
from raysim.pipeline.prepare import Workload
from raysim.pipeline.worker import Worker

GREET_S = 30.0  # for workers that exchange packets to reach one another
LISTEN_S = 1.0  # between two checks of Ray's servers while the driver waits
LOOK_S = 5.0  # between two looks for nodes that are about to leave


class RayEngine(Engine):
    """Runs one actor per worker, on a running cluster (`RAY_ADDRESS`) or on a private Ray on this machine."""

    kind: ClassVar[str] = "ray"
    can_restart = True

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._actors: list[Any] = []
        self._nodes: list[str] = []  # of each worker, once placed
        self._watch: RayWatch | None = None  # on Ray's servers
        self._private = False  # this run started Ray itself, and its CPUs are only counted
        self._gpus: float | None = None  # of each stage, set by the first start
        self._looked_s = 0.0
        self._stored: tuple[Ref, list[Any], Ref] | tuple[()] = ()

    def check(self) -> None:
        import ray

        if ray.is_initialized():
            return
        if address := os.environ.get("RAY_ADDRESS"):
            check_address(address, "`RAY_ADDRESS`")
        else:
            check_on_one_node(self.plan.config.placement)
            check_memories(self.all_memories, node_memory())

    def start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if self._private and self.loss() is not None:  # start a new Ray in place of the lost one
            self._disconnect()
        self._stop_actors()
        if not ray.is_initialized():
            self.on_phase("Ray's servers")
            self._connect()
        plan, config = self.plan, self.plan.config
        self.on_phase(None)
        self._nodes = self._place()
        if self.incarnation and len(set(self._nodes)) > 1:
            on = (f"{self._stages_on(node)} on {node_address(node)}" for node in dict.fromkeys(self._nodes))
            print(f"the run continues with {'; '.join(on)}", file=sys.stderr, flush=True)
        self.on_phase("kernels that are compiled")
        warm_run(plan)  # compile once here; the workers on this machine load the result from disk
        self.on_phase(f"the processes of {self.num_workers} workers, which import torch")
        self._actors = [
            start_actor(
                name=self._name(worker),
                num_cpus=config.cpus_per_stage,
                num_gpus=self._gpus,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            for worker, node in enumerate(self._nodes)
        ]
        self._fetch([actor.__ray_ready__.remote() for actor in self._actors])
        self._enlist()

    def _name(self, worker: int) -> str:
        """Return the name of a worker's actor on Ray's dashboard, unique in the cluster."""
        stages = [str(stage) for stage in self._stages(worker)]
        words = f"replica {worker // len(self.plan.rows)}, stage{'s' if len(stages) > 1 else ''} {', '.join(stages)}"
        return f"{self.plan.config.name}: {words} ({uuid.uuid4().hex[:8]})"

    def _enlist(self) -> None:
        """Turn the actors into workers, and check that peers reach each other."""
        self._session, self._turn = uuid.uuid4().hex, 0
        try:
            self._hand_over()
            self.on_phase(f"the models of {self.num_workers} workers")
            self._fetch(
                [
                    actor.take.remote(
                        self._session,
                        {peer: self._actors[peer] for peer in self.plan.peers(worker)},
                        partial(Worker, index=worker, device=self.device_kind),
                    )
                    for worker, actor in enumerate(self._actors)
                ]
            )
        except StageError as error:
            raise StageError(f"a stage could not be made: {error}") from None
        self.on_phase("calls between the workers")
        self._greet()
        first = [self._actors[self._nodes.index(node)] for node in dict.fromkeys(self._nodes)]
        limits = find_limits(first, self._fetch, near=len(first) == 1)
        self._fetch([actor.bound.remote(limits) for actor in self._actors])
        self.call_bytes = limits.call

    def _hand_over(self) -> None:
        """Send each actor its model and data through the object store.

        If a server of a private Ray is lost while the driver holds objects, Ray's core ends the driver without a message, so they
        are freed immediately. On a cluster they are kept for restarted stages.
        """
        plan, modules, data = stored = self._stored or self._store()
        self._stored = () if self._private else stored
        ends = {0, self.plan.num_stages - 1}  # only these need data
        self._fetch(
            [
                actor.keep.remote(
                    plan=plan,
                    modules=modules[worker],
                    data=data if not ends.isdisjoint(self._stages(worker)) else None,
                )
                for worker, actor in enumerate(self._actors)
            ]
        )

    def _store(self) -> tuple[Ref, list[Any], Ref]:
        """Store the plan, the model of each worker, and the data."""
        import ray

        self.on_phase("Ray to store the model and the data")
        pickle_model_code()
        modules = [ray.put(self._modules(worker)) for worker in range(self.num_workers)]
        return ray.put(self.plan), modules, ray.put(self.workload.data)

    def _greet(self) -> None:
        """Let each worker call its peers; the error names the first pair of nodes that cannot reach each other."""
        timeout_s = min(self.plan.config.timeout_s / 2, GREET_S)
        unreached = self._fetch([actor.greet.remote(timeout_s) for actor in self._actors])
        for worker, peers in enumerate(unreached):
            for peer in peers:
                here, there = node_address(self._nodes[worker]), node_address(self._nodes[peer])
                sentence = (
                    f"Node {there} must take calls of node {here}, but worker {peer} there did not answer worker {worker} "
                    f"within {timeout_s:g} s. Open Ray's ports between all nodes."
                )
                raise WorkerLostError(sentence) if self.incarnation else ConfigError(sentence)

    @property
    def device_kind(self) -> str:
        return "cuda" if self._gpus else "cpu"

    @property
    def gpu_share(self) -> float:
        return min(1.0, self._gpus or 1.0)

    def close(self) -> None:
        if self._watch is not None and self._watch.lost and not self._private:  # Ray would wait for the lost head
            self._watch.end()
            return
        self._stop_actors()
        self._disconnect()

    def _disconnect(self) -> None:
        """End this engine's connection to Ray, and its private Ray if it started one."""
        self._stored = ()
        if self._watch is not None:
            self._actors = []
            end_ray(self._watch)
            self._watch = None

    def node_speeds(self) -> list[tuple[str, float]]:
        nodes = list(dict.fromkeys(self._nodes))
        if len(nodes) == 1:
            return []
        measured = self._fetch([self._actors[self._nodes.index(node)].speed.remote() for node in nodes])
        speeds = {node: (node_address(node), speed) for node, speed in zip(nodes, measured, strict=True)}
        return [speeds[node] for node in self._nodes]

    def node_reaches(self) -> dict[str, Reach]:
        if len(set(self._nodes)) == 1:
            return {}
        reaches: dict[str, Reach] = {}
        for node, reach in zip(self._nodes, self._fetch([actor.reach.remote() for actor in self._actors]), strict=True):
            address = node_address(node)
            reaches[address] = max(reaches.get(address, reach), reach, key=lambda reach: reach.farthest_s)
        return reaches

    def leaving(self) -> str | None:
        if self._private or time.monotonic() - self._looked_s < LOOK_S:
            return None
        self._looked_s = time.monotonic()
        draining = draining_nodes()
        return self._each_with_stages("is about to leave", [node for node in self._nodes if node in draining]) or None

    def fits_elsewhere(self) -> bool:
        cpus, gpus = self.plan.config.cpus_per_stage, self._gpus or 0.0
        free = free_resources()
        for node in (node for node in self._nodes if node in free):  # their workers are stopped first
            free[node] |= {"CPU": free[node].get("CPU", 0.0) + cpus, "GPU": free[node].get("GPU", 0.0) + gpus}
        return sum(workers_that_fit(free, cpus, gpus).values()) >= self.num_workers

    def clock_offsets_s(self) -> list[float]:
        """Offset 0 on the driver's node; on others, the offset in the fastest of ten calls."""
        import ray

        offsets = []
        here = ray.get_runtime_context().get_node_id()
        for worker, node in enumerate(self._nodes):
            best = (float("inf"), 0.0)
            for _ in range(0 if node == here else 10):
                before = time.perf_counter()
                (there,) = self._fetch([self._submit(worker, "clock_s")])
                after = time.perf_counter()
                best = min(best, (after - before, there - (before + after) / 2))
            offsets.append(best[1])
        return offsets

    def _connect(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = os.environ.get("RAY_ADDRESS")
        self._private = not address

        def on_lost(watch: RayWatch) -> None:
            self.on_stuck(watch.sentence)

        if address:
            self._watch = join_cluster(address, "`RAY_ADDRESS`", on_lost, PATIENCE_S)
        else:
            wanted = math.ceil(self.num_workers * self.plan.config.cpus_per_stage)
            self._watch = start_ray(
                num_cpus=max(wanted, usable_cpus()),  # stages may share cores, as their records show
                dashboard=self.dashboard,
                on_lost=on_lost,
                patience_s=PATIENCE_S,
            )
        if self.dashboard and self._watch.dashboard_url:
            print(dashboard_sentence(self._watch.dashboard_url), file=sys.stderr, flush=True)

    def _place(self) -> list[str]:
        """Return the node of each worker; raises the errors of `wait_for_capacity` and `nodes_of_workers`."""
        config = self.plan.config
        free, self._gpus = wait_for_capacity(config, self.num_workers, self._gpus, self.wait_s)
        nodes = nodes_of_workers(self.workload, workers_that_fit(free, config.cpus_per_stage, self._gpus))
        if not self._private and not self._gpus:  # stages on a GPU use its memory instead
            capacity = {node: int(resources.get("memory", 0.0)) for node, resources in free.items()}
            check_memories(self.all_memories, capacity, self.by_stage(nodes))
        return nodes

    def _stop_actors(self) -> None:
        import ray

        if self.loss() is not None:  # the actors end with Ray
            self._actors = []
        for actor in self._actors:
            with suppress(Exception):  # a lost cluster has no actors left
                ray.kill(actor)
        self._actors = []

    def _perform(self, workers: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        self._turn += 1
        return self._fetch([self._actors[worker].perform.remote(self._turn, method, *arguments) for worker in workers])

    def _submit(self, worker: int, method: str, *arguments: Any) -> Ref:
        return self._actors[worker].call.remote(method, *arguments)

    def _fetch(self, refs: list[Ref]) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        timeout_s = self.plan.config.timeout_s
        deadline = time.monotonic() + timeout_s
        try:
            while True:
                if self._watch is not None and self._watch.lost and (loss := self.loss()):
                    raise loss
                with suppress(GetTimeoutError):
                    return list(ray.get(refs, timeout=min(LISTEN_S, timeout_s)))
                if time.monotonic() >= deadline:
                    raise WorkerLostError(f"no answer within `timeout_s` = {timeout_s:g} s")
        except RayTaskError as error:
            for ref in refs:  # fetch the other failures too, or Ray reports each as unhandled
                with suppress(RayError):
                    ray.get(ref, timeout=timeout_s)
            cause = error.cause
            if isinstance(cause, (DivergedError, StageError, WorkerLostError)):
                raise cause from None
            if isinstance(cause, RayError):
                raise WorkerLostError(self._loss(cause)) from None
            raise StageError(f"{type(cause).__name__}: {cause}") from None
        except RayError as error:  # an actor, a node or an object is gone
            raise WorkerLostError(self._loss(error)) from None

    def loss(self) -> WorkerLostError | None:
        if self._watch is None or not (self._watch.lost or (self._private and self._watch.look())):
            return None
        self._watch.end()
        self.can_restart = self._private  # the head of a cluster does not come back
        return WorkerLostError(self._watch.sentence)

    def _loss(self, error: Exception) -> str:
        """Return the lost nodes and the stages on them, or Ray's reason if all nodes live."""
        if (loss := self.loss()) is not None:
            raise loss
        lost = lost_nodes(self._nodes)
        if lost and self._private and self._watch is not None:  # its only node
            self._watch.confirm()
            if (loss := self.loss()) is not None:
                raise loss
        return self._each_with_stages("is lost", lost) or first_reason(error)

    def _each_with_stages(self, fate: str, nodes: Sequence[str]) -> str:
        """Return a sentence on the fate of some nodes and the stages on each; "" for no nodes."""
        return " and ".join(
            f"node {node_address(node)} {fate} with {self._stages_on(node)}" for node in dict.fromkeys(nodes)
        )

    def _stages_on(self, node: str) -> str:
        """Return the stages on a node in words."""
        several = self.plan.num_replicas > 1
        names = [
            f"{stage} of replica {replica}" if several else str(stage)
            for replica, stage in self.plan.places
            if self._nodes[self.plan.worker(replica, stage)] == node
        ]
        return f"stage{'s' if len(names) > 1 else ''} {', '.join(names)}"

    def _put(self, value: Any) -> Ref:
        import ray

        return ray.put(value)
