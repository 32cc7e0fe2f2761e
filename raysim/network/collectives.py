"""Collectives that end a step: the replicas of a stage average its gradients, the owners of a tied parameter sum theirs.

A collective is data: rounds of transfers between members. A round ends when its slowest host is done, and then the next one starts.
Each host sends through one port and receives through another, regardless of the network's `sharing` for packets between stages, since
a machine has one network card. Each ordered pair of hosts is also limited by its own wire. Transfers within a host are free. Jitter
and bursts are not modelled.

>>> from raysim.network.presets import parse_network
>>> transfers = all_reduce("replica_gradient", 0, [(replica, 0) for replica in range(4)], [250_000.0] * 4)
>>> (collective,) = collectives(transfers, np.zeros(1), np.arange(4)[:, None], np.zeros(1, int))
>>> [float(round_seconds(each, [parse_network("8mbps+10ms")])[0]) for each in collective.rounds]
[0.76, 0.76]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from raysim.network.topology import Network, links
from raysim.network.transport import BARE, Transport

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Floats = NDArray[np.float64]
Transfers = NDArray[np.void]
"""An array of `TRANSFER`, whose fields are those of `Transfer`."""

DIRECTIONS = ("replica_gradient", "tied")
"""Phases of a step's end, in order: replicas average, then owners of tied parameters sum."""


class Transfer(NamedTuple):
    """Bytes sent by one member of a group to another in one round."""

    direction: str
    """One of `DIRECTIONS`."""
    stage: int
    """Identifies the group: the stage whose replicas average, or the first owner of a tied parameter."""
    round: int
    source_replica: int
    source_stage: int
    target_replica: int
    target_stage: int
    wire_bytes: float


KEY = Transfer._fields[:-1]
TRANSFER = np.dtype([("direction", "U16"), *((name, np.int32) for name in KEY[1:]), ("wire_bytes", np.float64)])


def as_transfers(transfers: Iterable[Sequence[Any]]) -> Transfers:
    """Return transfers as one array."""
    return np.array([tuple(transfer) for transfer in transfers], TRANSFER)


def transfers_from_columns(columns: Mapping[str, ArrayLike]) -> Transfers:
    """Return the transfers of one step from the columns of `collectives.parquet`."""
    transfers = np.empty(len(np.asarray(columns["round"])), TRANSFER)
    for name in Transfer._fields:
        transfers[name] = np.asarray(columns[name])
    return transfers


def mean_transfers(steps: Sequence[Transfers]) -> Transfers:
    """Return the mean of several steps; a transfer missing in some of them counts as zero bytes there, in the same round."""
    together = np.concatenate([np.empty(0, TRANSFER), *steps])
    keys, index = np.unique(together[list(KEY)], return_inverse=True)
    mean = np.empty(len(keys), TRANSFER)
    for name in KEY:
        mean[name] = keys[name]
    mean["wire_bytes"] = np.bincount(index.reshape(-1), together["wire_bytes"], len(keys)) / max(len(steps), 1)
    return mean


def all_reduce(direction: str, stage: int, members: Sequence[tuple[int, int]], chunks: Sequence[float]) -> Transfers:
    """Return the transfers of a sum over `members` (replica, stage): a direct reduce-scatter, then a direct all-gather.

    Member i receives its chunk of `chunks[i]` bytes from all others, sums it, and returns the sum. Each member sends
    2 (D - 1) / D of the bytes, as in a ring, but in two rounds.
    """
    return as_transfers(
        (direction, stage, turn, *source, *target, chunks[i if turn else j])
        for turn in (0, 1)
        for i, source in enumerate(members)
        for j, target in enumerate(members)
        if i != j
    )


def whole_bytes(ring_bytes: float, num_members: int) -> float:
    """Return the summed bytes, given the bytes sent by each member in a ring: 2 (D - 1) / D of them."""
    return ring_bytes * num_members / (2 * (num_members - 1)) if num_members > 1 else 0.0


def spread_evenly(
    direction: str, stage: int, members: Sequence[tuple[int, int]], sent_bytes: float, num_rounds: int
) -> Transfers:
    """Spread each member's total `sent_bytes` evenly over rounds and peers, and return the transfers."""
    each = sent_bytes / max(num_rounds * (len(members) - 1), 1)
    return as_transfers(
        (direction, stage, turn, *source, *target, each)
        for turn in range(num_rounds)
        for source in members
        for target in members
        if source != target
    )


class Round(NamedTuple):
    """The traffic of a round by ordered pair of hosts: number of transfers, one-way trips of the slowest, and bytes."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    transfers: NDArray[np.int64]
    trips: Floats
    wire_bytes: Floats
    """Bytes of the transfers, including those added by the transport."""


@dataclass(frozen=True, eq=False)
class Collective:
    """Groups that run their rounds in lockstep because they share hosts, or one group that sends gradients in buckets."""

    direction: str
    stages: tuple[int, ...]
    """The stages whose replicas average, or the first owners of tied parameters."""
    hosts: frozenset[int]
    codec_s: float
    """Seconds of the slowest worker to compress, decompress and add, over all buckets."""
    rounds: tuple[Round, ...]
    """Rounds of one bucket."""
    num_buckets: int = 0
    """Buckets that overlap the stage's last backward; 0 if gradients are averaged after all pipelines are done."""

    @property
    def repeats(self) -> int:
        return max(self.num_buckets, 1)


def collectives(
    transfers: Transfers,
    method_s: Floats,
    hosts: NDArray[np.int64],
    owner: NDArray[Any],
    num_buckets: Sequence[int] = (),
    *,
    transport: Transport = BARE,
) -> list[Collective]:
    """Return the collectives of a step's end, in order of direction and stage.

    `method_s`: codec seconds of each stage's average, which add up over the stages of a worker; `owner`: worker of each stage;
    `hosts`: host of each (replica, stage); `num_buckets`: buckets of each stage's average that overlap backward, by default none.
    Other groups of one direction that share hosts are joined: their n-th rounds become one.
    """
    joined = []
    for direction in DIRECTIONS:
        of_direction = transfers[transfers["direction"] == direction]
        averages = direction == DIRECTIONS[0]
        stages = set(of_direction["stage"].tolist())
        if averages and len(hosts) > 1:
            stages |= set(np.flatnonzero(method_s).tolist())
        buckets = {stage: int(num_buckets[stage]) for stage in stages if averages and len(num_buckets)}
        used = {stage: _hosts_of(of_direction[of_direction["stage"] == stage], hosts) for stage in sorted(stages)}
        if averages:
            used = {stage: each | set(hosts[:, stage].tolist()) for stage, each in used.items()}
        groups = _join([([stage], each) for stage, each in used.items() if not buckets.get(stage)])
        groups += [([stage], each) for stage, each in used.items() if buckets.get(stage)]
        for members, across in sorted(groups, key=lambda group: group[0][0]):
            count = buckets.get(members[0], 0)
            sent = of_direction[np.isin(of_direction["stage"], members)]
            sent = sent[np.argsort(sent["round"], kind="stable")]
            codec_s = np.bincount(owner[members], method_s[members]).max() if averages else 0.0
            last = int(sent["round"].max(initial=-1))
            bounds = np.searchsorted(sent["round"], range(last + 2))
            rounds = tuple(_round(sent[i:j], max(count, 1), hosts, transport) for i, j in pairwise(bounds))
            joined.append(Collective(direction, tuple(members), frozenset(across), float(codec_s), rounds, count))
    return joined


def round_of(source: NDArray[np.int64], target: NDArray[np.int64], wire_bytes: Floats, transport: Transport) -> Round:
    """Return one round of transfers between hosts, without those within a host."""
    across = source != target
    width = int(max(source.max(initial=0), target.max(initial=0))) + 1
    pairs, index = np.unique(source[across] * width + target[across], return_inverse=True)
    sent = wire_bytes[across]
    trips = np.zeros(len(pairs))
    np.maximum.at(trips, index, transport.trips(sent))
    return Round(
        source=pairs // width,
        target=pairs % width,
        transfers=np.bincount(index, minlength=len(pairs)),
        trips=trips,
        wire_bytes=np.bincount(index, sent + transport.beside(sent), len(pairs)).astype(np.float64),
    )


def round_seconds(traffic: Round, networks: Sequence[Network]) -> Floats:
    """Return the seconds of a round on each of `networks`, which must all have the same number of hosts, or any number."""
    if not len(traffic.source):
        return np.zeros(len(networks))
    num_hosts = int(max(traffic.source.max(), traffic.target.max())) + 1
    bits = 8 * traffic.wire_bytes[:, None] * np.array([network.framing for network in networks])
    bandwidth, latency = links(networks, traffic.source, traffic.target)
    latency = latency * traffic.trips[:, None]
    wire_s = latency + bits / bandwidth
    out, into = (_incidence(ends, num_hosts) for ends in (traffic.source, traffic.target))
    served_s = into @ (traffic.transfers[:, None] * latency + bits / bandwidth)
    sent, received = out @ bits, into @ bits
    slowest = np.maximum(_most(traffic.source, latency, num_hosts), _most(traffic.target, latency, num_hosts))
    half = np.array([network.sharing == "half" for network in networks])
    ports = np.stack([network.ports_bps(num_hosts) for network in networks], axis=-1)
    carried = np.where(half, sent + received, np.maximum(sent, received))
    seconds = np.maximum(wire_s.max(axis=0), (slowest + carried / ports).max(axis=0))
    inbound = np.array([network.sharing == "inbound" for network in networks])
    round_s: Floats = np.where(inbound, np.maximum(seconds, served_s.max(axis=0)), seconds)
    return round_s


def _incidence(ends: NDArray[np.int64], num_hosts: int) -> csr_array:
    """Return the matrix (host, pair) that sums values of pairs over each host."""
    from scipy.sparse import csr_array

    return csr_array((np.ones(len(ends)), (ends, np.arange(len(ends)))), shape=(num_hosts, len(ends)))


def _most(ends: NDArray[np.int64], values: Floats, num_hosts: int) -> Floats:
    """Return the largest value over each host's pairs, at least 0: (host, network)."""
    order = np.argsort(ends, kind="stable")
    hosts, starts = np.unique(ends[order], return_index=True)
    greatest = np.zeros((num_hosts, values.shape[1]))
    greatest[hosts] = np.maximum.reduceat(values[order], starts)
    return greatest


def total_seconds(exchanges: Sequence[Collective], networks: Sequence[Network]) -> Floats:
    """Return the seconds of codec and all rounds, shape (collective, network)."""
    priced: dict[bytes, Floats] = {}  # rounds of a ring are equal, and many stages average the same bytes

    def seconds(traffic: Round) -> Floats:
        key = b"".join(column.tobytes() for column in traffic)
        if key not in priced:
            priced[key] = round_seconds(traffic, networks)
        return priced[key]

    totals = [each.codec_s + each.repeats * sum(map(seconds, each.rounds)) for each in exchanges]
    return np.array([np.broadcast_to(total, len(networks)) for total in totals]).reshape(len(exchanges), len(networks))


def _hosts_of(transfers: Transfers, hosts: NDArray[np.int64]) -> set[int]:
    ends = (hosts[transfers[f"{end}_replica"], transfers[f"{end}_stage"]] for end in ("source", "target"))
    return {int(host) for end in ends for host in end}


def _join(groups: Sequence[tuple[list[int], set[int]]]) -> list[tuple[list[int], set[int]]]:
    """Merge groups that share hosts, directly or through other groups."""
    joined: list[tuple[list[int], set[int]]] = []
    for members, used in groups:
        apart = [each for each in joined if not each[1] & used]
        meeting = [each for each in joined if each[1] & used]
        together = sorted(stage for each in meeting for stage in each[0])
        joined = [*apart, ([*together, *members], used.union(*(each[1] for each in meeting)))]
    return sorted(joined, key=lambda each: each[0][0])


def _round(transfers: Transfers, num_buckets: int, hosts: NDArray[np.int64], transport: Transport) -> Round:
    """Return the traffic of one round for one of `num_buckets` buckets."""
    source = hosts[transfers["source_replica"], transfers["source_stage"]]
    target = hosts[transfers["target_replica"], transfers["target_stage"]]
    return round_of(source, target, transfers["wire_bytes"] / num_buckets, transport)
