"""Rounds priced by classes of equal hosts cost what a listing of every message costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import explicit
from timelines import check_timeline

from raysim.network.collectives import EXCHANGES, all_reduce, as_transfers
from raysim.network.exchanges import all_reduce_rounds, all_reduce_s
from raysim.network.profile import Profile
from raysim.network.rounds import Sends, classes_of, equal_hosts, round_of, round_seconds
from raysim.network.simulate import simulate, step_seconds
from raysim.network.timeline_views import busiest_share, wire_use
from raysim.network.topology import Network, Placement
from raysim.network.transport import ALL_REDUCES, BARE, NCCL, RAY, Averaging
from raysim.schedules.families import Interleaved1F1B, OneFOneB

SITES = st.lists(st.integers(0, 2), min_size=2, max_size=8)
SHARINGS = st.sampled_from(["pair", "port", "half", "inbound"])


def network_of(sites: list[int], sharing: str, seed: int, *, distinct: bool) -> Network:
    """Return a network whose links depend on the sites of their ends, or are all different."""
    size, rng = len(sites) if distinct else 3, np.random.default_rng(seed)
    bandwidth, latency = rng.uniform(1e6, 1e9, (size, size)), rng.uniform(0, 0.1, (size, size))
    ends = range(len(sites)) if distinct else sites
    bps, seconds = (tuple(tuple(each[a, b].item() for b in ends) for a in ends) for each in (bandwidth, latency))
    return Network(bps, seconds, sharing=sharing)


@given(SITES, SHARINGS, st.integers(0, 99), st.booleans(), st.data())
def test_classes_cost_what_single_hosts_do(sites: list[int], sharing: str, seed: int, distinct: bool, data) -> None:  # type: ignore[no-untyped-def]
    networks = [network_of(sites, sharing, seed + i, distinct=distinct) for i in range(2)]
    member = st.lists(st.integers(0, len(sites) - 1), min_size=1, max_size=9).map(np.array)
    sends = [Sends(data.draw(member), data.draw(member), data.draw(st.floats(1, 1e7)), crossed=True) for _ in range(2)]
    ends = data.draw(member)
    sends.append(Sends(ends, np.roll(ends, 1), np.arange(1.0, len(ends) + 1)))
    classes = classes_of(sends, equal_hosts(networks, len(sites)))
    single = classes_of(sends, np.arange(len(sites)))
    traffic, listed = (round_of(sends, each, RAY) for each in (classes, single))
    np.testing.assert_allclose(round_seconds(traffic, networks), round_seconds(listed, networks), rtol=1e-12)
    np.testing.assert_allclose(sorted(traffic.pairs(classes)), sorted(listed.pairs(single)), rtol=1e-12)
    count = len(listed.source)
    assert len(traffic.source) <= count
    assert sum(traffic.fan_out * [classes.leader.tolist().count(lead) for lead in traffic.source.tolist()]) == count


@given(SITES, st.booleans())
def test_hosts_are_equal_if_swapping_them_changes_nothing(sites: list[int], distinct: bool) -> None:
    network = network_of(sites, "pair", 0, distinct=distinct)
    labels = equal_hosts([network], len(sites))
    for a in range(len(sites)):
        for b in range(len(sites)):
            order = np.arange(len(sites))
            order[[a, b]] = b, a
            unmoved = all((each[np.ix_(order, order)] == each).all() for each in network.matrices)
            assert unmoved == (labels[a] == labels[b])


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
@pytest.mark.parametrize("packed", [False, True])
def test_equal_replicas_cost_what_distinct_ones_do(algorithm: str, packed: bool) -> None:
    """Replicas of equal costs share one pipeline's times; given a cost for each, they are simulated one by one."""
    sites = [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2]
    network = network_of(sites, "pair", 3, distinct=False)
    network = replace(network, host_sites=tuple("abc"[site] for site in sites))
    placement = Placement(tuple(host for r in range(6) for host in ((r, 11 - r) if not packed else (r, r))))
    transfers = [all_reduce(EXCHANGES[0], 0, [(r, 0) for r in range(6)], [1e5, 1e5, 1e5, 1e5, 2e5, 1e5], whole=True)]
    transfers += [all_reduce(EXCHANGES[1], 0, [(r, 0), (r, 3)], [1e5] * 2) for r in range(6)]
    equal = Profile.uniform(
        4,
        0.1,
        0.2,
        wire_bytes=1e5,
        gradient_bytes=np.array([0.0, 1e6, 2e6, 1e6]),
        transfers=np.concatenate(transfers),
        transport=replace(NCCL, averaging=Averaging(algorithm)),
    )
    distinct = replace(equal, compute_s=np.repeat(equal.compute_s, 6, axis=0), transfers=explicit(equal.transfers, 6))
    first, second = (
        simulate(Interleaved1F1B(2), each, network, num_microbatches=4, placement=placement)
        for each in (equal, distinct)
    )
    assert first.step_s == pytest.approx(second.step_s, rel=1e-12)
    assert first.workers() == [pytest.approx(worker) for worker in second.workers()]
    np.testing.assert_allclose(first.end_s, second.end_s, rtol=1e-12)
    assert [use[:3] for use in wire_use(first)] == [use[:3] for use in wire_use(second)]
    assert busiest_share(first) == pytest.approx(busiest_share(second))
    assert busiest_share(first) >= max(use.utilisation for use in wire_use(first)) - 1e-12
    check_timeline(first)


def test_every_replica_is_a_row() -> None:
    transfers = all_reduce(
        EXCHANGES[1], 0, [(r, s) for r in range(2) for s in (0, 3)], [1.0, 2.0, 3.0, 4.0], whole=True
    )
    listed = all_reduce(EXCHANGES[1], 0, [(r, s) for r in range(2) for s in (0, 3)], [1.0, 2.0, 3.0, 4.0])
    assert sorted(explicit(transfers, 2).tolist()) == sorted(listed.tolist())
    assert explicit(as_transfers([]), 5).tolist() == []


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_thousands_of_replicas_cost_their_closed_form(algorithm: str) -> None:
    count, network = 10_000, Network(1e9, 0.001)
    transport = replace(BARE, averaging=Averaging(algorithm))
    profile = Profile.uniform(2, 0.1, 0.2, gradient_bytes=np.full(2, 1e8), transport=transport)
    step = step_seconds(OneFOneB(), profile, [network], num_microbatches=2, num_replicas=count)[0, 0]
    pairs = {"direct": 2, "ring": 2 * (count - 1)}[algorithm]
    average_s = pairs * 0.001 + 2 * (count - 1) / count * 8e8 / 1e9
    assert step == pytest.approx(0.9 + 2 * 0.001 + average_s)  # an activation and its gradient
    assert all_reduce_s(1e8, range(count), network, algorithm) == pytest.approx(average_s)
    (equal, *_) = all_reduce_rounds(count, 1e8, algorithm)
    assert len(equal.sends) == 1
