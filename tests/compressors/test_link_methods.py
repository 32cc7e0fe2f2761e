"""Optimus-CC's backward messages (Song et al. 2023, 2301.09830) and GraVAC on links."""

from __future__ import annotations

import pytest
import torch
from codec_variants import normal, student
from compressor_variants import Pair, bits_of, context, copy_of, same_packet, same_state
from link_ends import Sender, same
from pipelines import GPT, ZBV
from torch import Tensor

from raysim.codecs import Identity, LowRank, Quantize, TopK
from raysim.compressors import Epilogue, ErrorFeedback, LazyErrorPropagation, LinkGraVAC, Plain, StepFacts, parse
from raysim.compressors.controller import candidate_factors
from raysim.compressors.gravac import REAL, TALLY, WHOLE, _Tally
from raysim.compressors.optimus_cc import RESIDUAL
from raysim.config import ConfigError, make_config
from raysim.engine.inline import InlineEngine
from raysim.pipeline.prepare import prepare
from raysim.pipeline.reports import StepFeedback


def backward(step: int, microbatch: int, *, stages: int = 2, **changes: object):
    return context(step, microbatch, direction="backward", num_stages=stages, ids=(0, 1), **changes)


def gradient(number: int, *shape: int) -> Tensor:
    return normal(*(shape or (2, 12, 8)), seed=number + 1)


# Lazy error propagation.


@pytest.mark.parametrize("codec", ["TopK(0.1)", "Quantize(2)", "LowRank(1)", "WarmStart(LowRank(2, per='sample'))"])
def test_l7_the_error_of_the_weights_telescopes(codec: str) -> None:
    """sum a_i^T (g'_i - g_i) = a_1^T e_0 + sum (a_(i+1) - a_i)^T e_i - a_M^T e_M, over a step that begins with a residual."""
    pair = Pair(parse(f"LazyErrorPropagation({codec})"))
    pair.send(gradient(99), backward(0, 0))
    errors, received = [pair.sender.state[RESIDUAL].double()], []
    for i in range(5):
        received.append(pair.send(gradient(i), backward(1, i))[1].double())
        errors.append(pair.sender.state[RESIDUAL].double())
    inputs = [normal(2, 12, 6, seed=50 + i).double().view(24, 6) for i in range(5)]
    flat = [error.reshape(24, 8) for error in errors]
    found = sum(
        a.T @ (g - gradient(i).double()).reshape(24, 8) for i, (a, g) in enumerate(zip(inputs, received, strict=True))
    )
    expected = inputs[0].T @ flat[0] - inputs[-1].T @ flat[-1]
    for i in range(1, 5):
        expected += (inputs[i] - inputs[i - 1]).T @ flat[i]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert float(expected.abs().max()) > 0.1


def test_lazy_propagation_equals_link_error_feedback() -> None:
    lazy, fed = Pair(parse("LazyErrorPropagation(TopK(0.2))")), Pair(parse("ErrorFeedback(TopK(0.2), key='link')"))
    for step in range(3):
        for i in range(4):
            one, other = (pair.send(gradient(4 * step + i), backward(step, i)) for pair in (lazy, fed))
            assert same_packet(one[0], other[0])
        lazy.end_step()
        assert bits_of(lazy.sender.state[RESIDUAL]) == bits_of(fed.sender.state[0])


def test_the_residual_goes_over_the_step_s_end_unless_it_is_reset() -> None:
    for reset in ("never", "step"):
        pair = Pair(LazyErrorPropagation(TopK(0.2), reset=reset))  # type: ignore[arg-type]
        pair.send(gradient(0), backward(0, 0))
        left = pair.sender.state[RESIDUAL].clone()
        assert left.any()
        pair.end_step()
        assert torch.equal(pair.sender.state[RESIDUAL], left if reset == "never" else torch.zeros_like(left))


def test_changed_shape_resets_memory() -> None:
    pair, fresh = Pair(parse("LazyErrorPropagation(TopK(0.2))")), Pair(parse("TopK(0.2)"))
    pair.send(gradient(0), backward(0, 0))
    x = gradient(1, 1, 12, 8)
    assert same_packet(pair.send(x, backward(0, 1))[0], fresh.send(x, backward(0, 1))[0])


def test_full_rank_is_no_compression() -> None:
    pair = Pair(parse("LazyErrorPropagation(LowRank(8))"))
    for i in range(4):
        x = gradient(i)
        torch.testing.assert_close(pair.send(x, backward(0, i))[1], x, rtol=1e-5, atol=1e-5)


# The epilogue.


COOLING = [
    *((schedule, 4, 8) for schedule in ("GPipe", "1F1B", "1F1B(ahead=2)", "1F1B(extra_warmup=2)", "ZBH1")),
    *(("1F1B", stages, count) for stages, count in ((2, 1), (3, 2), (2, 8))),
    ("Interleaved1F1B(2)", 4, 4),
    ("Interleaved1F1B(2)", 8, 8),
    (ZBV["schedule"], 4, 4),
]


@pytest.mark.parametrize(("schedule", "stages", "count"), COOLING)
def test_the_epilogue_is_what_the_schedule_sends_in_its_cooldown(small, schedule: str, stages: int, count: int) -> None:
    """The gradients sent after their worker's last forward are compressed, and no others; both ends know which."""
    config = small(
        **{**GPT, "model": {**GPT["model"], "num_blocks": 8}},
        schedule=schedule,
        num_stages=stages,
        num_microbatches=count,
        profile_every_steps=1,
        backward="Epilogue(EF21(TopK(0.1)))",
    )
    engine = InlineEngine(prepare(config))
    engine.start()
    for step in range(2):
        reports = engine.step(step, StepFeedback())
        found = {
            (action.stage, action.microbatch)
            for report in reports
            for action in report.actions
            if action.op == "B" and 0 < action.wire_bytes < action.dense_bytes
        }
    expected = set()
    for row in engine.plan.rows:
        last = max(place for place, action in enumerate(row) if action.op == "F")
        expected |= {(a.stage, a.microbatch) for a in row[last:] if a.op == "B" and a.stage > 0}
    assert found == expected
    if schedule == "1F1B":
        assert len(found) == sum(min(stages - stage, count) for stage in range(1, stages))
    links = [link for worker in engine.workers for each in worker.boundaries.values() for link in each.links]
    senders, receivers = (
        {link.boundary: link.state for link in links if link.direction == "backward" and link.sender is side}
        for side in (True, False)
    )
    assert senders.keys() == receivers.keys() == set(range(stages - 1))
    assert all(same_state(senders[boundary], receivers[boundary]) for boundary in senders)


def test_messages_before_the_epilogue_are_dense_and_leave_the_residual_alone() -> None:
    pair = Pair(parse("Epilogue(LazyErrorPropagation(TopK(0.1)))"))
    sent, received = torch.zeros(2, 12, 8, dtype=torch.float64), torch.zeros(2, 12, 8, dtype=torch.float64)
    wire_bytes = []
    for step in range(3):
        for i in range(4):
            x, held = gradient(4 * step + i), copy_of(pair.sender.state)
            packet, y = pair.send(x, backward(step, i, phase="steady" if i < 2 else "cooldown"))
            wire_bytes.append(packet.array_bytes)
            if i < 2:
                assert torch.equal(x, y)
                assert same_state(pair.sender.state, held)
            sent, received = sent + x.double(), received + y.double()
        pair.end_step()
    small = TopK(0.1).encode(gradient(0)).array_bytes
    assert wire_bytes == [768, 768, small, small] * 3
    torch.testing.assert_close(received + pair.sender.state[RESIDUAL].double(), sent, rtol=1e-5, atol=1e-5)


def test_flushing_sends_the_residual_with_the_next_dense_message() -> None:
    pair = Pair(parse("Epilogue(LazyErrorPropagation(TopK(0.1)), flush=True)"))
    pair.send(gradient(0), backward(0, 3, phase="cooldown"))
    left = pair.sender.state[RESIDUAL].clone()
    packet, y = pair.send(gradient(1), backward(1, 0))
    assert packet.array_bytes == packet.dense_bytes
    assert torch.equal(y, gradient(1) + left)
    assert not pair.sender.state[RESIDUAL].any()


def test_epilogue_accepts_supported_compressors() -> None:
    for notation, message in [
        ("Epilogue(TopK(0.1), flush=True)", "`flush` sends the residual of a LazyErrorPropagation, but got TopK(0.1)"),
        (
            "Epilogue(Epilogue(TopK(0.1)))",
            "`inner` must be a codec or a compressor of both directions, but got Epilogue(TopK(0.1))",
        ),
        (
            "LazyErrorPropagation(EF21(TopK(0.1)))",
            "`inner` must keep its memory at the sender only, but got EF21(TopK(0.1))",
        ),
        ("LazyErrorPropagation(RandomK(0.1, unbiased=True))", "`density` of an unbiased RandomK under a memory"),
        ("LazyErrorPropagation(3)", "`inner` must be a codec or a compressor of both directions, but got 3"),
        ("LazyErrorPropagation(TopK(0.1), reset='epoch')", "`reset` must be one of never, step, but got 'epoch'"),
    ]:
        with pytest.raises(ValueError) as error:
            parse(notation)
        assert message in str(error.value)
    assert parse("Epilogue(TopK(0.1))") == Epilogue(Plain(TopK(0.1)))
    with pytest.raises(ConfigError) as refused:
        make_config({"forward": "Epilogue(TopK(0.1))", "steps": 1})
    assert "`forward` cannot be Epilogue(TopK(0.1)), which is for backward messages" in str(refused.value)
    make_config({"backward": "Epilogue(LazyErrorPropagation(LowRank(16)))", "steps": 1})


# GraVAC on links.


def test_gain_one_climbs_one_level_a_window_and_stops_at_the_last() -> None:
    ladder = (Identity(), TopK(1.0), TopK(1.0, per="tensor"))
    sender = Sender(LinkGraVAC(ladder=ladder, window=3, epsilon=1.0))
    seen = [sender.step(step, x=same, step_s=1 / (1 + step)) for step in range(12)]
    assert [step for step, decision in enumerate(seen) if decision.event] == [2, 5]
    assert [decision.event for decision in seen if decision.event] == ["promote+advance", "promote"]
    assert all(packet.codec == TopK(1.0, per="tensor") for packet in sender.packets)


def test_gain_zero_is_always_dense_bit_for_bit() -> None:
    sender = Sender(LinkGraVAC(cf_min=4, epsilon=1.0, window=2))
    for step in range(6):
        decision = sender.step(step)
        assert decision.branch == "dense"
        assert 0.98 < decision.factor < 1  # a header beside the values
        for i, packet in enumerate(sender.packets):
            assert same_packet(packet, Identity().encode(student(2, 10, 8, seed=10 * step + i)))


@pytest.mark.parametrize(
    ("notation", "static"),
    [
        ("GraVAC(ladder=(TopK(0.5),), epsilon=0.2)", "TopK(0.5)"),
        ("GraVAC(cf_min=4, cf_max=4, epsilon=0.2, memory='slot')", "ErrorFeedback(TopK(0.25))"),
        ("GraVAC(ladder=(Quantize(3, rounding='stochastic'),), epsilon=0.1)", "Quantize(3, rounding='stochastic')"),
    ],
)
def test_one_level_ladder_equals_codec(notation: str, static: str) -> None:
    adaptive, fixed = Pair(parse(notation)), Pair(parse(static))
    for step in range(5):
        for one, other in zip(adaptive.step(step), fixed.step(step), strict=True):
            assert same_packet(one[0], other[0])
            assert bits_of(one[1]) == bits_of(other[1])


def test_messages_of_a_step_share_one_level() -> None:
    sender = Sender(LinkGraVAC(cf_min=2, cf_max=16, epsilon=0.6, window=2), messages=4)
    levels = []
    for step in range(12):
        sender.step(step)
        assert len({packet.codec for packet in sender.packets}) == 1
        levels.append(repr(sender.packets[0].codec))
    assert len(set(levels)) >= 2


def test_probes_change_no_state() -> None:
    """Whether the codecs are tried on every message or on every third, what is sent at one level is the same."""
    often, seldom = (
        Pair(LinkGraVAC(ladder=(TopK(0.5), TopK(0.01)), epsilon=0.6, memory="slot", probe_every=every, window=100))
        for every in (1, 3)
    )
    plain = Pair(ErrorFeedback(TopK(0.5)))
    for step in range(4):
        for one, other, expected in zip(often.step(step), seldom.step(step), plain.step(step), strict=True):
            assert same_packet(one[0], expected[0])
            assert same_packet(other[0], expected[0])


def test_dropped_message_changes_nothing() -> None:
    pair = Pair(LinkGraVAC(window=2, memory="link"))
    pair.step(0)
    held = copy_of(pair.sender.state)
    pair.sender.compressor.encode(student(2, 3, 7), pair.sender.state, context(1))
    pair.sender.compressor.end_step(pair.sender.state, context(1), StepFacts())
    for mode in ("on", "on_direct", "off"):
        pair.sender.send_evaluation(student(2, 3, 7), mode, 1)
    assert same_state(pair.sender.state, held)


@pytest.mark.parametrize("memory", ["slot", "link"])
def test_nothing_is_lost_across_changes_of_level(memory: str) -> None:
    method = LinkGraVAC(cf_min=2, cf_max=16, epsilon=0.6, window=1, memory=memory)
    sender, codecs = Sender(method, messages=2), set()
    fed, sent = torch.zeros(2, 10, 8, dtype=torch.float64), torch.zeros(2, 10, 8, dtype=torch.float64)
    for step in range(12):
        sender.step(step)
        fed += sum(student(2, 10, 8, seed=10 * step + i).double() for i in range(2))
        sent += sum(packet.decode().double() for packet in sender.packets)
        codecs |= {packet.codec for packet in sender.packets}
        left = sum(row.double().view(2, 10, 8) for key, row in sender.link.state.items() if key >= 0)
        torch.testing.assert_close(sent + left, fed, rtol=1e-5, atol=1e-4)
    assert len(codecs) >= 2


def test_fidelity_is_the_gain_of_topk_and_not_of_quantisers() -> None:
    for ladder, equal in ((("TopK(0.5)", "TopK(0.1)"), True), (("Quantize(3)", "Quantize(2)"), False)):
        sender = Sender(LinkGraVAC(ladder=tuple(parse(codec).codec for codec in ladder), epsilon=0.01, ewma_alpha=1.0))
        decision = sender.step(0, x=same)
        messages = [same(0, i).double() for i in range(2)]
        whole = sum(float(x.square().sum()) for x in messages)
        for codec, gain in zip(ladder, (decision.gain_minimum, decision.gain_candidate), strict=True):
            decoded = [parse(codec).codec.encode(x.float()).decode().double() for x in messages]
            energy = sum(float(y.square().sum()) for y in decoded) / whole
            lost = sum(float((x - y).square().sum()) for x, y in zip(messages, decoded, strict=True)) / whole
            assert gain == pytest.approx(1 - lost, rel=1e-6)
            assert (gain == pytest.approx(energy, rel=1e-6)) is equal


def test_epsilon_is_stricter_for_gradients() -> None:
    """Between 0.7 and 0.9 of the energy arrives: enough forward, too little backward."""
    ladder = (TopK(0.3),)
    kept = Sender(LinkGraVAC(ladder=ladder, epsilon=0.01)).step(0).gain
    assert 0.7 < kept < 0.9
    assert Sender(LinkGraVAC(ladder=ladder)).step(0).branch != "dense"
    assert Sender(LinkGraVAC(ladder=ladder), direction="backward").step(0).branch == "dense"


def test_every_link_moves_in_every_window(small) -> None:
    """Each by its own messages: what one decides is the same whatever the others' codecs are worth."""
    method = "GraVAC(epsilon=0.01, window=2, throughput='link')"
    engine = InlineEngine(prepare(small(num_stages=4, forward=method, backward=method)))
    engine.start()
    moved = []
    for step in range(4):
        accounts = [link for report in engine.step(step, StepFeedback()) for link in report.links if link.sender]
        moved.append({(link.boundary, link.direction) for link in accounts if link.decisions[0].event})
    everyone = {(boundary, direction) for boundary in range(3) for direction in ("forward", "backward")}
    assert moved == [set(), everyone] * 2  # from the second of four levels to the last


def test_level_settles_if_speed_stops_growing() -> None:
    speeds = {2.0: 1.0, 4.0: 0.5, 8.0: 0.4999, 32.0: 0.1}
    sender = Sender(LinkGraVAC(cf_min=2, cf_max=32, epsilon=0.05, window=4, omega=0.3))
    step_s, seen = 1.0, []
    for step in range(40):
        decision = sender.step(step, x=same, step_s=step_s)
        step_s = speeds.get(decision.factor, 2.0)
        seen.append(decision)
    assert any(decision.event and "saturate" in decision.event for decision in seen)
    settled = next(step for step, decision in enumerate(seen) if decision.event and "saturate" in decision.event)
    assert len({decision.candidate for decision in seen[settled + 1 :]}) == 1
    assert all(
        decision.throughput == 32 / (1.0 if step == 0 else speeds.get(seen[step - 1].factor, 2.0))
        for step, decision in enumerate(seen)
    )


def test_throughput_of_the_link_needs_no_clock() -> None:
    sender = Sender(LinkGraVAC(epsilon=0.1, window=3, throughput="link"))
    events = [sender.step(step, x=same, step_s=None).event for step in range(12)]
    assert any(events)


def test_evaluation_uses_current_level() -> None:
    sender = Sender(LinkGraVAC(cf_min=2, cf_max=32, epsilon=0.05, window=2))
    assert sender.link.unpack(sender.link.send_evaluation(same(0, 0), "on", 1)).codec == TopK(
        0.5
    )  # nothing sent yet: the mildest
    sender.step(0)
    tally = _Tally(*sender.link.state[TALLY].tolist())
    assert sender.link.unpack(sender.link.send_evaluation(same(0, 0), "on", 1)).codec == TopK(
        (1 / 2, 1 / 4)[tally.level]
    )
    dense = Sender(LinkGraVAC(epsilon=1.0))
    dense.step(0)
    assert dense.link.unpack(dense.link.send_evaluation(same(0, 0), "on", 1)).codec == Identity()
    assert {WHOLE, REAL, TALLY} == set(dense.link.state)


def test_ladders() -> None:
    assert LinkGraVAC().levels == tuple(TopK(1 / factor) for factor in candidate_factors(2.0, 32.0, "exponential"))
    assert LinkGraVAC(ladder="rank").levels == tuple(LowRank(rank) for rank in (64, 32, 16, 8, 4))
    assert parse("GraVAC(ladder=[Quantize(8), TopK(0.1)])") == LinkGraVAC(ladder=(Quantize(8), TopK(0.1)))
    assert repr(parse("GraVAC(ladder=(TopK(0.1),))")) == "GraVAC(ladder=(TopK(0.1),))"


@pytest.mark.parametrize(
    ("notation", "message"),
    [
        ("GraVAC(10, 2)", "`cf_min` must be at most `cf_max`, but got 10 and 2"),
        ("GraVAC(epsilon=0)", "`epsilon` must be in (0, 1], but got 0"),
        ("GraVAC(omega=2)", "`omega` must be in (0, 1], but got 2"),
        ("GraVAC(window=0)", "`window` must be an integer of at least 1, but got 0"),
        ("GraVAC(probe_every=0)", "`probe_every` must be an integer of at least 1, but got 0"),
        ("GraVAC(ladder='steep')", "`ladder` must be one of topk, bits, rank, but got 'steep'"),
        ("GraVAC(ladder=())", "`ladder` must be topk, bits, rank, or codecs from mild to strong, but got ()"),
        ("GraVAC(cf_max=100, ladder='bits')", "`cf_max` has an effect only with `ladder='topk'`, but got 'bits'"),
        ("GraVAC(memory='all')", "`memory` must be one of slot, sample, link, but got 'all'"),
        ("GraVAC(throughput='wire')", "`throughput` must be one of step, link, but got 'wire'"),
        (
            "GraVAC(ladder=(RandomK(0.1, unbiased=True),), memory='slot')",
            "`density` of an unbiased RandomK under a memory",
        ),
        ("GraVAC(ewma_alpha=0)", "`ewma_alpha` must be in (0, 1], but got 0"),
    ],
)
def test_bad_settings_are_refused(notation: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse(notation)
    assert message in str(error.value)
