"""FSDP2 with compressed reduce-scatters: the stated closed form, checkpoints and refusals."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsdp_jobs import CODED, SCALED, UNITS
from ranks import check_refusals
from torch import nn

from raysim.codecs.message import CodecTable
from raysim.compressors import parse
from raysim.distributed import fsdp
from raysim.forecast.fleet import Fleet, HostLayout, Proposal
from raysim.forecast.job import Job
from raysim.forecast.shapes import Shapes, StageCost, Unit
from raysim.network.sharding import FSDP
from raysim.network.transport import BARE
from raysim.pipeline.groups import Group, exchange_together
from raysim.schedules import GPipe


def jobs_of_ranks():
    return ("fsdp_jobs:everything",)


@pytest.fixture(scope="module")
def ranks(results_of_ranks):
    return [results["test_fsdp"] for results in results_of_ranks]


SENTENCES = [
    "All ranks must reduce gradients alike, but the method differs between ranks 1 and 0: TopK(0.2) and TopK(0.1).",
    "`method` must be a codec of flat tensors, alone or under ErrorFeedback, to be a reduce-scatter of FSDP, but got PowerSGD(2).",
    "`method` must be TopK(0.1), as in the checkpoint, but got TopK(0.2).",
    "`model` must have 3 modules of FSDP2, as in the checkpoint, but has 2.",
    "`model` must have the checkpoint's parameters, but `2.weight` has the shape (16, 32) in the model and none in the checkpoint.",
    "whose memory is its own, but is that of rank ",
    "Replica 1 could not average its gradients: A tensor to send by Quantize(4) holds NaN or infinity.",
    "must get gradients in every step, but some of a, b got none. Call `fully_shard` on each part",
    "must get gradients in every step, but a got them before, and b now. Call `raysim.fsdp.compress` again.",
]


def test_every_rank_raises_the_same_error(ranks):
    check_refusals(ranks, SENTENCES)


def test_reduce_scatters_have_their_closed_form_and_go_on_from_a_checkpoint(ranks):
    for rank in ranks:
        for law in ("closed form", "resumed"):
            one, other = rank[law]
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True)), law
        half, quarter = rank["bytes"]
        assert quarter < half / 2


@pytest.mark.parametrize("method", ["ErrorFeedback(TopK(0.2){})", "MixedErrorFeedback(TopK(0.4){})"])
@pytest.mark.parametrize("key", ["", ", key='link'", ", key='sample'"])
def test_shards_get_all_that_was_fed_but_what_ranks_remember(method, key, monkeypatch):
    """Each rank remembers the residual of every other rank's shard."""
    monkeypatch.setattr(fsdp._ReduceScatter, "_check_whole", lambda *_: None)  # these shards are of no parameters
    method, size = parse(method.format(key)), 3
    channels: Any = [SimpleNamespace(rank=rank, size=size) for rank in range(size)]
    ranks = [fsdp._ReduceScatter(method, 0, 0, {}) for _ in channels]
    group, table = Group(tuple((rank, 0) for rank in range(size))), CodecTable(method.entries(), names=["shard"])
    fed = torch.randn(4, size, size, 10, generator=torch.Generator().manual_seed(0))  # by step, rank and shard
    arrived = torch.zeros(size, 10)
    for step in fed:
        rounds = [rank._rounds(x.flatten(), channel) for rank, x, channel in zip(ranks, step, channels, strict=True)]
        arrived += torch.stack([each.result for each in exchange_together(group, rounds, table, num_values=10)])
    for rank in ranks:
        for shard, residual in rank.state.items():
            arrived[shard] += residual.view(-1)
    assert torch.allclose(arrived, fed.sum((0, 1)), atol=1e-5)


@pytest.mark.parametrize("method", SCALED)
def test_a_scaler_s_steps_are_those_without_it_and_an_overflow_changes_no_memory(method, ranks):
    for rank in ranks:
        skipping, without = rank["overflows"][method]
        assert skipping.isfinite().all()
        assert torch.equal(skipping, without)


def test_modules_sharded_as_a_list_are_reduced_together(ranks):
    for rank in ranks:
        whole, listed = rank["listed"]
        assert torch.equal(whole, listed)


class Layers:
    """The model of `fsdp_jobs.scattered`, as advice sees one."""

    name, samples_name, num_parameters, layers = "layers", "samples", sum(UNITS), 1

    def stages(self, num_stages, samples):
        assert num_stages == 1
        shapes: Shapes = Counter({(size,): 1 for size in UNITS})
        return [StageCost(1.0, 1.0, shapes, 0.0, 0.0, (samples, 256), tuple(Unit(0.5, size) for size in UNITS))]


def test_advice_counts_the_bytes_that_ranks_send(ranks):
    """To the 64 bytes of a packet's headers; shards are no whole number of rows."""
    model: Any = Layers()
    job = Job(model, Fleet.parse("2xA100"), GPipe(), batch=2, microbatch=1, efficiency=0.4, transport=BARE)
    for place, method in enumerate(CODED):
        sharded = job.sharded(Proposal(HostLayout(1, 2, FSDP(2)), method=method))
        gathered = 2 * (2 * sum(UNITS) / 2)  # twice the other rank's half, in 16 bits
        for rank in ranks:
            sent = gathered + rank["scattered"][place]
            assert sharded.sent_bytes(2, 1) == pytest.approx(sent, rel=0, abs=64 * len(UNITS)), method


@pytest.mark.parametrize(
    "method", ["PowerSGD(2)", "DGC(0.1)", "EF21(TopK(0.1))", "LowRank(2)", "Gathered(TopK(0.1), warmup=3)"]
)
def test_methods_without_reduce_scatter_are_refused(method):
    with pytest.raises(ValueError) as refused:
        fsdp.compress(nn.Linear(2, 2), method)
    assert "to be a reduce-scatter of FSDP" in str(refused.value)


def test_a_model_without_shards_is_refused():
    with pytest.raises(ValueError) as refused:
        fsdp.compress(nn.Linear(2, 2), "TopK(0.1)")
    assert str(refused.value) == "`model` must hold modules of FSDP2: call `fully_shard` on them first."
