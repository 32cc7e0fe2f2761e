"""A schedule, a placement, networks and a profile as the records of the event loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysim.network.event_state import ACTION, BUCKET, CHANNEL, COST, MACHINE, PORT, PROGRESS, QUEUE, WORKER, Records
from raysim.network.placement import Placement
from raysim.network.profile import Profile
from raysim.network.timeline import alone_s
from raysim.network.topology import Network
from raysim.network.wires import REPLICA_SEEDS, Floats, check_complete, ends_of
from raysim.schedules.arrays import ActionTable
from raysim.schedules.families import Schedule

RESULTS = ("start_s", "end_s", "begin_s", "arrive_s")


@dataclass(frozen=True)
class SharedWiring:
    """Inputs of the event loop that serve all profiles, with its state before the step.

    The kernel changes state in place, so every run takes copies. It resets `machines` and ports itself.
    """

    table: ActionTable
    placement: Placement
    shape: tuple[int, ...]
    """Replicas, stages, ops and microbatches."""
    rows: NDArray[np.int64]
    """The actions of each worker of each replica in their order."""
    actions: Records
    progress: Records
    workers: Records
    machines: Records
    posted: Records
    networks: list[tuple[Records, Records, Records]]
    """Channels, buckets and ports of each network."""

    @classmethod
    def of(
        cls, table: ActionTable, networks: Sequence[Network], placement: Placement, replicas: int, num_ops: int
    ) -> SharedWiring:
        """Return the inputs for networks that name their hosts alike, or of which none does."""
        ends = [ends_of(table, placement, num_ops, replica) for replica in range(replicas)]
        source, target = np.stack([end.source for end in ends]), np.stack([end.target for end in ends])
        size = placement.num_hosts
        ways = np.unique([source * size + target, target * size + source])  # both, for questions and answers
        ways = ways[ways // size != ways % size]
        channel = np.full((size, size), -1)
        channel[ways // size, ways % size] = np.arange(len(ways))
        actions = _actions(table, channel[source, target], channel[target, source])
        progress = np.zeros(actions.size, PROGRESS)
        for name in RESULTS:
            progress[name] = math.nan
        workers, machines = _workers(table, placement, replicas)
        return cls(
            table=table,
            placement=placement,
            shape=actions.shape,
            rows=np.arange(actions.size).reshape(actions.shape)[:, table.stage, table.op, table.microbatch].reshape(-1),
            actions=actions.reshape(-1),
            progress=progress,
            workers=workers,
            machines=machines,
            posted=np.full(2 * len(workers), -1, np.int64).repeat(2).view(QUEUE),  # one for each op that sends
            networks=[_wires(network, ways // size, ways % size, size) for network in networks],
        )

    def run(
        self, schedule: Schedule, profile: Profile, seed: int, keep: Sequence[Floats] = ()
    ) -> tuple[Floats, Floats]:
        """Return when workers (replica, worker, network) are done, and stages with each step (replica, step, stage, network).

        Fill `keep`.
        """
        from raysim.network.event_loop import run_shared  # loads kernels, which takes time: only on first use

        replicas, stages = self.shape[:2]
        free = np.empty((len(self.networks), len(self.workers)))
        steps = self.table.num_steps
        done = np.zeros((len(self.networks), replicas * stages * steps))
        costs = self._costs(profile)
        for n, (channels, buckets, ports) in enumerate(self.networks):
            progress, workers = self.progress.copy(), self.workers.copy()
            count = run_shared(
                self.rows,
                self.actions,
                costs,
                progress,
                workers,
                self.machines,
                self.posted.copy(),
                channels.copy(),
                buckets.copy(),
                ports,
                done[n],
                profile.message_s,
                profile.byte_s,
                seed * REPLICA_SEEDS,
            )
            check_complete(schedule, self.table, count, replicas)
            free[n] = workers["free_s"]
            for array, name in zip(keep, RESULTS, strict=False):
                array[:] = progress[name].reshape(self.shape)
        return (
            free.T.reshape(replicas, -1, len(self.networks)),
            done.T.reshape(replicas, stages, steps, -1).swapaxes(1, 2),
        )

    def run_each(self, schedule: Schedule, profiles: Sequence[Profile], seed: int) -> Iterator[tuple[Floats, Floats]]:
        """Yield the results of `run` for each of several profiles; the k-th one's jitter is of `seed` + k."""
        for place, profile in enumerate(profiles):
            yield self.run(schedule, profile, seed + place)

    def _costs(self, profile: Profile) -> Records:
        """Return the costs of every action."""
        costs = np.empty(self.shape, COST)
        sends = self.actions["queue"].reshape(self.shape) >= 0
        messages = profile.messages
        costs["decode_s"] = profile.decode_s
        costs["compute_s"] = alone_s(profile, self.placement)
        costs["encode_s"] = profile.encode_s + np.where(sends, profile.call_s, 0.0)
        costs["wire_bytes"] = profile.moved_bytes
        costs["messages"] = messages
        costs["trips"] = profile.trips / messages
        return costs.reshape(-1)


def _actions(table: ActionTable, there: NDArray[np.int64], back: NDArray[np.int64]) -> Records:
    """Return all actions, (replica, stage, op, microbatch); `there` and `back` are channels by (replica, stage, op)."""
    actions = np.empty((*there.shape, table.num_microbatches), ACTION)
    replicas, stages = actions.shape[:2]
    numbers = np.arange(actions.size).reshape(actions.shape)
    actions["replica"] = np.arange(replicas)[:, None, None, None]
    actions["number"] = numbers[0]
    steps = np.arange(table.num_microbatches) // table.per_step
    actions["part"] = np.arange(replicas * stages).reshape(replicas, stages, 1, 1) * table.num_steps + steps
    actions["needs"] = actions["queue"] = -1
    actions["needs"][:, 1:, 0] = numbers[:, :-1, 0]
    actions["needs"][:, :-1, 1] = numbers[:, 1:, 1]
    worker = np.arange(replicas)[:, None, None] * table.num_workers + table.owner[:, None]
    actions["queue"][:, :-1, 0] = 2 * worker[:, :-1]
    actions["queue"][:, 1:, 1] = 2 * worker[:, 1:] + 1
    actions["there"] = there[..., None]
    actions["back"] = back[..., None]
    return actions


def _workers(table: ActionTable, placement: Placement, replicas: int) -> tuple[Records, Records]:
    """Return the workers of all replicas, which wait, and the machines that they are on."""
    hosts = np.array(placement.hosts, np.int64)
    workers = np.zeros(len(hosts), WORKER)
    begin = np.arange(replicas)[:, None] * len(table.op)
    workers["machine"] = hosts if placement.machines is None else np.array(placement.machines, np.int64)[hosts]
    workers["threads"] = placement.threads
    workers["head"] = (begin + table.offsets[:-1]).reshape(-1)
    workers["stop"] = (begin + table.offsets[1:]).reshape(-1)
    workers["finish"] = math.inf
    machines = np.zeros(int(workers["machine"].max()) + 1, MACHINE)
    machines["cores"] = math.inf if placement.cores is None else placement.cores[: len(machines)]
    return workers, machines


def _wires(
    network: Network, source: NDArray[np.int64], target: NDArray[np.int64], num_hosts: int
) -> tuple[Records, Records, Records]:
    """Return channels from `source` to `target`, on which nothing is, with their buckets and their ports."""
    payload = 8 * network.framing  # bits on the wire for each byte of payload
    channels = np.zeros(len(source), CHANNEL)
    channels["rate"] = channels["share"] = network.bandwidths_bps(source, target) / payload
    channels["latency_s"] = network.latencies_s(source, target)
    channels["jitter_s"] = network.jitter_s
    channels["wired"]["first"] = channels["flying"]["first"] = -1
    channels["finish"] = math.inf
    port_rate = network.ports_bps(num_hosts) / payload if network.shares_ports else np.full(num_hosts, math.inf)
    if port_rate.min() < math.inf:
        half = network.sharing == "half"
        ports = np.zeros(num_hosts if half else 2 * num_hosts, PORT)
        ports["rate"] = port_rate if half else np.tile(port_rate, 2)
        channels["out"], channels["into"] = source, target if half else target + num_hosts
        channels["bucket"], refill = source, port_rate
    else:
        ports = np.zeros(0, PORT)
        channels["bucket"], refill = np.arange(len(source)), channels["rate"]
    buckets = np.zeros(len(refill), BUCKET)
    buckets["burst_bytes"] = buckets["tokens"] = network.burst_bytes / network.framing
    buckets["refill"] = refill
    return channels, buckets, ports
