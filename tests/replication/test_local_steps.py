"""Laws of methods whose replicas step by themselves, and exchange parameters afterwards."""

import math

import numpy as np
import pytest
import torch
from codec_variants import normal
from engines import start, weights
from pipelines import REPLICAS
from replica_laws import keeps_all_laws_of_local_steps
from replica_variants import LOCAL, SHAPES, Apart, copy_of, dense_mean, gradients, same_tensors

from raysim.cli.train import exchange_words
from raysim.codecs.positions import index_bytes
from raysim.replication.local import from_blocks, to_blocks
from raysim.training.checkpoint import load_weights
from raysim.training.train import train
from raysim.units import format_bytes

ONE = {"weight": (4, 6)}


@pytest.mark.parametrize("notation", LOCAL)
def test_all_laws(notation) -> None:
    keeps_all_laws_of_local_steps(notation, whole=True)


# DiLoCo.


@pytest.mark.parametrize("count", [1, 2, 4])
def test_one_step_of_sgd_at_outer_rate_one_is_data_parallelism_bit_for_bit(count) -> None:
    """Of whole numbers and halves of them, so that no sum is rounded: (w - g_r) and w - mean(g) round differently."""
    targets = [{"weight": (8 * normal(4, 6, seed=seed)).round()} for seed in range(count)]
    team = Apart("DiLoCo(1, rate=1.0, momentum=0.0)", count, ONE)
    team.parameters = [{"weight": (8 * normal(4, 6, seed=9)).round()} for _ in range(count)]
    team.memories = [team.method.begin(own) for own in team.parameters]
    parallel = copy_of(team.parameters[0])
    for step in range(5):
        given = [{"weight": own["weight"] - one["weight"]} for own, one in zip(team.parameters, targets, strict=True)]
        mean = dense_mean([{"weight": parallel["weight"] - one["weight"]} for one in targets])
        parallel["weight"] -= 0.5 * mean["weight"]
        team.step(step, given, rate=0.5)
        assert all(torch.equal(own["weight"], parallel["weight"]) for own in team.parameters)


def test_one_step_of_sgd_in_a_run_is_data_parallelism_to_rounding(small) -> None:
    optimizer = {"name": "sgd", "learning_rate": 0.1, "momentum": 0.0}
    one, other = (
        start(small(**REPLICAS, optimizer=optimizer, replica_gradient=method))
        for method in ("Identity", "DiLoCo(1, rate=1.0, momentum=0.0)")
    )
    for step in range(4):
        one.step(step), other.step(step)
    for name, x in weights(one, 0).items():
        torch.testing.assert_close(weights(other, 0)[name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_one_replica_is_a_look_ahead_of_itself(steps, momentum) -> None:
    """On h w^2 / 2 an exchange multiplies (w, u) by a matrix: w goes to q^H w, and D is (1 - q^H) w."""
    curvature, inner, rate = 0.4, 0.5, 0.7
    team = Apart(f"DiLoCo({steps}, rate={rate}, momentum={momentum})", 1, {"w": (1, 1)})
    start_at = float(team.parameters[0]["w"])
    shrink = rate * (1 - (1 - inner * curvature) ** steps)
    turn = np.array([[1 - shrink * (1 + momentum), -(momentum**2)], [shrink, momentum]])
    for step in range(6 * steps):
        team.step(step, [{"w": curvature * team.parameters[0]["w"]}], rate=inner)
    expected = (np.linalg.matrix_power(turn, 6) @ [start_at, 0.0])[0]
    assert float(team.parameters[0]["w"]) == pytest.approx(expected, rel=1e-4)


def test_outer_step_equals_torch_nesterov() -> None:
    team = Apart("DiLoCo(2)", 2, ONE)
    outer = torch.nn.Parameter(team.parameters[0]["weight"].clone())
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=True)
    for step in range(8):
        given = [gradients(replica, step, ONE) for replica in range(2)]
        stepped = [own["weight"] - 0.125 * g["weight"] for own, g in zip(team.parameters, given, strict=True)]
        team.step(step, given)
        if step % 2:
            outer.grad = outer.detach() - (stepped[0] + stepped[1]) / 2
            optimizer.step()
            torch.testing.assert_close(team.parameters[0]["weight"], outer.detach(), rtol=1e-5, atol=1e-5)


def test_bytes_of_an_exchange_are_those_of_its_codec() -> None:
    values = sum(math.prod(shape) for shape in SHAPES.values())
    for count in (2, 4):
        team = Apart("DiLoCo(3)", count)
        sent = [team.step(step) and team.array_bytes for step in range(6)]
        exchange = 2 * (count - 1) * 4 * values  # of all replicas, by a reduce-scatter and an all-gather
        assert [sum(each) for each in sent] == [0, 0, exchange, 0, 0, exchange]  # type: ignore[arg-type]
    one, other = (
        Apart("DiLoCo(1, codec=ErrorFeedback(TopK(0.05)))"),
        Apart("DiLoCo(2, codec=ErrorFeedback(TopK(0.05)))"),
    )
    one.step(0), other.step(1)
    assert one.array_bytes == other.array_bytes < [4 * values] * 2


def test_the_codec_s_memory_counts_exchanges() -> None:
    """The same changes in the same exchanges leave the same residuals, whatever the number of steps between them."""
    one, other = (
        Apart("DiLoCo(1, codec=Gathered(ErrorFeedback(TopK(0.05)), warmup=1))"),
        Apart("DiLoCo(2, codec=Gathered(ErrorFeedback(TopK(0.05)), warmup=1))"),
    )
    still = [{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * 2
    for exchange in range(3):
        given = [gradients(replica, exchange) for replica in range(2)]
        one.step(exchange, given)
        other.step(2 * exchange, given)
        other.step(2 * exchange + 1, still)
        assert same_tensors(one.memories[1], other.memories[1])
        assert ("changes/residual/wide.weight" in one.memories[0]) is (exchange > 0)


# SparseLoCo.


def test_sparseloco_follows_its_formula_block_by_block() -> None:
    shapes = {"weight": (16, 24)}
    team = Apart("SparseLoCo(1, kept=3, side=8, values=Identity, min_values=1)", 2, shapes)
    agreed_on, residuals = team.parameters[0]["weight"].clone(), [torch.zeros(16, 24)] * 2
    for step in range(4):
        given = [gradients(replica, step, shapes) for replica in range(2)]
        sent = []
        for replica in range(2):
            fed = (
                0.95 * residuals[replica]
                + agreed_on
                - (team.parameters[replica]["weight"] - 0.125 * given[replica]["weight"])
            )
            mine = torch.zeros(16, 24)
            for row in range(0, 16, 8):
                for column in range(0, 24, 8):
                    block = fed[row : row + 8, column : column + 8].reshape(-1)
                    kept = block.abs().topk(3).indices
                    chosen = torch.zeros(64).index_copy(0, kept, block[kept]).view(8, 8)
                    mine[row : row + 8, column : column + 8] = chosen
            residuals[replica] = fed - mine
            sent.append(mine)
        team.step(step, given)
        agreed_on = agreed_on - 0.6 * (sent[0] + sent[1]) / 2
        torch.testing.assert_close(team.parameters[0]["weight"], agreed_on, rtol=1e-5, atol=1e-5)


def test_the_published_factor_of_sparseloco_is_one_of_twelve_bits_a_position_against_float32() -> None:
    values = 1024 * 1024
    team = Apart("SparseLoCo(1)", 2, {"weight": (1024, 1024)})
    team.step(0)
    blocks, kept = values // 4096, 64 * values // 4096
    positions = index_bytes("elias_fano", kept, values)
    assert team.array_bytes == [positions + kept * 2 // 8 + 4 * 4] * 2  # two bits a value, and four levels
    assert positions / kept == 1  # a byte each, as against 12 bits
    twelve = blocks * 64 * (12 + 2) / 8
    assert round(4 * values / twelve, 1) == 146.3
    assert round(2 * values / twelve, 1) == 73.1
    assert round(4 * values / team.array_bytes[0], 1) == 204.6
    assert round(2 * values / team.array_bytes[0], 1) == 102.3


def test_blocks_come_back() -> None:
    for shape in ((24, 3, 5, 5), (40,), (7, 9), (128, 96)):
        x = normal(*shape)
        assert torch.equal(from_blocks(to_blocks(x, 64), shape, 64), x)


# In a run.


def test_last_agreed_parameters_are_evaluated_and_exported(small, tmp_path) -> None:
    config = small(**REPLICAS, replica_gradient="DiLoCo(2)", steps=4)
    engine = start(config)
    begin = {name: x.detach().clone() for name, x in weights(engine, 0).items()}
    first = engine.evaluate("off")
    engine.step(0)
    assert any(not torch.equal(x, begin[name]) for name, x in weights(engine, 0).items())
    assert engine.evaluate("off") == first
    engine.step(1)
    held = {name: x.detach().clone() for name, x in weights(engine, 0).items()}
    second = engine.evaluate("off")
    assert second != first
    engine.step(2)
    assert engine.evaluate("off") == second
    for worker in engine.workers:
        for index in worker.stages:
            mine = worker.averaging.agreed(index)
            assert all(torch.equal(x, held[f"{index}.{name}"]) for name, x in mine.items())
    engine.step(3)
    run = train(config, out=tmp_path / "run", engine="inline")
    left = load_weights(run.folder)
    assert all(torch.equal(x, left[name.split(".", 1)[1]]) for name, x in weights(engine, 0).items())


def test_records_hold_the_steps_without_an_exchange(small, tmp_path) -> None:
    run = train(small(**REPLICAS, replica_gradient="DiLoCo(3)"), out=tmp_path / "run", engine="inline")
    rows = run.links[run.links["direction"] == "replica_gradient"]
    silent = rows[rows["step"] % 3 != 2]
    assert not silent[["rounds", "packets", "wire_bytes"]].to_numpy().any()
    exchanges = rows[(rows["step"] % 3 == 2) & (rows["dense_bytes"] > 0)]
    assert (exchanges["rounds"] == 2).all()
    assert (exchanges["wire_bytes"] > 0).all()
    assert rows.groupby("stage")["dense_bytes"].nunique().eq(1).all()  # those of data parallelism, in every step
    sent = run.collectives.groupby("step")["wire_bytes"].sum()
    by_step = rows[rows["wire_bytes"] > 0].groupby("step")["wire_bytes"].sum()
    assert sent.to_dict() == by_step.to_dict()
    size = format_bytes(float(by_step[2]))
    assert exchange_words(run.links) == (
        f"Replicas exchanged something in 2 of 6 steps: {size} an exchange, {size} at most, "
        f"{format_bytes(by_step[2] / 3)} a step in the mean."
    )
    assert (run.row["exchange_period"], run.row["exchange_delay"]) == (3, 0)
