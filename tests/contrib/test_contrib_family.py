"""Laws of single codecs of raysim-contrib, beyond the laws of all codecs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_laws import bits_of, check_unbiased, groups_of
from codec_variants import KEY, LAW_TENSORS, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from raysim_contrib.entropy import Entropy
from raysim_contrib.error_bounded import ErrorBounded
from raysim_contrib.fixed_point import FixedPoint
from raysim_contrib.natural import Natural
from raysim_contrib.signs import OneBit, Sign
from raysim_contrib.terngrad import TernGrad
from raysim_contrib.threshold import Threshold
from zstandard import ZstdCompressor

from raysim.codecs import Identity, Quantize, TopK


def test_fixed_point_vector() -> None:
    y = FixedPoint(2, per="tensor").encode(torch.tensor([-1, -0.6, -0.25, 0, 0.3, 0.6, 1])).decode()
    assert y.tolist() == [-1, -0.5, 0, 0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(("bits", "top"), [(1, 0.0), (2, 0.5), (4, 0.875), (8, 0.9921875)])
def test_fixed_point_ends_and_error(bits: int, top: float) -> None:
    x = normal(4, 300)
    x[0, 0], x[0, 1] = 5.0, -5.0
    y = FixedPoint(bits, per="tensor").encode(x).decode()
    assert float(y[0, 0]) == top * 5
    assert float(y[0, 1]) == -5
    step = 5 * 2.0 ** -(bits - 1)
    assert ((x - y).abs() <= torch.where(x > top * 5 + step / 2, step, step / 2) * (1 + 1e-6)).all()


def test_terngrad() -> None:
    x = normal(3, 30)
    plain = TernGrad(clip=None)
    variances = x.abs().max().double() * x.abs().double() - x.double().square()
    check_unbiased(plain, x, variances, draws=1500)
    assert float(variances.sum() / x.double().square().sum()) <= plain.relative_variance(x.numel())
    clipped = TernGrad(1.0).clipped(x).view_as(x).float()
    limit = float(x.double().std(correction=0))
    assert torch.allclose(clipped, x.clamp(-limit, limit), atol=1e-6)
    assert set(TernGrad(1.0).encode(x, KEY).decode().unique().tolist()) == {
        clipped.min().item(),
        0.0,
        clipped.max().item(),
    }


def test_natural() -> None:
    x = normal(4, 25)
    low = torch.exp2(x.abs().double().log2().floor())
    check_unbiased(Natural(), x, (x.abs() - low) * (2 * low - x.abs()), draws=1500)
    y = Natural().encode(x, KEY).decode()
    assert torch.equal(torch.frexp(y).mantissa.abs(), torch.full_like(y, 0.5))
    worst = torch.full((1, 2000), 4 / 3)
    variance = (Natural().encode(worst, KEY).decode() - worst).square().mean() / (16 / 9)
    assert float(variance) == pytest.approx(1 / 8, rel=0.05)


@settings(max_examples=60)
@given(values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=50), tau=st.floats(0.01, 200))
def test_threshold_keeps_just_what_reaches_it(values: list[float], tau: float) -> None:
    x = torch.tensor(values)
    y = Threshold(tau).encode(x).decode()
    limit = torch.tensor(tau)
    if (x.abs() >= limit).any():
        assert torch.equal(y, torch.where(x.abs() >= limit, x, 0.0))
    else:
        assert y.count_nonzero() <= 1
        assert float(y.abs().max()) == float(x.abs().max())


def test_entropy_is_lossless_and_never_much_larger() -> None:
    for x in (normal(8, 500), normal(8, 500).relu(), torch.zeros(8, 500)):
        for codec in (Quantize(4), TopK(0.1), Quantize(8, per="row")):
            plain, small = codec.encode(x), Entropy(codec).encode(x)
            assert torch.equal(plain.decode(), small.decode())
            assert small.array_bytes <= plain.array_bytes + len(plain.arrays)
    relu = (normal(8, 5000) - 1).relu()
    assert Entropy(Quantize(4)).encode(relu).array_bytes < 0.5 * Quantize(4).encode(relu).array_bytes


def test_byte_shuffle_shrinks_floats() -> None:
    """The exponents of normal values take some 2.5 of their 8 bits; without a shuffle zstd finds less than half of that."""
    x = normal(64, 1024)
    plain = len(ZstdCompressor(level=1).compress(x.numpy().tobytes()))
    shuffled = Entropy(Identity()).encode(x).array_bytes
    assert x.nbytes / plain < 1.1
    assert x.nbytes / shuffled > 1.17


@given(
    count=st.integers(0, 5000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    kind=st.sampled_from(["normal", "relu", "ramp", "zeros"]),
)
def test_entropy_is_exact_and_never_larger(count: int, dtype: torch.dtype, kind: str) -> None:
    made = {"normal": normal, "relu": lambda n: normal(n).relu(), "ramp": lambda n: 1 + torch.arange(n) / 999}
    x = made.get(kind, torch.zeros)(count).to(dtype)
    packet = Entropy(Identity()).encode(x)
    assert packet.array_bytes <= x.nbytes + 1
    assert bits_of(packet.decode()) == bits_of(x)


def test_decompressed_arrays_are_bounded() -> None:
    bomb = np.frombuffer(b"\x01" + ZstdCompressor().compress(bytes(1 << 26)), np.uint8)
    packet = Entropy(Quantize(4)).encode(torch.ones(8))
    with pytest.raises(ValueError, match="neither raw nor compressed"):
        packet._replace(arrays=packet.arrays | {"raw.codes": bomb}).decode()


def test_small_vectors_of_signs() -> None:
    assert OneBit().encode(torch.tensor([-1.0, -3.0, 2.0, 4.0])).decode().tolist() == [-2, -2, 3, 3]
    assert Sign().encode(torch.tensor([1.0, -3.0])).decode().tolist() == [2, -2]
    assert Sign(scaled=False).encode(torch.tensor([0.0, -0.0, -3.0])).decode().tolist() == [1, 1, -1]


@pytest.mark.parametrize(
    "name", ["normal", "post-ReLU", "heavy tail", "tokens", pytest.param("long", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("per", ["tensor", "sample", "channel", "row"])
def test_laws_of_scaled_sign_and_of_one_bit(name: str, per: str) -> None:
    x = LAW_TENSORS[name]
    sign, one_bit = Sign(per=per).encode(x).decode(), OneBit(per=per).encode(x).decode()
    grouping = per
    pairs = (
        zip(x.reshape(-1, x.shape[-1]), sign.reshape(-1, x.shape[-1]), one_bit.reshape(-1, x.shape[-1]), strict=True)
        if per == "row"
        else zip(groups_of(x, grouping), groups_of(sign, grouping), groups_of(one_bit, grouping), strict=True)
    )
    for values, c, b in pairs:
        values, c, b = values.double(), c.double(), b.double()
        squared = values.square().sum()
        assert (values - c).square().sum() == pytest.approx(
            float(squared - values.abs().sum() ** 2 / len(values)), rel=1e-5, abs=1e-5
        )
        assert float(c @ values) == pytest.approx(float(c.square().sum()), rel=1e-5, abs=1e-6)
        assert float((values - b)[values < 0].sum()) == pytest.approx(0, abs=1e-5 * len(values))
        assert float((values - b)[values >= 0].sum()) == pytest.approx(0, abs=1e-5 * len(values))
        assert float(squared) == pytest.approx(
            float(b.square().sum() + (values - b).square().sum()), rel=1e-5, abs=1e-6
        )


@settings(max_examples=80)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=300),
    bound=st.floats(1e-6, 1e6),
)
def test_absolute_bound_holds(values: list[float], bound: float) -> None:
    x = torch.tensor(values)
    y = ErrorBounded(bound).encode(x).decode()
    assert ((x.double() - y.double()).abs() <= bound * (1 + 1e-6) + 1.2e-7 * x.double().abs()).all()


@pytest.mark.parametrize("relative", ["range", "rms"])
@pytest.mark.parametrize("bound", [0.001, 0.1])
def test_relative_bounds_hold_and_bytes_follow(relative: str, bound: float) -> None:
    x = normal(40, 1000)
    limit = bound * float(x.max() - x.min() if relative == "range" else x.square().mean().sqrt())
    packet = ErrorBounded(bound, relative).encode(x)
    assert float((packet.decode() - x).abs().max()) <= limit * (1 + 1e-5)
    finer = ErrorBounded(bound / 4, relative).encode(x)
    assert 1.5 <= 8 * (finer.array_bytes - packet.array_bytes) / x.numel() <= 2.3  # two bits a value
