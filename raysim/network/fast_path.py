"""The fast kernel and its inputs: the schedule fixes the order of messages on every wire, so one pass in topological order is exact.

It is exact where each worker has a host of its own. `event_loop.py` serves wires that several workers share, and hosts with too
few cores. All times are seconds from the start of the step. Arrays end in a lane axis: one lane is one network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from raysim.network.event_loop import F64, I64, uniform
from raysim.network.profile import Floats, Profile
from raysim.network.topology import Network, Placement
from raysim.network.wiring import REPLICA_SEEDS, Ends, check_complete
from raysim.schedules.arrays import ActionTable
from raysim.schedules.families import Schedule

Costs = tuple[F64, F64, F64, F64]
"""Of networks: seconds a byte on the wire, latency, and seconds of sending that the token bucket forgives, each (stage, op, lane);
and jitter (lane,)."""

LANES = 64  # networks per pass: enough to fill vector units, few enough to stay in cache


@dataclass(frozen=True)
class OrderedWiring:
    """Inputs of the kernel about networks: for each replica its wires, and for each block of networks their costs."""

    table: ActionTable
    wires: list[NDArray[np.int32]]
    """By replica: (stage, op) to wire, -1 within a host."""
    costs: list[list[Costs]]
    """By replica and block."""
    inbound: bool

    @classmethod
    def of(cls, table: ActionTable, networks: Sequence[Network], placement: Placement, ends: Ends) -> OrderedWiring:
        """Return the inputs for networks that name their hosts alike, or of which none does."""
        inbound = networks[0].sharing == "inbound"
        blocks = [networks[low : low + LANES] for low in range(0, len(networks), LANES)]
        replicas = [Ends(*parts) for parts in zip(*ends, strict=True)]
        wires = [replica.wires(inbound=inbound) for replica in replicas]
        costs = [[_lane_costs(block, replica) for block in blocks] for replica in replicas]
        return cls(table, wires, costs, inbound)

    def run(
        self, schedule: Schedule, profiles: Sequence[Profile], seed: int, keep: Sequence[Floats] = ()
    ) -> Iterator[tuple[Floats, Floats]]:
        """Yield for each profile, all of one shape, what `SharedWiring.run` does; fill `keep` by the last profile and network."""
        table, count = self.table, len(profiles)
        overheads = np.array([(profile.call_s, profile.message_s, profile.byte_s) for profile in profiles])
        free, done = [], []
        for replica, (wire, blocks) in enumerate(zip(self.wires, self.costs, strict=True)):
            r = replica if profiles[0].num_replicas > 1 else 0
            busy = _stack([profile.decode_s[r] + profile.compute_s[r] + profile.encode_s[r] for profile in profiles])
            sizes = _stack([profile.moved_bytes[r] for profile in profiles])
            trips = _stack([profile.trips[r] for profile in profiles])
            kept = tuple(array[replica].reshape(-1, 1) for array in keep) or (np.empty((0, 1)),) * 4
            for block in blocks:
                width = len(block[-1])
                lane_free = np.zeros((count, table.num_workers, width))
                lane_done = np.zeros((count, table.num_steps, table.num_stages, width))
                fewest = run_each(
                    table,
                    busy,
                    sizes,
                    trips,
                    overheads,
                    block,
                    wire,
                    self.inbound,
                    (seed + np.arange(count)) * REPLICA_SEEDS + replica,
                    kept,
                    lane_free,
                    lane_done.reshape(count, -1, width),
                )
                check_complete(schedule, table, fewest)
                free.append(lane_free)
                done.append(lane_done)
        yield from zip(self._joined(free), self._joined(done), strict=True)

    def _joined(self, parts: Sequence[Floats]) -> Floats:
        """Return the results of the blocks of every replica: (profile, replica, ..., network)."""
        each = len(parts) // len(self.wires)
        whole = [np.concatenate(parts[r * each : (r + 1) * each], axis=-1) for r in range(len(self.wires))]
        return np.stack(whole, axis=1)


def _stack(parts: Sequence[Floats]) -> Floats:
    """Return arrays with a first axis of profiles; a single one, which may be large, is not copied."""
    return parts[0][None] if len(parts) == 1 else np.stack(parts)


def _lane_costs(networks: Sequence[Network], ends: Ends) -> Costs:
    """Return seconds a byte, latency and forgiven burst by (stage, op, network), and jitter by network."""
    framing = np.array([network.framing for network in networks])
    bursts = np.array([network.burst_bytes for network in networks])
    jitter = np.array([network.jitter_s for network in networks])
    if all(network.num_hosts is None for network in networks):
        across = (ends.source != ends.target)[..., None]
        bandwidth = np.where(across, np.array([network.bandwidth_bps for network in networks]), math.inf)
        latency = np.where(across, np.array([network.latency_s for network in networks]), 0.0)
    else:
        bandwidth = np.stack([network.bandwidths_bps(ends.source, ends.target) for network in networks], axis=-1)
        latency = np.stack([network.latencies_s(ends.source, ends.target) for network in networks], axis=-1)
    byte_wire = 8 * framing / bandwidth
    return byte_wire, np.ascontiguousarray(latency), 8 * bursts / bandwidth, jitter


@njit(cache=True, nogil=True)
def run_each(
    table: ActionTable,
    busy_s: F64,  # (profile, stage, op, microbatch or 1): decode + compute + encode
    wire_bytes: F64,  # of the same shape, as `trips`
    trips: F64,  # how often a packet pays the latency
    overheads: F64,  # (profile, 3): seconds to hand a packet over, for a message, and for a byte of it
    costs: Costs,
    wires: NDArray[np.int32],  # (stage, op): the wire that a packet takes, or -1 within a host
    inbound: bool,  # the receiver's order and latency on the wire, instead of the sender's order
    seeds: I64,  # (profile,)
    kept: tuple[F64, ...],  # start, end, begin and arrival by (slot, 1), filled unless they are empty
    free_s: F64,  # (profile, worker, lane): when the worker has done its row
    done_s: F64,  # (profile, step * stage, lane): when the stage has done its last action of the step
) -> int:
    """Fill the results of every profile, and return the fewest actions that ran: fewer than there are where the rows deadlock."""
    slots = len(table.owner) * busy_s.shape[2] * table.num_microbatches
    fewest: int = len(table.stage)
    for p in range(len(seeds)):
        arrive_s = kept[3] if len(kept[3]) else np.empty((slots, len(costs[3])))
        count = _run(
            table,
            busy_s[p],
            wire_bytes[p],
            trips[p],
            overheads[p],
            costs,
            wires,
            inbound,
            seeds[p],
            kept,
            arrive_s,
            free_s[p],
            done_s[p],
        )
        fewest = min(fewest, count)
    return fewest


@njit(cache=True, nogil=True)
def _run(
    table: ActionTable,
    busy_s: F64,
    wire_bytes: F64,
    trips: F64,
    overheads: F64,
    costs: Costs,
    wire: NDArray[np.int32],
    inbound: bool,
    seed: int,
    kept: tuple[F64, ...],
    arrive_s: F64,  # (slot, lane): when the packet that leaves an action is there
    free_s: F64,
    done_s: F64,
) -> int:
    """Fill the results of one profile, and return how many actions ran."""
    num_workers, num_stages, num_ops = len(table.offsets) - 1, len(table.owner), busy_s.shape[1]
    num_microbatches, per_step = table.num_microbatches, table.num_microbatches // table.num_steps
    call_s, message_s, byte_s = overheads[0], overheads[1], overheads[2]
    byte_wire_s, latency_s, burst_s, jitter_s = costs
    start_s, end_s, begin_s, _ = kept
    lanes = len(jitter_s)
    num_wires = wire.max() + 1
    keep = len(start_s) > 0
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
                        begin = max(wire_free[w, k], arrive_s[source, k])  # so far: when it was ready to go
                        latency = trips[from_stage, op, m if wide_wire else 0] * latency_s[from_stage, op, k]
                        if jittered:
                            latency += jitter_s[k] * uniform(seed, source)
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
                    continue
                # A token bucket owes what a plain queue would still have to send, less the burst it forgives.
                queued = max(wire_free[w, k], ready)
                owed = queued + size * byte_wire_s[stage, op, k]
                wire_free[w, k] = owed
                latency = trips[stage, op, m if wide_wire else 0] * latency_s[stage, op, k]
                if jittered:
                    latency += jitter_s[k] * uniform(seed, slot)
                forgiven = burst_s[stage, op, k]
                begin = max(queued - forgiven, ready)
                arrive = max(max(owed - forgiven, ready) + latency, last_arrival[w, k])
                last_arrival[w, k] = arrive
                arrive_s[slot, k] = arrive
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
