"""Damaged packets decode to a ValueError or to a tensor of the stated shape and dtype, and to nothing worse."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from codec_variants import KEY, VARIANTS, Variant, normal
from packet_fuzz import fuzz

from raysim.codecs import TopK

CASES = 20_000  # of all variants together, in `make test-slow`

variants = pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.notation)


@variants
def test_damaged_packets(variant: Variant) -> None:
    assert fuzz(variant, 12) == []


@pytest.mark.slow
@variants
def test_many_damaged_packets(variant: Variant) -> None:
    assert fuzz(variant, -(-CASES // len(VARIANTS))) == []


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
