"""PowerGossip (Vogels et al. 2020, 2008.01425): replicas that part, and what keeps them together."""

from itertools import pairwise

import pytest
import torch
from codec_variants import normal
from engines import start, weights
from pipelines import REPLICAS
from replica_variants import Team, context

from raysim.pipeline.groups import average_together
from raysim.replication.low_rank import PowerGossip, orthonormal_float32
from raysim.training.checkpoint import load_weights
from raysim.training.train import train

SHAPE = {"weight": (40, 3, 10)}
STILL = {"weight": torch.zeros(SHAPE["weight"])}  # no gradient: replicas only gossip


def apart(count, rank=None):
    """Return parameters of replicas, of which each pair differs by a matrix of `rank`, or by any."""
    common = normal(40, 30, seed=9)
    own = [
        normal(40, rank, seed=i) @ normal(rank, 30, seed=50 + i) if rank else normal(40, 30, seed=i)
        for i in range(count)
    ]
    return [{"weight": (common + x).view(SHAPE["weight"])} for x in own]


def gossip(method, parameters, steps, first=1):
    """Let replicas gossip for some steps; return their parameters after each, as matrices."""
    count, memories, seen = len(parameters), [{}] * len(parameters), []
    for step in range(first, first + steps):
        contexts = [context(i, count, step, parameters=parameters[i]) for i in range(count)]
        results, _ = average_together(method, [STILL] * count, memories, contexts)
        memories, parameters = [r.memory for r in results], [r.parameters for r in results]
        seen.append([x["weight"].view(40, 30).double() for x in parameters])
    return seen


def spread(matrices):
    mean = sum(matrices) / len(matrices)
    return float(sum((x - mean).square().sum() for x in matrices))


def test_neighbours_are_those_of_a_ring() -> None:
    method = PowerGossip()
    assert [method.neighbours(i, 2) for i in range(2)] == [[1], [0]]
    assert [method.neighbours(i, 3) for i in range(3)] == [[1, 2], [0, 2], [0, 1]]
    assert [method.neighbours(i, 5) for i in (0, 2)] == [[1, 4], [1, 3]]
    assert method.neighbours(0, 1) == []


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_mean_stays_and_the_distance_never_grows(count) -> None:
    given = apart(count)
    start_at = [x["weight"].view(40, 30).double() for x in given]
    mean, distances = sum(start_at) / count, [spread(start_at)]
    for matrices in gossip(PowerGossip(rank=2), given, 20):
        torch.testing.assert_close(sum(matrices) / count, mean, rtol=1e-5, atol=1e-5)
        distances.append(spread(matrices))
    assert all(later <= before * (1 + 1e-6) for before, later in pairwise(distances))
    assert distances[-1] < 0.5 * distances[0]


def test_an_iteration_projects_the_difference_on_what_the_last_one_found() -> None:
    """With two replicas each goes half of the way, along the columns that both remember."""
    given = apart(2)
    steps = gossip(PowerGossip(rank=2), given, 3)
    for (before, after), step in zip(pairwise(steps), (2, 3), strict=True):
        difference, change = before[1] - before[0], after[0] - before[0]
        torch.testing.assert_close(change, before[1] - after[1], rtol=1e-4, atol=1e-5)
        left, size, right = torch.linalg.svd(change)
        assert int((size > 1e-4 * size[0]).sum()) == 2
        projected = left[:, :2] @ left[:, :2].T @ difference if step % 2 == 0 else difference @ right[:2].T @ right[:2]
        torch.testing.assert_close(change, projected / 2, rtol=1e-3, atol=1e-4)


def test_difference_within_rank_is_removed_in_one_step() -> None:
    """After one iteration has found its columns, the next one removes a difference of rank 1 whole."""
    one = {"weight": torch.zeros(SHAPE["weight"])}
    other = {"weight": (normal(40, 1, seed=1) @ normal(1, 30, seed=2)).view(SHAPE["weight"])}
    steps = gossip(PowerGossip(), [one, other], 2)
    assert spread(steps[0]) > 1e-3
    assert spread(steps[1]) < 1e-9
    torch.testing.assert_close(steps[1][0], other["weight"].view(40, 30).double() / 2, rtol=1e-4, atol=1e-5)


def test_both_ends_remember_the_same_and_send_a_side_a_step() -> None:
    team = Team(PowerGossip(rank=2), 3, SHAPE)
    for step in range(6):
        team.step(step)
        assert team.array_bytes == (0 if step == 0 else 3 * 2 * 4 * 2 * (40 if step % 2 else 30))
        for me, memory in enumerate(team.memories):
            for name, x in memory.items():
                side, other, rest = name.split("/", 2)
                assert torch.equal(x, team.memories[int(other)][f"{side}/{me}/{rest}"])
    basis = orthonormal_float32(team.memories[0]["left/1/weight"].double())
    assert basis.shape == (40, 2)


def test_the_mean_of_parameters_follows_the_mean_gradient() -> None:
    team = Team(PowerGossip(), 3, SHAPE)
    for step in range(8):
        mean = sum(own["weight"].double() for own in team.parameters) / 3
        results = team.step(step)
        taken = sum(result.gradients["weight"].double() for result in results) / 3
        after = sum(own["weight"].double() for own in team.parameters) / 3
        torch.testing.assert_close(after, mean - 0.1 * taken, rtol=1e-5, atol=1e-6)
    assert not torch.equal(team.parameters[0]["weight"], team.parameters[1]["weight"])


def test_mean_of_replicas_is_evaluated_and_exported(small, tmp_path) -> None:
    config = small(**REPLICAS, replica_gradient="PowerGossip(min_values=16)")
    engine = start(config)
    for step in range(3):
        engine.step(step)
    held = [{name: x.detach().clone() for name, x in weights(engine, replica).items()} for replica in range(2)]
    assert any(not torch.equal(x, held[1][name]) for name, x in held[0].items())
    evaluated = engine.evaluate("off")
    for replica in range(2):
        assert all(torch.equal(x, held[replica][name]) for name, x in weights(engine, replica).items())
    mean = {name: ((x.double() + held[1][name].double()) / 2).float() for name, x in held[0].items()}
    for replica in range(2):
        for name, x in weights(engine, replica).items():
            x.data.copy_(mean[name])
    assert engine.evaluate("off") == evaluated
    run = train(config.changed(steps=3), out=tmp_path / "run", engine="inline")
    left = load_weights(run.folder)
    assert all(torch.equal(x, left[name.split(".", 1)[1]]) for name, x in mean.items())
