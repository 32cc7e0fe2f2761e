"""Laws that hold for every method that averages replica gradients."""

from __future__ import annotations

import math

import pytest
import torch
from pipelines import few_of_each
from replica_laws import keeps_all_laws
from replica_variants import (
    LOCAL,
    SHAPES,
    VARIANTS,
    Team,
    Variant,
    average,
    context,
    dense_mean,
    gradients,
    same_tensors,
)

from raysim.pipeline.groups import Group, average_together, exchange_together
from raysim.replication import METHODS, parse_replica_method
from raysim.replication.method import ReplicaContext, average_given


def test_every_method_has_a_variant() -> None:
    variants = [variant.notation for variant in VARIANTS] + LOCAL
    assert set(METHODS) <= {type(parse_replica_method(notation)).name() for notation in variants}


ONE_OF_EACH = few_of_each(VARIANTS, 1, lambda variant: type(variant.method))


@pytest.mark.parametrize("variant", ONE_OF_EACH, ids=lambda variant: variant.notation)
def test_all_laws(variant: Variant) -> None:
    keeps_all_laws(variant)


# Gathered packets.


def test_small_and_one_dimensional_tensors_and_first_steps_are_dense() -> None:
    for notation, dense in [
        ("TopK(0.01)", {"first.bias", "tiny.weight", "last.bias"}),
        (
            "Gathered(TopK(0.01), min_values=1250)",
            {"first.bias", "tiny.weight", "last.bias", "wide.weight", "silent.weight"},
        ),
        ("Gathered(TopK(0.01), min_values=1)", {"first.bias", "last.bias"}),
        ("Gathered(TopK(0.01), warmup=1)", set(SHAPES)),
    ]:
        given = [gradients(replica, 0) for replica in range(2)]
        result, _ = average(parse_replica_method(notation), given, [{}, {}], [context(0, 2, 0), context(1, 2, 0)])
        mean = dense_mean(given)
        exact = {name for name in SHAPES if torch.equal(result[0].gradients[name], mean[name])}
        assert exact - {"silent.weight"} == dense - {"silent.weight"}


def test_bytes_of_packets() -> None:
    values = {name: math.prod(shape) for name, shape in SHAPES.items()}
    compressed = [values[name] for name in ("first.weight", "wide.weight", "silent.weight")]
    exempt = sum(values.values()) - sum(compressed)
    for count in (2, 4):
        bytes_dense = 2 * (count - 1) * 4 * exempt  # an all-reduce: 2 (D - 1)/D of the bytes, from each of D
        team = Team(parse_replica_method("Identity"), count)
        team.step(0)
        assert team.array_bytes == 2 * (count - 1) * 4 * sum(values.values())
        team = Team(parse_replica_method("Sign"), count)
        team.step(0)
        packets = sum(math.ceil(n / 8) + 4 for n in compressed)
        assert team.array_bytes == bytes_dense + count * (count - 1) * packets
        team = Team(parse_replica_method("RandomK(0.1)"), count)
        team.step(0)
        assert team.array_bytes == bytes_dense + 2 * (count - 1) * 4 * sum(math.ceil(0.1 * n) for n in compressed)
        team = Team(parse_replica_method("Gathered(RandomK(0.1), seeds='separate')"), count)
        team.step(0)
        packets = sum(4 * math.ceil(0.1 * n) + 8 for n in compressed)
        assert team.array_bytes == bytes_dense + count * (count - 1) * packets


def test_shared_seeds_keep_the_same_positions_and_separate_ones_others() -> None:
    kept = {}
    for seeds in ("shared", "separate"):
        team = Team(parse_replica_method(f"Gathered(RandomK(0.1), seeds={seeds!r})"), 2)
        result = team.step(0)[0]
        kept[seeds] = int((result.gradients["wide.weight"] != 0).sum())
        again = team.step(0)[0]
        assert same_tensors(result.gradients, again.gradients)
        assert not same_tensors(result.gradients, team.step(1)[0].gradients)
    assert kept["shared"] == 120
    assert 180 < kept["separate"] < 240


def test_unbiased_random_k_has_the_mean_for_its_mean() -> None:
    shapes = {"weight": (32, 33)}
    given = [gradients(replica, 0, shapes) for replica in range(2)]
    method, total, steps = parse_replica_method("RandomK(0.25, unbiased=True)"), torch.zeros(32, 33), 300
    for step in range(steps):
        results, _ = average_together(method, given, [{}, {}], [context(0, 2, step), context(1, 2, step)])
        total += results[0].gradients["weight"]
    mean = dense_mean(given)["weight"]
    assert ((total / steps - mean).abs() <= 5 * mean.abs() * math.sqrt(3 / steps) + 1e-6).all()


def test_a_stage_as_one_row_keeps_the_greatest_of_all() -> None:
    team = Team(parse_replica_method("Gathered(TopK(0.1), scope='stage')"), 1)
    given = [gradients(0, 0)]
    given[0]["wide.weight"] *= 100
    result = team.step(0, given)[0]
    assert not result.gradients["first.weight"].any()
    kept = int((result.gradients["wide.weight"] != 0).sum())
    assert kept == math.ceil(0.1 * (1800 + 1200 + 1200))


def descend(method, steps: int) -> list[torch.Tensor]:
    """Two replicas of f_i(w) = +-10 w_1 + (w_2 - 1)^2 / 2 from w = 0."""
    w, memories, path = torch.zeros(1, 2), [{}, {}], []
    for step in range(steps):
        given = [{"w": torch.stack([torch.tensor(sign), w[0, 1] - 1])[None]} for sign in (10.0, -10.0)]
        results, _ = average_together(method, given, memories, [context(0, 2, step), context(1, 2, step)])
        memories = [result.memory for result in results]
        w = w - 0.01 * results[0].gradients["w"]
        path.append(w[0])
    return path


@pytest.mark.slow
def test_error_feedback_matters() -> None:
    without = torch.stack(descend(parse_replica_method("Gathered(TopK(0.5), min_values=1)"), 100))
    assert (without == 0).all()
    path = torch.stack(descend(parse_replica_method("Gathered(ErrorFeedback(TopK(0.5)), min_values=1)"), 1200))
    assert (path[:, 0] == 0).all()
    late = path[-600:, 1]
    assert late.min() >= 0.93
    assert late.max() <= 1.04
    assert abs(late.mean() - 1) < 0.01


@pytest.mark.parametrize("notation", ["Identity", "ErrorFeedback(TopK(0.5))", "PowerSGD(1, min_values=1)"])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_only_a_gradient_missing_at_all_replicas_stays_missing(notation: str, num_replicas: int) -> None:
    method, names = parse_replica_method(notation), ["seen", "seen by one", "unseen"]
    unseen = [{"unseen"} if replica == 0 else {"seen by one", "unseen"} for replica in range(num_replicas)]
    given = [
        {name: torch.zeros(4, 6) if name in missing else torch.full((4, 6), 1.0 + replica) for name in names}
        for replica, missing in enumerate(unseen)
    ]
    contexts = [
        ReplicaContext(replica, num_replicas, 0, 0, steps_per_epoch=1, seed=0) for replica in range(num_replicas)
    ]
    rounds = [method.average(each, {}, context) for each, context in zip(given, contexts, strict=True)]
    plain, _ = average_together(method, given, [{}] * num_replicas, contexts)
    rounds = [average_given(each, missing, names) for each, missing in zip(rounds, unseen, strict=True)]
    group = Group(tuple((replica, 0) for replica in range(num_replicas)))
    for exchange, other in zip(
        exchange_together(group, rounds, method.table(names), num_values=72), plain, strict=True
    ):
        found = exchange.result.gradients
        assert list(found) == ["seen", "seen by one"]
        assert all(torch.equal(found[name], other.gradients[name]) for name in found)
