"""The number of trials that a sweep runs at once on a cluster which others use, and which grows and shrinks."""

from __future__ import annotations

import time
from collections.abc import Mapping

import ray

from raysim.engine.occupancy import Holder, holders
from raysim.engine.resources import free_resources, room_for, total_resources
from raysim.sweeps.room import Share

LOOK_S = 5.0  # between two looks at the cluster


def fair_limit(going: int, free: int, capacity: int, waiting: bool, others: int) -> int:
    """Return how many trials may go on at once, of which `going` do and for `free` more there is room now.

    While another driver waits, a sweep starts no trial beyond its equal share of the cluster, which has room for `capacity`
    trials; it always keeps one.

    >>> fair_limit(going=6, free=0, capacity=6, waiting=False, others=1)
    6
    >>> fair_limit(going=6, free=0, capacity=6, waiting=True, others=1)
    3
    """
    limit = capacity // (1 + others) if waiting else going + free
    return max(1, min(limit, capacity))


class Allotment:
    """Looks at the cluster now and then, and says how many trials of a sweep may go on at once.

    `jobs` bounds them where given. `memory_bytes`: of a trial in one process.
    """

    def __init__(self, share: Share, actors: int, jobs: int | None, memory_bytes: int = 0) -> None:
        self._share = share
        self._actors = actors
        self._jobs = jobs
        self._memory_bytes = memory_bytes
        self._me = ray.get_runtime_context().get_job_id()
        self._looked = time.monotonic()
        self._limit = share.jobs

    @property
    def cpus(self) -> float:
        """CPUs of each process of a trial."""
        return self._share.cpus

    def trials(self, going: int) -> int:
        """Return the number of trials that may go on at once, `going` of which do."""
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            others = [holder for holder in holders() if holder.job != self._me]
            free, capacity = self.room(free_resources()), self.room(total_resources())
            limit = fair_limit(going, free, capacity, any(map(_waits, others)), len(others))
            self._limit = limit if self._jobs is None else min(limit, self._jobs)
        return self._limit

    def room(self, by_node: Mapping[str, dict[str, float]]) -> int:
        """Return for how many trials nodes have room."""
        nodes = by_node.values()
        by_cpu = sum(room_for(node, self._share.cpus, self._share.gpus) for node in nodes) // self._actors
        if not self._memory_bytes:
            return by_cpu
        return min(by_cpu, sum(int(node.get("memory", 0.0) // self._memory_bytes) for node in nodes))


def _waits(holder: Holder) -> bool:
    return holder.waiting > 0
