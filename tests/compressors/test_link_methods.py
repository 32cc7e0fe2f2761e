"""Optimus-CC's backward messages (Song et al. 2023, 2301.09830)."""

from __future__ import annotations

import pytest
import torch
from codec_variants import normal
from compressor_variants import Pair, bits_of, context, copy_of, same_packet, same_state
from pipelines import ZBV
from torch import Tensor

from raysim.codecs import TopK
from raysim.compressors import Epilogue, LazyErrorPropagation, Plain, parse
from raysim.compressors.optimus_cc import RESIDUAL
from raysim.config import ConfigError, make_config
from raysim.engine.inline import InlineEngine
from raysim.pipeline.prepare import prepare
from raysim.pipeline.reports import StepFeedback


def backward(step: int, microbatch: int, **changes: object):
    return context(step, microbatch, direction="backward", ids=(0, 1), **changes)


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


@pytest.mark.parametrize("inner", ["WarmStart(LowRank(2))", "LowRank(2)"])
def test_the_recorded_residual_is_the_error_s_alone(inner: str) -> None:
    for method, recorded in ((f"LazyErrorPropagation({inner})", True), (inner, False)):
        pair = Pair(parse(method))
        pair.send(gradient(0), backward(0, 0), measure=True)
        account = pair.sender.end_step(measure=True)
        assert account.memory_norm2 == (pytest.approx(account.error_norm2) if recorded else None)


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
    *((schedule, 4, 8) for schedule in ("1F1B(extra_warmup=2)", "ZBH1")),
    *(("1F1B", stages, count) for stages, count in ((2, 1), (3, 2))),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("GPipe", 4, 8), ("1F1B", 2, 8))),
    ("Interleaved1F1B(2)", 4, 4),
    (ZBV["schedule"], 4, 4),
]


@pytest.mark.parametrize(("schedule", "stages", "count"), COOLING)
def test_the_epilogue_is_what_the_schedule_sends_in_its_cooldown(small, schedule: str, stages: int, count: int) -> None:
    """The gradients sent after their worker's last forward are compressed, and no others; both ends know which."""
    config = small(
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
    assert parse("Epilogue(TopK(0.1))") == Epilogue(Plain(TopK(0.1)))
    with pytest.raises(ConfigError) as refused:
        make_config({"forward": "Epilogue(TopK(0.1))", "steps": 1})
    assert "`forward` cannot be Epilogue(TopK(0.1)), which is for backward messages" in str(refused.value)
    make_config({"backward": "Epilogue(LazyErrorPropagation(LowRank(16)))", "steps": 1})
