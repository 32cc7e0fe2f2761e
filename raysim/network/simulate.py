"""Schedule x Profile x Network -> Timeline: one training step, on a network one may not have.

Channels are ordered and blocking, as those of Ray actors are: a worker runs its row in order, and an action whose packet is not there
holds up all that follows. Codec time is on the clock of the worker that packs or unpacks.

>>> from raysim.network.presets import parse_network
>>> from raysim.network.schedule import OneFOneB
>>> profile = Profile.uniform(num_stages=4, forward_s=1.0, backward_s=2.0, wire_bytes=1_250_000)
>>> simulate(OneFOneB(), profile, parse_network("free"), num_microbatches=8).step_s
33.0
>>> simulate(OneFOneB(), profile, parse_network("10mbps"), num_microbatches=8).step_s
49.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.network.exchange import rounds_s
from raysim.network.network import Network
from raysim.network.placement import Placement, replica_hosts
from raysim.network.profile import Profile
from raysim.network.schedule import Schedule, order
from raysim.network.table import Table, make_table
from raysim.network.timeline import Timeline, alone_s
from raysim.notation import check_integer

Floats = NDArray[np.float64]

REPLICA_SEEDS = 65_536  # seeds of replicas are counted on from the step's

LANES = 64  # networks per pass of the fast kernel: enough to fill vector units, few enough to stay in cache


def simulate(
    schedule: Schedule,
    profile: Profile,
    network: Network,
    *,
    num_microbatches: int | None = None,
    num_replicas: int | None = None,
    placement: Placement | None = None,
    overlap: bool = False,
    seed: int = 0,
) -> Timeline:
    """Return the timeline of one step.

    `num_microbatches` and `num_replicas` are the profile's where it has them. Without `placement` every worker has a host of
    its own, or the workers are spread evenly over the hosts that the network names. With `overlap` a stage's replicas average
    their gradients as soon as that stage is done, else when the pipeline is. `seed` draws the jitter.

    A faster network never takes longer where the schedule alone orders every wire. Where workers share ports or cores it may,
    rarely: what comes sooner may get into another's way, as in any list scheduling (Graham's anomalies).
    """
    table, replicas, placement = _set_up(schedule, profile, network, num_microbatches, num_replicas, placement)
    profile = _joined(profile, table)
    shape = (replicas, table.num_stages, profile.compute_s.shape[2], table.num_microbatches)
    start, end, begin, arrive = (np.full(shape, math.nan) for _ in range(4))
    if _is_ordered(table, network.sharing, placement):
        wiring = _Wiring.of(table, [network], placement, replicas, shape[2])
        free, done = _run_ordered(schedule, table, profile, wiring, seed, (start, end, begin, arrive))
        free, done = free[..., 0], done[..., 0]
    else:
        free, done = _run_shared(schedule, table, profile, network, placement, seed, (start, end, begin, arrive))
    pipeline_s = float(free.max())
    collective = _collectives(profile, network, placement, table, replicas)
    return Timeline(
        table=table,
        profile=profile,
        network=network,
        placement=placement,
        start_s=start,
        end_s=end,
        begin_s=begin,
        arrive_s=arrive,
        pipeline_s=pipeline_s,
        step_s=float(_step_s(profile, pipeline_s, done.max(axis=0), collective, overlap=overlap)),
        collective_s=collective,
    )


def step_seconds(
    schedule: Schedule,
    profiles: Profile | Sequence[Profile],
    networks: Sequence[Network],
    *,
    num_microbatches: int | None = None,
    num_replicas: int | None = None,
    placement: Placement | None = None,
    overlap: bool = False,
    seed: int = 0,
) -> Floats:
    """Return `step_s` for every network and every profile: shape (networks, profiles). Arguments as of `simulate`.

    Where nothing is shared, thousands of networks take a fraction of a second. The k-th profile's jitter is of `seed` + k.
    """
    steps = [profiles] if isinstance(profiles, Profile) else list(profiles)
    if len({profile.compute_s.shape for profile in steps}) != 1:
        raise ValueError(
            f"`profiles` must be one or more of one shape, but got {[profile.compute_s.shape for profile in steps]}."
        )
    result = np.empty((len(networks), len(steps)))
    groups: dict[tuple[int | None, bool], list[int]] = {}
    for row, network in enumerate(networks):
        groups.setdefault((network.num_hosts, network.sharing == "inbound"), []).append(row)
    for rows in groups.values():
        table, replicas, placed = _set_up(
            schedule, steps[0], networks[rows[0]], num_microbatches, num_replicas, placement
        )
        ordered = {sharing: _is_ordered(table, sharing, placed) for sharing in {networks[row].sharing for row in rows}}
        lanes = [row for row in rows if ordered[networks[row].sharing]]
        if lanes:
            chosen = [networks[row] for row in lanes]
            wiring = _Wiring.of(table, chosen, placed, replicas, steps[0].compute_s.shape[2])
            for column, profile in enumerate(_joined(step, table) for step in steps):
                free, done = _run_ordered(schedule, table, profile, wiring, seed + column)
                collective = np.array([_collectives(profile, network, placed, table, replicas) for network in chosen])
                result[lanes, column] = _step_s(
                    profile, free.max(axis=(0, 1)), done.max(axis=0).T, collective, overlap=overlap
                )
        for row in set(rows) - set(lanes):
            for column, profile in enumerate(_joined(step, table) for step in steps):
                free, done = _run_shared(schedule, table, profile, networks[row], placed, seed + column)
                collective = _collectives(profile, networks[row], placed, table, replicas)
                result[row, column] = _step_s(profile, free.max(), done.max(axis=0), collective, overlap=overlap)
    return result


def break_even_bps(
    schedule: Schedule,
    profile: Profile,
    dense: Profile,
    network: Network,
    *,
    lowest_bps: float = 1e5,
    highest_bps: float = 1e12,
    num_microbatches: int | None = None,
    placement: Placement | None = None,
) -> float:
    """Return the bandwidth below which `profile` (compressed) takes less time a step than `dense`, all else of `network` kept.

    0.0 where it is never faster between the limits, infinity where it is still faster at the highest. Found to 1e-6 on nested grids.
    """
    if network.num_hosts is not None and isinstance(network.bandwidth_bps, tuple):
        raise ValueError(f"`network` must have one bandwidth for a break-even, but got {network.notation()}.")
    low, high = lowest_bps, highest_bps
    for depth in range(5):
        grid = np.geomspace(low, high, 64)
        networks = [replace(network, bandwidth_bps=float(bandwidth), name="") for bandwidth in grid]
        seconds = [
            step_seconds(schedule, costs, networks, num_microbatches=num_microbatches, placement=placement)[:, 0]
            for costs in (profile, dense)
        ]
        wins = np.flatnonzero(seconds[0] < seconds[1])
        if not len(wins):
            return 0.0 if depth == 0 else low
        if wins[-1] == len(grid) - 1:
            return math.inf if depth == 0 else high
        low, high = float(grid[wins[-1]]), float(grid[wins[-1] + 1])
        if high / low < 1 + 1e-6:
            break
    return math.sqrt(low * high)


@dataclass(frozen=True)
class _Ends:
    """The hosts between which each (stage, op) sends; equal where nothing is sent."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    worker: NDArray[np.int64]
    """The sending worker, counted over replicas."""
    receiver: NDArray[np.int64]


def _set_up(
    schedule: Schedule,
    profile: Profile,
    network: Network,
    num_microbatches: int | None,
    num_replicas: int | None,
    placement: Placement | None,
) -> tuple[Table, int, Placement]:
    """Return the table, the number of replicas and the placement, checked against one another."""
    count = num_microbatches if num_microbatches is not None else profile.num_microbatches or 1
    check_integer("num_microbatches", count, 1)
    if profile.num_microbatches not in (None, count):
        raise ValueError(
            f"`num_microbatches` must be the profile's ({profile.num_microbatches}), but got {count}. "
            f"Use `Profile.mean_microbatch` to simulate another number."
        )
    table = make_table(schedule, profile.num_stages, count)
    if int(table.op.max()) >= profile.compute_s.shape[2]:
        raise ValueError(
            f"`profile` must hold costs of the weights' backward for {schedule!r}, but has only forward and backward. "
            f"Use `Profile.split_backward`."
        )
    if placement is not None:
        replicas = len(replica_hosts(placement, table.num_workers))
        if num_replicas not in (None, replicas):
            raise ValueError(f"`hosts` must name workers of {num_replicas} replicas, but got {replicas}.")
    else:
        replicas = num_replicas if num_replicas is not None else profile.num_replicas
        check_integer("num_replicas", replicas, 1)
        placement = Placement.spread(replicas * table.num_workers, network.num_hosts)
    if profile.num_replicas not in (1, replicas):
        raise ValueError(f"`num_replicas` must be the profile's ({profile.num_replicas}), but got {replicas}.")
    return table, replicas, placement


def _joined(profile: Profile, table: Table) -> Profile:
    """Return the profile with the weights' part of backward in B wherever the schedule has no W for it."""
    if profile.compute_s.shape[2] < 3:
        return profile
    apart = np.zeros((table.num_stages, table.num_microbatches), bool)
    apart[table.stage[table.op == 2], table.microbatch[table.op == 2]] = True
    if apart.all():
        return profile
    changed: dict[str, Any] = {}
    for name in ("compute_s", "cpu_s"):
        costs = getattr(profile, name)
        costs = np.broadcast_to(costs, (*costs.shape[:3], table.num_microbatches)).copy()
        costs[:, :, 1] += np.where(apart, 0.0, costs[:, :, 2])
        changed[name] = costs
    return replace(profile, **changed)


def _ends(table: Table, placement: Placement, num_ops: int, replica: int) -> _Ends:
    workers = replica * table.num_workers + table.owner.astype(np.int64)
    sender = np.repeat(workers[:, None], num_ops, axis=1)
    receiver = sender.copy()
    receiver[:-1, 0] = workers[1:]
    receiver[1:, 1] = workers[:-1]
    hosts = np.array(placement.hosts, np.int64)
    return _Ends(hosts[sender], hosts[receiver], sender, receiver)


def _is_ordered(table: Table, sharing: str, placement: Placement) -> bool:
    """Return whether the schedule alone fixes who waits for whom: no wire has two workers at the end that orders it."""
    replicas = len(placement.hosts) // table.num_workers
    inbound = sharing == "inbound"
    users: dict[tuple[int, int], set[int]] = {}
    for replica in range(replicas):
        ends = _ends(table, placement, 2, replica)
        across = ends.source != ends.target
        sources = np.zeros_like(ends.source) if inbound else ends.source
        orders = ends.receiver if inbound else ends.worker
        for source, target, worker in zip(sources[across], ends.target[across], orders[across], strict=True):
            users.setdefault((int(source), int(target)), set()).add(int(worker))
    alone = all(len(workers) == 1 for workers in users.values())
    simple = placement.cores is None and placement.driver is None and sharing in ("pair", "inbound")
    if inbound and not (alone and simple):
        raise ValueError(
            f'`sharing` "inbound" must go with one worker on each host, and neither `cores` nor `driver`, but got {placement!r}.'
        )
    return alone and simple


@dataclass(frozen=True)
class _Wiring:
    """What the fast kernel reads of networks: for each replica its wires, and for each block of networks their costs."""

    wires: list[NDArray[np.int32]]
    """By replica: (stage, op) to wire, -1 within a host."""
    costs: list[list[tuple[Floats, Floats, Floats, Floats]]]
    """By replica and block: seconds a byte, latency, forgiven burst, jitter."""
    inbound: bool

    @classmethod
    def of(
        cls, table: Table, networks: Sequence[Network], placement: Placement, replicas: int, num_ops: int
    ) -> _Wiring:
        inbound = networks[0].sharing == "inbound"
        blocks = [networks[low : low + LANES] for low in range(0, len(networks), LANES)]
        wires, costs = [], []
        for replica in range(replicas):
            ends = _ends(table, placement, num_ops, replica)
            across = ends.source != ends.target
            # A wire for each pair of hosts, or for each receiver.
            key = ends.target if inbound else ends.source * placement.num_hosts + ends.target
            wire = np.full(across.shape, -1, np.int32)
            wire[across] = np.unique(key[across], return_inverse=True)[1]
            wires.append(wire)
            costs.append([_lane_costs(block, ends) for block in blocks])
        return cls(wires, costs, inbound)


def _run_ordered(
    schedule: Schedule, table: Table, profile: Profile, wiring: _Wiring, seed: int, keep: Sequence[Floats] = ()
) -> tuple[Floats, Floats]:
    """Return when workers (replica, worker, network) and stages (replica, stage, network) are done; fill `keep`."""
    from raysim.network.ordered import run_ordered  # compiles on import: only those who simulate pay for it

    num_slots = table.num_stages * profile.compute_s.shape[2] * table.num_microbatches
    nothing = np.empty(0)
    free, done = [], []
    for replica, (wire, blocks) in enumerate(zip(wiring.wires, wiring.costs, strict=True)):
        r = replica if profile.num_replicas > 1 else 0
        busy = profile.decode_s[r] + profile.compute_s[r] + profile.encode_s[r]
        start_s, end_s, begin_s = (array[replica].reshape(-1) for array in keep[:3]) if keep else (nothing,) * 3
        for byte_wire, latency, burst, jitter in blocks:
            width = len(jitter)
            arrive_s = keep[3][replica].reshape(-1, 1) if keep else np.empty((num_slots, width))
            lane_free, lane_done = np.zeros((table.num_workers, width)), np.zeros((table.num_stages, width))
            count = run_ordered(
                table.offsets,
                table.stage,
                table.op,
                table.microbatch,
                table.owner,
                table.num_microbatches,
                busy,
                profile.wire_bytes[r],
                profile.call_s,
                profile.message_s,
                profile.byte_s,
                byte_wire,
                latency,
                burst,
                jitter,
                wire,
                int(wire.max(initial=-1)) + 1,
                wiring.inbound,
                seed * REPLICA_SEEDS + replica,
                start_s,
                end_s,
                begin_s,
                arrive_s,
                lane_free,
                lane_done,
            )
            _check_complete(schedule, table, count, 1)
            free.append(lane_free)
            done.append(lane_done)
    replicas = len(wiring.wires)
    blocks_each = len(free) // replicas
    join = [slice(r * blocks_each, (r + 1) * blocks_each) for r in range(replicas)]
    return (
        np.stack([np.concatenate(free[part], axis=1) for part in join]),
        np.stack([np.concatenate(done[part], axis=1) for part in join]),
    )


def _lane_costs(networks: Sequence[Network], ends: _Ends) -> tuple[Floats, Floats, Floats, Floats]:
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


def _run_shared(
    schedule: Schedule,
    table: Table,
    profile: Profile,
    network: Network,
    placement: Placement,
    seed: int,
    keep: Sequence[Floats] = (),
) -> tuple[Floats, Floats]:
    """Return when workers (replica, worker) and stages (replica, stage) are done; fill `keep`."""
    from raysim.network.shared import run_shared

    num_ops = profile.compute_s.shape[2]
    replicas = len(placement.hosts) // table.num_workers
    num_hosts = placement.num_hosts
    hosts = np.array(placement.hosts, np.int64)
    ends = [_ends(table, placement, num_ops, replica) for replica in range(replicas)]
    pairs = {(int(a), int(b)) for end in ends for a, b in zip(end.source.flat, end.target.flat, strict=True)}
    if placement.driver is not None:
        pairs |= {(host, placement.driver) for host in placement.hosts}
        pairs |= {(placement.driver, host) for host in placement.hosts}
    channels = sorted(pair for pair in pairs if pair[0] != pair[1])
    source = np.array([a for a, _ in channels], np.int64)
    target = np.array([b for _, b in channels], np.int64)
    number = np.full((num_hosts, num_hosts), -1, np.int32)
    number[source, target] = np.arange(len(channels))
    payload = 8 * network.framing  # bits on the wire for each byte of payload
    shape = (replicas, table.num_stages, num_ops, table.num_microbatches)
    start, end, begin, arrive = keep if keep else [np.empty(shape) for _ in range(4)]
    free, done = np.zeros((replicas, table.num_workers)), np.zeros((replicas, table.num_stages))
    count = run_shared(
        table.offsets,
        table.stage,
        table.op,
        table.microbatch,
        table.owner,
        table.num_microbatches,
        replicas,
        profile.decode_s,
        alone_s(profile, placement).copy(),  # one type for the kernel: writeable
        profile.encode_s,
        profile.wire_bytes,
        profile.inlined,
        profile.call_s,
        profile.message_s,
        profile.byte_s,
        hosts,
        np.full(num_hosts, math.inf) if placement.cores is None else np.array(placement.cores),
        placement.threads,
        -1 if placement.driver is None else placement.driver,
        number,
        source,
        target,
        network.bandwidths_bps(source, target) / payload,
        network.latencies_s(source, target),
        network.ports_bps(num_hosts) / payload,
        network.sharing == "half",
        network.burst_bytes / network.framing,
        network.jitter_s,
        seed * REPLICA_SEEDS,
        start.reshape(-1),
        end.reshape(-1),
        begin.reshape(-1),
        arrive.reshape(-1),
        free.reshape(-1),
        done.reshape(-1),
    )
    _check_complete(schedule, table, count, replicas)
    return free, done


def _check_complete(schedule: Schedule, table: Table, count: int, replicas: int) -> None:
    """Raise ValueError with the action that blocks where not all actions ran."""
    if count < replicas * len(table.op):
        order(schedule.rows(table.num_stages, table.num_microbatches), table.num_stages)
        raise AssertionError(f"{schedule!r} has an order, but {count} of {len(table.op)} actions ran.")


def _collectives(profile: Profile, network: Network, placement: Placement, table: Table, replicas: int) -> Floats:
    """Return the seconds in which the replicas of each stage average their gradients: as recorded, else by a ring."""
    seconds = np.zeros(table.num_stages)
    if replicas > 1:
        hosts = replica_hosts(placement, table.num_workers)
        for stage in range(table.num_stages):
            ranks = [row[table.owner[stage]] for row in hosts]
            if profile.rounds[stage]:
                wire_s = rounds_s(network, ranks, float(profile.sent_bytes[stage]), float(profile.rounds[stage]))
                seconds[stage] = wire_s + profile.method_s[stage]
            else:
                seconds[stage] = network.all_reduce_s(float(profile.gradient_bytes[stage]), ranks)
    return seconds


def _step_s(
    profile: Profile, pipeline_s: ArrayLike, stage_done: Floats, collective: Floats, *, overlap: bool
) -> Floats:
    """Return the seconds of steps: a stage updates once all pipelines are done and its own gradients are averaged."""
    pipelines = np.asarray(pipeline_s)[..., None]
    averaged = (stage_done if overlap else pipelines) + collective
    step: Floats = np.max(np.maximum(averaged, pipelines) + profile.update_s, axis=-1) + profile.step_s
    return step
