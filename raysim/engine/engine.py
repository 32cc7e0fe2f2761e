"""The protocol between the driver and the workers, shared by all engines.

In a step, the driver calls each worker twice: `run`, then `update` once all have run. Workers exchange messages in both calls;
the driver only sees reports. `raysim.engine.inline` runs the workers in this process, `raysim.engine.ray` as actors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from torch import nn

from raysim.engine.nodes import Reach
from raysim.engine.watch import end_process
from raysim.network.memory import StageMemory
from raysim.pipeline.device import DeviceFacts
from raysim.pipeline.errors import SenderStoppedError, WorkerLostError
from raysim.pipeline.prepare import Workload
from raysim.pipeline.reports import Evaluated, Failure, StepFeedback, StepReport
from raysim.pipeline.stage_memory import check_devices
from raysim.schedules.actions import topological_order

NO_SIGNALS = StepFeedback()
Ref = Any  # a value inline, a reference on Ray


class Engine(ABC):
    """Drives the workers through steps, evaluations and checkpoints."""

    kind: ClassVar[str]  # "inline" or "ray", as in the records
    can_restart: bool = False  # whether lost workers can be started again

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.plan = workload.plan
        self.incarnation = 0
        self.call_bytes: int | None = None
        """Bytes of the largest argument sent within a Ray call; set once the workers are up."""
        self.wait_s = 0.0
        """Seconds to wait for resources held by others."""
        self.dashboard = False
        """True to start Ray's dashboard."""
        self.on_phase: Callable[[str | None], None] = lambda phase: None
        """Called during a start with what it waits for next, or None if the wait prints its own messages."""
        self.on_stuck: Callable[[str], None] = lambda loss: end_process(f"{loss}. To continue, resume the run.")
        """Ends the process with a message; called in another thread if a Ray call does not return after Ray's servers were lost."""

    @property
    def num_workers(self) -> int:
        """Number of workers in all replicas."""
        return self.plan.num_replicas * len(self.plan.rows)

    @property
    def all_memories(self) -> list[StageMemory]:
        """Peak memory of every stage of every replica, in the order of `Plan.places`."""
        return [self.plan.memories[stage] for _, stage in self.plan.places]

    @property
    def _evaluators(self) -> range:
        """The workers of the evaluated replica."""
        per = len(self.plan.rows)
        return range(self.plan.evaluated * per, (self.plan.evaluated + 1) * per)

    def check_devices(self) -> DeviceFacts | None:
        """Return the facts of the first worker's GPU, or None on a CPU.

        Raises ConfigError if a GPU does not support the run's dtype, or lacks memory for its stages.
        """
        workers = range(self.num_workers)
        facts = self._fetch([self._submit(worker, "device_facts") for worker in workers])
        owners = [self.plan.worker(replica, stage) for replica, stage in self.plan.places]
        check_devices(self.plan.config, self.all_memories, owners, facts, self.gpu_share)
        first: DeviceFacts | None = facts[0]
        return first

    def loss(self) -> WorkerLostError | None:
        """Return the error if Ray's servers are lost, else None; other errors may be consequences of this one."""
        return None

    def device_forecast_bytes(self) -> int:
        """Return the forecast peak memory of the largest worker."""
        needed = [0] * self.num_workers
        for (replica, stage), memory in zip(self.plan.places, self.all_memories, strict=True):
            needed[self.plan.worker(replica, stage)] += memory.total_bytes
        return max(needed)

    def device_peak_bytes(self) -> int:
        """Return the largest peak GPU memory of any worker, 0 on CPUs."""
        peaks: list[int] = self._fetch([self._submit(w, "device_peak_bytes") for w in range(self.num_workers)])
        return max(peaks)

    def node_speeds(self) -> list[tuple[str, float]]:
        """Return the address and speed in GFLOP/s of each worker's node; empty if all are on one node."""
        return []

    def node_reaches(self) -> dict[str, Reach]:
        """Return the reach of each node's worker with the farthest peer; empty if all are on one node."""
        return {}

    @property
    def gpu_share(self) -> float:
        """The share of a GPU available to each worker."""
        return 1.0

    def by_stage(self, nodes: Sequence[str]) -> list[str]:
        """Return the node of every stage of every replica, in the order of `Plan.places`. `nodes`: the node of each worker."""
        return [nodes[self.plan.worker(replica, stage)] for replica, stage in self.plan.places]

    def step(self, step: int, signals: StepFeedback = NO_SIGNALS) -> list[StepReport]:
        """Run one training step: either all workers update, or none does. `signals`: feedback of the last step.

        Raises DivergedError, StageError or WorkerLostError. After any of these the workers' memories have changed, and only a
        checkpoint restores them.
        """
        everyone = range(self.num_workers)
        norms = self._together(everyone, "run", step, signals.step_s)
        per = len(self.plan.rows)  # each replica clips by its own norm, the same for all unless they diverge
        of_replica = [
            {stage: norm for part in norms[first : first + per] for stage, norm in part.items()}
            for first in range(0, self.num_workers, per)
        ]
        return self._together(everyone, "update", step, signals, of_replica)

    def _together(self, workers: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """Run a method of several workers, with messages between them, and return their results.

        Raises the first failure in the order of actions, which is the same in every engine.
        """
        outcomes = self._perform(workers, method, *arguments)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        failures = [failure for failure in failures if not isinstance(failure.error, SenderStoppedError)] or failures
        if failures:
            actions = topological_order(self.plan.rows, self.plan.num_stages)
            raise min(failures, key=lambda f: actions.index(f.action) if f.action else len(actions)).error from None
        return outcomes

    def evaluate(self, mode: str, split: str = "test", num_batches: int | None = None) -> Evaluated:
        """Evaluate a split, with links in evaluation `mode`, and return the sums over its samples.

        Only one replica is evaluated, see `Plan.evaluated`: replicas differ only in BatchNorm statistics and compressors. If a method
        lets their parameters differ, the parameters on which they last agreed are evaluated, or else their mean.
        """
        *_, total = self.evaluating(mode, split, num_batches)
        return total

    def evaluating(self, mode: str, split: str = "test", num_batches: int | None = None) -> Iterator[Evaluated]:
        """Evaluate like `evaluate`, and yield the running sums every few batches; the last sums are the result."""
        per = len(self.plan.rows)
        if self.plan.decentralized:
            held = [self._submit(worker, "parameters") for worker in range(self.num_workers)]
            self._fetch([self._submit(w, "take_mean", *held[w % per :: per]) for w in self._evaluators])
        total = Evaluated()
        window = 2 * per  # batches in flight: enough to fill the pipeline, few enough to bound memory
        batches = range(num_batches if num_batches is not None else self.plan.num_test_batches)
        for start in range(0, len(batches), window):
            for result in self.evaluate_batches(mode, split, batches[start : start + window]):
                total = total.plus(result)
            yield total
        if self.plan.decentralized:
            self._fetch([self._submit(w, "take_mean") for w in self._evaluators])

    def evaluate_batches(self, mode: str, split: str, batches: Sequence[int]) -> list[Evaluated]:
        """Evaluate some batches of a split with the parameters of one replica; return the sums over each."""
        return [*chain.from_iterable(self._together(self._evaluators, "infer", split, batches, mode))]

    def batchnorm(self, change: str) -> None:
        """Move BatchNorm statistics on the evaluating workers, see `Worker.batchnorm`."""
        self._fetch([self._submit(worker, "batchnorm", change) for worker in self._evaluators])

    def state_of(self, worker: int) -> np.ndarray:
        """Return a worker's part of a checkpoint."""
        state: np.ndarray = self._fetch([self._submit(worker, "state")])[0]
        return state

    def state(self) -> list[np.ndarray]:
        """Return the state of every worker."""
        return [self.state_of(worker) for worker in range(self.num_workers)]

    def load(self, step: int, parts: Sequence[np.ndarray]) -> None:
        """Restore every worker's state at the start of `step`: its own part, and its neighbours' parts for shared link ends."""
        handles = [self._put(part) for part in parts]
        loads = []
        for worker in range(self.num_workers):
            around = [handles[w] for w in range(len(parts)) if self._neighbours(w, worker)]
            loads.append(self._submit(worker, "load", step, *around))
        self._fetch(loads)

    def _neighbours(self, a: int, b: int) -> bool:
        """Return whether two workers own equal or neighbouring stages of one replica."""
        per = len(self.plan.rows)
        return a // per == b // per and any(abs(i - j) <= 1 for i in self._stages(a) for j in self._stages(b))

    def _stages(self, worker: int) -> list[int]:
        return [s for s, owner in enumerate(self.plan.owners) if owner == worker % len(self.plan.rows)]

    def _modules(self, worker: int) -> dict[int, nn.Module]:
        return {stage: self.workload.modules[stage] for stage in self._stages(worker)}

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError before anything starts if the stages cannot fit here."""

    @abstractmethod
    def start(self) -> None:
        """Start all workers at step 0, also after a loss; raises ConfigError if they do not fit."""

    @property
    @abstractmethod
    def device_kind(self) -> str:
        """The kind of device in use, "cpu" or "cuda"; known once the workers are up."""

    def leaving(self) -> str | None:
        """Return a sentence if a node of the run is about to leave its cluster; the check is rate-limited."""
        return None

    def fits_elsewhere(self) -> bool:
        """Return whether the workers fit on the other nodes while one is `leaving`."""
        return False

    def restart(self) -> None:
        """Start all workers again at step 0, as a new incarnation; only if the engine `can_restart`."""
        self.incarnation += 1
        self.start()

    @abstractmethod
    def close(self) -> None:
        """Stop the workers, and everything started for them."""

    def clock_offsets_s(self) -> list[float]:
        """Return each worker's clock offset from the driver, in seconds."""
        return [0.0] * self.num_workers

    @abstractmethod
    def _perform(self, workers: Sequence[int], method: str, *arguments: Any) -> list[Any]:
        """Run a generator method on several workers in parallel, and deliver the messages between them."""

    @abstractmethod
    def _submit(self, worker: int, method: str, *arguments: Any) -> Ref: ...

    @abstractmethod
    def _fetch(self, refs: list[Ref]) -> list[Any]: ...

    def _put(self, value: Any) -> Ref:
        return value
