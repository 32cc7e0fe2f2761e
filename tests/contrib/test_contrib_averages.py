"""Methods that average gradients are the formulas of their sources."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from codec_variants import normal
from raysim_contrib.deco import choose, noise
from raysim_contrib.demo import cosines, transformed
from raysim_contrib.diana import DIANA
from raysim_contrib.edgc import entropy
from raysim_contrib.gtopk import GTopK, partners
from raysim_contrib.marina import MARINA
from replica_variants import (
    Team,
    context,
    dense_mean,
    gradients,
    same_tensors,
)

from raysim.codecs import RandomK
from raysim.codecs.positions import index_bytes, select_topk
from raysim.pipeline.groups import average_together
from raysim.replication import parse_replica_method
from raysim.replication.local import from_blocks, to_blocks

STEPS = 8
MATRIX = {"weight": (40, 60)}


def together(method, given, memories=None, step=0, **changes):
    count = len(given)
    contexts = [context(replica, count, step, **changes) for replica in range(count)]
    return average_together(method, given, memories or [{}] * count, contexts)


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


@pytest.mark.parametrize("shape", [(6, 15), (15, 6)])
def test_dion_at_full_rank_tends_to_the_polar_factor(shape) -> None:
    """The same gradient again and again: U V^T, which Muon's Newton-Schulz steps approximate."""
    gradient = normal(*shape, seed=3)
    team = Team(parse_replica_method("Dion(6, min_values=1)"), 2, {"weight": shape})
    for step in range(150):
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
    team = Team(parse_replica_method("EDGC(8, window=2, every=1)"), 2, MATRIX)
    ranks = []
    for step in range(12):
        given = [{"weight": normal(40, 60, seed=replica)} for replica in range(2)]  # the same in all steps
        ranks.append(int(team.step(step, given)[0].decisions[0].branch.split()[1]))
    assert ranks[:4] == [8] * 4
    assert min(ranks) < 8
    assert all(rank % 2 == 0 and 2 <= rank <= 8 for rank in ranks)


@pytest.mark.parametrize("notation", ["DiLoCo(2, codec={})", "StreamingDiLoCo(2, fragments=1, codec={})"])
def test_decisions_about_the_changes_of_local_steps_are_kept(notation: str) -> None:
    method = parse_replica_method(notation.format("EDGC(8, window=2, every=1)"))
    given = [{"weight": normal(40, 60, seed=replica)} for replica in range(2)]
    memories, counts = [method.begin(given[0])] * 2, []
    for step in range(4):
        results = together(method, given, memories, step)[0]
        memories = [result.memory for result in results]
        counts.append(len(results[1].decisions))
    assert counts == [0, 1, 0, 1]


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


# DIANA.


def test_the_mean_that_is_known_is_the_mean_of_what_each_knows() -> None:
    for notation in ("DIANA(QSGD(4))", "DIANA(RandomK(0.2, unbiased=True))"):
        team = Team(parse_replica_method(notation), 3, MATRIX)
        for step in range(5):
            team.step(step)
        own = sum(memory["own/weight"].double() for memory in team.memories) / 3
        torch.testing.assert_close(team.memories[0]["mean/weight"].double(), own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_diana_s_memory_moves_by_alpha_towards_an_exactly_sent_gradient(alpha: float) -> None:
    given, memory = {"weight": normal(40, 60)}, dict[str, torch.Tensor]()
    for step in range(1, 4):
        (result,), _ = together(parse_replica_method(f"DIANA(TopK(1.0), alpha={alpha})"), [given], [memory], step)
        memory = result.memory
        torch.testing.assert_close(memory["own/weight"], given["weight"] * (1 - (1 - alpha) ** step))


@pytest.mark.slow
def test_l9_diana_s_memory_closes_in_by_alpha_in_expectation() -> None:
    n, k, draws = 20, 5, 4000
    g, h = normal(4, 5, seed=1), normal(4, 5, seed=2)
    method = DIANA(RandomK(k / n, unbiased=True), min_values=1)
    assert method.alpha_of(n) == k / n
    before = float((h - g).double().square().sum())
    after, total = 0.0, torch.zeros(4, 5, dtype=torch.float64)
    for step in range(draws):
        memory = {"own/weight": h, "mean/weight": h}
        results, _ = together(method, [{"weight": g}], [memory], step)
        after += float((results[0].memory["own/weight"] - g).double().square().sum()) / draws
        total += results[0].gradients["weight"].double()
    assert after / before == pytest.approx(0.75, rel=0.02)
    spread = (g - h).abs().double() * math.sqrt(3)  # of one draw
    assert ((total / draws - g).abs() <= 5 * spread / math.sqrt(draws) + 1e-6).all()  # unbiased


def test_diana_needs_a_codec_whose_variance_is_known() -> None:
    for notation in ("DIANA(TopK(0.1))", "DIANA(RandomK(0.1))", "DIANA(LowRank(2))"):
        with pytest.raises(ValueError) as error:
            parse_replica_method(notation)
        assert "`alpha` must be given for a codec of unknown variance" in str(error.value)
    assert repr(parse_replica_method("DIANA(TopK(1), alpha=0.5)")) == "DIANA(TopK(1.0), alpha=0.5)"


# Signs.


def test_the_majority_decides_and_ties_are_positive() -> None:
    given = [{"w": torch.tensor([[1.0, -1.0, 0.0, -2.0]])}, {"w": torch.tensor([[1.0, -3.0, 0.0, 5.0]])}]
    results, sent = together(parse_replica_method("SignSGD"), given)
    assert results[0].gradients["w"].tolist() == [[1.0, -1.0, 1.0, 1.0]]
    assert sent == [1 + 7, 1 + 7]  # a bitmap, and a header
    given.append({"w": torch.tensor([[-1.0, 1.0, -1.0, -1.0]])})
    assert together(parse_replica_method("SignSGD"), given)[0][0].gradients["w"].tolist() == [[1.0, -1.0, 1.0, -1.0]]


def test_signum_takes_the_sign_of_the_moving_average() -> None:
    team, mean = Team(parse_replica_method("SignSGD(beta=0.8)"), 1, MATRIX), torch.zeros(40, 60)
    for step in range(4):
        mean = 0.8 * mean + 0.2 * gradients(0, step, MATRIX)["weight"]
        result = team.step(step)[0].gradients["weight"]
    assert torch.equal(result, torch.where(mean >= 0, 1.0, -1.0))
    with pytest.raises(ValueError):
        parse_replica_method("SignSGD(beta=1)")


# gTop-k.


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_replica_gets_all_of_the_others(count: int) -> None:
    """Who has what, as sets: after all rounds everyone has everyone's, each just once."""
    held = [{replica} for replica in range(count)]
    for group in (1 << t for t in range((count - 1).bit_length())):
        received = []
        for replica in range(count):
            source, targets = partners(replica, group, count)
            assert all(partners(target, group, count)[0] == replica for target in targets)
            received.append(held[source] if source is not None else set())
        for replica in range(count):
            assert not held[replica] & received[replica]
        held = [own | other for own, other in zip(held, received, strict=True)]
    assert all(one == set(range(count)) for one in held)


def test_l12_nothing_is_lost_on_the_way() -> None:
    """Over many small tensors, where the rule that clears by the final positions alone fails often."""
    shape = {"weight": (2, 4)}
    for seed in range(60):
        given = [{"weight": (normal(2, 4, seed=10 * seed + r) * 2).round() / 2} for r in range(4)]
        results, _ = together(GTopK(0.25, min_values=1), given)
        left = sum(result.memory["residual/weight"].view(2, 4) for result in results)
        total = sum(one["weight"] for one in given)
        torch.testing.assert_close(4 * results[0].gradients["weight"] + left, total, rtol=0, atol=1e-6)
        assert int((results[0].gradients["weight"] != 0).sum()) <= 2
    assert GTopK(0.25, min_values=1).compressed_values(shape) == 8


def test_of_disjoint_values_the_greatest_of_all_are_taken() -> None:
    x = normal(40, 60)
    owner = torch.arange(2400).view(40, 60) % 4
    given = [{"weight": torch.where(owner == replica, x, 0.0)} for replica in range(4)]
    results, sent = together(GTopK(0.05), given)
    expected = torch.zeros(2400)
    positions = select_topk(x.view(1, -1), 120)
    expected[positions] = x.view(-1)[positions]
    assert torch.equal(results[0].gradients["weight"].view(-1), expected / 4)
    gathered = together(parse_replica_method("TopK(0.05)"), given)[1]
    assert sent[0] < gathered[0]  # two rounds of k values, and not three times k


# DeMo.


def test_the_cosine_transform_is_orthonormal_and_blocks_come_back() -> None:
    for size in (1, 5, 64):
        matrix = cosines(size)
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), rtol=0, atol=1e-12)
    assert transformed(torch.ones(1, 4, 4))[0, 0, 0] == pytest.approx(4)  # a constant is its first frequency
    for shape in ((24, 3, 5, 5), (40,), (7, 9), (128, 96)):
        x = normal(*shape)
        assert torch.equal(from_blocks(to_blocks(x, 64), shape, 64), x)
        there = transformed(to_blocks(x, 16))
        assert float(there.square().sum()) == pytest.approx(float(x.square().sum()), rel=1e-5)
        torch.testing.assert_close(from_blocks(transformed(there, back=True), shape, 16), x, rtol=1e-4, atol=1e-5)


def test_demo_sends_all_or_the_strongest_frequency_and_keeps_the_rest() -> None:
    shapes = {"weight": (16, 24)}
    given = [gradients(replica, 0, shapes) for replica in range(2)]
    everything = Team(parse_replica_method("DeMo(kept=64, side=8)"), 2, shapes)
    steps = everything.step(0, given)[0].gradients["weight"]
    mean = dense_mean(given)["weight"]
    assert torch.equal(steps, mean.sign())
    assert float(everything.memories[0]["momentum/weight"].abs().max()) < 1e-5
    one = Team(parse_replica_method("DeMo(kept=1, decay=0.5, side=8)"), 1, shapes)
    results = one.step(0, given[:1])
    left = transformed(to_blocks(one.memories[0]["momentum/weight"], 8)).flatten(1)
    before = transformed(to_blocks(0.1 * given[0]["weight"], 8)).flatten(1)  # the learning rate
    strongest = before.abs().argmax(dim=1, keepdim=True)
    torch.testing.assert_close(left, before.scatter(1, strongest, 0.0), rtol=1e-4, atol=1e-5)
    sent = torch.zeros_like(before).scatter(1, strongest, before.gather(1, strongest)).view(-1, 8, 8)
    expected = from_blocks(transformed(sent, back=True), (16, 24), 8)
    clear = expected.abs() > 1e-4
    assert torch.equal(results[0].gradients["weight"][clear], expected.sign()[clear])


def test_demo_s_bytes_are_values_and_positions_of_blocks() -> None:
    team = Team(parse_replica_method("DeMo"), 2, {"weight": (128, 128)})
    team.step(0)
    assert team.array_bytes == 2 * (4 * 4 * 32 + index_bytes("elias_fano", 4 * 32, 128 * 128))


# MARINA.


def test_l10_marina_is_unbiased_given_its_past() -> None:
    """E[g_t | past] = g_{t-1} + the mean of g(x_t) - g(x_{t-1}); what is sent by values is a share of the codec."""
    draws, count, estimate = 250, 2, normal(4, 5, seed=1)
    now, before = ([{"weight": normal(4, 5, seed=seed + i)} for i in range(count)] for seed in (10, 20))
    method = MARINA(RandomK(0.25, unbiased=True), probability=0.01, min_values=1)
    steps = [step for step in range(1, 2 * draws) if method.needs_previous_gradients(step, 3)][:draws]
    expected = estimate + sum(a["weight"] - b["weight"] for a, b in zip(now, before, strict=True)) / count
    total = torch.zeros(4, 5, dtype=torch.float64)
    for step in steps:
        contexts = [context(i, count, step, extra=before[i]) for i in range(count)]
        results, sent = average_together(method, now, [{"mean/weight": estimate}] * count, contexts)
        total += results[0].gradients["weight"].double()
        assert sent == [4 * 5 + 8 + 8] * count  # 5 of 20 values, their key, and a header
    spread = sum((a["weight"] - b["weight"]).square() for a, b in zip(now, before, strict=True)).sqrt().double() * 3  # type: ignore[union-attr]
    assert ((total / draws - expected).abs() <= 5 * spread / count / math.sqrt(draws)).all()


def test_l10_marina_s_coin_is_one_for_all_and_as_likely_as_stated() -> None:
    for notation, chance in [
        ("MARINA(RandomK(0.25, unbiased=True))", 0.25),
        ("MARINA(Natural)", 8 / 9),
        ("MARINA(Identity)", 1.0),
        ("MARINA(TernGrad(clip=None), probability=0.5)", 0.5),
    ]:
        method: Any = parse_replica_method(notation)
        assert method.chance == pytest.approx(chance, rel=1e-6)
        heads = sum(not method.needs_previous_gradients(step, 7) for step in range(1, 4001)) / 4000
        assert heads == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 4000) + 1e-9)
        assert not any(method.needs_previous_gradients(0, seed) for seed in range(50))
    warming = MARINA(RandomK(0.5, unbiased=True), warmup=9)
    assert not any(warming.needs_previous_gradients(step, 1) for step in range(10))
    one, other = MARINA(RandomK(0.5, unbiased=True)), MARINA(RandomK(0.5, unbiased=True), min_values=5)
    assert all(one.needs_previous_gradients(step, 4) == other.needs_previous_gradients(step, 4) for step in range(100))


def test_marina_refuses_what_is_biased_or_of_unknown_variance() -> None:
    for notation, sentence in [
        (
            "MARINA(TopK(0.1))",
            "`codec` must be unbiased: Identity, RandomK(..., unbiased=True), QSGD, Natural or TernGrad",
        ),
        ("MARINA(TernGrad(clip=None))", "`probability` must be given for TernGrad(clip=None), whose variance grows"),
        ("MARINA(Natural, probability=0)", "`probability` must be in (0, 1], but got 0"),
    ]:
        with pytest.raises(ValueError) as error:
            parse_replica_method(notation)
        assert sentence in str(error.value)
