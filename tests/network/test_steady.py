"""Laws of the time of steps without a flush."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from timelines import check_timeline

from raysim.network.collectives import all_reduce
from raysim.network.presets import parse_network
from raysim.network.profile import Profile
from raysim.network.simulate import simulate, step_seconds
from raysim.network.timeline_views import trace_events
from raysim.network.topology import Network
from raysim.schedules import ZB, ZBH1, ZBH2, ZBV, DualPipeV, Interleaved1F1B, OneFOneB, PostValidatedSteps, Unflushed
from raysim.schedules.actions import dependency

FREE = parse_network("free")
SCHEDULES = [OneFOneB(), OneFOneB(extra_warmup=1), OneFOneB(ahead=2)]


def random_profile(p: int, m: int, seed: int, **rest) -> Profile:
    random = np.random.default_rng(seed)
    wide = random.random() < 0.5

    def draw():
        return random.uniform(0.1, 2.0, (1, p, 2, m if wide else 1))

    return Profile(
        compute_s=draw(),
        encode_s=0.1 * draw(),
        decode_s=0.1 * draw(),
        wire_bytes=1e6 * draw(),
        update_s=random.uniform(0, 0.5, p),
        **rest,
    )


def plain_step_s(schedule: OneFOneB, profile: Profile, network: Network, m: int, steps: int) -> float:
    """Return the mean time between the ends of steps, by the rules of the simulator in plain Python: one wire a direction."""
    p = profile.num_stages
    free, ends, arrivals, wires = [0.0] * p, {}, {}, {}
    rows = [list(row) for row in schedule.rows(p, steps * m)]

    def cost(name, action):
        microbatch = action.microbatch % profile.compute_s.shape[3]
        return float(getattr(profile, name)[0, action.stage, "FB".index(action.op), microbatch])

    while any(rows):
        for stage, row in enumerate(rows):
            while row:
                action = row[0]
                source = dependency(action, p)
                if source is not None and source not in arrivals:
                    break
                start = max(free[stage], arrivals.get(source, 0.0))
                busy = cost("decode_s", action) + cost("compute_s", action) + cost("encode_s", action)
                if action.op == "B" and action.microbatch % m == m - 1:
                    busy += float(profile.update_s[stage])
                ends[action] = free[stage] = start + busy
                way = (stage, action.op)
                begin = max(free[stage], wires.get(way, 0.0))
                wires[way] = begin + 8 * network.framing * cost("wire_bytes", action) / network.bandwidth_bps
                arrivals[action] = wires[way] + network.latency_s
                row.pop(0)

    def last(step):
        return max(end for action, end in ends.items() if action.op == "B" and action.microbatch // m == step)

    ahead = 2 * schedule.ops(0, p, 10**3).index("B") // m + 1  # no forwards are left there
    return (last(steps - 1 - ahead) - last(steps // 2)) / (steps - 1 - ahead - steps // 2)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (3, 4), (4, 3), (5, 8)])
@pytest.mark.parametrize("network", ["free", "10mbps+300ms"])
def test_step_is_mean_of_consecutive_steps(schedule, p, m, network) -> None:
    profile, chosen = random_profile(p, m, seed=p + m), parse_network(network)
    found = simulate(Unflushed(schedule), profile, chosen, num_microbatches=m)
    steps = 12 * (p + 2)
    assert found.step_s == pytest.approx(plain_step_s(schedule, profile, chosen, m, steps), rel=2e-2)
    check_timeline(found)


@settings(max_examples=60)
@given(
    p=st.integers(1, 5),
    m=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    bandwidth=st.floats(1e6, 1e10),
    latency=st.floats(0, 3),
    schedule=st.sampled_from([OneFOneB(), OneFOneB(ahead=2)]),
)
@example(3, 1, 1, 1e9, 0.0, OneFOneB(ahead=2))  # a queue drains over more steps than are simulated
@example(3, 1, 76441, 1e6, 0.0, OneFOneB(ahead=2))  # the same, behind the busiest wire
def test_a_step_without_a_flush_never_takes_longer_than_with_one(p, m, seed, bandwidth, latency, schedule) -> None:
    profile, network = random_profile(p, m, seed), Network(bandwidth, latency)
    flushed = simulate(schedule, profile, network, num_microbatches=m).step_s
    timeline = simulate(Unflushed(schedule), profile, network, num_microbatches=m)
    alike = (
        profile.num_microbatches is None
    )  # else a forward may rarely come in the way of a backward, as in any list schedule
    assert timeline.step_s <= flushed * (1 + 1e-9 if alike else 1.02)
    busiest = max(worker.compute_s + worker.codec_s for worker in timeline.workers())
    assert timeline.step_s >= busiest * (1 - 1e-9)
    assert step_seconds(Unflushed(schedule), profile, [network], num_microbatches=m)[0, 0] == timeline.step_s
    check_timeline(timeline)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize(("p", "m"), [(2, 2), (4, 4), (4, 9)])
def test_free_network_leaves_time_of_busiest_stage(schedule, p, m) -> None:
    """All microbatches of a stage alike, the last stage's work the greatest: it never waits."""
    compute = np.array([[1.0, 2.0 + (stage == p - 1)] for stage in range(p)]).reshape(1, p, 2, 1)
    profile = Profile(compute_s=compute, update_s=np.arange(p) / 4)
    found = simulate(Unflushed(schedule), profile, FREE, num_microbatches=m)
    assert found.step_s == pytest.approx(m * 4.0 + (p - 1) / 4, rel=1e-12)


def test_equal_stages_have_no_bubble() -> None:
    profile = Profile.uniform(num_stages=4, forward_s=1.0, backward_s=2.0)
    flushed, found = (simulate(one, profile, FREE, num_microbatches=8) for one in (OneFOneB(), Unflushed(OneFOneB())))
    assert (flushed.step_s, found.step_s) == (33.0, 24.0)
    assert flushed.bubble == pytest.approx(3 / 11)
    assert found.bubble == 0.0


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 9), (3, 3), (4, 5), (4, 7)])
@pytest.mark.parametrize("extra", [0, 1])
def test_latency_bound_step_counts_microbatches_in_flight(p, m, extra) -> None:
    """A microbatch goes to the last stage and back while p of them are in flight: so many pass in the time of one trip.

    More forwards in the warm-up do not help: the last stage puts off each backward for forwards that are under way. With a flush
    the last microbatches need not wait, so here a step with one may be shorter.
    """
    profile = Profile.uniform(num_stages=p, forward_s=1.0, backward_s=2.0)
    schedule = Unflushed(OneFOneB(extra_warmup=extra))
    found = simulate(schedule, profile, Network(1e12, 100.0), num_microbatches=m)
    assert found.step_s == pytest.approx(m * (3 * p + 200 * (p - 1)) / p, rel=1e-9)


def test_replicas_wait_for_their_averages() -> None:
    transfers = all_reduce("replica_gradient", 0, [(0, 0), (1, 0)], [125_000.0] * 2)
    profile = Profile.uniform(num_stages=2, forward_s=1.0, backward_s=2.0, transfers=transfers)
    found = simulate(Unflushed(OneFOneB()), profile, Network(1e6), num_microbatches=4, num_replicas=2)
    assert found.pipeline_s == 12.0
    assert found.step_s == pytest.approx(12.0 + 2 * 8 * found.network.framing * 125_000 / 1e6)
    check_timeline(found)


def test_shared_wires_and_jitter_take_the_mean_of_many_steps() -> None:
    profile = Profile.uniform(num_stages=3, forward_s=1.0, backward_s=2.0, wire_bytes=1e5)
    for network in (Network(1e6, sharing="port"), Network(1e6, 0.1, jitter_s=0.05)):
        flushed, found = (
            simulate(one, profile, network, num_microbatches=4) for one in (OneFOneB(), Unflushed(OneFOneB()))
        )
        assert 12.0 <= found.step_s <= flushed.step_s
        assert step_seconds(Unflushed(OneFOneB()), profile, [network], num_microbatches=4)[0, 0] == found.step_s


def test_the_trace_of_a_step_shows_all_workers_at_work() -> None:
    """Equal stages on a free network: from the start of the step to its end there is no gap on any of them."""
    profile = Profile.uniform(num_stages=4, forward_s=1.0, backward_s=2.0)
    found = simulate(Unflushed(OneFOneB()), profile, FREE, num_microbatches=4)
    events = [event for event in trace_events(found) if event.get("cat") == "action"]
    assert min(event["ts"] for event in events) == 0.0
    for worker in range(4):
        spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in events if event["tid"] == worker)
        inside = sum(min(end, found.step_s * 1e6) - start for start, end in spans)
        assert inside == pytest.approx(found.step_s * 1e6)


def test_the_trace_leaves_out_a_replica_that_is_steps_ahead() -> None:
    """Replicas are simulated separately: the fast one has ended its steps before the slow one begins the priced one."""
    compute = np.stack([np.full((2, 2, 4), seconds) for seconds in (1.0, 10.0)])
    timeline = simulate(Unflushed(OneFOneB()), Profile(compute_s=compute), FREE)
    at_work = {event["pid"] for event in trace_events(timeline) if event.get("cat") == "action"}
    assert at_work == {1}


# Post-validated steps.


def plain_ends(schedule, profile: Profile, network: Network, p: int, m: int, steps: int) -> list[float]:
    """Return the ends of steps, whose rows follow each other at every worker, by the simulator's rules in plain Python."""
    free, arrivals, wires, ends = {}, {}, {}, [0.0] * steps
    owners = schedule.workers(p)
    rows = [[(step, action) for step in range(steps) for action in row] for row in schedule.rows(p, m)]
    last = {
        (stage, step): index for row in rows for index, (step, action) in enumerate(row) for stage in [action.stage]
    }

    def cost(name, action):
        return float(getattr(profile, name)[0, action.stage, "FBW".index(action.op), 0])

    heads = [0] * len(rows)
    while any(head < len(row) for head, row in zip(heads, rows, strict=True)):
        for worker, row in enumerate(rows):
            while heads[worker] < len(row):
                step, action = row[heads[worker]]
                source = dependency(action, p)
                if source is not None and (step, source) not in arrivals:
                    break
                busy = cost("compute_s", action)
                if last[action.stage, step] == heads[worker]:
                    busy += float(profile.update_s[action.stage])
                end = max(free.get(worker, 0.0), arrivals.get((step, source), 0.0)) + busy
                free[worker], ends[step] = end, max(ends[step], end)
                heads[worker] += 1
                target = action.stage + {"F": 1, "B": -1, "W": p}[action.op]
                if not 0 <= target < p:
                    continue
                if owners[target] == worker:
                    arrivals[step, action] = end
                    continue
                way = (worker, owners[target])
                begin = max(end, wires.get(way, 0.0))
                wires[way] = begin + 8 * network.framing * cost("wire_bytes", action) / network.bandwidth_bps
                arrivals[step, action] = wires[way] + network.latency_s
    return ends


@pytest.mark.parametrize(
    ("schedule", "p", "m"),
    [
        (OneFOneB(), 3, 4),
        (ZBH1(), 3, 5),
        (ZBH2(), 4, 8),
        (ZBV(), 6, 7),
        (DualPipeV(), 4, 6),
        (Interleaved1F1B(2), 4, 4),
    ],
    ids=repr,
)
@pytest.mark.parametrize("network", ["free", "10mbps+100ms"])
def test_post_validated_steps_are_concatenated_rows(schedule, p, m, network) -> None:
    random, chosen = np.random.default_rng(p * m), parse_network(network)
    two = isinstance(schedule, (OneFOneB, Interleaved1F1B))
    shape = (1, p, 2 if two else 3, 1)
    profile = Profile(
        compute_s=random.uniform(0.5, 1.0, shape),
        wire_bytes=random.uniform(0, 2e5, shape),
        update_s=random.uniform(0, 0.5, p),
    )
    if isinstance(schedule, DualPipeV):  # of whole backwards, the weights' part counts too
        joined = [action for row in schedule.rows(p, m) for action in row]
        split = {(a.stage, a.microbatch) for a in joined if a.op == "W"}
        assert 0 < len(split) < p * m
        profile = Profile.uniform(p, 1.0, 1.0, weight_s=0.0, wire_bytes=1e5)
    steps = 40
    ends = plain_ends(schedule, profile, chosen, p, m, steps)
    found = simulate(PostValidatedSteps(schedule), profile, chosen, num_microbatches=m)
    assert found.step_s == pytest.approx((ends[-1] - ends[steps // 2]) / (steps - 1 - steps // 2), rel=1e-9)
    assert step_seconds(PostValidatedSteps(schedule), profile, [chosen], num_microbatches=m)[0, 0] == found.step_s
    check_timeline(found)


def test_zero_bubble_has_none_with_post_validation() -> None:
    """Qi et al. 2023: ZB-H2 and ZB-V if forward, B and W take equally long; ZB-H1 and 1F1B keep theirs."""
    for p in (2, 3, 4):
        m = 3 * p
        halves, whole = (Profile.uniform(n, 1.0, 1.0, weight_s=1.0) for n in (2 * p, p))
        work = {ZBH2(): (whole, 3 * m), ZBV(): (halves, 6 * m)}
        for schedule, (profile, seconds) in work.items():
            found = simulate(PostValidatedSteps(schedule), profile, FREE, num_microbatches=m)
            assert found.step_s == seconds
            assert found.bubble == 0.0
        bubbles = {ZBH1(): p - 1, OneFOneB(): 3 * (p - 1)}
        for schedule, bubble in bubbles.items():
            found = simulate(PostValidatedSteps(schedule), whole, FREE, num_microbatches=m)
            assert found.step_s == 3 * m + bubble


def spans(schedule, costs: ZB, p: int, m: int) -> tuple[float, float]:
    """Return the longest time from a worker's first to its last action, and when the last one ends."""
    profile = Profile.uniform(p, costs.forward, costs.input, weight_s=costs.weight)
    start_s, end_s = simulate(schedule, profile, Network(np.inf, latency_s=costs.message), num_microbatches=m).times[
        :2, 0
    ]
    return float(np.max(np.nanmax(end_s, axis=(1, 2)) - np.nanmin(start_s, axis=(1, 2)))), float(np.nanmax(end_s))


@settings(max_examples=40)
@given(
    st.builds(ZB, *[st.floats(0.2, 2.0)] * 3, message=st.floats(0.0, 1.0), memory=st.sampled_from([1.0, 1.5, 2.0])),
    st.integers(1, 8),
    st.integers(1, 20),
)
def test_a_searched_order_is_no_slower_than_the_fixed_ones_in_its_memory(costs, p, m) -> None:
    searched = spans(costs, costs, p, m)
    for fixed in [ZBH1(), *([ZBH2()] if costs.memory == 2 else [])]:
        assert searched[0] <= spans(fixed, costs, p, m)[0] * (1 + 1e-9)


@pytest.mark.parametrize(("p", "m"), [(4, 8), (8, 16), (4, 16)])
def test_a_search_that_knows_of_messages_saves_a_twentieth_of_a_step(p, m) -> None:
    costs = ZB(message=0.5, memory=1.5)
    assert spans(costs, costs, p, m)[0] < 0.95 * spans(replace(costs, message=0.0), costs, p, m)[0]


def test_a_searched_order_comes_close_to_the_bounds_for_published_times() -> None:
    """Times of 1.5 and 6.2 B parameters in tables 4 and 9 of Qi et al. 2023, whose ZB-2p keeps some of a microbatch until W."""
    for times, kept in (((18.522, 18.086, 9.337, 0.601), 0.366), ((29.718, 29.444, 19.927, 0.527), 0.432)):
        p, m, (forward, backward, weight, message) = 8, 24, times
        work, trips = m * sum(times[:3]), 2 * (p - 1) * message
        last = (p - 1 + m) * (forward + backward) + trips + weight  # the last stage runs no W before its last B
        costs = ZB(*times, memory=2, kept=kept)
        span, end = spans(costs, costs, p, m)
        assert max(work, last) <= span <= 1.003 * max(work, last)
        assert end == pytest.approx(work + (p - 1) * (forward + message))  # the last stage never waits
        assert spans(ZBH2(), costs, p, m)[0] > 1.05 * span
