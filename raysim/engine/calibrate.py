"""Measure Ray's overhead on this machine: seconds per call, message and byte, and the driver's seconds per step.

The idle actors are those of a training run, and send messages in the same way. All are on one machine, so no network is included.
The figures are low quantiles, because other load can only add to them.
"""

from __future__ import annotations

import platform
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import date
from typing import Any, NamedTuple

import numpy as np

from raysim.engine.actor import start_actor
from raysim.engine.connection import connected
from raysim.engine.delivery import find_limits
from raysim.network.transport import HostCosts
from raysim.pipeline.messages import OutgoingMessage, Receive, Send, Turns

SIZES = (1_024, 16_384, 131_072, 524_288)  # bytes of a message
WARMUP, ROUNDS = 30, 300
STEPS = 150
ACTORS = (2, 4)
QUANTILE = 0.1
TIMEOUT_S = 120.0


class Player:
    """A worker that only exchanges messages with the other player."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.timeout_s = TIMEOUT_S
        self.threads = nullcontext

    def rally(self, size: int, rounds: int) -> Turns[tuple[list[tuple[float, float]], float]]:
        """Send messages of `size` bytes back and forth.

        Returns the first player's seconds for each message, to send it and for the round trip, and this player's CPU seconds.
        """
        message, other, times = (b"", np.zeros(size, np.uint8)), 1 - self.index, []
        cpu_s = time.process_time()
        for turn in range(rounds):
            if self.index:
                yield Receive(other, (size, turn))
            start = time.perf_counter()
            yield Send((OutgoingMessage(other, (size, turn), message),))
            handed = time.perf_counter()
            if not self.index:
                yield Receive(other, (size, turn))
                times.append((handed - start, time.perf_counter() - start))
        return times, time.process_time() - cpu_s

    def rest(self) -> Turns[None]:
        """Do nothing, like a step without actions."""
        return
        yield


class Hop(NamedTuple):
    """Seconds per message of one size between two workers: low quantiles, and the mean CPU seconds of both workers."""

    size: int
    call_s: float
    hop_s: float
    cpu_s: float


def calibrate_ray() -> tuple[HostCosts, list[Hop]]:
    """Measure Ray on this machine, or on this node of the cluster at `RAY_ADDRESS`.

    Takes some seconds after Ray's start. Raises ConfigError if there is no such cluster, WorkerLostError if Ray does not start.
    """
    import ray

    with _actors(max(ACTORS)) as actors:
        hops = [_hop(actors[:2], size) for size in SIZES]
        steps = {count: _step_s(actors[:count]) for count in ACTORS}
    few, many = ACTORS
    worker_s = max(steps[many] - steps[few], 0.0) / (many - few)
    call_s = min(hop.call_s for hop in hops)
    small, large = hops[0], hops[-1]
    byte_s = max(large.hop_s - small.hop_s, 0.0) / (large.size - small.size)
    costs = HostCosts(
        call_s=call_s,
        message_s=max(small.hop_s - call_s - byte_s * small.size, 0.0),
        byte_s=byte_s,
        step_s=max(steps[few] - few * worker_s, 0.0),
        worker_s=worker_s,
        source=f"seconds of Ray {ray.__version__} between idle actors of {platform.node()}, {date.today().isoformat()}",
    )
    return costs, hops


@contextmanager
def _actors(count: int) -> Iterator[list[Any]]:
    """Start or join Ray, and start players on the driver's node that know one another."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actors: list[Any] = []
    with connected("calibration"):
        try:
            here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
            actors = [start_actor(num_cpus=0, scheduling_strategy=here) for _ in range(count)]
            session, peers = uuid.uuid4().hex, dict(enumerate(actors))
            _fetch([actor.take.remote(session, peers, Player, i) for i, actor in peers.items()])
            limits = find_limits(actors[:1], _fetch, near=True)
            _fetch([actor.bound.remote(limits) for actor in actors])
            yield actors
        finally:
            for actor in actors:
                ray.kill(actor)


_TURNS = iter(range(1, 10**9))  # shared by all actors: their mailboxes drop messages of earlier turns


def _perform(actors: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
    turn = next(_TURNS)
    return _fetch([actor.perform.remote(turn, method, *arguments) for actor in actors])


def _fetch(calls: list[Any]) -> list[Any]:
    import ray

    results: list[Any] = ray.get(calls, timeout=TIMEOUT_S)
    return results


def _hop(actors: Sequence[Any], size: int) -> Hop:
    _perform(actors, "rally", size, WARMUP)
    (times, first_s), (_, second_s) = _perform(actors, "rally", size, ROUNDS)
    call_s, both_s = np.quantile(times, QUANTILE, axis=0).tolist()
    return Hop(size, call_s, both_s / 2, (first_s + second_s) / (2 * ROUNDS))


def _step_s(actors: Sequence[Any]) -> float:
    """Return the driver's seconds for the two calls of an empty step."""
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        _perform(actors, "rest")
        _perform(actors, "rest")
        times.append(time.perf_counter() - start)
    return float(np.quantile(times, QUANTILE))
