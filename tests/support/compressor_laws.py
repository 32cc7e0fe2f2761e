"""Laws of compressors: functions of a variant, and of a dtype where that matters, over every sequence of messages."""

from __future__ import annotations

import inspect
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from codec_variants import normal
from compressor_variants import (
    MICROBATCHES,
    ROW,
    ROWS,
    SAMPLES,
    STEPS_PER_EPOCH,
    Pair,
    Variant,
    bits_of,
    context,
    copy_of,
    message,
    messages,
    same_packet,
    same_state,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysim.codecs import NonFiniteError
from raysim.compressors import AtSupport, Plain, parse
from raysim.pipeline.link import EVALUATION_MODES

any_sequence = settings(max_examples=5, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None)


def is_written_as_it_is_parsed(variant: Variant) -> None:
    method = variant.method
    assert repr(method) == variant.notation
    assert parse(repr(method)) == method
    assert hash(parse(repr(method))) == hash(method)
    assert pickle.loads(pickle.dumps(method)) == method


def shape_and_dtype_are_kept_and_nothing_given_is_touched(variant: Variant, dtype: torch.dtype) -> None:
    method, sender, receiver = variant.method, {}, {}
    for x, facts in messages(0, 6, dtype):
        before, held, other = x.clone(), copy_of(sender), copy_of(receiver)
        packet, changes = method.encode(x, sender, facts)
        y, moved = method.decode(packet, receiver, facts)
        assert y.shape == x.shape
        assert y.dtype == x.dtype
        assert torch.isfinite(y).all()
        assert bits_of(x) == bits_of(before)
        assert same_state(sender, held)  # the state that is passed in stays as it is, at both ends
        assert same_state(receiver, other)
        stores = {row.untyped_storage().data_ptr() for row in moved.values()}
        assert y.untyped_storage().data_ptr() not in stores  # the receiver's layers may write to what they are given
        method.commit(sender, changes)
        method.commit(receiver, moved)
        assert packet.dense_bytes == x.nbytes or isinstance(method, AtSupport)
        assert all(isinstance(array, np.ndarray) for array in packet.arrays.values())


def both_ends_are_equal_bit_for_bit(variant: Variant, dtype: torch.dtype) -> None:
    pair = Pair(variant.method)
    for step in range(10):
        pair.step(step, dtype)
        for mode in EVALUATION_MODES:  # evaluation traffic, which may also be lost
            pair.sender.send_evaluation(message(step), mode, 5)
        if step in (3, 6):
            pair = pair.restored()
        assert same_state(pair.sender.state, pair.receiver.state)
        assert pair.sender.state


@any_sequence
@given(
    script=st.lists(
        st.one_of(
            st.tuples(
                st.just("send"),
                st.lists(st.integers(0, 5), min_size=ROWS, max_size=ROWS, unique=True),
                st.integers(0, 1),
            ),
            st.sampled_from([("end",), ("restore",), ("probe",), ("evaluate",)]),
        ),
        max_size=14,
    )
)
def both_ends_are_equal_after_any_sequence(variant: Variant, script: list[tuple]) -> None:
    pair, step = Pair(variant.method), 0
    for number, (event, *arguments) in enumerate(script):
        match event:
            case "send":
                ids, microbatch = arguments
                facts = context(step, microbatch, ids=tuple(ids), key=number)
                packet, y = pair.send(3 * normal(ROWS, *ROW, seed=number), facts)
                assert same_packet(pair.sender.unpack(pair.sender.table.pack(packet)), packet)
                assert torch.isfinite(y).all()
            case "end":
                pair.end_step()
                step += 1
            case "restore":  # a checkpoint is taken between steps
                pair.end_step()
                pair = pair.restored()
            case "probe":
                pair.sender.compressor.encode(message(step), pair.sender.state, context(step))
            case "evaluate":
                pair.sender.send_evaluation(message(step), "on", number)
        assert same_state(pair.sender.state, pair.receiver.state)
    capacity = getattr(variant.method, "capacity", None)
    assert capacity is None or len(pair.sender.state) <= capacity


def probes_and_evaluations_change_no_later_packet(variant: Variant) -> None:
    quiet, probed = Pair(variant.method), Pair(variant.method)
    for step in range(6):
        for x, facts in messages(step, step + 1):
            for probe in (x, 100 * normal(ROWS, *ROW, seed=step)):
                packet, _ = variant.method.encode(probe, probed.sender.state, facts)
                variant.method.decode(packet, probed.receiver.state, facts)
            for mode in EVALUATION_MODES:
                probed.sender.send_evaluation(x, mode, 7)
            one, other = quiet.send(x, facts), probed.send(x, facts, measure=True)
            assert same_packet(one[0], other[0])
            assert bits_of(one[1]) == bits_of(other[1])
        quiet.end_step()
        probed.end_step()


def restored_is_continued(variant: Variant, dtype: torch.dtype) -> None:
    pair = Pair(variant.method)
    for step in range(5):
        pair.step(step, dtype)
    again = pair.restored()
    for step in range(5, 11):
        for one, other in zip(pair.step(step, dtype), again.step(step, dtype), strict=True):
            assert same_packet(one[0], other[0])
            assert bits_of(one[1]) == bits_of(other[1])
        assert same_state(pair.sender.state, again.sender.state)
        assert same_state(pair.receiver.state, again.receiver.state)


def links_share_nothing(variant: Variant) -> None:
    alone, one, other = Pair(variant.method), Pair(variant.method), Pair(variant.method)
    for step in range(4):
        facts = list(messages(step, step + 1))
        expected = [alone.send(*each) for each in facts]
        for each, (packet, _) in zip(facts, expected, strict=True):
            other.send(-each[0], each[1])
            assert same_packet(one.send(*each)[0], packet)
        for pair in (alone, one, other):
            pair.end_step()


def nan_and_infinity_are_refused_and_move_nothing(variant: Variant, dtype: torch.dtype) -> None:
    pair, untroubled = Pair(variant.method), Pair(variant.method)
    for step in range(2):
        pair.step(step, dtype)
        untroubled.step(step, dtype)
    for place, bad in (((0, 0, 0), math.nan), ((1, 2, 6), math.inf), ((1, 0, 3), -math.inf)):
        x, held = message(2, 0, dtype), copy_of(pair.sender.state)
        x[place] = bad
        with pytest.raises(NonFiniteError):
            pair.sender.send(x, context(2))
        assert same_state(pair.sender.state, held)
    for one, other in zip(pair.step(2, dtype), untroubled.step(2, dtype), strict=True):
        assert same_packet(one[0], other[0])
    assert pair.sender.end_step() == untroubled.sender.end_step()  # nor is anything accounted


def memory_bytes_are_what_is_held(variant: Variant, dtype: torch.dtype) -> None:
    pair = Pair(variant.method)
    for step in range(STEPS_PER_EPOCH):
        pair.step(step, dtype)
    predicted = variant.method.memory_bytes((ROWS, *ROW), MICROBATCHES, SAMPLES)
    for link in (pair.sender, pair.receiver):
        if link.sender or variant.method.two_ended:
            rows = [row for key, row in link.state.items() if key >= 0]  # what a controller knows of itself is small
            held = sum(row.nbytes for row in rows)
            learned = sum(row.nbytes for key, row in link.state.items() if key < 0 and row.ndim)
            assert predicted in (held, held + learned) or (variant.at_most and 0 < held < predicted)
            assert learned < 1000 or predicted == held + learned
            stores = {row.untyped_storage().data_ptr(): row.untyped_storage().nbytes() for row in rows}
            assert sum(stores.values()) == held  # no row is a window on more memory than it fills
    assert (predicted == 0) == (variant.key == "none")


def nothing_else_is_held(variant: Variant) -> None:
    pair, sizes = Pair(variant.method), []
    for step in range(5 * STEPS_PER_EPOCH):
        pair.step(step)
        sizes.append((len(pickle.dumps(vars(pair.sender))), len(pickle.dumps(vars(pair.receiver)))))
    for early, late in zip(sizes[STEPS_PER_EPOCH], sizes[-1], strict=True):
        assert late <= early + 16  # the last message's seconds may take some digits more


TWO_ENDED = (both_ends_are_equal_bit_for_bit, both_ends_are_equal_after_any_sequence)
LAWS: tuple[Callable[..., None], ...] = (
    shape_and_dtype_are_kept_and_nothing_given_is_touched,
    *TWO_ENDED,
    probes_and_evaluations_change_no_later_packet,
    restored_is_continued,
    links_share_nothing,
    nan_and_infinity_are_refused_and_move_nothing,
    memory_bytes_are_what_is_held,
    nothing_else_is_held,
    is_written_as_it_is_parsed,
)


def keeps_all_laws(variant: Variant, turn: int) -> None:
    """The laws have their dtypes by turns: the even ones float32 in an even turn."""
    dtypes = (torch.float32, torch.bfloat16)
    for place, law in enumerate(LAWS):
        if law in TWO_ENDED and not variant.method.two_ended:
            continue
        if law is nothing_else_is_held and isinstance(variant.method, Plain):
            continue
        law(variant, *[dtypes[(turn + place) % 2]] * ("dtype" in inspect.signature(law).parameters))
