"""The result of a simulated step: when everything happened, where workers' time went, which wires were busy, the critical path."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.network.collectives import Collective
from raysim.network.profile import Profile
from raysim.network.topology import Network, Placement
from raysim.schedules.actions import Action
from raysim.schedules.arrays import OPS, ActionTable

Floats = NDArray[np.float64]


class WorkerTime(NamedTuple):
    """The seconds of one worker's step by use: they add up to `step_s`."""

    replica: int
    worker: int
    compute_s: float
    codec_s: float
    overhead_s: float
    contention_s: float
    """Work made longer by sharing cores."""
    wait_s: float
    """Idle time in which the awaited packet was under way, or the parameters and gradients of sharded replicas."""
    bubble_s: float
    """Idle time for any other reason: the packet was not made yet, or the row was done before the rows of other workers."""
    collective_s: float
    """From the end of the pipeline until the collectives are over: replicas average, owners of tied parameters sum."""
    outside_s: float
    """The optimiser's update, and the driver."""


class Segment(NamedTuple):
    """One stretch of the critical path."""

    kind: str
    """compute, codec, overhead; of a packet: path (before its wire), queue (behind other packets), wire (bytes and latency);
    at the step's end: collective (rounds of transfers), codec of its method, update, driver."""
    start_s: float
    end_s: float
    replica: int | None
    """None at the step's end, which belongs to all."""
    action: Action | None
    """The action at work, or the one that made the packet; None at the step's end."""


class Exchange(NamedTuple):
    """Start and end of a collective."""

    collective: Collective
    start_s: float
    """Its codec comes first, then its rounds."""
    end_s: float
    round_s: tuple[float, ...]
    """Seconds of each round, of all buckets together."""

    @property
    def critical_s(self) -> float:
        """Start of the stretch without waits that ends the collective: its own start, or that of its last bucket."""
        seconds = self.collective.codec_s + sum(self.round_s)
        waited = self.end_s - self.start_s > seconds * (1 + 1e-9)
        return self.end_s - seconds / self.collective.repeats if waited else self.start_s

    def spans(self) -> list[tuple[int, float, float]]:
        """Return the number, start and end of every round."""
        edges = [*np.cumsum([self.start_s + self.collective.codec_s, *self.round_s[:-1]]).tolist(), self.end_s]
        return [(turn, *edges[turn : turn + 2]) for turn in range(len(self.round_s))]


@dataclass(frozen=True, eq=False)
class Timeline:
    """One simulated step. Arrays have axes (replica, stage, op, microbatch) and are NaN where there is nothing.

    Without a flush the table and the arrays are of several steps, of which one is priced: it lasts from 0 to `pipeline_s`, and what
    is before or after it has negative or later times.
    """

    table: ActionTable
    window: NDArray[np.int64]
    """By worker: the actions of the table that are the step's, from the first to behind the last."""
    profile: Profile
    network: Network
    placement: Placement
    start_s: Floats
    """When the action began: its packet was there and its worker free."""
    end_s: Floats
    begin_s: Floats
    """When the packet that leaves the action got on its wire."""
    arrive_s: Floats
    """When that packet had arrived."""
    pipeline_s: float
    """When the last action of any replica ended; without a flush, the seconds between the ends of two steps."""
    step_s: float
    """The whole step: pipeline, collectives, update, and the driver's time around them."""
    collectives: tuple[Exchange, ...]
    """Averages over replicas, then sums of tied parameters."""
    collectives_end_s: float
    """When the last of them was over; `pipeline_s` where there are none."""

    @property
    def num_replicas(self) -> int:
        """Return the number of replicas."""
        return int(self.start_s.shape[0])

    @property
    def collective_s(self) -> float:
        """Return the seconds of the step from the end of the pipeline to the end of the collectives."""
        return self.collectives_end_s - self.pipeline_s

    @property
    def outside_s(self) -> float:
        """Return the seconds of the update and the driver."""
        return self.step_s - self.collectives_end_s

    def visible(self, replica: int, worker: int) -> range:
        """Return the actions of a worker between 0 and `pipeline_s`, in the table's numbers; with a flush these are all."""
        low, high = self.table.offsets[worker : worker + 2].tolist()
        if self.table.num_steps == 1:
            return range(low, high)
        slots = self._slots[low:high]
        start, end = self._flat(self.start_s, replica)[slots], self._flat(self.end_s, replica)[slots]
        inside = low + np.flatnonzero((end > 0) & (start < self.pipeline_s))
        return range(int(inside[0]), int(inside[-1]) + 1)

    def workers(self) -> list[WorkerTime]:
        """Return where every worker's time went; the parts of each add up to `step_s`."""
        found = []
        ending = (self.collective_s, self.outside_s)
        table, profile = self.table, self.profile
        for r in range(self.num_replicas):
            start, end = self._flat(self.start_s, r)[self._slots], self._flat(self.end_s, r)[self._slots]
            made = np.where(self._sources >= 0, self._flat(self.end_s, r)[self._sources], np.inf)
            previous = np.concatenate([[0.0], end[:-1]])
            previous[table.offsets[:-1]] = 0.0
            idle = start - previous
            wait = np.clip(start - np.maximum(previous, made), 0.0, idle)
            codec = self._cost(profile.decode_s + profile.encode_s, r)
            compute, shards = self._cost(self._alone_s, r), self._cost(profile.shard_s, r)
            overhead = np.where(self._sends, profile.call_s, 0.0)
            stretched = (end - start) - (codec + compute + overhead)
            compute, wait = compute - shards, wait + shards
            for w in range(table.num_workers):
                row = slice(*self.window[w])
                compute_s, codec_s, overhead_s, contention_s, wait_s = (
                    float(part[row].sum()) for part in (compute, codec, overhead, stretched, wait)
                )
                # Without shared cores nothing is stretched: the remainder is rounding.
                contention_s = max(contention_s, 0.0) if self.placement.cores is not None else 0.0
                busy_s = compute_s + codec_s + overhead_s + contention_s
                wait_s = min(wait_s, max(self.pipeline_s - busy_s, 0.0))  # of steps that are not alike, see `steady`
                bubble_s = max(self.pipeline_s - busy_s - wait_s, 0.0)
                parts = (compute_s, codec_s, overhead_s, contention_s, wait_s, bubble_s)
                found.append(WorkerTime(r, w, *parts, *ending))
        return found

    @property
    def bubble(self) -> float:
        """Return the share of all workers' time that is idle by the schedule, waits for the wire not included."""
        workers = self.workers()
        return sum(worker.bubble_s for worker in workers) / (len(workers) * self.pipeline_s) if self.pipeline_s else 0.0

    def critical_path(self) -> list[Segment]:
        """Return the chain of work, packets and collectives that the step's end hangs on, first to last, without gaps.

        Going back from the end: update and collectives, then the last action, its packet, where that came after its worker was free,
        or else the action before it. Without a flush the chain goes on to the end of the step before.
        """
        table = self.table
        place = np.empty(self._num_slots, np.int64)
        place[self._slots] = np.arange(len(self._slots))
        backwards, r, last, until = self._ending()
        start, end = self._flat(self.start_s, r), self._flat(self.end_s, r)
        begin, arrive = self._flat(self.begin_s, r), self._flat(self.arrive_s, r)
        sizes = self.whole(self.profile.moved_bytes, r)
        i = int(place[last])
        while True:
            slot = int(self._slots[i])
            action = self._action(slot)
            for kind, low, high in reversed(self.phases(r, i)):
                if min(high, until) > low:
                    backwards.append(Segment(kind, low, min(high, until), r, action))
            source = int(self._sources[i])
            first = i == table.offsets[np.searchsorted(table.offsets, i, side="right") - 1]
            previous = 0.0 if first else float(end[self._slots[i - 1]])
            if source >= 0 and arrive[source] >= start[slot] and arrive[source] > previous:
                maker = self._action(source)
                size = float(sizes[maker.stage, OPS.index(maker.op), maker.microbatch])
                ready = min(end[source] + self.profile.message_s + self.profile.byte_s * size, arrive[source])
                stops = (
                    ("path", end[source], ready),
                    ("queue", ready, begin[source]),
                    ("wire", begin[source], arrive[source]),
                )
                for kind, low, high in reversed(stops):
                    if high > low:
                        backwards.append(Segment(kind, float(low), float(high), r, maker))
                i = int(place[source])
            elif first or backwards[-1].start_s <= 0:
                return [one._replace(start_s=max(one.start_s, 0.0)) for one in backwards[::-1] if one.end_s > 0]
            else:
                i -= 1

    def _ending(self) -> tuple[list[Segment], int, int, float]:
        """Return the critical path behind the last action, last to first; that action's replica and slot, and where its part ends."""
        updated = self.step_s - self.profile.step_s
        spans = [("driver", updated, self.step_s), ("update", self.collectives_end_s, updated)]
        moment, last = self.collectives_end_s, None
        while one := next((one for one in reversed(self.collectives) if one.start_s < one.end_s == moment), None):
            if one.critical_s > one.start_s:
                spans.append(("collective", one.critical_s, one.end_s))
            else:
                spans += [("collective", low, high) for _, low, high in reversed(one.spans())]
                spans.append(("codec", one.start_s, one.start_s + one.collective.codec_s))
            moment, last = one.critical_s, one
        backwards = [Segment(kind, low, high, None, None) for kind, low, high in spans if high > low]
        if last is None or not last.collective.num_buckets:
            r, slot = divmod(int(np.nanargmin(np.abs(self.end_s - moment))), self._num_slots)
            return backwards, r, slot, np.inf
        of_stage = (
            slice(None),
            last.collective.stages[0],
        )  # its last backward, in the midst of which a bucket may leave
        ends = np.full_like(self.end_s, -np.inf)
        ends[of_stage] = np.where(self.start_s[of_stage] <= moment, self.end_s[of_stage], -np.inf)
        r, slot = divmod(int(np.argmax(ends)), self._num_slots)
        return backwards, r, slot, moment

    def phases(self, replica: int, index: int) -> list[tuple[str, float, float]]:
        """Return the phases of action `index` of the table on one replica, each as (kind, start, end) in seconds.

        Where cores are shared, all phases are stretched by the same factor: the kernel keeps the start and the end alone.
        """
        slot, key = (
            int(self._slots[index]),
            (self.table.stage[index], self.table.op[index], self.table.microbatch[index]),
        )
        profile = self.profile
        parts = [
            float(self.whole(profile.decode_s, replica)[key]),
            float(self.whole(profile.shard_s, replica)[key]),
            float(self.whole(self._alone_s - profile.shard_s, replica)[key]),
            float(self.whole(profile.encode_s, replica)[key]),
            profile.call_s if self._sends[index] else 0.0,
        ]
        start, end = self._flat(self.start_s, replica)[slot], self._flat(self.end_s, replica)[slot]
        until = np.cumsum(parts)
        stretch = (end - start) / until[-1] if until[-1] else 1.0
        edges = [float(start), *(float(end if part == until[-1] else start + stretch * part) for part in until)]
        return list(zip(("codec", "wire", "compute", "codec", "overhead"), edges, edges[1:], strict=False))

    def explain(self) -> dict[str, float]:
        """Return the seconds of each kind on the critical path: the most that a speed-up of that kind could save."""
        totals: dict[str, float] = {}
        for segment in self.critical_path():
            totals[segment.kind] = totals.get(segment.kind, 0.0) + segment.end_s - segment.start_s
        return totals

    @cached_property
    def _alone_s(self) -> Floats:
        return alone_s(self.profile, self.placement)

    @cached_property
    def _slots(self) -> NDArray[np.int64]:
        """Return the place of each action of the table in a flat (stage, op, microbatch) array."""
        table = self.table
        group: NDArray[np.int64] = table.stage.astype(np.int64) * self.start_s.shape[2] + table.op
        return group * table.num_microbatches + table.microbatch

    @cached_property
    def _sources(self) -> NDArray[np.int64]:
        """Return the place of the action whose packet each action consumes, or -1."""
        table, last = self.table, self.table.num_stages - 1
        step = self.start_s.shape[2] * table.num_microbatches
        forward = (table.op == 0) & (table.stage > 0)
        backward = (table.op == 1) & (table.stage < last)
        sources: NDArray[np.int64] = np.where(forward, self._slots - step, np.where(backward, self._slots + step, -1))
        return sources

    @cached_property
    def _sends(self) -> NDArray[np.bool_]:
        """Return whether a packet leaves each action."""
        table, last = self.table, self.table.num_stages - 1
        found: NDArray[np.bool_] = ((table.op == 0) & (table.stage < last)) | ((table.op == 1) & (table.stage > 0))
        return found

    @property
    def _num_slots(self) -> int:
        return int(np.prod(self.start_s.shape[1:]))

    def _flat(self, array: Floats, replica: int) -> Floats:
        flat: Floats = array[replica].reshape(-1)
        return flat

    def whole(self, costs: NDArray[Any], replica: int) -> NDArray[Any]:
        """Return costs of one replica with an axis of all microbatches."""
        one = costs[replica if costs.shape[0] > 1 else 0]
        return np.broadcast_to(one, (*one.shape[:2], self.table.num_microbatches))

    def _cost(self, costs: Floats, replica: int) -> Floats:
        """Return the cost of each action of the table."""
        one = costs[replica if costs.shape[0] > 1 else 0]
        table = self.table
        found: Floats = one[table.stage, table.op, table.microbatch if one.shape[2] > 1 else 0]
        return found

    def _action(self, slot: int) -> Action:
        rest, microbatch = divmod(slot, self.table.num_microbatches)
        stage, op = divmod(rest, self.start_s.shape[2])
        return Action(stage, OPS[op], microbatch)


def alone_s(profile: Profile, placement: Placement) -> Floats:
    """Return the seconds of every action's compute with its cores to itself.

    Where cores are shared, these are its CPU seconds over the threads it may use: wall seconds recorded on a busy host hold waiting.
    """
    if placement.cores is None:
        return profile.compute_s
    return np.where(np.isnan(profile.cpu_s), profile.compute_s, profile.cpu_s / placement.threads)
