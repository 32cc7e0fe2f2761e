"""A schedule, a placement, networks and a profile as the records of the event loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysim.network.profile import Profile
from raysim.network.timeline import alone_s
from raysim.network.topology import Network, Placement
from raysim.network.wires import REPLICA_SEEDS, Floats, Records, check_complete, ends_of
from raysim.schedules.arrays import ActionTable
from raysim.schedules.families import Schedule

ACTION = np.dtype(
    [
        ("replica", np.int64),
        ("number", np.int64),  # within its replica
        ("part", np.int64),  # (replica * stages + stage) * steps + step
        ("needs", np.int64),  # the action whose packet it needs, -1 where it needs none
        ("queue", np.int64),  # of `posted` for the packet that it sends, -1 where it sends none
        ("there", np.int64),  # channel to the receiver of its packet, -1 within a host
        ("back", np.int64),  # channel from that receiver
    ],
    align=True,
)
"""An action and its packet, numbered by (replica, stage, op, microbatch): fixed by schedule and placement."""

COST = np.dtype(
    [
        ("decode_s", np.float64),
        ("compute_s", np.float64),  # alone on its cores
        ("encode_s", np.float64),  # with handing the packet over
        ("wire_bytes", np.float64),
        ("messages", np.int64),  # there and back in turn; the last is the packet itself, the others are short
        ("trips", np.float64),  # how often each of them pays the latency
    ],
    align=True,
)
"""Seconds and bytes of an action: fixed by the profile."""

PROGRESS = np.dtype(
    [
        ("start_s", np.float64),  # results, in seconds from the start of the step; NaN where there is no such time
        ("end_s", np.float64),
        ("begin_s", np.float64),  # of the packet's transfer
        ("arrive_s", np.float64),
        ("due", np.float64),  # when the packet's message comes to the wire, or off it to the host
        ("to_come", np.int64),  # messages of the packet that have not arrived
        ("after", np.int64),  # the next packet of the same queue
        ("delivered", np.bool_),
    ],
    align=True,
)
"""State of an action and of its packet."""

WORKER = np.dtype(
    [
        ("machine", np.int64),
        ("threads", np.int64),  # at work while it computes
        ("head", np.int64),  # index of its next action in `rows`
        ("stop", np.int64),  # end of its row there
        ("phase", np.int64),  # 0 while it waits
        ("action", np.int64),  # the action it works on
        ("left", np.float64),  # seconds of the phase at full speed that were left at `since`
        ("speed", np.float64),
        ("since", np.float64),
        ("finish", np.float64),  # when the phase will end, infinite while it waits
        ("free_s", np.float64),  # the result: when its last action ended
    ],
    align=True,
)
"""A worker of a replica and its state."""

MACHINE = np.dtype([("cores", np.float64), ("threads", np.float64)], align=True)
"""The cores of a machine, infinite where workers never slow one another down, and the threads at work on them."""

QUEUE = np.dtype([("first", np.int64), ("last", np.int64)], align=True)
"""First and last packet of a queue, -1 where it is empty; `PROGRESS` links them by `after`."""

CHANNEL = np.dtype(
    [
        ("rate", np.float64),  # payload bytes/s
        ("latency_s", np.float64),
        ("jitter_s", np.float64),
        ("out", np.int64),  # the sending port, where ports are shared
        ("into", np.int64),  # the receiving port
        ("bucket", np.int64),
        ("wired", QUEUE),  # packets with a message at the wire, of which the first is on it: the flow
        ("flying", QUEUE),  # packets with a message that arrives after the latency
        ("share", np.float64),  # the rate that a flow would get now
        ("fresh", np.bool_),  # the flow has not begun
        ("left", np.float64),  # bytes of the flow that were left at `since`
        ("speed", np.float64),  # its rate
        ("since", np.float64),
        ("finish", np.float64),  # when it will be through, infinite where there is none
        ("last_due", np.float64),  # arrival of the latest message: none overtakes another
    ],
    align=True,
)
"""One direction between two hosts, and its state."""

BUCKET = np.dtype(
    [
        ("burst_bytes", np.float64),  # its size
        ("refill", np.float64),  # bytes/s
        ("tokens", np.float64),
        ("idle_since", np.float64),
        ("sending", np.int64),  # number of flows
    ],
    align=True,
)
"""A token bucket: one at every outgoing port, or at every channel where ports are not shared."""

PORT = np.dtype([("rate", np.float64), ("left", np.float64), ("users", np.int64)], align=True)
"""A port of a host and its rate in payload bytes/s. While rates are shared out: the rate left, and the flows that wait for theirs."""

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
