"""Laws of the simulator: known makespans, bounds, monotony, agreement of its two kernels, and a published case."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from raysim_benchmarks.bench.simulate import CASES, SMALL, measure, print_table
from timelines import check_timeline

from raysim.network.presets import parse_network
from raysim.network.profile import Profile
from raysim.network.simulate import break_even_bps, simulate, step_seconds
from raysim.network.timeline import WorkerTime
from raysim.network.timeline_views import wire_use
from raysim.network.topology import Network, Placement
from raysim.network.transport import BARE, NCCL, RAY, TRANSPORTS, Averaging, Band, Transport
from raysim.schedules.actions import Action, Row, dependency, sends
from raysim.schedules.families import ZBH1, ZBH2, ZBV, DualPipeV, GPipe, Interleaved1F1B, OneFOneB, Schedule

FREE = parse_network("free")
SIZES = [(p, m) for p in range(1, 7) for m in range(1, 9)]
FAMILIES: list[Schedule] = [GPipe(), OneFOneB(), OneFOneB(extra_warmup=2), OneFOneB(ahead=3)]
every_family = pytest.mark.parametrize("schedule", FAMILIES, ids=repr)


def unshared(num_workers: int) -> Placement:
    """Return a placement that shares nothing and still takes the general kernel."""
    return Placement(tuple(range(num_workers)), cores=(math.inf,) * num_workers)


def random_profile(seed: int, p: int, m: int, **overheads: Any) -> Profile:
    """Return a profile in which every action and every packet differs."""
    random = np.random.default_rng(seed)
    shape = (1, p, 2, m)
    return Profile(
        compute_s=random.uniform(0, 2, shape),
        decode_s=random.uniform(0, 0.3, shape),
        encode_s=random.uniform(0, 0.3, shape),
        wire_bytes=random.integers(0, 1000, shape).astype(float),
        **overheads,
    )


def random_network(seed: int, p: int, sharing: str = "pair") -> Network:
    """Return a network whose links all differ, at about a second a packet."""
    random = np.random.default_rng(seed)
    bandwidth = tuple(map(tuple, random.uniform(2_000, 20_000, (p, p)).tolist()))
    latency = tuple(map(tuple, random.uniform(0, 0.5, (p, p)).tolist()))
    return Network(bandwidth, latency, sharing=sharing)


def waits(worker: WorkerTime) -> float:
    """Return a worker's seconds of waiting for packets."""
    return worker.wait_bytes_s + worker.wait_latency_s + worker.wait_host_s


def reference(
    rows: list[Row], p: int, cost: Callable[[Action], float], fly: Callable[[Action], tuple[float, float]]
) -> float:
    """Return the makespan by the plainest rules: `cost` of an action, `fly` the (latency, transfer) seconds of its packet."""
    arrive: dict[Action, float] = {}
    free, heads, wire = [0.0] * len(rows), [0] * len(rows), {}
    while any(head < len(row) for head, row in zip(heads, rows, strict=True)):
        for worker, row in enumerate(rows):
            while heads[worker] < len(row):
                action = row[heads[worker]]
                packet = dependency(action, p)
                if packet is not None and packet not in arrive:
                    break
                free[worker] = max(free[worker], arrive[packet] if packet else 0.0) + cost(action)
                if sends(action, p):
                    latency, transfer = fly(action)
                    key = (action.stage, action.op)
                    wire[key] = max(wire.get(key, 0.0), free[worker]) + transfer
                    arrive[action] = wire[key] + latency
                heads[worker] += 1
    return max(free)


# Known makespans.


@every_family
def test_makespan_and_bubble_of_equal_stages(schedule: Schedule) -> None:
    for p, m in SIZES:
        profile = Profile.uniform(p, 1.0, 2.0, wire_bytes=1e6)
        timeline = simulate(schedule, profile, FREE, num_microbatches=m)
        assert timeline.step_s == timeline.pipeline_s == 3 * (m + p - 1)
        assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
        assert not any(waits(worker) for worker in timeline.workers())


def test_zero_bubble_leaves_a_third_of_the_bubble() -> None:
    for p, m in SIZES:
        profile = Profile.uniform(p, 1.0, 1.0, weight_s=1.0)
        zero = simulate(ZBH1(), profile, FREE, num_microbatches=m).step_s
        joint = simulate(OneFOneB(), profile, FREE, num_microbatches=m).step_s
        assert joint == 3 * m + 3 * (p - 1)
        assert zero == 3 * m + (p - 1) if m >= p else zero <= joint
    profile = Profile.uniform(4, 1.0, 1.0, weight_s=1.0)
    assert simulate(ZBH1(), profile, FREE, num_microbatches=8).step_s == 27.0
    assert simulate(OneFOneB(), Profile.uniform(4, 1.0, 2.0), FREE, num_microbatches=8).step_s == 33.0


@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 2, 1), (4, 5, 3), (3, 4, 3), (4, 6, 2)], ids=str)
def test_zero_bubble_h2_waits_as_published(costs: tuple[float, float, float]) -> None:
    """Seconds that a stage waits between its first and its last action: Qi et al. 2023, table 1, and the flush beside it."""
    forward, backward, weights = costs
    for p in range(2, 7):
        for m in (2 * p, 3 * p):
            profile = Profile.uniform(p, forward, backward, weight_s=weights)
            timeline = simulate(ZBH2(), profile, FREE, num_microbatches=m)
            spans = np.nanmax(timeline.end_s, axis=(0, 2, 3)) - np.nanmin(timeline.start_s, axis=(0, 2, 3))
            waits = (p - 1) * (forward + backward - 2 * weights)
            assert spans.max() == m * sum(costs) + waits
            assert timeline.step_s == m * sum(costs) + max(waits, (p - 1) * forward)


def test_v_shaped_schedules_wait_as_published() -> None:
    for p in range(1, 7):
        for m in range(2 * p, 5 * p):
            profile = Profile.uniform(2 * p, 1.0, 1.0, weight_s=1.0)
            timeline = simulate(ZBV(), profile, FREE, num_microbatches=m)
            for worker in range(p):
                stages = [worker, 2 * p - 1 - worker]
                assert np.nanmax(timeline.end_s[0, stages]) - np.nanmin(timeline.start_s[0, stages]) == 6 * m
            assert timeline.step_s == 6 * m + p - 1


@pytest.mark.parametrize("costs", [(1, 1, 1), (2, 2, 1), (4, 5, 3), (4, 6, 2)], ids=str)
def test_dual_pipe_v_waits_no_longer_than_published(costs: tuple[float, float, float]) -> None:
    """The bound of DualPipe's repository, (p - 1) (F&B + B - 3W), whose pair F&B takes as long as its parts one after the other."""
    forward, backward, weights = costs
    for p in range(1, 7):
        profile = Profile.uniform(2 * p, forward, backward, weight_s=weights)
        step_s = simulate(DualPipeV(), profile, FREE, num_microbatches=4 * p).step_s
        whole = backward + weights
        bubble = step_s - 8 * p * sum(costs)
        assert 0 <= bubble <= (p - 1) * (forward + 2 * whole - 3 * weights)
        joint = Profile.uniform(2 * p, forward, whole)
        assert p == 1 or step_s < simulate(Interleaved1F1B(2), joint, FREE, num_microbatches=4 * p).step_s


def test_transfers_within_a_worker_use_no_link() -> None:
    """The middle of a V: the packets between stages 2p - 1 and 2p take no time."""
    profile = Profile.uniform(6, 1.0, 1.0, weight_s=1.0, wire_bytes=1000)
    uses = wire_use(simulate(ZBV(), profile, Network(1e6, 0.01), num_microbatches=6))
    assert {(use.source, use.target) for use in uses} == {(0, 1), (1, 0), (1, 2), (2, 1)}
    assert {use.messages for use in uses} == {2 * 6}


def test_interleaving_divides_the_bubble() -> None:
    for p in range(1, 7):
        for each in range(1, 5):
            profile = Profile.uniform(p * each, 1.0 / each, 2.0 / each)
            for m in (p, 2 * p, 3 * p):
                step_s = simulate(Interleaved1F1B(each), profile, FREE, num_microbatches=m).step_s
                assert step_s == pytest.approx(3 * m + 3 * (p - 1) / each)
    halves = Profile.uniform(8, 0.5, 1.0)
    assert simulate(Interleaved1F1B(2), halves, FREE, num_microbatches=8).step_s == 28.5


def test_interleaved_packets_cross_between_the_same_workers() -> None:
    profile = Profile.uniform(8, 0.5, 1.0, wire_bytes=1000)
    timeline = simulate(Interleaved1F1B(2), profile, Network(1e6, 0.01), num_microbatches=8)
    check_timeline(timeline)
    messages = {(use.source, use.target): use.messages for use in wire_use(timeline)}
    assert messages == {(0, 1): 16, (1, 2): 16, (2, 3): 16, (3, 0): 8, (1, 0): 16, (2, 1): 16, (3, 2): 16, (0, 3): 8}
    general = simulate(Interleaved1F1B(2), profile, Network(1e6, 0.01), num_microbatches=8, placement=unshared(4))
    np.testing.assert_allclose(general.end_s, timeline.end_s, rtol=1e-9)


@settings(max_examples=15)
@given(st.integers(2, 5), st.integers(1, 7), st.integers(0, 10**6))
def test_both_kernels_agree_on_zero_bubble(p: int, m: int, seed: int) -> None:
    profile = random_profile(seed, p, m, call_s=0.1).split_backward(0.4)
    network = random_network(seed, p)
    fast, general = (simulate(ZBH1(), profile, network, placement=placed) for placed in (None, unshared(p)))
    np.testing.assert_allclose(general.end_s, fast.end_s, rtol=1e-9)
    check_timeline(fast)
    check_timeline(general)


def test_profile_without_weight_gradients_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^`profile` must hold costs of the weights' backward for ZBH1, .*split_backward"
    ):
        simulate(ZBH1(), Profile.uniform(2, 1.0, 2.0), FREE, num_microbatches=2)


def test_large_schedule_has_known_makespan() -> None:
    profile = Profile.uniform(128, 1.0, 2.0)
    assert step_seconds(OneFOneB(), profile, [FREE], num_microbatches=512)[0, 0] == 3 * (128 + 512 - 1)


@pytest.mark.parametrize(
    ("num_microbatches", "wire_bytes", "published_s", "ours_s", "two_directions_s"),
    [(64, 16_777_216, 100.475, 100.23, 89.41), (32, 5_275_648, 19.889, 19.58, 17.75)],
    ids=["dense", "subspace"],
)
def test_protocol_nanogpt(
    num_microbatches: int, wire_bytes: int, published_s: float, ours_s: float, two_directions_s: float
) -> None:
    """Published steps of Protocol NanoGPT (Pluralis 2026, `0551bc3`), from its rows and its link rule alone."""
    profile = Profile.uniform(8, 0.0, 0.0, wire_bytes=wire_bytes)
    links = [parse_network("200mbps+50ms/inbound"), parse_network("200mbps+50ms")]
    inbound, pair = step_seconds(OneFOneB(), profile, links, num_microbatches=num_microbatches)[:, 0]
    assert inbound == pytest.approx(ours_s, abs=0.005)
    assert -0.02 < inbound / published_s - 1 < 0
    assert pair == pytest.approx(two_directions_s, abs=0.006)


# Agreement.


@given(st.sampled_from(FAMILIES), st.integers(1, 6), st.integers(1, 7), st.integers(0, 10**6))
def test_kernel_equals_the_plain_rules(schedule: Schedule, p: int, m: int, seed: int) -> None:
    profile = random_profile(seed, p, m, message_s=0.01, byte_s=1e-5)
    network = random_network(seed, p)

    def cost(action: Action) -> float:
        key = (0, action.stage, "FB".index(action.op), action.microbatch)
        return float(profile.decode_s[key] + profile.compute_s[key] + profile.encode_s[key])

    def fly(action: Action) -> tuple[float, float]:
        return float(network.latencies_s(action.stage, target(action))), transfer(action)

    def target(action: Action) -> int:
        return action.stage + (1 if action.op == "F" else -1)

    def transfer(action: Action) -> float:
        size = profile.wire_bytes[0, action.stage, "FB".index(action.op), action.microbatch]
        return float(8 * size / network.bandwidths_bps(action.stage, target(action)))

    without_path = replace(profile, message_s=0.0, byte_s=0.0)
    timeline = simulate(schedule, without_path, network)
    assert timeline.pipeline_s == pytest.approx(reference(schedule.rows(p, m), p, cost, fly), rel=1e-12)
    check_timeline(timeline)
    check_timeline(simulate(schedule, profile, network))


@given(
    st.sampled_from(FAMILIES), st.integers(1, 6), st.integers(1, 7), st.integers(0, 10**6), st.booleans(), st.booleans()
)
@example(GPipe(), 1, 1, 7, False, False)  # whose last phase takes no time
def test_kernels_agree_without_shared_links(
    schedule: Schedule, p: int, m: int, seed: int, extras: bool, blocking: bool
) -> None:
    profile = random_profile(seed, p, m, call_s=0.05, message_s=0.02, byte_s=1e-5, blocking=blocking)
    network = random_network(seed, p)
    if extras:
        network = replace(network, burst_bytes=300.0, framing=1.05)
    fast = simulate(schedule, profile, network)
    general = simulate(schedule, profile, network, placement=unshared(p))
    assert general.pipeline_s == pytest.approx(fast.pipeline_s, rel=1e-9)
    for name in ("start_s", "end_s", "arrive_s"):
        np.testing.assert_allclose(getattr(general, name), getattr(fast, name), rtol=1e-9, atol=1e-9)
    for timeline in (general, fast):
        check_timeline(timeline)


def test_jitter_is_the_same_in_both_kernels_and_repeats() -> None:
    profile = random_profile(1, 4, 6)
    network = Network(8_000.0, 0.2, jitter_s=0.2)
    fast = simulate(OneFOneB(), profile, network, seed=3, num_replicas=2)
    general = simulate(OneFOneB(), profile, network, seed=3, placement=unshared(8))
    assert not np.array_equal(fast.arrive_s[0], fast.arrive_s[1], equal_nan=True)
    np.testing.assert_allclose(general.arrive_s, fast.arrive_s, rtol=1e-9)
    assert simulate(OneFOneB(), profile, network, seed=3, num_replicas=2).pipeline_s == fast.pipeline_s
    assert simulate(OneFOneB(), profile, network, seed=4, num_replicas=2).pipeline_s != fast.pipeline_s
    steady = simulate(OneFOneB(), profile, replace(network, jitter_s=0.0))
    extra = (fast.arrive_s - fast.begin_s) - (steady.arrive_s - steady.begin_s)
    assert np.nanmin(extra) >= -0.2
    assert np.nanstd(extra) > 0.01
    # A wire keeps the order of its packets.
    assert (np.diff(fast.arrive_s[0, :-1, 0], axis=-1) >= 0).all()


def test_many_networks_equal_one_at_a_time() -> None:
    profiles = [random_profile(seed, 4, 5) for seed in range(3)]
    networks = [Network(bandwidth) for bandwidth in np.geomspace(1e3, 1e5, 70)]
    networks += [random_network(1, 4), random_network(2, 8), random_network(3, 4, "port")]
    networks += [parse_network("10kbps+10ms/half"), parse_network("10kbps+10ms/inbound"), parse_network("10kbps/port")]
    networks += [Network(8_000.0, burst_bytes=200.0, latency_s=0.1, jitter_s=0.05), FREE]
    together = step_seconds(OneFOneB(), profiles, networks)
    assert together.shape == (78, 3)
    for row, network in enumerate(networks):
        for column, profile in enumerate(profiles):
            alone = simulate(OneFOneB(), profile, network, seed=column)
            assert together[row, column] == pytest.approx(alone.step_s, rel=1e-12)


# Bounds and monotony.


@settings(max_examples=30)
@given(
    st.sampled_from(FAMILIES),
    st.integers(2, 5),
    st.integers(1, 6),
    st.integers(0, 10**6),
    st.sampled_from(["pair", "port", "half", "inbound"]),
    st.booleans(),
)
def test_step_is_never_shorter_than_any_resource(
    schedule: Schedule, p: int, m: int, seed: int, sharing: str, asks: bool
) -> None:
    profile = random_profile(seed, p, m)
    if asks:
        profile = replace(profile, transport=asking_from(float(np.median(profile.wire_bytes))))
    network = replace(random_network(seed, p), sharing=sharing)
    timeline = simulate(schedule, profile, network)
    check_timeline(timeline)
    assert timeline.pipeline_s >= simulate(schedule, profile, FREE).pipeline_s - 1e-9
    sent = dict.fromkeys(range(p), 0.0)
    received = dict(sent)
    for use in wire_use(timeline):
        sent[use.source] += use.wire_bytes
        received[use.target] += use.wire_bytes
    out, into = network.ports_bps(p)
    for host in range(p):
        if sharing == "port":
            assert timeline.pipeline_s >= 8 * max(sent[host] / out[host], received[host] / into[host]) - 1e-9
        if sharing == "half":
            assert timeline.pipeline_s >= 8 * (sent[host] + received[host]) / out[host] - 1e-9


@given(
    st.sampled_from(FAMILIES),
    st.integers(2, 5),
    st.integers(1, 6),
    st.integers(0, 10**6),
    st.sampled_from(["pair", "inbound"]),
)
def test_a_better_network_or_fewer_bytes_never_take_longer(
    schedule: Schedule, p: int, m: int, seed: int, sharing: str
) -> None:
    random = np.random.default_rng(seed)
    profile = random_profile(seed, p, m)
    network = replace(random_network(seed, p), sharing=sharing, burst_bytes=100.0 if sharing == "pair" else 0.0)
    base = simulate(schedule, profile, network)

    def scaled(matrix: object, low: float, high: float) -> tuple[tuple[float, ...], ...]:
        return tuple(map(tuple, (np.array(matrix) * random.uniform(low, high, (p, p))).tolist()))

    faster = replace(network, bandwidth_bps=scaled(network.bandwidth_bps, 1, 3))
    nearer = replace(network, latency_s=scaled(network.latency_s, 0, 1))
    fewer = replace(profile, wire_bytes=np.floor(profile.wire_bytes * random.uniform(0, 1, profile.wire_bytes.shape)))
    bucket = replace(network, burst_bytes=300.0) if sharing == "pair" else network
    for better in (faster, nearer, bucket):
        assert (simulate(schedule, profile, better).end_s <= base.end_s + 1e-9).all()
    assert (simulate(schedule, fewer, network).end_s <= base.end_s + 1e-9).all()


@every_family
def test_no_bytes_on_a_free_network_leave_the_compute(schedule: Schedule) -> None:
    profile = random_profile(5, 4, 6)
    empty = replace(profile, wire_bytes=np.zeros(1))
    on_free = simulate(schedule, profile, FREE).pipeline_s
    assert simulate(schedule, empty, FREE).pipeline_s == on_free
    assert simulate(schedule, empty, Network(1e3)).pipeline_s == on_free


def test_doubled_bandwidth_halves_the_wire() -> None:
    profile = replace(random_profile(6, 4, 6), compute_s=np.zeros(1), decode_s=np.zeros(1), encode_s=np.zeros(1))
    slow, fast = step_seconds(OneFOneB(), profile, [Network(8e3), Network(16e3)])[:, 0]
    assert fast == slow / 2


def test_wire_bytes_equal_packet_bytes() -> None:
    profile = random_profile(7, 5, 6)
    timeline = simulate(OneFOneB(), profile, Network(8e3))
    packets = profile.wire_bytes[0, :-1, 0].sum() + profile.wire_bytes[0, 1:, 1].sum()
    assert sum(use.wire_bytes for use in wire_use(timeline)) == packets
    assert sum(use.messages for use in wire_use(timeline)) == 2 * 6 * 4


def test_more_microbatches_in_flight_hide_transfers() -> None:
    """In lockstep every hop's delay counts once per microbatch; with enough in flight ahead of the next stage, once a step."""
    profile = Profile.uniform(2, 1.0, 2.0)
    network = Network(math.inf, latency_s=3.0)
    ahead = [simulate(OneFOneB(ahead=n), profile, network, num_microbatches=16).step_s for n in (1, 2, 3, 4)]
    assert ahead == [99.0, 72.0, 57.0, 57.0]  # 57 = 3 (16 + 1) + 3 + 3: nothing is left to hide
    extra = [simulate(OneFOneB(n), profile, network, num_microbatches=16).step_s for n in (0, 1, 2, 3)]
    assert extra == [99.0, 99.0, 93.0, 93.0]  # of the same warm-up on every stage little hides a hop


# What costs where.


def test_codec_time_is_on_both_clocks() -> None:
    profile = Profile.uniform(2, 1.0, 2.0, encode_s=0.25, decode_s=0.5)
    timeline = simulate(GPipe(), profile, FREE, num_microbatches=1)
    assert timeline.step_s == 2 * (1 + 2) + 2 * (0.25 + 0.5)
    assert [worker.codec_s for worker in timeline.workers()] == [0.75, 0.75]


@pytest.mark.parametrize("sharing", ["pair", "port"])
def test_handover_is_charged_once_per_packet_to_sender(sharing: str) -> None:
    profile = Profile.uniform(3, 1.0, 2.0, call_s=0.5)
    timeline = simulate(OneFOneB(), profile, Network(math.inf, sharing=sharing), num_microbatches=4)
    assert [worker.overhead_s for worker in timeline.workers()] == [4 * 0.5, 8 * 0.5, 4 * 0.5]
    one = simulate(GPipe(), profile, Network(math.inf, sharing=sharing), num_microbatches=1)
    assert one.pipeline_s == 3 * (1 + 2) + 4 * 0.5
    check_timeline(one)


def test_packet_time_is_path_queue_wire_and_latency() -> None:
    profile = Profile.uniform(2, 1.0, 0.0, wire_bytes=1000, message_s=0.1, byte_s=1e-4)
    timeline = simulate(GPipe(), profile, Network(4_000.0, 0.3, framing=1.5), num_microbatches=2)
    np.testing.assert_allclose(timeline.begin_s[0, 0, 0], [1.2, 4.2])
    np.testing.assert_allclose(timeline.arrive_s[0, 0, 0], [4.5, 7.5])
    path = timeline.critical_path()
    assert [segment.kind for segment in path[:6]] == ["compute", "compute", "path", "queue", "bytes", "latency"]
    assert [segment.end_s for segment in path[2:6]] == pytest.approx([2.2, 4.2, 7.2, 7.5])


@settings(max_examples=25)
@given(
    st.sampled_from([GPipe(), OneFOneB(), ZBH1()]),
    st.sampled_from(["pair", "port", "half", "inbound"]),
    st.integers(2, 5),
    st.integers(1, 6),
    st.integers(0, 10**6),
)
def test_a_network_without_latency_or_limits_waits_for_bytes_or_latency_alone(
    schedule: Schedule, sharing: str, p: int, m: int, seed: int
) -> None:
    profile = Profile.mean_microbatch(random_profile(seed, p, m, message_s=0.1, byte_s=1e-4, transport=NCCL))
    profile = profile.split_backward(0.4) if schedule == ZBH1() else profile
    network = random_network(seed, p, sharing)
    for alone, causes, absent in (
        (network.without_latency, ("latency", "collective_latency"), "wait_latency_s"),
        (replace(network, bandwidth_bps=math.inf), ("queue", "bytes", "collective_bytes"), "wait_bytes_s"),
    ):
        timeline = simulate(schedule, profile, alone, num_microbatches=m, num_replicas=1)
        check_timeline(timeline)
        assert max(getattr(worker, absent) for worker in timeline.workers()) == pytest.approx(0, abs=1e-9)
        assert sum(timeline.explain().get(cause, 0.0) for cause in causes) == pytest.approx(0, abs=1e-9)


def test_messages_of_the_driver_pay_latency_on_the_critical_path() -> None:
    profile = Profile.uniform(2, 1.0, 1.0, transport=RAY, step_s=0.5)
    path = simulate(
        GPipe(), replace(profile, update_s=np.full(2, 0.25)), Network(math.inf, 0.1), num_microbatches=1
    ).explain()
    assert path == pytest.approx({"compute": 4.0, "latency": (2 + RAY.step_trips) * 0.1, "update": 0.25, "driver": 0.5})


@pytest.mark.parametrize("averaging", [Averaging("direct"), Averaging("ring", bucket_mib=0.1)], ids=repr)
def test_each_round_of_a_collective_ends_with_its_latency(averaging: Averaging) -> None:
    transport = replace(BARE, averaging=averaging)
    profile = Profile.uniform(1, 1.0, 1.0, gradient_bytes=np.full(1, 8e5), transport=transport)
    timeline = simulate(GPipe(), profile, Network(8e6, 0.25), num_microbatches=1, num_replicas=2)
    (exchange,) = timeline.collectives
    assert exchange.latency_s == pytest.approx([0.25 * exchange.collective.repeats] * 2)
    assert timeline.explain()["collective_latency"] == pytest.approx(sum(exchange.latency_s))
    assert timeline.explain()["collective_bytes"] == pytest.approx(0.8)
    check_timeline(timeline)


def test_token_bucket_lets_a_burst_through() -> None:
    """`tc tbf` at 100 Mbit/s with a burst of 128 kB: what is beyond the burst goes at the rate, and it fills up in a pause."""
    network = Network(100e6, burst_bytes=131_072, framing=1514 / 1448)
    profile = Profile.uniform(2, 0.0, 0.0, wire_bytes=1_048_576)
    sizes = 8 * (1_048_576 * 1514 / 1448 - 131_072) / 100e6
    one = simulate(GPipe(), profile, network, num_microbatches=1)
    assert one.arrive_s[0, 0, 0, 0] == pytest.approx(sizes)
    two = simulate(GPipe(), profile, network, num_microbatches=2)
    assert two.arrive_s[0, 0, 0, 1] == pytest.approx(sizes + 8 * 1_048_576 * 1514 / 1448 / 100e6)
    rested = simulate(GPipe(), replace(profile, compute_s=np.array(1.0)), network, num_microbatches=2)
    assert rested.arrive_s[0, 0, 0, 1] == pytest.approx(2.0 + sizes)


def test_a_host_sends_through_one_port() -> None:
    """Stage 1 of 3 sends forward and backward; with ports both share what it has, with half duplex arrivals do too."""
    profile = Profile.uniform(3, 0.0, 0.0, wire_bytes=1000)
    seconds = {
        sharing: simulate(
            OneFOneB(extra_warmup=9), profile, Network(8_000.0, sharing=sharing), num_microbatches=9
        ).step_s
        for sharing in ("pair", "port", "half")
    }
    assert seconds["pair"] == pytest.approx(9 + 1 + 9 + 1)
    assert seconds["pair"] <= seconds["port"] <= seconds["half"]
    assert seconds["half"] >= 36  # all 36 packets pass the middle host's port


def test_two_replicas_between_two_hosts_share_the_wire() -> None:
    profile = Profile.uniform(2, 1.0, 1.0, wire_bytes=1000)
    shared = simulate(GPipe(), profile, Network(8_000.0), num_microbatches=1, placement=Placement((0, 1, 0, 1)))
    assert shared.num_replicas == 2
    # Packets at second 1: one at a time, so the second is there at 3; its backward finds the wire free.
    assert sorted(shared.arrive_s[:, 0, 0, 0]) == [2.0, 3.0]
    assert shared.pipeline_s == 7.0
    apart = simulate(GPipe(), profile, Network(8_000.0), num_microbatches=1, num_replicas=2)
    assert apart.pipeline_s == 6.0


def asking_from(size: float, messages: int = 3) -> Transport:
    """Return a transport whose large packets make three messages: a call, the receiver's question, and the packet."""
    return Transport("asks", (Band(0, 0, 1), Band(size, 0, 3, messages)))


ASKS = asking_from(1000)


def test_control_messages_queue_behind_opposite_packets() -> None:
    """By hand: F0 crosses from 1 to 4, F1 from 4 to 7; B0 is made at 5, and the question for it goes behind F1."""
    profile = Profile.uniform(2, 1.0, 0.0, transport=ASKS)
    sizes = np.array([[3000.0, 0.0], [0.0, 1000.0]]).reshape(1, 2, 2, 1)
    timeline = simulate(OneFOneB(), replace(profile, wire_bytes=sizes), Network(8_000.0), num_microbatches=2)
    assert timeline.begin_s[0, 0, 0].tolist() == [1.0, 4.0]
    assert timeline.arrive_s[0, 0, 0].tolist() == [4.0, 7.0]
    assert timeline.begin_s[0, 1, 1].tolist() == [7.0, 8.0]
    assert timeline.step_s == 9.0
    assert sum(timeline.explain().values()) == pytest.approx(timeline.step_s)
    small = replace(profile, wire_bytes=sizes, transport=BARE)
    assert simulate(OneFOneB(), small, Network(8_000.0), num_microbatches=2).begin_s[0, 1, 1].tolist() == [5.0, 8.0]
    check_timeline(timeline)


@pytest.mark.parametrize("sharing", ["pair", "port", "half"])
def test_control_messages_cost_only_trips_on_idle_wires(sharing: str) -> None:
    profile = Profile.uniform(3, 1.0, 1.0, wire_bytes=1000)
    network = Network(8_000.0, 0.25, sharing=sharing)
    asks, apart = (
        simulate(GPipe(), replace(profile, transport=transport), network, num_microbatches=1)
        for transport in (ASKS, asking_from(1000, messages=1))
    )
    assert asks.step_s == pytest.approx(apart.step_s)
    assert asks.step_s == pytest.approx(6 + 4 * (1 + 3 * 0.25))
    np.testing.assert_allclose(asks.arrive_s, apart.arrive_s)
    many = step_seconds(GPipe(), replace(profile, transport=ASKS), [network, FREE], num_microbatches=1)
    assert many[:, 0] == pytest.approx([asks.step_s, 6.0])


def test_few_cores_are_shared_by_cpu_seconds() -> None:
    profile = Profile.uniform(2, 3.0, 3.0, cpu_s=np.full(1, 2.0))
    one_core = Placement((0, 1, 0, 1), cores=(1.0, 1.0))
    alone = simulate(GPipe(), profile, FREE, num_microbatches=1, placement=Placement((0, 1), cores=(1.0, 1.0)))
    assert alone.pipeline_s == 8.0  # four actions of two CPU seconds, whatever the wall said
    shared = simulate(GPipe(), profile, FREE, num_microbatches=1, placement=one_core)
    assert shared.pipeline_s == 16.0
    assert [worker.contention_s for worker in shared.workers()] == pytest.approx([4.0] * 4)
    threads = simulate(
        GPipe(), profile, FREE, num_microbatches=1, placement=replace(one_core, cores=(4.0, 4.0), threads=2)
    )
    assert threads.pipeline_s == 4.0
    tight = simulate(GPipe(), profile, FREE, num_microbatches=1, placement=replace(one_core, threads=2))
    assert tight.pipeline_s == 16.0  # more threads than cores: nothing is won
    check_timeline(tight)


def test_hosts_on_one_machine_share_its_cores_and_no_wires() -> None:
    profile = Profile.uniform(2, 3.0, 3.0, cpu_s=np.full(1, 2.0), wire_bytes=1000)
    network = Network(8_000.0)
    namespaces = Placement((0, 1, 2, 3), cores=(1.0,), machines=(0, 0, 0, 0))
    shared = simulate(GPipe(), profile, network, num_microbatches=1, placement=namespaces)
    # Two replicas at once on one core, each between hosts of its own: twice the CPU seconds, the wires as alone.
    assert shared.pipeline_s == 4 * 4.0 + 2 * 1.0
    with pytest.raises(ValueError, match=r"`machines` must be given for 4 hosts, but got 3 numbers\."):
        replace(namespaces, machines=(0, 0, 0))
    with pytest.raises(ValueError, match=r"`cores` must be given for 2 machines, but got 1 numbers\."):
        replace(namespaces, machines=(0, 0, 1, 1))


def test_side_bytes_take_wire_time() -> None:
    profile = Profile.uniform(2, 1.0, 1.0, wire_bytes=1000)
    beside = replace(profile, transport=replace(BARE, bands=(Band(0, 500, 1),)))
    network = Network(8_000.0)
    for sharing in ("pair", "port"):
        times = [
            simulate(GPipe(), one, replace(network, sharing=sharing), num_microbatches=1).pipeline_s
            for one in (profile, beside)
        ]
        assert times == [6.0, 7.0]
    sends = profile.wire_bytes > 0
    small, *_, stored = RAY.bands
    for size, expected in (
        (1_000, small.beside_bytes),
        (RAY.bands[1].from_bytes - 1, small.beside_bytes),
        (stored.from_bytes, stored.beside_bytes),
    ):
        of_ray = replace(profile, wire_bytes=size * sends, transport=RAY)  # type: ignore[arg-type]
        assert set((of_ray.moved_bytes - of_ray.wire_bytes)[sends]) == {expected}
        assert not of_ray.moved_bytes[~sends].any()


@pytest.mark.parametrize("sharing", ["pair", "inbound", "port"])
@pytest.mark.parametrize("trips", [1, 2, 7])
def test_packet_pays_latency_once_per_trip(sharing: str, trips: int) -> None:
    """In closed form on a pipeline of one microbatch, whose packets wait for one another; on every sharing of wires."""
    profile = Profile.uniform(3, 0.0, 0.0, wire_bytes=1000)
    over = replace(profile, transport=replace(BARE, bands=(Band(0, 0, trips),)))
    network = Network(8_000.0, 0.25, sharing=sharing)
    assert simulate(GPipe(), over, network, num_microbatches=1).pipeline_s == pytest.approx(4 * (1 + trips * 0.25))


def test_large_and_small_packets_have_own_trip_counts() -> None:
    sizes = Profile.uniform(2, 0.0, 0.0).wire_bytes.copy()
    sizes[0, 0, 0], sizes[0, 1, 1] = 999, 1000
    transport = Transport("steps", (Band(0, 1, 2), Band(1000, 0, 5)))
    profile = Profile(compute_s=np.zeros((1, 2, 2, 1)), wire_bytes=sizes, transport=transport)
    assert simulate(GPipe(), profile, Network(8_000.0, 0.1), num_microbatches=1).pipeline_s == pytest.approx(
        2 + 7 * 0.1
    )


@pytest.mark.parametrize("sharing", ["pair", "port"])
def test_step_end_pays_driver_trips_to_farthest_worker(sharing: str) -> None:
    latency_s = ((0, 0.1, 0.3), (0.1, 0, 0.1), (0.3, 0.1, 0))
    network = Network(math.inf, latency_s, sharing=sharing)
    profile = Profile.uniform(3, 1.0, 2.0, transport=replace(BARE, step_trips=2))
    for hosts, farthest_s in (((0, 1, 2), 0.3), ((1, 0, 2), 0.1)):  # the driver is beside the first worker
        placement = Placement(hosts)
        found = simulate(GPipe(), profile, network, num_microbatches=2, placement=placement)
        assert found.step_s == pytest.approx(found.pipeline_s + 2 * farthest_s)
        seconds = step_seconds(GPipe(), profile, [network], num_microbatches=2, placement=placement)
        assert seconds[0, 0] == pytest.approx(found.step_s)


def test_transports_are_ordered_as_their_trips_and_bytes_are() -> None:
    """A message over nccl never costs more than the same message over Ray; without latency and with large packets they are alike."""
    profile = random_profile(5, 4, 6)
    for text in ("100mbps+20ms", "1gbps", "10mbps/port"):
        network = parse_network(text)
        times = {
            name: simulate(OneFOneB(), replace(profile, transport=transport), network).step_s
            for name, transport in TRANSPORTS.items()
        }
        assert times["nccl"] <= times["gloo"] < times["ray"]
    huge = Profile.uniform(2, 0.0, 0.0, wire_bytes=1e9)
    times = [  # type: ignore[assignment]
        simulate(GPipe(), replace(huge, transport=one), parse_network("1gbps"), num_microbatches=1).step_s
        for one in (NCCL, RAY)
    ]
    assert times[0] == pytest.approx(times[1], rel=1e-5)  # type: ignore[index]


def test_work_of_shared_cores_is_conserved() -> None:
    profile = random_profile(3, 4, 6)
    packed = simulate(OneFOneB(), profile, FREE, placement=Placement((0,) * 4, cores=(2.0,)))
    work = float((profile.decode_s + profile.compute_s + profile.encode_s).sum())
    assert packed.pipeline_s >= work / 2
    assert packed.pipeline_s <= work
    check_timeline(packed)


def test_transfers_within_a_host_are_free() -> None:
    profile = Profile.uniform(4, 1.0, 2.0, wire_bytes=1000)
    timeline = simulate(OneFOneB(), profile, Network(8.0), num_microbatches=3, placement=Placement((0, 0, 0, 0)))
    assert timeline.pipeline_s == 18.0
    assert wire_use(timeline) == []
    halves = simulate(GPipe(), profile, Network(8_000.0), num_microbatches=1, placement=Placement((0, 0, 1, 1)))
    assert halves.pipeline_s == 12.0 + 2.0


def test_step_end_times() -> None:
    """Replicas average after the pipeline or as soon as a stage is done; when all are done every stage updates."""
    profile = Profile.uniform(
        2, 1.0, 2.0, gradient_bytes=np.array([8000.0, 4000.0]), update_s=np.array([0.5, 1.0]), step_s=0.25
    )
    network = Network(32_000.0)
    arguments = {"num_microbatches": 2, "num_replicas": 2}
    after = simulate(GPipe(), profile, network, **arguments)  # type: ignore[arg-type]
    assert after.pipeline_s == 9.0
    assert [one.end_s - one.start_s for one in after.collectives] == [2.0, 1.0]
    assert after.step_s == 9.0 + 2.0 + 1.0 + 0.25
    bucket = {"transport": replace(BARE, averaging=Averaging(bucket_mib=1.0)), "bucketed_bytes": np.ones(2)}
    during = simulate(GPipe(), replace(profile, **bucket), network, **arguments)  # type: ignore[arg-type]
    # Stage 1 is done at 7, and its average at 8; stage 0's at 9 + 2.
    assert [(one.start_s, one.end_s) for one in during.collectives] == [(9.0, 11.0), (7.0, 8.0)]
    assert during.step_s == 11.0 + 1.0 + 0.25
    late = replace(profile, gradient_bytes=np.array([0.0, 12000.0]))
    assert simulate(GPipe(), replace(late, **bucket), network, **arguments).step_s == 10.0 + 1.0 + 0.25  # type: ignore[arg-type]
    assert simulate(GPipe(), late, network, **arguments).step_s == 9.0 + 3.0 + 1.0 + 0.25  # type: ignore[arg-type]
    single = simulate(GPipe(), profile, network, num_microbatches=2)
    assert single.step_s == 9.0 + 1.0 + 0.25
    for timeline in (after, during, single):
        check_timeline(timeline)


def test_replicas_differ() -> None:
    slow = np.concatenate([np.ones((1, 2, 2, 1)), 2 * np.ones((1, 2, 2, 1))])
    timeline = simulate(GPipe(), Profile(compute_s=slow), FREE, num_microbatches=1)
    assert timeline.num_replicas == 2
    assert timeline.pipeline_s == 8.0
    assert [worker.bubble_s for worker in timeline.workers()] == [6.0, 6.0, 4.0, 4.0]
    check_timeline(timeline)


# Break-even.


def test_break_even_is_codec_time_equal_to_saved_wire_time() -> None:
    dense = Profile.uniform(2, 1.0, 2.0, wire_bytes=1_000_000)
    packed = Profile.uniform(2, 1.0, 2.0, wire_bytes=250_000, encode_s=0.01, decode_s=0.02)
    # Two packets on the path, each saving 750,000 bytes for 0.03 s.
    assert break_even_bps(GPipe(), packed, dense, Network(1e6), num_microbatches=1) == pytest.approx(
        8 * 750_000 / 0.03, rel=1e-5
    )
    assert break_even_bps(GPipe(), dense, packed, Network(1e6), num_microbatches=1) == math.inf
    smaller = Profile.uniform(2, 1.0, 2.0, wire_bytes=250_000)
    assert break_even_bps(GPipe(), smaller, dense, Network(1e6), num_microbatches=1) == math.inf
    assert break_even_bps(GPipe(), dense, smaller, Network(1e6), num_microbatches=1) == 0.0
    with pytest.raises(ValueError, match=r"^`network` must have one bandwidth for a break-even"):
        break_even_bps(GPipe(), packed, dense, random_network(1, 2))


# The bench.


@pytest.mark.parametrize("name", CASES)
def test_bench_cases_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"case": name} | measure(name, SMALL, 1)
    assert json.loads(json.dumps(result)) == result
    assert result["peak_bytes"] >= result["idle_bytes"] > 0
    print_table([result])
    assert f"{result['actions']:,}" in capsys.readouterr().out


# Refusals.


@dataclass(frozen=True, repr=False)
class Backwards(Schedule):
    """A schedule that waits for itself."""

    def ops(self, stage: int, num_stages: int, num_microbatches: int) -> str:
        """Return backward first on the first stage."""
        return "BF" if stage == 0 else "FB"


@pytest.mark.parametrize("placement", [None, unshared(2)], ids=["ordered", "shared"])
def test_deadlock_is_refused(placement: Placement | None) -> None:
    with pytest.raises(ValueError, match=r"^The schedule deadlocks: 0B0 waits for 0F0 and 1B0; 1F0 waits for 0F0\.$"):
        simulate(Backwards(), Profile.uniform(2, 1.0, 2.0), FREE, num_microbatches=1, placement=placement)


def test_wrong_sizes_are_refused() -> None:
    profile = random_profile(1, 4, 6)
    with pytest.raises(
        ValueError, match=r"^`num_microbatches` must be the profile's \(6\), but got 8\. Use `Profile.mean"
    ):
        simulate(OneFOneB(), profile, FREE, num_microbatches=8)
    with pytest.raises(
        ValueError, match=r"^`hosts` must name a host for each of 4 workers of every replica, but got 3 hosts\.$"
    ):
        simulate(OneFOneB(), profile, FREE, placement=Placement((0, 1, 2)))
    with pytest.raises(ValueError, match=r"^`hosts` must name workers of 2 replicas, but got 1\.$"):
        simulate(OneFOneB(), profile, FREE, placement=Placement((0, 1, 2, 3)), num_replicas=2)
    with pytest.raises(ValueError, match=r"^`num_replicas` must be an integer of at least 1, but got 0\.$"):
        simulate(OneFOneB(), profile, FREE, num_replicas=0)
    with pytest.raises(ValueError, match=r"^`hosts` must be below 3, the size of the network, but got 3\.$"):
        simulate(OneFOneB(), profile, random_network(1, 3), placement=Placement((0, 1, 2, 3)))
    with pytest.raises(ValueError, match=r'^`sharing` "inbound" needs one worker on each host'):
        simulate(OneFOneB(), profile, Network(1e6, sharing="inbound"), placement=Placement((0, 1, 1, 2)))
    with pytest.raises(ValueError, match=r"^`profiles` must be at least one, all of one shape, but got \[\]\.$"):
        step_seconds(OneFOneB(), [], [FREE])


def test_workers_are_spread_over_the_hosts_of_a_network() -> None:
    profile = Profile.uniform(4, 0.0, 0.0, wire_bytes=1_000_000)
    worldwide = simulate(GPipe(), profile, parse_network("worldwide"), num_microbatches=1)
    assert worldwide.placement.hosts == (0, 16, 32, 48)
    # Oregon, Ohio, Seoul, Frankfurt, there and back.
    expected = 2 * sum(ms / 1e3 + 8e6 / (gbps * 1e9) for ms, gbps in ((49, 1.10), (159, 0.529), (235, 0.358)))
    assert worldwide.pipeline_s == pytest.approx(expected)
