"""GraVAC on links: the levels that it sends, what decides on them, and that nothing is lost between levels."""

from __future__ import annotations

import pytest
import torch
from codec_variants import student
from compressor_variants import Pair, bits_of, context, copy_of, same_packet, same_state
from raysim_contrib.link_gravac import REAL, TALLY, WHOLE, LinkGraVAC, _Tally
from torch import Tensor

from raysim.codecs import Identity, LowRank, Quantize, TopK
from raysim.compressors import ErrorFeedback, StepFacts, parse
from raysim.engine.inline import InlineEngine
from raysim.pipeline.link import Link
from raysim.pipeline.prepare import prepare
from raysim.pipeline.reports import StepFeedback
from raysim.replication.controller import candidate_factors


class Sender:
    """The sending end of a link, over steps of some messages."""

    def __init__(self, method: LinkGraVAC, messages: int = 2, direction: str = "forward") -> None:
        self.link = Link(method, 0, direction, sender=True, device=torch.device("cpu"))
        self.messages, self.direction = messages, direction
        self.packets: list = []

    def step(self, step: int, scale: float = 1.0, step_s: float | None = 1.0, x=None):
        self.packets = []
        for i in range(self.messages):
            message = x(step, i) if x else scale * student(2, 10, 8, seed=10 * step + i)
            sent = self.link.send(message, context(step, i, ids=(0, 1), direction=self.direction))
            self.packets.append(self.link.unpack(sent))
        (decision,) = self.link.end_step(StepFacts(step_s, batch_size=32)).decisions
        return decision


def same(step: int, i: int) -> Tensor:
    return student(2, 10, 8, seed=i)


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
