"""The laws of every method that averages replica gradients, each a function of a variant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replica_variants import (
    SHAPES,
    Apart,
    Team,
    Variant,
    average,
    context,
    copy_of,
    dense_mean,
    gradients,
    same_tensors,
)

from raysim.codecs import NonFiniteError
from raysim.pipeline.groups import average_together
from raysim.replication import parse_replica_method
from raysim.replication.local import LocalSteps
from raysim.replication.method import agreed

STEPS = 6

MAY_HOLD_NOTHING = ("TwoShot(", "DGC(1.0)")  # sums that are exact, and a density that leaves no residual


def the_notation_is_the_method(variant: Variant) -> None:
    method = variant.method
    assert repr(method) == variant.notation
    assert parse_replica_method(repr(method)) == method
    assert hash(method) == hash(variant.method)


def all_replicas_take_the_same_step_and_nothing_given_is_touched(variant: Variant) -> None:
    for count, steps in ((3, STEPS), (4, 2)):
        team = Team(variant.method, count)
        variant.method.check(SHAPES, count, variant.momentum)
        for step in range(steps):
            given = [gradients(replica, step) for replica in range(count)]
            before, held = [copy_of(one) for one in given], [copy_of(memory) for memory in team.memories]
            memories = team.memories
            results = team.step(step, given)
            for result, own in zip(results, given, strict=True):
                assert list(result.gradients) == list(SHAPES)
                method: Any = variant.method
                parts = method.decentralized and step >= method.warmup
                compressed = method.compressed_shapes(SHAPES) if parts else {}
                for name, x in result.gradients.items():
                    assert torch.equal(x, own[name] if name in compressed else results[0].gradients[name])
                assert {name: tuple(x.shape) for name, x in result.gradients.items()} == SHAPES
                assert all(x.dtype == torch.float32 and torch.isfinite(x).all() for x in result.gradients.values())
                averaged, kept = (
                    {x.untyped_storage().data_ptr() for x in tensors.values()}
                    for tensors in (result.gradients, result.memory)
                )
                assert averaged.isdisjoint(kept)  # clipping overwrites gradients
                assert result.decisions == results[0].decisions
                assert result.with_momentum == results[0].with_momentum
            assert all(same_tensors(*pair) for pair in zip((*given, *memories), (*before, *held), strict=True))
            if variant.conserves:  # what was averaged and what is remembered sum to what was fed
                for name in SHAPES:
                    total = team.sent[name] + team.residual(name)
                    torch.testing.assert_close(total, team.fed[name], rtol=1e-5, atol=1e-5)
            if variant.exact:
                mean = dense_mean(given)
                assert same_tensors(results[0].gradients, mean) or not variant.bitwise
                for name, x in results[0].gradients.items():
                    torch.testing.assert_close(x, mean[name], rtol=1e-4, atol=1e-5)


def a_restored_memory_goes_on_bit_for_bit_and_is_no_more_than_stated(variant: Variant) -> None:
    one, other = Team(variant.method, 2), Team(variant.method, 2)
    for step in range(STEPS):
        expected, found = one.step(step), other.step(step)
        assert one.array_bytes == other.array_bytes
        for a, b in zip(expected, found, strict=True):
            assert same_tensors(a.gradients, b.gradients)
            assert same_tensors(a.memory, b.memory)
            assert a.decisions == b.decisions
        other.restore()
    stated = variant.method.memory_bytes(SHAPES)
    first, *others = one.memories
    if variant.method.common_memory:
        assert first
        assert all(same_tensors(first, other) for other in others)
    for memory in one.memories:
        held = sum(x.nbytes for name, x in memory.items() if not name.startswith("controller"))
        assert held <= stated
        assert held > 0 or stated == 0 or repr(variant.method).startswith(MAY_HOLD_NOTHING)


def one_replica_alone_and_no_layer_at_all_send_nothing(variant: Variant) -> None:
    results, array_bytes = average(variant.method, [gradients(0, 0)], [{}], [context(0, 1, 0)])
    assert array_bytes == [0]
    if variant.exact:
        for name, x in results[0].gradients.items():
            torch.testing.assert_close(x, gradients(0, 0)[name], rtol=1e-4, atol=1e-5)
    results, array_bytes = average(variant.method, [{}, {}], [{}, {}], [context(0, 2, 0), context(1, 2, 0)])
    assert [result.gradients for result in results] == [{}, {}]
    assert array_bytes == [0, 0]


def nan_is_refused(variant: Variant) -> None:
    for name in ("wide.weight", "first.bias"):
        given = [gradients(replica, 3) for replica in range(2)]
        given[1][name].view(-1)[4] = math.nan
        with pytest.raises(NonFiniteError):
            average_together(variant.method, given, [{}, {}], [context(0, 2, 3), context(1, 2, 3)])


LAWS: tuple[Callable[[Variant], None], ...] = (
    the_notation_is_the_method,
    all_replicas_take_the_same_step_and_nothing_given_is_touched,
    a_restored_memory_goes_on_bit_for_bit_and_is_no_more_than_stated,
    one_replica_alone_and_no_layer_at_all_send_nothing,
    nan_is_refused,
)


def keeps_all_laws(variant: Variant) -> None:
    for law in LAWS:
        law(variant)


def keeps_all_laws_of_local_steps(notation: str, *, whole: bool) -> None:
    """Of methods whose replicas step by themselves; `whole`: an exchange leaves them with the parameters that they agree on."""
    method = parse_replica_method(notation)
    assert repr(method) == notation
    assert parse_replica_method(repr(method)) == method
    assert hash(method) == hash(parse_replica_method(notation))
    for count in (1, 3):
        one, other, sent = Apart(notation, count), Apart(notation, count), 0
        by_part: dict[object, list[int]] = {}
        for step in range(max(STEPS, 3 * method.period)):
            part, held = method.part(step), one.memories
            results, _ = one.step(step), other.step(step)
            if any(other.memories):
                other.restore()
            for pair in zip((*one.parameters, *one.memories), (*other.parameters, *other.memories), strict=True):
                assert same_tensors(*pair)
            assert all(result.gradients == {} for result in results)
            assert part == method.part(step % method.period)
            if part is None:
                assert one.array_bytes == [0] * count
                if not method.steps_under_way:
                    assert all(result.parameters == {} for result in results)
                    assert all(
                        same_tensors(result.memory, before) for result, before in zip(results, held, strict=True)
                    )
            elif step >= method.period and not notation.startswith("DiLoCoX(2, rank"):  # whose rank adapts
                assert by_part.setdefault(part, one.array_bytes) == one.array_bytes
            known = [agreed(own, memory) for own, memory in zip(one.parameters, one.memories, strict=True)]
            if isinstance(method, LocalSteps):
                assert all(same_tensors(each, known[0]) for each in known)
            if whole and part is not None:
                assert count == 1 or min(one.array_bytes) > 0
                assert all(same_tensors(own, known[0]) for own in one.parameters)
            sent += sum(one.array_bytes)
            stored = [sum(x.nbytes for x in memory.values()) for memory in one.memories]
            assert max(stored) <= method.memory_bytes(SHAPES)
        for first in range(1, method.period + 1):  # a branch may begin at any step
            branch = Apart(notation, count)
            for step in range(first, first + 2 * method.period):
                branch.step(step)
        assert (sent > 0) is (count > 1)
        assert min(stored) > 0 or method.memory_bytes(SHAPES) == 0
