"""Stateless maps tensor -> packet -> tensor, packed for real: wire bytes are counted from the arrays sent.

A codec's `repr` is its notation; `raysim.notation.parse(text, CODECS)` is the inverse. Adding one is a class, and a line in
`CODECS`; the laws in the tests then ask for a variant of it.
"""

from raysim.codecs.base import Codec, NonFiniteError, Packet
from raysim.codecs.bounded import ErrorBounded
from raysim.codecs.mean import Mean
from raysim.codecs.nonuniform import NonUniform
from raysim.codecs.dense import Cast, Identity
from raysim.codecs.lossless import Entropy
from raysim.codecs.lowrank import LowRank
from raysim.codecs.mx import MX
from raysim.codecs.quantize import FixedPoint, Quantize
from raysim.codecs.randomk import RandomK
from raysim.codecs.signs import OneBit, Sign
from raysim.codecs.sparse import Nonzero, TopK
from raysim.codecs.threshold import EstimatedTopK, Threshold
from raysim.codecs.transform import Hadamard
from raysim.codecs.unbiased import QSGD, Natural, TernGrad
from raysim.random import derive_key

CODECS: dict[str, type[Codec]] = {
    cls.name(): cls
    for cls in (
        *(Cast, Identity),
        *(FixedPoint, Mean, MX, NonUniform, Quantize),
        *(Natural, OneBit, QSGD, Sign, TernGrad),
        *(EstimatedTopK, Nonzero, RandomK, Threshold, TopK),
        *(ErrorBounded, LowRank),
        *(Entropy, Hadamard),
    )
}

__all__ = [
    "CODECS",
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
    "Sign",
    "TernGrad",
    "Threshold",
    "TopK",
    "derive_key",
]
