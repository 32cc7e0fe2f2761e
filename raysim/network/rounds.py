"""Rounds of messages between hosts, and their seconds on a network, priced by classes of equal hosts.

Hosts with equal links that send and receive equal messages form a class, so that an average over thousands of equal replicas
is one row. Without equal hosts every class has one host, and a row is a pair of hosts.

>>> from raysim.network.topology import Network
>>> everyone = np.arange(10_000)
>>> average = [Sends(everyone, everyone, 1e3, crossed=True)]
>>> traffic = round_of(average, classes_of(average, np.zeros(10_000, np.int64)), BARE)
>>> len(traffic.source), round_seconds(traffic, [Network(8e6)]).round(3).tolist()
(1, [9.999])
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysim.network.topology import Network, check_hosts, links
from raysim.network.transport import BARE, Transport

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Sends(NamedTuple):
    """Messages of one round, between members of a group or between hosts."""

    sources: Ints
    targets: Ints
    """The target of each source; if `crossed`, each source sends to all of them but itself."""
    wire_bytes: Floats | float
    """Bytes of a message: one number, or if not crossed one for each source."""
    crossed: bool = False

    def on(self, hosts: Ints) -> Sends:
        """Return the messages between the members' hosts."""
        return self._replace(sources=hosts[self.sources], targets=hosts[self.targets])


class Rounds(NamedTuple):
    """Equal rounds of a collective between members, given by their positions in the group."""

    times: int
    sends: tuple[Sends, ...]


class Classes(NamedTuple):
    """The hosts of a collective in classes: hosts of one class may swap places."""

    hosts: Ints
    """In ascending order."""
    leader: Ints
    """By host: the first host of its class."""

    def leaders(self, hosts: Ints) -> Ints:
        """Return the leader of each of `hosts`."""
        return self.leader[np.searchsorted(self.hosts, hosts)]

    def members(self, leader: int) -> list[int]:
        """Return the hosts of a class."""
        members: list[int] = self.hosts[self.leader == leader].tolist()
        return members


class Round(NamedTuple):
    """The traffic of a round by ordered pair of classes: every source sends to every target except itself."""

    source: Ints
    """Leader of the sources."""
    target: Ints
    """One of the targets, different from `source`."""
    receiver: Ints
    """Leader of the targets."""
    fan_out: Ints
    """Targets of a source."""
    fan_in: Ints
    """Sources of a target."""
    transfers: Ints
    """Messages between two hosts."""
    trips: Floats
    """One-way trips of the slowest message."""
    wire_bytes: Floats
    """Bytes between two hosts, including those added by the transport."""

    def unnamed(self) -> Round:
        """Return the traffic with hosts numbered from 0 in ascending order, which takes as long between equal hosts."""
        ends = np.unique([self.source, self.target, self.receiver], return_inverse=True)[1].reshape(3, -1)
        return self._replace(source=ends[0], target=ends[1], receiver=ends[2])

    def pairs(self, classes: Classes) -> Iterator[tuple[int, int, int, float]]:
        """Yield source, target, messages and bytes of every pair of hosts."""
        columns = (self.source, self.receiver, self.transfers, self.wire_bytes)
        for source, receiver, transfers, size in zip(*(column.tolist() for column in columns), strict=True):
            targets = classes.members(receiver)
            for host in classes.members(source):
                yield from ((host, target, transfers, size) for target in targets if target != host)


def classes_of(sends: Iterable[Sends], labels: Ints) -> Classes:
    """Return the coarsest classes of the hosts of `sends`; `labels` are equal for hosts with equal links (`equal_hosts`)."""
    sent = list(sends)
    hosts = np.unique(np.concatenate([np.empty(0, np.int64), *(ends for each in sent for ends in each[:2])]))
    label = labels[hosts]
    for each in sent:
        for ends in (each.sources, each.targets):
            used, counts = np.unique(np.searchsorted(hosts, ends), return_counts=True)
            keys = label[used] * (counts.max(initial=0) + 1) + counts if each.crossed else used
            label[used] = label.max(initial=0) + 1 + np.unique(keys, return_inverse=True)[1]
    _, first, index = np.unique(label, return_index=True, return_inverse=True)
    return Classes(hosts, hosts[first[index]] if len(hosts) else hosts)


def round_of(sends: Iterable[Sends], classes: Classes, transport: Transport) -> Round:
    """Return the traffic of one round between hosts, without messages within a host."""
    leads, sizes = np.unique(classes.leader, return_counts=True)
    parts = [(np.empty(0, np.int64),) * 3 + (np.empty(0),) * 2]
    for each in sends:
        ends = classes.leaders(each.sources), classes.leaders(each.targets)
        counts, size = np.ones(len(ends[0]), np.int64), np.broadcast_to(each.wire_bytes, len(ends[0]))
        if each.crossed:
            (source, sending), (target, receiving) = (np.unique(end, return_counts=True) for end in ends)
            sending, receiving = (
                members // sizes[np.searchsorted(leads, end)]
                for end, members in ((source, sending), (target, receiving))
            )
            ends = np.repeat(source, len(target)), np.tile(target, len(source))
            counts = np.outer(sending, receiving).reshape(-1)
            size = np.full(len(counts), float(each.wire_bytes))
        across = (ends[0] != ends[1]) | (sizes[np.searchsorted(leads, ends[0])] > 1)
        source, target, counts, size = (part[across] for part in (*ends, counts, size))
        parts.append((source, target, counts, transport.trips(size), counts * (size + transport.beside(size))))
    source, receiver, counts, trips, size = (np.concatenate(part) for part in zip(*parts, strict=True))
    width = int(receiver.max(initial=0)) + 1
    pairs, index = np.unique(source * width + receiver, return_inverse=True)
    source, receiver = pairs // width, pairs % width
    slowest = np.zeros(len(pairs))
    np.maximum.at(slowest, index, trips)
    within = source == receiver
    order = np.argsort(classes.leader, kind="stable")
    second = classes.hosts[order[np.minimum(np.searchsorted(classes.leader[order], source) + 1, len(order) - 1)]]
    return Round(
        source=source,
        target=np.where(within, second, receiver),
        receiver=receiver,
        fan_out=sizes[np.searchsorted(leads, receiver)] - within,
        fan_in=sizes[np.searchsorted(leads, source)] - within,
        transfers=np.bincount(index, counts, len(pairs)).astype(np.int64),
        trips=slowest,
        wire_bytes=np.bincount(index, size, len(pairs)).astype(np.float64),
    )


def round_seconds(traffic: Round, networks: Sequence[Network]) -> Floats:
    """Return the seconds of a round on each of `networks`, which must all have the same number of hosts, or any number."""
    if not len(traffic.source):
        return np.zeros(len(networks))
    bits = 8 * traffic.wire_bytes[:, None] * np.array([network.framing for network in networks])
    bandwidth, latency = links(networks, traffic.source, traffic.target)
    latency = latency * traffic.trips[:, None]
    wire_s = latency + bits / bandwidth
    hosts, ends = np.unique([traffic.source, traffic.receiver], return_inverse=True)
    source, receiver = ends.reshape(2, -1)
    sent = _sums(source, traffic.fan_out, bits, len(hosts))
    received = _sums(receiver, traffic.fan_in, bits, len(hosts))
    served_s = _sums(receiver, traffic.fan_in, traffic.transfers[:, None] * latency + bits / bandwidth, len(hosts))
    slowest = np.maximum(_most(source, latency, len(hosts)), _most(receiver, latency, len(hosts)))
    half = np.array([network.sharing == "half" for network in networks])
    out_bps, into_bps = np.stack([network.ports_bps(int(hosts[-1]) + 1)[:, hosts] for network in networks], axis=-1)
    carried_s = np.where(half, (sent + received) / out_bps, np.maximum(sent / out_bps, received / into_bps))
    seconds = np.maximum(wire_s.max(axis=0), (slowest + carried_s).max(axis=0))
    inbound = np.array([network.sharing == "inbound" for network in networks])
    round_s: Floats = np.where(inbound, np.maximum(seconds, served_s.max(axis=0)), seconds)
    return round_s


def rounds_s(rounds: Sequence[Rounds], hosts: Ints, networks: Sequence[Network], transport: Transport = BARE) -> Floats:
    """Return the seconds of consecutive rounds between members on `hosts`, by network; messages within a host are free."""
    placed = [[each.on(hosts) for each in equal.sends] for equal in rounds]
    classes = classes_of((each for sends in placed for each in sends), equal_hosts(networks, int(hosts.max()) + 1))
    seconds = np.zeros(len(networks))
    for equal, sends in zip(rounds, placed, strict=True):
        seconds += equal.times * round_seconds(round_of(sends, classes, transport), networks)
    return seconds


def crossing_bytes(rounds: Sequence[Rounds], places: Ints) -> float:
    """Return the bytes sent between members in different places, such as hosts or sites."""
    total = 0.0
    for each in rounds:
        for sends in each.sends:
            source, target = places[sends.sources], places[sends.targets]
            if sends.crossed:
                kinds = int(places.max()) + 1
                within = int(np.bincount(source, minlength=kinds) @ np.bincount(target, minlength=kinds))
                total += each.times * (len(source) * len(target) - within) * float(np.max(sends.wire_bytes))
            else:
                total += each.times * float(np.sum((source != target) * sends.wire_bytes))
    return total


def equal_hosts(networks: Sequence[Network], num_hosts: int) -> Ints:
    """Return a label for each host; hosts with equal labels may swap places in all of `networks`."""
    fixed = tuple(network for network in networks if network.num_hosts is not None)
    if not fixed:
        return np.zeros(num_hosts, np.int64)
    labels = _swappable(fixed)
    check_hosts(num_hosts - 1, len(labels))
    return labels


@lru_cache(maxsize=16)
def _swappable(networks: tuple[Network, ...]) -> Ints:
    matrices = [matrix for network in networks for matrix in network.matrices]
    wires = np.stack([way for matrix in matrices for way in (matrix, matrix.T)], axis=-1)
    size = len(wires)
    found: dict[bytes, list[int]] = {}
    labels = np.arange(size)
    ranks = np.sort(wires, axis=1)  # equal for hosts that may swap places, since the diagonal is 0
    for host in range(size):
        alike = found.setdefault(ranks[host].tobytes(), [])
        for leader in alike:
            swapped = wires[host].copy()
            swapped[[host, leader]] = swapped[[leader, host]]
            if np.array_equal(swapped, wires[leader]):
                labels[host] = leader
                break
        else:
            alike.append(host)
    return labels


def _sums(ends: NDArray[Any], weights: Ints, values: Floats, num_hosts: int) -> Floats:
    """Return the weighted sum over each host's rows: (host, network)."""
    count = values.shape[1]
    cells, weighted = ends[:, None] * count + np.arange(count), weights[:, None] * values
    sums = np.bincount(cells.reshape(-1), weighted.reshape(-1), num_hosts * count)
    return np.asarray(sums, np.float64).reshape(num_hosts, count)


def _most(ends: NDArray[Any], values: Floats, num_hosts: int) -> Floats:
    """Return the largest value over each host's rows, at least 0: (host, network)."""
    order = np.argsort(ends, kind="stable")
    hosts, starts = np.unique(ends[order], return_index=True)
    greatest = np.zeros((num_hosts, values.shape[1]))
    greatest[hosts] = np.maximum.reduceat(values[order], starts)
    return greatest
