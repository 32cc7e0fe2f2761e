"""Laws that hold for every compressor, over every sequence of messages."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from codec_variants import normal
from compressor_laws import keeps_all_laws
from compressor_variants import (
    MICROBATCHES,
    ROW,
    ROWS,
    SAMPLES,
    STEPS_PER_EPOCH,
    VARIANTS,
    Pair,
    Variant,
    bits_of,
    context,
    copy_of,
    message,
    messages,
    same_packet,
    same_state,
    sample_ids,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import few_of_each
from torch import Tensor

from raysim.codecs import Identity, NonFiniteError, Quantize, TopK
from raysim.codecs.positions import kept_of
from raysim.compressors import (
    AQSGD,
    COMPRESSORS,
    AtSupport,
    ErrorFeedback,
    LinkEF21,
    MixedErrorFeedback,
    Plain,
    State,
    parse,
)
from raysim.compressors.keyed import as_rows, memory_keys
from raysim.pipeline.link import Link

dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
laws = settings(max_examples=10, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None)


def test_every_compressor_has_a_variant() -> None:
    assert {type(variant.method).name() for variant in VARIANTS} == set(COMPRESSORS)
    keyed = {(type(v.method).name(), v.key) for v in VARIANTS if hasattr(v.method, "key")}
    for name in ("ErrorFeedback", "MixedErrorFeedback", "EF21"):
        assert {key for cls, key in keyed if cls == name} == {"slot", "sample", "link"}
    assert {key for cls, key in keyed if cls == "AQSGD"} == {"slot", "sample"}


@pytest.mark.parametrize(
    "turn",
    few_of_each(range(len(VARIANTS)), 1, lambda turn: (type(VARIANTS[turn].method), VARIANTS[turn].key)),
    ids=lambda turn: VARIANTS[turn].notation,
)
def test_all_laws(turn: int) -> None:
    keeps_all_laws(VARIANTS[turn], turn)


def conserved(fed: dict[int, Tensor], decoded: dict[int, Tensor], state: State, scale: float) -> None:
    for key, total in fed.items():
        left = state[key].double().view(total.shape)
        torch.testing.assert_close(decoded[key] + left, total, rtol=0, atol=1e-5 * scale)


class Sums:
    """What was fed and what was decoded, summed under the keys that the memory has."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.fed: dict[int, Tensor] = {}
        self.decoded: dict[int, Tensor] = {}

    def add(self, x: Tensor, y: Tensor, facts) -> None:
        keys = memory_keys(self.key, facts)
        for key, one, other in zip(keys, as_rows(x.double(), self.key), as_rows(y.double(), self.key), strict=True):
            self.fed[key] = self.fed.get(key, 0) + one
            self.decoded[key] = self.decoded.get(key, 0) + other


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.feedback], ids=lambda variant: variant.notation)
@dtypes
def test_l1_what_was_decoded_and_what_is_remembered_sum_to_what_was_fed(variant: Variant, dtype: torch.dtype) -> None:
    pair, sums = Pair(variant.method), Sums(variant.key)
    for step in range(9):
        for (x, facts), (_, y) in zip(messages(step, step + 1, dtype), pair.step(step, dtype), strict=True):
            sums.add(x, y, facts)
        if step == 4:
            pair = pair.restored()
        conserved(sums.fed, sums.decoded, pair.sender.state, 10)
    assert not pair.receiver.state  # only the sender remembers


def test_l1_holds_across_changes_of_the_codec_and_dense_fallbacks() -> None:
    for key in ("slot", "sample", "link"):
        state, sums = {}, Sums(key)
        codecs = [
            "TopK(0.1)",
            "Quantize(2)",
            "Identity",
            "TopK(0.5, values=Quantize(2, rounding='stochastic'))",
            "Cast('float16')",
        ]
        for step, (x, facts) in enumerate(messages(0, 8)):
            method = parse(f"ErrorFeedback({codecs[step % len(codecs)]}, key={key!r})")
            packet, changes = method.encode(x, state, facts)
            method.commit(state, changes)
            sums.add(x, method.decode(packet, {}, facts)[0], facts)
        conserved(sums.fed, sums.decoded, state, 10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_of_aqsgd_are_what_the_receiver_was_given(dtype: str) -> None:
    pair = Pair(parse(f"AQSGD(Quantize(4), warmup=0, dtype={dtype!r})"))
    for step in range(3):
        for (_, facts), (_, y) in zip(messages(step, step + 1), pair.step(step), strict=True):
            for key, row in zip(memory_keys("sample", facts), as_rows(y, "sample"), strict=True):
                assert torch.equal(pair.receiver.state[key].float().view(-1), row.view(-1))


INDEPENDENT = [v for v in VARIANTS if v.key != "link" and getattr(v.method, "capacity", None) is None]


@pytest.mark.parametrize("variant", INDEPENDENT, ids=lambda variant: variant.notation)
def test_l16_the_order_of_independent_messages_changes_nothing(variant: Variant) -> None:
    forward, reverse = Pair(variant.method), Pair(variant.method)
    for step in range(6):
        facts = list(messages(step, step + 1))
        one = [forward.send(*each) for each in facts]
        other = [reverse.send(*each) for each in reversed(facts)][::-1]
        forward.end_step()
        reverse.end_step()
        assert all(same_packet(a[0], b[0]) and bits_of(a[1]) == bits_of(b[1]) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.plain], ids=lambda variant: variant.notation)
def test_l17_identity_inside_a_memory_is_no_compression(variant: Variant) -> None:
    pair = Pair(variant.method)
    for step in range(8):
        for (x, _), (_, y) in zip(messages(step, step + 1), pair.step(step), strict=True):
            if variant.plain == "bitwise":
                assert torch.equal(x, y)
            else:  # to the rounding of m + (x - m)
                assert (x - y).abs().max() <= 2**-23 * 4 * 4


# Error feedback.


@pytest.mark.parametrize("union", [False, True])
@pytest.mark.parametrize("density", [0.1, 0.25, 1 / 3])
def test_l18_mixed_splits_k_and_sends_overlaps_once(union: bool, density: float) -> None:
    method = MixedErrorFeedback(TopK(density), union=union)
    facts, n = context(0), math.prod(ROW)
    k = kept_of(density, n)
    for seed in range(20):
        x, e = normal(ROWS, *ROW, seed=seed), normal(ROWS, *ROW, seed=seed + 100)
        packet, _ = method.encode(x, {0: e}, facts)
        sent = packet.decode().view(ROWS, n)
        for row, own, held in zip(sent, x.view(ROWS, n), e.view(ROWS, n), strict=True):
            ours = set(own.abs().topk(k - k // 2).indices.tolist())
            theirs = set(held.abs().topk(k // 2).indices.tolist())
            assert set(row.nonzero().view(-1).tolist()) == ours | theirs
            for i in ours | theirs:
                both = union or (i in ours and i in theirs)
                assert row[i] == (own[i] + held[i] if both else own[i] if i in ours else held[i])


def descend(method, steps: int) -> list[Tensor]:
    """Two replicas of f_i(w) = +-10 w_1 + (w_2 - 1)^2 / 2, Top-1, the mean of both, from w = 0."""
    w, states, path = torch.zeros(2), [{}, {}], []
    for step in range(steps):
        received = []
        for replica, (sign, state) in enumerate(zip((10.0, -10.0), states, strict=True)):
            facts = context(step, ids=(replica,))
            packet, changes = method.encode(torch.stack([torch.tensor(sign), w[1] - 1])[None], state, facts)
            method.commit(state, changes)
            received.append(packet.decode()[0])
        w = w - 0.01 * (received[0] + received[1]) / 2
        path.append(w)
    return path


def test_error_feedback_matters() -> None:
    without = torch.stack(descend(Plain(TopK(0.5)), 100))
    assert (without == 0).all()
    path = torch.stack(descend(ErrorFeedback(TopK(0.5)), 800))
    assert (path[:, 0] == 0).all()
    late = path[-400:, 1]
    assert late.min() >= 0.93
    assert late.max() <= 1.04
    assert abs(late.mean() - 1) < 0.01


def test_keys_of_the_residual() -> None:
    x = torch.tensor([[4.0, 3.0], [1.0, 2.0]])
    ids = (11, 7)
    keys = {"slot": [1], "sample": [11, 7], "link": [0]}
    for key, expected in keys.items():
        _, state = ErrorFeedback(TopK(0.5), key=key).encode(x, {}, context(0, 1, ids=ids))
        assert list(state) == expected
    # the residual of a sample goes with the sample, whatever row and microbatch it comes in
    method, state = ErrorFeedback(TopK(0.5), key="sample"), {}
    method.commit(state, method.encode(x, state, context(0, 0, ids=(11, 7)))[1])
    packet, _ = method.encode(torch.zeros(2, 2), state, context(1, 1, ids=(7, 11)))
    assert packet.decode().tolist() == [[1.0, 0.0], [0.0, 3.0]]
    # that of the link with the next microbatch
    method, state = ErrorFeedback(TopK(0.5), key="link"), {}
    method.commit(state, method.encode(x, state, context(0, 0))[1])
    packet, _ = method.encode(torch.zeros(2, 2), state, context(0, 1))
    assert packet.decode().tolist() == [[0.0, 3.0], [1.0, 0.0]]


@pytest.mark.parametrize(
    "notation",
    [
        "ErrorFeedback(TopK(0.3), key='sample')",
        "ErrorFeedback(Quantize(2), key='sample')",
        "MixedErrorFeedback(TopK(0.3), key='sample')",
        "MixedErrorFeedback(TopK(0.3), key='sample', union=True)",
        "GraVAC(epsilon=0.5, memory='sample')",
    ],
)
@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=4), st.integers(0, 99))
@settings(max_examples=20)
def test_repeated_samples_conserve_residual(notation, steps, seed) -> None:
    """What was sent and what is left of each sample add up to what was to be sent."""
    method, state = parse(notation), {}
    generator = torch.Generator().manual_seed(seed)
    wanted, sent = torch.zeros(3, 8), torch.zeros(3, 8)
    for step, ids in enumerate(steps):
        x = torch.randn(4, 8, generator=generator)
        packet, changes = method.encode(x, state, context(step, ids=tuple(ids)))
        method.commit(state, changes)
        wanted.index_add_(0, torch.tensor(ids), x)
        sent.index_add_(0, torch.tensor(ids), packet.decode())
    left = torch.stack([state.get(sample, torch.zeros(8)) for sample in range(3)])
    torch.testing.assert_close(sent + left, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "notation", ["ErrorFeedback(TopK(0.5))", "EF21(TopK(0.5), key='link')", "AQSGD(Quantize(4), key='slot')"]
)
def test_a_smaller_batch_than_the_memory_s_is_refused(notation) -> None:
    method, state = parse(notation), {}
    method.commit(state, method.encode(torch.ones(8, 8), state, context(0, ids=()))[1])
    with pytest.raises(
        ValueError, match=r"of one shape, but got \(7, 8\) after \(8, 8\): leave incomplete batches out"
    ):
        method.encode(torch.ones(7, 8), state, context(1, ids=())._replace(epoch=2))


# Delta methods.

FROM_ZERO = [
    "EF21({})",
    "EF21({}, key='sample')",
    "AQSGD({}, warmup=0, first='compressed')",
    "AQSGD({}, key='slot', warmup=0, first='compressed')",
]


@pytest.mark.parametrize("notation", FROM_ZERO)
@pytest.mark.parametrize("density", [0.1, 0.3, 0.5, 1.0])
def test_l4_topk_of_a_frozen_input_is_exact_after_enough_sends(notation: str, density: float) -> None:
    pair, x, n = Pair(parse(notation.format(f"TopK({density})"))), message(0), math.prod(ROW)
    needed = math.ceil(n / kept_of(density, n))
    for step in range(needed):
        _, y = pair.send(x, context(step, ids=(1, 2)))
        pair.end_step()
        nonzero = int((y != 0).sum(dim=(1, 2)).max())
        assert nonzero <= (step + 1) * kept_of(density, n)
    assert torch.equal(x, y)


@pytest.mark.parametrize("notation", FROM_ZERO)
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_l4_the_error_of_a_frozen_input_shrinks_by_the_number_of_levels(notation: str, bits: int) -> None:
    pair, x = Pair(parse(notation.format(f"Quantize({bits})"))), message(0)
    span = float(x.max() - x.min())
    for sends in range(1, 9):
        _, y = pair.send(x, context(sends, ids=(1, 2)))
        pair.end_step()
        assert (x - y).abs().max() <= span / 2 * (2**bits - 1) ** -sends + 4 * 2**-22


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_l5_a_first_visit_is_dense_and_leaves_nothing(dtype: str) -> None:
    pair = Pair(AQSGD(Quantize(4), warmup=0, dtype=dtype))
    x, facts = message(0), context(0, ids=(1, 2))
    packet, y = pair.send(x, facts)
    pair.end_step()
    assert packet.array_bytes == (packet.dense_bytes if dtype == "float32" else 2 * x.numel())
    kept = torch.stack(list(pair.sender.state.values()))
    assert torch.equal(kept, x.to(kept.dtype))
    assert torch.equal(y, kept.float())  # the receiver works on what is stored
    again, z = pair.send(kept.float(), facts)
    pair.end_step()
    assert set(again.arrays) == {"delta.codes", "delta.low", "delta.high"}
    assert not again.part("delta", Quantize(4), again.shape).decode().any()  # an identical visit sends a zero delta
    assert torch.equal(z, y)
    _, later = pair.send(message(1), facts)
    pair.end_step()
    assert torch.equal(later, torch.stack(list(pair.receiver.state.values())).float())  # after a delta too


def test_first_visits_and_deltas_in_one_message() -> None:
    pair, codec = Pair(AQSGD(TopK(0.2), warmup=0)), TopK(0.2)
    x = message(0)
    pair.send(x, context(0, ids=(1, 2)))
    pair.end_step()
    y = message(1)
    packet, received = pair.send(y, context(1, ids=(3, 2)))
    dense = y[0].nbytes
    delta = codec.encode((y - x)[1:]).array_bytes
    assert packet.array_bytes == dense + delta + 1  # and a bitmap of the rows, a bit each
    assert torch.equal(received[0], y[0])
    torch.testing.assert_close(received[1], x[1] + codec.encode((y - x)[1:]).decode()[0])


def test_l5_warm_up_is_dense_for_its_epochs_and_deltas_are_smaller() -> None:
    for warmup in (0, 1, 2):
        pair = Pair(AQSGD(Quantize(4), warmup=warmup))
        for step in range(4 * STEPS_PER_EPOCH):
            dense = step // STEPS_PER_EPOCH < max(1, warmup)  # in the first epoch all visits are first ones
            for packet, _ in pair.step(step):
                if dense:
                    assert packet.array_bytes == packet.dense_bytes
                else:
                    assert packet.array_bytes == packet.numel // 2 + 8
    compressed = Pair(AQSGD(Quantize(4), warmup=0, first="compressed"))
    assert all(packet.array_bytes == packet.numel // 2 + 8 for step in range(3) for packet, _ in compressed.step(step))


def test_l6_a_copy_of_something_else_costs_the_square_root_of_two() -> None:
    pair = Pair(AQSGD(Identity(), key="slot", warmup=0))
    a, b = normal(4, 4000, seed=1), normal(4, 4000, seed=2)
    pair.send(a, context(0, ids=(0, 1, 2, 3)))
    pair.end_step()
    packet, _ = pair.send(b, context(1, ids=(4, 5, 6, 7)))
    delta = packet.part("delta", Identity(), packet.shape).decode()
    assert float(delta.norm() / b.norm()) == pytest.approx(math.sqrt(2), rel=0.02)


def test_aqsgd_publishes_its_copies_when_the_step_ends() -> None:
    pair, facts = Pair(AQSGD(Quantize(2), warmup=0)), context(0, ids=(1, 2))
    pair.send(message(0), facts)
    pair.end_step()
    x = message(1)
    held = copy_of(pair.sender.state)
    first, second = pair.send(x, facts), pair.send(x, facts)  # a second visit in a step meets the same copy
    assert same_packet(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert same_state(pair.sender.state, held)
    assert same_state(pair.receiver.state, held)
    pair.end_step()
    assert same_state(pair.sender.state, pair.receiver.state)
    assert not same_state(pair.sender.state, held)
    pair.end_step()  # once only
    assert torch.equal(pair.sender.state[1], first[1][0])


@laws
@given(
    capacity=st.integers(1, 6),
    steps=st.lists(st.lists(st.permutations(range(7)).map(lambda ids: ids[:2]), min_size=1, max_size=3), max_size=8),
)
def test_the_least_recently_used_copy_goes_first(capacity: int, steps: list[list[list[int]]]) -> None:
    pair, model = Pair(AQSGD(TopK(0.5), warmup=0, capacity=capacity)), OrderedDict()
    for step, visits in enumerate(steps):
        for microbatch, ids in enumerate(visits):
            known = [sample in model for sample in ids]
            packet, _ = pair.send(normal(2, *ROW, seed=step), context(step, microbatch, ids=tuple(ids)))
            assert any(name.startswith("dense.") for name in packet.arrays) == (not all(known))
            assert any(name.startswith("delta.") for name in packet.arrays) == any(known)
        pair.end_step()
        for ids in visits:
            for sample in ids:
                model[sample] = None
                model.move_to_end(sample)
            while len(model) > capacity:
                model.popitem(last=False)
        assert list(pair.sender.state) == list(pair.receiver.state) == list(model)


def test_delta_methods_in_evaluation() -> None:
    x = message(0)
    forward = {
        "Identity": {"on": x.nbytes, "on_direct": x.nbytes},
        "ErrorFeedback(Quantize(8))": {"on": x.numel() + 8, "on_direct": x.numel() + 8},
        "EF21(Quantize(8))": {"on": x.numel() + 8, "on_direct": x.numel() + 8},  # a first visit: C(x - 0)
        "AQSGD(Quantize(8))": {"on": x.nbytes, "on_direct": x.numel() + 8},  # a first visit: in full
        "AQSGD(Quantize(8), dtype='bfloat16')": {"on": 2 * x.numel(), "on_direct": x.numel() + 8},
        "AQSGD(Quantize(8), first='compressed')": {"on": x.numel() + 8, "on_direct": x.numel() + 8},
    }
    for notation, modes in forward.items():
        link = Pair(parse(notation)).sender
        assert torch.equal(link.receive_evaluation(link.send_evaluation(x, "off", 1)), x)
        for mode, array_bytes in modes.items():
            assert link.unpack(link.send_evaluation(x, mode, 1)).array_bytes == array_bytes, (notation, mode)


# Shared indices.


@pytest.mark.parametrize("forward", ["TopK(0.3)", "TopK(0.1, per='tensor')", "TopK(1.0)", "ErrorFeedback(TopK(0.3))"])
@pytest.mark.parametrize(
    "values", ["Identity", "Quantize(8)", "Cast('bfloat16')", "Quantize(4, rounding='stochastic')"]
)
def test_l13_gradients_go_back_at_the_positions_that_were_kept(forward: str, values: str) -> None:
    activations, method = Pair(parse(forward)), AtSupport(parse(values).codec)
    codec = activations.sender.compressor.codec
    assert isinstance(codec, TopK)
    for x, facts in messages(0, 3):
        packet, y = activations.send(x, facts)
        received = activations.receiver.unpack(activations.sender.table.pack(packet))
        at_sender, at_receiver = codec.support(packet), codec.support(received)
        assert torch.equal(at_sender.positions, at_receiver.positions)
        gradient = normal(*x.shape, seed=facts.step)
        back, nothing = method.encode(gradient, {}, facts._replace(direction="backward", support=at_receiver))
        assert nothing == {}
        decoded, _ = method.decode(back, {}, facts._replace(direction="backward", support=at_sender))
        kept = torch.zeros(x.numel(), dtype=torch.bool)
        kept[at_sender.positions.view(-1)] = True
        kept = kept.view(x.shape)
        assert not decoded[~kept].any()
        assert not y[~kept].any()
        sent = gradient.view(-1)[at_sender.positions]
        assert back.array_bytes == parse(values).codec.encode(sent, facts.key).array_bytes  # values, and no index
        assert torch.equal(decoded[kept], parse(values).codec.encode(sent, facts.key).decode().view(-1))
        if forward.startswith("TopK") and values == "Identity":  # the derivative of the masked activation
            masked = x.clone().requires_grad_()
            torch.where(kept, masked, 0).backward(gradient)
            assert torch.equal(decoded, masked.grad)


def test_l13_shapes_must_agree_and_nan_is_found_outside_the_support_too() -> None:
    x, facts = message(0), context(0)
    packet = TopK(0.3).encode(x)
    facts = facts._replace(support=TopK(0.3).support(packet))
    method = AtSupport(Identity())
    with pytest.raises(ValueError) as error:
        method.decode(Identity().encode(x), {}, facts)
    kept = kept_of(0.3, math.prod(ROW))
    assert (
        str(error.value) == f"A packet holds values of shape {tuple(x.shape)}, but its activation kept {(ROWS, kept)}."
    )
    gradient = torch.zeros_like(x)
    gradient.view(-1)[packet.decode().view(-1) == 0] = math.nan
    with pytest.raises(NonFiniteError):
        method.encode(gradient, {}, facts)


# The link's accounts.


def test_link_counts_sent_bytes() -> None:
    link = Link(LinkEF21(TopK(0.2)), 3, "backward", sender=True, device=torch.device("cpu"))
    x, y = message(0, 0), message(0, 1)
    sent = [link.send(x, context(0, 0), measure=True), link.send(y, context(0, 1), measure=True)]
    packets = [link.unpack(message) for message in sent]
    account = link.end_step(measure=True)
    assert (account.boundary, account.direction, account.sender, account.packets) == (3, "backward", True, 2)
    assert account.wire_bytes == sum(
        len(message[0]) + packet.array_bytes for message, packet in zip(sent, packets, strict=True)
    )
    assert account.dense_bytes == x.nbytes + y.nbytes
    received = [packet.decode().double() for packet in packets]  # from zero, the copy is what was decoded
    assert account.sent_norm2 == pytest.approx(float(x.double().square().sum() + y.double().square().sum()))
    assert account.received_norm2 == pytest.approx(float(sum(r.square().sum() for r in received)))
    lost = (x - received[0]).square().sum() + (y - received[1]).square().sum()
    assert account.error_norm2 == pytest.approx(float(lost))
    assert account.memory_norm2 == pytest.approx(account.received_norm2)
    empty = link.end_step()
    assert (empty.packets, empty.wire_bytes, empty.sent_norm2, empty.memory_norm2) == (0, 0, None, None)


@pytest.mark.parametrize("notation", ["EF21(TopK(0.2))", "AQSGD(Quantize(4), warmup=0)", "ErrorFeedback(Quantize(2))"])
def test_measured_error_is_that_of_receiver(notation: str) -> None:
    pair = Pair(parse(notation))
    for step in range(4):
        lost = received = 0.0
        for x, facts in messages(step, step + 1):
            _, y = pair.send(x, facts, measure=True)
            lost += float((x.double() - y.double()).square().sum())
            received += float(y.double().square().sum())
        account = pair.sender.end_step(measure=True)
        assert account.error_norm2 == pytest.approx(lost)
        assert account.received_norm2 == pytest.approx(received)
        held = sum(float(row.double().square().sum()) for row in pair.sender.state.values())
        assert account.memory_norm2 == pytest.approx(held)
        nothing = pair.receiver.end_step(measure=True)
        assert (nothing.sent_norm2, nothing.memory_norm2) == (None, None)


def test_shared_indices_account_the_whole_gradient_as_dense() -> None:
    x, facts = message(0), context(0)
    facts = facts._replace(support=TopK(0.3).support(TopK(0.3).encode(x)))
    pair = Pair(AtSupport(Identity()))
    pair.send(x, facts, measure=True)
    sent, received = pair.sender.end_step(), pair.receiver.end_step()
    assert sent.dense_bytes == received.dense_bytes == x.nbytes
    assert 0 < sent.wire_bytes - 4 * ROWS * kept_of(0.3, math.prod(ROW)) <= 8  # the header
    assert sent.wire_bytes == received.wire_bytes
    assert sent.error_norm2 == pytest.approx(sent.sent_norm2 - sent.received_norm2)


def test_messages_of_the_tests_visit_every_sample_once_an_epoch() -> None:
    for epoch in range(3):
        steps = range(epoch * STEPS_PER_EPOCH, (epoch + 1) * STEPS_PER_EPOCH)
        ids = [
            sample for step in steps for microbatch in range(MICROBATCHES) for sample in sample_ids(step, microbatch)
        ]
        assert sorted(ids) == list(range(100, 100 + SAMPLES))


def test_the_control_of_error_feedback_adds_noise_of_the_norm_of_what_was_withheld():
    """Of an Identity the packet is x + n itself: n has the residual's norm, is no multiple of it, and is drawn anew."""
    from raysim.compressors import Context, NoiseFeedback

    x = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    residual = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    noises = []
    for key in (7, 8, 7):
        context = Context("backward", step=0, epoch=0, microbatch=0, sample_ids=(0, 1, 2, 3), key=key)
        packet, _ = NoiseFeedback(Identity()).encode(x, {0: residual}, context)
        noises.append(packet.decode() - x)
    torch.testing.assert_close(noises[0].norm(), residual.norm(), rtol=1e-4, atol=0)
    assert torch.nn.functional.cosine_similarity(noises[0].flatten(), residual.flatten(), dim=0).abs() < 0.3
    assert torch.equal(noises[0], noises[2])
    assert not torch.equal(noises[0], noises[1])
