"""Low rank that continues from the message before (Vogels et al. 2019, 1905.13727; Song et al. 2023, 2301.09830)."""

from __future__ import annotations

import itertools

import pytest
import torch
from codec_variants import normal
from compressor_variants import Pair, context

from raysim.codecs import LowRank, Quantize
from raysim.compressors import WarmStart, parse


def spread(rows: int, columns: int) -> torch.Tensor:
    """A matrix whose singular values fall by a third each."""
    left, _, right = torch.linalg.svd(normal(rows, columns).double(), full_matrices=False)
    values = 0.66 ** torch.arange(min(rows, columns), dtype=torch.float64)
    return (left * values @ right).float()


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_error_of_a_frozen_input_falls_to_the_best_of_its_rank(rank: int) -> None:
    x = spread(24, 40)
    best = float(torch.linalg.svdvals(x.double())[rank:].square().sum().sqrt())
    pair = Pair(WarmStart(LowRank(rank)))
    errors = [float((pair.send(x, context(step))[1] - x).norm()) for step in range(40)]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(errors))
    assert errors[0] > 1.02 * best
    assert errors[-1] == pytest.approx(best, rel=1e-4)
    cold = [float((LowRank(rank).encode(x, step).decode() - x).norm()) for step in range(40)]
    assert min(cold) > errors[-1]


def test_samples_continue_from_own_memory() -> None:
    x = torch.stack([spread(12, 20), spread(12, 20).flip(0, 1)])
    both, first = Pair(WarmStart(LowRank(2, per="sample"))), Pair(WarmStart(LowRank(2, per="sample")))
    for step in range(5):
        y, alone = both.send(x, context(step))[1], first.send(x[:1], context(step))[1]
    assert torch.equal(y[:1], alone)


def test_zero_columns_are_redrawn() -> None:
    x = spread(16, 30)
    pair = Pair(WarmStart(LowRank(3)))
    for step, message in enumerate([x, torch.zeros(16, 30), x[:, :1] @ x[:1], x]):
        y = pair.send(message, context(step))[1]
        assert torch.isfinite(y).all()
    assert float((y - x).norm()) < 0.6 * float(x.norm())
    assert pair.sender.state[-1].abs().amax(dim=(0, 1)).gt(1e-3).all()  # all three columns carry something


def test_changed_columns_reset_and_incompressible_is_dense() -> None:
    pair = Pair(WarmStart(LowRank(2)))
    pair.send(normal(8, 30), context(0))
    _, y = pair.send(normal(6, 30), context(1))  # fewer rows: Q is as long as before, and kept
    assert not torch.equal(y, LowRank(2).encode(normal(6, 30), context(1).key).decode())
    before = pair.sender.state[-1].clone()
    packet, y = pair.send(normal(2, 3), context(2))
    assert torch.equal(y, normal(2, 3))
    assert set(packet.arrays) == {"values"}
    assert torch.equal(pair.sender.state[-1], before)
    _, y = pair.send(normal(8, 20), context(3))
    assert torch.equal(y, LowRank(2).encode(normal(8, 20), context(3).key).decode())


def test_warm_start_accepts_only_low_rank() -> None:
    with pytest.raises(ValueError) as caught:
        WarmStart(Quantize(4))  # type: ignore[arg-type]
    assert str(caught.value) == "`codec` must be a LowRank, to keep its Q, but got Quantize(4)."
    assert repr(parse("WarmStart(LowRank(4, per='sample'))")) == "WarmStart(LowRank(4, per='sample'))"
