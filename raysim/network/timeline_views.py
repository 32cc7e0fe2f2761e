"""Views of a simulated step: the use of its wires, a summary for JSON, and a Chrome trace.

Open the trace in chrome://tracing or ui.perfetto.dev: workers are threads, packets are arrows and bars. The format's times are in
microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.network.timeline import Timeline
from raysim.schedules.arrays import OPS
from raysim.storage.files import output_file

Event = dict[str, Any]

WIRES = 1_000_000  # process number of the network, above any replica's
COLLECTIVES = WIRES + 1


class WireUse(NamedTuple):
    """The load of one direction between two hosts: packets between stages, and transfers of collectives."""

    source: int
    target: int
    messages: int
    wire_bytes: float
    """Bytes of packets, of the transport's additions, and of transfers."""
    busy_s: float
    """Seconds of these bytes at full speed."""
    utilisation: float
    """`busy_s` as a share of the step."""


def wire_use(timeline: Timeline) -> list[WireUse]:
    """Return the load of each direction between two hosts."""
    listed = [
        (source, target, times * exchange.collective.repeats * messages, times * exchange.collective.repeats * size)
        for exchange in timeline.collectives
        for times, sent in exchange.collective.rounds
        for source, target, messages, size in sent.pairs(exchange.collective.classes)
    ]
    columns = np.concatenate([_packets(timeline), np.array(listed, np.float64).reshape(-1, 4)])
    ends, index = np.unique(columns[:, :2].astype(np.int64), axis=0, return_inverse=True)
    messages, sizes = (np.bincount(index.reshape(-1), columns[:, i], len(ends)) for i in (2, 3))
    busy_s = 8 * timeline.network.framing * sizes / timeline.network.bandwidths_bps(*ends.T)
    rows = zip(*ends.T.tolist(), messages.tolist(), sizes.tolist(), busy_s.tolist(), strict=True)
    return [
        WireUse(source, target, int(sent), size, busy, _share(busy, timeline))
        for source, target, sent, size, busy in rows
        if sent
    ]


def busiest_share(timeline: Timeline) -> float:
    """Return the share of the step in which the busiest wire, or the busiest port of a host in collectives, moved bytes.

    Of several equal wires in a collective, only one is checked.
    """
    network = timeline.network
    half, num_hosts = network.sharing == "half", timeline.placement.num_hosts
    ports = np.zeros((1 if half else 2, num_hosts))
    columns = [_packets(timeline)[:, [0, 1, 3]]]
    for exchange in timeline.collectives:
        classes = exchange.collective.classes
        loads = np.zeros((2, num_hosts))
        for times, sent in exchange.collective.rounds:
            size = times * exchange.collective.repeats * sent.wire_bytes
            np.add.at(loads[0], sent.source, sent.fan_out * size)
            np.add.at(loads[1], sent.receiver, sent.fan_in * size)
            columns.append(np.stack([sent.source, sent.target, size], axis=1))
        of_hosts = loads[:, classes.leader]
        ports[:, classes.hosts] += of_hosts.sum(axis=0) if half else of_hosts
    source, target, size = np.concatenate(columns).T
    ends, index = np.unique(np.stack([source, target]).astype(np.int64), axis=1, return_inverse=True)
    wires = np.bincount(index.reshape(-1), size, ends.shape[1]) / network.bandwidths_bps(*ends)
    busy = np.flatnonzero(ports.any(axis=0))
    loads = ports[:, busy] / network.ports_bps(num_hosts)[: len(ports), busy]
    busiest = max(wires.max(initial=0.0), loads.max(initial=0.0))
    return _share(8 * network.framing * float(busiest), timeline)


def egress_bytes(timeline: Timeline) -> float:
    """Return the egress of a step in bytes: out of hosts or, on a network of sites, out of sites."""
    sites = timeline.network.host_sites
    if sites is not None:
        return sum(use.wire_bytes for use in wire_use(timeline) if sites[use.source] != sites[use.target])
    total = float(_packets(timeline)[:, 3].sum())
    for exchange in timeline.collectives:
        classes = exchange.collective.classes
        sizes = np.bincount(classes.leader, minlength=timeline.placement.num_hosts)
        for times, sent in exchange.collective.rounds:
            sent_bytes = float((sizes[sent.source] * sent.fan_out * sent.wire_bytes).sum())
            total += times * exchange.collective.repeats * sent_bytes
    return total


def _packets(timeline: Timeline) -> NDArray[np.float64]:
    """Return source, target, messages and bytes of the packets of each action between two hosts, as rows."""
    table = timeline.table
    hosts = timeline.placement.by_replica(table.num_workers)[:, table.owner]
    moved = timeline.profile.moved_bytes
    sizes = moved.sum(axis=3) / table.num_steps
    if moved.shape[3] == 1:
        sizes = table.per_step * moved[..., 0]
    rows = [np.empty((0, 4))]
    for op, sources, targets in ((0, hosts[:, :-1], hosts[:, 1:]), (1, hosts[:, 1:], hosts[:, :-1])):
        size = np.broadcast_to(sizes[:, :-1, 0] if op == 0 else sizes[:, 1:, 1], sources.shape)
        sent = np.stack([sources, targets, np.full(size.shape, table.per_step), size], axis=-1)
        rows.append(sent[sources != targets])
    return np.concatenate(rows)


def _share(seconds: float, timeline: Timeline) -> float:
    return seconds / timeline.step_s if timeline.step_s else 0.0


def summary(timeline: Timeline) -> dict[str, Any]:
    """Return the step in figures: seconds, collectives, share of bubble, workers' time, critical path."""
    return {
        "step_s": timeline.step_s,
        "pipeline_s": timeline.pipeline_s,
        "collective_s": timeline.collective_s,
        "outside_s": timeline.outside_s,
        "collectives": [
            {
                "direction": exchange.collective.direction,
                "stages": list(exchange.collective.stages),
                "start_s": exchange.start_s,
                "codec_s": exchange.codec_s,
                "round_s": list(exchange.round_s),
                "end_s": exchange.end_s,
                "num_buckets": exchange.collective.num_buckets,
            }
            for exchange in timeline.collectives
        ],
        "bubble": timeline.bubble,
        "workers": [worker._asdict() for worker in timeline.workers()],
        "critical_path_s": timeline.explain(),
    }


def trace_events(timeline: Timeline) -> Iterator[Event]:
    """Yield the trace events of a simulated step."""
    table = timeline.table
    hosts = timeline.placement.by_replica(table.num_workers).tolist()
    lanes = _Lanes()
    packets = count(1)
    for replica in range(timeline.num_replicas):
        yield _named("process_name", replica, 0, f"replica {replica}")
        for worker in range(table.num_workers):
            stages = np.flatnonzero(table.owner == worker)
            label = f"worker {worker}: stage {', '.join(map(str, stages))}, host {hosts[replica][worker]}"
            yield _named("thread_name", replica, worker, label)
            for index in timeline.visible(replica, worker):
                stage, op, microbatch = (int(part[index]) for part in (table.stage, table.op, table.microbatch))
                key = (replica, stage, op, microbatch)
                name = f"{stage}{OPS[op]}{microbatch % table.per_step}"
                start, end = float(timeline.start_s[key]), float(timeline.end_s[key])
                details = {"stage": stage, "microbatch": microbatch % table.per_step}
                yield _slice(name, "action", replica, worker, start, end, **details)
                for kind, low, high in timeline.phases(replica, index):
                    if high > low and kind != "compute":
                        yield _slice(kind, "phase", replica, worker, low, high)
                neighbour = {0: stage + 1, 1: stage - 1}.get(op, -1)
                if 0 <= neighbour < table.num_stages:
                    ends = hosts[replica][worker], hosts[replica][table.owner[neighbour]]
                    yield from _packet_events(timeline, name, key, neighbour, ends, lanes, next(packets))
    yield from _collective_events(timeline, lanes, packets)


def _packet_events(
    timeline: Timeline,
    name: str,
    key: tuple[int, int, int, int],
    neighbour: int,
    ends: tuple[int, int],
    lanes: _Lanes,
    number: int,
) -> Iterator[Event]:
    """Yield the arrow of the packet of action `key` to the stage `neighbour`, and its bar on the wire between two hosts."""
    replica, stage, op, microbatch = key
    owner = timeline.table.owner
    arrow = {"id": number, "name": name, "cat": "packet", "pid": replica}
    taken = float(timeline.start_s[replica, neighbour, op, microbatch])
    yield {"ph": "s", **arrow, "tid": int(owner[stage]), "ts": _us(float(timeline.end_s[key]))}
    yield {"ph": "f", "bp": "e", **arrow, "tid": int(owner[neighbour]), "ts": _us(taken)}
    if ends[0] == ends[1]:
        return
    yield from lanes.named(ends)
    size = int(timeline.whole(timeline.profile.wire_bytes, replica)[stage, op, microbatch])
    # Packets overlap while latency passes, so their bars are asynchronous events, not slices.
    bar = {"id": number, "name": name, "cat": "wire", "pid": WIRES, "tid": lanes.number[ends]}
    yield bar | {"ph": "b", "ts": _us(float(timeline.begin_s[key])), "args": {"wire_bytes": size}}
    yield bar | {"ph": "e", "ts": _us(float(timeline.arrive_s[key]))}


def _collective_events(timeline: Timeline, lanes: _Lanes, packets: Iterator[int]) -> Iterator[Event]:
    """Yield the events of the collectives that end a step: their codecs and rounds, and the transfers of each round by wire."""
    for lane, exchange in enumerate(timeline.collectives):
        collective = exchange.collective
        if lane == 0:
            yield _named("process_name", COLLECTIVES, 0, "collectives")
        stages = f"{collective.direction} of stage {', '.join(map(str, collective.stages))}"
        yield _named("thread_name", COLLECTIVES, lane, stages)
        if exchange.codec_s:
            yield _slice("codec", "phase", COLLECTIVES, lane, exchange.start_s, exchange.start_s + exchange.codec_s)
        rounds = (sent for times, sent in collective.rounds for _ in range(times))
        for (turn, begin, end), sent in zip(exchange.spans(), rounds, strict=True):
            yield _slice(f"round {turn}", "collective", COLLECTIVES, lane, begin, end)
            for source, target, transfers, size in sent.pairs(collective.classes):
                yield from lanes.named((source, target))
                tid = lanes.number[source, target]
                common = {
                    "id": next(packets),
                    "name": f"{stages}, round {turn}",
                    "cat": "wire",
                    "pid": WIRES,
                    "tid": tid,
                }
                yield common | {"ph": "b", "ts": _us(begin), "args": {"wire_bytes": size, "transfers": transfers}}
                yield common | {"ph": "e", "ts": _us(end)}


class _Lanes:
    """Threads of the network's process in the trace: one for each direction between two hosts."""

    def __init__(self) -> None:
        self.number: dict[tuple[int, int], int] = {}

    def named(self, ends: tuple[int, int]) -> Iterator[Event]:
        """Yield the events that name the lane between two hosts, if it is new."""
        if ends in self.number:
            return
        if not self.number:
            yield _named("process_name", WIRES, 0, "network")
        self.number[ends] = len(self.number)
        yield _named("thread_name", WIRES, self.number[ends], f"host {ends[0]} to host {ends[1]}")


def write_trace(events: Iterator[Event], path: Path | str) -> int:
    """Stream events to a JSON file and return their number."""
    written = 0
    with output_file(Path(path)) as file:
        file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
        for written, event in enumerate(events, start=1):
            file.write((("" if written == 1 else ",") + "\n" + json.dumps(event, allow_nan=False)).encode())
        file.write(b"\n]}\n")
    return written


def _named(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(name: str, category: str, process: int, thread: int, start_s: float, end_s: float, **details: int) -> Event:
    start = _us(start_s)
    event = {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": start,
        "dur": _us(end_s) - start,
    }
    return event | ({"args": details} if details else {})


def _us(seconds: float) -> float:
    return max(seconds, 0.0) * 1e6  # without a flush, actions that started in the previous step are shown from 0 on
