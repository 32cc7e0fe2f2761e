"""The codec variants of raysim-contrib: a codec that is not here fails a test."""

from __future__ import annotations

import math

from codec_variants import Shape, Variant, channels, minmax, numel, packed, rows, samples


def tah_quant(shape: Shape, itemsize: int) -> int:
    """Tiles of 32 features, or of the next power of two where there are fewer."""
    if not numel(shape):
        return 0
    length = channels(shape)
    width = next(width for width in (2, 4, 8, 16, 32) if width >= min(length, 32))
    per_token = math.ceil(length / width)
    tiles = numel(shape) // length * per_token
    wide = tiles // per_token * round(0.8 * per_token)
    codes = packed(width * wide, 4) + packed(width * (tiles - wide), 3)
    return 2 + 2 * packed(tiles, 1) + packed(tiles, int(math.log2(width))) + 4 * tiles + codes


def maps(shape: Shape) -> int:
    """Channels of all samples; of vectors, samples."""
    return samples(shape) * (channels(shape) if len(shape) > 2 else 1)


VARIANTS = [
    Variant("MeanStd", lambda s, v: 2 * numel(s) + 8 * rows(s) if numel(s) else 0),
    *(Variant(f"DAQ({bits})", minmax(bits, maps), scales=True) for bits in (1, 4, 8)),
    Variant(
        "DAQ(3, deviation_bits=8)",
        lambda s, v: packed(numel(s), 3) + (5 * maps(s) + 8 * samples(s)) * bool(numel(s)),
        scales=True,
    ),
    Variant("TinyScript(2)", lambda s, v: packed(numel(s), 2) + 12 * bool(numel(s)), scales=True, unbiased=True),
    Variant("TinyScript(4)", lambda s, v: packed(numel(s), 4) + 12 * bool(numel(s)), scales=True, unbiased=True),
    Variant("TAHQuant", tah_quant, scales=True),
    Variant("TAHQuant(high=0.5, tile=16, tau=0.0)", scales=True),
    Variant("TAHQuant(high=0.5, allocate='token')", scales=True),
    Variant("ATOMO(2.0)", unbiased=True),
    Variant("ZFP(0.01)"),
    Variant("ZFP(0.5)"),
    Variant("MPC", lossless=True, scales=False, idempotent=True),
    Variant("MPC(stride=3)", lossless=True, scales=False, idempotent=True),
    Variant("Outliers(Quantize(4))", scales=True),
    Variant("Outliers(FixedPoint(8), density=0.1, kept=Identity)", scales=True),
    Variant("Outliers(Hadamard(Quantize(2, rounding='stochastic')), density=0.05)", scales=True),
]
