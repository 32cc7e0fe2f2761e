"""Damaged packets decode to a ValueError or to a tensor of the stated shape and dtype, and to nothing worse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_variants import KEY, VARIANTS, Variant, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raysim.codecs import Packet, TopK
from raysim.codecs.base import DTYPES

CASES = 20_000  # of all variants together, in `make test-slow`

SHAPES = [(4, 60), (3, 7, 8), (2, 130), (1, 1), (0, 5), (257,), (2, 3, 5, 4)]

variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.notation)


def damaged(draw: st.DrawFn, packet: Packet) -> Packet:
    """Change one to three things about a packet."""
    arrays = {name: array.reshape(-1).view(np.uint8).copy() for name, array in packet.arrays.items()}
    shape, dtype = packet.shape, packet.dtype
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(
            st.sampled_from(["cut", "grow", "flip", "fill", "random", "drop", "swap", "shape", "dtype", "stretch"])
        )
        if kind == "shape":
            shape = draw(st.sampled_from([*SHAPES, tuple(reversed(shape)), (*shape, 1), (), (1 << 20,), (-1, 4)]))
        elif kind == "dtype":
            dtype = draw(st.sampled_from([*DTYPES, "int8", ""]))
        elif arrays:
            name = draw(st.sampled_from(sorted(arrays)))
            array = arrays[name]
            if kind == "cut":
                arrays[name] = array[: draw(st.integers(0, len(array)))]
            elif kind == "grow":
                arrays[name] = np.concatenate([array, np.full(draw(st.integers(1, 9)), 255, np.uint8)])
            elif kind == "flip" and len(array):
                array[draw(st.integers(0, len(array) - 1))] ^= 1 << draw(st.integers(0, 7))
            elif kind == "fill":
                array[:] = draw(st.sampled_from([0, 1, 127, 128, 255]))
            elif kind == "random":
                array[:] = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 256, len(array), dtype=np.uint8)
            elif kind == "drop":
                del arrays[name]
            elif kind == "swap":
                other = draw(st.sampled_from(sorted(arrays)))
                arrays[name], arrays[other] = arrays[other], arrays[name]
            elif kind == "stretch":
                arrays[name] = array.repeat(2)[::2]  # not contiguous
    return packet._replace(arrays=arrays, shape=shape, dtype=dtype)


def fuzz(variant: Variant, cases: int) -> None:
    packets = [variant.codec.encode(normal(*shape), KEY) for shape in SHAPES]
    packets.append(variant.codec.encode(normal(3, 50).relu().bfloat16(), KEY))

    @settings(max_examples=cases, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        packet = data.draw(st.composite(lambda draw: damaged(draw, draw(st.sampled_from(packets))))())
        try:
            y = packet.decode()
        except ValueError:
            return
        assert tuple(y.shape) == packet.shape
        assert y.dtype == DTYPES[packet.dtype]
        assert y.numel() == y.clone().numel()  # its memory can be read

    check()


@variants
def test_damaged_packets(variant: Variant) -> None:
    fuzz(variant, 12)


@pytest.mark.slow
@variants
def test_many_damaged_packets(variant: Variant) -> None:
    fuzz(variant, -(-CASES // len(VARIANTS)))


@pytest.mark.parametrize("length", [130, 4099, 5000])
def test_positions_just_beyond_the_tensor_are_refused(length: int) -> None:
    """The greatest position of an Elias-Fano index, in one piece with the tensor's last values or not."""
    x = torch.zeros(1, length)
    x[0, -3:] = 1.0
    codec = TopK(3 / length, index="elias_fano")
    packet = codec.encode(x)
    assert torch.equal(packet.decode(), x)
    low = packet.arrays["low"].copy()
    width = 8 * len(low) // 3
    assert ((length - 1) | ((1 << width) - 1)) >= length
    low[:] = 255
    with pytest.raises(ValueError, match="positions that are not 3 increasing ones below"):
        packet._replace(arrays=packet.arrays | {"low": low}).decode()


@variants
@pytest.mark.parametrize("shape", [(1 << 40,), (1 << 20, 1 << 20), (0, 1 << 40)])
def test_a_claim_of_too_many_values_is_refused(variant: Variant, shape: tuple[int, ...]) -> None:
    packet = variant.codec.encode(normal(4, 60), KEY)
    with pytest.raises(ValueError, match="must hold at most 2147483647 values"):
        packet._replace(shape=shape).decode()


@variants
def test_arrays_of_objects_are_refused(variant: Variant) -> None:
    packet = variant.codec.encode(normal(4, 60), KEY)
    for name, array in packet.arrays.items():
        for odd in (np.empty(len(array), object), [0] * len(array), array.astype("U1")):
            with pytest.raises(ValueError, match=f"must hold arrays of numbers, but `{name}` is"):
                packet._replace(arrays=packet.arrays | {name: odd}).decode()


def test_compressed_arrays_cannot_blow_up() -> None:
    from zstandard import ZstdCompressor

    from raysim.codecs import Entropy, Quantize

    bomb = np.frombuffer(b"\x01" + ZstdCompressor().compress(bytes(1 << 26)), np.uint8)
    packet = Entropy(Quantize(4)).encode(torch.ones(8))
    with pytest.raises(ValueError, match="neither raw nor compressed"):
        packet._replace(arrays=packet.arrays | {"raw.codes": bomb}).decode()
