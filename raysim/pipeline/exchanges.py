"""Exchanges of replicas that a configuration asks for: the methods that take part, their period and their delay."""

from __future__ import annotations

import math

from raysim.config import RunConfig
from raysim.replication.method import ReplicaMethod


def takes_part(method: ReplicaMethod, num_replicas: int) -> bool:
    """Return whether a method has anything to do with this number of replicas."""
    return num_replicas > 1 or method.works_alone


def exchange_period(config: RunConfig) -> int:
    """Return the number of steps after which the replicas of all stages exchange the same again."""
    return math.lcm(*(method.period for method in _taking_part(config)))


def exchange_delay(config: RunConfig) -> int:
    """Return the number of further steps that the exchanges of all stages may take before a step waits for them.

    Where no forward reads the newest weights, the next steps go on while the update waits for its exchange.
    """
    methods = _taking_part(config)
    if not methods:
        return 0
    unread = 0 if config.weights.updates_each_microbatch else min(map(min, config.weight_delays()))
    return unread + min(method.steps_under_way for method in methods)


def _taking_part(config: RunConfig) -> list[ReplicaMethod]:
    return [method for method in config.replica_methods() if takes_part(method, config.num_replicas)]
