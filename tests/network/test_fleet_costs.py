"""Money and churn of a step: closed forms, limits, and processes drawn at random."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from raysim.forecast.timings import Timings
from raysim.network.costs import FleetCosts, best_interval_s, load_costs, rejoining, restarting
from raysim.network.presets import parse_network
from raysim.network.simulate import step_seconds
from raysim.network.step_times import Exponential, Lognormal
from raysim.network.transport import calibrated_transport
from raysim.notation import InputError

RNG = np.random.default_rng(0)
FREE = parse_network("free")


@pytest.mark.parametrize("count", [1, 2, 8, 1000])
def test_the_largest_of_n_exponential_times_is_a_harmonic_number(count):
    harmonic = sum(1 / k for k in range(1, count + 1))
    assert Exponential(0.3).slowest(count) == pytest.approx(0.7 + 0.3 * harmonic, rel=1e-7)


def test_the_larger_of_two_lognormal_times_has_a_closed_form():
    sigma = math.sqrt(math.log1p(0.4**2))
    assert Lognormal(0.4).slowest(1, 2) == pytest.approx(2 * norm.cdf(sigma / math.sqrt(2)), rel=1e-7)


@pytest.mark.parametrize("times", [Lognormal(0.3), Exponential(0.3)])
def test_replicas_of_local_steps_wait_for_the_slowest_sum(times):
    workers, replicas, steps = 2, 4, 16
    if isinstance(times, Lognormal):
        sigma = math.sqrt(math.log1p(0.3**2))
        drawn = RNG.lognormal(-(sigma**2) / 2, sigma, (10_000, replicas, steps, workers))
    else:
        drawn = 0.7 + RNG.exponential(0.3, (10_000, replicas, steps, workers))
    waited = drawn.max(axis=3).mean(axis=2).max(axis=1).mean()
    assert times.slowest(workers, replicas, steps) == pytest.approx(waited, abs=0.002)
    assert times.slowest(workers, replicas, 10**6) == pytest.approx(times.slowest(workers), abs=0.001)
    assert times.slowest(workers, replicas) == pytest.approx(drawn.max(axis=3).max(axis=1).mean(), abs=0.005)


def test_sums_of_exponential_delays_are_gamma_distributed():
    # of two sums of two, the smaller is the integral of ((1 + t) e^-t)^2 = 5/4 in the mean, and both together are 4
    assert 2 * Exponential(1.0).slowest(1, 2, 2) == pytest.approx(4 - 5 / 4, rel=1e-6)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_stragglers_lengthen_a_simulated_pipeline_as_predicted(schedule):
    stages, replicas, times = 4, 4, Lognormal(0.2)
    step = Timings(
        schedule=schedule, num_stages=stages, num_replicas=replicas, num_microbatches=32, forward_s=1.0, backward_s=2.0
    ).step()
    sigma = math.sqrt(math.log1p(0.2**2))
    drawn = RNG.lognormal(-(sigma**2) / 2, sigma, (200, replicas, stages, 1, 1))
    costs = np.broadcast_to(step.profile.compute_s, (replicas, *step.profile.compute_s.shape[1:]))
    profiles = [replace(step.profile, compute_s=costs * each) for each in drawn]
    mean_s = step_seconds(step.schedule, profiles, [FREE], num_microbatches=32, num_replicas=replicas).mean()
    expected = step.expected(FleetCosts(step_times=times), FREE)
    assert expected.step_s == pytest.approx(mean_s, rel=0.03)
    assert expected.straggling > 1.2


def test_restarts_take_the_seconds_of_a_drawn_process():
    mean_s, restart_s, checkpoint_s, every_s = 100.0, 10.0, 5.0, 40.0

    def segment() -> float:
        spent = 0.0
        while (until := RNG.exponential(mean_s)) < every_s + checkpoint_s:
            spent += until
            while (again := RNG.exponential(mean_s)) < restart_s:
                spent += again
            spent += restart_s
        return spent + every_s + checkpoint_s

    drawn = np.mean([segment() for _ in range(40_000)]) / every_s
    assert restarting(mean_s, restart_s, checkpoint_s, every_s) == pytest.approx(drawn, rel=0.01)


def test_the_best_interval_is_a_minimum_and_young_s_if_departures_are_rare():
    best = best_interval_s(1e4, 60.0)
    around = [restarting(1e4, 0, 60, each) for each in (0.98 * best, best, 1.02 * best)]
    assert around[1] == min(around)
    assert best_interval_s(1e10, 60.0) == pytest.approx(math.sqrt(2 * 60 * 1e10), rel=1e-4)
    assert best_interval_s(24 * 3600, 0.0) == 1.0  # free checkpoints are written all the time
    assert restarting(1e12, 0, 0, 1.0) == pytest.approx(1.0)
    assert restarting(1.0, 0, 0, 1e6) == math.inf


@pytest.mark.parametrize("restart_s", [0.0, 3.0, 10.0, 27.0])
def test_joining_again_takes_the_periods_of_a_drawn_process(restart_s):
    mean_s, period_s = 50.0, 10.0
    useful = passed = 0.0
    for until in RNG.exponential(mean_s, 100_000):
        whole, into = divmod(until, period_s)
        useful += whole
        passed += whole + math.ceil((into + restart_s) / period_s)
    assert rejoining(mean_s, restart_s, period_s) == pytest.approx(passed / useful, rel=0.01)
    assert rejoining(1e12, restart_s, period_s) == pytest.approx(1.0)


def test_money_is_hours_and_bytes_and_grows_with_churn():
    step = Timings(
        num_stages=2, num_replicas=4, num_microbatches=8, forward_s=1, backward_s=2, message_bytes=1e9
    ).step()
    plain = FleetCosts(gpu_hour=3.6, egress_gb=0.5)
    expected = step.expected(plain, FREE)
    sent_gb = 4 * 8 * 2  # an activation and its gradient for each microbatch and replica
    assert expected[:3] == (27.0, 1.0, 1.0)
    assert expected.money == pytest.approx(8 * 27.0 / 1000 + 0.5 * sent_gb)
    churned = step.expected(FleetCosts(gpu_hour=3.6, departure_hours=24, restart_s=60, checkpoint_s=10), FREE)
    assert churned.step_s == pytest.approx(27.0 * churned.departures)
    assert churned.money == pytest.approx(8 * churned.step_s / 1000)
    local, waiting = (
        FleetCosts(departure_hours=24, restart_s=60, checkpoint_s=10).of_step(
            1.0, compute_s=1.0, replicas=8, gpus=8, period=period
        )
        for period in (100, 1)
    )
    assert local.departures < waiting.departures
    assert local.checkpoint_every_s is None


def test_the_shards_of_a_copy_wait_for_one_another_in_every_step():
    """Between exchanges only the other copies train on: two of four hosts each, not eight of one."""
    costs = FleetCosts(gpu_hour=1.0, step_times=Lognormal(0.2), departure_hours=24, restart_s=60)
    sharded = Timings(
        num_stages=1, num_replicas=8, num_microbatches=2, forward_s=1, backward_s=2, sharding="FSDP(4)", parameter_bytes=1e9,
        gradient_bytes=2e9,
    ).step()  # fmt: skip
    local = replace(sharded, interval=100.0).expected(costs, FREE)
    assert local[:4] == pytest.approx(costs.of_step(6.0, compute_s=6.0, hosts=4, replicas=2, gpus=8, period=100)[:4])


@pytest.mark.parametrize("algorithm", ["ring", "direct", "tree", "server"])
def test_an_average_sends_two_copies_from_all_but_one_replica(algorithm):
    step = Timings(
        num_stages=2, num_replicas=4, num_microbatches=1, forward_s=1, backward_s=2, gradient_bytes=1e9
    ).step()
    step = step.over(calibrated_transport("bare", algorithm))
    assert step.expected(FleetCosts(egress_gb=1.0), FREE).money == pytest.approx(2 * 2 * 3)


def test_egress_on_sites_counts_what_leaves_a_site(tmp_path):
    sites = '[sites.a]\nhosts = 2\n[sites.b]\nhosts = 2\n[[links]]\nbetween = ["a", "b"]\nbandwidth = "1gbps"\n'
    (tmp_path / "sites.toml").write_text(sites)
    network = parse_network(str(tmp_path / "sites.toml"))
    step = Timings(num_stages=4, num_microbatches=3, forward_s=1, backward_s=2, message_bytes=1e9).step()
    assert step.expected(FleetCosts(egress_gb=1.0), network).money == pytest.approx(2 * 3)  # one boundary of three
    sharded = Timings(
        num_stages=1, num_replicas=4, num_microbatches=2, forward_s=1, backward_s=2, sharding="FSDP(4)", units=3,
        parameter_bytes=1e9, gradient_bytes=2e9,
    ).step()  # fmt: skip
    whole = 4 * sharded.sharded.sent_bytes(4, 2) / 1e9
    assert sharded.expected(FleetCosts(egress_gb=1.0), FREE).money == pytest.approx(whole)
    assert sharded.expected(FleetCosts(egress_gb=1.0), network).money == pytest.approx(
        whole / 2
    )  # two of four edges of the ring


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gpu_hour = -1", "`gpu_hour` must be"),
        ("gpu_hours = 1", "Did you mean `gpu_hour`?"),
        ("departure_hours = 0", "`departure_hours` must be"),
        ("restart_s = 60", "give `departure_hours`"),
        ("step_times = 'Normal(0.1)'", "`step_times` must look like Lognormal(0.1)"),
        ("step_times = 3", "`step_times` must look like Lognormal(0.1)"),
        ("step_times = 'Exponential(2)'", "`deviation` must be"),
        ("currency = 3", "`currency` must be a text"),
        ("", "must have one of the fields"),
        ("gpu_hour 3", "in '"),
    ],
)
def test_a_wrong_file_of_costs_is_refused_with_its_field(tmp_path: Path, text, words):
    file = tmp_path / "costs.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=words.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?")) as error:
        load_costs(file)
    assert str(file) in str(error.value)
    with pytest.raises(InputError, match="cannot be read"):
        load_costs(tmp_path / "none.toml")
