"""Compiles the kernels of codecs before a step is timed."""

from __future__ import annotations

from collections.abc import Iterable

from raysim.codecs.base import Codec
from raysim.codecs.quantize import Quantize
from raysim.codecs.sparse import Nonzero, TopK
from raysim.on_demand import torch

_ALWAYS: tuple[Codec, ...] = (
    TopK(0.5, index="bitmap"),
    TopK(0.5, index="elias_fano", values=Quantize(4)),
    Quantize(3, per="channel", rounding="stochastic"),
    Nonzero(),
)


def warm(codecs: Iterable[Codec] = ()) -> None:
    """Compile the kernels of TopK, Quantize and `codecs` for every dtype that they serve.

    Kernels that an earlier process compiled are loaded from disk, which takes a fraction of a second.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.linspace(-1, 1, 192).view(4, 6, 8).to(dtype)
        for codec in (*_ALWAYS, *(codec.rehearsed() for codec in codecs)):
            codec.encode_with_residual(x.clone(), dtype, key=1, memory=torch.zeros(x.shape))
            packet, _ = codec.encode_with_residual(x.float(), dtype, key=1)
            packet.decode()
