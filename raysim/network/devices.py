"""Datasheet figures of common GPUs, from which profiles are computed where none was recorded. None is a measurement of ours."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """A device by its datasheet."""

    peak_flops: float
    """Dense (no sparsity) tensor-core FLOP/s at 16 bits."""
    memory_bytes: int
    memory_bytes_per_s: float

    @property
    def codec_bytes_per_s(self) -> float:
        """Dense bytes a second that codecs are taken to go over: memory is the limit, and a codec passes `CODEC_PASSES` times.

        An assumption: starting kernels, which takes longer than the work on small tensors, is not in it.
        """
        return self.memory_bytes_per_s / CODEC_PASSES


CODEC_PASSES = 8
"""Reads and writes of a dense tensor in one encode or decode, such as a TopK's: find the range, select, move, write."""


# From vendors' datasheets; figures quoted with sparsity are halved. Consumer cards: 16 bits in, 32 bits accumulated.
# "A100" and "V100" are the cards with more memory; H800 and A800 are H100 and A100 with slower links between cards.
DEVICES: dict[str, Device] = {
    "T4": Device(65e12, 16 * 10**9, 300e9),
    "V100": Device(125e12, 32 * 10**9, 900e9),
    "V100-16GB": Device(125e12, 16 * 10**9, 900e9),
    "A10G": Device(70e12, 24 * 10**9, 600e9),
    "A40": Device(150e12, 48 * 10**9, 696e9),
    "L4": Device(121e12, 24 * 10**9, 300e9),
    "L40S": Device(362e12, 48 * 10**9, 864e9),
    "RTX3090": Device(71e12, 24 * 10**9, 936e9),
    "RTX4090": Device(165e12, 24 * 10**9, 1008e9),
    "RTX5090": Device(210e12, 32 * 10**9, 1792e9),
    "A6000": Device(155e12, 48 * 10**9, 768e9),
    "A100": Device(312e12, 80 * 10**9, 2039e9),
    "A100-40GB": Device(312e12, 40 * 10**9, 1555e9),
    "H20": Device(148e12, 96 * 10**9, 4000e9),
    "H100": Device(989e12, 80 * 10**9, 3350e9),
    "H200": Device(989e12, 141 * 10**9, 4800e9),
    "B200": Device(2250e12, 180 * 10**9, 8000e9),
    "MI250X": Device(383e12, 128 * 10**9, 3277e9),
    "MI300X": Device(1307e12, 192 * 10**9, 5300e9),
}


def gpt_forward_flops(num_blocks: int, width: int, sequence: int, batch: int, vocabulary: int = 0) -> float:
    """Return the FLOPs of a forward through GPT blocks, and the head where `vocabulary` is given: 24 w^2 + 4 s w a token and block.

    >>> f"{gpt_forward_flops(12, 768, 1024, batch=1, vocabulary=50257):.3g}"
    '2.92e+11'
    """
    tokens = batch * sequence
    return float(tokens * (num_blocks * (24 * width**2 + 4 * sequence * width) + 2 * width * vocabulary))
