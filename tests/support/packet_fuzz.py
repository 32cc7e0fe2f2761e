"""Damaging packets of a codec at random."""

from __future__ import annotations

import numpy as np
from codec_variants import KEY, Variant, normal
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from raysim.codecs import Packet
from raysim.codecs.base import DTYPES

SHAPES = [(4, 60), (3, 7, 8), (2, 130), (1, 1), (0, 5), (257,), (2, 3, 5, 4)]


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


def fuzz(variant: Variant, cases: int, number: int | None = None) -> None:
    """Damage packets of a codec, as often as `cases`; the same again for the same `number`."""
    packets = [variant.codec.encode(normal(*shape), KEY) for shape in SHAPES]
    packets.append(variant.codec.encode(normal(3, 50).relu().bfloat16(), KEY))

    @settings(max_examples=cases, database=None, deadline=None, suppress_health_check=list(HealthCheck))
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

    (check if number is None else seed(number)(check))()
