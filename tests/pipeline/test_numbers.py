"""Laws of number formats: the scale of the loss changes no bit where nothing underflows, and float16 trains with it."""

import pytest
import torch
from engines import losses_of, start
from pipelines import ADAM, GPT, REPLICAS, TIED
from pydantic import ValidationError

from raysim.pipeline.state import unpack_tensors


def trained(config, steps=3):
    engine = start(config)
    losses = [loss for step in range(steps) for loss in losses_of(engine, step)]
    return losses, {name: x for part in engine.state() for name, x in unpack_tensors(part).items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"forward": "TopK(0.3)", "backward": "ErrorFeedback(Quantize(4))"},
        {**GPT, **ADAM, "schedule": "ZBH1", "recompute": True},
        {**TIED, "optimizer": {"name": "adamw", "learning_rate": 1e-3, "clip_norm": 0.1}},
        {**REPLICAS, "replica_gradient": "ErrorFeedback(TopK(0.2))"},
    ],
    ids=["compressed", "zero-bubble", "clipped", "replicas"],
)
def test_a_scaled_loss_trains_to_the_same_bits(small, changes):
    plain, scaled = (trained(small(**changes, loss_scale=scale)) for scale in (1.0, 1024.0))
    assert plain[0] == scaled[0]
    assert plain[1].keys() == scaled[1].keys()
    memories = [name for name in plain[1] if not torch.equal(plain[1][name], scaled[1][name])]
    # only what links remember of gradients is scaled
    assert all(torch.equal(1024 * plain[1][name], scaled[1][name]) for name in memories), memories


def test_float16_trains_and_its_links_carry_two_bytes_a_value(small):
    losses, state = trained(small(dtype="float16"), steps=6)
    assert sum(losses[-4:]) < sum(losses[:4])
    assert all(torch.isfinite(x).all() for x in state.values() if x.is_floating_point())
    engine = start(small(dtype="float16"))
    reports = engine.step(0)
    halves = sum(link.dense_bytes for report in reports for link in report.links)
    engine = start(small())
    assert 2 * halves == sum(link.dense_bytes for report in engine.step(0) for link in report.links)


def test_small_gradients_survive_float16_by_the_scale(small):
    """Of a loss divided by 2**17, gradients underflow float16 without a scale of the loss."""
    tiny = {"dtype": "float16", "num_microbatches": 1}
    with_scale, without = (trained(small(**tiny, loss_scale=scale), steps=1)[1] for scale in (4096.0, 2.0**-13))
    exact = trained(small(num_microbatches=1), steps=1)[1]
    error = {
        label: sum(float((state[name].double() - x.double()).norm()) for name, x in exact.items() if "momentum" in name)
        for label, state in (("scaled", with_scale), ("without", without))
    }
    assert error["scaled"] < 0.5 * error["without"]


@pytest.mark.parametrize("scale", [0.0, -2.0, 3.0, float("inf"), float("nan")])
def test_loss_scale_is_a_power_of_two(small, scale):
    with pytest.raises((ValidationError, ValueError), match="loss_scale"):
        small(loss_scale=scale)
