"""Choice of the kernel for a step, and the records of the event loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.network.profile import Floats, Profile
from raysim.network.topology import Network, Placement, links
from raysim.schedules.actions import topological_order
from raysim.schedules.arrays import ActionTable
from raysim.schedules.families import Schedule

Records = NDArray[Any]

REPLICA_SEEDS = 65_536  # distance between the seeds of steps; replicas count up from the step's seed


class Ends(NamedTuple):
    """Source and target hosts of each (replica, stage, op); equal if nothing is sent."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    sender: NDArray[np.int64]
    """Index of the sending worker over all replicas."""
    receiver: NDArray[np.int64]

    @classmethod
    def of(cls, table: ActionTable, placement: Placement, num_ops: int) -> Ends:
        """Return the ends of all packets."""
        workers = np.arange(len(placement.hosts)).reshape(-1, table.num_workers)[:, table.owner]
        sender = np.repeat(workers[..., None], num_ops, axis=2)
        receiver = sender.copy()
        receiver[:, :-1, 0] = workers[:, 1:]
        receiver[:, 1:, 1] = workers[:, :-1]
        hosts = np.array(placement.hosts, np.int64)
        return cls(hosts[sender], hosts[receiver], sender, receiver)

    def wires(self, *, inbound: bool) -> NDArray[np.int32]:
        """Return the wire of each packet, -1 within a host: one per pair of hosts, or per receiving host."""
        key = self.target if inbound else self.source * (self.target.max() + 1) + self.target
        across = self.source != self.target
        wires = np.full(key.shape, -1, np.int32)
        wires[across] = np.unique(key[across], return_inverse=True)[1]
        return wires

    def busiest_wire_s(self, table: ActionTable, profile: Profile, networks: Sequence[Network]) -> Floats:
        """Return the seconds in which the busiest pair of hosts can move the packets of a step, by network."""
        across = self.source != self.target
        if not across.any():
            return np.zeros(len(networks))
        sizes = np.broadcast_to(table.per_step * profile.wire_bytes.mean(axis=-1), across.shape)[across]
        wire = self.wires(inbound=False)[across]
        _, first = np.unique(wire, return_index=True)
        loads = np.bincount(wire, sizes)[:, None]
        bandwidth, _ = links(networks, self.source[across][first], self.target[across][first])
        seconds = 8 * np.array([network.framing for network in networks]) * loads / bandwidth
        busiest: Floats = seconds.max(axis=0)
        return busiest


class Moments(NamedTuple):
    """Moments at which a step's work is done, on each network. Replicas with equal times share a row."""

    row: NDArray[np.int64]
    """By replica."""
    free_s: Floats
    """End of each worker's work (row, worker, network)."""
    done_s: Floats
    """End of each stage's work in each step (row, step, stage, network)."""
    times: Floats | None
    """If kept: start, end, begin and arrival of each action on the last network (4, row, stage, op, microbatch)."""


def are_ordered(networks: Sequence[Network], ends: Ends, placement: Placement, *, asked: bool) -> NDArray[np.bool_]:
    """Return for which of `networks` (all "inbound" or none) the schedule alone fixes the order of all messages.

    It does if each wire has one worker at the end that orders it, workers share no cores, and no receivers' requests (sent if
    `asked`) queue behind packets.
    """
    inbound = networks[0].sharing == "inbound"
    wires = ends.wires(inbound=inbound)
    across = wires >= 0
    wire, worker = wires[across], (ends.receiver if inbound else ends.sender)[across]
    user = np.zeros(wires.max() + 1, np.int64)
    user[wire] = worker
    alone = placement.cores is None and bool((user[wire] == worker).all())
    if inbound and not alone:
        raise ValueError(f'`sharing` "inbound" needs one worker on each host and no `cores`, but got {placement!r}.')

    def queues(network: Network) -> bool:
        return network.sharing != "pair" or (
            asked and bool(np.isfinite(network.bandwidth_bps).any() or network.window_bytes)
        )

    return np.array([alone and (inbound or not queues(network)) for network in networks])


def check_complete(schedule: Schedule, table: ActionTable, count: int, replicas: int = 1) -> None:
    """Raise ValueError naming the blocked action if not all actions ran."""
    if count < replicas * len(table.op):
        topological_order(schedule.rows(table.num_stages, table.num_microbatches), table.num_stages)
        raise AssertionError(f"{schedule!r} has an order, but {count} of {len(table.op)} actions ran.")


ACTION = np.dtype(
    [
        ("replica", np.int64),
        ("number", np.int64),  # within its replica
        ("part", np.int64),  # (replica * stages + stage) * steps + step
        ("needs", np.int64),  # the action whose packet it needs, or -1
        ("queue", np.int64),  # index in `posted` for the packet it sends, or -1
        ("there", np.int64),  # channel to the receiver of its packet, -1 within a host
        ("back", np.int64),  # channel from that receiver
    ],
    align=True,
)
"""An action and its packet, indexed by (replica, stage, op, microbatch); fixed by schedule and placement."""

COST = np.dtype(
    [
        ("decode_s", np.float64),
        ("compute_s", np.float64),  # with exclusive cores
        ("encode_s", np.float64),  # including the hand-over of the packet
        ("wire_bytes", np.float64),
        ("messages", np.int64),  # alternating in direction; the last is the packet itself, the others are short
        ("trips", np.float64),  # how often each message pays the latency
    ],
    align=True,
)
"""Seconds and bytes of an action, fixed by the profile."""

PROGRESS = np.dtype(
    [
        ("start_s", np.float64),  # results, in seconds from the start of the step; NaN if missing
        ("end_s", np.float64),
        ("begin_s", np.float64),  # of the packet's transfer
        ("arrive_s", np.float64),
        ("due", np.float64),  # when the packet's current message reaches the wire, or arrives at the host
        ("to_come", np.int64),  # number of the packet's messages yet to arrive
        ("after", np.int64),  # the next packet of the same queue
        ("delivered", np.bool_),
    ],
    align=True,
)
"""State of an action and of its packet."""

WORKER = np.dtype(
    [
        ("machine", np.int64),
        ("threads", np.int64),  # active threads while it computes
        ("head", np.int64),  # index of its next action in `rows`
        ("stop", np.int64),  # end of its row there
        ("phase", np.int64),  # 0 while it waits
        ("action", np.int64),  # the action it works on
        ("left", np.float64),  # seconds of the phase, at full speed, remaining at `since`
        ("speed", np.float64),
        ("since", np.float64),
        ("finish", np.float64),  # when the phase will end; infinity while it waits
        ("free_s", np.float64),  # the result: when its last action ended
    ],
    align=True,
)
"""A worker of a replica and its state."""

MACHINE = np.dtype([("cores", np.float64), ("threads", np.float64)], align=True)
"""A machine's cores, infinite if workers never slow each other down, and its active threads."""

QUEUE = np.dtype([("first", np.int64), ("last", np.int64)], align=True)
"""First and last packet of a queue, -1 if empty; packets are linked by `after` in `PROGRESS`."""

CHANNEL = np.dtype(
    [
        ("rate", np.float64),  # payload bytes/s
        ("latency_s", np.float64),
        ("jitter_s", np.float64),
        ("out", np.int64),  # the sending port, if ports are shared
        ("into", np.int64),  # the receiving port
        ("bucket", np.int64),
        ("wired", QUEUE),  # packets with a message at the wire; the first is being sent (the flow)
        ("flying", QUEUE),  # packets with a sent message that arrives after the latency
        ("share", np.float64),  # the rate available to a flow now
        ("fresh", np.bool_),  # the flow has not started
        ("left", np.float64),  # bytes of the flow remaining at `since`
        ("speed", np.float64),  # its rate
        ("since", np.float64),
        ("finish", np.float64),  # when the flow will be done; infinity without a flow
        ("last_due", np.float64),  # arrival of the latest message, so that none overtakes another
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
"""A token bucket: one per outgoing port, or per channel if ports are not shared."""

PORT = np.dtype([("rate", np.float64), ("left", np.float64), ("users", np.int64)], align=True)
"""A host's port and its rate in payload bytes/s. While rates are assigned: the remaining rate and the flows without one."""

RESULTS = ("start_s", "end_s", "begin_s", "arrive_s")


@dataclass(frozen=True)
class SharedWiring:
    """Inputs of the event loop shared by all profiles, with its initial state.

    The kernel modifies state in place, so every run copies it. It resets `machines` and ports itself.
    """

    table: ActionTable
    placement: Placement
    rows: NDArray[np.int64]
    """The actions of each replica's workers, in order."""
    actions: Records
    """By (replica, stage, op, microbatch)."""
    workers: Records
    machines: Records
    networks: list[tuple[Records, Records, Records]]
    """Channels, buckets and ports of each network."""

    @classmethod
    def of(cls, table: ActionTable, networks: Sequence[Network], placement: Placement, ends: Ends) -> SharedWiring:
        """Return the inputs for networks with the same hosts, or with any number of hosts."""
        source, target, size = ends.source, ends.target, placement.num_hosts
        ways = np.unique([source * size + target, target * size + source])  # both directions, for requests and answers
        ways = ways[ways // size != ways % size]
        channel = np.full((size, size), -1)
        channel[ways // size, ways % size] = np.arange(len(ways))
        actions = _actions(table, channel[source, target], channel[target, source])
        workers, machines = _workers(table, placement, len(actions))
        return cls(
            table=table,
            placement=placement,
            rows=np.arange(actions.size).reshape(actions.shape)[:, table.stage, table.op, table.microbatch].reshape(-1),
            actions=actions,
            workers=workers,
            machines=machines,
            networks=[_wires(network, ways // size, ways % size, size) for network in networks],
        )

    def run(
        self, schedule: Schedule, profiles: Sequence[Profile], seed: int, *, keep: bool = False
    ) -> Iterator[Moments]:
        """Yield the moments of each profile's step; the k-th profile's jitter uses `seed` + k."""
        from raysim.network.event_loop import State, run_shared  # loads kernels, which is slow: only on first use

        (replicas, stages), count, steps = self.actions.shape[:2], len(self.networks), self.table.num_steps
        for i, profile in enumerate(profiles):
            costs = self._costs(profile).reshape(-1)
            free, done = np.empty((count, len(self.workers))), np.zeros((count, replicas * stages * steps))
            times = np.empty((4, *self.actions.shape)) if keep else None
            for n, (channels, buckets, ports) in enumerate(self.networks):
                progress, workers = np.zeros(self.actions.size, PROGRESS), self.workers.copy()
                for name in RESULTS:
                    progress[name] = math.nan
                state = State(
                    rows=self.rows,
                    actions=self.actions.reshape(-1),
                    costs=costs,
                    progress=progress,
                    workers=workers,
                    machines=self.machines,
                    posted=np.full(2 * len(workers), -1, np.int64).repeat(2).view(QUEUE),  # one per op that sends
                    channels=channels.copy(),
                    buckets=buckets.copy(),
                    ports=ports,
                    done_s=done[n],
                )
                ran = run_shared(state, profile.message_s, profile.byte_s, profile.blocking, (seed + i) * REPLICA_SEEDS)
                check_complete(schedule, self.table, ran, replicas)
                free[n] = workers["free_s"]
                if times is not None:
                    times[:] = [progress[name].reshape(self.actions.shape) for name in RESULTS]
            yield Moments(
                np.arange(replicas),
                free.T.reshape(replicas, -1, count),
                done.T.reshape(replicas, stages, steps, count).swapaxes(1, 2),
                times,
            )

    def _costs(self, profile: Profile) -> Records:
        costs = np.empty(self.actions.shape, COST)
        costs["decode_s"] = profile.decode_s
        costs["compute_s"] = profile.alone_s(self.placement)
        costs["encode_s"] = profile.encode_s + np.where(self.actions["queue"] >= 0, profile.call_s, 0.0)
        costs["wire_bytes"] = profile.moved_bytes
        costs["messages"] = profile.messages
        costs["trips"] = profile.trips / profile.messages
        return costs


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
    """Return the workers of all replicas, in the waiting phase, and their machines."""
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
    """Return idle channels from `source` to `target`, with their buckets and ports."""
    payload = 8 * network.framing  # bits on the wire for each byte of payload
    channels = np.zeros(len(source), CHANNEL)
    channels["rate"] = channels["share"] = network.bandwidths_bps(source, target) / payload
    channels["latency_s"] = network.latencies_s(source, target)
    channels["jitter_s"] = network.jitter_s
    channels["wired"]["first"] = channels["flying"]["first"] = -1
    channels["finish"] = math.inf
    port_rate = network.ports_bps(num_hosts) / payload if network.shares_ports else np.full((2, num_hosts), math.inf)
    if port_rate.min() < math.inf:
        half = network.sharing == "half"
        ports = np.zeros(num_hosts if half else 2 * num_hosts, PORT)
        ports["rate"] = port_rate[0] if half else port_rate.reshape(-1)
        channels["out"], channels["into"] = source, target if half else target + num_hosts
        channels["bucket"], refill = source, port_rate[0]
    else:
        ports = np.zeros(0, PORT)
        channels["bucket"], refill = np.arange(len(source)), channels["rate"]
    buckets = np.zeros(len(refill), BUCKET)
    buckets["burst_bytes"] = buckets["tokens"] = network.burst_bytes / network.framing
    buckets["refill"] = refill
    return channels, buckets, ports
