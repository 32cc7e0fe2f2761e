"""Stateless maps tensor -> packet -> tensor, packed for real: wire bytes are counted from the arrays sent.

A codec's `repr` is its notation; `raysim.notation.parse(text, CODECS)` is the inverse. Adding one is a class, and a line in
`CODECS`; the laws in the tests then ask for a variant of it.
"""

from raysim.codecs.dense import Cast, Identity
from raysim.codecs.packet import Codec, NonFiniteError, Packet
from raysim.codecs.quantize import Quantize
from raysim.codecs.random import derive_key
from raysim.codecs.sparse import Nonzero, TopK

CODECS: dict[str, type[Codec]] = {cls.name(): cls for cls in (Cast, Identity, Nonzero, Quantize, TopK)}

__all__ = ["CODECS", "Cast", "Codec", "Identity", "NonFiniteError", "Nonzero", "Packet", "Quantize", "TopK", "derive_key"]
