"""Replica methods in DistributedDataParallel: the losses of `raysim.train`, checkpoints, buckets and refusals."""

import math
from typing import Any

import pytest
import torch
from configurations import SMALL
from ddp_jobs import FEEDBACK

import raysim

ONE_STAGE = {**SMALL, "num_stages": 1, "num_replicas": 2, "num_microbatches": 1, "steps": 4}
METHODS = {
    "Identity": {},
    "Gathered(ErrorFeedback(TopK(0.05)), min_values=16)": {},
    "Gathered(Quantize(4, rounding='stochastic'), min_values=16)": {},
    "Gathered(ErrorFeedback(TopK(0.05)), min_values=16, scope='stage')": {},
    "PowerSGD(2, min_values=16)": {},
    "GTopK(0.05, min_values=16)": {},
    "Accordion(LowRank(2), LowRank(1), min_values=16)": {},
    "DGC(0.1, ramp=1, min_values=16)": {"momentum": 0.9},
}
DEPENDENT = "GraVAC(2, 50, epsilon=0.5, window=1, min_values=16)"  # on the clock
BUCKETS = [
    "ErrorFeedback(TopK(0.1))",
    "Gathered(ErrorFeedback(TopK(0.1)), min_values=16)",
    "PowerSGD(2, min_values=16)",
    "DeCoSGD(0.1, min_values=16)",
]


def job(method):
    momentum = 0.9 if method.startswith("DGC") else None
    return {**ONE_STAGE, "replica_gradient": method, "optimizer": {"learning_rate": 0.1, "momentum": momentum or 0.0}}


def jobs_of_ranks():
    jobs: dict[str, tuple[Any, ...]] = {}
    for method, options in METHODS.items():
        values = job(method)
        if options:  # the hook takes the momentum over
            values = {**values, "optimizer": {"learning_rate": 0.1, "momentum": 0.0}, "replica_gradient": "Identity"}
        jobs[method] = (values, method, options)
    jobs["resumed"] = (job("Identity"), "Gathered(ErrorFeedback(TopK(0.05)), min_values=16)", {}, True)
    jobs["clock"] = (job("Identity"), DEPENDENT, {"batch_size": 16})
    return "ddp_jobs:everything", jobs, BUCKETS


@pytest.fixture(scope="module")
def ranks(results_of_ranks):
    return [results["test_ddp"] for results in results_of_ranks]


def mean_losses(ranks, name):
    return [math.fsum(pair) / 2 for pair in zip(*(rank["losses"][name][0] for rank in ranks), strict=True)]


@pytest.mark.parametrize("method", METHODS)
def test_losses_are_those_of_a_run(method, ranks, tmp_path):
    run = raysim.train({**job(method)}, engine="inline", out=tmp_path / "run")
    losses = mean_losses(ranks, method)
    if METHODS[method]:  # momentum is rounded once more where it is applied apart from the optimiser
        assert losses == pytest.approx(run.steps["loss"].tolist(), rel=1e-4)
    else:
        assert losses == run.steps["loss"].tolist()


def test_a_checkpoint_goes_on_with_the_same_bits(ranks):
    assert mean_losses(ranks, "resumed") == mean_losses(ranks, "Gathered(ErrorFeedback(TopK(0.05)), min_values=16)")


def test_replicas_agree_on_the_clock(ranks):
    assert all(math.isfinite(loss) for rank in ranks for loss in rank["losses"]["clock"][0])


def test_bytes_are_counted(ranks):
    for method in ("Gathered(ErrorFeedback(TopK(0.05)), min_values=16)", "PowerSGD(2, min_values=16)"):
        report = ranks[0]["losses"][method][1]
        assert report["steps"] == ONE_STAGE["steps"]
        assert report["factor"] > 1.5


@pytest.mark.parametrize("method", BUCKETS)
def test_a_method_of_single_tensors_gives_the_same_in_any_buckets(method, ranks):
    for rank in ranks:
        one, many = rank["buckets"][method]
        assert torch.equal(one, many)
    assert torch.equal(ranks[0]["buckets"][method][0], ranks[1]["buckets"][method][0])


@pytest.mark.parametrize("method", [None, "Identity", *BUCKETS])
def test_a_scaler_s_steps_are_those_without_it_and_an_overflow_changes_no_memory(method, ranks):
    for rank in ranks:
        skipping, without = rank["overflows"][method]
        assert skipping.isfinite().all()
        assert torch.equal(skipping, without)


@pytest.mark.parametrize("finds_unused", [False, True])
@pytest.mark.parametrize("method", FEEDBACK)
def test_parameters_get_all_that_was_fed_but_what_ranks_remember(method, finds_unused, ranks):
    """After DDP has rebuilt its buckets, and of parameters that get no gradient in some steps."""
    for rank in ranks:
        fed, received = rank["passed on"][method, finds_unused]
        torch.testing.assert_close(received, fed, rtol=1e-4, atol=1e-4)


def test_layers_frozen_after_wrapping_are_left_alone_as_in_plain_ddp(ranks):
    for rank in ranks:
        plain, dense, compressed = rank["freezes"]
        torch.testing.assert_close(dense, plain)
        width = 24 * 25
        for layer in (0, 2):
            own = slice(layer * width, (layer + 1) * width)
            assert torch.equal(compressed[own], plain[own])
        assert torch.equal(compressed, ranks[0]["freezes"][2])


def test_a_checkpoint_goes_on_in_a_model_compiled_since(ranks):
    for rank in ranks:
        one, other = rank["renamed"]
        assert torch.equal(one, other)


def test_a_memory_that_is_the_same_on_all_ranks_may_be_that_of_another(ranks):
    one, other = (rank["of another rank"] for rank in ranks)
    assert one.keys() == other.keys() != set()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_dense_bytes_are_those_of_the_gradients_own_type(ranks):
    for rank in ranks:
        assert rank["dense bytes"] == [4 * 24 * 25, 2 * 24 * 25]


def test_two_models_may_share_a_backward(ranks):
    for rank in ranks:
        apart, at_once = rank["together"]
        assert torch.equal(apart, at_once)


def test_controllers_of_buckets_go_on_from_a_checkpoint(ranks):
    """But for a new model's first step, for which DDP has other buckets."""
    for rank in ranks:
        (before, after), steps = rank["decided"]
        assert len(before) > 1
        assert after == {names: count + 2 for names, count in before.items()}
        assert steps == 3


SENTENCES = [
    "All ranks must average gradients alike, but the method differs between ranks 1 and 0: TopK(0.2) and TopK(0.1).",
    "TopKk",
    "All ranks must average gradients alike, but `seed` differs between ranks 1 and 0: 1 and 0.",
    "`method` cannot be MARINA(QSGD(7)) in a hook, which sees only gradients: it needs stages of its own.",
    "`method` cannot be PowerGossip(rank=2) in a hook, which sees only gradients: replicas keep parameters of their own.",
    "`method`: `DGC` corrects the optimiser's momentum, but the optimiser has none.",
    "`steps_per_epoch` must be given for DGC(0.1, ramp=2), which depends on epochs.",
    "`optimizer` must be given for Accordion(LowRank(4), LowRank(1)), which depends on learning rate.",
    "`method`: `rank` must be at most 32, the rank of the largest matrix of the stage (weight), but got 40.",
    "`method`: `optimizer.momentum` must be 0 with DeMo, which keeps a momentum itself, but got 0.9.",
    "Replica 1 could not average its gradients: A tensor to send by Quantize(4) holds NaN or infinity.",
    "`method` must be TopK(0.2), as in the checkpoint, but got TopK(0.1).",
    "whose memory is its own, but is that of rank ",
    "but `weight` has the shape (16, 32) in the model and the shape (32, 32) in the checkpoint.",
    "`model` must have the checkpoint's parameters, but `0.weight` has the shape (32, 32) in the model and none in the checkpoint.",
]


def test_every_rank_is_told_the_same_sentence(ranks):
    for place, sentence in enumerate(SENTENCES):
        for rank in ranks:
            assert sentence in rank["refusals"][place], sentence
