"""DeCo-SGD, Dion and EDGC are the formulas of their sources."""

from __future__ import annotations

import math

import pytest
import torch
from codec_variants import normal
from raysim_contrib.deco import choose, noise
from raysim_contrib.edgc import EDGC, entropy
from replica_variants import (
    Team,
    dense_mean,
    gradients,
    same_tensors,
)

from raysim.replication import parse_replica_method

STEPS = 8
MATRIX = {"weight": (40, 60)}


# DeCo-SGD.


@pytest.mark.parametrize("delay", [1, 2])
def test_averages_are_used_late_and_in_order(delay) -> None:
    late, prompt = (
        Team(parse_replica_method(f"DeCoSGD(0.05, delay={delay})")),
        Team(parse_replica_method("ErrorFeedback(TopK(0.05))")),
    )
    used, made = [], []
    for step in range(STEPS):
        used.append(late.step(step)[0].gradients)
        made.append(prompt.step(step)[0].gradients)
        assert late.array_bytes == prompt.array_bytes
    assert all(not x.any() for averages in used[:delay] for x in averages.values())
    assert all(same_tensors(*pair) for pair in zip(used[delay:], made, strict=False))


def test_the_choice_hides_the_exchange_and_has_the_least_noise() -> None:
    step_s, size, bandwidth, latency = 0.1, 10e6, 100e6, 0.25
    choice = choose(step_s, size, bandwidth, latency)
    sent_s = 8 * choice.density * size / bandwidth
    assert sent_s <= step_s * (1 + 1e-9)
    assert latency + sent_s <= choice.delay * step_s * (1 + 1e-9)
    for delay in range(1, 21):
        seconds = min(step_s, delay * step_s - latency)
        if seconds > 0:
            assert choice.noise <= noise(min(1.0, seconds * bandwidth / (8 * size)), delay) * (1 + 1e-12)
    assert choose(0.1, 1e3, 1e9, 0.01).density == 1.0
    with pytest.raises(
        ValueError, match=r"`max_delay` steps of 0.1 s must last longer than the latency of 5 s, but got 3"
    ):
        choose(0.1, 1e6, 1e9, 5.0, max_delay=3)


# Dion.


@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_dion_at_full_rank_tends_to_the_polar_factor(shape) -> None:
    """The same gradient again and again: U V^T, which Muon's Newton-Schulz steps approximate."""
    gradient = normal(*shape, seed=3)
    team = Team(parse_replica_method("Dion(12, min_values=1)"), 2, {"weight": shape})
    for step in range(300):
        update = team.step(step, [{"weight": gradient}] * 2)[0].gradients["weight"].double()
    left, _, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    torch.testing.assert_close(update / math.sqrt(shape[0] / shape[1]), left @ right, rtol=0, atol=0.02)
    sizes = torch.linalg.svdvals(update) / math.sqrt(shape[0] / shape[1])
    assert sizes.min() > 0.98
    assert sizes.max() < 1.02


def test_dion_s_momentum_keeps_what_the_averaged_product_leaves() -> None:
    """Over steps: mean of M = sum of g - (1 - mu) sum of P R^T, and P R^T = the averaged momentum projected on P."""
    count, mu = 3, 0.8
    team = Team(parse_replica_method(f"Dion(4, mu={mu})"), count, MATRIX)
    whole = torch.zeros(40, 60, dtype=torch.float64)
    for step in range(6):
        given = [gradients(replica, step, MATRIX) for replica in range(count)]
        whole = whole + dense_mean(given)["weight"].double()
        update = team.step(step, given)[0].gradients["weight"].double()
        basis = torch.linalg.svd(update, full_matrices=False)[0][:, :4]
        whole = whole - (1 - mu) * basis @ (basis.T @ whole)
        held = sum(memory["momentum/weight"].double() for memory in team.memories) / count
        torch.testing.assert_close(held, whole, rtol=1e-4, atol=1e-4)
        columns = team.memories[0]["right/weight"].double().norm(dim=0)
        torch.testing.assert_close(columns, torch.ones(4, dtype=torch.float64), rtol=1e-5, atol=1e-5)


def test_dion_is_linear_over_replicas_and_sends_two_thin_matrices() -> None:
    given = [gradients(replica, 0, MATRIX) for replica in range(3)]
    team, alone = Team(parse_replica_method("Dion(4)"), 3, MATRIX), Team(parse_replica_method("Dion(4)"), 1, MATRIX)
    one = team.step(0, given)[0].gradients["weight"]
    other = alone.step(0, [dense_mean(given)])[0].gradients["weight"]
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert team.array_bytes == 2 * 2 * 4 * 4 * (40 + 60)


def test_small_tensors_step_by_lion() -> None:
    shapes = {"bias": (5,)}
    team, held = Team(parse_replica_method("Dion(1)"), 2, shapes), torch.zeros(5)
    for step in range(4):
        given = [gradients(replica, step, shapes) for replica in range(2)]
        mean = dense_mean(given)["bias"]
        update = team.step(step, given)[0].gradients["bias"]
        assert torch.equal(update, (0.9 * held + 0.1 * mean).sign())
        held = 0.95 * held + 0.05 * mean


# EDGC.


def test_the_entropy_of_known_distributions() -> None:
    draw = torch.Generator().manual_seed(0)
    uniform = torch.rand(2_000_000, generator=draw)
    assert entropy(uniform, 1000) == pytest.approx(math.log(1000), abs=2e-3)
    assert entropy(torch.full((100,), 3.0)) == 0.0
    assert entropy(torch.zeros(0)) == 0.0
    assert entropy(torch.tensor([0.0, 1.0]), 2, 1.0) == pytest.approx(math.log(2))
    for deviation in (1e-6, 1.0, 50.0):  # h - ln(width of a bin), whatever the scale
        values = deviation * torch.randn(2_000_000, generator=draw)
        width = float(values[::4].max() - values[::4].min()) / 1000
        expected = math.log(deviation * math.sqrt(2 * math.pi * math.e)) - math.log(width)
        assert entropy(values) == pytest.approx(expected, abs=5e-3)


def test_the_rank_follows_the_change_of_entropy() -> None:
    method = EDGC(32, stride=4)
    assert method._adjusted(32, [7.0]) == 32
    assert method._adjusted(32, [7.0, 6.0, 6.0, 6.0]) == 28  # wanted 8, at most four away
    assert method._adjusted(10, [7.0, 6.0, 6.0, 6.0]) == 8
    assert method._adjusted(20, [7.0, 6.0, 6.0, 5.5]) == 20  # 8 + 24/2
    assert method._adjusted(20, [7.0, 6.0, 6.0, 5.0]) == 24
    team = Team(parse_replica_method("EDGC(8, window=2, every=1)"), 2, MATRIX)
    ranks = []
    for step in range(12):
        given = [{"weight": normal(40, 60, seed=replica)} for replica in range(2)]  # the same in all steps
        ranks.append(int(team.step(step, given)[0].decisions[0].branch.split()[1]))
    assert ranks[:4] == [8] * 4
    assert min(ranks) < 8
    assert all(rank % 2 == 0 and 2 <= rank <= 8 for rank in ranks)


def test_windows_of_entropy_choose_the_ranks() -> None:
    """By hand: entropies of every second step after a warm-up, means of windows of three steps, a rank at most two away."""
    team = Team(parse_replica_method("EDGC(8, window=3, every=2, stride=2, sample=1.0, bins=50, warmup=2)"), 2, MATRIX)
    rank, means, seen, events = 8, [], [], set()
    for step in range(23):
        power = 1 + (step // 3) % 4 * 0.7  # so that the shape of the distribution, and its entropy, changes
        given = [
            {"weight": g["weight"].sign() * g["weight"].abs() ** power}
            for g in (gradients(r, 0, MATRIX) for r in range(2))
        ]
        (result, _) = team.step(step, given)
        if step < 2:
            assert not result.decisions
            continue
        (decision,) = result.decisions
        assert decision.branch == f"rank {rank}"
        assert decision.factor == pytest.approx(40 * 60 / (rank * (40 + 60)))
        if (step - 2) % 2 == 0:
            seen.append(entropy(result.gradients["weight"], 50, 1.0))
        after = rank
        if (step - 1) % 3 == 0:
            means.append(sum(seen) / len(seen))
            seen = []
            if len(means) > 2:
                share = abs(means[-1] - means[-2]) / abs(means[1] - means[0])
                wanted = min(8, max(2, round(2 + 6 * share))) // 2 * 2
                after = min(max(wanted, rank - 2), rank + 2)
        event = "promote" if after < rank else "demote" if after > rank else None
        assert decision.event == event
        events.add(event)
        rank = after
    assert events == {"promote", "demote", None}


def test_a_dearer_byte_leaves_a_lower_density() -> None:
    assert choose(0.1, 10e6, 50e6, 0.0, cost=2.0).density == pytest.approx(choose(0.1, 10e6, 50e6, 0.0).density / 2)
    assert noise(0.5, 2) == pytest.approx(0.5 / (0.5 * 0.75**2))
