"""The plug-in raysim-contrib: the laws of codecs hold for its codecs, each is its paper's formula, and entry points find it."""

from __future__ import annotations

import hashlib
from importlib import metadata

import gpu
import numpy as np
import pytest
import torch
from codec_laws import bits_of, check_unbiased, content, error_of, keeps_all_laws
from codec_variants import KEY, LAW_TENSORS, normal, student
from contrib_variants import CODECS as CLASSES
from contrib_variants import VARIANTS
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import few_of_each
from raysim_contrib.daq import DAQ
from raysim_contrib.error_bounded import ErrorBounded
from raysim_contrib.fixed_point import FixedPoint
from raysim_contrib.meanstd import MeanStd
from raysim_contrib.mpc import MPC
from raysim_contrib.outliers import Outliers
from raysim_contrib.tahquant import TAHQuant
from raysim_contrib.tinyscript import TinyScript
from raysim_contrib.zfp import ZFP

from raysim import plugins
from raysim.codecs import CODECS, Quantize
from raysim.codecs.draws import uniform
from raysim.notation import parse_notation
from raysim.replication import parse_replica_method
from raysim.testing import check_replica_method

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ZFP_1_0_1 = {
    0.5: (2372, "5713af8b7051c4ef"),
    0.03: (3687, "efcea672ef779424"),
    0.0001: (5790, "e17a4828c79f8235"),
}  # by tolerance


def smooth(*shape: int) -> torch.Tensor:
    """An image without noise: neighbours along both axes are alike."""
    i = torch.arange(int(np.prod(shape))).view(shape)
    return (i / shape[-1] / 7).sin() + (i % shape[-1] / 9).cos()


ONE_OF_EACH = few_of_each(VARIANTS, 1, lambda variant: type(variant.codec))
one_of_each = pytest.mark.parametrize("variant", ONE_OF_EACH, ids=lambda variant: variant.notation)


@one_of_each
def test_all_laws(variant) -> None:
    keeps_all_laws(variant)


@one_of_each
@pytest.mark.parametrize(
    "law",
    [
        pytest.param(gpu.reads_no_bytes_before_they_have_landed, id="landed"),
        pytest.param(gpu.makes_the_packets_of_the_cpu, id="packets", marks=pytest.mark.slow),
    ],
)
def test_law_on_gpus(law, variant) -> None:
    pytest.importorskip("triton")
    law(variant)


@pytest.mark.parametrize(
    "notation", ["TAHQuant(high=0.5, tile=256, tau=1.2)", "Outliers(Quantize(4))", "TinyScript(6)", "MPC(7)"]
)
@pytest.mark.parametrize("shape", [(2, 5, 3000), (257, 129), (2, 40, 11, 12), (5000,)], ids=str)
def test_packets_are_pure_across_tiles(notation: str, shape: tuple[int, ...]) -> None:
    codec = parse_notation(notation, CODECS)
    for x in (student(*shape), (student(*shape).relu() * 3.3).bfloat16()):
        packet = codec.encode(x, KEY)
        assert content(packet) == content(codec.encode(x, KEY))
        assert packet.decode().shape == x.shape


# The plug-in.


def test_every_class_has_a_variant_an_entry_point_and_documentation() -> None:
    assert {type(variant.codec) for variant in VARIANTS} == set(CLASSES)
    points = {point.name: point.value for point in metadata.entry_points(group="raysim.codecs")}
    for cls in CLASSES:
        assert points[cls.__name__] == f"{cls.__module__}:{cls.__name__}"
        assert cls.name() == cls.__name__
        assert cls.__doc__
        assert ">>>" in cls.__doc__
        assert "\n    Use: " in cls.__doc__
        assert cls.variants


def test_without_the_distribution_a_name_is_refused_with_the_command_that_installs_it(monkeypatch) -> None:
    monkeypatch.setattr(plugins, "entry_points", dict)
    with pytest.raises(ValueError) as caught:
        parse_notation("ZFP(0.1)", CODECS)
    assert str(caught.value) == (
        "`ZFP` in 'ZFP(0.1)' needs the plug-in raysim-contrib: `pip install ./contrib` in a clone of raysim."
    )


def test_a_mistyped_name_is_recognised() -> None:
    with pytest.raises(ValueError, match="Did you mean `TAHQuant`"):
        parse_notation("TAHQaunt", CODECS)


@pytest.mark.parametrize("notation", ["ATOMO(3.0)", "Outliers(Quantize(4))"])
def test_replica_gradients_take_these_codecs(notation: str) -> None:
    check_replica_method(parse_replica_method(notation))


# MPC.


@given(
    count=st.integers(0, 5000),
    dtype=st.sampled_from(DTYPES),
    stride=st.integers(1, 70),
    kind=st.sampled_from(["normal", "relu", "ramp", "zeros"]),
)
def test_mpc_is_exact_and_never_larger(count: int, dtype: torch.dtype, stride: int, kind: str) -> None:
    made = {"normal": normal, "relu": lambda n: normal(n).relu(), "ramp": lambda n: 1 + torch.arange(n) / 999}
    x = made.get(kind, torch.zeros)(count).to(dtype)
    packet = MPC(stride).encode(x)
    assert packet.array_bytes <= x.nbytes + 1
    assert bits_of(packet.decode()) == bits_of(x)


def test_mpc_by_hand() -> None:
    """A constant: only the first word differs from the one before, in each of its bits once; and a ramp of patterns."""
    x = torch.full((64,), 1.5)  # 0x3fc00000
    packet = MPC().encode(x)
    bits = 0x3FC00000
    rows = [(bits >> (31 - bit) & 1) << 31 for bit in range(32)]  # bit by bit, the first value's at the top
    differences = np.diff(np.array([0, *rows, *[0] * 32], np.int64)) % (1 << 32)  # type: ignore[operator]
    kept = differences[differences != 0].astype(np.uint32)
    assert np.array_equal(packet.arrays["words"].view(np.uint32), kept)
    assert np.array_equal(np.unpackbits(packet.arrays["bitmap"]), differences != 0)
    assert packet.array_bytes == 1 + 64 // 8 + 4 * len(kept)


def test_the_stride_is_that_of_the_channels() -> None:
    x = (1000 * normal(16)).round()[None] + smooth(64, 16) * 1e-3
    assert MPC(16).encode(x).array_bytes < 0.8 * MPC(1).encode(x).array_bytes


# ZFP.


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 13), min_size=0, max_size=4),
    dtype=st.sampled_from(DTYPES),
    exponent=st.integers(-30, 10),
    power=st.integers(-30, 12),
    kind=st.sampled_from([normal, student, smooth]),
)
def test_the_tolerance_holds(shape: list[int], dtype: torch.dtype, exponent: int, power: int, kind) -> None:
    x = (kind(*shape) if shape else torch.tensor(1.7)).double() * 2.0**power
    x = x.clamp(-6e4, 6e4).to(dtype)
    codec = ZFP(0.7 * 2.0**exponent)
    packet = codec.encode(x)
    assert float((packet.decode().double() - x.double()).abs().max()) <= codec.tolerance


@pytest.mark.parametrize("name", LAW_TENSORS)
def test_the_tolerance_holds_on_every_law_tensor(name: str) -> None:
    x = LAW_TENSORS[name]
    for tolerance in (1e-30, 1e-4, 1.0, 1e30):
        y = ZFP(tolerance).encode(x).decode()
        assert not x.numel() or float((y.double() - x.double()).abs().max()) <= tolerance


def test_blocks_below_the_tolerance_take_a_bit() -> None:
    x = normal(64, 64) * 1e-3
    packet = ZFP(1.0).encode(x)
    assert packet.array_bytes == 16 * 16 // 8
    assert not packet.decode().any()


def test_a_finer_tolerance_takes_no_fewer_bytes() -> None:
    for x in (normal(4, 64, 64), smooth(8, 32, 32), student(512, 8)):
        sizes = [ZFP(2.0**-power).encode(x).array_bytes for power in range(-4, 40)]
        assert sizes == sorted(sizes)
        assert sizes[-1] <= x.nbytes * 1.15  # blocks as they are, and their marks: 9 bits for 16 values


def test_smooth_images_take_fewer_bytes_than_by_rounding_alone() -> None:
    x = smooth(8, 64, 64)
    assert ZFP(1e-3).encode(x).array_bytes < 0.6 * ErrorBounded(1e-3).encode(x).array_bytes


def test_stream_equals_zfp() -> None:
    """Digests of the streams of zfp 1.0.1 for these values at these tolerances, without its header and its last padding."""
    x = ((torch.arange(37 * 53) * 40503 % 65536 - 32768) / 4096).view(37, 53)
    for tolerance, (size, digest) in ZFP_1_0_1.items():
        stream = ZFP(tolerance).encode(x).arrays["stream"]
        assert (len(stream), hashlib.blake2b(stream.tobytes(), digest_size=8).hexdigest()) == (size, digest)


# TinyScript and TAH-Quant.


@pytest.mark.parametrize("bits", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_tinyscript_is_unbiased_with_its_exact_variance(bits: int) -> None:
    x = student(4, 20)
    codec = TinyScript(bits)
    levels = codec.levels(x).double()
    assert (levels.diff() >= 0).all()
    assert (float(levels[0]), float(levels[-1])) == (0.0, float(x.abs().max()))
    below = torch.bucketize(x.abs().double(), levels[1:-1], right=True)
    low, high = levels[below], levels[below + 1]
    check_unbiased(codec, x, (x.abs() - low) * (high - x.abs()), draws=600)


def test_levels_of_tinyscript_beat_even_ones() -> None:
    """Weibull of shape 0.7 and scale 1, seven intervals: .34 against 2.8, as the methods' page has it."""
    x = (-(1 - uniform(3, 400_000)).log()).pow(1 / 0.7).float()

    def variance(levels: torch.Tensor) -> float:
        below = torch.bucketize(x.double(), levels[1:-1], right=True)
        return float(((x - levels[below]) * (levels[below + 1] - x)).mean())

    fitted = TinyScript(4).levels(x).double()
    assert len(fitted) == 8
    even = torch.linspace(0, float(x.max()), 8, dtype=torch.float64)
    assert variance(fitted) < 0.4
    assert variance(even) > 6 * variance(fitted)
    # no single level can move to do better
    for place in range(1, 7):
        for shift in (-0.05, 0.05):
            moved = fitted.clone()
            moved[place] += shift * (fitted[place + 1] - fitted[place - 1])
            assert variance(moved) > variance(fitted) * 0.998


def test_tah_quant() -> None:
    x = student(16, 640)
    packet = TAHQuant().encode(x)
    assert 8 * packet.array_bytes / x.numel() == pytest.approx(5.02, abs=0.01)
    assert error_of(TAHQuant(), x) < error_of(Quantize(4, per="row"), x)
    # where nothing is rotated, a tile of four bits is off by half a step
    flat = normal(8, 320)
    y = TAHQuant(high=1.0, tau=1e9).encode(flat).decode()
    for values, sent in zip(flat.view(-1, 32), y.view(-1, 32), strict=True):
        assert ((values - sent).abs() <= (values.max() - values.min()) / 30 * 1.02 + 2e-3).all()
    for scale in (1e-20, 1e20):  # float16 alone could not hold them
        assert error_of(TAHQuant(), x * scale) == pytest.approx(error_of(TAHQuant(), x), rel=0.05)


def test_tah_quant_ranks_tokens_within_their_sample() -> None:
    """The two tokens of four of a sample whose magnitudes are alike have the step of 4 bits."""
    x = normal(3, 4, 64).exp()
    x[:, :2] = 1 + x[:, :2] / 1000
    codec = TAHQuant(high=0.5, tau=1e9, allocate="token")
    packet = codec.encode(x)
    flags = np.unpackbits(packet.arrays["wide"])[:12]
    assert flags.reshape(3, 4).tolist() == [[1, 1, 0, 0]] * 3
    y = packet.decode()
    for codes, rows in ((15, [0, 1]), (7, [2, 3])):
        for values, sent in zip(x[:, rows].reshape(-1, 32), y[:, rows].reshape(-1, 32), strict=True):
            assert len(sent.unique()) <= codes + 1
            assert ((values - sent).abs() <= (values.max() - values.min()) / (2 * codes) * 1.02 + 2e-3).all()


# Outliers and features of images.


def test_outlier_columns_keep_their_digits_and_spare_the_others() -> None:
    x = normal(50, 200)
    x[:, [7, 90]] *= 100
    codec = Outliers(Quantize(4))
    y = codec.encode(x).decode()
    assert torch.equal(y[:, [7, 90]], x[:, [7, 90]].bfloat16().float())
    others = torch.ones(200, dtype=torch.bool)
    others[[7, 90]] = False
    assert torch.equal(y[:, others], Quantize(4).encode(x[:, others]).decode())


def test_outlier_channel_is_sent_separately() -> None:
    x = normal(4, 16, 8, 8)
    x[:, 5] *= 1000
    y = Outliers(Quantize(4)).encode(x).decode()
    assert torch.equal(y[:, 5], x[:, 5].bfloat16().float())
    assert error_of(Outliers(Quantize(4)), x) < 0.01


BOUNDARIES = [  # of recipes: digits-cnn, resnet18-cifar10, topics-gpt, topics-lstm, and the vectors before a head
    *((8, channels, size, size) for channels, size in ((16, 8), (32, 4), (8, 8))),
    *((4, channels, size, size) for channels, size in ((64, 32), (128, 16), (256, 8))),
    *((8, 64, 128), (20, 35, 128), (8, 64)),
]


@pytest.mark.parametrize("shape", BOUNDARIES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_are_channels_and_bytes_stay_below_dense(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A feature of an image is a channel: what is coded is what tokens of the same features, a pixel each, are coded as."""
    x = student(*shape).to(dtype)
    for codec in (TAHQuant(), Outliers(Quantize(4)), Outliers(FixedPoint(8)), DAQ(4)):
        assert codec.encode(x).array_bytes < 0.8 * x.nbytes, codec
    if len(shape) == 4:
        tokens = x.movedim(1, -1).reshape(shape[0], -1, shape[1])
        for codec in (TAHQuant(), Outliers(Quantize(4))):
            packet, plain = codec.encode(x), codec.encode(tokens)
            assert torch.equal(packet.decode().movedim(1, -1).reshape(tokens.shape), plain.decode())
            assert packet.array_bytes == plain.array_bytes


# DAQ and MEANSTD_16BIT.


@pytest.mark.parametrize(("bits", "distortion"), [(1, 0.3634), (2, 0.1188), (3, 0.03744), (4, 0.01154), (5, 0.003495)])
def test_daq_has_the_distortion_of_the_best_uniform_step(bits: int, distortion: float) -> None:
    """Max's (1960) mean squared errors of uniform levels for a normal distribution."""
    x = torch.randn(8, 4, 100, 100, generator=torch.Generator().manual_seed(0)) * 3 + 5
    assert error_of(DAQ(bits), x) ** 2 * float(x.square().mean()) / 9 == pytest.approx(distortion, rel=0.06)


def test_daq_equals_formula() -> None:
    x = student(3, 5, 6, 7)
    y = DAQ(3).encode(x).decode()
    for sample, decoded in zip(x.view(15, 42).double(), y.view(15, 42).double(), strict=True):
        mean, step = sample.mean(), 0.586 * sample.std(correction=0)
        outermost = 3.5 * step
        expected = ((((sample - mean) / step + 0.5).round() - 0.5) * step).clamp(-outermost, outermost) + mean
        torch.testing.assert_close(decoded, expected, rtol=1e-5, atol=1e-5)


def test_meanstd_equals_formula() -> None:
    x = 1000 + student(4, 6, 50)
    y = MeanStd().encode(x).decode()
    centred = x.double() - x.double().mean(-1, keepdim=True)
    deviation = centred.square().mean(-1, keepdim=True).sqrt()
    expected = (centred / deviation).half().double() * deviation + x.double().mean(-1, keepdim=True)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=2e-3)
    assert float((x - y).abs().max()) < float((x - x.half().float()).abs().max())  # what float16 alone loses
