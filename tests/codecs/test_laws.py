"""Laws that hold for every codec, over every tensor."""

from __future__ import annotations

import math

import pytest
import torch
from codec_laws import check_unbiased, groups_of
from codec_variants import KEY, LAW_TENSORS, VARIANTS, Variant, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from raysim.codecs import CODECS, Quantize, TopK
from raysim.compressors import Plain
from raysim.notation import parse
from raysim.testing import check_codec

variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.notation)


def bits_of(x: Tensor) -> Tensor:
    """The bit patterns, so that negative zero differs from zero."""
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    return x.detach().contiguous().reshape(-1).view(width)


def carried(variant: Variant) -> dict[str, Tensor]:
    return {name: x for name, x in LAW_TENSORS.items() if variant.any_shape or x.ndim >= 2}


@variants
def test_laws_that_every_codec_obeys(variant: Variant) -> None:
    """Shape and type, purity, pickling, read-only memory, messages, missing arrays, what is refused, keys, notation."""
    check_codec(variant.codec, carried(variant))
    assert repr(variant.codec) == variant.notation
    assert hash(parse(repr(variant.codec), CODECS)) == hash(variant.codec)


@variants
def test_zero_stays_zero(variant: Variant) -> None:
    if variant.zero:
        for shape in [(3, 7), (1, 1), (2, 8, 64)]:
            assert not variant.codec.encode(torch.zeros(shape), KEY).decode().any()


@variants
def test_algebra(variant: Variant) -> None:
    for name in ("normal", "post-ReLU", "heavy tail", "bfloat16", "tokens", "ties"):
        x = LAW_TENSORS[name]
        y = variant.codec.encode(x, KEY).decode()
        if variant.lossless:
            assert torch.equal(x, y), name
        if variant.scales:
            for power in (0.125, 4.0):
                assert torch.equal(variant.codec.encode(x * power, KEY).decode(), y * power), name
        if variant.odd:
            assert torch.equal(variant.codec.encode(-x, KEY).decode(), -y), name
        if variant.idempotent:
            assert torch.equal(variant.codec.encode(y, KEY).decode(), y), name


@variants
def test_array_bytes_are_the_formula(variant: Variant) -> None:
    if variant.array_bytes is None:
        return
    for name, x in carried(variant).items():
        expected = variant.array_bytes(tuple(x.shape), x.dtype.itemsize)
        assert variant.codec.encode(x, KEY).array_bytes == expected, name


def test_every_codec_has_a_variant() -> None:
    assert {type(variant.codec) for variant in VARIANTS} == set(CODECS.values())


# TopK


def assert_topk(x: Tensor, codec: TopK) -> None:
    y = codec.encode(x).decode()
    rows, out = (t.reshape(1, -1) if codec.per == "tensor" or x.ndim == 0 else t.reshape(len(x), -1) for t in (x, y))
    length = rows.shape[1]
    count = max(1, math.ceil(codec.density * length - 1e-6))
    for row, sent in zip(rows, out, strict=True):
        order = sorted(range(length), key=lambda i: (-abs(float(row[i])), i))
        expected = torch.zeros_like(row)
        expected[order[:count]] = row[order[:count]]
        assert torch.equal(bits_of(expected), bits_of(sent))
    squared, error = x.double().square().sum(), (x.double() - y.double()).square().sum()
    assert torch.allclose(squared, y.double().square().sum() + error, rtol=1e-10) or not torch.isfinite(squared)
    assert error <= (1 - count / length) * squared * (1 + 1e-12)


@pytest.mark.parametrize("name", [name for name, x in LAW_TENSORS.items() if x.numel()])
@pytest.mark.parametrize("density", [0.01, 0.1, 0.37, 0.5, 1.0])
def test_topk_keeps_the_greatest_and_of_ties_the_first(name: str, density: float) -> None:
    assert_topk(LAW_TENSORS[name], TopK(density))
    assert_topk(LAW_TENSORS[name], TopK(density, per="tensor"))


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    values=st.lists(
        st.one_of(st.floats(width=32, allow_nan=False, allow_infinity=False), st.sampled_from([0.0, -0.0, 1.0, -1.0])),
        min_size=1,
        max_size=90,
    ),
    rows=st.integers(1, 4),
    density=st.floats(0.005, 1.0),
    index=st.sampled_from(["auto", "bitmap", "elias_fano", "int32"]),
)
def test_topk_on_any_values(values: list[float], rows: int, density: float, index: str) -> None:
    x = torch.tensor(values * rows).view(rows, -1)
    assert_topk(x, TopK(density, index=index))


def test_topk_of_topk_and_of_microbatches() -> None:
    x = normal(6, 500)
    once = TopK(0.1).encode(TopK(0.4).encode(x).decode()).decode()
    assert torch.equal(once, TopK(0.1).encode(x).decode())
    parts = torch.cat([TopK(0.1).encode(part).decode() for part in x.split(2)])
    assert torch.equal(parts, TopK(0.1).encode(x).decode())


def test_topk_costs_its_budget() -> None:
    for shape in [(128, 65536 // 16), (8, 16384), (1, 786432)]:
        packet = TopK(0.1).encode(normal(*shape[:1], 1).expand(shape).contiguous() + torch.arange(shape[1]) % 97)
        assert 8 * packet.array_bytes <= 4.2 * packet.numel
    assert set(TopK(1.0).encode(normal(3, 8)).arrays) == {"values.values"}


# Uniform quantisation


@pytest.mark.parametrize("name", [name for name, x in LAW_TENSORS.items() if x.numel()])
@pytest.mark.parametrize("per", ["tensor", "sample", "channel"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 7, 8])
def test_minmax_error_levels_and_ends(name: str, per: str, bits: int) -> None:
    x = LAW_TENSORS[name]
    y = Quantize(bits, per=per).encode(x).decode()
    ulp = torch.finfo(x.dtype).eps
    for values, sent in zip(groups_of(x.double(), per), groups_of(y.double(), per), strict=True):
        low, high = values.min(), values.max()
        # rounding to the tensor's own dtype adds half an ulp of the greatest value, or the least denormal
        slack = ulp * torch.maximum(low.abs(), high.abs()) + torch.finfo(x.dtype).smallest_normal * ulp
        slack = slack + 2e-7 * torch.maximum(low.abs(), high.abs()) * (x.dtype == torch.float64)  # the range is float32
        assert ((values - sent).abs() <= (high - low) / (2 * (2**bits - 1)) + slack).all()
        assert len(sent.unique()) <= 2**bits
        if x.dtype != torch.float64:
            assert sent[values.argmin()] == low
            assert (sent[values.argmax()] - high).abs() <= slack
        if low == high and x.dtype != torch.float64:
            assert torch.equal(values, sent)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_absmax_keeps_zero_and_its_bound(bits: int, rounding: str) -> None:
    x = normal(6, 90)
    x[:, ::3] = 0
    y = Quantize(bits, range="absmax", rounding=rounding).encode(x, KEY).decode()
    step = x.abs().max() / (2 ** (bits - 1) - 1)
    assert not y[x == 0].any()
    assert ((x - y).abs() <= step * (0.5 if rounding == "nearest" else 1) * (1 + 1e-6)).all()


@settings(max_examples=100)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60),
    bits=st.integers(1, 8),
    absmax=st.booleans(),
)
def test_quantize_on_any_values(values: list[float], bits: int, absmax: bool) -> None:
    x = torch.tensor(values)
    codec = Quantize(max(bits, 2), range="absmax") if absmax else Quantize(bits)
    y = codec.encode(x).decode()
    assert torch.isfinite(y).all()
    low, high = (-x.abs().max().double(), x.abs().max().double()) if absmax else (x.min().double(), x.max().double())
    step = (high - low) / (2**codec.bits - 1 - absmax)
    assert ((x.double() - y.double()).abs() <= step / 2 + 1.2e-7 * x.abs().max().double() + 1e-45).all()


def test_stochastic_minmax_is_unbiased_with_its_exact_variance() -> None:
    x = normal(4, 25)
    for bits in (1, 2, 4):
        step = (x.max() - x.min()).double() / (2**bits - 1)
        fraction = ((x.double() - x.min().double()) / step).frac()
        check_unbiased(Quantize(bits, rounding="stochastic"), x, step.square() * fraction * (1 - fraction), draws=1500)


@pytest.mark.parametrize(
    "variant", [variant for variant in VARIANTS if variant.unbiased], ids=lambda variant: variant.notation
)
def test_unbiased_codecs_have_the_right_mean(variant: Variant) -> None:
    x = normal(3, 64, seed=5)
    decoded = torch.stack([variant.codec.encode(x, key).decode() for key in range(1, 1201)]).double()
    spread = decoded.std(dim=0).amax()  # a value that is rarely kept may show no spread of its own
    assert ((decoded.mean(dim=0) - x.double()).abs() <= 5.5 * spread / math.sqrt(1200) + 1e-6).all()


@variants
def test_a_fixed_size_holds_whatever_the_values(variant: Variant) -> None:
    codec = variant.codec
    assert codec.fixed_size or variant.array_bytes is None  # its bytes are a formula of the shape
    if codec.fixed_size:
        for name, x in carried(variant).items():
            sized = Plain(codec).array_bytes(tuple(x.shape), str(x.dtype).removeprefix("torch."))
            assert codec.encode(x, KEY).array_bytes == sized, name
