"""Laws of single codecs, beyond the laws of all codecs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from codec_laws import check_unbiased, error_of
from codec_variants import KEY, normal, student
from hypothesis import given
from hypothesis import strategies as st

from raysim.codecs import (
    MX,
    QSGD,
    Cast,
    EstimatedTopK,
    Hadamard,
    LowRank,
    NonUniform,
    Quantize,
    RandomK,
    TopK,
    kernels,
)
from raysim.codecs.groups import group_sums, layout_of
from raysim.codecs.hadamard import hadamard
from raysim.codecs.lowrank import orthonormal

# Blocks and rows


@pytest.mark.parametrize("size", [32, 100, 4096])
def test_blockwise_int8_error(size: int) -> None:
    x = student(3, 5000)
    y = Quantize(8, range="absmax", per="block", block=size).encode(x).decode()
    for values, sent in zip(x.view(-1).split(size), y.view(-1).split(size), strict=True):
        assert ((values - sent).abs() <= values.abs().max() / 254 * (1 + 1e-5)).all()


def test_rows_are_independent() -> None:
    x = normal(3, 7, 40)
    alone = torch.cat([Quantize(3, per="row").encode(row.view(1, -1)).decode() for row in x.view(-1, 40)])
    assert torch.equal(Quantize(3, per="row").encode(x).decode().view(-1, 40), alone)


# Signs


def test_sums_equal_float64() -> None:
    x = (normal(5, 20000) * 1000).round()
    for per in ("tensor", "sample", "channel", "row"):
        layout = layout_of(tuple(x.shape), per, 0)
        assert torch.equal(group_sums(x, layout, "magnitudes"), layout.view(x.double().abs()).sum(dim=(0, 2)))


# Random roundings, with their exact variances


def test_qsgd() -> None:
    x, codec = normal(2, 60), QSGD(3, block=40)
    norms = torch.stack([part.norm() for part in x.view(-1).double().split(40)]).repeat_interleave(40).view(2, 60)
    fraction = (x.abs() / norms * 3).frac()
    check_unbiased(codec, x, (norms / 3).square() * fraction * (1 - fraction), draws=1500)


def test_random_k() -> None:
    x = normal(2, 20)
    check_unbiased(RandomK(0.25, unbiased=True), x, 3 * x.double().square(), draws=1500)
    packet = RandomK(0.25).encode(x, KEY)
    support = RandomK(0.25).support(packet)
    assert packet.decode().view(-1)[support.positions].tolist() == x.view(-1)[support.positions].tolist()
    assert all(len(set(row.tolist())) == 5 for row in support.positions)
    # every subset of 4 of 12 comes up about as often as any other
    ones = torch.ones(5000, 12)
    drawn = RandomK(1 / 3).encode(ones, KEY).decode()
    assert (drawn.sum(dim=1) == 4).all()
    counts = dict.fromkeys(itertools.combinations(range(12), 4), 0)
    for row in drawn:
        counts[tuple(row.nonzero().view(-1).tolist())] += 1
    expected = 5000 / math.comb(12, 4)
    chi_squared = sum((count - expected) ** 2 / expected for count in counts.values())
    assert chi_squared < 494 + 5 * math.sqrt(2 * 494)


# Thresholds


@pytest.mark.parametrize(
    ("policy", "low", "high"),
    [("sampled", 0.8, 1.3), ("bisect", 1, 2), ("gaussian", 0.67, 1.4), ("exponential", 0.8, 1.2)],
)
@pytest.mark.parametrize("density", [0.1, 0.01])
@pytest.mark.parametrize("shift", [0.0, 0.3, -3.0, 1000.0])
def test_estimated_thresholds_keep_about_what_they_should(
    policy: str, low: float, high: float, density: float, shift: float
) -> None:
    x = normal(200000) + shift
    y = EstimatedTopK(density, policy).encode(x, KEY).decode()
    assert low * density <= float(y.count_nonzero()) / len(x) <= high * density
    kept = x[y != 0].abs().min()
    assert (x[y == 0].abs() <= kept).all()


# Small floats


def test_mxfp4_elements() -> None:
    values = [0.0, 0.25, 0.26, 0.74, 0.75, 1.25, 1.26, 1.75, 2.5, 2.51, 3.5, 5.0, 5.01, 7.9]
    expected = [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0]
    assert MX("e2m1").encode(torch.tensor(values)).decode().tolist() == expected
    assert MX("e2m1").encode(-torch.tensor(values)).decode().tolist() == [-value for value in expected]


@pytest.mark.parametrize(
    ("element", "dtype", "top"), [("e4m3", torch.float8_e4m3fn, 8), ("e5m2", torch.float8_e5m2, 15)]
)
def test_mxfp8_equals_torch_cast_of_scaled_blocks(element: str, dtype: torch.dtype, top: int) -> None:
    x = student(4, 64)
    y = MX(element).encode(x).decode()
    for values, sent in zip(x.view(-1, 32), y.view(-1, 32), strict=True):
        scale = 2.0 ** (math.floor(math.log2(values.abs().max())) - top)
        limit = torch.finfo(dtype).max
        assert torch.equal(sent, (values / scale).clamp(-limit, limit).to(dtype).float() * scale)


def test_casts_equal_torch() -> None:
    x = normal(3, 50)
    for name in ("bfloat16", "float16"):
        assert torch.equal(Cast(name).encode(x).decode(), x.to(getattr(torch, name)).float())


# Rotations


@pytest.mark.parametrize("tile", [2, 32, 128])
def test_hadamard_matrix(tile: int) -> None:
    matrix = hadamard(torch.eye(tile, dtype=torch.float64))
    assert torch.equal(matrix @ matrix.T, tile * torch.eye(tile, dtype=torch.float64))
    assert matrix.abs().eq(1).all()


@pytest.mark.parametrize("shape", [(4, 64), (3, 50), (7,), (2, 8, 4, 4)])
def test_rotating_and_back_is_the_identity(shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    assert torch.allclose(Hadamard(TopK(1.0)).encode(x).decode(), x, atol=1e-6)


def test_rotation_spreads_an_outlier() -> None:
    turned, plain = [], []
    for seed in range(200):
        x = normal(1, 32, seed=seed * 50 + 1)
        x[0, seed % 32] = 20
        turned.append(float((Hadamard(Quantize(4)).encode(x).decode() - x).norm()))
        plain.append(float((Quantize(4).encode(x).decode() - x).norm()))
    assert sum(plain) / 200 == pytest.approx(2.34, rel=0.1)
    assert sum(turned) < 0.5 * sum(plain)


@pytest.mark.parametrize("fit", ["quantile", "deviation"])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_buckets_send_the_mean_of_their_values(fit: str, bits: int) -> None:
    x = student(3, 4000)
    y = NonUniform(bits, fit).encode(x).decode()
    levels, places = y.unique(return_inverse=True)
    assert len(levels) <= 2**bits
    if fit == "quantile":
        assert len(levels) == 2**bits
        assert torch.bincount(places.view(-1)).float() == pytest.approx(12000 / 2**bits, abs=2)
    # a level is a mean, so that what it withholds sums to nothing, and lies within its bucket
    lost = torch.zeros(len(levels), dtype=torch.float64).index_add_(0, places.view(-1), (x - y).view(-1).double())
    assert (lost.abs() < 1e-3).all()
    order = x.view(-1).argsort()
    assert (y.view(-1)[order].diff() >= 0).all()


def test_buckets_by_deviation_are_even() -> None:
    x = normal(4, 5000)
    y = NonUniform(8, "deviation").encode(x).decode()
    step = 6 * float(x.std()) / 256
    inside = (x - x.mean()).abs() < 2.9 * x.std()
    assert float((x - y).abs()[inside].max()) < 1.01 * step
    assert error_of(NonUniform(8, "quantile"), student(4, 5000)) < 0.2


# Error bounds


# Low rank


@given(rows=st.integers(1, 90), rank=st.integers(1, 9), power=st.sampled_from([-30, 0, 30]), seed=st.integers(0, 99))
def test_orthonormal_columns(rows: int, rank: int, power: int, seed: int) -> None:
    columns = normal(3, rows, rank, seed=seed).double() * 10.0**power
    found = orthonormal(columns)
    with kernels.reference():
        assert torch.equal(found, orthonormal(columns))
    products = found.transpose(1, 2) @ found
    held = min(rows, rank)
    expected = torch.zeros(rank, rank, dtype=torch.float64)
    expected[:held, :held] = torch.eye(held, dtype=torch.float64)  # more columns than rows: the rest are zero
    assert torch.allclose(products, expected.expand(3, -1, -1), atol=1e-9)
    assert float((found @ (found.transpose(1, 2) @ columns) - columns).norm() / columns.norm()) < 1e-9


def test_orthonormal_columns_of_dependent_input() -> None:
    column = normal(20, 1).double()
    found = orthonormal(torch.cat([column, 0 * column, -3 * column, normal(20, 1, seed=9).double()], dim=1)[None])[0]
    assert not found[:, 1:3].any()
    assert torch.allclose(found[:, [0, 3]].T @ found[:, [0, 3]], torch.eye(2, dtype=torch.float64))


def test_low_rank_is_exact_up_to_its_rank_and_a_projection_else() -> None:
    left, right = normal(40, 3, seed=1), normal(3, 60, seed=2)
    assert torch.allclose(LowRank(3).encode(left @ right, KEY).decode(), left @ right, atol=1e-4)
    x = normal(40, 60)
    packet = LowRank(4).encode(x, KEY)
    p = torch.from_numpy(packet.arrays["left"].view("f4").reshape(40, 4)).double()
    assert torch.allclose(p.T @ p, torch.eye(4).double(), atol=1e-6)
    y = packet.decode().double()
    squared = x.double().square().sum()
    assert float(squared) == pytest.approx(float(y.square().sum() + (x.double() - y).square().sum()), rel=1e-6)
    best = torch.linalg.svdvals(x.double())[4:].square().sum()
    assert float((x.double() - y).square().sum()) >= float(best)


def test_bytes_of_low_rank() -> None:
    for columns, expected in ((1920, 188416), (3072, 262144), (1024, 131072)):
        assert LowRank(16).encode(torch.zeros(1024, columns), KEY).array_bytes == expected


def test_low_rank_of_samples_does_not_mix_them() -> None:
    x = normal(3, 30, 40)
    one = torch.cat([LowRank(2, per="sample").encode(sample[None], KEY).decode() for sample in x])
    assert torch.allclose(LowRank(2, per="sample").encode(x, KEY).decode(), one, atol=1e-6)


# Wrappers, and levels of their own


def test_non_uniform_levels_fit_heavy_tails() -> None:
    x = student(4, 20000)
    y = NonUniform(3).encode(x).decode()
    assert len(y.unique()) <= 8
    assert error_of(NonUniform(3), x) < 0.5 * error_of(Quantize(3), x)
    levels = y.unique()
    nearest = levels[(x.view(-1, 1) - levels).abs().argmin(dim=1)].view_as(x)
    assert float(((x - y).abs() - (x - nearest).abs()).max()) < 1e-5
