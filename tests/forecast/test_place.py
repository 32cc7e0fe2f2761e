"""The search for a placement finds what a listing of all placements finds."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from raysim.forecast import place as search
from raysim.forecast.place import place
from raysim.forecast.timings import Timings
from raysim.network.timed_step import TimedStep
from raysim.network.topology import SHARING, Network, Placement
from raysim.network.transport import ALL_REDUCES, BARE, RAY, Averaging
from raysim.notation import InputError


def step_of(num_stages: int, num_replicas: int) -> TimedStep:
    return Timings(
        num_stages=num_stages,
        num_replicas=num_replicas,
        num_microbatches=2,
        forward_s=0.01,
        backward_s=0.02,
        message_bytes=1e6,
        gradient_bytes=2e6,
    ).step()


def network_of(size: int, seed: int, sites: int | None = None) -> Network:
    """Return a network of random links that differ by direction; with `sites`, hosts of a site have equal links."""
    rng = np.random.default_rng(seed)
    ends = range(size) if sites is None else [host % sites for host in range(size)]
    bps, latency = 10 ** rng.uniform(6, 9, (size, size)), rng.uniform(0, 0.05, (size, size))
    bandwidths, latencies = (tuple(tuple(each[a, b].item() for b in ends) for a in ends) for each in (bps, latency))
    return Network(bandwidths, latencies)


def price(step: TimedStep, hosts: tuple[int, ...], network: Network) -> float:
    return replace(step, placement=Placement(hosts)).step_s(network)


@pytest.mark.parametrize(
    ("stages", "replicas", "size", "sites"), [(4, 1, 4, None), (2, 2, 4, None), (3, 1, 4, 2), (2, 2, 5, 3)]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_search_finds_the_fastest_of_all(stages: int, replicas: int, size: int, sites: int | None, seed: int) -> None:
    step, network = step_of(stages, replicas), network_of(size, seed, sites)
    fastest_s = min(price(step, hosts, network) for hosts in permutations(range(size), stages * replicas))
    found = place(step, network)
    assert found.exact
    assert found.step_s == pytest.approx(fastest_s, rel=1e-12) == price(step, found.hosts, network)
    assert found.bound_s <= found.step_s <= found.listed_s
    assert found.tried <= len(list(permutations(range(size), stages * replicas)))


def test_swaps_find_the_fastest_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    step, network = step_of(2, 2), network_of(4, 3)
    exact = place(step, network)
    monkeypatch.setattr(search, "MOST_LISTED", 0)
    found = place(step, network, most=24)
    assert not found.exact
    assert (found.step_s, found.bound_s) == pytest.approx((exact.step_s, exact.bound_s))


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("unlike", [True, False])
def test_no_placement_on_sites_is_faster_than_the_one_found_or_the_bound(
    algorithm: str, sharing: str, unlike: bool
) -> None:
    """Averages over sites depend on the sites of hosts, though their links may be alike."""
    bps, latency = np.full((4, 4), 1e9), np.full((4, 4), 0.05)
    if unlike:
        bps[0], latency[0] = 5e8, 0.06
    bandwidths, latencies = (tuple(map(tuple, each.tolist())) for each in (bps, latency))
    network = Network(bandwidths, latencies, host_sites=tuple("abba"), sharing=sharing)
    for transport in (BARE, RAY):
        step = step_of(1, 4).over(replace(transport, averaging=Averaging(algorithm)))
        found = place(step, network)
        fastest_s = min(price(step, hosts, network) for hosts in permutations(range(4)))
        assert found.bound_s <= fastest_s == found.step_s


@pytest.mark.parametrize("delay", [0, 1])
def test_seconds_of_a_step_are_its_timelines(delay: int) -> None:
    step = replace(step_of(3, 2), averaging_delay=delay, placement=Placement((4, 0, 3, 5, 1, 2)))
    assert step.step_s(network_of(6, 0)) == step.simulate(network_of(6, 0)).step_s


def test_every_placement_is_as_fast_on_equal_links() -> None:
    matrix = tuple(tuple(1e8 for _ in range(5)) for _ in range(5))
    found = place(step_of(2, 2), Network(matrix))
    assert (found.tried, found.hosts) == (1, (0, 1, 2, 3))
    assert found.step_s == found.listed_s == pytest.approx(found.bound_s)


def test_bad_placements_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"^100mbps has equal links between all hosts, so that every placement is equally fast\.$"
    ):
        place(step_of(2, 1), Network(1e8))
    with pytest.raises(InputError, match=r"has 3 hosts, but the step has 4 workers: each needs a host\.$"):
        place(step_of(2, 2), network_of(3, 0))
    for text in ("0,1", "0,1,2,x", "0,1,2,-3"):
        with pytest.raises(ValueError, match=r"^`placement` must be a host for each of 4 workers, such as 0,1,2,3 "):
            Placement.parse(text, 4)
