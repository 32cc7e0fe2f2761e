"""Laws that several test modules ask of codecs."""

import pytest
import torch
from torch import Tensor

from raysim.codecs import Codec


def groups_of(x: Tensor, per: str) -> list[Tensor]:
    if per == "tensor" or x.ndim == 0:
        return [x.reshape(-1)]
    axis = 0 if per == "sample" else 2 if x.ndim == 3 else min(1, x.ndim - 1)
    return list(x.movedim(axis, 0).reshape(x.shape[axis], -1))


def check_unbiased(codec: Codec, x: Tensor, variance: Tensor, *, draws: int = 4000) -> None:
    """Oracles section 1: |mean - x| <= 5 sqrt(variance / draws) for each value, with the exact variance."""
    decoded = torch.stack([codec.encode(x, key).decode() for key in range(1, draws + 1)]).double()
    slack = 5 * (variance / draws).sqrt() + 1e-6 * x.abs().max()
    assert ((decoded.mean(dim=0) - x.double()).abs() <= slack).all()
    measured = (decoded - x.double()).square().sum(dim=tuple(range(1, decoded.ndim))).mean()
    assert measured == pytest.approx(float(variance.sum()), rel=0.15, abs=1e-9)
