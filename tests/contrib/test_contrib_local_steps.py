"""Local steps are the formulas of their sources, and older methods in their limits."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from codec_variants import normal
from raysim_contrib.asyncsparta import AsyncSPARTA
from raysim_contrib.dilocox import CodedFactors, DiLoCoX, effective_rank
from replica_variants import (
    SHAPES,
    Apart,
    Team,
    average,
    context,
    dense_mean,
    gradients,
    same_tensors,
)

from raysim.codecs import Identity, Quantize
from raysim.replication.method import AGREED

STEPS = 8
MATRIX = {"weight": (40, 60)}
ONE = {"weight": (4, 6)}


# DiLoCoX.


@pytest.mark.parametrize("count", [1, 2, 3])
def test_dilocox_without_delay_rank_and_codec_is_diloco_bit_for_bit(count) -> None:
    one, other = Apart("DiLoCo(3)", count), Apart("DiLoCoX(3, values=Identity, delay=0)", count)
    for step in range(9):
        one.step(step), other.step(step)
        assert all(same_tensors(*pair) for pair in zip(one.parameters, other.parameters, strict=True))


def test_a_delayed_outer_step_is_that_of_the_changes_of_the_exchange_before() -> None:
    """On h w^2 / 2 with one replica: w goes to q^H w inside, and the change of one exchange is applied at the next."""
    curvature, inner, rate, steps = 0.4, 0.5, 0.7, 3
    team = Apart(f"DiLoCoX({steps}, rate={rate}, momentum=0.0, values=Identity)", 1, {"w": (1, 1)})
    w, waiting = float(team.parameters[0]["w"]), 0.0
    for step in range(6 * steps):
        team.step(step, [{"w": curvature * team.parameters[0]["w"]}], rate=inner)
        if step % steps == steps - 1:
            w, waiting = w - rate * waiting, w * (1 - (1 - inner * curvature) ** steps)
            assert float(team.parameters[0]["w"]) == pytest.approx(w, rel=1e-4)


@pytest.mark.parametrize("method", [CodedFactors(3, Quantize(4), 0)], ids=repr)
def test_coded_factors_telescope(method) -> None:
    team = Team(method, 3)
    for step in range(STEPS):
        team.step(step)
    for name in SHAPES:
        torch.testing.assert_close(team.sent[name] + team.residual(name), team.fed[name], rtol=1e-4, atol=1e-4)


def test_the_rank_falls_to_that_of_the_changes() -> None:
    """Changes of rank 2 under rank 8: after a window the factors have about two columns."""
    team = Apart("DiLoCoX(1, rate=0.1, momentum=0.0, rank=8, values=Identity, window=3, delay=0)", 2, MATRIX)
    given = [{"weight": normal(40, 2, seed=1) @ normal(2, 60, seed=2)}] * 2
    sent = [team.step(step, given) and sum(team.array_bytes) for step in range(8)]
    assert sent[:3] == [2 * 4 * 8 * 100] * 3
    assert sent[-1] == 2 * 4 * 2 * 100
    assert effective_rank(normal(60, 4)) == pytest.approx(4, abs=0.2)


# HALoS.


def test_halos_with_one_site_is_diloco() -> None:
    plain = "merge=1.0, global_rate=1.0, global_momentum=0.0, delay=0"
    one, other = Apart("DiLoCo(2)", 3), Apart(f"HALoS(2, rate=0.7, sites=1, updates=1, {plain})", 3)
    for step in range(8):
        one.step(step), other.step(step)
        for a, b in zip(one.parameters, other.parameters, strict=True):
            for name, x in a.items():
                torch.testing.assert_close(b[name], x, rtol=1e-4, atol=1e-5)


def test_halos_with_plain_averages_is_the_mean_of_all() -> None:
    settings = "rate=1.0, sites=2, momentum=0.0, updates=1, global_rate=1.0, global_momentum=0.0, merge=1.0, delay=0"
    one, other = Apart("DiLoCo(2, rate=1.0, momentum=0.0)", 4), Apart(f"HALoS(2, {settings})", 4)
    for step in range(8):
        one.step(step), other.step(step)
        for name, x in one.parameters[3].items():
            torch.testing.assert_close(other.parameters[3][name], x, rtol=1e-4, atol=1e-5)


def test_halos_is_its_formula_with_sites_that_merge_late() -> None:
    """By hand, of two sites of two replicas: what is sent in exchange 1 of 2 is merged in exchange 2."""
    team = Apart(
        "HALoS(1, rate=0.6, momentum=0.5, updates=2, global_rate=0.4, global_momentum=0.3, merge=0.25)", 4, MATRIX
    )
    sites = [team.parameters[0]["weight"].double().clone() for _ in range(2)]
    server, merged = sites[0].clone(), [x.clone() for x in sites]
    zero = torch.zeros_like(server)
    speeds, speed, waiting = [zero, zero], zero, server
    for exchange in range(1, 7):
        given = [gradients(replica, exchange, MATRIX) for replica in range(4)]
        team.step(exchange - 1, given)
        for site in range(2):
            mean = 0.125 * (given[2 * site]["weight"].double() + given[2 * site + 1]["weight"].double()) / 2
            speeds[site] = 0.5 * speeds[site] + 0.6 * mean
            sites[site] = sites[site] - 0.5 * speeds[site] - 0.6 * mean
        if exchange % 2:
            mean = (merged[0] - sites[0] + merged[1] - sites[1]) / 2
            speed = 0.3 * speed + 0.4 * mean
            server = server - 0.3 * speed - 0.4 * mean
            waiting = server
        else:
            sites = [0.75 * site + 0.25 * waiting for site in sites]
            merged = [site.clone() for site in sites]
            torch.testing.assert_close(team.memories[3]["agreed/weight"].double(), waiting, rtol=1e-4, atol=1e-5)
        for replica in range(4):
            torch.testing.assert_close(
                team.parameters[replica]["weight"].double(), sites[replica // 2], rtol=1e-4, atol=1e-5
            )


def test_halos_sends_the_models_of_two_levels_of_servers() -> None:
    """Of four replicas on two sites: two changes and two models within sites; one of each between them, and a copy for members."""
    team = Apart("HALoS(1, updates=2)", 4, MATRIX)
    model = 4 * 40 * 60
    sent = [team.step(step) and team.array_bytes for step in range(4)]
    assert sent[0] == [
        model + model,
        model,
        model + model,
        model,
    ]  # the global model, and a site's change, cross between sites
    assert sent[1] == [2 * model, model, 2 * model, model]  # a member gets both models


# AsyncSPARTA.


def test_sparse_averages_without_delay_visit_every_position() -> None:
    team = Apart("AsyncSPARTA(share=0.25, delay=0)", 3, MATRIX)
    for cycle in range(2):
        visited = torch.zeros(2400)
        for part in range(4):
            step = 4 * cycle + part
            given = [gradients(replica, step, MATRIX) for replica in range(3)]
            stepped = [own["weight"] - 0.125 * g["weight"] for own, g in zip(team.parameters, given, strict=True)]
            team.step(step, given)
            mean = torch.stack(stepped).mean(dim=0)
            same = (team.parameters[0]["weight"] == team.parameters[1]["weight"]).view(-1)
            assert int(same.sum()) == 600
            visited += same
            torch.testing.assert_close(
                team.parameters[2]["weight"].view(-1)[same], mean.view(-1)[same], rtol=1e-5, atol=1e-6
            )
            for own, before in zip(team.parameters, stepped, strict=True):
                assert torch.equal(own["weight"].view(-1)[~same], before.view(-1)[~same])
        assert (visited == 1).all()


def test_all_values_without_delay_are_their_mean() -> None:
    team = Apart("AsyncSPARTA(share=1.0, delay=0)", 3)
    for step in range(3):
        team.step(step)
        assert all(same_tensors(own, team.parameters[0]) for own in team.parameters)


def test_delayed_average_is_corrected_by_moving_mean() -> None:
    shapes = {"weight": (6, 7)}
    team = Apart("AsyncSPARTA(share=1.0, delay=2, decay=0.75, scale=0.5)", 2, shapes)
    now = [team.parameters[0]["weight"].double().clone() for _ in range(2)]
    past: list[list[torch.Tensor]] = []
    smooth: list[torch.Tensor | None] = [None, None]
    for step in range(6):
        given = [gradients(replica, step, shapes) for replica in range(2)]
        team.step(step, given)
        now = [x - 0.125 * g["weight"] for x, g in zip(now, given, strict=True)]
        past.append(list(now))
        if step >= 2:
            then = past[step - 2]
            for i in range(2):
                progress, held = now[i] - then[i], smooth[i]
                smooth[i] = progress if held is None else 0.75 * held + 0.25 * progress
                now[i] = sum(then) / 2 + 0.5 * smooth[i]
        for own, x in zip(team.parameters, now, strict=True):
            torch.testing.assert_close(own["weight"].double(), x, rtol=1e-4, atol=1e-5)


def test_the_decay_rises_by_half_a_cosine() -> None:
    method = AsyncSPARTA(rise=100, until=301)
    assert [round(method.decay_of(step), 4) for step in (0, 99, 100, 200, 300, 400)] == [
        0.5,
        0.5,
        0.5,
        0.745,
        0.99,
        0.99,
    ]


def test_coded_factors_equal_formula() -> None:
    """By hand, without a codec: three replicas, two matrices, and one whose factors would not be smaller than itself."""
    shapes = {"a": (20, 30), "b": (12, 16), "c": (3, 4)}
    team = Team(CodedFactors(3, Identity(), 2, min_values=1), 3, shapes)
    rank, shares = 3, []
    left: list[dict[str, torch.Tensor]] = [{name: torch.zeros(shape).double() for name, shape in shapes.items()}] * 3
    starts: dict[str, torch.Tensor] = {}
    for step in range(9):
        given = [
            {name: normal(*shape, seed=30 * step + replica) for name, shape in shapes.items()} for replica in range(3)
        ]
        for g in given:  # of about one column at "a", of three at "b"
            g["a"] += 40 * normal(20, 1, seed=1) @ normal(1, 30, seed=2)
        fed = [{name: g[name].double() + held[name] for name in shapes} for g, held in zip(given, left, strict=True)]
        results = team.step(step, given)
        ranks = []
        for name in ("a", "b"):
            if name in starts:  # drawn in the first exchange
                lefts = torch.stack([x[name] @ starts[name][:, :rank] for x in fed]).mean(dim=0)
                base = torch.linalg.qr(lefts).Q
                right = torch.stack([x[name].T @ base for x in fed]).mean(dim=0)
                torch.testing.assert_close(results[0].gradients[name].double(), base @ right.T, rtol=1e-4, atol=1e-4)
                for replica in range(3):
                    rest = fed[replica][name] - base @ (fed[replica][name].T @ base).T
                    held = team.memories[replica][f"residual/{name}"].double()
                    torch.testing.assert_close(held.view_as(rest), rest, rtol=1e-4, atol=1e-4)
            starts[name] = team.memories[0][f"right/{name}"].double()
            assert starts[name].shape == (shapes[name][1], rank)
            energy = starts[name].square().sum(dim=0) / starts[name].square().sum()
            ranks.append(float(torch.exp(-(energy * energy.log()).sum())))
        assert "right/c" not in team.memories[0]
        torch.testing.assert_close(
            results[0].gradients["c"].double(), torch.stack([x["c"] for x in fed]).mean(dim=0), rtol=1e-5, atol=1e-5
        )
        left = [
            {name: memory[f"residual/{name}"].double().view(shape) for name, shape in shapes.items()}
            for memory in team.memories
        ]
        shares.append(sum(ranks) / 2)
        if len(shares) == 2:
            rank, shares = max(1, min(rank, math.ceil(sum(shares) / 2))), []
    assert rank == 2  # of 1 and 3 columns, say: the mean over matrices, not the greatest


def test_late_averages_of_parts_are_placed_where_they_were_sent_from() -> None:
    shapes = {"a": (6, 7), "b": (6, 7)}
    notation = "AsyncSPARTA(share=0.3, delay=2, steps=2, decay=0.75, scale=0.5, rise=4, until=20)"
    team = Apart(notation, 2, shapes)
    method = cast(AsyncSPARTA, team.method)
    now = [{name: x.double().clone() for name, x in own.items()} for own in team.parameters]
    past: list[tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]] = []
    smooth: list[dict[tuple[str, int], Any]] = [{}, {}]
    for step in range(24):
        given = [gradients(replica, step, shapes) for replica in range(2)]
        team.step(step, given)
        now = [{name: x - 0.125 * g[name] for name, x in own.items()} for own, g in zip(now, given, strict=True)]
        if step % 2:
            exchange, where = step // 2, context(0, 2, step)
            places = {name: method.positions(name, 42, exchange, where, torch.device("cpu")) for name in shapes}
            past.append((places, [{name: x.clone() for name, x in own.items()} for own in now]))
            decay = method.decay_of(step)
            if exchange >= 2:
                places, then = past[exchange - 2]
                for i, own in enumerate(now):
                    for name, at in places.items():
                        for j in at.tolist():
                            start = [each[name].view(-1)[j] for each in then]
                            progress = own[name].view(-1)[j] - start[i]
                            held = smooth[i].get((name, j), 0.0)
                            first = exchange == 2
                            smooth[i][name, j] = progress if first else decay * held + (1 - decay) * progress
                            own[name].view(-1)[j] = (start[0] + start[1]) / 2 + 0.5 * smooth[i][name, j]
        for own, x in zip(team.parameters, now, strict=True):
            for name in shapes:
                torch.testing.assert_close(own[name].double(), x[name], rtol=1e-4, atol=1e-5)
    drawn = [tuple(places["a"].tolist()) for places, _ in past]
    assert len(set(drawn)) == len(drawn)  # another order in each cycle
    assert all(places["a"].tolist() != places["b"].tolist() for places, _ in past)
    assert method.steps_under_way == 4
    assert (DiLoCoX(5).steps_under_way, DiLoCoX(5, delay=0).steps_under_way) == (5, 0)


def test_a_branch_with_another_seed_places_late_averages_where_its_parent_drew_them() -> None:
    """Equal replicas that do not move have averages equal to their parameters."""
    team, still = Apart("AsyncSPARTA(share=0.3, delay=1)", 2, MATRIX), [{"weight": torch.zeros(40, 60)}] * 2
    team.step(0, still)
    results, _ = average(team.method, team.parameters, team.memories, [context(i, 2, 1, seed=9) for i in range(2)])
    assert all(same_tensors(result.parameters, team.parameters[0]) for result in results)


# Streaming.


def test_one_fragment_without_delay_is_diloco_bit_for_bit() -> None:
    one, other = Apart("DiLoCo(3)"), Apart("StreamingDiLoCo(3, fragments=1)")
    for step in range(6):
        one.step(step), other.step(step)
        assert one.array_bytes == other.array_bytes
        assert all(same_tensors(*pair) for pair in zip(one.parameters, other.parameters, strict=True))


def test_fragments_share_the_bytes_and_the_peak_falls() -> None:
    streaming, whole = Apart("StreamingDiLoCo(6, fragments=3)"), Apart("DiLoCo(6)")
    method: Any = streaming.method
    fragments = [method.fragment(SHAPES, part) for part in range(3)]
    assert sorted(name for names in fragments for name in names) == sorted(SHAPES)
    sent = [[team.step(step) and sum(team.array_bytes) for step in range(6)] for team in (streaming, whole)]
    assert [step for step, size in enumerate(sent[0]) if size] == [1, 3, 5]
    assert sum(sent[0]) == sum(sent[1]) == sent[1][5]  # type: ignore[arg-type]
    largest = max(sum(math.prod(SHAPES[name]) for name in names) for names in fragments)
    assert max(sent[0]) == 2 * 4 * largest < 0.5 * max(sent[1])  # type: ignore[operator]


@pytest.mark.parametrize("delay", [1, 2])
def test_delayed_messages_arrive_after_delay(delay) -> None:
    """The delay of an exchange changes nothing if the replicas take no steps meanwhile."""
    one, other = Apart("DiLoCo(4)"), Apart(f"StreamingDiLoCo(4, fragments=1, delay={delay})")
    still = [{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * 2
    for step in range(12):
        given = still if step % 4 >= 4 - delay else [gradients(replica, step) for replica in range(2)]
        one.step(step, given), other.step(step, given)
        assert bool(sum(other.array_bytes)) is (step % 4 == 3 - delay)
        if step % 4 == 3:
            assert all(same_tensors(*pair) for pair in zip(one.parameters, other.parameters, strict=True))


def test_own_parameters_are_blended_with_those_agreed_on() -> None:
    team = Apart("StreamingDiLoCo(2, fragments=1, blend=0.25)", 2, ONE)
    for step in range(4):
        given = [gradients(replica, step, ONE) for replica in range(2)]
        stepped = [own["weight"] - 0.125 * g["weight"] for own, g in zip(team.parameters, given, strict=True)]
        team.step(step, given)
        if step % 2:
            for own, mine, memory in zip(team.parameters, stepped, team.memories, strict=True):
                expected = torch.lerp(memory[f"{AGREED}/weight"], mine, 0.25)
                torch.testing.assert_close(own["weight"], expected, rtol=1e-6, atol=1e-6)


# SPARTA.


def test_sparta_averages_the_positions_that_are_drawn_and_no_others() -> None:
    team = Apart("SPARTA(share=0.2)", 3)
    for step in range(3):
        given = [gradients(replica, step) for replica in range(3)]
        stepped = [
            {name: x - 0.125 * g[name] for name, x in own.items()}
            for own, g in zip(team.parameters, given, strict=True)
        ]
        team.step(step, given)
        mean, total = dense_mean(stepped), 0
        for name, x in mean.items():
            same = torch.stack([own[name] == team.parameters[0][name] for own in team.parameters]).all(dim=0)
            drawn = same & (team.parameters[0][name] != stepped[0][name])
            total += math.ceil(0.2 * x.numel())
            assert int(drawn.sum()) <= math.ceil(0.2 * x.numel())
            for own, before in zip(team.parameters, stepped, strict=True):
                changed = own[name] != before[name]
                torch.testing.assert_close(own[name][changed], x[changed], rtol=1e-6, atol=1e-6)
        assert sum(team.array_bytes) == 2 * 2 * 4 * total


def test_full_share_averages_all_parameters() -> None:
    team = Apart("SPARTA(share=1.0)", 2)
    for step in range(3):
        team.step(step)
        assert same_tensors(*team.parameters)
