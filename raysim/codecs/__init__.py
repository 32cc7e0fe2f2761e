"""Stateless maps tensor -> packet -> tensor, packed for real: wire bytes are counted from the arrays sent.

A codec's `repr` is its notation; `raysim.notation.parse(text, CODECS)` is the inverse. Adding one is a class, and a line in
`CODECS`; the laws in the tests then ask for a variant of it.
"""

from raysim.codecs.base import Codec, NonFiniteError, Packet
from raysim.codecs.bounded import ErrorBounded
from raysim.codecs.contrib.atomo import ATOMO
from raysim.codecs.contrib.daq import DAQ
from raysim.codecs.contrib.mean import Mean
from raysim.codecs.contrib.meanstd import MeanStd
from raysim.codecs.contrib.mpc import MPC
from raysim.codecs.contrib.nonuniform import NonUniform
from raysim.codecs.contrib.outliers import Outliers
from raysim.codecs.contrib.tahquant import TAHQuant
from raysim.codecs.contrib.tinyscript import TinyScript
from raysim.codecs.contrib.zfp import ZFP
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
        *(Cast, Identity, MeanStd),
        *(DAQ, FixedPoint, Mean, MX, NonUniform, Quantize, TAHQuant),
        *(Natural, OneBit, QSGD, Sign, TernGrad, TinyScript),
        *(EstimatedTopK, Nonzero, RandomK, Threshold, TopK),
        *(ATOMO, LowRank),
        *(ErrorBounded, ZFP),
        *(Entropy, MPC),
        *(Hadamard, Outliers),
    )
}

__all__ = [
    "ATOMO",
    "CODECS",
    "DAQ",
    "MPC",
    "MX",
    "QSGD",
    "ZFP",
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
    "MeanStd",
    "Natural",
    "NonFiniteError",
    "NonUniform",
    "Nonzero",
    "OneBit",
    "Outliers",
    "Packet",
    "Quantize",
    "RandomK",
    "Sign",
    "TAHQuant",
    "TernGrad",
    "Threshold",
    "TinyScript",
    "TopK",
    "derive_key",
]
