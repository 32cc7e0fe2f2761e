"""The one list of codec variants, and the tensors over which the laws of codecs run.

A codec that is in `CODECS` but not here fails a test; what is said of a variant here is what the laws hold it to.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from raysim.codecs import CODECS, Codec
from raysim.codecs.draws import bits64, uniform
from raysim.notation import parse_notation

KEY = 20260  # of the random codecs, wherever a test does not vary it

Shape = tuple[int, ...]


def numel(shape: Shape) -> int:
    return math.prod(shape)


def samples(shape: Shape) -> int:
    return (shape[0] if shape else 1) if numel(shape) else 0


def kept(density: float, shape: Shape, per: str = "sample") -> int:
    """Values that TopK keeps: the formula, written again."""
    if not numel(shape):
        return 0
    rows = shape[0] if per == "sample" and shape else 1
    return rows * max(1, math.ceil(density * (numel(shape) // rows) - 1e-6))


def packed(count: int, bits: int) -> int:
    return math.ceil(count * bits / 8)


@dataclass(frozen=True)
class Variant:
    notation: str
    array_bytes: Callable[[Shape, int], int] | None = (
        None  # from shape and itemsize; None where bytes depend on the data
    )
    lossless: bool = False
    zero: bool = True  # C(0) = 0
    scales: bool = False  # C(2^j x) = 2^j C(x)
    odd: bool = False  # C(-x) = -C(x)
    idempotent: bool = False  # C(C(x)) = C(x), bit for bit
    unbiased: bool = False  # mean over keys is x
    any_shape: bool = True  # False where only tensors of at least two dimensions are carried

    @property
    def codec(self) -> Codec:
        return parse_notation(self.notation, CODECS)


def minmax(bits: int, groups: Callable[[Shape], int] = lambda shape: 1) -> Callable[[Shape, int], int]:
    return lambda shape, itemsize: packed(numel(shape), bits) + (8 * groups(shape) if numel(shape) else 0)


def absmax(bits: int, groups: Callable[[Shape], int] = lambda shape: 1) -> Callable[[Shape, int], int]:
    return lambda shape, itemsize: packed(numel(shape), bits) + (4 * groups(shape) if numel(shape) else 0)


def topk(density: float, index_bytes: Callable[[int, int], int]) -> Callable[[Shape, int], int]:
    """Values and index; no index where everything is kept."""

    def array_bytes(shape: Shape, itemsize: int) -> int:
        count = kept(density, shape)
        return count * itemsize + (index_bytes(count, numel(shape)) if count < numel(shape) else 0)

    return array_bytes


def channels(shape: Shape) -> int:
    return 1 if not shape else shape[2] if len(shape) == 3 else shape[min(1, len(shape) - 1)]


def rows(shape: Shape) -> int:
    return numel(shape) // shape[-1] if shape else 1


def blocks(size: int) -> Callable[[Shape], int]:
    return lambda shape: math.ceil(numel(shape) / size)


def rotated(bits: int, most: int) -> Callable[[Shape, int], int]:
    """Codes and a scale for each row, kept values, all their positions, and the center of many rows."""

    def array_bytes(shape: Shape, itemsize: int) -> int:
        if not numel(shape):
            return 0
        width = shape[-1] if shape else 1
        count = rows(shape) * min(most, width // 8)
        center = 2 * width * (rows(shape) >= 64)
        return rows(shape) * (packed(width, bits) + 2) + 2 * count + packed(count, (width - 1).bit_length()) + center

    return array_bytes


def random_k(density: float) -> Callable[[Shape, int], int]:
    return lambda shape, itemsize: kept(density, shape) * itemsize + 8


def matrix_axes(shape: Shape) -> tuple[Shape, Shape]:
    """The axes that are rows and columns: (first, the rest), (samples and length, width), (samples and space, channels)."""
    if len(shape) < 3:
        return shape[:1], shape[1:]
    return (shape[:2], shape[2:]) if len(shape) == 3 else ((shape[0], *shape[2:]), shape[1:2])


def low_rank(rank: int, left: Shape, right: Shape, matrices: int, itemsize: int) -> int:
    """Two thin matrices in float32, or the values where those would be as many."""
    rows, columns, dense = numel(left), numel(right), matrices * numel(left) * numel(right)
    if not left or not right or not dense:
        return itemsize * dense
    thin = min(rank, rows, columns) * (rows + columns)
    return itemsize * dense if thin >= rows * columns else 4 * matrices * thin


VARIANTS = [
    Variant("Identity", lambda s, v: v * numel(s), lossless=True, scales=True, odd=True, idempotent=True),
    Variant("Cast('bfloat16')", lambda s, v: 2 * numel(s), odd=True, idempotent=True),
    Variant("Cast('float16')", lambda s, v: 2 * numel(s), odd=True, idempotent=True),
    *(Variant(f"Quantize({bits})", minmax(bits), scales=True) for bits in range(1, 9)),
    *(Variant(f"Quantize({bits}, range='absmax')", absmax(bits), scales=True, odd=True) for bits in range(2, 9)),
    Variant("Quantize(4, per='sample')", minmax(4, samples), scales=True),
    Variant("Quantize(5, per='channel')", minmax(5, channels), scales=True),
    Variant("Quantize(8, range='absmax', per='channel')", absmax(8, channels), scales=True, odd=True),
    Variant("Quantize(2, rounding='stochastic')", minmax(2), scales=True, unbiased=True),
    Variant(
        "Quantize(4, range='absmax', per='sample', rounding='stochastic')",
        absmax(4, samples),
        scales=True,
        unbiased=True,
    ),
    Variant("Quantize(8, range='absmax', per='block')", absmax(8, blocks(4096)), scales=True, odd=True),
    Variant("Quantize(4, per='block', block=64)", minmax(4, blocks(64)), scales=True),
    Variant("Quantize(6, per='row')", minmax(6, rows), scales=True),
    Variant("TopK(1.0)", lambda s, v: v * numel(s), lossless=True, scales=True, odd=True, idempotent=True),
    Variant(
        "TopK(0.5, index='bitmap')",
        topk(0.5, lambda count, total: packed(total, 1)),
        scales=True,
        odd=True,
        idempotent=True,
    ),
    Variant(
        "TopK(0.1, index='int32')", topk(0.1, lambda count, total: 4 * count), scales=True, odd=True, idempotent=True
    ),
    Variant("TopK(0.1)", scales=True, odd=True, idempotent=True),
    Variant("TopK(0.3, index='elias_fano')", scales=True, odd=True, idempotent=True),
    Variant("TopK(0.01, per='tensor')", scales=True, odd=True, idempotent=True),
    Variant("TopK(0.1, values=Quantize(4))", scales=True),
    Variant("TopK(0.2, values=Cast('bfloat16'))", odd=True, idempotent=True),
    Variant("Nonzero", lossless=True, scales=True, odd=True, idempotent=True),
    Variant("Nonzero(values=Quantize(8))", scales=True),
    Variant("RandomK(0.25)", random_k(0.25), scales=True, odd=True, idempotent=True),
    Variant("RandomK(0.1, unbiased=True)", random_k(0.1), scales=True, odd=True, unbiased=True),
    Variant("RandomK(0.5, per='tensor', values=Quantize(4))"),
    *(
        Variant(f"EstimatedTopK(0.1, {policy!r})", odd=True)
        for policy in ("sampled", "bisect", "gaussian", "exponential")
    ),
    Variant("Mean", lambda s, v: 4 * bool(numel(s)), scales=True, odd=True),
    Variant("QSGD(4)", absmax(4, blocks(128)), scales=True, unbiased=True),
    Variant("QSGD(8, block=512)", absmax(8, blocks(512)), scales=True, unbiased=True),
    Variant("MX('e2m1')", lambda s, v: packed(numel(s), 4) + blocks(32)(s), scales=True, odd=True, idempotent=True),
    Variant("MX('e4m3')", lambda s, v: numel(s) + blocks(32)(s), scales=True, odd=True, idempotent=True),
    Variant("MX('e5m2', block=16)", lambda s, v: numel(s) + blocks(16)(s), scales=True, odd=True, idempotent=True),
    Variant("NonUniform(3)", lambda s, v: packed(numel(s), 3) + 32 * bool(numel(s)), scales=True),
    Variant("NonUniform(8, fit='quantile')", lambda s, v: numel(s) + 1024 * bool(numel(s)), scales=True),
    Variant("NonUniform(4, fit='deviation')", lambda s, v: packed(numel(s), 4) + 64 * bool(numel(s)), scales=True),
    Variant("Rotated(4)", rotated(4, 7), scales=True),
    Variant("Rotated(2, kept=0)", rotated(2, 0), scales=True),
    Variant("Rotated(3, kept=2)", rotated(3, 2), scales=True),
    Variant("Rotated(5, kept=100)", rotated(5, 100), scales=True),
    Variant("LowRank(2)", lambda s, v: low_rank(2, *matrix_axes(s), 1, v)),
    Variant("LowRank(1, per='sample')", lambda s, v: low_rank(1, s[1:2], s[2:], s[0] if s else 1, v)),
    Variant("Hadamard(Quantize(4))", scales=True),
    Variant("Hadamard(Quantize(3, per='sample'), tile=16)", scales=True),
]


def normal(*shape: int, seed: int = 1) -> Tensor:
    """Values near to normal (the sum of twelve uniforms), the same with every version of every library."""
    draws = uniform(seed, 12 * numel(shape)).view(12, *shape)
    return (draws.sum(dim=0) - 6).float()


def student(*shape: int, seed: int = 2) -> Tensor:
    """Values with the heavy tail of Student's t with three degrees of freedom, nearly."""
    chi = sum(normal(*shape, seed=seed + n).square() for n in range(3))
    return normal(*shape, seed=seed + 9) / (chi / 3).sqrt().clamp_min(1e-3)  # type: ignore[union-attr]


def outlier() -> Tensor:
    x = normal(4, 64)
    x[2, 5] = 1e6
    return x


LAW_TENSORS: dict[str, Tensor] = {
    "zeros": torch.zeros(3, 7),
    "one element": torch.tensor([[-2.5]]),
    "scalar": torch.tensor(1.5),
    "empty": torch.empty(0, 5),
    "empty rows": torch.empty(4, 0),
    "constant": torch.full((2, 3, 5), 0.1),
    "negative constant": torch.full((9,), -3.7),
    "outlier": outlier(),
    "tiny": normal(2, 50) * 1e-7,
    "post-ReLU": normal(4, 6, 5, 5).relu(),
    "normal": normal(5, 37),
    "long": normal(2, 5000),
    "short rows": normal(100, 3),
    "images": normal(3, 8, 4, 4),
    "tokens": normal(2, 9, 16),
    "heavy tail": student(4, 129),
    "ties": (normal(4, 40).mul(2).round() / 2),
    "all ties": torch.tensor([[1.0, -1.0, 1.0, 1.0], [2.0, 2.0, -2.0, -2.0]]),
    "non-contiguous": normal(12, 10).T[::2],
    "transposed": normal(4, 6, 8).transpose(0, 2),
    "bfloat16": normal(3, 50).bfloat16(),
    "float16": normal(3, 50).half(),
    "float64": normal(3, 50).double() / 3,
    "huge": torch.tensor([[3e38, -3e38, 1.0, 0.0], [-3.4e38, 3.4e38, 2e38, 1e-38]]),
    "huge float16": torch.tensor([[65504.0, -65504.0, 1.0, 6e-8]]).half(),
    "denormals": torch.tensor([[1e-45, -1e-45, 3e-42, 0.0, -2e-39, 1e-38]]),
    "least denormals": torch.tensor([[1e-45, 0.0, -1e-45, 1e-45]]),
    "negative zero": torch.tensor([[-0.0, 0.0, -0.0, 1.0, -1.0, -0.0]]),
    "only negative zero": torch.full((2, 4), -0.0),
    "mixed signs of infinity's neighbour": torch.tensor([torch.finfo(torch.float32).max, -1.0, 0.0]),
    "bits": (bits64(3, 600) & 7).view(6, 100).float(),
}
