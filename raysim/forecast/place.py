"""Search for the placement of a step's workers on the hosts of a network, by the price of the step.

Few placements are all priced. Otherwise two workers, or a worker and an unused host, swap hosts as long as that is faster, from the
order of the file, from an order of near neighbours, and from random orders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, permutations

import numpy as np

from raysim.network.rounds import Ints, equal_hosts
from raysim.network.timed_step import TimedStep
from raysim.network.topology import Network, Placement
from raysim.notation import InputError

MOST_LISTED = 1_000
"""Most placements that are all priced."""
MOST_TRIED = 2_000
"""Most placements priced by swaps."""

Hosts = tuple[int, ...]


@dataclass(frozen=True)
class Placed:
    """The fastest placement, and the steps that it is compared with."""

    hosts: Hosts
    """Hosts of workers 0, 1, ... of replica 0, then of replica 1, and so on."""
    step_s: float
    listed_s: float
    """The step with workers on the first hosts, in order."""
    bound_s: float
    """No placement is faster: the step if every link were as good as the best."""
    exact: bool
    """True if all placements were priced."""
    tried: int


def place(step: TimedStep, network: Network, *, most: int = MOST_TRIED, seed: int = 0) -> Placed:
    """Return the fastest placement of a step with one worker on a host; raises InputError if hosts are missing or unnamed."""
    size, workers = network.num_hosts, step.num_workers
    if size is None:
        raise InputError(f"{network!r} has equal links between all hosts, so that every placement is equally fast.")
    if workers > size:
        raise InputError(f"{network!r} has {size} hosts, but the step has {workers} workers: each needs a host.")
    prices: dict[Hosts, float] = {}
    labels = equal_hosts([network], size)
    if network.host_sites is not None and _averages_by_site(step):
        labels = labels * size + np.unique(network.host_sites, return_inverse=True)[1]

    def price(hosts: Hosts) -> float:
        key = tuple(labels[list(hosts)].tolist())
        if key not in prices:
            prices[key] = replace(step, placement=Placement(hosts)).step_s(network)
        return prices[key]

    listed = tuple(range(workers))
    listed_s = price(listed)
    exact = _count(labels, workers) <= MOST_LISTED
    orders = _all(labels, workers) if exact else _descents(price, network, workers, lambda: len(prices) < most, seed)
    best = min(orders, key=price)
    best = best if price(best) < listed_s else listed
    return Placed(best, price(best), listed_s, _bound_s(step, network), exact, len(prices))


def _count(labels: Ints, workers: int) -> int:
    """Return an upper bound of the number of different placements: exact if all hosts are used or different."""
    size = len(labels)
    counts: list[int] = np.unique(labels, return_counts=True)[1].tolist()
    if workers == size:
        return math.factorial(size) // math.prod(map(math.factorial, counts))
    return min(math.perm(size, workers), int(len(counts) ** workers))


def _all(labels: Ints, workers: int) -> Iterator[Hosts]:
    """Yield one placement of each kind; hosts with equal labels may swap places."""
    hosts = {label: np.flatnonzero(labels == label).tolist() for label in np.unique(labels).tolist()}

    def extend(chosen: list[int], left: dict[int, int]) -> Iterator[Hosts]:
        if len(chosen) == workers:
            yield tuple(chosen)
            return
        for label, free in left.items():
            if free:
                host = hosts[label][len(hosts[label]) - free]
                yield from extend([*chosen, host], {**left, label: free - 1})

    yield from extend([], {label: len(own) for label, own in hosts.items()})


def _descents(
    price: Callable[[Hosts], float], network: Network, workers: int, more: Callable[[], bool], seed: int
) -> Iterator[Hosts]:
    """Yield local optima under swaps, until no `more` placements may be priced."""
    rng, size = np.random.default_rng(seed), network.num_hosts or 0
    starts = [list(range(size)), _neighbours(network)]
    while more():
        order = starts.pop(0) if starts else rng.permutation(size).tolist()
        best_s, improved = price(tuple(order[:workers])), True
        while improved and more():
            improved = False
            swaps = [(i, j) for i, j in combinations(range(size), 2) if i < workers]
            for k in rng.permutation(len(swaps)).tolist():
                i, j = swaps[k]
                order[i], order[j] = order[j], order[i]
                seconds = price(tuple(order[:workers]))
                if seconds < best_s:
                    best_s, improved = seconds, True
                else:
                    order[i], order[j] = order[j], order[i]
                if not more():
                    break
        yield tuple(order[:workers])


def _neighbours(network: Network) -> list[int]:
    """Return all hosts in an order in which each is followed by the remaining host with the fastest link."""
    hosts = np.arange(network.num_hosts or 0)
    speed = np.minimum(network.bandwidths_bps(hosts[:, None], hosts), network.bandwidths_bps(hosts, hosts[:, None]))
    speed = speed / (1 + network.latencies_s(hosts[:, None], hosts))
    order, left = [0], set(hosts[1:].tolist())
    while left:
        order.append(max(left, key=lambda host: (speed[order[-1], host], -host)))
        left.remove(order[-1])
    return order


def _averages_by_site(step: TimedStep) -> bool:
    return step.profile.transport.averaging.algorithm == "sites"


def _bound_s(step: TimedStep, network: Network) -> float:
    """Return the seconds of the step on a network whose links are all as fast as the fastest, and as near as the nearest.

    An average over sites is at best one of two rounds of the same bytes, without overhead or queues for latency.
    """
    hosts = np.arange(network.num_hosts or 0)
    pairs = np.array(list(permutations(hosts.tolist(), 2))).T
    best = replace(
        network,
        bandwidth_bps=float(network.bandwidths_bps(*pairs).max()),
        latency_s=float(network.latencies_s(*pairs).min()),
        jitter_s=0.0,
        host_names=None,
        host_sites=None,
        name="",
    )
    if _averages_by_site(step):
        transport = step.profile.transport
        bands = tuple(band._replace(beside_bytes=0.0) for band in transport.bands)
        least = replace(transport, bands=bands, averaging=replace(transport.averaging, algorithm="direct"))
        step = replace(step, kinds=[(share, replace(each, transport=least)) for share, each in step.kinds])
        best = replace(best, sharing="pair" if best.sharing == "inbound" else best.sharing)
    return replace(step, placement=None).step_s(best)
