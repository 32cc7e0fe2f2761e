"""Laws of collectives: what ends a step takes as long as its transfers need on the hosts and wires that they share."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replica_variants import SHAPES, VARIANTS, Variant, context, gradients
from timelines import check_timeline

from raysim import train
from raysim.analysis import Replay
from raysim.network.collectives import (
    EXCHANGES,
    TRANSFER,
    Transfers,
    all_reduce,
    as_transfers,
    collectives,
    mean_transfers,
    spread_evenly,
)
from raysim.network.exchanges import all_reduce_s
from raysim.network.presets import parse_network
from raysim.network.profile import Profile
from raysim.network.rounds import round_seconds
from raysim.network.simulate import simulate, step_seconds
from raysim.network.timeline import Timeline
from raysim.network.timeline_views import wire_use
from raysim.network.topology import FREE, SHARING, Network, Placement
from raysim.network.transport import Averaging
from raysim.pipeline.groups import Group, average_together, exchange_together
from raysim.replication import parse_replica_method
from raysim.replication.method import RoundPackets, Rounds
from raysim.schedules.families import GPipe, Interleaved1F1B, OneFOneB, Schedule

LATENCY = 0.01
BPS = 1e8
MANY = 10**6  # more values than any packet here has


def end_of(transfers: Transfers, network: Network, num_replicas: int, num_stages: int = 1, **rest: object) -> Timeline:
    profile = Profile.uniform(num_stages, 0.0, 0.0, transfers=transfers)
    return simulate(GPipe(), profile, network, num_microbatches=1, num_replicas=num_replicas, **rest)  # type: ignore[arg-type]


def seconds_of(transfers: Transfers, network: Network, num_replicas: int) -> float:
    return end_of(transfers, network, num_replicas).collective_s


def transfers_of(
    notation: str, num_replicas: int, shapes: dict[str, tuple[int, ...]] = SHAPES, steps: int = 2
) -> Transfers:
    """Return what a method really sends in its last of a few steps."""
    method = parse_replica_method(notation)
    memories: list[dict] = [{}] * num_replicas
    for step in range(steps):
        given = [gradients(replica, step, shapes) for replica in range(num_replicas)]
        rounds = [
            method.average(
                given[replica], memories[replica], context(replica, num_replicas, step, parameters=given[replica])
            )
            for replica in range(num_replicas)
        ]
        members = tuple((replica, 0) for replica in range(num_replicas))
        group = Group(members, method.num_rounds(num_replicas))
        exchanges = exchange_together(group, rounds, method.table(shapes), num_values=MANY)
        memories = [one.result.memory for one in exchanges]
    return as_transfers(transfer for one in exchanges for transfer in one.account.transfers)


# Rounds.


def rounds_of(count: int) -> Rounds[int]:
    for _ in range(count):
        yield RoundPackets()
    return count


UNEVEN = [((2, 1), "equally many"), ((1, 2), "equally many"), ((9, 9), "more rounds than the 3")]


@pytest.mark.parametrize(("counts", "sentence"), UNEVEN)
def test_members_take_as_many_rounds_as_stated_and_as_each_other(counts: tuple[int, int], sentence: str) -> None:
    table, group = parse_replica_method("Identity").table(SHAPES), Group(((0, 0), (1, 0)), 3)
    with pytest.raises(AssertionError, match=sentence):
        exchange_together(group, [rounds_of(count) for count in counts], table, num_values=1)
    ended = exchange_together(group, [rounds_of(3), rounds_of(3)], table, num_values=1)
    assert [one.result for one in ended] == [3, 3]


# Closed forms.


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("num_replicas", [2, 3, 4, 7, 16])
def test_dense_average_has_ring_bytes_in_two_rounds(num_replicas: int, sharing: str) -> None:
    """2 (D - 1) / D S / W; twice that where a port carries both ways. A receiver that is served in turn waits for each latency."""
    profile = Profile.uniform(1, 0.0, 0.0, gradient_bytes=np.full(1, 1e6))
    ring = all_reduce_s(1e6, range(num_replicas), Network(BPS))
    waits = 2 * (num_replicas - 1) if sharing == "inbound" else 2
    for latency in (0.0, LATENCY):
        network = Network(BPS, latency, sharing=sharing)
        found = simulate(GPipe(), profile, network, num_microbatches=1, num_replicas=num_replicas).step_s
        assert found == pytest.approx((2 if sharing == "half" else 1) * ring + waits * latency)


@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_recursive_doubling_takes_one_message_a_round(num_replicas: int) -> None:
    transfers = transfers_of("GTopK(0.05, min_values=1)", num_replicas, {"first.weight": (40, 30)})
    turns = int(math.log2(num_replicas))
    network = Network(BPS, LATENCY)
    expected = 0.0
    for turn in range(turns):
        sent = transfers[transfers["round"] == turn]
        assert sorted(sent["source_replica"]) == sorted(sent["target_replica"]) == list(range(num_replicas))
        assert (sent["source_replica"] ^ sent["target_replica"] == 1 << turn).all()
        expected += LATENCY + 8 * sent["wire_bytes"].max() / BPS
    assert transfers["round"].max() == turns - 1
    assert seconds_of(transfers, network, num_replicas) == pytest.approx(expected)


@pytest.mark.parametrize(("num_replicas", "most"), [(3, 2), (5, 4), (7, 2)])
def test_recursive_doubling_sends_more_if_partners_are_missing(num_replicas: int, most: int) -> None:
    transfers = transfers_of("GTopK(0.05, min_values=1)", num_replicas, {"first.weight": (40, 30)})
    expected, counts = 0.0, []
    for turn in range((num_replicas - 1).bit_length()):
        sent = transfers[transfers["round"] == turn]
        out = np.bincount(sent["source_replica"], sent["wire_bytes"])
        into = np.bincount(sent["target_replica"], sent["wire_bytes"])
        expected += LATENCY + 8 * max(out.max(), into.max()) / BPS
        counts.append(int(np.bincount(sent["source_replica"]).max()))
    assert max(counts) == most
    assert seconds_of(transfers, Network(BPS, LATENCY), num_replicas) == pytest.approx(expected)


@pytest.mark.parametrize("num_replicas", [2, 3, 4, 7, 8])
def test_gossip_sends_to_two_neighbours(num_replicas: int) -> None:
    """Rank 1 of a 40 x 30 matrix: a side of 40 or 30 values to each neighbour, however many replicas there are."""
    transfers = transfers_of("PowerGossip(min_values=1)", num_replicas, {"first.weight": (40, 30)})
    each = {float(size) for size in transfers["wire_bytes"]}
    assert len(each) == 1
    neighbours = min(2, num_replicas - 1)
    assert len(transfers) == neighbours * num_replicas
    expected = LATENCY + neighbours * 8 * each.pop() / BPS
    assert seconds_of(transfers, Network(BPS, LATENCY), num_replicas) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", [OneFOneB(), Interleaved1F1B(2)], ids=repr)
def test_worker_bytes_are_independent_of_stage_count(schedule: Schedule) -> None:
    """25 MB a worker at 100 Mbit/s on two replicas: 2 s, as one stage or as two."""
    stages = 2 * (2 if isinstance(schedule, Interleaved1F1B) else 1)
    profile = Profile.uniform(stages, 0.0, 0.0, gradient_bytes=np.full(stages, 50e6 / stages))
    network = Network(100e6)
    timeline = simulate(schedule, profile, network, num_microbatches=2, num_replicas=2)
    assert timeline.step_s == pytest.approx(2.0)
    during = simulate(schedule, in_buckets(profile), network, num_microbatches=2, num_replicas=2)
    assert during.step_s == pytest.approx(2.0)


def test_compute_of_stages_on_one_host_adds_up() -> None:
    profile = Profile.uniform(4, 0.0, 0.0, gradient_bytes=np.full(4, 12.5e6))
    network = Network(100e6)
    apart = simulate(OneFOneB(), profile, network, num_microbatches=2, num_replicas=2)
    packed = simulate(OneFOneB(), profile, network, num_microbatches=2, placement=Placement((0, 0, 0, 0, 1, 1, 1, 1)))
    assert (apart.step_s, packed.step_s) == pytest.approx((1.0, 4.0))
    assert (len(apart.collectives), len(packed.collectives)) == (4, 1)
    within = simulate(OneFOneB(), profile, network, num_microbatches=2, placement=Placement((0,) * 8))
    assert within.step_s == 0.0
    assert wire_use(within) == []


def test_codecs_of_a_worker_add_up_over_its_stages_and_the_slowest_worker_counts() -> None:
    """Stages 0 and 2 are on one worker, 1 and 3 on another; both on one host, so that their averages are one collective."""
    profile = Profile.uniform(4, 0.0, 0.0, gradient_bytes=np.full(4, 1e6), method_s=np.array([1.0, 2.0, 3.0, 4.0]))
    hosts = Placement((0, 0, 1, 1))
    (one,) = simulate(Interleaved1F1B(2), profile, Network(8e6), num_microbatches=2, placement=hosts).collectives
    assert one.codec_s == 2.0 + 4.0
    assert one.end_s - one.start_s == pytest.approx(6.0 + 4 * 1.0)


def test_compressed_gradients_use_buckets_if_supported() -> None:
    transfers = all_reduce(EXCHANGES[0], 0, [(0, 0), (1, 0)], [5e5, 5e5])
    profile = in_buckets(Profile.uniform(1, 1.0, 2.0, transfers=transfers), num_buckets=4)
    (one,) = simulate(GPipe(), profile, Network(8e6), num_microbatches=1, num_replicas=2).collectives
    assert (one.collective.num_buckets, one.start_s, one.end_s) == (4, 1.5, 3.25)


def test_round_is_bounded_by_slow_pair_then_fast_port() -> None:
    fast, slow = 1e9, 1e7
    matrix = tuple(tuple(slow if {i, j} == {0, 2} else fast for j in range(3)) for i in range(3))
    transfers = all_reduce(EXCHANGES[0], 0, [(replica, 0) for replica in range(3)], [1e6] * 3)
    assert seconds_of(transfers, Network(matrix), 3) == pytest.approx(2 * 8e6 / slow)
    without = transfers[(transfers["source_replica"] == 1) | (transfers["target_replica"] == 1)]
    assert seconds_of(without, Network(matrix), 3) == pytest.approx(2 * 2 * 8e6 / fast)
    narrow = Network(fast, sharing="port", port_bps=slow)
    assert seconds_of(transfers, narrow, 3) == pytest.approx(2 * 2 * 8e6 / slow)


def test_owners_of_tied_parameters_follow_the_averages() -> None:
    averages = [all_reduce(EXCHANGES[0], stage, [(0, stage), (1, stage)], [1e6] * 2) for stage in range(3)]
    sums = [all_reduce(EXCHANGES[1], 0, [(replica, 0), (replica, 2)], [1e6] * 2) for replica in range(2)]
    network = Network(8e6, LATENCY)
    timeline = end_of(np.concatenate([*averages, *sums]), network, 2, 3)
    assert timeline.collective_s == pytest.approx(2 * (2 * 1.0 + 2 * LATENCY))
    assert [one.collective.direction for one in timeline.collectives] == [*[EXCHANGES[0]] * 3, *[EXCHANGES[1]] * 1]


# Monotonicity.


@given(st.integers(2, 8), st.integers(1, 3), st.integers(0, 10**6), st.sampled_from(SHARING))
def test_more_load_is_never_faster(num_replicas: int, num_stages: int, seed: int, sharing: str) -> None:
    random = np.random.default_rng(seed)
    network = Network(BPS, float(random.uniform(0, 0.1)), sharing=sharing)
    sizes = random.uniform(0, 1e7, num_stages)
    profile = Profile.uniform(num_stages, 0.0, 0.0, gradient_bytes=sizes)

    def seconds(one: Profile, count: int, hosts: Placement | None = None) -> float:
        timeline = simulate(GPipe(), one, network, num_microbatches=1, num_replicas=count, placement=hosts)
        return timeline.collective_s

    usual = seconds(profile, num_replicas)
    assert seconds(profile, num_replicas + 1) >= usual * (1 - 1e-12)
    grown = sizes * random.uniform(1, 2, num_stages)
    assert seconds(replace(profile, gradient_bytes=grown), num_replicas) >= usual * (1 - 1e-12)
    if sharing != "inbound":  # which has one worker on each host
        shared = Placement(tuple(worker // num_stages for worker in range(num_replicas * num_stages)))
        assert seconds(profile, num_replicas, shared) >= usual * (1 - 1e-12)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from(["pair", "port", "half"]))
def test_round_time_lies_between_busiest_port_and_serial_messages(
    num_replicas: int, num_stages: int, seed: int, sharing: str
) -> None:
    transfers = random_transfers(num_replicas, num_stages, seed)
    network = Network(BPS, sharing=sharing)
    hosts = np.random.default_rng(seed).integers(0, num_replicas, (num_replicas, num_stages))
    for one in collectives(transfers, hosts):
        for times, each in one.rounds:
            assert times == 1
            bits = 8 * each.wire_bytes
            ends = (each.source, each.target)
            port = max(bits[end == host].sum() for end in ends for host in range(num_replicas)) if len(bits) else 0.0
            assert port / BPS - 1e-9 <= round_seconds(each, [network])[0] <= bits.sum() / BPS + 1e-9


def in_buckets(profile: Profile, num_buckets: int = 1) -> Profile:
    """Return a profile whose stages average in buckets during their last backward."""
    averaging = Averaging(bucket_mib=1.0)
    return replace(
        profile,
        transport=replace(profile.transport, averaging=averaging),
        bucketed_bytes=np.full(1, num_buckets * 2.0**20),
    )


def random_transfers(num_replicas: int, num_stages: int, seed: int) -> Transfers:
    random = np.random.default_rng(seed)
    found = []
    for _ in range(12):
        stage = int(random.integers(num_stages))
        ends = random.choice(num_replicas, 2, replace=False)
        found.append(
            (EXCHANGES[0], stage, int(random.integers(3)), ends[0], stage, ends[1], stage, random.uniform(0, 1e6))
        )
    return as_transfers(found)


# Timelines.


@given(st.integers(2, 4), st.integers(1, 4), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_collectives_are_part_of_the_step(
    num_replicas: int, num_stages: int, seed: int, overlap: bool, packed: bool
) -> None:
    random = np.random.default_rng(seed)
    transfers = random_transfers(num_replicas, num_stages, seed)
    profile = Profile.uniform(
        num_stages, 0.1, 0.2, wire_bytes=1e5, transfers=transfers, method_s=random.uniform(0, 0.1, num_stages)
    )
    workers = num_replicas * num_stages
    placement = Placement(tuple(worker // num_stages if packed else worker for worker in range(workers)))
    network = Network(BPS, LATENCY)
    profile = in_buckets(profile) if overlap else profile
    timeline = simulate(OneFOneB(), profile, network, num_microbatches=2, placement=placement)
    check_timeline(timeline)
    assert step_seconds(OneFOneB(), profile, [network], num_microbatches=2, placement=placement)[0, 0] == pytest.approx(
        timeline.step_s
    )
    across = [
        m
        for m in transfers
        if placement.hosts[m["source_replica"] * num_stages + m["source_stage"]]
        != (placement.hosts[m["target_replica"] * num_stages + m["target_stage"]])
    ]
    without = simulate(
        OneFOneB(), replace(profile, transfers=transfers[:0]), network, num_microbatches=2, placement=placement
    )
    carried = sum(use.wire_bytes for use in wire_use(timeline)) - sum(use.wire_bytes for use in wire_use(without))
    assert carried == pytest.approx(sum(transfer["wire_bytes"] for transfer in across))
    for one in timeline.collectives:
        assert one.end_s - one.start_s == pytest.approx(one.codec_s + sum(one.round_s))


@pytest.mark.slow
@given(st.integers(2, 3), st.integers(1, 3), st.integers(0, 10**6), st.booleans())
def test_steps_priced_together_take_as_long_as_alone(
    num_replicas: int, num_stages: int, seed: int, packed: bool
) -> None:
    """With equal or different messages, codecs, compute and buckets."""
    random = np.random.default_rng(seed)

    def seconds() -> np.ndarray:
        return random.uniform(0.1, 1.0, num_stages)

    steps = [
        Profile.uniform(
            num_stages, seconds(), seconds(), transfers=transfers, method_s=seconds(), update_s=seconds(), step_s=0.1
        )
        for transfers in (random_transfers(num_replicas, num_stages, seed + i) for i in range(2))
        for _ in range(2)
    ]
    steps = [
        *steps,
        *(in_buckets(step, num_buckets=4) for step in steps),
        replace(steps[0], method_s=np.zeros(num_stages)),
    ]
    networks = [Network(BPS, LATENCY), Network(BPS / 10), FREE]
    workers = num_replicas * num_stages
    placement = Placement(tuple(worker // num_stages if packed else worker for worker in range(workers)))
    priced = partial(step_seconds, OneFOneB(), networks=networks, num_microbatches=2, placement=placement)  # type: ignore[arg-type]
    alone = np.concatenate([priced(step) for step in steps], axis=1)
    assert len(np.unique(alone[0, :4])) == 4
    np.testing.assert_array_equal(priced(steps), alone)


def test_overlapping_groups_run_in_sequence() -> None:
    profile = Profile.uniform(2, 1.0, 1.0, gradient_bytes=np.full(2, 1e6))
    shared = Placement((0, 0, 1, 1))
    timeline = simulate(GPipe(), in_buckets(profile), Network(8e6), num_microbatches=1, placement=shared)
    last, first = timeline.collectives
    assert first.start_s == 3.0  # stage 1 is done one backward before stage 0
    assert (first.end_s, last.start_s, last.end_s) == (4.0, 4.0, 5.0)
    check_timeline(timeline)


# Transfers as data.


def test_means_keep_bytes_and_rounds() -> None:
    steps = [random_transfers(3, 2, seed) for seed in range(3)]
    mean = mean_transfers(steps)
    assert mean["wire_bytes"].sum() == pytest.approx(sum(step["wire_bytes"].sum() for step in steps) / 3)
    assert len(np.unique(mean[list(TRANSFER.names or ())[:-1]])) == len(mean)
    assert mean_transfers([]).dtype == TRANSFER
    total = spread_evenly(EXCHANGES[0], 0, [(0, 0), (1, 0), (2, 0)], 6e6, 2)
    assert (len(total), total["wire_bytes"].sum()) == (12, pytest.approx(18e6))


def test_transfers_of_missing_replicas_are_refused() -> None:
    transfers = all_reduce(EXCHANGES[0], 0, [(0, 0), (3, 0)], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"^`transfers` must be between 2 replicas, but got replica 3\.$"):
        end_of(transfers, Network(BPS), 2)


# Records.


EACH_CLASS = {type(variant.method): variant for variant in VARIANTS}.values()


@pytest.mark.parametrize("variant", EACH_CLASS, ids=lambda variant: variant.notation)
def test_messages_add_up_to_the_bytes_that_each_replica_sends(variant: Variant) -> None:
    method, count = variant.method, 3
    memories: list[list[dict]] = [[{}] * count, [{}] * count]
    before = [gradients(replica, 0) for replica in range(count)]
    for step in range(2):
        given = [gradients(replica, step) for replica in range(count)]
        contexts = [
            context(replica, count, step, extra=before[replica], parameters=given[replica]) for replica in range(count)
        ]
        results, sent = average_together(method, given, memories[0], contexts)
        rounds = [method.average(*each) for each in zip(given, memories[1], contexts, strict=True)]
        members = tuple((replica, 0) for replica in range(count))
        group = Group(members, method.num_rounds(count))
        exchanges = exchange_together(group, rounds, method.table(SHAPES), num_values=MANY)
        assert [sum(transfer.wire_bytes for transfer in one.account.transfers) for one in exchanges] == sent
        for me, one in enumerate(exchanges):
            assert all(transfer.source_replica == me != transfer.target_replica for transfer in one.account.transfers)
            assert all(transfer.round < one.account.num_rounds for transfer in one.account.transfers)
        memories = [[one.memory for one in results], [one.result.memory for one in exchanges]]
        before = given


@pytest.mark.parametrize(
    "changes",
    [
        {"replica_gradient": "GTopK(0.1, min_values=16)", "num_replicas": 4, "num_microbatches": 1},
        {"schedule": "Interleaved1F1B(2)", "num_stages": 4},
    ],
    ids=["gtopk", "interleaved"],
)
def test_recorded_messages_add_up_to_the_links_and_are_priced(small, tmp_path, changes) -> None:  # type: ignore[no-untyped-def]
    config = small(**{"num_replicas": 2, "num_microbatches": 2, "steps": 4, **changes})
    run = train(config, engine="inline", out=tmp_path / "run")
    links = run.links[run.links["direction"].isin(EXCHANGES)]
    sent = run.collectives.groupby(["step", "source_replica", "source_stage"])["wire_bytes"].sum()
    assert sorted(run.collectives["step"].unique()) == [1, 2, 3]
    for (step, replica, stage), size in sent.items():
        chosen = links[(links["step"] == step) & (links["replica"] == replica) & (links["stage"] == stage)]
        assert chosen["wire_bytes"].sum() == size
    assert sent.sum() == links[links["step"].isin([1, 2, 3])]["wire_bytes"].sum()
    network = parse_network("10mbps")
    replayed = Replay(run)
    assert replayed.step_seconds([network])[0] == pytest.approx([one.step_s for one in replayed.timelines(network)])
    assert "by the transfers recorded" in " ".join(replayed.notes)
    (tmp_path / "run" / "collectives.parquet").unlink()
    old = Replay(run.folder)
    assert "spread evenly" in " ".join(old.notes)
    if "replica_gradient" not in changes:  # whose averages are even
        assert old.step_seconds([network]) == pytest.approx(replayed.step_seconds([network]), rel=1e-3)
