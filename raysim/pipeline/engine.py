"""Engines: who runs the workers. One protocol, written once; inline in this process, or on Ray actors.

The order of submission is the schedule: an actor runs its calls in the order submitted, also while one waits for its
packet. So a step is submitted whole, packets pass from call to call as references, and only the reports of the step's
end are fetched. This module is the only one of raysim that imports Ray.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import nn

from raysim.codecs import kernels
from raysim.config import ConfigError
from raysim.network.memory import check_memory
from raysim.network.schedule import Action, calls, needs, order, sinks
from raysim.pipeline.faults import DivergedError, StageError, WorkerLostError
from raysim.pipeline.plan import Workload
from raysim.pipeline.worker import Evaluated, StepReport, Worker

PLACE_AGAIN_S = 30.0  # how long stages that start again wait for what their predecessors held

Ref = Any  # a value inline, a reference on Ray


class _Call(NamedTuple):
    """A call of a worker's row, and the call whose packet it takes."""

    worker: int
    place: int  # in the worker's row
    source: tuple[int, int] | None


class Engine(ABC):
    """Drives the workers through steps, evaluations and checkpoints."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.plan = plan = workload.plan
        self.incarnation = 0
        self._calls = self._ordered_calls()
        tied = {stage for owners in plan.tied for stage, _ in owners}
        self._owners = sorted({self._worker_of[stage] for stage in tied})

    def _ordered_calls(self) -> list[_Call]:
        """Return all calls of a step in an order that respects rows and packets."""
        plan = self.plan
        self._worker_of = plan.config.parsed_schedule.workers(plan.num_stages)
        call_of: dict[Action, tuple[int, int]] = {}
        firsts: dict[Action, tuple[int, int]] = {}
        for worker, row in enumerate(plan.rows):
            for place, actions in enumerate(calls(row, plan.num_stages)):
                call_of |= dict.fromkeys(actions, (worker, place))
                firsts[actions[0]] = (worker, place)
        ordered = []
        for action in order(plan.rows, plan.num_stages):
            if action in firsts:
                source = needs(action, plan.num_stages)
                ordered.append(_Call(*firsts[action], call_of[source] if source else None))
        self._last_sink = call_of[sinks(plan.rows[self._worker_of[0]])[-1]]
        return ordered

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return len(self.plan.rows)

    def step(self, step: int) -> list[StepReport]:
        """Run one training step on all workers: all of them step, or none does.

        Raises DivergedError, StageError or WorkerLostError; after any of them the workers' memories have moved, and
        only a checkpoint brings them back.
        """
        clip = self.plan.config.optimizer.clip_norm is not None
        everyone = range(self.num_workers)
        inside = (step, self.incarnation)
        packets: dict[tuple[int, int], Ref] = {}
        try:
            for worker, place, source in self._calls:
                packet = (
                    packets.pop(source) if source else None
                )  # passing the reference on drops ours, and frees the packet
                packets[worker, place] = self._submit(worker, "run", *inside, place, packet)
            # Calls run without a gap, so the last backward of the first stage stands for every action of every worker.
            done: list[Ref] = [packets.pop(self._last_sink)]
            packets.clear()
            if self._owners:
                shared = [self._submit(w, "share_tied", *inside, *done, num_returns=2) for w in self._owners]
                payloads = [payload for payload, _ in shared]
                done = [token for _, token in shared]
                done += [self._submit(w, "take_tied", *inside, *payloads) for w in self._owners]
            if clip:
                done = [self._submit(w, "gradient_norm2", *inside, *done) for w in everyone]
            return self._fetch([self._submit(w, "update", *inside, *done) for w in everyone])
        except (DivergedError, StageError) as error:
            raise self._first_fault() or error from None

    def _first_fault(self) -> DivergedError | StageError | None:
        """Return the fault that comes first in the order of actions: the same one in every engine."""
        faults = self._fetch([self._submit(worker, "fault") for worker in range(self.num_workers)])
        place = {action: index for index, action in enumerate(order(self.plan.rows, self.plan.num_stages))}
        found = [fault for fault in faults if fault is not None]
        return min(found, key=lambda fault: place[fault.action]).error if found else None

    def evaluate(self, mode: str, split: str = "test", num_batches: int | None = None) -> Evaluated:
        """Return loss and correct predictions summed over a split, with links in an evaluation `mode`."""
        total = Evaluated(0.0, 0, 0, 0)
        window = 2 * self.num_workers  # batches under way at once: enough to fill the pipeline, bounded in memory
        batches = range(num_batches if num_batches is not None else self.plan.num_test_batches)
        for start in range(0, len(batches), window):
            ends = []
            for batch in batches[start : start + window]:
                packet: Ref = None
                for worker in range(self.num_workers):
                    packet = self._submit(worker, "infer", self.incarnation, split, batch, mode, packet)
                ends.append(packet)
            for result in self._fetch(ends):
                total = Evaluated(*(a + b for a, b in zip(total, result, strict=True)))
        return total

    def batchnorm(self, change: str) -> None:
        """Move BatchNorm statistics at all workers, see `Worker.batchnorm`."""
        self._fetch([self._submit(worker, "batchnorm", self.incarnation, change) for worker in range(self.num_workers)])

    def state_of(self, worker: int) -> np.ndarray:
        """Return the state of a worker, its part of a checkpoint."""
        state: np.ndarray = self._fetch([self._submit(worker, "state", self.incarnation)])[0]
        return state

    def state(self) -> list[np.ndarray]:
        """Return the state of every worker."""
        return [self.state_of(worker) for worker in range(self.num_workers)]

    def load(self, step: int, parts: Sequence[np.ndarray]) -> None:
        """Give every worker the state in which `step` begins: its own part and its neighbours', for the ends that it shares."""
        handles = [self._put(part) for part in parts]
        loads = []
        for worker in range(self.num_workers):
            around = [handles[w] for w in range(len(parts)) if self._neighbours(w, worker)]
            loads.append(self._submit(worker, "load", step, *around))
        self._fetch(loads)

    def _neighbours(self, one: int, other: int) -> bool:
        stages = [{s for s, w in enumerate(self._worker_of) if w == worker} for worker in (one, other)]
        return any(abs(a - b) <= 1 for a in stages[0] for b in stages[1])

    def _modules(self, worker: int) -> dict[int, nn.Module]:
        return {s: self.workload.modules[s] for s, w in enumerate(self._worker_of) if w == worker}

    def _needs_data(self, worker: int) -> bool:
        return bool({0, self.plan.num_stages - 1} & set(self._modules(worker)))

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError where it is plain, before anything starts, that the stages have no place here."""

    @abstractmethod
    def start(self) -> None:
        """Bring up all workers at step 0, anew after a loss. Raises ConfigError where they have no place."""

    @abstractmethod
    def close(self) -> None:
        """Stop what was started."""

    @abstractmethod
    def clock_offsets_s(self) -> list[float]:
        """Return what to take from each worker's clock to have the driver's."""

    @abstractmethod
    def _submit(self, worker: int, method: str, *arguments: Any, num_returns: int = 1) -> Ref: ...

    @abstractmethod
    def _fetch(self, refs: list[Ref]) -> list[Any]: ...

    @abstractmethod
    def _put(self, value: Any) -> Ref: ...


class InlineEngine(Engine):
    """All workers in this process, one action after the other."""

    def check(self) -> None:
        if self.plan.config.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "`device` = 'cuda' needs a GPU, and torch finds none here. Set `device` to 'auto' or 'cpu'."
            )
        _check_memory(self.plan.memories, host_memory_bytes())

    def start(self) -> None:
        device = "cuda" if self.plan.config.device != "cpu" and torch.cuda.is_available() else "cpu"
        self.workers = [
            Worker(
                self.plan, worker, copy.deepcopy(self._modules(worker)), self.workload.data, device, self.incarnation
            )
            for worker in range(self.num_workers)
        ]

    def close(self) -> None:
        self.workers = []

    def clock_offsets_s(self) -> list[float]:
        return [0.0] * self.num_workers

    def _submit(self, worker: int, method: str, *arguments: Any, num_returns: int = 1) -> Ref:
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        with torch.random.fork_rng(devices):  # stages seed torch's generator, which here is the caller's
            return getattr(self.workers[worker], method)(*arguments)

    def _fetch(self, refs: list[Ref]) -> list[Any]:
        return refs

    def _put(self, value: Any) -> Ref:
        return value


class RayEngine(Engine):
    """One actor a worker, on a running cluster (`RAY_ADDRESS`) or on a Ray of its own on this machine."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._actors: list[Any] = []
        self._called_init = False  # this engine called `ray.init`, and shuts down what it called
        self._private = False  # the Ray is this run's own: its CPUs are only counted
        self._gpus: float | None = None  # of each stage, settled by the first start
        self._stored: tuple[Any, ...] = ()

    def check(self) -> None:
        import ray

        if ray.is_initialized():
            return
        address = os.environ.get("RAY_ADDRESS")
        if not address:
            _check_memory(self.plan.memories, host_memory_bytes())
        elif address not in ("auto", "local"):
            host, _, port = address.removeprefix("ray://").rpartition(":")
            try:
                socket.create_connection((host, int(port)), timeout=3).close()
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"`RAY_ADDRESS` must be a running cluster's, but {address!r} does not answer: {error}."
                ) from None

    def start(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._stop_actors()
        if not ray.is_initialized():
            self._connect()
        plan, config = self.plan, self.plan.config
        if not self._stored:  # modules and data go to the object store once, also for stages that start again
            modules = [ray.put(self._modules(worker)) for worker in range(self.num_workers)]
            self._stored = (ray.put(plan), modules, ray.put(self.workload.data))
        plan_ref, module_refs, data_ref = self._stored
        self._nodes = self._place()
        gpus = self._gpus
        if plan.compresses:
            kernels.warm(plan.codecs)  # compiled once, here; the workers of this machine find it on disk
        actor = ray.remote(Worker)
        for worker, node in enumerate(self._nodes):
            options = actor.options(
                num_cpus=config.cpus_per_stage,
                num_gpus=gpus,
                max_concurrency=1,  # the order of submission is the schedule
                max_restarts=0,  # a worker that came back by itself would have fresh weights and say nothing
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            data = data_ref if self._needs_data(worker) else None
            device = "cuda" if gpus else "cpu"
            self._actors.append(options.remote(plan_ref, worker, module_refs[worker], data, device, self.incarnation))
        self._fetch([self._submit(worker, "clock_s") for worker in range(self.num_workers)])

    def restart(self) -> None:
        """Bring up all workers anew, as another incarnation, at step 0."""
        self.incarnation += 1
        self.start()

    def close(self) -> None:
        import ray

        self._stop_actors()
        self._stored = ()
        if self._called_init and ray.is_initialized():
            ray.shutdown()
            self._called_init = False

    def clock_offsets_s(self) -> list[float]:
        """A worker on the driver's node has its clock; another's is read at the quickest of a few calls."""
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
        import ray

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address = os.environ.get("RAY_ADDRESS")
        self._called_init = True
        self._private = not address
        if address:
            try:
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
            except (ConnectionError, RuntimeError) as error:
                raise ConfigError(
                    f"The cluster at `RAY_ADDRESS` = {address!r} cannot be joined: {_reason(error)}."
                ) from None
            return
        wanted = int(np.ceil(self.num_workers * self.plan.config.cpus_per_stage))
        ray.init(
            address="local",
            num_cpus=max(wanted, os.cpu_count() or 1),  # our own Ray: stages may share cores, and their records say so
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _system_config={  # nobody reads the metrics and task events of a Ray without a dashboard
                "enable_metrics_collection": False,
                "task_events_report_interval_ms": 0,
            },
        )

    def _place(self) -> list[str]:
        """Return the node of each worker, neighbours side by side.

        Raises ConfigError without room; WorkerLostError where stages that had room before find none in time.
        """
        import ray

        config = self.plan.config
        again = self._gpus is not None
        deadline = time.monotonic() + (min(PLACE_AGAIN_S, config.timeout_s) if again else 0.0)
        while True:
            free = _free_resources()
            if self._gpus is None:
                self._gpus = self._gpus_per_stage(sum(resources.get("GPU", 0.0) for resources in free.values()))
            room = {node: _room(resources, config.cpus_per_stage, self._gpus) for node, resources in free.items()}
            if sum(room.values()) >= self.num_workers:
                break
            if time.monotonic() >= deadline:
                asked = f"{config.cpus_per_stage:g} CPU" + (f" and {self._gpus:g} GPU" if self._gpus else "")
                sentence = (
                    f"{self.num_workers} stages of {asked} each need room for {self.num_workers}, but Ray's {len(room)} "
                    f"free nodes have room for {sum(room.values())}. "
                    "Lower `cpus_per_stage` or `gpus_per_stage`, or use fewer stages."
                )
                raise WorkerLostError(sentence) if again else ConfigError(sentence)
            time.sleep(0.1)  # what killed actors held comes back a moment later
        nodes = assign(room, self.num_workers, config.placement, first=ray.get_runtime_context().get_node_id())
        if not self._private and not self._gpus:  # stages on a GPU have their memory there
            capacity = {node: int(resources.get("memory", 0.0)) for node, resources in free.items()}
            _check_memory(self.plan.memories, capacity, nodes)
        return nodes

    def _gpus_per_stage(self, total: float) -> float:
        """Return the GPUs of each stage: as configured, or an equal share of all, at most one."""
        config = self.plan.config
        if config.gpus_per_stage is not None:
            return config.gpus_per_stage
        if config.device == "cuda" and total < 1:
            raise ConfigError("`device` = 'cuda' needs a GPU, and Ray has none free. Set `device` to 'auto' or 'cpu'.")
        return 1 / -(-self.num_workers // int(total)) if total >= 1 and config.device != "cpu" else 0.0

    def _stop_actors(self) -> None:
        import ray

        for actor in self._actors:
            with suppress(Exception):  # a cluster that is gone has no actors left
                ray.kill(actor)
        self._actors = []

    def _submit(self, worker: int, method: str, *arguments: Any, num_returns: int = 1) -> Ref:
        call = getattr(self._actors[worker], method)
        return (call if num_returns == 1 else call.options(num_returns=num_returns)).remote(*arguments)

    def _fetch(self, refs: list[Ref]) -> list[Any]:
        import ray
        from ray.exceptions import GetTimeoutError, RayError, RayTaskError

        timeout_s = self.plan.config.timeout_s
        try:
            return list(ray.get(refs, timeout=timeout_s))
        except GetTimeoutError:
            raise WorkerLostError(f"no answer within `timeout_s` = {timeout_s:g} s") from None
        except RayTaskError as error:
            for ref in refs:  # the others failed with it: look at them, or Ray reports each as unhandled
                with suppress(RayError):
                    ray.get(ref, timeout=timeout_s)
            cause = error.cause
            if isinstance(cause, (DivergedError, StageError)):
                raise cause from None
            if isinstance(cause, RayError):
                raise WorkerLostError(_reason(cause)) from None
            raise StageError(f"{type(cause).__name__}: {cause}") from None
        except RayError as error:  # an actor, a node or an object is gone
            if "error raised in its creation task" in str(error):
                raise StageError(f"a stage could not be made: {_reason(error)}") from None
            raise WorkerLostError(_reason(error)) from None

    def _put(self, value: Any) -> Ref:
        import ray

        return ray.put(value)


ENGINES: dict[str, Callable[[Workload], Engine]] = {"ray": RayEngine, "inline": InlineEngine}


def assign(room: dict[str, int], count: int, placement: str, first: str | None = None) -> list[str]:
    """Return a node for each of `count` workers: neighbours side by side, as many nodes as there are or as few as hold
    them.

    >>> assign({"a": 4, "b": 4}, 4, "spread"), assign({"a": 4, "b": 4}, 3, "pack")
    (['a', 'a', 'b', 'b'], ['a', 'a', 'a'])
    """
    nodes = sorted(room, key=lambda node: (node != first, -room[node] if placement == "pack" else 0, node))
    shares = dict.fromkeys(nodes, 0)
    for _ in range(count):
        open_nodes = [node for node in nodes if shares[node] < room[node]]
        chosen = open_nodes[0] if placement == "pack" else min(open_nodes, key=lambda node: shares[node])
        shares[chosen] += 1
    return [node for node in nodes for _ in range(shares[node])]


def host_memory_bytes() -> int:
    """Return the memory of this machine, or what its container may use."""
    total: int = psutil.virtual_memory().total
    try:
        return min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no control group, or "max"
        return total


def _free_resources() -> dict[str, dict[str, float]]:
    """Return what each living node of the cluster has free."""
    import ray
    from ray._private.state import available_resources_per_node

    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    available = available_resources_per_node()  # type: ignore[no-untyped-call]
    return {node: available.get(node, {}) for node in alive}


def _room(free: dict[str, float], cpus: float, gpus: float) -> int:
    """Return how many stages a node has room for; a fraction of a GPU is of one, so rests of several do not add up."""
    fits = free.get("CPU", 0.0) / cpus
    if gpus:
        whole, rest = divmod(free.get("GPU", 0.0), 1)
        fits = min(fits, whole * int(1 / gpus + 1e-9) + rest / gpus if gpus <= 1 else whole / gpus)
    return int(fits + 1e-9)


def _check_memory(memories: Sequence[Any], capacity: Any, nodes: Sequence[str] | None = None) -> None:
    try:
        check_memory(memories, capacity, nodes)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _reason(error: BaseException) -> str:
    """Return the line of an error of Ray's that says why: the last of a traceback, the first of anything else."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return (lines[-1] if "Traceback" in plain or "creation task" in plain else lines[0]).rstrip(".")
