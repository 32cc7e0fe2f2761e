"""FSDP2 with compressed reduce-scatters: the stated closed form, checkpoints and refusals."""

import pytest
import torch
from ranks import check_refusals, run_ranks
from torch import nn

from raysim.distributed import fsdp


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks("fsdp_jobs:everything", 2, tmp_path_factory.mktemp("fsdp"))


SENTENCES = [
    "All ranks must reduce gradients alike, but the method on rank 1 is TopK(0.2), and on rank 0 TopK(0.1).",
    "`method` must be a codec of flat tensors, alone or under ErrorFeedback, to be a reduce-scatter of FSDP, but got PowerSGD(2).",
    "`method` must be TopK(0.1), as in the checkpoint, but got TopK(0.2).",
    "`model` must have 3 modules of FSDP2, as in the checkpoint, but has 2.",
    "Replica 1 could not average its gradients: A tensor to send by Quantize(4) holds NaN or infinity.",
]


def test_every_rank_is_told_the_same_sentence(ranks):
    check_refusals(ranks, SENTENCES)


def test_reduce_scatters_have_their_closed_form_and_go_on_from_a_checkpoint(ranks):
    for rank in ranks:
        for law in ("closed form", "resumed"):
            one, other = rank[law]
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), law
        half, quarter = rank["bytes"]
        assert quarter < half / 2


@pytest.mark.parametrize(
    "method", ["PowerSGD(2)", "DGC(0.1)", "EF21(TopK(0.1))", "LowRank(2)", "Gathered(TopK(0.1), warmup=3)"]
)
def test_methods_that_are_no_reduce_scatter_are_refused(method):
    with pytest.raises(ValueError) as refused:
        fsdp.compress(nn.Linear(2, 2), method)
    assert "to be a reduce-scatter of FSDP" in str(refused.value)


def test_a_model_without_shards_is_refused():
    with pytest.raises(ValueError) as refused:
        fsdp.compress(nn.Linear(2, 2), "TopK(0.1)")
    assert str(refused.value) == "`model` must hold modules of FSDP2: call `fully_shard` on them first."
