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
from collections.abc import Iterable, Sequence

import numpy as np

from raysim.network.rounds import Rounds, Sends, rounds_s
from raysim.network.topology import Network
from raysim.network.transport import ALL_REDUCES, BARE, Transport
from raysim.notation import check_choice

HEADERS = 1.01
"""Most bytes of uncompressed messages, headers included, per byte of payload; a method above it sends more than dense."""


def all_reduce_rounds(
    num_members: int, wire_bytes: float, algorithm: str = "ring", sites: Sequence[str] | None = None
) -> list[Rounds]:
    """Return the rounds that sum `wire_bytes` over members by one of `ALL_REDUCES`; none for a single member.

    `sites`: the site of each member, for "sites"; by default a single site, which gives a ring.
    """
    check_choice("algorithm", algorithm, ALL_REDUCES)
    if num_members < 2:
        return []
    if algorithm == "direct":
        return [Rounds(2, (_crossed(range(num_members), range(num_members), wire_bytes / num_members),))]
    if algorithm == "tree":
        steps = [2**level for level in range(math.ceil(math.log2(num_members)))]
        targets = [np.arange(0, num_members - step, 2 * step) for step in steps]
        return _there_and_back(
            Sends(target + step, target, wire_bytes) for step, target in zip(steps, targets, strict=True)
        )
    if algorithm == "server":
        return _there_and_back([_crossed(range(1, num_members), range(1), wire_bytes)])
    if (
        algorithm == "chain"
    ):  # pieces that follow one another: all bytes once on every link, and the latency of each link
        into = Sends(np.arange(1, num_members), np.arange(num_members - 1), wire_bytes)
        pieces = [(1, wire_bytes), (num_members - 2, 0.0)]
        return [Rounds(n, (each._replace(wire_bytes=size),)) for each in (into, _back(into)) for n, size in pieces if n]
    if algorithm == "sites" and sites is not None and 1 < len(set(sites)) < num_members:
        return _over_sites(wire_bytes, sites)
    return [Rounds(2 * (num_members - 1), (_neighbours(num_members, wire_bytes / num_members),))]


def _over_sites(wire_bytes: float, sites: Sequence[str]) -> list[Rounds]:
    """Return the rounds of the hierarchical all-reduce; the smallest site sets the number of shards."""
    groups = [[i for i, site in enumerate(sites) if site == wanted] for wanted in dict.fromkeys(sites)]
    num_shards = min(len(group) for group in groups)
    shard = wire_bytes / num_shards
    owners = np.array([group[:num_shards] for group in groups])
    scatter = tuple(_crossed(group, group[:num_shards], shard) for group in groups)
    across = Sends(owners.reshape(-1), np.roll(owners, -1, axis=0).reshape(-1), shard / len(groups))
    ring = Rounds(2 * (len(groups) - 1), (across,))
    return [Rounds(1, scatter), ring, Rounds(1, tuple(map(_back, scatter)))]


def _crossed(sources: Sequence[int], targets: Sequence[int], wire_bytes: float) -> Sends:
    return Sends(np.array(sources, np.int64), np.array(targets, np.int64), wire_bytes, crossed=True)


def _neighbours(count: int, wire_bytes: float) -> Sends:
    return Sends(np.arange(count), np.roll(np.arange(count), -1), wire_bytes)


def _back(sends: Sends) -> Sends:
    """Return the same messages in the other direction."""
    return sends._replace(sources=sends.targets, targets=sends.sources)


def _there_and_back(rounds: Iterable[Sends]) -> list[Rounds]:
    """Return rounds followed by the same messages in the other direction, last round first."""
    there = [*rounds]
    return [Rounds(1, (each,)) for each in (*there, *map(_back, reversed(there)))]


def all_gather_rounds(num_members: int, wire_bytes: float, algorithm: str) -> list[Rounds]:
    """Return the rounds after which each member has the `wire_bytes` of every other: "ring", or "direct" in one round."""
    check_choice("algorithm", algorithm, ("ring", "direct"))
    if num_members < 2:
        return []
    if algorithm == "direct":
        return [Rounds(1, (_crossed(range(num_members), range(num_members), wire_bytes),))]
    return [Rounds(num_members - 1, (_neighbours(num_members, wire_bytes),))]


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


def sites_of(hosts: Sequence[int], host_sites: Sequence[str] | None) -> list[str] | None:
    """Return the site of each of `hosts`; None if the network has no sites."""
    return [host_sites[host] for host in hosts] if host_sites else None


def all_reduce_s(
    wire_bytes: float, hosts: Sequence[int], network: Network, algorithm: str = "ring", transport: Transport = BARE
) -> float:
    """Return the seconds to sum `wire_bytes` over members on `hosts`.

    On a uniform network with D members, latency a and bandwidth W: direct 2 (a + S/(D W) (D - 1)), ring 2 (D - 1) (a + S/(D W)),
    tree 2 ceil(log2 D) (a + S/W), server 2 (a + S/W (D - 1)), chain 2 ((D - 1) a + S/W). A round is as slow as its slowest pair.
    """
    rounds = all_reduce_rounds(len(hosts), wire_bytes, algorithm, sites_of(hosts, network.host_sites))
    return float(rounds_s(rounds, np.array(hosts, np.int64), [network], transport)[0])
