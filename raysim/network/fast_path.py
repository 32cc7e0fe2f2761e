"""The fast kernel: the schedule fixes the order of messages on every wire, so one pass in topological order is exact.

It is exact where each worker has a host of its own. `event_loop.py` serves wires that several workers share, and hosts with too
few cores. All times are seconds from the start of the step. Arrays end in a lane axis: one lane is one network.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]


@njit(cache=True, inline="always")
def uniform(seed: int, slot: int) -> float:
    """Return a number in [-1, 1) that depends on its arguments alone (SplitMix64), so that networks see the same draws."""
    # `event_loop.py` inlines this function, unseen by numba's cache: clear `__pycache__` after a change.
    z = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(slot + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) * 2.0**-52 - 1.0


@njit(cache=True, nogil=True)
def run_ordered(
    offsets: I64,
    stages: I32,
    ops: U8,
    microbatches: I32,
    owner: I32,
    num_microbatches: int,
    per_step: int,  # microbatches of a step
    busy_s: F64,  # (stage, op, microbatch or 1): decode + compute + encode
    wire_bytes: F64,  # (stage, op, microbatch or 1)
    trips: F64,  # (stage, op, microbatch or 1): how often a packet pays the latency
    call_s: float,  # to hand a packet over
    message_s: float,
    byte_s: float,
    byte_wire_s: F64,  # (stage, op, lane): seconds a byte on the wire
    latency_s: F64,  # (stage, op, lane)
    burst_s: F64,  # (stage, op, lane): seconds of sending that the token bucket forgives
    jitter_s: F64,  # (lane,)
    wire: I32,  # (stage, op): the wire that a packet takes, or -1 within a host
    num_wires: int,
    inbound: bool,  # the receiver's order and latency on the wire, instead of the sender's order
    seed: int,
    start_s: F64,  # results by (stage, op, microbatch), filled where they are not empty
    end_s: F64,
    begin_s: F64,
    arrive_s: F64,  # (stage * op * microbatch, lane): when the packet that leaves an action is there
    free_s: F64,  # (worker, lane): when the worker has done its row
    done_s: F64,  # (step * stage, lane): when the stage has done its last action of the step
) -> int:
    """Fill the results and return how many actions ran: fewer than there are where the rows deadlock."""
    num_workers = offsets.shape[0] - 1
    num_stages = owner.shape[0]
    num_ops = busy_s.shape[1]
    lanes = jitter_s.shape[0]
    keep = start_s.shape[0] > 0
    jittered = False
    for k in range(lanes):
        jittered = jittered or jitter_s[k] > 0
    wide_busy = busy_s.shape[2] > 1
    wide_wire = wire_bytes.shape[2] > 1

    wire_free = np.zeros((num_wires + 1, lanes))
    last_arrival = np.zeros((num_wires + 1, lanes))
    sent = np.zeros(num_stages * num_ops * num_microbatches, np.bool_)
    heads = offsets[:-1].copy()
    awaits = np.full(num_workers, -1, np.int64)
    stack = np.empty(num_workers, np.int64)
    for worker in range(num_workers):
        stack[worker] = num_workers - 1 - worker
    depth = num_workers
    count = 0

    while depth > 0:
        depth -= 1
        worker = stack[depth]
        while heads[worker] < offsets[worker + 1]:
            i = heads[worker]
            stage, op, m = stages[i], ops[i], microbatches[i]
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
                            begin_s[source] = begin

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
                    start_s[slot] = start
                    end_s[slot] = end
                if not sends:
                    continue
                ready = end + path
                if w < 0 or inbound:
                    arrive_s[slot, k] = ready
                    if keep:
                        begin_s[slot] = ready
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
                    begin_s[slot] = begin
            if sends:
                sent[slot] = True
                target = owner[stage + 1 if op == 0 else stage - 1]
                if awaits[target] == slot:
                    awaits[target] = -1
                    stack[depth] = target
                    depth += 1
            heads[worker] = i + 1
            count += 1
    return count


@njit(cache=True, nogil=True)
def run_each(
    offsets: I64,
    stages: I32,
    ops: U8,
    microbatches: I32,
    owner: I32,
    num_microbatches: int,
    per_step: int,
    busy_s: F64,  # here and below, of `run_ordered` with a first axis of profiles
    wire_bytes: F64,
    trips: F64,
    overheads: F64,  # (profile, call, message or byte): seconds
    byte_wire_s: F64,
    latency_s: F64,
    burst_s: F64,
    jitter_s: F64,
    wire: I32,
    num_wires: int,
    inbound: bool,
    seeds: I64,  # (profile,)
    free_s: F64,
    done_s: F64,
) -> int:
    """Fill the results of every profile, and return the fewest actions that ran."""
    nothing = np.empty(0)
    fewest: int = stages.shape[0]
    for p in range(busy_s.shape[0]):
        count = run_ordered(
            offsets,
            stages,
            ops,
            microbatches,
            owner,
            num_microbatches,
            per_step,
            busy_s[p],
            wire_bytes[p],
            trips[p],
            overheads[p, 0],
            overheads[p, 1],
            overheads[p, 2],
            byte_wire_s,
            latency_s,
            burst_s,
            jitter_s,
            wire,
            num_wires,
            inbound,
            seeds[p],
            nothing,
            nothing,
            nothing,
            np.empty((owner.shape[0] * busy_s.shape[2] * num_microbatches, jitter_s.shape[0])),
            free_s[p],
            done_s[p],
        )
        fewest = min(fewest, count)
    return fewest
