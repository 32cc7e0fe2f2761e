"""The result of a simulated step: times of all actions, workers' time by use, and the critical path."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.network.collectives import TimedCollective
from raysim.network.profile import Profile
from raysim.network.topology import Network, Placement
from raysim.schedules.actions import Action
from raysim.schedules.arrays import OPS, ActionTable

Floats = NDArray[np.float64]

SAME = 1e-9  # share of a step below which moments count as equal


class WorkerTime(NamedTuple):
    """One worker's seconds by use, which add up to `step_s`."""

    replica: int
    worker: int
    compute_s: float
    codec_s: float
    overhead_s: float
    contention_s: float
    """Slow-down of work by shared cores."""
    wait_bytes_s: float
    """Idle time while the awaited packet queued for its wire or its bytes were in transfer."""
    wait_latency_s: float
    """Idle time during the latency of the awaited packet, see `Timeline.latency_s`."""
    wait_host_s: float
    """Idle time while the transport handled the awaited packet on its hosts."""
    shard_s: float
    """Waits for parameters and gradients of sharded replicas."""
    bubble_s: float
    """Other idle time: the packet was not sent yet, or the row was done before the rows of other workers."""
    collective_s: float
    """From the end of the pipeline to the end of the collectives: averages over replicas, sums of tied parameters."""
    outside_s: float
    """The optimiser's update, and the driver with the latency of its messages."""


class Segment(NamedTuple):
    """One segment of the critical path."""

    kind: str
    """compute, codec, overhead, shards; of a packet: path (before its wire), queue (behind other packets), bytes, latency;
    at the step's end: collective_bytes and collective_latency, codec of its method, update, driver."""
    start_s: float
    end_s: float
    replica: int | None
    """None at the step's end, which involves all."""
    action: Action | None
    """The running action, or the sender of the packet; None at the step's end."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """One simulated step. Times have axes (replica, stage, op, microbatch), with NaN for missing values.

    Without a flush the table and the arrays cover several steps, one of which is priced: it lasts from 0 to `pipeline_s`; earlier
    events have negative times and later ones larger times.
    """

    table: ActionTable
    profile: Profile
    network: Network
    placement: Placement
    row: NDArray[np.int64]
    """By replica: its row in `times`; replicas with equal times share one."""
    times: Floats
    """Start, end, begin and arrival by (4, row, stage, op, microbatch)."""
    pipeline_s: float
    """End of the last action of any replica; without a flush, the seconds between the ends of two steps."""
    step_s: float
    """The whole step: pipeline, collectives, update, and the driver's time around them."""
    collectives: tuple[TimedCollective, ...]
    """Averages over replicas, then sums of tied parameters."""
    collectives_end_s: float
    """End of the last collective; `pipeline_s` if there are none."""

    def under_next_step(self, step_s: float) -> Timeline:
        """Return the timeline of a steady step of `step_s` seconds, during which the previous step's averages continue."""
        end_s, last_s = max(step_s - self.outside_s, self.pipeline_s), max(each.end_s for each in self.collectives)
        waited = end_s > self.pipeline_s * (1 + SAME)
        shift_s = last_s - end_s if waited else self.pipeline_s + self.outside_s
        moved = tuple(
            each._replace(
                start_s=each.start_s - shift_s,
                end_s=end_s if waited and each.end_s == last_s else each.end_s - shift_s,
            )
            for each in self.collectives
        )
        return replace(self, collectives=moved, collectives_end_s=end_s, step_s=step_s)

    @property
    def num_replicas(self) -> int:
        return len(self.row)

    @property
    def start_s(self) -> Floats:
        """Start of each action, when its packet had arrived and its worker was free."""
        return self._of_replicas(self.times[0])

    @property
    def end_s(self) -> Floats:
        """End of each action."""
        return self._of_replicas(self.times[1])

    @property
    def begin_s(self) -> Floats:
        """Begin of the transfer of each action's packet."""
        return self._of_replicas(self.times[2])

    @property
    def arrive_s(self) -> Floats:
        """Arrival of that packet."""
        return self._of_replicas(self.times[3])

    def _of_replicas(self, rows: Floats) -> Floats:
        if len(rows) == 1:
            return np.broadcast_to(rows, (self.num_replicas, *rows.shape[1:]))
        return rows[self.row]

    @property
    def collective_s(self) -> float:
        """Return the seconds of the step from the end of the pipeline to the end of the collectives."""
        return self.collectives_end_s - self.pipeline_s

    @property
    def outside_s(self) -> float:
        """Return the seconds of the update and the driver."""
        return self.step_s - self.collectives_end_s

    def visible(self, replica: int, worker: int) -> range:
        """Return the table indices of a worker's actions between 0 and `pipeline_s`; with a flush these are all."""
        low, high = self.table.offsets[worker : worker + 2].tolist()
        if self.table.num_steps == 1:
            return range(low, high)
        start, end = (times[low:high] for times in self._times(replica)[:2])
        first, last = np.searchsorted(end, 0.0, side="right"), np.searchsorted(start, self.pipeline_s)
        return range(low + int(first), low + int(last))

    @cached_property
    def latency_s(self) -> Floats:
        """Seconds of latency at the end of each packet's flight, by the axes of `arrive_s`.

        The one-way latency between its hosts times the trips of its transport, at most the time since the packet was ready for its
        wire. The rest of that time is due to jitter and to bytes: the packet's own and those of packets before it.
        """
        return self._of_replicas(self._latency_rows)

    @cached_property
    def _latency_rows(self) -> Floats:
        hosts = self.placement.by_replica(self.table.num_workers)[self._first][:, self.table.owner]
        one_way = np.zeros(self.times.shape[1:4])
        one_way[:, :-1, 0] = self.network.latencies_s(hosts[:, :-1], hosts[:, 1:])
        one_way[:, 1:, 1] = self.network.latencies_s(hosts[:, 1:], hosts[:, :-1])
        flight = self.times[3] - self.times[1] - self._path_s
        return np.clip(one_way[..., None] * self.profile.trips, 0.0, np.maximum(flight, 0.0))

    def _latency_of(self, replica: int) -> Floats:
        """Return the latency of each packet of one replica for each action of the table."""
        table = self.table
        latency: Floats = self._latency_rows[self.row[replica], table.stage, table.op, table.microbatch]
        return latency

    @cached_property
    def _first(self) -> NDArray[np.int64]:
        """By row: the first replica with these times."""
        return np.unique(self.row, return_index=True)[1]

    @property
    def _driver_latency_s(self) -> float:
        """The latency of the driver's messages at the end of a step with a flush, to the farthest worker and back."""
        hosts = self.placement.hosts
        trips = self.profile.transport.step_trips if self.table.num_steps == 1 else 0.0
        return float(trips * self.network.latencies_s(hosts[0], hosts).max())

    @cached_property
    def _path_s(self) -> Floats:
        return self.profile.message_s + self.profile.byte_s * self.profile.moved_bytes

    def workers(self) -> list[WorkerTime]:
        """Return every worker's time by use, which adds up to `step_s`."""
        return [
            WorkerTime._make((replica, worker, *parts))
            for replica, row in enumerate(self.row.tolist())
            for worker, parts in enumerate(self._uses[row])
        ]

    def mean_s(self, use: str) -> float:
        """Return the mean over all workers of a field of `WorkerTime` in seconds."""
        field, counts = WorkerTime._fields.index(use) - 2, np.bincount(self.row).tolist()
        total = sum(count * parts[field] for count, uses in zip(counts, self._uses, strict=True) for parts in uses)
        return float(total / (self.num_replicas * self.table.num_workers))

    @cached_property
    def _uses(self) -> list[list[tuple[float, ...]]]:
        """The fields of `WorkerTime` from `compute_s` on, by row and worker."""
        ending = (self.collective_s, self.outside_s)
        table, profile, windows = self.table, self.profile, self.table.windows()
        uses = []
        for r in self._first.tolist():
            start, end, _, arrive = self._times(r)
            previous = np.concatenate([[0.0], end[:-1]])
            previous[table.offsets[:-1]] = 0.0
            latencies_s, paths_s = self._latency_of(r), self._by_action(self._path_s, r)
            freed = np.where(self._blockers >= 0, arrive[self._blockers], previous)
            made = np.maximum(freed, np.where(self._sources >= 0, end[self._sources], np.inf))
            wait, latency, host = np.zeros((3, len(end)))
            for packet, since, until in ((self._blockers, previous, freed), (self._sources, made, start)):
                waits = np.clip(until - since, 0.0, start - previous)  # which end with the flight of the packet
                of_latency = np.where(waits > 0, np.minimum(waits, latencies_s[packet]), 0.0)
                of_host = np.clip(end[packet] + paths_s[packet] - since, 0.0, waits - of_latency)
                wait, latency, host = wait + waits, latency + of_latency, host + np.where(waits > 0, of_host, 0.0)
            codec = self._by_action(profile.decode_s + profile.encode_s, r)
            compute, shards = self._by_action(self._alone_s, r), self._by_action(profile.shard_s, r)
            overhead = np.where(table.sends, profile.call_s, 0.0)
            stretched = (end - start) - (codec + compute + overhead)
            of_actions = (compute - shards, codec, overhead, stretched, wait - latency - host, latency, host, shards)
            of_workers = []
            for w in range(table.num_workers):
                row = slice(*windows[w])
                compute_s, codec_s, overhead_s, contention_s, *waits_s = (float(part[row].sum()) for part in of_actions)
                # Without shared cores nothing is slowed down: the remainder is rounding.
                contention_s = max(contention_s, 0.0) if self.placement.cores is not None else 0.0
                busy_s = compute_s + codec_s + overhead_s + contention_s
                wait_s, idle_s = sum(waits_s), max(self.pipeline_s - busy_s, 0.0)
                if wait_s > idle_s:  # if steps are not equal, see `steady_end`
                    waits_s = [each * idle_s / wait_s for each in waits_s]
                bubble_s = max(idle_s - wait_s, 0.0)
                of_workers.append((compute_s, codec_s, overhead_s, contention_s, *waits_s, bubble_s, *ending))
            uses.append(of_workers)
        return uses

    @property
    def bubble(self) -> float:
        """Return the share of all workers' time idle because of the schedule, without waits for the wire."""
        return self.mean_s("bubble_s") / self.pipeline_s if self.pipeline_s else 0.0

    def critical_path(self) -> list[Segment]:
        """Return the chain of work, packets and collectives that determines the step's end, first to last, without gaps.

        Going back from the end: update and collectives, then the last action, then its packet if that arrived after its worker was
        free, or else the previous action, and so on. Without a flush the chain goes back to the end of the previous step.
        """
        table = self.table
        backwards, r, i, until = self._ending()
        start, end, begin, arrive = self._times(r)
        path_s, latency_s = self._by_action(self._path_s, r), self._latency_of(r)
        while i >= 0:
            for kind, low, high in reversed(self.phases(r, i)):
                if min(high, until) > low:
                    backwards.append(Segment(kind, low, min(high, until), r, self._action(i)))
            first = i == table.offsets[np.searchsorted(table.offsets, i, side="right") - 1]
            previous = 0.0 if first else float(end[i - 1])
            packets = [each for each in (int(self._sources[i]), int(self._blockers[i])) if each >= 0]
            packet = max(packets, key=arrive.__getitem__, default=-1)
            if packet >= 0 and arrive[packet] >= start[i] and arrive[packet] > previous:
                ready = min(end[packet] + path_s[packet], arrive[packet])
                sent = max(arrive[packet] - latency_s[packet], ready)
                starts = min(begin[packet], sent)  # of its bytes: a request before them pays latency too
                edges = [float(moment) for moment in (end[packet], ready, starts, sent, arrive[packet])]
                kinds = ("path", "queue", "bytes", "latency")
                for kind, low, high in reversed([*zip(kinds, edges, edges[1:], strict=False)]):
                    if high > low:
                        backwards.append(Segment(kind, low, high, r, self._action(packet)))
                i = packet
            else:
                i = -1 if first or backwards[-1].start_s <= 0 else i - 1
        return [segment._replace(start_s=max(segment.start_s, 0.0)) for segment in backwards[::-1] if segment.end_s > 0]

    def _ending(self) -> tuple[list[Segment], int, int, float]:
        """Return the critical path after the last action, last to first; the action's replica and index, and the end of its part.

        The index is -1 if the previous step's average fills the step.
        """
        told = self.step_s - self.profile.step_s
        updated = max(told - self._driver_latency_s, self.collectives_end_s)
        spans = [("driver", told, self.step_s), ("latency", updated, told), ("update", self.collectives_end_s, updated)]
        moment, last = self.collectives_end_s, None
        while exchange := next((x for x in reversed(self.collectives) if x.critical_s < x.end_s == moment), None):
            spans += reversed(exchange.transfers())
            if exchange.critical_s == exchange.start_s:
                spans.append(("codec", exchange.start_s, exchange.start_s + exchange.codec_s))
            moment, last = exchange.critical_s, exchange
        backwards = [Segment(kind, low, high, None, None) for kind, low, high in spans if high > low]
        if moment <= SAME * self.step_s:
            return backwards, 0, -1, moment
        started, ended = self.times[:2]
        if last is None or not last.collective.num_buckets:
            nearest, until = np.nanargmin(np.abs(ended - moment)), np.inf
        else:  # the last backward of the bucket's stage, during which the bucket may be sent
            of_stage = slice(None), last.collective.stages[0]
            ends = np.full_like(ended, -np.inf)
            ends[of_stage] = np.where(started[of_stage] <= moment, ended[of_stage], -np.inf)
            nearest, until = np.argmax(ends), moment
        row, *key = np.unravel_index(nearest, ended.shape)
        return backwards, int(self._first[row]), int(self.table.places()[tuple(key)]), until

    def phases(self, replica: int, index: int) -> list[tuple[str, float, float]]:
        """Return the phases of the table's action `index` on one replica, each as (kind, start, end) in seconds.

        If cores are shared, phases are stretched by a common factor: the kernel keeps only an action's start and end.
        """
        table, profile = self.table, self.profile
        key = table.stage[index], table.op[index], table.microbatch[index]
        decode_s, shard_s, alone_s, encode_s = (
            float(self.whole(costs, replica)[key])
            for costs in (profile.decode_s, profile.shard_s, self._alone_s, profile.encode_s)
        )
        parts = [decode_s, shard_s, alone_s - shard_s, encode_s, profile.call_s if table.sends[index] else 0.0]
        start, end = self.times[(slice(2), self.row[replica], *key)].tolist()
        until = np.cumsum(parts)
        stretch = (end - start) / until[-1] if until[-1] else 1.0
        edges = [start, *(float(end if part == until[-1] else start + stretch * part) for part in until)]
        return list(zip(("codec", "shards", "compute", "codec", "overhead"), edges, edges[1:], strict=False))

    def explain(self) -> dict[str, float]:
        """Return the seconds of each kind on the critical path, the most that speeding up that kind could save."""
        totals: dict[str, float] = {}
        for segment in self.critical_path():
            totals[segment.kind] = totals.get(segment.kind, 0.0) + segment.end_s - segment.start_s
        return totals

    @cached_property
    def _alone_s(self) -> Floats:
        return self.profile.alone_s(self.placement)

    @cached_property
    def _sources(self) -> NDArray[np.int64]:
        return self.table.sources()

    @cached_property
    def _blockers(self) -> NDArray[np.int64]:
        """Index of each worker's previous action if its packet must arrive first, or -1."""
        previous = np.arange(-1, len(self.table.op) - 1)
        sent = self.table.sends[previous] & ~np.isin(previous + 1, self.table.offsets)
        return np.where(self.profile.blocking & sent, previous, -1)

    def whole(self, costs: NDArray[Any], replica: int) -> NDArray[Any]:
        """Return one replica's costs, repeated for every microbatch."""
        of_replica = costs[replica if costs.shape[0] > 1 else 0]
        return np.broadcast_to(of_replica, (*of_replica.shape[:2], self.table.num_microbatches))

    def _times(self, replica: int) -> Floats:
        """Return start, end, begin and arrival of one replica for each action of the table."""
        table = self.table
        times: Floats = self.times[:, self.row[replica], table.stage, table.op, table.microbatch]
        return times

    def _by_action(self, costs: Floats, replica: int) -> Floats:
        """Return costs of one replica for each action of the table."""
        values: Floats = self.whole(costs, replica)[self.table.stage, self.table.op, self.table.microbatch]
        return values

    def _action(self, index: int) -> Action:
        table = self.table
        return Action(int(table.stage[index]), OPS[table.op[index]], int(table.microbatch[index]))
