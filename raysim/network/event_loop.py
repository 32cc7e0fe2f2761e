"""The general kernel: events in order of time, for wires and cores that several workers share.

Wires are fluid: active messages divide ports max-min fairly, as long TCP flows do. Between two hosts messages go one after
another, or, where wires are fair, all at once in equal parts. Cores are fluid too: the threads at work on a machine get equal
parts of its cores. Every event looks at all workers, so it is meant for hundreds of workers, not thousands; where nothing is
shared it gives the results of `fast_path.py`.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from raysim.network.fast_path import uniform

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

IDLE, HEAD, COMPUTE, ENCODE, DONE = 0, 1, 2, 3, 4


@njit(cache=True)
def _share_ports(
    active: I64, count: int, source: I64, target: I64, cap: F64, port_cap: F64, half: bool, rate: F64
) -> None:
    """Fill `rate` of the active channels, max-min fair: the tightest goes first and leaves the rest to the others."""
    hosts = port_cap.shape[0]
    left = np.concatenate((port_cap, port_cap))
    users = np.zeros(2 * hosts, np.int64)
    frozen = np.zeros(count, np.bool_)
    for j in range(count):
        users[source[active[j]]] += 1
        users[target[active[j]] + (0 if half else hosts)] += 1
    for _ in range(count):
        tightest, lowest = -1, np.inf
        for j in range(count):
            if not frozen[j]:
                c = active[j]
                out, into = source[c], target[c] + (0 if half else hosts)
                share = min(cap[c], left[out] / users[out], left[into] / users[into])
                if tightest < 0 or share < lowest:
                    tightest, lowest = j, share
        c = active[tightest]
        frozen[tightest] = True
        rate[c] = lowest
        for port in (source[c], target[c] + (0 if half else hosts)):
            users[port] -= 1
            if lowest < np.inf:
                left[port] = max(left[port] - lowest, 0.0)


@njit(cache=True)
def _begin_flow(
    bucket: int, refill: float, size: float, now: float, burst: float, tokens: F64, idle_since: F64, sending: I64
) -> float:
    """Count a flow in at its token bucket, and return its bytes without those that the tokens let through at once."""
    if sending[bucket] == 0 and burst > 0 and now > idle_since[bucket]:
        tokens[bucket] = min(burst, tokens[bucket] + refill * (now - idle_since[bucket]))
    sending[bucket] += 1
    taken = min(tokens[bucket], size)
    tokens[bucket] -= taken
    left: float = size - taken
    return left


@njit(cache=True, nogil=True)
def run_shared(
    offsets: I64,
    stages: I32,
    ops: U8,
    microbatches: I32,
    owner: I32,
    num_microbatches: int,
    num_replicas: int,
    decode_s: F64,  # (replica or 1, stage, op, microbatch or 1), as the next five
    compute_s: F64,  # alone on its cores
    encode_s: F64,
    wire_bytes: F64,
    trips: F64,  # how often a packet pays the latency
    call_s: float,  # to hand a packet over
    message_s: float,
    byte_s: float,
    host: I64,  # (replica * worker,)
    machine: I64,  # (replica * worker,)
    cores: F64,  # (machine,): infinite where workers never slow one another down
    threads: int,
    channel: I32,  # (host, host): number of the channel, -1 within a host
    source_host: I64,  # (channel,)
    target_host: I64,
    channel_rate: F64,  # (channel,): payload bytes/s
    latency_s: F64,
    port_rate: F64,  # (host,): payload bytes/s, infinite where ports are not shared
    half: bool,
    fair: bool,  # packets under way at once share a wire, instead of going one after another
    burst_bytes: float,
    jitter_s: float,
    seed: int,
    start_s: F64,  # results by (replica, stage, op, microbatch), flat
    end_s: F64,
    begin_s: F64,
    arrive_s: F64,
    free_s: F64,  # (replica * worker,)
    done_s: F64,  # (replica * stage,)
) -> int:
    """Fill the results and return how many actions ran: fewer than there are where the rows deadlock."""
    num_workers = offsets.shape[0] - 1
    num_stages = owner.shape[0]
    num_ops = decode_s.shape[2]
    num_actors = num_replicas * num_workers
    num_channels = channel_rate.shape[0]
    per_replica = num_stages * num_ops * num_microbatches
    wide = compute_s.shape[3] > 1
    wide_wire = wire_bytes.shape[3] > 1
    own_replica = compute_s.shape[0] > 1
    ported = port_rate.min() < np.inf

    heads = np.empty(num_actors, np.int64)
    phase = np.zeros(num_actors, np.int64)
    left = np.zeros(num_actors)
    rate = np.ones(num_actors)
    since = np.zeros(num_actors)
    finish = np.full(num_actors, np.inf)
    for a in range(num_actors):
        heads[a] = offsets[a % num_workers]

    delivered = np.zeros(num_replicas * per_replica, np.bool_)
    due = np.zeros(num_replicas * per_replica)  # when a packet gets to its wire, or off it to its host
    after = np.full(num_replicas * per_replica, -1, np.int64)  # the next packet of the same queue
    post_head = np.full(num_actors * num_ops, -1, np.int64)  # packets not yet at the wire
    post_tail = np.full(num_actors * num_ops, -1, np.int64)
    # Packets at the wire: the first is on it, or, where all are, is the next to be over.
    wire_head = np.full(num_channels, -1, np.int64)
    wire_tail = np.full(num_channels, -1, np.int64)
    flight_head = np.full(num_channels, -1, np.int64)  # packets sent, arriving after the latency
    flight_tail = np.full(num_channels, -1, np.int64)
    last_due = np.zeros(num_channels)
    flow_left = np.zeros(num_channels)
    flow_rate = np.zeros(num_channels)
    flow_since = np.zeros(num_channels)
    flow_finish = np.full(num_channels, np.inf)
    fresh = np.zeros(num_channels, np.bool_)  # the flow has no rate yet
    on_wire = np.ones(num_channels)  # packets that share it
    served = np.zeros(num_channels)  # bytes that each packet on the wire since its start has been given
    over_at = np.zeros(num_replicas * per_replica if fair else 0)  # `served` at which a packet is over
    new_rate = np.zeros(num_channels)
    active = np.empty(num_channels, np.int64)
    # A token bucket stands at every outgoing port, or at every channel where ports are not shared.
    num_buckets = port_rate.shape[0] if ported else num_channels
    tokens = np.full(num_buckets, burst_bytes)
    idle_since = np.zeros(num_buckets)
    sending = np.zeros(num_buckets, np.int64)

    threads_at_work = np.zeros(cores.shape[0])
    arriving = np.empty(num_channels + num_actors * num_ops, np.int64)
    now = 0.0
    count = 0
    jobs_changed = flows_changed = True

    while True:
        # Workers that wait, and may go on.
        for a in range(num_actors):
            if phase[a] != IDLE:
                continue
            worker, replica = a % num_workers, a // num_workers
            i = heads[a]
            if i == offsets[worker + 1]:
                phase[a] = DONE
                continue
            stage, op, m = stages[i], ops[i], microbatches[i]
            base = replica * per_replica
            source = -1
            if op == 0 and stage > 0:
                source = base + ((stage - 1) * num_ops) * num_microbatches + m
            elif op == 1 and stage < num_stages - 1:
                source = base + ((stage + 1) * num_ops + 1) * num_microbatches + m
            if source >= 0 and not delivered[source]:
                continue
            r = replica if own_replica else 0
            start_s[base + (stage * num_ops + op) * num_microbatches + m] = now
            phase[a] = HEAD
            left[a] = decode_s[r, stage, op, m if wide else 0]
            since[a], rate[a], finish[a] = now, 0.0, now
            jobs_changed = True

        # Speeds, where who is at work has changed.
        if jobs_changed:
            threads_at_work[:] = 0
            for a in range(num_actors):
                if HEAD <= phase[a] <= ENCODE:
                    threads_at_work[machine[a]] += threads if phase[a] == COMPUTE else 1
            for a in range(num_actors):
                if HEAD <= phase[a] <= ENCODE:
                    speed = min(1.0, cores[machine[a]] / threads_at_work[machine[a]])
                    if speed != rate[a]:
                        left[a] -= (now - since[a]) * rate[a]
                        since[a], rate[a] = now, speed
                        finish[a] = now + max(left[a], 0.0) / speed
            jobs_changed = False
        if flows_changed:
            number = 0
            for c in range(num_channels):
                if wire_head[c] >= 0:
                    active[number] = c
                    number += 1
            if ported:
                _share_ports(active, number, source_host, target_host, channel_rate, port_rate, half, new_rate)
            for j in range(number):
                c = active[j]
                speed = (new_rate[c] if ported else channel_rate[c]) / on_wire[c]
                if fresh[c] or speed != flow_rate[c]:
                    if not fresh[c] and now > flow_since[c]:
                        flow_left[c] -= (now - flow_since[c]) * flow_rate[c]
                    fresh[c] = False
                    flow_since[c], flow_rate[c] = now, speed
                    flow_finish[c] = now + (flow_left[c] / speed if flow_left[c] > 0 else 0.0)
            flows_changed = False

        # The next event.
        soonest = np.inf
        for a in range(num_actors):
            if HEAD <= phase[a] <= ENCODE:
                soonest = min(soonest, finish[a])
        for q in range(num_actors * num_ops):
            if post_head[q] >= 0:
                soonest = min(soonest, due[post_head[q]])
        for c in range(num_channels):
            if wire_head[c] >= 0:
                soonest = min(soonest, flow_finish[c])
            if flight_head[c] >= 0:
                soonest = min(soonest, due[flight_head[c]])
        if soonest == np.inf:
            break
        now = max(now, soonest)

        # Work done.
        for a in range(num_actors):
            if not (HEAD <= phase[a] <= ENCODE and finish[a] <= now):
                continue
            worker, replica = a % num_workers, a // num_workers
            i = heads[a]
            stage, op, m = stages[i], ops[i], microbatches[i]
            base = replica * per_replica
            slot = base + (stage * num_ops + op) * num_microbatches + m
            r = replica if own_replica else 0
            jobs_changed = True
            if phase[a] != ENCODE:
                phase[a] += 1
                costs = compute_s if phase[a] == COMPUTE else encode_s
                left[a] = costs[r, stage, op, m if wide else 0]
                if phase[a] == ENCODE and ((op == 0 and stage < num_stages - 1) or (op == 1 and stage > 0)):
                    left[a] += call_s
                since[a], rate[a], finish[a] = now, 0.0, np.inf
                continue
            phase[a] = IDLE
            finish[a] = np.inf
            heads[a] = i + 1
            count += 1
            end_s[slot] = now
            free_s[a] = now
            done_s[replica * num_stages + stage] = now
            if (op == 0 and stage < num_stages - 1) or (op == 1 and stage > 0):
                size = wire_bytes[r, stage, op, m if wide_wire else 0]
                q = a * num_ops + op
                due[slot] = now + message_s + byte_s * size
                if post_head[q] < 0:
                    post_head[q] = slot
                else:
                    due[slot] = max(due[slot], due[post_tail[q]])
                    after[post_tail[q]] = slot
                post_tail[q] = slot
                after[slot] = -1

        # Packets that get somewhere: to their wire, off it, or to their host.
        moved = 0
        for q in range(num_actors * num_ops):
            while post_head[q] >= 0 and due[post_head[q]] <= now:
                slot = post_head[q]
                post_head[q] = after[slot]
                begin_s[slot] = -1.0
                arriving[moved] = slot
                moved += 1
                if moved == arriving.shape[0]:
                    break
            if moved == arriving.shape[0]:
                break
        for c in range(num_channels):
            if wire_head[c] >= 0 and flow_finish[c] <= now and moved < arriving.shape[0]:
                slot = wire_head[c]
                wire_head[c] = after[slot]
                if fair:
                    on_wire[c] -= 1.0
                    served[c], flow_since[c] = over_at[slot], now
                bucket = source_host[c] if ported else c
                sending[bucket] -= 1
                idle_since[bucket] = now
                flows_changed = True
                within = slot % per_replica
                m = within % num_microbatches
                op = (within // num_microbatches) % num_ops
                stage = within // (num_microbatches * num_ops)
                r = slot // per_replica if own_replica else 0
                latency = trips[r, stage, op, m if wide_wire else 0] * latency_s[c]
                if jitter_s > 0:
                    latency += jitter_s * uniform(seed + slot // per_replica, slot % per_replica)
                due[slot] = max(now + latency, last_due[c])
                last_due[c] = due[slot]
                after[slot] = -1
                if flight_head[c] < 0:
                    flight_head[c] = slot
                else:
                    after[flight_tail[c]] = slot
                flight_tail[c] = slot
                if wire_head[c] >= 0:
                    fresh[c] = True
                    flow_finish[c] = np.inf
            while flight_head[c] >= 0 and due[flight_head[c]] <= now and moved < arriving.shape[0]:
                slot = flight_head[c]
                flight_head[c] = after[slot]
                arriving[moved] = slot
                moved += 1

        for j in range(moved):
            slot = arriving[j]
            replica = slot // per_replica
            within = slot % per_replica
            m = within % num_microbatches
            op = (within // num_microbatches) % num_ops
            stage = within // (num_microbatches * num_ops)
            r = replica if own_replica else 0
            origin = host[replica * num_workers + owner[stage]]
            goal = host[replica * num_workers + owner[stage + 1 if op == 0 else stage - 1]]
            posted = begin_s[slot] == -1.0
            if posted:
                begin_s[slot] = -2.0
            if not posted or origin == goal:
                delivered[slot] = True
                arrive_s[slot] = now
                if begin_s[slot] < 0:
                    begin_s[slot] = now
                continue
            c = channel[origin, goal]
            flows_changed = True
            after[slot] = -1
            if fair:  # among the others on the wire, by when it will be over
                if wire_head[c] < 0:
                    on_wire[c] = 0.0
                elif not fresh[c]:
                    served[c] += (now - flow_since[c]) * flow_rate[c]
                flow_since[c] = now
                on_wire[c] += 1.0
                if begin_s[slot] < 0:
                    begin_s[slot] = now
                size = wire_bytes[r, stage, op, m if wide_wire else 0]
                over_at[slot] = served[c] + _begin_flow(
                    c, channel_rate[c], size, now, burst_bytes, tokens, idle_since, sending
                )
                before, following = -1, wire_head[c]
                while following >= 0 and over_at[following] <= over_at[slot]:
                    before, following = following, after[following]
                after[slot] = following
                if before < 0:
                    wire_head[c] = slot
                else:
                    after[before] = slot
            elif wire_head[c] < 0:
                wire_head[c] = wire_tail[c] = slot
            else:
                after[wire_tail[c]] = slot
                wire_tail[c] = slot
                continue
            fresh[c] = True
            flow_finish[c] = np.inf

        # Packets that have just come to the head of their wire.
        if flows_changed:
            for c in range(num_channels):
                if wire_head[c] >= 0 and fresh[c]:
                    slot = wire_head[c]
                    if fair:
                        flow_left[c] = over_at[slot] - served[c]
                        continue
                    within = slot % per_replica
                    m = within % num_microbatches
                    op = (within // num_microbatches) % num_ops
                    stage = within // (num_microbatches * num_ops)
                    r = slot // per_replica if own_replica else 0
                    if begin_s[slot] < 0:
                        begin_s[slot] = now
                    bucket = source_host[c] if ported else c
                    refill = port_rate[source_host[c]] if ported else channel_rate[c]
                    size = wire_bytes[r, stage, op, m if wide_wire else 0]
                    flow_left[c] = _begin_flow(bucket, refill, size, now, burst_bytes, tokens, idle_since, sending)
    return count
