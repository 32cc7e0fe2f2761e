"""The fast kernel and its inputs: if the schedule fixes the order of messages on every wire, one pass in topological order is exact.

This is the case if each worker has its own host. `event_loop.py` handles wires shared by several workers, and hosts with too few
cores. All times are seconds from the start of the step. The last axis of arrays is lanes, one per network.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from raysim.network.event_loop import F64, I64, jitter_draw
from raysim.network.profile import Floats, Profile
from raysim.network.rounds import equal_hosts
from raysim.network.topology import Network, Placement, links
from raysim.network.wiring import REPLICA_SEEDS, Ends, Moments, check_complete
from raysim.schedules.arrays import ActionTable
from raysim.schedules.families import Schedule

Costs = tuple[F64, F64, F64, F64]
"""Costs of networks: seconds per byte on the wire, latency, and the token bucket's burst in seconds of sending, each (stage, op,
lane); and jitter (lane,)."""

LANES = 64  # networks per pass: enough to fill vector units, few enough to stay in cache


class Inputs(NamedTuple):
    """Inputs of the kernel."""

    table: ActionTable
    busy_s: F64
    """By (profile, stage, op, microbatch or 1): decode + compute + encode."""
    wire_bytes: F64
    """Bytes moved, by the same axes."""
    trips: F64
    """One-way latencies paid per packet, by the same axes."""
    overheads: F64
    """By (profile, 3): seconds to hand a packet over, per message, and per byte."""
    blocking: NDArray[np.bool_]
    """By profile: a worker goes on when its packet has arrived."""
    seeds: I64
    """By profile."""
    costs: Costs
    wires: NDArray[np.int32]
    """By (stage, op): the packet's wire, or -1 within a host."""
    inbound: bool
    """Wires serve packets in the receiver's order and include the latency; otherwise in the sender's order."""


@dataclass(frozen=True)
class OrderedWiring:
    """Network inputs of the kernel: wires and costs of each replica that differs from those before it."""

    table: ActionTable
    row: NDArray[np.int64]
    """By replica: its entry in the lists below."""
    replicas: NDArray[np.int64]
    """By entry: the replica priced."""
    wires: list[NDArray[np.int32]]
    """By entry: (stage, op) to wire, -1 within a host."""
    costs: list[list[Costs]]
    """By entry and block of networks."""
    inbound: bool

    @classmethod
    def of(
        cls, table: ActionTable, networks: Sequence[Network], placement: Placement, ends: Ends, *, equal: bool
    ) -> OrderedWiring:
        """Return the inputs for networks with the same hosts, or with any number of hosts; `equal` replicas have equal costs."""
        inbound = networks[0].sharing == "inbound"
        blocks = [networks[low : low + LANES] for low in range(0, len(networks), LANES)]
        first = _equal_replicas(networks, placement, table.num_workers) if equal else np.arange(len(ends.source))
        replicas, row = np.unique(first, return_inverse=True)
        own = [Ends(*(part[replica] for part in ends)) for replica in replicas.tolist()]
        wires = [replica.wires(inbound=inbound) for replica in own]
        costs = [[_lane_costs(block, replica) for block in blocks] for replica in own]
        return cls(table, row, replicas, wires, costs, inbound)

    def run(
        self, schedule: Schedule, profiles: Sequence[Profile], seed: int, *, keep: bool = False
    ) -> Iterator[Moments]:
        """Yield the moments of each profile's step, all of one shape; keep the times of the last."""
        table, count = self.table, len(profiles)
        shape = (table.num_stages, profiles[0].compute_s.shape[2], table.num_microbatches)
        times = np.full((4, len(self.wires), *shape), np.nan) if keep else None
        free, done = [], []
        for entry, (replica, wires, blocks) in enumerate(
            zip(self.replicas.tolist(), self.wires, self.costs, strict=True)
        ):
            r = replica if profiles[0].num_replicas > 1 else 0
            kept = (np.empty((0, 1)),) * 4 if times is None else tuple(part[entry].reshape(-1, 1) for part in times)
            inputs = Inputs(
                table=table,
                busy_s=_stack([each.decode_s[r] + each.compute_s[r] + each.encode_s[r] for each in profiles]),
                wire_bytes=_stack([each.moved_bytes[r] for each in profiles]),
                trips=_stack([each.trips[r] for each in profiles]),
                overheads=np.array([(each.call_s, each.message_s, each.byte_s) for each in profiles]),
                blocking=np.array([each.blocking for each in profiles]),
                seeds=(seed + np.arange(count)) * REPLICA_SEEDS + replica,
                costs=blocks[0],
                wires=wires,
                inbound=self.inbound,
            )
            for costs in blocks:
                lanes = len(costs[-1])
                free.append(np.zeros((count, table.num_workers, lanes)))
                done.append(np.zeros((count, table.num_steps, table.num_stages, lanes)))
                ran = run_each(inputs._replace(costs=costs), kept, free[-1], done[-1].reshape(count, -1, lanes))
                check_complete(schedule, table, ran)
        for free_s, done_s in zip(self._joined(free), self._joined(done), strict=True):
            yield Moments(self.row, free_s, done_s, times)

    def _joined(self, parts: Sequence[Floats]) -> Floats:
        """Join the results of every entry's blocks: (profile, entry, ..., network)."""
        each = len(parts) // len(self.wires)
        whole = [np.concatenate(parts[r * each : (r + 1) * each], axis=-1) for r in range(len(self.wires))]
        return np.stack(whole, axis=1)


def _equal_replicas(networks: Sequence[Network], placement: Placement, num_workers: int) -> NDArray[np.int64]:
    """Return for each replica the first one with equal links between its workers, if only the schedule orders messages."""
    hosts = placement.by_replica(num_workers)
    replicas = np.arange(len(hosts))
    if any(network.jitter_s for network in networks):
        return replicas
    labels = equal_hosts(networks, placement.num_hosts)
    keys = replicas[:, None] * len(labels) + hosts
    _, first, index = np.unique(keys.reshape(-1), return_index=True, return_inverse=True)
    shared = (
        first[index.reshape(-1)].reshape(keys.shape) - replicas[:, None] * num_workers
    )  # the first worker on the same host
    _, first, index = np.unique(
        np.concatenate([labels[hosts], shared], axis=1), axis=0, return_index=True, return_inverse=True
    )
    return first[index.reshape(-1)]


def _stack(parts: Sequence[Floats]) -> Floats:
    """Stack arrays along a first axis of profiles; a single array, which may be large, is not copied."""
    return parts[0][None] if len(parts) == 1 else np.stack(parts)


def _lane_costs(networks: Sequence[Network], ends: Ends) -> Costs:
    """Return seconds per byte, latency and burst seconds by (stage, op, network), and jitter by network."""
    framing = np.array([network.framing for network in networks])
    bursts = np.array([network.burst_bytes for network in networks])
    jitter = np.array([network.jitter_s for network in networks])
    bandwidth, latency = links(networks, ends.source, ends.target)
    return 8 * framing / bandwidth, np.ascontiguousarray(latency), 8 * bursts / bandwidth, jitter


@njit(cache=True, nogil=True)
def run_each(inputs: Inputs, kept: tuple[F64, ...], free_s: F64, done_s: F64) -> int:
    """Fill the results of every profile; return the least number of executed actions, below the total on a deadlock.

    `kept`: start, end, begin and arrival by (slot, 1), filled unless empty. `free_s`: when each worker has finished its row
    (profile, worker, lane). `done_s`: when each stage has finished its last action of a step (profile, step * stage, lane).
    """
    fewest: int = len(inputs.table.stage)
    for p in range(len(inputs.seeds)):
        fewest = min(fewest, _run(inputs, p, kept, free_s[p], done_s[p]))
    return fewest


@njit(cache=True, nogil=True)
def _run(inputs: Inputs, p: int, kept: tuple[F64, ...], free_s: F64, done_s: F64) -> int:
    """Fill the results of profile `p`; return the number of executed actions."""
    table, wire, inbound, seed = inputs.table, inputs.wires, inputs.inbound, inputs.seeds[p]
    busy_s, wire_bytes, trips = inputs.busy_s[p], inputs.wire_bytes[p], inputs.trips[p]
    call_s, message_s, byte_s = inputs.overheads[p, 0], inputs.overheads[p, 1], inputs.overheads[p, 2]
    blocking = inputs.blocking[p]
    byte_wire_s, latency_s, burst_s, jitter_s = inputs.costs
    num_workers, num_stages, num_ops = len(table.offsets) - 1, len(table.owner), busy_s.shape[1]
    num_microbatches, per_step = table.num_microbatches, table.num_microbatches // table.num_steps
    start_s, end_s, begin_s, arrive_s = kept
    lanes = len(jitter_s)
    num_wires = wire.max() + 1
    keep = len(start_s) > 0
    if not keep:
        arrive_s = np.empty((num_stages * num_ops * num_microbatches, lanes))
    jittered = jitter_s.max() > 0
    wide_busy = busy_s.shape[2] > 1
    wide_wire = wire_bytes.shape[2] > 1

    wire_free = np.zeros((num_wires + 1, lanes))
    last_arrival = np.zeros((num_wires + 1, lanes))
    sent = np.zeros(num_stages * num_ops * num_microbatches, np.bool_)
    heads = table.offsets[:-1].copy()
    awaits = np.full(num_workers, -1, np.int64)
    stack = np.empty(num_workers, np.int64)
    for worker in range(num_workers):
        stack[worker] = num_workers - 1 - worker
    depth = num_workers
    count = 0

    while depth > 0:
        depth -= 1
        worker = stack[depth]
        while heads[worker] < table.offsets[worker + 1]:
            i = heads[worker]
            stage, op, m = table.stage[i], table.op[i], table.microbatch[i]
            slot = (stage * num_ops + op) * num_microbatches + m

            source = -1
            if op == 0 and stage > 0:
                source = ((stage - 1) * num_ops) * num_microbatches + m
            elif op == 1 and stage < num_stages - 1:
                source = ((stage + 1) * num_ops + 1) * num_microbatches + m
            if source >= 0 and not sent[source]:
                awaits[worker] = source
                break

            if source >= 0 and inbound:
                from_stage = stage - 1 if op == 0 else stage + 1
                size = wire_bytes[from_stage, op, m if wide_wire else 0]
                w = wire[from_stage, op]
                if w >= 0:
                    for k in range(lanes):
                        begin = max(wire_free[w, k], arrive_s[source, k])  # so far: when it was ready
                        latency = trips[from_stage, op, m if wide_wire else 0] * latency_s[from_stage, op, k]
                        if jittered:
                            latency += jitter_s[k] * jitter_draw(seed, source)
                        arrive = begin + latency + size * byte_wire_s[from_stage, op, k]
                        arrive_s[source, k] = arrive
                        wire_free[w, k] = arrive
                        if keep:
                            begin_s[source, 0] = begin

            sends = (op == 0 and stage < num_stages - 1) or (op == 1 and stage > 0)
            busy = busy_s[stage, op, m if wide_busy else 0] + (call_s if sends else 0.0)
            size = wire_bytes[stage, op, m if wide_wire else 0]
            path = message_s + byte_s * size
            w = wire[stage, op]
            for k in range(lanes):
                start = free_s[worker, k]
                if source >= 0:
                    start = max(start, arrive_s[source, k])
                end = start + busy
                free_s[worker, k] = end
                done_s[m // per_step * num_stages + stage, k] = end
                if keep:
                    start_s[slot, 0] = start
                    end_s[slot, 0] = end
                if not sends:
                    continue
                ready = end + path
                if w < 0 or inbound:
                    arrive_s[slot, k] = ready
                    if keep:
                        begin_s[slot, 0] = ready
                    if blocking:
                        free_s[worker, k] = ready
                    continue
                # A token bucket delays a packet by the backlog of a plain queue minus the burst.
                queued = max(wire_free[w, k], ready)
                owed = queued + size * byte_wire_s[stage, op, k]
                wire_free[w, k] = owed
                latency = trips[stage, op, m if wide_wire else 0] * latency_s[stage, op, k]
                if jittered:
                    latency += jitter_s[k] * jitter_draw(seed, slot)
                forgiven = burst_s[stage, op, k]
                begin = max(queued - forgiven, ready)
                arrive = max(max(owed - forgiven, ready) + latency, last_arrival[w, k])
                last_arrival[w, k] = arrive
                arrive_s[slot, k] = arrive
                if blocking:
                    free_s[worker, k] = arrive
                if keep:
                    begin_s[slot, 0] = begin
            if sends:
                sent[slot] = True
                target = table.owner[stage + 1 if op == 0 else stage - 1]
                if awaits[target] == slot:
                    awaits[target] = -1
                    stack[depth] = target
                    depth += 1
            heads[worker] = i + 1
            count += 1
    return count
