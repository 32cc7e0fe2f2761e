"""Codecs on GPUs: Triton's kernels, interpreted where there is no GPU, make the packets of the CPU, byte for byte."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from codec_laws import bits_of
from codec_variants import KEY, LAW_TENSORS, VARIANTS, Variant, normal, student
from gpu import (
    DEVICE,
    SlowFlight,
    assert_alike_on_gpu,
    makes_the_packets_of_the_cpu,
    on_gpu,
    reads_no_bytes_before_they_have_landed,
)
from pipelines import few_of_each
from torch.utils._python_dispatch import TorchDispatchMode

from raysim.codecs import CODECS, Codec, LowRank, NonFiniteError, Packet, Quantize, TopK, kernels, lowrank
from raysim.codecs.bits import pack, unpack
from raysim.codecs.positions import decode_positions, encode_positions
from raysim.notation import parse_notation

pytest.importorskip("triton")

SERVED = (  # what Triton's kernels serve from end to end
    "Quantize(1)",
    "Quantize(4)",
    "Quantize(8)",
    "Quantize(3, per='sample')",
    "Quantize(5, per='channel')",
    "Quantize(6, per='row')",
    "Quantize(2, range='absmax', per='block', block=100)",
    "Quantize(4, per='block', block=64)",
    "Quantize(8, per='block', block=24)",
    "Quantize(3, range='absmax', per='block', block=40, rounding='stochastic')",
    "Quantize(7, rounding='stochastic')",
    "TopK(0.1)",
    "TopK(0.3)",
    "TopK(0.01, per='tensor')",
    "TopK(0.2, index='bitmap')",
    "TopK(0.1, values=Quantize(4))",
    "Hadamard(Quantize(4))",
    "Rotated(3, kept=2)",
    "Cast('bfloat16')",
    "Cast('float16')",
    "Identity",
)
SERVED_CODECS = [parse_notation(notation, CODECS) for notation in SERVED]
served = pytest.mark.parametrize("codec", SERVED_CODECS, ids=SERVED)
served_twice = pytest.mark.parametrize("codec", few_of_each(SERVED_CODECS, 2, type), ids=SERVED)


@served
def test_packets_and_residuals_are_those_of_the_cpu(codec: Codec) -> None:
    names = ("normal", "ties", "bfloat16", "denormals", "huge")  # by turns: `make test-slow` takes all, see below
    name = names[SERVED_CODECS.index(codec) % len(names)]
    assert_alike_on_gpu(codec, LAW_TENSORS[name], name)


@pytest.mark.parametrize(
    "variant", few_of_each(VARIANTS, 1, lambda variant: type(variant.codec)), ids=lambda variant: variant.notation
)
def test_no_bytes_are_read_before_they_have_landed(variant: Variant) -> None:
    reads_no_bytes_before_they_have_landed(variant)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.notation)
def test_packets_are_those_of_the_cpu(variant: Variant) -> None:
    makes_the_packets_of_the_cpu(variant)


@pytest.mark.parametrize("bits", range(1, 9))
def test_quantize_at_every_width(bits: int) -> None:
    """Every dtype with every kind of range at some width."""
    dtype = (torch.float32, torch.bfloat16, torch.float16)[bits % 3]
    per = ("tensor", "channel", "row")[(bits + bits // 3) % 3]
    assert_alike_on_gpu(Quantize(bits, per=per), normal(3, 7, 19).to(dtype), f"{dtype} {per}")


OTHERS = [pytest.param(length, marks=pytest.mark.slow) for length in (1, 63, 65, 4096, 17_000)]


@pytest.mark.parametrize("length", [4097, *OTHERS])
def test_topk_of_short_and_long_rows(length: int) -> None:
    tensors = normal(2, length), normal(1, length).mul(2).round().bfloat16()
    for turn, kept in enumerate(sorted({1, length // 10, length - 1} - {0})):
        assert_alike_on_gpu(TopK(kept / length), tensors[turn % 2], f"{kept} of {length}")


@pytest.mark.slow
def test_random_tensors() -> None:
    generator = torch.Generator().manual_seed(7)
    makers = (normal, student)
    for index in range(150):
        shape = [int(torch.randint(1, 40, (1,), generator=generator)) for _ in range(1 + index % 3)]
        x = makers[index % 2](*shape) * 10.0 ** float(torch.randint(-30, 30, (1,), generator=generator))
        dtype = (torch.float32, torch.bfloat16, torch.float32, torch.float16)[index % 4]
        x = x.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else x.to(dtype)
        assert_alike_on_gpu(SERVED_CODECS[index % len(SERVED_CODECS)], x, f"tensor {index}")


@served_twice
def test_nan_and_infinity_are_refused(codec: Codec) -> None:
    bad = ((math.nan, 256), (-math.nan, 5000), (math.inf, 5000), (-math.inf, 256))
    value, length = bad[SERVED_CODECS.index(codec) % len(bad)]
    x = normal(2, length)
    x[1, 3] = value
    with on_gpu(), pytest.raises(NonFiniteError):
        codec.encode(x.to(DEVICE), KEY)
    flight = SlowFlight()
    with on_gpu(), flight.open():
        codec.encode(x.to(DEVICE), KEY)
    with pytest.raises(NonFiniteError):
        flight.land()


def test_fields_of_every_width() -> None:
    for width in range(33):
        values = torch.randint(0, 2**width, (1003,), generator=torch.Generator().manual_seed(width))
        expected = pack(values, width)
        with on_gpu():
            assert bits_of(pack(values.to(DEVICE), width)) == bits_of(expected), width
            assert bits_of(pack(values.to(DEVICE).repeat_interleave(2)[::2], width)) == bits_of(expected), width
            assert torch.equal(unpack(expected.to(DEVICE), 1003, width).cpu(), values), width


@pytest.mark.parametrize("form", ["bitmap", "elias_fano", "int32"])
@pytest.mark.parametrize("total", [1, 5, 4096, 10_001])
def test_positions_of_every_form(form: str, total: int) -> None:
    for kept in {1, total // 300 + 1, total // 3 + 1, total}:
        positions = torch.randperm(total, generator=torch.Generator().manual_seed(kept))[:kept].sort().values
        expected = encode_positions(positions, total, form)
        with on_gpu():
            arrays = encode_positions(positions.to(DEVICE), total, form)
            assert {name: array.tobytes() for name, array in arrays.items()} == {
                name: array.tobytes() for name, array in expected.items()
            }
            packet = Packet(TopK(0.5), arrays, (total,), "float32")
            assert torch.equal(decode_positions(packet, kept, DEVICE).cpu(), positions)


@served_twice
def test_damaged_packets_are_refused_or_decode(codec: Codec) -> None:
    """No byte of a packet makes the kernels write outside; what the CPU refuses is refused."""
    packet = codec.encode(normal(2, 150), KEY)
    flips = ((0, 0x01), (-1, 0x80), (0, 0xFF))
    for turn, name in enumerate(packet.arrays, SERVED_CODECS.index(codec)):
        place, flip = flips[turn % len(flips)]
        arrays = {key: array.copy() for key, array in packet.arrays.items()}
        arrays[name][place] ^= flip
        damaged = packet._replace(arrays=arrays)
        try:
            expected = bits_of(damaged.decode())
        except ValueError:
            with on_gpu(), pytest.raises(ValueError):
                damaged.decode(DEVICE)
        else:
            with on_gpu():
                assert bits_of(damaged.decode(DEVICE)) == expected, (name, place, flip)


class _NoWaiting(TorchDispatchMode):
    """Refuses the operations of torch that need a value of the device on the host."""

    WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in self.WAITS):
            raise AssertionError(f"{func} waits for the device.")
        return func(*args, **(kwargs or {}))


@served_twice
def test_encoding_synchronises_once_and_decoding_never(codec: Codec, monkeypatch) -> None:
    """The kernels themselves are left out of what is watched: interpreted, they do wait."""
    from raysim.codecs.kernels import triton

    def unwatched(kernel, programs, *arguments, **constants):
        with torch.utils._python_dispatch._disable_current_modes():
            kernel[(programs,)](*arguments, **constants)

    for module in ("linear", "packing", "rows", "select", "uniform"):
        monkeypatch.setattr(f"raysim.codecs.kernels.triton.{module}.launch", unwatched)
    assert triton.launch is not unwatched
    x, memory = normal(3, 50, 8), normal(3, 50, 8)
    with on_gpu():
        flight = SlowFlight()
        with flight.open(), _NoWaiting():
            packet = codec.encode(x.to(DEVICE), KEY)
        flight.land()
        assert flight.waits == 1
        with flight.open(), _NoWaiting():
            packet.decode(DEVICE)
        assert flight.waits == 1  # its flags are read at the end of the step
        flight.settle()
        assert flight.waits <= 2
        fused = isinstance(codec, Quantize) or (isinstance(codec, TopK) and codec.values.copies)
        if fused:
            flight = SlowFlight()
            with flight.open(), _NoWaiting():
                codec.encode_with_residual(x.to(DEVICE), x.dtype, KEY, memory.to(DEVICE))
            flight.land()
            assert flight.waits == 1


def test_missing_triton_falls_back_to_torch_with_one_warning(monkeypatch) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    kernels._has_triton.cache_clear()
    with pytest.warns(UserWarning, match="Triton is not installed"):
        assert not kernels.gpu_serves("cuda")
    assert not kernels.gpu_serves("cuda")  # warnings are errors here: it was said once
    kernels._has_triton.cache_clear()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", ["75", "80", "90"])
def test_kernels_compile_for_gpus_and_compute_as_the_cpu_does(capability: str) -> None:
    """Triton's interpreter forgives what its compiler does not; and no product may be fused with a sum, nor a denormal flushed."""
    program = Path(__file__).parents[1] / "support" / "compile_kernels.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, str(program), capability]
    done = subprocess.run(run, check=False, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) > 50
    assert all("fused=False flushed=False" in line for line in lines), done.stdout


def test_low_rank_by_sums_of_a_library_is_that_of_sums_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torch sums products, dots and norms; the same matrices follow, to rounding."""
    x = normal(40, 24) @ normal(24, 30)
    for per in ("tensor", "sample"):
        codec, shaped = LowRank(3, per=per), x.view(4, 10, 30) if per == "sample" else x
        with kernels.reference():
            expected = codec.encode(shaped, KEY).decode()
            with monkeypatch.context() as patch:
                patch.setattr(lowrank, "_ordered", lambda sums: False)
                torch.testing.assert_close(codec.encode(shaped, KEY).decode(), expected, rtol=1e-5, atol=1e-5)
