"""The variants of raysim-contrib: those of its classes, and what is known of some of its codecs, compressors and replica methods."""

from __future__ import annotations

import math

import compressor_variants
import replica_variants
from codec_variants import Shape, Variant, absmax, blocks, channels, minmax, numel, packed, rows, samples

from raysim.codecs import Codec
from raysim.plugins import contrib, import_object
from raysim.replication.method import ReplicaMethod


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


KNOWN = [
    Variant("ErrorBounded(0.01)"),
    Variant("ErrorBounded(0.001, relative='range')", scales=True),
    Variant("ErrorBounded(0.1, relative='rms')", scales=True),
    Variant("Sign", absmax(1), scales=True),
    Variant("Sign(per='row')", absmax(1, rows), scales=True),
    Variant("Sign(per='block', block=100)", absmax(1, blocks(100)), scales=True),
    Variant("Sign(scaled=False)", lambda s, v: packed(numel(s), 1), zero=False),
    Variant("OneBit", minmax(1), scales=True),
    Variant("OneBit(per='channel')", minmax(1, channels), scales=True),
    *(Variant(f"FixedPoint({bits})", absmax(bits, channels), scales=True) for bits in (1, 2, 4, 6, 8)),
    Variant("FixedPoint(8, per='block', block=32)", absmax(8, blocks(32)), scales=True),
    Variant("FixedPoint(3, per='tensor', rounding='stochastic')", absmax(3), scales=True),
    Variant("Threshold(0.5)", odd=True, idempotent=True),
    Variant("Threshold(1.0, values=Cast('bfloat16'))", odd=True),
    Variant("TernGrad", absmax(2), scales=True),
    Variant("TernGrad(clip=None)", absmax(2), scales=True, unbiased=True),
    Variant("Natural", lambda s, v: packed(9 * numel(s), 1), scales=True, odd=True, unbiased=True),
    Variant("Entropy(Quantize(4))", scales=True),
    Variant("Entropy(TopK(0.1))", scales=True, odd=True, idempotent=True),
    Variant("Entropy(Identity, level=3)", lossless=True, scales=True, odd=True, idempotent=True),
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

CLASSES = {name: import_object(path) for name, path in contrib().items()}
CODECS = [cls for cls in CLASSES.values() if issubclass(cls, Codec)]
METHODS = [cls for cls in CLASSES.values() if issubclass(cls, ReplicaMethod)]
VARIANTS = [
    *KNOWN,
    *(Variant(text) for cls in CODECS for text in cls.variants if text not in {known.notation for known in KNOWN}),
]

COMPRESSORS = [
    compressor_variants.Variant("ACGC(0.1)"),
    compressor_variants.Variant("ResidualVQ"),
    compressor_variants.Variant("ResidualVQ(bits=4, rounds=3, dim=3, fresh=2, pace=1.0)"),
    compressor_variants.Variant("ResidualVQ(bits=5, rounds=1, dim=2, fresh=0)"),
    compressor_variants.Variant("GraVAC(window=2)"),
    compressor_variants.Variant("GraVAC(window=1, policy='geometric', promote='passing')"),
    compressor_variants.Variant("GraVAC(epsilon=0.5, window=1, ladder='bits', memory='slot')"),
    compressor_variants.Variant(
        "GraVAC(epsilon=0.3, window=1, ladder=(TopK(0.5), Quantize(2), TopK(0.1)), memory='link', probe_every=2)"
    ),
    compressor_variants.Variant("GraVAC(cf_max=8.0, epsilon=0.3, window=2, memory='sample', throughput='link')"),
    compressor_variants.Variant("GraVAC(epsilon=0.9, ladder='rank', ewma_alpha=1.0)"),
    compressor_variants.Variant("GraVAC(ladder=(Identity,), memory='slot')", "bitwise"),
]

AVERAGES = [
    replica_variants.Variant("DeCoSGD(0.05)"),
    replica_variants.Variant("DeCoSGD(0.1, delay=3, values=Cast('bfloat16'), warmup=1)"),
    replica_variants.Variant("DeCoSGD(0.05, delay=0)", conserves=True),
    replica_variants.Variant("DeCoSGD(1.0, delay=0)", conserves=True, exact=True, bitwise=True),
    replica_variants.Variant("Dion(2)", momentum=None),
    replica_variants.Variant("Dion(4, mu=0.5, b1=0.5, b2=0.5, min_values=1, warmup=1)", momentum=None),
    replica_variants.Variant("EDGC(8, window=2, every=1)", conserves=True),
    replica_variants.Variant("EDGC(6, window=3, every=2, sample=1.0, stride=2, bins=20, warmup=1)", conserves=True),
    replica_variants.Variant("DeMo", momentum=None),
    replica_variants.Variant("DeMo(kept=5, decay=0.9, side=8)", momentum=None),
    replica_variants.Variant("SignSGD"),
    replica_variants.Variant("SignSGD(beta=0.9)"),
    replica_variants.Variant("DIANA(RandomK(0.2, unbiased=True))"),
    replica_variants.Variant("DIANA(QSGD(4), alpha=0.5)"),
    replica_variants.Variant("DIANA(Identity)", exact=True),
    replica_variants.Variant("GTopK(0.05)", conserves=True),
    replica_variants.Variant("GTopK(0.02, scope='stage', warmup=1)", conserves=True),
    replica_variants.Variant("GTopK(1.0)", conserves=True, exact=True),
    replica_variants.Variant("DIANA(QSGD(4), min_values=1, warmup=2)"),
    replica_variants.Variant("MARINA(RandomK(0.25, unbiased=True))"),
    replica_variants.Variant("MARINA(QSGD(5), probability=0.3, warmup=2)"),
    replica_variants.Variant("MARINA(Identity, probability=0.3)", exact=True),
    replica_variants.Variant("MARINA(QSGD(5), min_values=1)"),
]

# Methods of which each replica steps by itself.
LOCAL = [
    "DiLoCoX(2)",
    "DiLoCoX(2, rank=4, window=2)",
    "DiLoCoX(1, rate=1.0, momentum=0.0, rank=3, values=Quantize(8), window=0, delay=0)",
    "HALoS(1, updates=2)",
    "HALoS(2, rate=1.0, sites=3, momentum=0.5, updates=2, global_rate=1.0, global_momentum=0.0, merge=1.0, delay=0)",
    "AsyncSPARTA(delay=2)",
    "AsyncSPARTA(share=0.5, delay=1, decay=0.9, scale=0.5, rise=1, until=6)",
    "AsyncSPARTA(delay=1, steps=2, rise=2)",
    "AsyncSPARTA(delay=0)",
    "MuLoCo(2, codec=EF21(TopK(0.1)))",
    "StreamingDiLoCo(4, fragments=3)",
    "StreamingDiLoCo(3, codec=ErrorFeedback(TopK(0.05)), delay=1, blend=0.5)",
    "SPARTA",
    "SPARTA(share=0.2)",
    "MuLoCo(3, rate=0.5, momentum=0.0)",
    "StreamingDiLoCo(4, rate=0.5, momentum=0.0)",
]
