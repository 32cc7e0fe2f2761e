"""A timeline in figures: the use of wires and ports, and a summary for JSON."""

from __future__ import annotations

from typing import Any, NamedTuple

from raysim.network.timeline import Timeline
from raysim.network.topology import replica_hosts


class WireUse(NamedTuple):
    """The load of one direction between two hosts: packets between stages, and transfers of collectives."""

    source: int
    target: int
    messages: int
    wire_bytes: float
    """Of packets, of bytes beside them, and of transfers."""
    busy_s: float
    """Seconds that these bytes take at full speed."""
    utilisation: float
    """`busy_s` as a share of the step."""


def wire_use(timeline: Timeline) -> list[WireUse]:
    """Return the load of each direction between two hosts."""
    totals: dict[tuple[int, int], list[float]] = {}
    hosts = replica_hosts(timeline.placement, timeline.table.num_workers)
    stages = timeline.table.num_stages
    for r in range(timeline.num_replicas):
        sizes = timeline.whole(timeline.profile.moved_bytes, r)
        for stage in range(stages):
            for op, neighbour in ((0, stage + 1), (1, stage - 1)):
                if not 0 <= neighbour < stages:
                    continue
                ends = hosts[r][timeline.table.owner[stage]], hosts[r][timeline.table.owner[neighbour]]
                if ends[0] != ends[1]:
                    total = totals.setdefault(ends, [0.0, 0.0])
                    total[0] += timeline.table.per_step
                    total[1] += float(sizes[stage, op].sum()) / timeline.table.num_steps
    for collective in (exchange.collective for exchange in timeline.collectives):
        for each in collective.rounds:
            for source, target, messages, _, size in zip(*(part.tolist() for part in each), strict=True):
                total = totals.setdefault((source, target), [0.0, 0.0])
                total[0] += collective.repeats * messages
                total[1] += collective.repeats * size
    uses = []
    for (source, target), (messages, size) in sorted(totals.items()):
        if messages:
            busy = 8 * timeline.network.framing * size / float(timeline.network.bandwidths_bps(source, target))
            uses.append(WireUse(source, target, int(messages), size, busy, _share(busy, timeline)))
    return uses


def busiest_share(timeline: Timeline) -> float:
    """Return the share of the step in which the busiest wire, or the busiest port of a host in collectives, moved bytes."""
    ports: dict[tuple[str, int], float] = {}
    half = timeline.network.sharing == "half"
    for collective in (exchange.collective for exchange in timeline.collectives):
        for each in collective.rounds:
            for source, target, size in zip(each.source.tolist(), each.target.tolist(), each.wire_bytes, strict=True):
                for port in (("both", source), ("both", target)) if half else (("out", source), ("in", target)):
                    ports[port] = ports.get(port, 0.0) + collective.repeats * float(size)
    bps = timeline.network.ports_bps(timeline.placement.num_hosts)
    loads = [
        _share(8 * timeline.network.framing * size / float(bps[host]), timeline) for (_, host), size in ports.items()
    ]
    return max([*(use.utilisation for use in wire_use(timeline)), *loads], default=0.0)


def summary(timeline: Timeline) -> dict[str, Any]:
    """Return the step in figures: seconds, collectives, the share of bubble, workers' time, wires' use, the critical path."""
    return {
        "step_s": timeline.step_s,
        "pipeline_s": timeline.pipeline_s,
        "collective_s": timeline.collective_s,
        "outside_s": timeline.outside_s,
        "collectives": [
            {
                "direction": one.collective.direction,
                "stages": list(one.collective.stages),
                "start_s": one.start_s,
                "codec_s": one.collective.codec_s,
                "round_s": list(one.round_s),
                "end_s": one.end_s,
                "num_buckets": one.collective.num_buckets,
            }
            for one in timeline.collectives
        ],
        "bubble": timeline.bubble,
        "workers": [worker._asdict() for worker in timeline.workers()],
        "wires": [wire._asdict() for wire in wire_use(timeline)],
        "critical_path_s": timeline.explain(),
    }


def _share(seconds: float, timeline: Timeline) -> float:
    """Return seconds as a share of the step."""
    return seconds / timeline.step_s if timeline.step_s else 0.0
