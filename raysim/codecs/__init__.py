"""Stateless maps tensor -> packet -> tensor. Values are really packed, so wire bytes are counted, not estimated.

A codec's `repr` is its notation; `raysim.notation.parse(text, CODECS)` is the inverse. To add a codec, write a class
and add it to `CODECS`; the property tests then require an example of it. Rarely used codecs are in the plug-in
`raysim-contrib`.
"""

from collections.abc import Iterable

from raysim.codecs.codec import DTYPES, Codec, NonFiniteError, Packet, check_finite, to_bytes, to_tensor
from raysim.codecs.fitted import ErrorBounded, NonUniform
from raysim.codecs.floats import MX, Cast, Identity, Natural
from raysim.codecs.lowrank import LowRank
from raysim.codecs.quantize import QSGD, FixedPoint, Quantize
from raysim.codecs.rotated import Rotated
from raysim.codecs.signs import Mean, OneBit, Sign, TernGrad
from raysim.codecs.sparse import RandomK, TopK
from raysim.codecs.threshold import EstimatedTopK, Nonzero, Threshold
from raysim.codecs.wrappers import Entropy, Hadamard
from raysim.on_demand import torch
from raysim.random import derive_key

CODECS: dict[str, type[Codec]] = {
    cls.name(): cls
    for cls in (
        *(Cast, Identity),
        *(FixedPoint, Mean, MX, NonUniform, Quantize, Rotated),
        *(Natural, OneBit, QSGD, Sign, TernGrad),
        *(EstimatedTopK, Nonzero, RandomK, Threshold, TopK),
        *(ErrorBounded, LowRank),
        *(Entropy, Hadamard),
    )
}

_COMMON: tuple[Codec, ...] = (
    TopK(0.5, index="bitmap"),
    TopK(0.5, index="elias_fano", values=Quantize(4)),
    Quantize(3, per="channel", rounding="stochastic"),
    Nonzero(),
)


def warm(codecs: Iterable[Codec] = ()) -> None:
    """Compile the kernels of TopK, Quantize and `codecs` for every supported dtype, before a step is timed.

    Kernels compiled by an earlier process are loaded from disk in a fraction of a second.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.linspace(-1, 1, 192).view(4, 6, 8).to(dtype)
        for codec in (*_COMMON, *(codec.rehearsed() for codec in codecs)):
            codec.encode_with_residual(x.clone(), dtype, key=1, memory=torch.zeros(x.shape))
            packet, _ = codec.encode_with_residual(x.float(), dtype, key=1)
            packet.decode()


__all__ = [
    "CODECS",
    "DTYPES",
    "MX",
    "QSGD",
    "Cast",
    "Codec",
    "Entropy",
    "ErrorBounded",
    "EstimatedTopK",
    "FixedPoint",
    "Hadamard",
    "Identity",
    "LowRank",
    "Mean",
    "Natural",
    "NonFiniteError",
    "NonUniform",
    "Nonzero",
    "OneBit",
    "Packet",
    "Quantize",
    "RandomK",
    "Rotated",
    "Sign",
    "TernGrad",
    "Threshold",
    "TopK",
    "check_finite",
    "derive_key",
    "to_bytes",
    "to_tensor",
    "warm",
]
