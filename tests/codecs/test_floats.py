"""Lossless codecs of floats, and ZFP's fixed accuracy: exactness, bytes, the bound, and the published streams."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from codec_variants import LAW_TENSORS, normal, student
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.codecs import MPC, ZFP, Entropy, ErrorBounded, Identity, NonFiniteError, Quantize, kernels

ZFP_1_0_1 = {
    0.5: (2372, "5713af8b7051c4ef"),
    0.03: (3687, "efcea672ef779424"),
    0.0001: (5790, "e17a4828c79f8235"),
}  # by tolerance
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def smooth(*shape: int) -> torch.Tensor:
    """An image without noise: neighbours along both axes are alike."""
    places = torch.arange(int(np.prod(shape))).view(shape)
    return (places / shape[-1] / 7).sin() + (places % shape[-1] / 9).cos()


# Entropy.


def test_shuffled_bytes_make_floats_smaller() -> None:
    """The exponents of normal values take some 2.5 of their 8 bits; without a shuffle zstd finds less than half of that."""
    from zstandard import ZstdCompressor

    x = normal(64, 1024)
    plain = len(ZstdCompressor(level=1).compress(x.numpy().tobytes()))
    shuffled = Entropy(Identity()).encode(x).array_bytes
    assert x.nbytes / plain < 1.1
    assert x.nbytes / shuffled > 1.17


@settings(max_examples=40)
@given(
    count=st.integers(0, 5000),
    dtype=st.sampled_from(DTYPES),
    stride=st.integers(1, 70),
    kind=st.sampled_from(["normal", "relu", "ramp", "zeros"]),
)
def test_lossless_codecs_are_exact_and_never_larger(count: int, dtype: torch.dtype, stride: int, kind: str) -> None:
    made = {"normal": normal, "relu": lambda n: normal(n).relu(), "ramp": lambda n: 1 + torch.arange(n) / 999}
    x = made.get(kind, torch.zeros)(count).to(dtype)
    for codec in (MPC(stride), Entropy(Identity())):
        packet = codec.encode(x)
        assert packet.array_bytes <= x.nbytes + 1
        assert packet.decode().view(torch.uint8).tolist() == x.view(torch.uint8).tolist()


# MPC.


def test_mpc_by_hand() -> None:
    """A constant: only the first word differs from the one before, in each of its bits once; and a ramp of patterns."""
    x = torch.full((64,), 1.5)  # 0x3fc00000
    packet = MPC().encode(x)
    bits = 0x3FC00000
    rows = [(bits >> (31 - bit) & 1) << 31 for bit in range(32)]  # bit by bit, the first value's at the top
    differences = np.diff(np.array([0, *rows, *[0] * 32], np.int64)) % (1 << 32)
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
    with kernels.reference():
        plain = codec.encode(x)
        assert torch.equal(plain.decode(), packet.decode())
    assert {name: array.tobytes() for name, array in plain.arrays.items()} == {
        name: array.tobytes() for name, array in packet.arrays.items()
    }


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


def test_the_stream_is_zfps() -> None:
    """Digests of the streams of zfp 1.0.1 for these values at these tolerances, without its header and its last padding."""
    x = ((torch.arange(37 * 53) * 40503 % 65536 - 32768) / 4096).view(37, 53)
    for tolerance, (size, digest) in ZFP_1_0_1.items():
        stream = ZFP(tolerance).encode(x).arrays["stream"]
        assert (len(stream), hashlib.blake2b(stream.tobytes(), digest_size=8).hexdigest()) == (size, digest)


@pytest.mark.parametrize("codec", [MPC(), ZFP(0.1), Entropy(Quantize(4))], ids=repr)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(codec, value: float) -> None:
    x = normal(8, 8)
    x[3, 5] = value
    with pytest.raises(NonFiniteError):
        codec.encode(x)


def test_bad_settings_are_refused() -> None:
    for make, message in [
        (lambda: ZFP(0), "`tolerance` must be in (0, 1e+30], but got 0."),
        (lambda: MPC(0), "`stride` must be"),
    ]:
        with pytest.raises(ValueError) as error:
            make()
        assert message in str(error.value)
