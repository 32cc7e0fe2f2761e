"""Choice of the kernel, and a schedule, a profile, networks and a placement as the flat arrays of the fast kernel."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysim.network.profile import Profile
from raysim.network.topology import Network, Placement
from raysim.schedules.actions import topological_order
from raysim.schedules.arrays import ActionTable
from raysim.schedules.families import Schedule

Floats = NDArray[np.float64]
Integers = NDArray[np.int32]
Record = Any  # one element of `Records`, a view into it
Records = NDArray[Any]
Costs = tuple[Floats, Floats, Floats, Floats]  # of networks: seconds a byte, latency, forgiven burst, jitter
Rows = tuple[NDArray[np.int64], Integers, NDArray[np.uint8], Integers, Integers, int, int]
Lanes = tuple[Floats, Floats, Floats, Floats, Integers, int, bool]

REPLICA_SEEDS = 65_536  # seeds of replicas are counted on from the step's

LANES = 64  # networks per pass of the fast kernel: enough to fill vector units, few enough to stay in cache


@dataclass(frozen=True)
class Ends:
    """The hosts between which each (stage, op) sends; equal where nothing is sent."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    worker: NDArray[np.int64]
    """The sending worker, counted over replicas."""
    receiver: NDArray[np.int64]


def ends_of(table: ActionTable, placement: Placement, num_ops: int, replica: int) -> Ends:
    """Return the ends of all packets of one replica."""
    workers = replica * table.num_workers + table.owner.astype(np.int64)
    sender = np.repeat(workers[:, None], num_ops, axis=1)
    receiver = sender.copy()
    receiver[:-1, 0] = workers[1:]
    receiver[1:, 1] = workers[:-1]
    hosts = np.array(placement.hosts, np.int64)
    return Ends(hosts[sender], hosts[receiver], sender, receiver)


def receivers_ask(profiles: Sequence[Profile]) -> bool:
    """Return whether receivers ask for some packet."""
    return any((one.messages > 1).any() for one in profiles)


def questions_wait(network: Network, asked: bool) -> bool:
    """Return whether questions of receivers, if any are `asked`, wait on a network's wires."""
    return asked and bool(np.isfinite(network.bandwidth_bps).any())


def is_ordered(table: ActionTable, sharing: str, placement: Placement, *, questions: bool = False) -> bool:
    """Return whether the schedule alone fixes the order of all messages.

    It does where no wire has two workers at the end that orders it, and no `questions` wait behind packets.
    """
    replicas = len(placement.hosts) // table.num_workers
    inbound = sharing == "inbound"
    users: dict[tuple[int, int], set[int]] = {}
    for replica in range(replicas):
        ends = ends_of(table, placement, 2, replica)
        across = ends.source != ends.target
        sources = np.zeros_like(ends.source) if inbound else ends.source
        orders = ends.receiver if inbound else ends.worker
        for source, target, worker in zip(sources[across], ends.target[across], orders[across], strict=True):
            users.setdefault((int(source), int(target)), set()).add(int(worker))
    alone = all(len(workers) == 1 for workers in users.values())
    simple = placement.cores is None and (inbound or (sharing == "pair" and not questions))
    if inbound and not (alone and simple):
        raise ValueError(
            f'`sharing` "inbound" must go with one worker on each host, and without `cores`, but got {placement!r}.'
        )
    return alone and simple


@dataclass(frozen=True)
class OrderedWiring:
    """Inputs of the fast kernel about networks: for each replica its wires, and for each block of networks their costs."""

    table: ActionTable
    wires: list[NDArray[np.int32]]
    """By replica: (stage, op) to wire, -1 within a host."""
    costs: list[list[Costs]]
    """By replica and block."""
    inbound: bool

    @classmethod
    def of(
        cls, table: ActionTable, networks: Sequence[Network], placement: Placement, replicas: int, num_ops: int
    ) -> OrderedWiring:
        """Return the inputs for networks that name their hosts alike, or of which none does."""
        inbound = networks[0].sharing == "inbound"
        blocks = [networks[low : low + LANES] for low in range(0, len(networks), LANES)]
        wires, costs = [], []
        for replica in range(replicas):
            ends = ends_of(table, placement, num_ops, replica)
            across = ends.source != ends.target
            # A wire for each pair of hosts, or for each receiver.
            key = ends.target if inbound else ends.source * placement.num_hosts + ends.target
            wire = np.full(across.shape, -1, np.int32)
            wire[across] = np.unique(key[across], return_inverse=True)[1]
            wires.append(wire)
            costs.append([_lane_costs(block, ends) for block in blocks])
        return cls(table, wires, costs, inbound)

    def run(
        self, schedule: Schedule, profile: Profile, seed: int, keep: Sequence[Floats] = ()
    ) -> tuple[Floats, Floats]:
        """Return when workers (replica, worker, network) are done, and stages with each step (replica, step, stage, network).

        Fill `keep`.
        """
        from raysim.network.fast_path import run_ordered  # loads kernels, which takes time: only on first use

        table = self.table
        num_slots = table.num_stages * profile.compute_s.shape[2] * table.num_microbatches
        nothing = np.empty(0)
        free, done = [], []
        for replica, (wire, blocks) in enumerate(zip(self.wires, self.costs, strict=True)):
            r = replica if profile.num_replicas > 1 else 0
            busy = profile.decode_s[r] + profile.compute_s[r] + profile.encode_s[r]
            start_s, end_s, begin_s = (array[replica].reshape(-1) for array in keep[:3]) if keep else (nothing,) * 3
            for block in blocks:
                width = len(block[-1])
                arrive_s = keep[3][replica].reshape(-1, 1) if keep else np.empty((num_slots, width))
                lane_free = np.zeros((table.num_workers, width))
                lane_done = np.zeros((table.num_steps, table.num_stages, width))
                count = run_ordered(
                    *self._rows,
                    busy,
                    profile.moved_bytes[r],
                    profile.trips[r],
                    profile.call_s,
                    profile.message_s,
                    profile.byte_s,
                    *self._lanes(block, wire),
                    seed * REPLICA_SEEDS + replica,
                    start_s,
                    end_s,
                    begin_s,
                    arrive_s,
                    lane_free,
                    lane_done.reshape(-1, width),
                )
                check_complete(schedule, table, count, 1)
                free.append(lane_free)
                done.append(lane_done)
        return self._joined(free), self._joined(done)

    def run_each(self, schedule: Schedule, profiles: Sequence[Profile], seed: int) -> Iterator[tuple[Floats, Floats]]:
        """Yield the results of `run` for each of several profiles of one shape; the k-th one's jitter is of `seed` + k."""
        from raysim.network.fast_path import run_each

        table, count = self.table, len(profiles)
        overheads = np.array([(one.call_s, one.message_s, one.byte_s) for one in profiles])
        free, done = [], []
        for replica, (wire, blocks) in enumerate(zip(self.wires, self.costs, strict=True)):
            r = replica if profiles[0].num_replicas > 1 else 0
            busy = np.stack([one.decode_s[r] + one.compute_s[r] + one.encode_s[r] for one in profiles])
            sizes, trips = (np.stack([getattr(one, name)[r] for one in profiles]) for name in ("moved_bytes", "trips"))
            for block in blocks:
                width = len(block[-1])
                lane_free = np.zeros((count, table.num_workers, width))
                lane_done = np.zeros((count, table.num_steps, table.num_stages, width))
                fewest = run_each(
                    *self._rows,
                    busy,
                    sizes,
                    trips,
                    overheads,
                    *self._lanes(block, wire),
                    (seed + np.arange(count)) * REPLICA_SEEDS + replica,
                    lane_free,
                    lane_done.reshape(count, -1, width),
                )
                check_complete(schedule, table, fewest, 1)
                free.append(lane_free)
                done.append(lane_done)
        yield from zip(self._joined(free).swapaxes(0, 1), self._joined(done).swapaxes(0, 1), strict=True)

    @property
    def _rows(self) -> Rows:
        """The rows of the schedule, as the kernels take them."""
        table = self.table
        return (
            *(table.offsets, table.stage, table.op, table.microbatch, table.owner),
            *(table.num_microbatches, table.per_step),
        )

    def _lanes(self, block: Costs, wire: NDArray[np.int32]) -> Lanes:
        """Return the costs of a block of networks and the wires, as the kernels take them."""
        return (*block, wire, int(wire.max(initial=-1)) + 1, self.inbound)

    def _joined(self, parts: Sequence[Floats]) -> Floats:
        """Return the results of the blocks of every replica: a first axis of replicas, a last one of all networks."""
        each = len(parts) // len(self.wires)
        return np.stack([np.concatenate(parts[r * each : (r + 1) * each], axis=-1) for r in range(len(self.wires))])


def _lane_costs(networks: Sequence[Network], ends: Ends) -> tuple[Floats, Floats, Floats, Floats]:
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


def check_complete(schedule: Schedule, table: ActionTable, count: int, replicas: int) -> None:
    """Raise ValueError with the action that blocks where not all actions ran."""
    if count < replicas * len(table.op):
        topological_order(schedule.rows(table.num_stages, table.num_microbatches), table.num_stages)
        raise AssertionError(f"{schedule!r} has an order, but {count} of {len(table.op)} actions ran.")
