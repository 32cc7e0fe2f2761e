"""All-reduce and all-gather algorithms: their rounds, and their seconds on a network.

`direct`: each member receives one chunk from all others, sums it and returns the sum: two rounds. `ring`: the same bytes in
2 (D - 1) rounds between neighbours. `tree`: whole messages up and down a binomial tree. `sites`: a reduce-scatter within each
site, a ring over the sites for each shard, and an all-gather within each site. `server`: a central parameter server on the host
of the first member, which receives and sends D - 1 whole messages (`direct` is a sharded one: each host serves 1/D). `chain`: a sum
passed along to the first member and back in small pieces, as NCCL's reduce and broadcast do.

>>> from raysim.network.presets import parse_network
>>> network = parse_network("8mbps+10ms")
>>> [round(all_reduce_s(1e6, range(4), network, algorithm), 3) for algorithm in ("direct", "ring", "tree")]
[1.52, 1.56, 4.04]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from raysim.network.collectives import Floats, Transfers, as_transfers, round_of, round_seconds
from raysim.network.topology import Network
from raysim.network.transport import ALL_REDUCES, BARE, Transport
from raysim.notation import check_choice

Pair = tuple[int, int]

HEADERS = 1.01
"""Most bytes of uncompressed messages, headers included, per byte of payload; a method above it sends more than dense."""


class Rounds(NamedTuple):
    """Equal rounds of a collective: pairs of sender and receiver, and the bytes of each message."""

    times: int
    pairs: Sequence[Pair]
    """Sender and receiver, as positions in the group."""
    wire_bytes: float
    """Bytes of one message."""


def _direct(num_members: int, wire_bytes: float, sites: Sequence[str]) -> list[Rounds]:
    return [Rounds(2, list(permutations(range(num_members), 2)), wire_bytes / num_members)]


def _ring(num_members: int, wire_bytes: float, sites: Sequence[str]) -> list[Rounds]:
    return [Rounds(2 * (num_members - 1), _neighbours(num_members), wire_bytes / num_members)]


def _tree(num_members: int, wire_bytes: float, sites: Sequence[str]) -> list[Rounds]:
    levels = [
        [(member + step, member) for member in range(0, num_members - step, 2 * step)]
        for step in (2**level for level in range(math.ceil(math.log2(num_members))))
    ]
    up = [Rounds(1, pairs, wire_bytes) for pairs in levels]
    return up + [Rounds(1, [pair[::-1] for pair in pairs], wire_bytes) for pairs in reversed(levels)]


def _over_sites(num_members: int, wire_bytes: float, sites: Sequence[str]) -> list[Rounds]:
    """Return the rounds of the hierarchical all-reduce; the smallest site sets the number of shards."""
    groups = [[i for i, site in enumerate(sites) if site == wanted] for wanted in dict.fromkeys(sites)]
    num_shards = min(len(group) for group in groups)
    if len(groups) == 1 or len(groups) == num_members:
        return _ring(num_members, wire_bytes, sites)
    shard = wire_bytes / num_shards
    scatter = [(i, owner) for group in groups for owner in group[:num_shards] for i in group if i != owner]
    across = [(groups[a][k], groups[b][k]) for a, b in _neighbours(len(groups)) for k in range(num_shards)]
    ring = Rounds(2 * (len(groups) - 1), across, shard / len(groups))
    return [Rounds(1, scatter, shard), ring, Rounds(1, [pair[::-1] for pair in scatter], shard)]


def _server(num_members: int, wire_bytes: float, sites: Sequence[str]) -> list[Rounds]:
    into = [(member, 0) for member in range(1, num_members)]
    return [Rounds(1, pairs, wire_bytes) for pairs in (into, [pair[::-1] for pair in into])]


def _chain(num_members: int, wire_bytes: float, sites: Sequence[str]) -> list[Rounds]:
    """Return the rounds of pieces that follow one another: all bytes once on every link, and the latency of each link."""
    into = [(member, member - 1) for member in range(1, num_members)]
    both = (into, [pair[::-1] for pair in into])
    return [each for pairs in both for each in (Rounds(1, pairs, wire_bytes), Rounds(num_members - 2, pairs, 0.0))]


_ROUNDS: dict[str, Callable[[int, float, Sequence[str]], list[Rounds]]] = dict(
    zip(ALL_REDUCES, (_direct, _ring, _tree, _over_sites, _server, _chain), strict=True)
)


def all_reduce_rounds(
    num_members: int, wire_bytes: float, algorithm: str = "ring", sites: Sequence[str] | None = None
) -> list[Rounds]:
    """Return the rounds that sum `wire_bytes` over members by one of `ALL_REDUCES`; none for a single member.

    `sites`: the site of each member, for "sites"; by default a single site, which gives a ring.
    """
    check_choice("algorithm", algorithm, ALL_REDUCES)
    if num_members < 2:
        return []
    return _ROUNDS[algorithm](num_members, wire_bytes, sites or [""] * num_members)


def all_gather_rounds(num_members: int, wire_bytes: float, algorithm: str) -> list[Rounds]:
    """Return the rounds after which each member has the `wire_bytes` of every other: "ring", or "direct" in one round."""
    check_choice("algorithm", algorithm, ("ring", "direct"))
    if num_members < 2:
        return []
    if algorithm == "direct":
        return [Rounds(1, list(permutations(range(num_members), 2)), wire_bytes)]
    return [Rounds(num_members - 1, _neighbours(num_members), wire_bytes)]


def more_than_dense(method: str, wire_bytes: float, dense_bytes: float, num_replicas: int) -> str | None:
    """Return a warning if a replica sends more with a method than in an uncompressed ring, else None.

    >>> print(more_than_dense("Quantize(8)", 132e6, 75e6, 14))
    Quantize(8) on 14 replicas sends 1.76 times the bytes of an uncompressed all-reduce: a two-shot average would send less.
    >>> more_than_dense("Quantize(8)", 1e6, 4e6, 2)
    """
    if wire_bytes <= HEADERS * dense_bytes or not dense_bytes:
        return None
    times = wire_bytes / dense_bytes
    return (
        f"{method} on {num_replicas} replicas sends {times:.2f} times the bytes of an uncompressed all-reduce: "
        "a two-shot average would send less."
    )


def sites_of(hosts: Sequence[int], network: Network) -> list[str] | None:
    """Return the site of each of `hosts`; None if the network has no sites."""
    return [network.host_sites[host] for host in hosts] if network.host_sites else None


def rounds_s(
    rounds: Sequence[Rounds], hosts: Sequence[int], networks: Sequence[Network], transport: Transport
) -> Floats:
    """Return the seconds of consecutive rounds between members on `hosts`, by network; messages within a host are free."""
    host_of = np.asarray(hosts, np.int64)
    seconds = np.zeros(len(networks))
    for equal in rounds:
        source, target = host_of[np.array(equal.pairs, np.int64).T]
        each = round_of(source, target, np.full(len(source), float(equal.wire_bytes)), transport)
        seconds += equal.times * round_seconds(each, networks)
    return seconds


def all_reduce_s(
    wire_bytes: float, hosts: Sequence[int], network: Network, algorithm: str = "ring", transport: Transport = BARE
) -> float:
    """Return the seconds to sum `wire_bytes` over members on `hosts`.

    On a uniform network with D members, latency a and bandwidth W: direct 2 (a + S/(D W) (D - 1)), ring 2 (D - 1) (a + S/(D W)),
    tree 2 ceil(log2 D) (a + S/W), server 2 (a + S/W (D - 1)), chain 2 ((D - 1) a + S/W). A round is as slow as its slowest pair.
    """
    rounds = all_reduce_rounds(len(hosts), wire_bytes, algorithm, sites_of(hosts, network))
    return float(rounds_s(rounds, hosts, [network], transport)[0])


def all_gather_s(
    wire_bytes: float, hosts: Sequence[int], network: Network, algorithm: str = "ring", transport: Transport = BARE
) -> float:
    """Return the seconds until each member on `hosts` has the `wire_bytes` of every other: (D - 1) (a + S/W) in a ring."""
    rounds = all_gather_rounds(len(hosts), wire_bytes, algorithm)
    return float(rounds_s(rounds, hosts, [network], transport)[0])


def reduce_scatter_s(wire_bytes: float, hosts: Sequence[int], network: Network, transport: Transport = BARE) -> float:
    """Return the seconds to sum `wire_bytes` over members on `hosts`, each keeping one chunk: half of a ring all-reduce."""
    return all_reduce_s(wire_bytes, hosts, network, "ring", transport) / 2


def transfers_of(rounds: Sequence[Rounds], direction: str, stage: int, members: Sequence[tuple[int, int]]) -> Transfers:
    """Return the transfers of rounds between `members`, given as (replica, stage)."""
    turns = (equal for equal in rounds for _ in range(equal.times))
    return as_transfers(
        (direction, stage, turn, *members[source], *members[target], equal.wire_bytes)
        for turn, equal in enumerate(turns)
        for source, target in equal.pairs
    )


def _neighbours(count: int) -> list[Pair]:
    return [(i, (i + 1) % count) for i in range(count)]
