"""Kernel and torch reference agree bit for bit, and the fused residual is the plain one."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from codec_laws import assert_alike, bits_of
from codec_variants import KEY, LAW_TENSORS, VARIANTS, normal, student
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.codecs import CODECS, LowRank, NonFiniteError, Quantize, TopK, kernels, warm
from raysim.codecs.draws import bits64 as random_bits
from raysim.notation import parse_notation

variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.notation)


@settings(max_examples=120)
@given(
    shape=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    bits=st.integers(1, 8),
    per=st.sampled_from(["tensor", "sample", "channel", "row", "block"]),
    block=st.integers(1, 200),
    absmax=st.booleans(),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    power=st.sampled_from([-120, -40, 0, 15, 100]),
)
def test_quantize_at_every_width_and_layout(
    shape: list[int], bits: int, per: str, block: int, absmax: bool, rounding: str, dtype: torch.dtype, power: int
) -> None:
    limit = torch.finfo(dtype).max
    x = (student(*shape, seed=len(shape)).double() * 2.0**power).clamp(-limit, limit).to(dtype)
    size = block if per == "block" else 4096
    assert_alike(Quantize(max(bits, 1 + absmax), "absmax" if absmax else "minmax", per, rounding, size), x)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [4095, 4096, 4097, 12301])
def test_quantize_across_blocks(bits: int, count: int) -> None:
    assert_alike(Quantize(bits), normal(count))
    assert_alike(Quantize(bits, per="row"), normal(3, count))


@settings(max_examples=80)
@given(
    rows=st.integers(1, 40),
    length=st.integers(1, 700),
    density=st.floats(0.001, 1.0),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    kind=st.sampled_from(["bits", "normal", "coarse", "drifting", "sparse"]),
    index=st.sampled_from(["bitmap", "elias_fano"]),
    seed=st.integers(0, 1000),
)
def test_topk_of_any_rows(
    rows: int, length: int, density: float, dtype: torch.dtype, kind: str, index: str, seed: int
) -> None:
    if kind == "bits":  # every bit pattern, denormals and negative zero among them
        width = torch.int16 if dtype.itemsize == 2 else torch.int32
        x = random_bits(seed, rows * length).to(width).view(dtype).view(rows, length)
        x = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    else:
        x = normal(rows, length, seed=seed)
        if kind == "coarse":
            x = x.round()
        elif kind == "drifting":  # rows whose thresholds are nothing like those of the rows before
            x *= 10.0 ** (normal(rows, 1, seed=seed + 1) * 1.3)
        elif kind == "sparse":
            x = x.relu() * (x > 1)
        x = x.clamp(-6e4, 6e4).to(dtype)  # which float16 holds
    assert_alike(TopK(density, index=index), x)


@pytest.mark.parametrize("shape", [(1, 70001), (3, 20000), (2, 8192)])
@pytest.mark.parametrize("density", [0.0001, 0.01, 0.1, 0.9])
def test_topk_of_long_rows(shape: tuple[int, int], density: float) -> None:
    x = student(*shape)
    assert_alike(TopK(density), x)
    assert_alike(TopK(density), x.sort(dim=1).values)  # nothing like its sample
    assert_alike(TopK(density), (x * 4).round())
    x[:, 100:] = 0
    assert_alike(TopK(density), x)


@pytest.mark.parametrize(
    "shape", [(3, 130, 700), (2, 5, 3000), (257, 129), (2, 40, 11, 12), (5000,), (1, 9000)], ids=str
)
@pytest.mark.parametrize(
    "notation",
    [
        "LowRank(4, per='sample')",
        "LowRank(9)",
        "NonUniform(7)",
        "NonUniform(8, fit='quantile')",
    ],
)
def test_kernels_across_blocks_tiles_and_lanes(notation: str, shape: tuple[int, ...]) -> None:
    codec = parse_notation(notation, CODECS)
    assert_alike(codec, student(*shape))
    assert_alike(codec, (student(*shape).relu() * 3.3).bfloat16())


@settings(max_examples=60)
@given(
    shape=st.lists(st.integers(1, 60), min_size=2, max_size=3),
    notation=st.sampled_from(
        [
            *(f"Quantize({bits}, per='{per}')" for bits in (3, 8) for per in ("tensor", "sample", "channel", "row")),
            *("QSGD(4)", "Quantize(4, rounding='stochastic')"),
            *("TopK(0.1)", "TopK(0.3, per='tensor')", "TopK(0.2, values=Quantize(4))", "TopK(0.02, index='int32')"),
        ]
    ),
    broken=st.sampled_from([None, math.nan, math.inf]),
)
def test_memory_in_every_layout(shape: list[int], notation: str, broken: float | None) -> None:
    codec, x, memory = parse_notation(notation, CODECS), student(*shape), normal(*shape)
    if broken is not None:
        memory.view(-1)[-1] = broken
        with pytest.raises(NonFiniteError):
            codec.encode_with_residual(x, torch.float32, KEY, memory)
        return
    packet, residual = codec.encode_with_residual(x, torch.float32, KEY, memory)
    with kernels.reference():
        again, expected = codec.encode_with_residual(x.clone(), torch.float32, KEY, memory)
    assert all(array.tobytes() == again.arrays[key].tobytes() for key, array in packet.arrays.items())
    assert bits_of(residual) == bits_of(expected)


def test_residual_and_sent_add_up() -> None:
    x = normal(8, 500)
    for text in ("TopK(0.1)", "Quantize(4)", "Quantize(8, range='absmax', per='row')", "TopK(0.2, values=Quantize(4))"):
        packet, residual = parse_notation(text, CODECS).encode_with_residual(x.clone(), torch.float32, KEY)
        assert torch.allclose(packet.decode() + residual, x, rtol=1e-6, atol=1e-6)


def test_warm_compiles_all_kernels() -> None:
    """After `warm`, no codec compiles anything, whatever the dtype and wherever its memory is."""
    warm([*(variant.codec for variant in VARIANTS), LowRank(100, per="sample")])
    from numba.core.dispatcher import Dispatcher

    modules = [module for name, module in sys.modules.items() if name.startswith("raysim.codecs.kernels.")]
    dispatchers = {value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)}
    assert len(dispatchers) > 40
    before = {dispatcher: len(dispatcher.signatures) for dispatcher in dispatchers}
    for variant in VARIANTS:
        for x in (normal(4, 90), normal(4, 90).bfloat16(), normal(4, 90).half(), normal(90, 4).T, normal(2, 3, 4, 5)):
            packet = variant.codec.encode_with_residual(x.float(), x.dtype, KEY)[0]
            variant.codec.encode_with_residual(x, x.dtype, KEY, torch.zeros(x.shape))
            for array in packet.arrays.values():
                if array.base is None:
                    array.flags.writeable = False
            packet.decode()
            variant.codec.encode(x, KEY)
    more = {dispatcher for dispatcher in dispatchers if len(dispatcher.signatures) > before[dispatcher]}
    assert not more


ALONE = """
import sys, torch
from raysim.codecs import CODECS, warm
from raysim.notation import parse_notation
codec, dtype = parse_notation(sys.argv[1], CODECS), torch.bfloat16
warm([codec], [dtype])
from numba.core.dispatcher import Dispatcher
modules = [module for name, module in sys.modules.items() if name.startswith("raysim.codecs.kernels.")]
kernels = {value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)}
before = {kernel: len(kernel.signatures) for kernel in kernels}
for shape in ((8, 64, 64), (2, 3, 32, 32), (4, 9000)):
    for x in (torch.randn(shape).to(dtype), torch.randn(shape), torch.randn(shape).transpose(0, 1)):
        codec.encode_with_residual(x.float().clone(), dtype, 1)[0].decode()
        codec.encode_with_residual(x.clone(), dtype, 1, torch.zeros(x.shape))[0].decode()
        codec.encode(x, 1).decode()
print(sorted(kernel.py_func.__name__ for kernel in kernels if len(kernel.signatures) > before[kernel]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "notation",
    ["TopK(0.001)", "Quantize(3)", "Rotated(4)", "Nonzero", "RandomK(0.1)", "LowRank(4)", "Hadamard(TopK(0.1))"],
)
def test_a_codec_s_own_kernels_are_enough(notation: str) -> None:
    """In a process that has warmed one codec for bfloat16, it compiles nothing for larger tensors, of float32 either."""
    done = subprocess.run(
        [sys.executable, "-c", ALONE, notation], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.split() == ["[]"]


def test_misaligned_memory_is_read_right() -> None:
    for codec in (TopK(0.2), Quantize(5), TopK(0.2, values=Quantize(3))):
        packet = codec.encode(normal(4, 77))
        shifted = {}
        for name, array in packet.arrays.items():
            buffer = np.zeros(array.nbytes + 1, np.uint8)
            buffer[1:] = array.reshape(-1).view(np.uint8)
            shifted[name] = buffer[1:]
        assert bits_of(packet._replace(arrays=shifted).decode()) == bits_of(packet.decode())


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_change_a_bit(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [normal(7, 3001), normal(1, 40000), normal(2, 5, 20, 33), normal(3, 90, 64).bfloat16()]
    parted = [variant for variant in VARIANTS if variant.notation.startswith(("Quantize", "QSGD", "TopK"))]
    one = [[variant.codec.encode_with_residual(x.float().clone(), x.dtype, KEY) for x in tensors] for variant in parted]
    plain = [[packet.decode() for packet, _ in packets] for packets in one]
    monkeypatch.setattr(kernels, "_PART", 1000)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for variant, packets, decoded in zip(parted, one, plain, strict=True):
            for x, (packet, residual), y in zip(tensors, packets, decoded, strict=True):
                again, left = variant.codec.encode_with_residual(x.float().clone(), x.dtype, KEY)
                for name, array in packet.arrays.items():
                    assert array.tobytes() == again.arrays[name].tobytes(), variant.notation
                assert bits_of(left) == bits_of(residual), variant.notation
                assert bits_of(again.decode()) == bits_of(y), variant.notation
        for broken in (math.nan, math.inf):
            for position in (0, 20999):
                x = normal(7, 3001)
                x.view(-1)[position] = broken
                for codec in (TopK(0.1), Quantize(4), Quantize(4, per="sample")):
                    with pytest.raises(NonFiniteError):
                        codec.encode(x)
    finally:
        torch.set_num_threads(before)


def test_output_memory_is_reused_only_when_free() -> None:
    x = normal(1 << 21)
    packet = Quantize(8).encode(x)
    first = packet.decode()
    view, copy = first[5:], first.clone()
    del first
    second = packet.decode()  # the view still holds the memory of the first
    second.zero_()
    assert torch.equal(view, copy[5:])
    place = second.data_ptr()
    del second
    assert packet.decode().data_ptr() == place


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_reference() -> None:
    """Packets made on a CUDA device decode, there and here, to what packets made here do; most are equal to the byte."""
    names = ("normal", "post-ReLU", "images", "tokens", "bfloat16", "float16", "ties", "short rows")
    for variant, name in itertools.product(VARIANTS, names):
        x = LAW_TENSORS[name]
        here, there = variant.codec.encode(x, KEY), variant.codec.encode(x.cuda(), KEY)
        assert there.decode("cuda").is_cuda
        assert torch.allclose(there.decode("cuda").cpu().float(), there.decode().float(), rtol=1e-6, atol=1e-6), name
        if "LowRank" not in variant.notation:  # QR differs in the last digit
            assert all(here.arrays[key].tobytes() == there.arrays[key].tobytes() for key in here.arrays), name
