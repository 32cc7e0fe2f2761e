"""Compressors of links: a codec with a memory. A codec alone, without a compressor, means `Plain`."""

from raysim.codecs import CODECS, Codec
from raysim.compressors.compressor import (
    AtSupport,
    Compressor,
    Context,
    Decision,
    Plain,
    State,
    StepFacts,
    share_indices,
)
from raysim.compressors.memory import AQSGD, ErrorFeedback, LinkEF21, MixedErrorFeedback, NoiseFeedback
from raysim.compressors.optimus_cc import Epilogue, LazyErrorPropagation, WarmStart
from raysim.notation import Notation, parse_notation

COMPRESSORS: dict[str, type[Compressor]] = {
    cls.name(): cls
    for cls in (
        AQSGD,
        LinkEF21,
        Epilogue,
        ErrorFeedback,
        LazyErrorPropagation,
        MixedErrorFeedback,
        NoiseFeedback,
        Plain,
        WarmStart,
    )
}


def parse(text: str) -> Compressor:
    """Parse the notation of a compressor; the inverse of `repr`.

    Raises ValueError listing the known names if the text is not a compressor.

    >>> parse("ErrorFeedback(TopK(density=1))")
    ErrorFeedback(TopK(1.0))
    >>> parse("Quantize(4)") == Plain(CODECS["Quantize"](4))
    True
    """
    names: dict[str, type[Notation]] = {**CODECS, **COMPRESSORS}
    result = parse_notation(text, names, kind="compressor")
    if isinstance(result, Codec):
        return Plain(result)
    assert isinstance(result, Compressor)
    return result


__all__ = [
    "AQSGD",
    "COMPRESSORS",
    "AtSupport",
    "Compressor",
    "Context",
    "Decision",
    "Epilogue",
    "ErrorFeedback",
    "LazyErrorPropagation",
    "LinkEF21",
    "MixedErrorFeedback",
    "NoiseFeedback",
    "Plain",
    "State",
    "StepFacts",
    "WarmStart",
    "parse",
    "share_indices",
]
