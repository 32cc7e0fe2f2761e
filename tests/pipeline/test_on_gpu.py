"""Training on a GPU: the laws that need one."""

import pytest
import torch
from engines import losses_of
from gpu import DEVICE

from raysim.codecs.transfers import Flight
from raysim.engine.inline import InlineEngine
from raysim.pipeline.prepare import prepare
from raysim.pipeline.state import unpack_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device"),
]
COMPRESSED = {"forward": "TopK(0.3)", "backward": "ErrorFeedback(Quantize(4))", "device": "cuda", "deterministic": True}


class Halting(Flight):
    """A flight that waits for every copy and every check."""

    def takes(self, device):
        return False


def trained(config, steps=4):
    engine = InlineEngine(prepare(config))
    engine.start()
    losses = [loss for step in range(steps) for loss in losses_of(engine, step)]
    state = {name: x for part in engine.state() for name, x in unpack_tensors(part).items()}
    return engine, losses, state


def assert_same(one, other):
    assert one[1] == other[1]
    assert one[2].keys() == other[2].keys()
    assert all(torch.equal(other[2][name], x) for name, x in one[2].items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_run_repeats_bit_for_bit(small, dtype):
    config = small(**COMPRESSED, dtype=dtype)
    assert_same(trained(config), trained(config))


def test_overlapped_copies_change_no_bit(small, monkeypatch):
    config = small(**COMPRESSED)
    beside = trained(config)
    monkeypatch.setattr("raysim.pipeline.row.Flight", Halting)
    assert_same(beside, trained(config))


def test_seconds_of_actions_are_those_of_the_device(small):
    engine, _, _ = trained(small(**COMPRESSED, profile_every_steps=1))
    actions = [action for report in engine.step(4, engine.signals) for action in report.actions]
    assert actions
    assert all(action.end_s > action.start_s and action.compute_wall_s >= 0 for action in actions)


def test_memory_is_at_most_what_was_forecast_beside_the_libraries(small):
    engine, _, _ = trained(small(**COMPRESSED))
    workspaces = (2 * 32 + 2) * 2**20  # on a Hopper cuBLAS takes 32 MiB for each thread's stream, and cuBLASLt 1 MiB
    assert 0 < engine.device_peak_bytes() <= engine.device_forecast_bytes() + workspaces
