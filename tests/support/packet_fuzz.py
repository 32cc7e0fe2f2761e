"""Damaging packets of a codec at random."""

from __future__ import annotations

import random

import numpy as np
from codec_variants import KEY, Variant, normal

from raysim.codecs import Packet
from raysim.codecs.codec import DTYPES

SHAPES = [(4, 60), (3, 7, 8), (2, 130), (1, 1), (0, 5), (257,), (2, 3, 5, 4)]
DAMAGES = ["cut", "grow", "flip", "fill", "random", "drop", "swap", "shape", "dtype", "stretch"]


def damaged(chance: random.Random, packet: Packet) -> Packet:
    """Change one to three things about a packet."""
    arrays = {name: array.reshape(-1).view(np.uint8).copy() for name, array in packet.arrays.items()}
    shape, dtype = packet.shape, packet.dtype
    for _ in range(chance.randint(1, 3)):
        kind = chance.choice(DAMAGES)
        if kind == "shape":
            shape = chance.choice([*SHAPES, tuple(reversed(shape)), (*shape, 1), (), (1 << 20,), (-1, 4)])
        elif kind == "dtype":
            dtype = chance.choice([*DTYPES, "int8", ""])
        elif arrays:
            name = chance.choice(sorted(arrays))
            array = arrays[name]
            if kind == "cut":
                arrays[name] = array[: chance.randint(0, len(array))]
            elif kind == "grow":
                arrays[name] = np.concatenate([array, np.full(chance.randint(1, 9), 255, np.uint8)])
            elif kind == "flip" and len(array):
                array[chance.randrange(len(array))] ^= 1 << chance.randrange(8)
            elif kind == "fill":
                array[:] = chance.choice([0, 1, 127, 128, 255])
            elif kind == "random":
                array[:] = np.frombuffer(chance.randbytes(len(array)), np.uint8)
            elif kind == "drop":
                del arrays[name]
            elif kind == "swap":
                other = chance.choice(sorted(arrays))
                arrays[name], arrays[other] = arrays[other], arrays[name]
            elif kind == "stretch":
                arrays[name] = array.repeat(2)[::2]  # not contiguous
    return packet._replace(arrays=arrays, shape=shape, dtype=dtype)


def fuzz(variant: Variant, cases: int, number: int = 0) -> list[str]:
    """Damage packets of a codec, as often as `cases`, by a generator seeded with `number`; return the harm done."""
    packets = [variant.codec.encode(normal(*shape), KEY) for shape in SHAPES]
    packets.append(variant.codec.encode(normal(3, 50).relu().bfloat16(), KEY))
    harm = []
    for case in range(cases):
        chance = random.Random(f"{number} {case}")
        packet = damaged(chance, chance.choice(packets))
        try:
            y = packet.decode()
            assert tuple(y.shape) == packet.shape
            assert y.dtype == DTYPES[packet.dtype]
            assert y.numel() == y.clone().numel()  # its memory can be read
        except ValueError:
            continue
        except Exception as error:
            harm.append(f"{variant.notation}, case {case} of {number}: {type(error).__name__}: {str(error)[:100]}")
    return harm
