"""The general kernel: a discrete-event loop for wires and cores shared by several workers.

Wires are fluid: active messages share ports max-min fairly, like long TCP flows. Messages between two hosts are sent one at a time.
A packet may take several messages: the receiver requests it, and requests queue behind packets in the other direction. Cores are
also fluid: the active threads of a machine get equal shares of its cores. A worker event scans all workers, and a wire event all
channels, so the kernel is meant for hundreds of workers. If nothing is shared, its results equal those of `fast_path.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Record = Any  # one element of `Records`, a view into it
Records = NDArray[Any]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]

WAITING, DECODE, COMPUTE, ENCODE, DONE, SENDING = 0, 1, 2, 3, 4, 5  # phases of a worker; SENDING if sends block

helper = njit(cache=True, forceinline=True)


@njit(cache=True, inline="always")
def jitter_draw(seed: int, slot: int) -> float:
    """Return a SplitMix64 number in [-1, 1) that depends only on the arguments, so that all networks get the same draws."""
    # `fast_path.py` inlines this function and numba's cache does not notice changes: clear `__pycache__` after one.
    z = np.uint64(seed) * np.uint64(0xD1342543DE82EF95) + np.uint64(slot + 1) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return float(z >> np.uint64(11)) * 2.0**-52 - 1.0


class State(NamedTuple):
    """The state of the event loop; `wiring.py` documents the fields of the records."""

    rows: I64  # the actions of each worker, in order
    actions: Records
    costs: Records
    progress: Records
    workers: Records
    machines: Records
    posted: Records  # queues of packets waiting for the wire
    channels: Records
    buckets: Records
    ports: Records  # empty if ports are not shared
    done_s: F64  # (replica * stage * step,)


@njit(cache=True, nogil=True)
def run_shared(state: State, message_s: float, byte_s: float, blocking: bool, seed: int) -> int:
    """Simulate the step in `progress`, `workers` and `done_s`; return the number of executed actions, fewer on a deadlock."""
    rows, actions, costs, progress, workers, machines, posted, channels, buckets, ports, done_s = state
    active = np.empty(len(channels), np.int64)
    next_phase = np.inf
    now = 0.0
    count = 0
    workers_changed, wires_changed = True, False
    while True:
        if workers_changed:
            _start_actions(rows, actions, costs, progress, workers, now)
            next_phase = _share_cores(workers, machines, now)
        if wires_changed:
            _share_wires(costs, progress, channels, buckets, ports, active, now)
        soonest = min(next_phase, _next_packet(progress, posted, channels))
        if soonest == np.inf:
            return count
        now = max(now, soonest)
        ended = next_phase <= now
        if ended:
            count += _finish_phases(actions, costs, progress, workers, posted, done_s, message_s, byte_s, blocking, now)
        delivered, wires_changed = _move_packets(actions, costs, progress, posted, channels, buckets, seed, now)
        workers_changed = ended or delivered


@helper
def _start_actions(
    rows: I64, actions: Records, costs: Records, progress: Records, workers: Records, now: float
) -> None:
    """Start the next action of each waiting worker if its packet has arrived."""
    for a in range(workers.shape[0]):
        worker = workers[a]
        if worker.phase == SENDING and progress[worker.action].delivered:
            worker.phase = WAITING
            worker.free_s = now
        if worker.phase != WAITING:
            continue
        if worker.head == worker.stop:
            worker.phase = DONE
            continue
        action = rows[worker.head]
        needs = actions[action].needs
        if needs >= 0 and not progress[needs].delivered:
            continue
        worker.action = action
        progress[action].start_s = now
        _begin_phase(worker, DECODE, costs[action].decode_s, now)


@helper
def _begin_phase(worker: Record, phase: int, seconds: float, now: float) -> None:
    """Start a worker's phase that takes `seconds` at full speed."""
    worker.phase = phase
    worker.left = seconds
    worker.speed = 0.0
    worker.since = now
    worker.finish = np.inf


@helper
def _share_cores(workers: Records, machines: Records, now: float) -> float:
    """Share each machine's cores equally among its active threads; return when the first phase will end."""
    for i in range(machines.shape[0]):
        machines[i].threads = 0.0
    for a in range(workers.shape[0]):
        worker = workers[a]
        if DECODE <= worker.phase <= ENCODE:
            machines[worker.machine].threads += worker.threads if worker.phase == COMPUTE else 1
    first = np.inf
    for a in range(workers.shape[0]):
        worker = workers[a]
        if DECODE <= worker.phase <= ENCODE:
            machine = machines[worker.machine]
            speed = min(1.0, machine.cores / machine.threads)
            if speed != worker.speed:
                worker.left -= (now - worker.since) * worker.speed
                worker.since, worker.speed = now, speed
                worker.finish = now + max(worker.left, 0.0) / speed
            first = min(first, worker.finish)
    return first


@helper
def _finish_phases(
    actions: Records,
    costs: Records,
    progress: Records,
    workers: Records,
    posted: Records,
    done_s: F64,
    message_s: float,
    byte_s: float,
    blocking: bool,
    now: float,
) -> int:
    """Advance workers whose phase is over, and post the packets of finished actions; return the number of finished actions."""
    finished = 0
    for a in range(workers.shape[0]):
        worker = workers[a]
        if worker.finish > now:
            continue
        action = worker.action
        cost = costs[action]
        if worker.phase == DECODE:
            _begin_phase(worker, COMPUTE, cost.compute_s, now)
        elif worker.phase == COMPUTE:
            _begin_phase(worker, ENCODE, cost.encode_s, now)
        else:
            finished += 1
            worker.phase = SENDING if blocking and actions[action].queue >= 0 else WAITING
            worker.finish = np.inf
            worker.head += 1
            worker.free_s = now
            progress[action].end_s = now
            done_s[actions[action].part] = now
            if actions[action].queue >= 0:
                queue = posted[actions[action].queue]
                due = now + message_s + byte_s * cost.wire_bytes
                if queue.first >= 0:  # packets of a queue reach the wire in order
                    due = max(due, progress[queue.last].due)
                progress[action].due = due
                progress[action].to_come = cost.messages
                _push(progress, queue, action)
    return finished


@helper
def _next_packet(progress: Records, posted: Records, channels: Records) -> float:
    """Return when the next packet reaches a wire, leaves one or arrives; infinity if none does."""
    first = np.inf
    for q in range(posted.shape[0]):
        if posted[q].first >= 0:
            first = min(first, progress[posted[q].first].due)
    for c in range(channels.shape[0]):
        channel = channels[c]
        first = min(first, channel.finish)
        if channel.flying.first >= 0:
            first = min(first, progress[channel.flying.first].due)
    return first


@helper
def _move_packets(
    actions: Records,
    costs: Records,
    progress: Records,
    posted: Records,
    channels: Records,
    buckets: Records,
    seed: int,
    now: float,
) -> tuple[bool, bool]:
    """Move packets to wires, off them and to hosts; return whether any was delivered, and whether flows changed."""
    delivered = flows_changed = False
    for q in range(posted.shape[0]):
        queue = posted[q]
        while queue.first >= 0 and progress[queue.first].due <= now:
            if _forward_packet(actions, progress, channels, _pop(progress, queue), now):
                delivered = True
            else:
                flows_changed = True
    for c in range(channels.shape[0]):
        channel = channels[c]
        if channel.finish <= now:
            _end_flow(actions, costs, progress, channel, buckets[channel.bucket], seed, now)
            flows_changed = True
        while channel.flying.first >= 0 and progress[channel.flying.first].due <= now:
            packet = _pop(progress, channel.flying)
            progress[packet].to_come -= 1
            if _forward_packet(actions, progress, channels, packet, now):
                delivered = True
            else:
                flows_changed = True
    return delivered, flows_changed


@helper
def _forward_packet(actions: Records, progress: Records, channels: Records, packet: int, now: float) -> bool:
    """Deliver a packet that has arrived, or put its next message on a wire; return whether it was delivered."""
    there = actions[packet].there
    if progress[packet].to_come == 0 or there < 0:
        progress[packet].delivered = True
        progress[packet].arrive_s = now
        if there < 0:
            progress[packet].begin_s = now
        return True
    asks = progress[packet].to_come % 2 == 0  # the receiver's turn
    channel = channels[actions[packet].back if asks else there]
    if channel.wired.first < 0:
        channel.fresh = True
    _push(progress, channel.wired, packet)
    return False


@helper
def _end_flow(
    actions: Records, costs: Records, progress: Records, channel: Record, bucket: Record, seed: int, now: float
) -> None:
    """Remove a fully sent message from its channel; it arrives after the latency."""
    packet = _pop(progress, channel.wired)
    channel.fresh = channel.wired.first >= 0
    channel.finish = np.inf
    bucket.sending -= 1
    bucket.idle_since = now
    latency = costs[packet].trips * channel.latency_s
    if channel.jitter_s > 0:
        latency += channel.jitter_s * jitter_draw(seed + actions[packet].replica, actions[packet].number)
    channel.last_due = max(now + latency, channel.last_due)
    progress[packet].due = channel.last_due
    _push(progress, channel.flying, packet)


@helper
def _share_wires(
    costs: Records, progress: Records, channels: Records, buckets: Records, ports: Records, active: I64, now: float
) -> None:
    """Start the flows of messages at the head of their channel, and set the rates of all flows."""
    number = 0
    for c in range(channels.shape[0]):
        channel = channels[c]
        if channel.wired.first >= 0:
            active[number] = c
            number += 1
            if channel.fresh:
                _begin_flow(costs, progress, channel, buckets[channel.bucket], now)
    if ports.shape[0] > 0:
        _share_ports(active, number, channels, ports)
    for j in range(number):
        channel = channels[active[j]]
        if channel.fresh or channel.share != channel.speed:
            if not channel.fresh and now > channel.since:
                channel.left -= (now - channel.since) * channel.speed
            channel.fresh = False
            channel.since, channel.speed = now, channel.share
            channel.finish = now + (channel.left / channel.speed if channel.left > 0 else 0.0)


@helper
def _begin_flow(costs: Records, progress: Records, channel: Record, bucket: Record, now: float) -> None:
    """Start the transfer of a channel's first message; the bucket's tokens pass part of its bytes at once."""
    packet = channel.wired.first
    size = 0.0
    if progress[packet].to_come == 1:  # the packet itself
        progress[packet].begin_s = now
        size = costs[packet].wire_bytes
    if bucket.sending == 0 and bucket.burst_bytes > 0 and now > bucket.idle_since:
        idle_s = now - bucket.idle_since
        bucket.tokens = min(bucket.burst_bytes, bucket.tokens + bucket.refill * idle_s)
    bucket.sending += 1
    taken = min(bucket.tokens, size)
    bucket.tokens -= taken
    channel.left = size - taken


@helper
def _share_ports(active: I64, number: int, channels: Records, ports: Records) -> None:
    """Set max-min fair shares of the active channels: the most constrained port first, the rest for the others."""
    for p in range(ports.shape[0]):
        ports[p].left = ports[p].rate
        ports[p].users = 0
    for j in range(number):
        channel = channels[active[j]]
        channel.share = -1.0  # unknown
        ports[channel.out].users += 1
        ports[channel.into].users += 1
    for _ in range(number):
        tightest, lowest = -1, np.inf
        for j in range(number):
            channel = channels[active[j]]
            if channel.share < 0:
                out, into = ports[channel.out], ports[channel.into]
                share = min(channel.rate, out.left / out.users, into.left / into.users)
                if tightest < 0 or share < lowest:
                    tightest, lowest = j, share
        channel = channels[active[tightest]]
        channel.share = lowest
        for p in (channel.out, channel.into):
            ports[p].users -= 1
            if lowest < np.inf:
                ports[p].left = max(ports[p].left - lowest, 0.0)


@helper
def _push(progress: Records, queue: Record, packet: int) -> None:
    if queue.first < 0:
        queue.first = packet
    else:
        progress[queue.last].after = packet
    queue.last = packet
    progress[packet].after = -1


@helper
def _pop(progress: Records, queue: Record) -> int:
    packet: int = queue.first
    queue.first = progress[packet].after
    return packet
