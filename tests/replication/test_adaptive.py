"""What adapts while training runs: the controller of GraVAC and its test vectors, and Accordion."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from codec_variants import student
from replica_variants import Team, average, context, dense_mean, gradients, same_tensors

from raysim.codecs import TopK
from raysim.replication import parse_replica_method
from raysim.replication.controller import Controller, Rules, candidate_factors
from raysim.replication.gravac import GraVAC
from raysim.replication.sparsified import select, select_within

RULES = Rules(epsilon=0.7, omega=0.01, window=1, alpha=0.32)
NINE = candidate_factors(10, 2000, "geometric")
# throughput times gain at 10x, 20x, ..., 1280x, 2000x: the paper's figure, digitised; its last two are printed
SPEEDS = dict(zip(NINE, [728.8, 775.3, 803.7, 899.7, 929.8, 871.8, 959.5, 1029.9, 1035.4], strict=True))


def test_candidate_factors() -> None:
    assert candidate_factors(10, 1000, "exponential") == (10, 20, 40, 160, 1000)
    assert candidate_factors(10, 2000, "geometric") == (10, 20, 40, 80, 160, 320, 640, 1280, 2000)
    assert candidate_factors(1.5, 1000, "geometric") == (1.5, 3, 6, 12, 24, 48, 96, 192, 384, 768, 1000)
    assert candidate_factors(1.5, 1000, "exponential") == (1.5, 3, 6, 24, 384, 1000)
    assert candidate_factors(10, 10, "exponential") == (10,)
    assert candidate_factors(10, 20, "exponential") == (10, 20)


# The controller.


def explore(
    rules: Rules, factors: tuple[float, ...], speeds: dict[float, float], gains=None
) -> tuple[list[str], Controller]:
    """One step a window: the minimum is measured in a window of its own first, then every candidate in its own."""
    controller, events = Controller.new(len(factors)), []
    controller.candidate = 0
    for _ in range(3 * len(factors)):
        if controller.at_window(rules):
            controller.close_window()
            events.append("+".join(controller.decide(rules)))
        factor = factors[controller.candidate]
        gain = gains[factor] if gains else 1.0
        low = gains[factors[controller.minimum]] if gains else gain
        controller.observe(low, gain, 1.0)
        choice = controller.choose(low, gain, rules.epsilon)
        controller.end_step(choice, low, gain)
        sent = (*factors, 1.0)[choice.level]
        controller.book(speeds.get(sent, 1.0) / choice.gain)
        controller = Controller.from_tensors(*controller.tensors())
    return events, controller


def falling(factors: tuple[float, ...]) -> dict[float, float]:
    """Gains that all pass, and of which no two are within 1 %."""
    return {factor: 1.0 - 0.02 * place for place, factor in enumerate(factors)}


@pytest.mark.parametrize(("omega", "settled", "windows"), [(0.01, 1280, 8), (0.05, 20, 2)])
def test_the_saturation_vector(omega: float, settled: float, windows: int) -> None:
    events, controller = explore(RULES._replace(omega=omega), NINE, SPEEDS, falling(NINE))
    assert controller.frozen
    assert NINE[controller.candidate] == settled
    moves = [event for event in events if event]
    assert moves[-1].endswith("saturate")
    assert len(moves) == windows + 1  # that of the minimum alone is before them
    assert all("advance" in event for event in moves[:-1])


def test_the_lower_of_two_factors_that_are_equally_fast() -> None:
    for speeds in [(100, 120, 119.5), (100, 119.5, 120)]:
        table = dict(zip((10, 20, 40), speeds, strict=True))
        _, controller = explore(RULES, (10, 20, 40), table, falling((10, 20, 40)))  # type: ignore[arg-type]
        assert controller.frozen
        assert (10, 20, 40)[controller.candidate] == 20


@pytest.mark.parametrize(
    ("gains", "branch"),
    [((0.95, 0.8), "candidate"), ((0.8, 0.69), "minimum"), ((0.6, 0.5), "dense"), ((0.7, 0.7), "candidate")],
)
def test_gravac_branch_table(gains: tuple[float, float], branch: str) -> None:
    choice = Controller.new(3).choose(*gains, epsilon=0.7)
    assert choice == (
        branch,
        {"candidate": 1, "minimum": 0, "dense": 3}[branch],
        {"candidate": gains[1], "minimum": gains[0]}.get(branch, 1.0),
    )


@pytest.mark.parametrize(("candidate", "promoted"), [(0.892, True), (0.89, False)])
def test_promotion_within_omega(candidate: float, promoted: bool) -> None:
    for promote, minimum in (("evaluated", 1), ("listing", 2)):
        controller = Controller.new(4)
        controller.observe(0.9, candidate, 1.0)
        controller.agreed = [0.9, candidate]
        events = controller.decide(RULES._replace(promote=promote))
        assert events == (["promote", "advance"] if promoted else ["advance"])
        assert controller.minimum == (minimum if promoted else 0)
        assert controller.candidate == 2
        if promote == "evaluated" and promoted:
            assert controller.averages[0] == candidate  # the candidate's history comes with it
        assert math.isnan(controller.averages[1])  # that of the new candidate starts afresh


def test_the_moving_average_starts_with_its_first_value() -> None:
    controller = Controller.new(2)
    seen = [controller.observe(x, x / 2, 0.32) for x in (0.5, 0.7, 0.9)]
    assert [low for low, _ in seen] == pytest.approx([0.5, 0.564, 0.67152])
    assert [high for _, high in seen] == pytest.approx([0.25, 0.282, 0.33576])


def test_gain_one_and_growing_speed_climb_to_the_top() -> None:
    factors = candidate_factors(10, 1000, "exponential")
    events, controller = explore(RULES, factors, {factor: factor for factor in factors})
    assert factors[controller.candidate] == factors[controller.minimum] == 1000
    assert not controller.frozen
    assert events.count("") >= 1
    assert math.isnan(controller.speeds[-1])  # dense was never sent


def test_the_minimum_follows_what_passes() -> None:
    """Gains of 10x, 20x, 40x, ... fall at some level, whose place moves: the minimum stays just below it."""
    rules, controller, place = RULES._replace(promote="passing"), Controller.new(6), []
    for window in range(18):
        passing = 3 if window < 7 else 1 if window < 12 else 6  # levels that pass
        if controller.at_window(rules):
            controller.close_window()
            controller.decide(rules)
        gains = [0.8 if level < passing else 0.5 for level in (controller.minimum, controller.candidate)]
        controller.observe(gains[0], gains[1], 1.0)
        controller.end_step(controller.choose(*gains, rules.epsilon), *gains)  # type: ignore[call-arg]
        assert controller.candidate == min(controller.minimum + 1, 5) or controller.candidate == controller.minimum == 5
        place.append(controller.minimum)
    assert place == [0, 1, 2, 2, 2, 2, 2, 2, 1, 0, 0, 0, 0, 1, 2, 3, 4, 5]


def test_settled_level_stays() -> None:
    controller = Controller.new(3)
    for level in (0, 1):
        controller.used, controller.used_gain = level, 1.0
        controller.book(100.0)
    controller.agreed = [0.9, 0.8]
    seen = []
    for _ in range(3):
        controller.close_window()
        seen.append(controller.decide(RULES))
    assert seen == [["saturate"], [], []]


def test_dense_does_not_count_for_saturation() -> None:
    controller = Controller.new(3)
    for level, speed in ((0, 50.0), (1, 100.0), (3, 100.5)):
        controller.used, controller.used_gain = level, 1.0
        controller.book(speed)
    controller.agreed = [0.9, 0.8]
    controller.close_window()
    assert controller.decide(RULES) == ["advance"]


def test_the_speed_of_a_level_is_its_mean_over_the_window() -> None:
    controller = Controller.new(2)
    controller.used, controller.used_gain = 0, 0.5
    for speed in (100.0, 200.0, 600.0):
        controller.book(speed)
    controller.close_window()
    assert controller.speeds[0] == 150.0


# Multi-level compression.


def test_multi_level_topk_is_topk() -> None:
    for seed, (first, second) in itertools.product(range(4), [(900, 77), (500, 500), (300, 1), (40, 400)]):
        x = (student(2000, seed=10 * seed) * 4).round() / 4  # with ties
        kept = select(x, first, "exact", 0)
        within = select_within(kept, second, "exact", 0)
        direct = select(x, min(first, second), "exact", 0)
        assert torch.equal(within.positions, direct.positions)
        assert torch.equal(within.values, direct.values)


@pytest.mark.parametrize("how", ["sampled", "bisect"])
def test_multi_level_selection_is_nested(how: str) -> None:
    x = student(20000)
    kept = select(x, 2000, how, 1)
    within = select_within(kept, 200, how, 2)
    assert set(within.positions.tolist()) <= set(kept.positions.tolist())
    assert torch.equal(x[within.positions], within.values)
    assert 100 <= len(within.values) <= 400


# GraVAC on replica gradients.


def test_the_packet_is_that_of_topk_and_the_gain_what_it_keeps() -> None:
    for epsilon, factor, branch in [(0.2, 20, "candidate"), (0.6, 10, "minimum")]:
        method = GraVAC(10, 20, epsilon=epsilon, policy="geometric")
        given = [gradients(replica, 0) for replica in range(2)]
        results, _ = average(method, given, [{}, {}], [context(0, 2, 0), context(1, 2, 0)])
        codec = TopK(1 / factor)
        for name in ("first.weight", "wide.weight"):
            decoded = [codec.encode(one[name].view(1, -1)).decode().view_as(one[name]) for one in given]
            assert torch.equal(results[0].gradients[name], (decoded[0] + decoded[1]) / 2)
            assert torch.equal(results[1].memory[f"residual/{name}"].view_as(decoded[1]), given[1][name] - decoded[1])
        (decision,) = results[0].decisions
        assert (decision.branch, decision.minimum, decision.candidate) == (branch, 10, 20)
        assert decision.factor == pytest.approx(factor, rel=0.01)
        kept = [
            sum(
                float(codec.encode(x.view(1, -1)).decode().double().square().sum())
                for x in one.values()
                if x.numel() > 1024
            )
            / sum(float(x.double().square().sum()) for x in one.values() if x.numel() > 1024)
            for one in given
        ]
        assert decision.gain == pytest.approx(sum(kept) / 2, rel=1e-6)


@pytest.mark.parametrize("how", ["exact", "bisect"])
@pytest.mark.parametrize("values", ["Quantize(2)", "Quantize(2, per='sample')", "RandomK(0.1)"])
def test_the_gain_is_that_of_the_coded_values(values: str, how: str) -> None:
    method = parse_replica_method(f"GraVAC(2, 2, epsilon=0.01, select={how!r}, values={values})")
    given = [{"weight": student(40, 50, seed=replica)} for replica in range(2)]
    results, _ = average(method, given, [{}, {}], [context(replica, 2, 0) for replica in range(2)])
    shares = []
    for own, result in zip(given, results, strict=True):
        fed = own["weight"].view(1, -1).double()
        sent = fed - result.memory["residual/weight"].view(1, -1)
        shares.append(float(sent.square().sum() / fed.square().sum()))
    (decision,) = results[0].decisions
    assert decision.gain == pytest.approx(sum(shares) / 2, rel=1e-5)


def test_unsent_probe_changes_no_state() -> None:
    """Where the minimum is sent each time, the method is TopK with error feedback, whatever the candidate is."""
    method, plain = (
        GraVAC(5, 1000, epsilon=0.7, window=4),
        parse_replica_method("ErrorFeedback(TopK(0.2))"),
    )
    one, other = Team(method, 2), Team(plain, 2)
    for step in range(3):
        result, expected = one.step(step)[0], other.step(step)[0]
        assert result.decisions[0].branch == "minimum", result.decisions
        assert same_tensors(result.gradients, expected.gradients)


def test_always_dense_is_uncompressed_bit_for_bit() -> None:
    team = Team(GraVAC(10, 1000, epsilon=1.0, window=2), 3)
    for step in range(8):
        given = [gradients(replica, step) for replica in range(3)]
        result = team.step(step, given)[0]
        assert result.decisions[0].branch == "dense"
        assert result.decisions[0].factor == 1.0
        assert same_tensors(result.gradients, dense_mean(given))


def test_a_dense_step_sends_the_residual_and_clears_it() -> None:
    team = Team(GraVAC(5, 20, epsilon=0.2), 2)
    team.step(0)
    assert float(team.residual("wide.weight").abs().sum()) > 0
    team.method = GraVAC(5, 20, epsilon=1.0)
    result = team.step(1)[0]
    assert result.decisions[0].branch == "dense"
    assert not team.residual("wide.weight").any()
    torch.testing.assert_close(team.sent["wide.weight"], team.fed["wide.weight"], rtol=1e-5, atol=1e-5)


def test_a_run_explores_promotes_and_settles() -> None:
    shapes = {"weight": (64, 64)}
    seconds = {1.0: 1.0, 2.0: 0.5, 4.0: 0.25, 8.0: 0.2499, 16.0: 0.1}
    method = GraVAC(2, 16, epsilon=0.2, window=4, policy="geometric", omega=0.3)
    team, step_s, seen = Team(method, 2, shapes), None, []
    for step in range(40):
        given = [{"weight": student(64, 64, seed=7) + 0.01 * student(64, 64, seed=step)} for _ in range(2)]
        decision = team.step(step, given, step_s=step_s)[0].decisions[0]
        sent = {"candidate": decision.candidate, "minimum": decision.minimum, "dense": 1.0}[decision.branch]
        assert decision.throughput == (16 / step_s if step_s else None)
        step_s = seconds[sent]
        seen.append(decision)
    events = [(step, decision.event) for step, decision in enumerate(seen) if decision.event]
    assert all(step % 4 == 0 for step, _ in events)
    assert events[0][1].endswith("advance")
    assert len({decision.factor for decision in seen}) >= 3


def test_the_throughput_of_a_step_is_that_of_the_factor_sent_in_it() -> None:
    team = Team(GraVAC(2, 64, epsilon=0.3, window=100), 2)
    for step, seconds in enumerate([None, 2.0, 4.0]):
        team.step(step, step_s=seconds)
    whole, real = team.memories[0]["controller/whole"], team.memories[0]["controller/real"]
    controller = Controller.from_tensors(whole, real)
    level = 1 if team.step(3, step_s=4.0)[0].decisions[0].branch == "candidate" else 0
    assert controller.counts[level] == 2
    assert controller.sums[level] > 0


def test_random_k_keeps_its_share_of_the_error_fed_gradient() -> None:
    method = GraVAC(4, 4, epsilon=0.01, select="random", ewma_alpha=1.0)
    team, gains = Team(method, 1, {"weight": (100, 100)}), []
    for step in range(60):
        given = [{"weight": torch.randn(100, 100, generator=torch.Generator().manual_seed(step))}]
        gains.append(team.step(step, given)[0].decisions[0].gain)
    assert sum(gains[30:]) / 30 == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize("factor", [1.5, 4, 48])
def test_random_k_sends_the_energy_of_the_raw_gradient_once_its_residual_has_grown(factor: float) -> None:
    """Error feedback delays independent gradients and loses none of their energy, at any factor."""
    method = GraVAC(factor, factor, epsilon=0.01, select="random", gain="raw", settle=10**6)
    team, gains = Team(method, 1, {"weight": (100, 100)}), []
    grown = int(6 * factor)
    for step in range(grown + 40):
        given = [{"weight": torch.randn(100, 100, generator=torch.Generator().manual_seed(step))}]
        gains.append(team.step(step, given)[0].decisions[0].gain)
    assert sum(gains[grown:]) / 40 == pytest.approx(1.0, rel=0.05)


def test_gains_differ_by_their_reference_once_there_is_a_residual() -> None:
    teams = {
        gain: Team(GraVAC(5, 20, epsilon=1.0, gain=gain, settle=6, ewma_alpha=1.0), 1)
        for gain in ("fed", "raw", "folded")
    }
    for step in range(6):
        given = gradients(0, step)
        results = {gain: team.step(step, [given])[0] for gain, team in teams.items()}
        gains = {gain: result.decisions[0].gain_minimum for gain, result in results.items()}
        whole, sent = (
            sum(float(xs[name].double().square().sum()) for name in ("first.weight", "wide.weight"))
            for xs in (given, results["raw"].gradients)
        )
        assert gains["raw"] == pytest.approx(sent / whole, rel=1e-5)
        assert gains["folded"] == pytest.approx(min(sent / whole, whole / sent), rel=1e-5)
        if step == 0:
            assert gains["fed"] == gains["raw"]
        else:  # the residual has energy of its own
            assert gains["fed"] < gains["raw"]


def test_a_start_that_settles_sends_the_minimum_whatever_its_gain() -> None:
    method, plain = GraVAC(5, 20, epsilon=1.0, settle=4), parse_replica_method("ErrorFeedback(TopK(0.2))")
    team, other = Team(method, 2), Team(plain, 2)
    for step in range(6):
        decision = team.step(step)[0].decisions[0]
        other.step(step)
        assert decision.branch == ("minimum" if step < 4 else "dense")
        if step < 4:
            assert "is sent in the first 4 steps" in decision.reason
            assert same_tensors(team.sent, other.sent)


def test_zero_gradients_do_not_increase_sent_values() -> None:
    shapes = {"weight": (40, 40)}
    team = Team(GraVAC(10, 100), 2, shapes)
    decision = team.step(0, [{"weight": torch.zeros(40, 40)}] * 2)[0].decisions[0]
    assert (decision.branch, decision.gain, decision.gain_minimum) == ("candidate", 1.0, 1.0)
