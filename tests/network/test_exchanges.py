"""All-reduces by their algorithm, and averages in buckets during the last backward."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import pairs_of
from timelines import check_timeline

from raysim.forecast.timings import Timings
from raysim.network.collectives import all_reduce
from raysim.network.exchanges import (
    all_gather_rounds,
    all_reduce_rounds,
    all_reduce_s,
)
from raysim.network.presets import presets
from raysim.network.profile import Profile
from raysim.network.rounds import Rounds, rounds_s
from raysim.network.simulate import simulate, step_seconds
from raysim.network.timeline_views import wire_use
from raysim.network.topology import FREE, Network, Placement
from raysim.network.transport import ALL_REDUCES, BARE, GLOO, NCCL, RAY, Averaging, Band, Transport, parse_averaging
from raysim.schedules.families import ZBH1, GPipe, Interleaved1F1B, OneFOneB, Schedule

NETWORK = Network(80e6, 0.01)
SLOW_PAIR = Network(tuple(tuple(1e6 if {a, b} == {0, 1} else 80e6 for b in range(4)) for a in range(4)))
TWO_SITES = Network(
    tuple(tuple(80e6 if a // 3 == b // 3 else 8e6 for b in range(6)) for a in range(6)),
    tuple(tuple(0.001 if a // 3 == b // 3 else 0.02 for b in range(6)) for a in range(6)),
    host_sites=("a",) * 3 + ("b",) * 3,
)
SITES = st.lists(st.sampled_from("abc"), min_size=1, max_size=12)


def sent_by(rounds: list[Rounds]) -> Counter[int]:
    """Return the bytes that each member sends."""
    totals: Counter[int] = Counter()
    for equal in rounds:
        for sends in equal.sends:
            for source, _ in pairs_of(sends):
                totals[source] += equal.times * sends.wire_bytes  # type: ignore[assignment]
    return totals


@given(SITES, st.sampled_from(ALL_REDUCES))
def test_collective_reaches_every_member_without_self_sends(sites: list[str], algorithm: str) -> None:
    rounds = all_reduce_rounds(len(sites), 1200.0, algorithm, sites)
    known = [{member} for member in range(len(sites))]
    for equal in rounds:
        pairs = [pair for sends in equal.sends for pair in pairs_of(sends)]
        assert len(set(pairs)) == len(pairs)
        for _ in range(equal.times):
            before = [set(each) for each in known]
            for source, target in pairs:
                assert source != target
                known[target] |= before[source]
    assert all(each == set(range(len(sites))) for each in known)


@given(st.integers(2, 12), st.sampled_from(["direct", "ring"]))
def test_no_algorithm_sends_less_than_a_ring(count: int, algorithm: str) -> None:
    sent = sent_by(all_reduce_rounds(count, 1200.0, algorithm))
    assert {round(size, 6) for size in sent.values()} == {round(2 * (count - 1) / count * 1200, 6)}
    for other in ALL_REDUCES:
        total = sum(sent_by(all_reduce_rounds(count, 1200.0, other)).values())
        assert total >= 2 * (count - 1) * 1200 - 1e-6


def test_ring_time_is_independent_of_slow_pair_position() -> None:
    """Bytes of S/D cross the slow pair in each of 2 (D - 1) rounds; a direct exchange sends over it twice."""
    size, chunk_s = 4e6, 8 * 1e6 / 1e6
    assert all_reduce_s(size, range(4), SLOW_PAIR, "ring") == pytest.approx(6 * chunk_s)
    assert all_reduce_s(size, range(4), SLOW_PAIR, "direct") == pytest.approx(2 * chunk_s)
    apart = [0, 2, 1, 3]  # neighbours in this ring are never the slow pair
    assert all_reduce_s(size, apart, SLOW_PAIR, "ring") == pytest.approx(6 * 8 * 1e6 / 80e6)


def test_only_shards_cross_between_sites() -> None:
    """S/3 within a site, twice, and a ring of two for each third of the gradients over the slow links."""
    size = 3e6
    within = 0.001 + 2 * 8 * 1e6 / 80e6  # an owner receives from two others
    across = 0.02 + 8 * 0.5e6 / 8e6
    found = all_reduce_s(size, range(6), TWO_SITES, "sites")
    assert found == pytest.approx(2 * within + 2 * across)
    assert found < all_reduce_s(size, range(6), TWO_SITES, "ring")
    assert found < all_reduce_s(size, range(6), TWO_SITES, "tree")
    worldwide = presets()["worldwide"]
    assert all_reduce_s(1e9, range(64), worldwide, "sites") < all_reduce_s(1e9, range(64), worldwide, "ring")


def test_hierarchical_average_degenerates_to_ring() -> None:
    for hosts in ([0, 1, 2], [1, 4]):
        assert all_reduce_s(3e6, hosts, TWO_SITES, "sites") == all_reduce_s(3e6, hosts, TWO_SITES, "ring")


def test_messages_pay_for_their_transport_and_framing() -> None:
    """Three trips from 1 MB on, one below, 500 bytes beside each message, a quarter more on the wire."""
    transport = Transport("steps", (Band(0, 500, 1), Band(1e6, 500, 3)))
    network = Network(80e6, 0.01, framing=1.25)
    for size, trips, tree_trips in ((6e6, 3, 3), (3e6, 1, 3)):  # chunks of a quarter: 1.5 MB and 0.75 MB
        chunk_s, whole_s = (1.25 * 8 * (each + 500) / 80e6 for each in (size / 4, size))
        expected = {
            "ring": 6 * (0.01 * trips + chunk_s),
            "direct": 2 * (0.01 * trips + 3 * chunk_s),
            "tree": 4 * (0.01 * tree_trips + whole_s),
        }
        for algorithm, seconds in expected.items():
            assert all_reduce_s(size, range(4), network, algorithm, transport) == pytest.approx(seconds)
            over = replace(transport, averaging=Averaging(algorithm))
            profile = Profile.uniform(1, 1.0, 2.0, gradient_bytes=np.full(1, size), transport=over)
            timeline = simulate(GPipe(), profile, network, num_microbatches=1, num_replicas=4)
            assert timeline.collective_s == pytest.approx(seconds)


def test_networks_with_different_sites_are_distinct() -> None:
    other = replace(TWO_SITES, host_sites=tuple("abcabc"))
    seconds = {network: all_reduce_s(3e6, range(6), network, "sites") for network in (TWO_SITES, other)}
    assert len(seconds) == 2
    assert seconds[TWO_SITES] < seconds[other]


def test_gathers() -> None:
    for algorithm, seconds in (("ring", 4 * (0.01 + 0.1)), ("direct", 0.01 + 4 * 0.1)):
        rounds = all_gather_rounds(5, 1e6, algorithm)
        assert rounds_s(rounds, np.arange(5), [NETWORK])[0] == pytest.approx(seconds)
    assert all_reduce_s(1e6, [3], NETWORK) == all_reduce_s(1e6, [2, 2, 2], NETWORK) == 0.0


@pytest.mark.parametrize("algorithm", ALL_REDUCES)
def test_step_includes_all_reduce_time(algorithm: str) -> None:
    profile = Profile.uniform(
        1, 1.0, 2.0, gradient_bytes=np.full(1, 3e6), transport=replace(BARE, averaging=Averaging(algorithm))
    )
    timeline = simulate(GPipe(), profile, TWO_SITES, num_microbatches=1, num_replicas=6)
    assert timeline.collective_s == pytest.approx(all_reduce_s(3e6, range(6), TWO_SITES, algorithm))
    rounds = all_reduce_rounds(6, 3e6, algorithm, TWO_SITES.host_sites)
    assert sum(use.wire_bytes for use in wire_use(timeline)) == pytest.approx(sum(sent_by(rounds).values()))
    check_timeline(timeline)


def test_recorded_messages_are_the_average_only_if_it_is_direct() -> None:
    members = [(replica, 0) for replica in range(3)]
    listed = all_reduce("replica_gradient", 0, members, [3e6] * 3)
    profile = Profile.uniform(1, 1.0, 2.0, gradient_bytes=np.full(1, 3e6), transfers=listed)
    network = Network(8e6)
    step = {"num_microbatches": 1, "num_replicas": 3}
    direct = simulate(GPipe(), profile, network, **step)  # type: ignore[arg-type]
    assert direct.collective_s == pytest.approx(12.0)  # as listed
    ring = replace(profile, transport=replace(BARE, averaging=Averaging("ring")))
    assert simulate(GPipe(), ring, network, **step).collective_s == pytest.approx(4.0)  # type: ignore[arg-type]


# Buckets.


def by_hand(ready_s: float, last_s: float, count: int, each_s: float) -> float:
    """Return the end of `count` buckets that become ready one after another in the last `last_s` seconds."""
    free = 0.0
    for bucket in range(1, count + 1):
        free = max(free, ready_s - last_s * (1 - bucket / count)) + each_s
    return free


@given(
    st.integers(2, 5),
    st.integers(1, 40),
    st.floats(1e5, 1e9),
    st.sampled_from(["direct", "ring", "tree"]),
    st.sampled_from([OneFOneB(), GPipe(), ZBH1(), Interleaved1F1B(2)]),
)
def test_buckets_start_as_last_backward_produces_them(
    replicas: int, count: int, bps: float, algorithm: str, schedule: Schedule
) -> None:
    size = count * 2.0**20
    profile = Profile.uniform(
        4,
        0.1,
        0.2,
        wire_bytes=1e5,
        weight_s=0.15,
        gradient_bytes=np.full(4, size),
        bucketed_bytes=np.full(4, size),
        transport=replace(BARE, averaging=Averaging(algorithm, bucket_mib=1.0)),
    )
    network = Network(bps, 0.001)
    timeline = simulate(schedule, profile, network, num_microbatches=4, num_replicas=replicas)
    check_timeline(timeline)
    assert (
        step_seconds(schedule, profile, [network], num_microbatches=4, num_replicas=replicas)[0, 0] == timeline.step_s
    )
    each_s = all_reduce_s(2.0**20, range(replicas), network, algorithm)
    last_s = 0.15 if isinstance(schedule, ZBH1) else 0.35
    if timeline.table.num_workers == 4:  # each stage has its hosts to itself
        ends = [by_hand(float(np.nanmax(timeline.end_s[:, s])), last_s, count, each_s) for s in range(4)]
        assert [one.end_s for one in timeline.collectives] == pytest.approx(ends)
        assert timeline.collectives_end_s == pytest.approx(max(*ends, timeline.pipeline_s))
    late = replace(profile, transport=replace(BARE, averaging=Averaging(algorithm)))
    whole = simulate(schedule, late, network, num_microbatches=4, num_replicas=replicas)
    more_trips = 4 * count * len(timeline.collectives[0].round_s) * 0.001  # one for each bucket and round
    assert timeline.step_s <= whole.step_s + more_trips


def test_buckets_start_within_last_backward_of_their_stage() -> None:
    """Stages, microbatches and replicas that all take different times; an average that takes none ends with its stage."""
    compute_s = np.random.default_rng(1).uniform(0.5, 2.0, (2, 3, 2, 4))
    size = np.full(3, 4 * 2.0**20)
    averaging = Averaging("ring", bucket_mib=1.0)
    profile = Profile(
        compute_s=compute_s,
        gradient_bytes=size,
        bucketed_bytes=size,
        transport=replace(BARE, averaging=averaging),
    )
    timeline = simulate(OneFOneB(), profile, Network(1e15))
    assert [one.collective.stages for one in timeline.collectives] == [(0,), (1,), (2,)]
    for stage, one in enumerate(timeline.collectives):
        ready_s, last_s = np.nanmax(timeline.end_s[:, stage]), compute_s[:, stage, 1, -1].min()
        assert (one.start_s, one.end_s) == pytest.approx((ready_s - 3 / 4 * last_s, ready_s))


def test_buckets_that_take_no_time_leave_the_critical_path_to_compute() -> None:
    averaging = Averaging("ring", bucket_mib=1.0)
    profile = Profile.uniform(2, 0.1, 0.2, gradient_bytes=np.full(2, 4e6), transport=replace(BARE, averaging=averaging))
    timeline = simulate(OneFOneB(), profile, FREE, num_microbatches=4, num_replicas=2)
    assert timeline.explain() == {"compute": pytest.approx(timeline.step_s)}


def test_the_last_bucket_need_not_be_full() -> None:
    mib = 2.0**20
    sizes = (0.0, 1.0, 25 * mib, 25 * mib + 1, 74 * mib)
    assert [Averaging("ring", 25).num_buckets(size) for size in sizes] == [0, 1, 1, 2, 3]


@given(st.floats(1e6, 1e10), st.integers(1, 3), st.sampled_from(["direct", "ring/1MiB"]))
def test_delayed_average_costs_what_exceeds_the_next_step(bps: float, replicas: int, averaging: str) -> None:
    """A step is as long as its compute or its average, whichever takes longer; the average is busy in every step."""
    timings = Timings(
        schedule="GPipe",
        num_stages=1,
        num_microbatches=2,
        num_replicas=replicas,
        forward_s=1,
        backward_s=2,
        gradient_bytes=4e6,
    )
    network, over = Network(bps, 1e-3), replace(BARE, averaging=parse_averaging(averaging))
    step = replace(timings.step().over(over), averaging_delay=1)
    whole_s = all_reduce_s(4e6, range(replicas), network, step.profile.transport.averaging.algorithm)
    timeline = step.simulate(network)
    assert timeline.step_s == pytest.approx(max(6.0, whole_s))
    assert sum(timeline.explain().values()) == pytest.approx(timeline.step_s)
    assert sum(timeline.workers()[0][2:]) == pytest.approx(timeline.step_s)
    waiting = replace(step, averaging_delay=0).simulate(network)
    assert timeline.step_s <= waiting.step_s * (1 + 1e-12)
    late = replace(step, averaging_delay=3).simulate(network).step_s  # only the wires, not latency, bound it
    assert 6.0 <= late <= timeline.step_s * (1 + 1e-12)


def test_update_may_hide_a_delayed_average() -> None:
    """2 s of compute and 1 s of updates; averages of 2.5 and of 4 s."""
    costs = {"num_stages": 1, "num_microbatches": 1, "num_replicas": 2, "forward_s": 1, "backward_s": 1, "update_s": 1}
    for size, expected, path in (
        (2.5e6, 3.0, {"compute": 2.0, "update": 1.0}),
        (4e6, 4.0, {"collective_bytes": 3.0, "update": 1.0}),
    ):
        timings = Timings(**costs, gradient_bytes=size, averaging_delay=1)  # type: ignore[arg-type]
        timeline = timings.step().simulate(Network(8e6))
        assert timeline.step_s == pytest.approx(expected)
        assert timeline.explain() == pytest.approx(path)


def test_unbucketed_average_waits_for_all_pipelines() -> None:
    profile = Profile.uniform(2, 1.0, 1.0, gradient_bytes=np.full(2, 1e6), bucketed_bytes=np.array([0.0, 1e6]))
    profile = replace(profile, transport=replace(BARE, averaging=Averaging("ring", 25)))
    timeline = simulate(GPipe(), profile, Network(8e6), num_microbatches=2, num_replicas=2)
    waits, early = timeline.collectives
    assert (waits.start_s, early.start_s) == (timeline.pipeline_s, timeline.pipeline_s - 1.0)


def test_overlapped_buckets_precede_waiting_averages_on_shared_hosts() -> None:
    profile = Profile.uniform(2, 1.0, 1.0, gradient_bytes=np.full(2, 4e6), bucketed_bytes=np.array([0.0, 4e6]))
    profile = replace(profile, transport=replace(BARE, averaging=Averaging("ring", 25)))
    timeline = simulate(GPipe(), profile, Network(8e6), num_microbatches=1, placement=Placement((0, 0, 1, 1)))
    waits, early = timeline.collectives
    assert waits.start_s == early.end_s == timeline.pipeline_s - 1.0 + 4.0
    check_timeline(timeline)


@given(st.sampled_from(ALL_REDUCES), st.none() | st.floats(0.1, 1e4).map(lambda size: round(size, 3)))
def test_notation_round_trip(algorithm: str, bucket_mib: float | None) -> None:
    averaging = Averaging(algorithm, bucket_mib)
    assert parse_averaging(repr(averaging)).num_buckets(1e9) == averaging.num_buckets(1e9)
    assert parse_averaging(repr(averaging)).algorithm == algorithm
    assert bool(averaging.num_buckets(1.0)) == (bucket_mib is not None)


def test_transports_average_like_their_libraries() -> None:
    assert (RAY.averaging, BARE.averaging) == (Averaging(), Averaging())
    assert NCCL.averaging == GLOO.averaging == parse_averaging("ring/25MiB")
    for text in ("star", "ring/25MB", "ring/"):
        with pytest.raises(ValueError, match=r"^`averaging` must be "):
            parse_averaging(text)


def test_published_utilisation_of_int8_rings_between_regions() -> None:
    """INTELLECT-1 (Prime Intellect, 2412.01152): 10.2 e9 values at one byte over 14 nodes, every 38 minutes.

    Bandwidths are those that a ring of 103, 382 and 469 s implies; the utilisation is the paper's.
    """
    for bps, published in ((1.47e9, 0.957), (0.40e9, 0.856), (0.32e9, 0.830)):
        exchange_s = all_reduce_s(10.2e9, range(14), Network(bps))
        utilisation = 38 * 60 / (38 * 60 + exchange_s)
        assert utilisation == pytest.approx(published, abs=0.01)
