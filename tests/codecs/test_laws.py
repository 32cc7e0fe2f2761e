"""All laws over all variants of codecs; and laws of TopK and Quantize."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from codec_laws import (
    BEYOND,
    GOLDEN,
    bits_of,
    check_unbiased,
    digests,
    groups_of,
    keeps_all_laws,
    packets_are_golden,
    residuals_stay_bounded_unless_a_codec_expands,
)
from codec_variants import KEY, LAW_TENSORS, VARIANTS, Variant, normal
from contrib_variants import VARIANTS as CONTRIB
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import few_of_each
from raysim_contrib.error_bounded import ErrorBounded
from raysim_contrib.signs import OneBit, Sign
from torch import Tensor

from raysim.codecs import CODECS, Quantize, TopK

ONE_OF_EACH = few_of_each(VARIANTS, 1, lambda variant: type(variant.codec))


@pytest.mark.parametrize("variant", ONE_OF_EACH, ids=lambda variant: variant.notation)
def test_all_laws(variant) -> None:
    keeps_all_laws(variant)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.notation)
def test_packets_are_golden(variant) -> None:
    packets_are_golden(variant)


@pytest.mark.parametrize(
    "notation", ["QSGD(2)", "QSGD(3, block=35)", "Quantize(1, rounding='stochastic')", "TopK(0.1, values=QSGD(2))"]
)
def test_residuals_of_coarse_random_codecs_stay_bounded_or_the_codec_is_refused(notation: str) -> None:
    residuals_stay_bounded_unless_a_codec_expands(Variant(notation))


FILLED = {name: x for name, x in LAW_TENSORS.items() if x.numel()}


def test_signs_and_bounded_errors_saturate_beyond_the_range_of_float32() -> None:
    largest = torch.finfo(torch.float32).max
    for codec in (Sign(), OneBit()):
        assert codec.encode(BEYOND["-1e39"]).decode().unique().tolist() == [-largest]
    x = BEYOND["1e300"]
    error = (ErrorBounded(0.1, relative="range").encode(x).decode() - x).abs().amax()
    assert error <= 0.1 * (x.amax() - x.amin())


def test_every_codec_has_a_variant() -> None:
    assert {type(variant.codec) for variant in VARIANTS} == set(CODECS.values())


def test_codecs_have_golden_packets_and_none_is_left_over() -> None:
    core = {variant.notation for variant in VARIANTS}
    assert core <= set(json.loads(GOLDEN.read_text())) <= core | {variant.notation for variant in CONTRIB}


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
        assert bits_of(expected) == bits_of(sent)
    squared, error = x.double().square().sum(), (x.double() - y.double()).square().sum()
    assert torch.allclose(squared, y.double().square().sum() + error, rtol=1e-10) or not torch.isfinite(squared)
    assert error <= (1 - count / length) * squared * (1 + 1e-12)


@pytest.mark.parametrize("per", ["sample", "tensor"])
def test_topk_keeps_the_greatest_and_of_ties_the_first(per: str) -> None:
    for density, x in itertools.product((0.01, 0.1, 0.37, 0.5, 1.0), FILLED.values()):
        assert_topk(x, TopK(density, per=per))


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


def test_topk_has_budgeted_bytes() -> None:
    for shape in [(128, 65536 // 16), (8, 16384), (1, 786432)]:
        packet = TopK(0.1).encode(normal(*shape[:1], 1).expand(shape).contiguous() + torch.arange(shape[1]) % 97)
        assert 8 * packet.array_bytes <= 4.2 * packet.numel
    assert set(TopK(1.0).encode(normal(3, 8)).arrays) == {"values.values"}


# Uniform quantisation


@pytest.mark.parametrize(
    ("per", "widths"),
    [
        ("tensor", (1, 3, 8)),
        ("sample", (2, 7)),
        ("channel", (4,)),
    ],
)
def test_minmax_error_levels_and_ends(per: str, widths: tuple[int, ...]) -> None:
    for bits, x in itertools.product(widths, FILLED.values()):
        assert_minmax(x, per, bits)


def assert_minmax(x: Tensor, per: str, bits: int) -> None:
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


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_absmax_keeps_zero_and_its_bound(rounding: str) -> None:
    x = normal(6, 90)
    x[:, ::3] = 0
    for bits in range(2, 9):
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


if __name__ == "__main__":  # `make golden` writes the digests again, after an intended change of a format
    written = {variant.notation: digests(variant) for variant in (*VARIANTS, *CONTRIB)}
    known = json.loads(GOLDEN.read_text())  # keeps the order of the file
    GOLDEN.write_text(
        json.dumps({name: written[name] for name in {**known, **written} if name in written}, indent=1) + "\n"
    )
