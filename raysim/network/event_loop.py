"""The general kernel: events in order of time, for wires and cores that several workers share.

Wires are fluid: active messages divide ports max-min fairly, as long TCP flows do. Between two hosts, messages go one after
another. A packet may take several messages: the receiver asks for it, and its questions wait behind packets that go the other
way. Cores are fluid too: the threads at work on a machine get equal parts of its cores. Every event looks at all workers, so the
kernel is meant for hundreds of workers, not thousands. Where nothing is shared, its results equal those of `fast_path.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from raysim.network.event_state import (
    Buckets,
    Costs,
    Flows,
    Hosts,
    Inputs,
    Packets,
    Queue,
    Rows,
    State,
    Times,
    Wires,
    Workers,
)
from raysim.network.fast_path import uniform

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

WAITING, DECODE, COMPUTE, ENCODE, DONE = 0, 1, 2, 3, 4  # phases of a worker
POSTED, QUEUED = -1.0, -2.0  # in place of the time at which a packet's transfer begins, until it does

helper = njit(cache=True, forceinline=True)


@njit(cache=True, nogil=True)
def run_shared(
    rows: tuple[Any, ...],
    costs: tuple[Any, ...],
    hosts: tuple[Any, ...],
    wires: tuple[Any, ...],
    times: tuple[Any, ...],
) -> int:
    """Fill `times` and return how many actions ran: fewer than there are where the rows deadlock.

    The arguments are plain tuples of the fields of `Rows`, `Costs`, `Hosts`, `Wires` and `Times`: numba recognises the types of
    a plain tuple much faster than those of a named one.
    """
    inputs = _gather_inputs(Rows(*rows), Costs(*costs), Hosts(*hosts), Wires(*wires))
    results = Times(*times)
    state = _initial_state(inputs)
    threads_at_work = np.empty(inputs.hosts.cores.shape[0])
    flow_rate = np.zeros(inputs.wires.rate.shape[0])
    active = np.empty(inputs.wires.rate.shape[0], np.int64)
    arriving = np.empty(state.wired.head.shape[0] + state.posted.head.shape[0], np.int64)
    now = 0.0
    count = 0
    jobs_changed = flows_changed = True
    while True:
        if _start_actions(inputs, state, results, now):
            jobs_changed = True
        if jobs_changed:
            _share_cores(inputs, state, threads_at_work, now)
        if flows_changed:
            _share_wires(inputs, state, active, flow_rate, now)
        soonest = _next_event(state)
        if soonest == np.inf:
            return count
        now = max(now, soonest)
        jobs_changed, finished = _finish_phases(inputs, state, results, now)
        count += finished
        flows_changed, moved = _collect_packets(inputs, state, results, arriving, now)
        for j in range(moved):
            if _forward_packet(inputs, state, results, arriving[j], now):
                flows_changed = True
        if flows_changed:
            _begin_flows(inputs, state, results, now)


@helper
def _gather_inputs(rows: Rows, costs: Costs, hosts: Hosts, wires: Wires) -> Inputs:
    """Return all inputs with the sizes that follow from them."""
    num_workers, num_stages = rows.offsets.shape[0] - 1, rows.owner.shape[0]
    ported = wires.port_rate.min() < np.inf
    return Inputs(rows, costs, hosts, wires, num_workers, num_stages, costs.compute_s.shape[2], ported)


@helper
def _initial_state(inputs: Inputs) -> State:
    """Return the state before the step: every worker waits, and nothing is on the wires."""
    rows, wires = inputs.rows, inputs.wires
    num_actors = rows.num_replicas * inputs.num_workers
    num_channels = wires.rate.shape[0]
    num_posts = num_actors * inputs.num_ops
    num_packets = rows.num_replicas * inputs.num_stages * inputs.num_ops * rows.num_microbatches
    num_buckets = wires.port_rate.shape[0] if inputs.ported else num_channels
    head = np.empty(num_actors, np.int64)
    for a in range(num_actors):
        head[a] = rows.offsets[a % inputs.num_workers]
    return State(
        Workers(
            head,
            np.full(num_actors, WAITING, np.int64),
            np.zeros(num_actors),
            np.ones(num_actors),
            np.zeros(num_actors),
            np.full(num_actors, np.inf),
        ),
        Queue(np.full(num_posts, -1, np.int64), np.full(num_posts, -1, np.int64)),
        Queue(np.full(num_channels, -1, np.int64), np.full(num_channels, -1, np.int64)),
        Queue(np.full(num_channels, -1, np.int64), np.full(num_channels, -1, np.int64)),
        Packets(
            np.zeros(num_packets, np.bool_),
            np.zeros(num_packets, np.int64),
            np.zeros(num_packets),
            np.full(num_packets, -1, np.int64),
        ),
        Flows(
            np.zeros(num_channels),
            np.zeros(num_channels),
            np.zeros(num_channels),
            np.full(num_channels, np.inf),
            np.zeros(num_channels, np.bool_),
            np.zeros(num_channels),
        ),
        Buckets(np.full(num_buckets, wires.burst_bytes), np.zeros(num_buckets), np.zeros(num_buckets, np.int64)),
    )


@helper
def _start_actions(inputs: Inputs, state: State, times: Times, now: float) -> bool:
    """Let workers begin the next action of their rows where its input is there; return whether any began."""
    rows, workers = inputs.rows, state.workers
    began = False
    for a in range(workers.phase.shape[0]):
        if workers.phase[a] != WAITING:
            continue
        worker, replica = a % inputs.num_workers, a // inputs.num_workers
        i = workers.head[a]
        if i == rows.offsets[worker + 1]:
            workers.phase[a] = DONE
            continue
        stage, op, m = rows.stages[i], rows.ops[i], rows.microbatches[i]
        source = -1
        if op == 0 and stage > 0:
            source = _slot(inputs, replica, stage - 1, op, m)
        elif op == 1 and stage < inputs.num_stages - 1:
            source = _slot(inputs, replica, stage + 1, op, m)
        if source >= 0 and not state.packets.delivered[source]:
            continue
        times.start_s[_slot(inputs, replica, stage, op, m)] = now
        workers.phase[a] = DECODE
        workers.left[a] = _cost(inputs.costs.decode_s, replica, stage, op, m)
        workers.since[a], workers.speed[a], workers.finish[a] = now, 0.0, now
        began = True
    return began


@helper
def _share_cores(inputs: Inputs, state: State, threads_at_work: F64, now: float) -> None:
    """Give the threads at work on each machine equal parts of its cores, and work out when phases will end."""
    hosts, workers = inputs.hosts, state.workers
    threads_at_work[:] = 0
    for a in range(workers.phase.shape[0]):
        if DECODE <= workers.phase[a] <= ENCODE:
            threads_at_work[hosts.machine[a]] += hosts.threads if workers.phase[a] == COMPUTE else 1
    for a in range(workers.phase.shape[0]):
        if DECODE <= workers.phase[a] <= ENCODE:
            speed = min(1.0, hosts.cores[hosts.machine[a]] / threads_at_work[hosts.machine[a]])
            if speed != workers.speed[a]:
                workers.left[a] -= (now - workers.since[a]) * workers.speed[a]
                workers.since[a], workers.speed[a] = now, speed
                workers.finish[a] = now + max(workers.left[a], 0.0) / speed


@helper
def _share_wires(inputs: Inputs, state: State, active: I64, flow_rate: F64, now: float) -> None:
    """Give every flow its rate, and work out when flows will be through."""
    wires, flows = inputs.wires, state.flows
    number = 0
    for c in range(wires.rate.shape[0]):
        if state.wired.head[c] >= 0:
            active[number] = c
            number += 1
    if inputs.ported:
        _share_ports(active, number, wires.source, wires.target, wires.rate, wires.port_rate, wires.half, flow_rate)
    for j in range(number):
        c = active[j]
        rate = flow_rate[c] if inputs.ported else wires.rate[c]
        if flows.fresh[c] or rate != flows.rate[c]:
            if not flows.fresh[c] and now > flows.since[c]:
                flows.left[c] -= (now - flows.since[c]) * flows.rate[c]
            flows.fresh[c] = False
            flows.since[c], flows.rate[c] = now, rate
            flows.finish[c] = now + (flows.left[c] / rate if flows.left[c] > 0 else 0.0)


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


@helper
def _next_event(state: State) -> float:
    """Return the time of the next event, infinite where none will come."""
    soonest = np.inf
    for a in range(state.workers.phase.shape[0]):
        if DECODE <= state.workers.phase[a] <= ENCODE:
            soonest = min(soonest, state.workers.finish[a])
    for q in range(state.posted.head.shape[0]):
        if state.posted.head[q] >= 0:
            soonest = min(soonest, state.packets.due[state.posted.head[q]])
    for c in range(state.wired.head.shape[0]):
        if state.wired.head[c] >= 0:
            soonest = min(soonest, state.flows.finish[c])
        if state.flying.head[c] >= 0:
            soonest = min(soonest, state.packets.due[state.flying.head[c]])
    return soonest


@helper
def _finish_phases(inputs: Inputs, state: State, times: Times, now: float) -> tuple[bool, int]:
    """Move workers whose phase is over to their next one; return whether there were any, and how many actions ended."""
    rows, costs, workers = inputs.rows, inputs.costs, state.workers
    changed, finished = False, 0
    for a in range(workers.phase.shape[0]):
        if not (DECODE <= workers.phase[a] <= ENCODE and workers.finish[a] <= now):
            continue
        changed = True
        replica = a // inputs.num_workers
        i = workers.head[a]
        stage, op, m = rows.stages[i], rows.ops[i], rows.microbatches[i]
        if workers.phase[a] != ENCODE:
            workers.phase[a] += 1
            if workers.phase[a] == COMPUTE:
                workers.left[a] = _cost(costs.compute_s, replica, stage, op, m)
            else:
                workers.left[a] = _cost(costs.encode_s, replica, stage, op, m)
                if _sends(inputs, stage, op):
                    workers.left[a] += costs.call_s
            workers.since[a], workers.speed[a], workers.finish[a] = now, 0.0, np.inf
            continue
        workers.phase[a] = WAITING
        workers.finish[a] = np.inf
        workers.head[a] = i + 1
        finished += 1
        slot = _slot(inputs, replica, stage, op, m)
        times.end_s[slot] = now
        times.free_s[a] = now
        times.done_s[replica * inputs.num_stages + stage] = now
        if _sends(inputs, stage, op):
            q = a * inputs.num_ops + op
            due = now + costs.message_s + costs.byte_s * _cost(costs.wire_bytes, replica, stage, op, m)
            if state.posted.head[q] >= 0:
                due = max(due, state.packets.due[state.posted.tail[q]])
            state.packets.due[slot] = due
            _push(state.posted, state.packets.after, q, slot)
    return changed, finished


@helper
def _collect_packets(inputs: Inputs, state: State, times: Times, arriving: I64, now: float) -> tuple[bool, int]:
    """Take packets off their queues that come to their wire or their host now, and move those that left their wire to `flying`.

    Fills `arriving`; returns whether flows ended, and how many packets are in `arriving`. Packets for which it has no room wait
    for the next event, which is at the same time.
    """
    packets, flows = state.packets, state.flows
    flows_changed, moved = False, 0
    for q in range(state.posted.head.shape[0]):
        while state.posted.head[q] >= 0 and packets.due[state.posted.head[q]] <= now and moved < arriving.shape[0]:
            slot = _pop(state.posted, packets.after, q)
            times.begin_s[slot] = POSTED
            arriving[moved] = slot
            moved += 1
    for c in range(state.wired.head.shape[0]):
        if state.wired.head[c] >= 0 and flows.finish[c] <= now and moved < arriving.shape[0]:
            _end_flow(inputs, state, c, now)
            flows_changed = True
        while state.flying.head[c] >= 0 and packets.due[state.flying.head[c]] <= now and moved < arriving.shape[0]:
            arriving[moved] = _pop(state.flying, packets.after, c)
            moved += 1
    return flows_changed, moved


@helper
def _end_flow(inputs: Inputs, state: State, c: int, now: float) -> None:
    """Take the message that is through off its channel; it arrives after the latency."""
    wires, flows = inputs.wires, state.flows
    slot = _pop(state.wired, state.packets.after, c)
    bucket = wires.source[c] if inputs.ported else c
    state.buckets.sending[bucket] -= 1
    state.buckets.idle_since[bucket] = now
    replica, stage, op, m = _action(inputs, slot)
    trips = _cost(inputs.costs.trips, replica, stage, op, m) / _cost(inputs.costs.messages, replica, stage, op, m)
    latency = trips * wires.latency_s[c]
    if wires.jitter_s > 0:
        per_replica = inputs.num_stages * inputs.num_ops * inputs.rows.num_microbatches
        latency += wires.jitter_s * uniform(wires.seed + replica, slot % per_replica)
    state.packets.due[slot] = max(now + latency, flows.last_due[c])
    flows.last_due[c] = state.packets.due[slot]
    _push(state.flying, state.packets.after, c, slot)
    if state.wired.head[c] >= 0:
        flows.fresh[c] = True
        flows.finish[c] = np.inf


@helper
def _forward_packet(inputs: Inputs, state: State, times: Times, slot: int, now: float) -> bool:
    """Deliver a packet that is at its host, or put its next message on a wire; return whether one was put there."""
    packets = state.packets
    replica, stage, op, m = _action(inputs, slot)
    first = replica * inputs.num_workers
    origin = inputs.hosts.host[first + inputs.rows.owner[stage]]
    goal = inputs.hosts.host[first + inputs.rows.owner[stage + 1 if op == 0 else stage - 1]]
    if times.begin_s[slot] == POSTED:
        times.begin_s[slot] = QUEUED
        packets.to_come[slot] = int(_cost(inputs.costs.messages, replica, stage, op, m))
    else:
        packets.to_come[slot] -= 1
    if packets.to_come[slot] == 0 or origin == goal:
        packets.delivered[slot] = True
        times.arrive_s[slot] = now
        if times.begin_s[slot] < 0:
            times.begin_s[slot] = now
        return False
    asks = packets.to_come[slot] % 2 == 0  # the receiver's turn
    c = inputs.wires.channel[goal, origin] if asks else inputs.wires.channel[origin, goal]
    waits = state.wired.head[c] >= 0
    _push(state.wired, packets.after, c, slot)
    if waits:
        return True
    state.flows.fresh[c] = True
    state.flows.finish[c] = np.inf
    return True


@helper
def _begin_flows(inputs: Inputs, state: State, times: Times, now: float) -> None:
    """Begin the transfer of messages that have just come to the head of their channel."""
    wires, flows = inputs.wires, state.flows
    for c in range(wires.rate.shape[0]):
        if state.wired.head[c] < 0 or not flows.fresh[c]:
            continue
        slot = state.wired.head[c]
        last = state.packets.to_come[slot] == 1
        if last:
            times.begin_s[slot] = now
        bucket = wires.source[c] if inputs.ported else c
        refill = wires.port_rate[wires.source[c]] if inputs.ported else wires.rate[c]
        replica, stage, op, m = _action(inputs, slot)
        size = _cost(inputs.costs.wire_bytes, replica, stage, op, m) if last else 0.0
        flows.left[c] = _begin_flow(state.buckets, bucket, refill, size, wires.burst_bytes, now)


@helper
def _begin_flow(buckets: Buckets, bucket: int, refill: float, size: float, burst: float, now: float) -> float:
    """Add a flow to its token bucket, and return the bytes that are left after the tokens let the first ones through."""
    if buckets.sending[bucket] == 0 and burst > 0 and now > buckets.idle_since[bucket]:
        idle_s = now - buckets.idle_since[bucket]
        buckets.tokens[bucket] = min(burst, buckets.tokens[bucket] + refill * idle_s)
    buckets.sending[bucket] += 1
    taken = min(buckets.tokens[bucket], size)
    buckets.tokens[bucket] -= taken
    left: float = size - taken
    return left


@helper
def _push(queue: Queue, after: I64, q: int, slot: int) -> None:
    """Append a packet to a queue."""
    if queue.head[q] < 0:
        queue.head[q] = slot
    else:
        after[queue.tail[q]] = slot
    queue.tail[q] = slot
    after[slot] = -1


@helper
def _pop(queue: Queue, after: I64, q: int) -> int:
    """Remove the first packet of a queue and return it."""
    slot: int = queue.head[q]
    queue.head[q] = after[slot]
    return slot


@helper
def _slot(inputs: Inputs, replica: int, stage: int, op: int, m: int) -> int:
    """Return the number of an action, and of the packet that it sends."""
    return ((replica * inputs.num_stages + stage) * inputs.num_ops + op) * inputs.rows.num_microbatches + m


@helper
def _action(inputs: Inputs, slot: int) -> tuple[int, int, int, int]:
    """Return replica, stage, op and microbatch of an action by its number."""
    rest, m = slot // inputs.rows.num_microbatches, slot % inputs.rows.num_microbatches
    rest, op = rest // inputs.num_ops, rest % inputs.num_ops
    return rest // inputs.num_stages, rest % inputs.num_stages, op, m


@helper
def _cost(values: F64, replica: int, stage: int, op: int, m: int) -> float:
    """Return an action's entry of `Costs`, in which replicas and microbatches that are all alike stand once."""
    cost: float = values[replica if values.shape[0] > 1 else 0, stage, op, m if values.shape[3] > 1 else 0]
    return cost


@helper
def _sends(inputs: Inputs, stage: int, op: int) -> bool:
    """Return whether an action ends with a packet: a forward before the last stage, a backward after the first."""
    return (op == 0 and stage < inputs.num_stages - 1) or (op == 1 and stage > 0)
