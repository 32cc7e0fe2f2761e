"""Laws of single replica methods, beyond the laws of all methods."""

from __future__ import annotations

import math

import pytest
import torch
from codec_variants import normal
from replica_variants import SHAPES, STEPS_PER_EPOCH, Team, average, context, dense_mean, gradients

from raysim.codecs import Mean, Quantize, TopK
from raysim.pipeline.groups import average_together
from raysim.replication import parse_replica_method
from raysim.replication.gathered import ReplicaEF21
from raysim.replication.low_rank import PowerSGD
from raysim.replication.sparsified import DGC, RedSync

MATRIX = {"weight": (40, 60)}


def low_rank(rank: int, seed: int = 1) -> torch.Tensor:
    return normal(40, rank, seed=seed) @ normal(rank, 60, seed=seed + 1)


def together(method, given, memories=None, step=0, **changes):
    count = len(given)
    contexts = [context(replica, count, step, **changes) for replica in range(count)]
    return average_together(method, given, memories or [{}] * count, contexts)


# TwoShot.


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_two_shots_send_what_a_ring_of_codes_sends(count: int) -> None:
    given = [{"weight": normal(64, 80, seed=replica)} for replica in range(count)]
    _, sent = together(parse_replica_method("TwoShot(Quantize(8))"), given)
    _, gathered = together(parse_replica_method("Quantize(8)"), given)
    values, header = 64 * 80, 64
    ring = 2 * (count - 1) / count * values
    assert all(ring <= size <= ring + 2 * (count - 1) * header for size in sent)
    assert all((count - 1) * values <= size <= (count - 1) * (values + header) for size in gathered)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_two_shots_code_each_chunk_twice(count: int) -> None:
    """By hand: the mean of chunk i holds replica i's own values and the others' decoded ones, and is coded once more."""
    codec = Quantize(8)
    given = [{"weight": normal(9, 13, seed=replica)} for replica in range(count)]
    chunks = [x["weight"].reshape(-1).tensor_split(count) for x in given]
    expected = []
    for i in range(count):
        total = torch.zeros_like(chunks[i][i])
        for replica in range(count):
            own = chunks[replica][i]
            total += own if replica == i else codec.encode(own[None], 0).decode()[0]
        expected.append(codec.encode((total / count)[None], 0).decode()[0])
    results, _ = together(parse_replica_method("TwoShot(Quantize(8), min_values=1)"), given)
    for result in results:
        assert torch.equal(result.gradients["weight"], torch.cat(expected).view(9, 13))


@pytest.mark.slow
def test_two_unbiased_shots_are_unbiased() -> None:
    draws, count = 250, 3
    given = [{"weight": normal(4, 6, seed=replica)} for replica in range(count)]
    method = parse_replica_method("TwoShot(QSGD(3), min_values=1)")
    mean = sum(x["weight"] for x in given).double() / count  # type: ignore[union-attr]
    drawn = torch.stack(
        [together(method, given, step=step)[0][0].gradients["weight"].double() for step in range(draws)]
    )
    error = drawn.std(dim=0) / math.sqrt(draws)
    assert ((drawn.mean(dim=0) - mean).abs() <= 5 * error + 1e-6).all()
    assert (drawn.std(dim=0) > 0).all()


def test_two_shots_need_chunks_of_any_length() -> None:
    with pytest.raises(
        ValueError, match=r"^`codec` must code chunks of any length, but LowRank\(2\) works on matrices"
    ):
        parse_replica_method("TwoShot(LowRank(2))")


# PowerSGD.


def test_l8_the_approximation_is_a_projection_of_the_mean() -> None:
    """For a given Q: P P^T mean(M); and over replicas the residuals' mean is what it withholds of the mean."""
    given = [gradients(replica, 0, MATRIX) for replica in range(3)]
    mean = dense_mean(given)["weight"].double()
    for error in ("average", "own"):
        results, _ = together(PowerSGD(3, error=error), given)
        found = results[0].gradients["weight"].double()
        torch.testing.assert_close(
            (found * found).sum() + ((mean - found) ** 2).sum(), (mean * mean).sum(), rtol=1e-5, atol=0
        )
        basis = torch.linalg.qr(found)[0][:, :3]
        torch.testing.assert_close(basis @ basis.T @ mean, found, rtol=1e-4, atol=1e-4)
        left = sum(result.memory["residual/weight"].double() for result in results) / 3
        torch.testing.assert_close(left, mean - found, rtol=1e-5, atol=1e-5)
        alone, _ = together(PowerSGD(3, error=error), [{"weight": mean.float()}])  # linear over replicas
        torch.testing.assert_close(alone[0].gradients["weight"].double(), found, rtol=1e-4, atol=1e-4)


def test_powersgd_is_exact_where_the_rank_suffices_and_takes_zeros() -> None:
    for gradient in (low_rank(2), low_rank(1), torch.zeros(40, 60)):
        results, _ = together(PowerSGD(2), [{"weight": gradient}, {"weight": gradient}])
        torch.testing.assert_close(results[0].gradients["weight"], gradient, rtol=1e-4, atol=1e-4)


def test_the_warm_start_tends_to_the_best_approximation() -> None:
    gradient, errors = low_rank(6), {}
    sizes = torch.linalg.svdvals(gradient.double())
    best = math.sqrt(float((sizes[2:] ** 2).sum()))
    for warm_start in (True, False):
        team, errors[warm_start] = Team(PowerSGD(2, feedback=False, warm_start=warm_start), 2, MATRIX), []
        for step in range(25):
            result = team.step(step, [{"weight": gradient}] * 2)[0]
            errors[warm_start].append(float((gradient - result.gradients["weight"]).norm()))
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in zip(errors[True], errors[True][1:], strict=False))
    assert errors[True][-1] == pytest.approx(best, rel=1e-3)
    assert min(errors[False]) > best * 1.001


def test_alternating_sides_send_half_and_tend_to_the_same() -> None:
    gradient = low_rank(6)
    sizes = torch.linalg.svdvals(gradient.double())
    best = math.sqrt(float((sizes[2:] ** 2).sum()))
    team = Team(PowerSGD(2, feedback=False, alternate=True), 2, MATRIX)
    sent = []
    for step in range(40):
        result = team.step(step, [{"weight": gradient}] * 2)[0]
        sent.append(team.array_bytes)
    assert sent[:4] == [2 * 4 * 2 * 40, 2 * 4 * 2 * 60] * 2  # 2 (D - 1) times the bytes of a side
    assert float((gradient - result.gradients["weight"]).norm()) == pytest.approx(best, rel=1e-3)
    whole = Team(PowerSGD(2), 2, MATRIX)
    whole.step(0)
    assert whole.array_bytes == 2 * 4 * 2 * (40 + 60)


def test_what_two_thin_matrices_do_not_make_small_stays_dense() -> None:
    for rank, exempt in ((2, False), (12, False), (13, True)):
        method = PowerSGD(rank, min_compression=1.9)
        assert method.exempts((40, 60)) is exempt, rank  # 2400 / (100 rank) against 1.9
    assert PowerSGD(2).exempts((2000,))


# DGC.


def velocities(count: int, steps: int, momentum: float = 0.9) -> torch.Tensor:
    """The sum over steps of the mean velocity, with nothing ever masked."""
    total, velocity = torch.zeros(40, 60, dtype=torch.float64), torch.zeros(40, 60, dtype=torch.float64)
    for step in range(steps):
        velocity = (
            momentum * velocity + sum(gradients(r, step, MATRIX)["weight"].double() for r in range(count)) / count
        )
        total += velocity
    return total


def test_l11_without_masking_what_was_sent_and_what_waits_is_the_sum_of_velocities() -> None:
    team = Team(DGC(0.03, masking=False), 2, MATRIX)
    for step in range(6):
        team.step(step)
    torch.testing.assert_close(team.sent["weight"] + team.residual("weight"), velocities(2, 6), rtol=1e-4, atol=1e-4)


def test_l11_all_sent_without_masking_is_momentum_sgd() -> None:
    team = Team(DGC(1.0, masking=False), 2, MATRIX)
    velocity = torch.zeros(40, 60)
    for step in range(5):
        result = team.step(step)[0]
        velocity = 0.9 * velocity + dense_mean([gradients(r, step, MATRIX) for r in range(2)])["weight"]
        torch.testing.assert_close(result.gradients["weight"], velocity, rtol=1e-4, atol=1e-4)
        assert result.with_momentum == {"weight"}


def test_l11_all_sent_with_masking_is_a_dense_step_that_leaves_momentum_to_the_optimiser() -> None:
    """Masked, the velocity would be the gradient itself, and momentum lost."""
    result = Team(DGC(1.0), 2, MATRIX).step(0)[0]
    assert result.with_momentum == frozenset()
    assert result.memory == {}


def test_masking_clears_velocity_and_what_waits_where_it_was_sent() -> None:
    team = Team(DGC(0.1), 1, MATRIX)
    for step in range(3):
        result = team.step(step)[0]
    sent = result.gradients["weight"] != 0
    memory = team.memories[0]
    assert int(sent.sum()) == 240
    assert not memory["residual/weight"].view(40, 60)[sent].any()
    assert not memory["velocity/weight"].view(40, 60)[sent].any()
    assert memory["velocity/weight"].view(40, 60)[~sent].all()


def test_density_falls_over_the_first_epochs() -> None:
    method = DGC(0.001, ramp=5)
    assert [round(method.density_of(epoch), 4) for epoch in range(6)] == [0.3162, 0.1, 0.0316, 0.01, 0.0032, 0.001]
    assert [round(1 - DGC(0.001, ramp=4).density_of(epoch), 3) for epoch in range(5)] == [
        0.749,
        0.937,
        0.984,
        0.996,
        0.999,
    ]
    team = Team(DGC(0.01, ramp=1), 1, MATRIX)
    for step, kept in ((0, 240), (STEPS_PER_EPOCH, 24)):
        assert int((team.step(step)[0].gradients["weight"] != 0).sum()) == kept


def test_gradients_are_clipped_before_they_build_up() -> None:
    given = [gradients(replica, 0) for replica in range(4)]
    norm = math.sqrt(sum(float(x.double().square().sum()) for x in given[1].values()))
    clipped, _ = average(DGC(0.1, clip_norm=1.0), given, [{}] * 4, [context(r, 4, 0) for r in range(4)])
    held = clipped[1].memory["velocity/wide.weight"].view(8, 150)
    sent = clipped[1].memory["residual/wide.weight"].view(8, 150) == 0
    torch.testing.assert_close(held[~sent], (given[1]["wide.weight"] * (0.5 / norm))[~sent], rtol=1e-5, atol=0)
    free, _ = average(DGC(0.1, clip_norm=1e6), given, [{}] * 4, [context(r, 4, 0) for r in range(4)])
    torch.testing.assert_close(free[0].gradients["first.bias"], dense_mean(given)["first.bias"])


def test_dgc_needs_momentum_to_correct() -> None:
    for momentum in (None, 0.0):
        with pytest.raises(ValueError) as error:
            DGC(0.01).check(SHAPES, 2, momentum)
        assert str(error.value) == (
            "`DGC` corrects the optimiser's momentum, but the optimiser has none. Use `optimizer.name=sgd` with "
            "`optimizer.momentum`, or `correction=False`."
        )
        DGC(0.01, correction=False).check(SHAPES, 2, momentum)
    DGC(0.01).check(SHAPES, 2, 0.9)


# RedSync.


def test_the_trimmed_search_is_topk_and_the_binary_one_keeps_k_to_2k() -> None:
    given = [gradients(replica, 0, MATRIX) for replica in range(2)]
    trimmed, _ = together(RedSync(0.05, search="trimmed"), given)
    exact, _ = together(parse_replica_method("ErrorFeedback(TopK(0.05))"), given)
    assert torch.equal(trimmed[0].gradients["weight"], exact[0].gradients["weight"])
    binary, _ = together(RedSync(0.05), [given[0]])
    assert 120 <= int((binary[0].gradients["weight"] != 0).sum()) <= 240


def test_messages_of_one_sign_take_turns_and_hold_one_value() -> None:
    team, given = Team(RedSync(0.05, same_sign=True), 1, MATRIX), [gradients(0, 0, MATRIX)]
    for step, sign in ((0, 1), (1, -1), (2, 1)):
        result = team.step(step, given)[0].gradients["weight"]
        values = result[result != 0]
        assert 120 <= len(values) <= 240
        assert len(values.unique()) == 1
        assert int(values[0].sign()) == sign


def test_the_mean_codec() -> None:
    packet = Mean().encode(torch.tensor([[1.0, 2.0], [4.0, 5.0]]))
    assert packet.array_bytes == 4
    assert torch.equal(packet.decode(), torch.full((2, 2), 3.0))
    x = normal(1000)
    decoded = Mean().encode(x).decode()
    assert float((x - decoded).double().sum()) == pytest.approx(0, abs=1e-3)
    assert float(x.square().sum()) == pytest.approx(
        float(decoded.square().sum() + (x - decoded).square().sum()), rel=1e-5
    )


# EF21.


def test_ef21_starts_from_the_first_gradient_or_from_zero() -> None:
    given = [gradients(replica, 0, MATRIX) for replica in range(2)]
    mean = dense_mean(given)["weight"]
    results, _ = together(ReplicaEF21(TopK(0.1)), given)
    assert torch.equal(results[0].gradients["weight"], mean)
    zero, _ = together(ReplicaEF21(TopK(0.1), start="zero"), given)
    plain, _ = together(parse_replica_method("TopK(0.1)"), given)
    assert torch.equal(zero[0].gradients["weight"], plain[0].gradients["weight"])


def test_ef21_of_a_frozen_gradient_is_exact_after_enough_steps_and_its_error_shrinks() -> None:
    given, team = (
        [gradients(replica, 0, MATRIX) for replica in range(2)],
        Team(ReplicaEF21(TopK(0.1), start="zero"), 2, MATRIX),
    )
    before = float(given[0]["weight"].double().square().sum())
    for step in range(10):
        result = team.step(step, given)[0]
        error = float((team.memories[0]["own/weight"] - given[0]["weight"]).double().square().sum())
        assert error <= 0.9 * before + 1e-9
        before = error
    torch.testing.assert_close(result.gradients["weight"], dense_mean(given)["weight"], rtol=1e-6, atol=1e-6)


def test_the_mean_that_is_known_is_the_mean_of_what_each_knows() -> None:
    for notation in (
        "EF21(TopK(0.1))",
        "EF21(QSGD(4), start='zero')",
    ):
        team = Team(parse_replica_method(notation), 3, MATRIX)
        for step in range(5):
            team.step(step)
        own = sum(memory["own/weight"].double() for memory in team.memories) / 3
        torch.testing.assert_close(team.memories[0]["mean/weight"].double(), own, rtol=1e-5, atol=1e-5)


# Accordion.


def test_accordion_switches_layer_by_layer_at_the_ends_of_intervals() -> None:
    shapes = {"calm": (40, 30), "wild": (30, 40)}
    norms: dict[str, list[float]] = {"calm": [10, 10, 10, 9, 6], "wild": [10, 10, 4, 6.1, 6]}
    team = Team(parse_replica_method("Accordion(TopK(0.5), TopK(0.1), interval=2)"), 2, shapes)
    seen = {}
    for step in range(STEPS_PER_EPOCH * 9):
        epoch = step // STEPS_PER_EPOCH
        given = []
        for _ in range(2):
            made = {}
            for name, shape in shapes.items():
                x = normal(*shape, seed=5)
                made[name] = x / x.norm() * (norms[name][epoch // 2] / STEPS_PER_EPOCH)
            given.append(made)
        for result in team.step(step, given):
            for decision in result.decisions:
                seen[step, decision.layer] = decision
        kept = int((team.memories[0]["residual/calm"] == 0).sum())
        assert kept == (600 if epoch < 4 else 120)
    check = STEPS_PER_EPOCH * 2
    assert sorted({step for step, _ in seen}) == [0, check, 2 * check, 3 * check, 4 * check]
    branches = {
        name: [seen[step, name].branch for step in (0, check, 2 * check, 3 * check, 4 * check)] for name in shapes
    }
    assert branches["calm"] == ["mild", "mild", "strong", "strong", "strong"]
    assert branches["wild"] == ["mild", "mild", "strong", "mild", "mild"]  # 10, 10, 4, 6.1: by 0.6, then by 0.525
    assert seen[2 * check, "calm"].event == "switch"
    assert seen[3 * check, "calm"].event is None
    assert seen[2 * check, "calm"].factor == 10.0


def test_a_fall_of_the_learning_rate_makes_all_layers_mild() -> None:
    shapes = {"weight": (40, 30)}
    team = Team(parse_replica_method("Accordion(LowRank(4), LowRank(1), interval=1)"), 2, shapes)
    branch = {}
    for step in range(STEPS_PER_EPOCH * 5):
        epoch = step // STEPS_PER_EPOCH
        given = [{"weight": normal(40, 30, seed=replica)} for replica in range(2)]
        result = team.step(step, given, learning_rate=0.1 if epoch < 3 else 0.01)[0]
        for decision in result.decisions:
            branch[epoch] = decision.branch
        assert team.memories[0]["right/weight"].shape == (30, 4 if branch[epoch] == "mild" else 1)
    assert branch == {0: "mild", 1: "mild", 2: "strong", 3: "mild", 4: "strong"}


@pytest.mark.parametrize(
    "notation",
    ["PowerSGD(31)", "Accordion(LowRank(31), LowRank(2))", "EF21(LowRank(31))", "ErrorFeedback(LowRank(31))"],
)
def test_a_rank_above_every_matrix_is_refused(notation: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_replica_method(notation).check(SHAPES, 2, 0.9)
    assert (
        str(error.value)
        == "`rank` must be at most 30, the rank of the largest matrix of the stage (silent.weight), but got 31."
    )
