"""torch.distributed.pipelining with packets between its stages: the parameters of one process, bit for bit."""

from typing import Any

import pytest
import torch
from ranks import RankError, check_refusals, run_ranks
from torch import nn

from raysim.distributed.pipelining import (
    Frame,
    FrameError,
    ReceivePacket,
    SendPacket,
    compress_stages,
    read_frame,
    write_frame,
)
from raysim.nn import CompressedLink

CODECS = ("TopK(0.1)", "Quantize(8)")
MEMORIES = ("ErrorFeedback(TopK(0.1))", "EF21(Quantize(4))")
RANDOM = ("Quantize(4, rounding='stochastic')", "RandomK(0.3)")

JOBS = {
    "1F1B": ("1F1B", 2, *CODECS),
    "1F1B with memories, evaluations between": ("1F1B", 2, *MEMORIES, True),
    "GPipe with random codecs": ("GPipe", 2, *RANDOM),
    "a frozen first stage": ("1F1B", 2, *CODECS, False, True),
    "interleaved": ("Interleaved1F1B", 4, *MEMORIES),
    "zero bubble": ("InterleavedZeroBubble", 4, *CODECS),
    "ZBV": ("ZBVZeroBubble", 4, *MEMORIES),
}


def jobs_of_ranks():
    return "pipelining_jobs:all_jobs", JOBS


@pytest.fixture(scope="module")
def ranks(results_of_ranks):
    return [results["test_pipelining"] for results in results_of_ranks]


SENTENCES = [
    "All ranks must compress stages alike, but `forward` differs between ranks 1 and 0: ['TopK(0.2)'] and ['TopK(0.1)'].",
    "`forward` cannot be Nonzero",
    "All ranks must compress stages alike, but `seed` differs between ranks 1 and 0: 1 and 0.",
    "`backward` must be one notation or a list with one per boundary (1), but got 2.",
]


def test_every_rank_raises_the_same_error(ranks):
    check_refusals(ranks, SENTENCES)


def test_stages_end_as_in_one_process(ranks):
    for name in JOBS:
        assert [rank[name]["same"] for rank in ranks] == [True, True], name
    assert ranks[0]["1F1B"]["packets"] == [[20, 20]]  # 5 steps of 4 microbatches, and none of the rehearsal
    dense = 4 * 8 * 64
    assert max(ranks[0]["1F1B"]["bytes"]) < dense / 3


def test_a_packet_that_was_cast_is_refused():
    modules: Any = compress_stages(
        [nn.Linear(4, 4), nn.Linear(4, 4)], [(2, 4)], forward="TopK(0.5)", num_microbatches=2
    )
    frame = modules[0](torch.ones(2, 4)).detach()
    with pytest.raises(FrameError) as refused:
        modules[1](frame.bfloat16())
    assert "in float32, but arrives in bfloat16" in str(refused.value)
    rounded = frame.bfloat16().float()
    assert not modules[1][0](rounded).any()
    with pytest.raises(FrameError) as refused:
        modules[1](rounded)
    assert "its checksum does not match" in str(refused.value)


@pytest.mark.slow
def test_cast_packet_ends_every_rank(tmp_path):
    """The rank that finds it says so, and its neighbour does not wait for it."""
    with pytest.raises(RankError) as ended:
        run_ranks("pipelining_jobs:cast", 2, tmp_path, timeout_s=90)
    assert "its checksum does not match" in str(ended.value)


def test_a_gradient_that_was_changed_is_refused():
    modules = compress_stages([nn.Linear(4, 4), nn.Linear(4, 4)], [(2, 4)], forward="TopK(0.5)", num_microbatches=1)
    with pytest.raises(FrameError):
        modules[0](torch.ones(2, 4)).sum().mul(2).backward()


def test_no_activation_is_kept_between_forward_and_backward():
    both: dict[str, Any] = {
        "forward": "TopK(0.1)",
        "backward": "TopK(0.1)",
    }  # a frame has room for the larger of the two
    send, receive = (kind((4, 1000), **both) for kind in (SendPacket, ReceivePacket))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t), lambda t: t):
        frame = send(torch.ones(4, 1000, requires_grad=True))
        receive(frame.detach().requires_grad_())
    assert saved == []
    assert frame.nbytes < 4 * 1000 * 4 / 3


def test_gradients_pass_in_evaluation_mode():
    """As with frozen BatchNorm: the memories are left alone, and torch's rehearsal changes nothing."""
    notations: dict[str, Any] = {"forward": "TopK(0.5)", "backward": "Quantize(4)"}
    send, receive = (kind((4, 64), **notations).eval() for kind in (SendPacket, ReceivePacket))
    link = CompressedLink(**notations).eval()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    (expected,) = torch.autograd.grad(link(x).exp().sum(), x)
    for _ in range(2):
        torch.autograd.grad(send(x), x, torch.ones(send.words))  # the rehearsal's gradient
        (gradient,) = torch.autograd.grad(receive(send(x)).exp().sum(), x)
        assert torch.equal(gradient, expected)
    assert send.microbatch == receive.microbatch == 0


def test_a_lost_packet_is_noticed():
    send = SendPacket((2, 4), "TopK(0.5)", num_microbatches=4)
    receive = ReceivePacket((2, 4), "TopK(0.5)", num_microbatches=4)
    kept = [send(torch.ones(2, 4, requires_grad=True)) for _ in range(3)]
    receive(kept[0].detach())
    receive(kept[2].detach())  # as in a rehearsal
    with pytest.raises(FrameError) as refused:
        receive(kept[2].detach())
    assert str(refused.value) == "Boundary 0 expected message 1, but got message 2."


def test_boundary_with_mismatched_compressors_is_refused():
    frame = SendPacket((2, 4), "TopK(0.5)")(torch.ones(2, 4))
    other = ReceivePacket((2, 4), "TopK(0.25)")
    other(frame)  # as in a rehearsal, whose memory may hold anything
    with pytest.raises(FrameError) as refused:
        other(frame)
    assert "must have the same compressors" in str(refused.value)


@pytest.mark.parametrize("notation", ["Nonzero", "AQSGD(Quantize(4))", "GraVAC(epsilon=0.5)"])
def test_packets_without_a_bound_are_refused(notation):
    with pytest.raises(ValueError) as refused:
        compress_stages({0: nn.ReLU()}, [(2, 4)], forward=notation, num_microbatches=1)
    assert "its packets vary in size" in str(refused.value)


REFUSALS: dict[str, Any] = {
    "stage": ({5: nn.ReLU()}, {}, "`stages` must have indices from 0 to 1, as `shapes` has 1 boundaries, but got 5."),
    "notations": (
        {0: nn.ReLU()},
        {"backward": ["Identity"] * 2},
        "`backward` must be one notation or a list with one per boundary (1), but got 2.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_wrong_input_is_refused_in_a_sentence(case):
    stages, options, sentence = REFUSALS[case]
    with pytest.raises(ValueError) as refused:
        compress_stages(stages, [(2, 4)], num_microbatches=1, **options)
    assert str(refused.value) == sentence


def test_frame_round_trip():
    import numpy as np

    message = (b"header", np.arange(7, dtype=np.uint8), np.zeros(0, np.uint8))
    header, *arrays = read_frame(write_frame(Frame(message, 5, 6), 64, torch.device("cpu"))).message
    assert header == b"header"
    assert [array.tolist() for array in arrays] == [list(range(7)), []]
    with pytest.raises(FrameError):
        write_frame(Frame(message, 5, 6), 10, torch.device("cpu"))
