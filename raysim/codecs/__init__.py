"""Stateless maps tensor -> packet -> tensor. Values are really packed, so wire bytes are counted, not estimated.

A codec's `repr` is its notation; `raysim.notation.parse_notation(text, CODECS)` is the inverse. To add a codec, write a class
and add it to `CODECS`; the property tests then require an example of it. Rarely used codecs are in the plug-in
`raysim-contrib`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from raysim.codecs.codec import DTYPES, Codec, NonFiniteError, Packet, check_finite, to_bytes, to_tensor
from raysim.codecs.fitted import Mean, NonUniform
from raysim.codecs.floats import MX, Cast, Identity
from raysim.codecs.hadamard import Hadamard
from raysim.codecs.lowrank import LowRank
from raysim.codecs.quantize import QSGD, Quantize
from raysim.codecs.rotated import Rotated
from raysim.codecs.sparse import RandomK, TopK
from raysim.codecs.threshold import EstimatedTopK, Nonzero
from raysim.on_demand import torch
from raysim.random import derive_key

CODECS: dict[str, type[Codec]] = {
    cls.name(): cls
    for cls in (
        *(Cast, Identity),
        *(Mean, MX, NonUniform, Quantize, Rotated),
        *(QSGD,),
        *(EstimatedTopK, Nonzero, RandomK, TopK),
        *(LowRank,),
        Hadamard,
    )
}


def warm(codecs: Iterable[Codec], dtypes: Iterable[torch.dtype] | None = None) -> None:
    """Compile the kernels of codecs for float32 and `dtypes`, by default all of `DTYPES`, before a step is timed.

    Kernels compiled by an earlier process are loaded from disk in a fraction of a second.
    """
    for codec in dict.fromkeys(part for each in codecs for part in each.rehearsed()):
        for dtype in DTYPES.values() if dtypes is None else {torch.float32, *dtypes}:
            _warm(codec, dtype)


@lru_cache(maxsize=1024)  # kernels stay loaded: the workers and runs of a process warm a codec once
def _warm(codec: Codec, dtype: torch.dtype) -> None:
    for shape in ((4, 6, 8), (2, 2, 320)):  # positions in rows of more than 8 bits too
        x = torch.linspace(-1, 1, math.prod(shape)).view(shape).to(dtype)
        codec.encode(x, 1).decode()
        codec.encode_with_residual(x.clone(), dtype, key=1, memory=torch.zeros(shape))
        codec.encode_with_residual(x.float(), dtype, key=1)[0].decode()


__all__ = [
    "CODECS",
    "DTYPES",
    "MX",
    "QSGD",
    "Cast",
    "Codec",
    "EstimatedTopK",
    "Hadamard",
    "Identity",
    "LowRank",
    "Mean",
    "NonFiniteError",
    "NonUniform",
    "Nonzero",
    "Packet",
    "Quantize",
    "RandomK",
    "Rotated",
    "TopK",
    "check_finite",
    "derive_key",
    "to_bytes",
    "to_tensor",
    "warm",
]
