"""Engines: who runs the workers. The protocol of a step, written once; and the engine that runs it in this process.

The order of submission is the schedule: a worker runs its calls in the order submitted, also while one waits for its
packet. So a step is submitted whole, packets pass from call to call as references, and only the reports of the step's
end are fetched. `raysim.engine.ray` does the same on Ray.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from raysim.network.memory import StageMemory
from raysim.pipeline.errors import DivergedError, StageError
from raysim.pipeline.plan import Workload
from raysim.pipeline.replicas import Group
from raysim.pipeline.reports import Evaluated, StepReport
from raysim.pipeline.signals import Signals
from raysim.schedules.actions import Action, calls, needs, order, sinks

NO_SIGNALS = Signals()
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
        self.plan = workload.plan
        self.incarnation = 0
        self._calls = self._ordered_calls()

    def _ordered_calls(self) -> list[_Call]:
        """Return all calls of a step in an order that respects rows and packets."""
        plan = self.plan
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
        self._ends = [call_of[row[-1]] for row in plan.rows if row[-1] in sinks(row)]
        return ordered

    @property
    def num_workers(self) -> int:
        """Number of workers, over all replicas."""
        return self.plan.num_replicas * len(self.plan.rows)

    @property
    def all_memories(self) -> list[StageMemory]:
        """What every stage of every replica holds at its peak, in the order of `Plan.places`."""
        return [self.plan.memories[stage] for _, stage in self.plan.places]

    def by_stage(self, nodes: Sequence[str]) -> list[str]:
        """Return the node of every stage of every replica, in the order of `Plan.places`, of the workers' nodes."""
        return [nodes[self._worker(*place)] for place in self.plan.places]

    def _worker(self, replica: int, stage: int) -> int:
        return replica * len(self.plan.rows) + self.plan.owners[stage]

    def step(self, step: int, signals: Signals = NO_SIGNALS) -> list[StepReport]:
        """Run one training step on all workers: all of them step, or none does. `signals`: those of the last step.

        Raises DivergedError, StageError or WorkerLostError; after any of them the workers' memories have moved, and
        only a checkpoint brings them back.
        """
        clip = self.plan.config.optimizer.clip_norm is not None
        everyone = range(self.num_workers)
        inside = (step, self.incarnation)
        packets: dict[tuple[int, int], Ref] = {}
        try:
            for replica, (worker, place, source) in product(range(self.plan.num_replicas), self._calls):
                first = replica * len(self.plan.rows)  # worker of this replica
                packet = (
                    packets.pop((first + source[0], source[1])) if source else None
                )  # passing the reference on drops ours, and frees the packet
                packets[first + worker, place] = self._submit(first + worker, "run", *inside, place, packet)
            # Calls run without a gap: the first stage's last backward stands for all actions of its replica but weights'
            # backwards after others' last, which stand for themselves.
            firsts = range(0, self.num_workers, len(self.plan.rows))
            done: list[Ref] = [packets.pop((first + worker, place)) for first in firsts for worker, place in self._ends]
            packets.clear()
            for phase, groups in enumerate(self.plan.groups):
                done = self._exchange(inside, phase, groups, signals.step_s, done)
            if clip:
                norms = [self._submit(w, "gradient_norm2", *inside, *done) for w in everyone]
                per = len(self.plan.rows)  # a replica is clipped by its own norm, the same at all unless they part
                dones = [norms[w - w % per : w - w % per + per] for w in everyone]
            else:
                dones = [done] * self.num_workers
            return self._fetch([self._submit(w, "update", *inside, signals, *dones[w]) for w in everyone])
        except (DivergedError, StageError) as error:
            raise self._first_fault() or error from None

    def _exchange(
        self, inside: tuple[int, int], phase: int, groups: Sequence[Group], step_s: float | None, done: Sequence[Ref]
    ) -> list[Ref]:
        """Run the rounds of a phase's groups, round by round; return tokens that stand for their results.

        Every worker takes the turns of its groups in the same order, so that none waits for what comes after it.
        """
        sent: dict[int, list[Sequence[Ref]]] = {}
        tokens: list[Ref] = []
        for turn in range(max(group.num_rounds for group in groups) + 1):
            for place, group in enumerate(groups):
                if turn > group.num_rounds:
                    continue
                last = turn == group.num_rounds
                turns = []
                for member, (replica, stage) in enumerate(group.members):
                    received = done if turn == 0 else _received(group, member, sent[place])
                    turns.append(
                        self._submit(
                            self._worker(replica, stage),
                            "exchange",
                            *inside,
                            (phase, place, member),
                            turn,
                            step_s,
                            *received,
                            num_returns=1 if last else len(group.members),
                        )
                    )
                if last:
                    sent.pop(place)
                    tokens += turns
                else:
                    sent[place] = turns
        return tokens

    def _first_fault(self) -> DivergedError | StageError | None:
        """Return the fault that comes first in the order of actions: the same one in every engine."""
        faults = self._fetch([self._submit(worker, "fault") for worker in range(self.num_workers)])
        place = {action: index for index, action in enumerate(order(self.plan.rows, self.plan.num_stages))}
        found = [fault for fault in faults if fault is not None]
        return min(found, key=lambda fault: place.get(fault.action, len(place))).error if found else None

    def evaluate(self, mode: str, split: str = "test", num_batches: int | None = None) -> Evaluated:
        """Return loss and correct predictions summed over a split, with links in an evaluation `mode`.

        Replicas differ in nothing but BatchNorm statistics, and those of the first are the run's; where a method lets them part,
        their mean is evaluated.
        """
        *_, total = self.evaluating(mode, split, num_batches)
        return total

    def evaluating(self, mode: str, split: str = "test", num_batches: int | None = None) -> Iterator[Evaluated]:
        """Evaluate as `evaluate` does, and yield the sums so far after every few batches; the last are those of the split."""
        if self.plan.parts:
            per = len(self.plan.rows)
            held = [self._submit(worker, "parameters", self.incarnation) for worker in range(self.num_workers)]
            self._fetch([self._submit(w, "take_mean", self.incarnation, *held[w::per]) for w in range(per)])
            yield from self._evaluating(mode, split, num_batches)
            self._fetch([self._submit(w, "take_mean", self.incarnation) for w in range(per)])
        else:
            yield from self._evaluating(mode, split, num_batches)

    def _evaluating(self, mode: str, split: str, num_batches: int | None) -> Iterator[Evaluated]:
        total = Evaluated(0.0, 0, 0, 0)
        window = 2 * len(self.plan.rows)  # batches under way at once: enough to fill the pipeline, bounded in memory
        batches = range(num_batches if num_batches is not None else self.plan.num_test_batches)
        for start in range(0, len(batches), window):
            here = batches[start : start + window]
            packets: list[Ref] = [None] * len(here)
            # Stage by stage, so that no worker waits for what comes back to it.
            for stage, worker in enumerate(self.plan.owners):
                for place, batch in enumerate(here):
                    packets[place] = self._submit(
                        worker, "infer", self.incarnation, stage, split, batch, mode, packets[place]
                    )
            for result in self._fetch(packets):
                total = Evaluated(*(a + b for a, b in zip(total, result, strict=True)))
            yield total

    def batchnorm(self, change: str) -> None:
        """Move BatchNorm statistics at the workers that evaluate, see `Worker.batchnorm`."""
        workers = range(len(self.plan.rows))
        self._fetch([self._submit(worker, "batchnorm", self.incarnation, change) for worker in workers])

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
        per = len(self.plan.rows)
        stages = [{s for s, w in enumerate(self.plan.owners) if w == worker % per} for worker in (one, other)]
        return one // per == other // per and any(abs(a - b) <= 1 for a in stages[0] for b in stages[1])

    def _modules(self, worker: int) -> dict[int, nn.Module]:
        place = worker % len(self.plan.rows)
        return {s: self.workload.modules[s] for s, w in enumerate(self.plan.owners) if w == place}

    def _needs_data(self, worker: int) -> bool:
        return bool({0, self.plan.num_stages - 1} & set(self._modules(worker)))

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError where it is plain, before anything starts, that the stages have no place here."""

    @abstractmethod
    def start(self) -> None:
        """Bring up all workers at step 0, anew after a loss. Raises ConfigError where they have no place."""

    @property
    @abstractmethod
    def device_kind(self) -> str:
        """The kind of device that computes, "cpu" or "cuda"; known once the workers are up."""

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


def _received(group: Group, member: int, sent: Sequence[Sequence[Ref]]) -> Iterator[Ref]:
    """Yield what a member receives of each other one: what that sent to everyone, and to this member."""
    for other in group.others(member):
        yield sent[other][0]
        yield sent[other][1 + group.others(other).index(member)]
