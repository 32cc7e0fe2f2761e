"""Low rank: send a matrix as the product of two thin ones.

Products and norms are summed in float64 in a fixed order, so that kernel and reference agree bit for bit: a dot product in 16 lanes,
each in order, then pairwise over the lanes; everything else in order. On a GPU torch sums instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.codec import (
    DTYPES,
    Codec,
    Key,
    Packet,
    cast_saturating,
    check_finite,
    dtype_name,
    to_bytes,
    to_tensor,
)
from raysim.codecs.draws import uniform
from raysim.notation import check_choice, check_integer
from raysim.on_demand import torch

_LANES = 16
_LEAST = 1e-12  # share of a column's norm below which its remainder counts as rounding error


def orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Orthonormalise `columns` (number, rows, rank), float64.

    Gram-Schmidt, applied twice. A column in the span of earlier columns becomes zero.

    >>> orthonormal(torch.tensor([[[3.0, 0.0], [4.0, 5.0]]]))
    tensor([[[ 0.6000, -0.8000],
             [ 0.8000,  0.6000]]], dtype=torch.float64)
    """
    turned = columns.detach().double().transpose(1, 2).clone(memory_format=torch.contiguous_format)
    if not turned.numel():
        return turned.transpose(1, 2)
    if orthonormalise := kernels.find_on("linear.orthonormalise", turned.device):
        orthonormalise(turned.numpy(), _LEAST)
        return turned.transpose(1, 2)
    for k in range(turned.shape[1]):
        column = turned[:, k]
        before = _norm(column)
        for _ in range(2):
            for j in range(k):
                column += -_dot(turned[:, j], column)[:, None] * turned[:, j]
        norm = _norm(column)
        column *= torch.where(norm > _LEAST * before, 1.0 / norm, 0.0)[:, None]
    return turned.transpose(1, 2)


def check_rank(rank: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError if `rank` exceeds the rank of every weight as a matrix (first axis, the rest)."""
    sides = {name: min(shape[0], math.prod(shape[1:])) for name, shape in shapes.items()}
    if sides and rank > max(sides.values()):
        widest = max(sides, key=lambda name: sides[name])
        raise ValueError(
            f"`rank` must be at most {sides[widest]}, the rank of the largest matrix of the stage ({widest}), but got {rank}."
        )


@dataclass(frozen=True, repr=False)
class LowRank(Codec):
    """Sends P = orth(M Q) and M^T P, decoded to P P^T M: one step of PowerSGD's subspace iteration (Vogels et al. 2019,
    1905.13727), with Q drawn from the key.

    M is the `tensor`, with the last axis of text (samples x length, width) or the channels of images (samples x height x width,
    channels) as columns, or each `sample` as (second axis, the rest). A tensor is dense if two thin matrices would not be smaller.
    Exact if the rank of M is at most `rank`. Computed in float64, sent in float32. `WarmStart` takes Q from the previous message.

    >>> x = torch.outer(torch.arange(8.0), torch.arange(16.0))
    >>> packet = LowRank(1).encode(x, key=1)
    >>> packet.array_bytes, torch.allclose(packet.decode(), x)
    (96, True)
    """

    rank: int
    per: str = "tensor"

    def __post_init__(self) -> None:
        self._coerce(rank=check_integer("rank", self.rank, 1))
        check_choice("per", self.per, ["tensor", "sample"])

    @property
    def random(self) -> bool:
        return True

    @property
    def by_matrix(self) -> bool:
        return True

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        check_rank(self.rank, shapes)

    def rehearsed(self) -> tuple[Codec, ...]:
        return (replace(self, rank=1),)  # a higher rank would send a small tensor uncompressed

    def matrices(self, shape: tuple[int, ...]) -> tuple[int, int, int, int] | None:
        """Return number, rows, columns and rank of the matrices; None if they would not be smaller than the tensor."""
        if len(shape) < (3 if self.per == "sample" else 2) or not math.prod(shape):
            return None
        if self.per == "sample":
            number, rows, columns = shape[0], shape[1], math.prod(shape[2:])
        else:
            columns = shape[1] if self._by_channel(shape) else shape[-1]
            number, rows = 1, math.prod(shape) // columns
        rank = min(rows, columns, self.rank)
        return None if rank * (rows + columns) >= rows * columns else (number, rows, columns, rank)

    def _by_channel(self, shape: tuple[int, ...]) -> bool:
        return self.per == "tensor" and len(shape) > 3

    def start(self, key: Key, columns: int, rank: int, device: torch.device | str = "cpu") -> torch.Tensor:
        """Return the Q of a key, (1, columns, rank) float64, uniform in -1..1, which works as well as a normal distribution."""
        return uniform(key, columns * rank, device).view(1, rank, columns).mul_(2).sub_(1).transpose(1, 2)

    def encode_from(self, x: torch.Tensor, start: torch.Tensor) -> tuple[Packet, torch.Tensor]:
        """Return the packet of `x` with Q = `start`, (number or 1, columns, rank) float64, and the sent M^T P.

        Raises NonFiniteError if `x` contains NaN or infinity. `matrices` of its shape must not be None.
        """
        check_finite(x)
        matrices = self.matrices(tuple(x.shape))
        assert matrices is not None
        m = (x.detach().movedim(1, -1) if self._by_channel(tuple(x.shape)) else x.detach()).reshape(matrices[:3])
        left = orthonormal(_times(m, start)).float()
        right = cast_saturating(_transposed_times(m, left), torch.float32)
        packet = Packet(self, {"left": to_bytes(left), "right": to_bytes(right)}, tuple(x.shape), dtype_name(x))
        return packet, right

    def array_names(self) -> tuple[str, ...]:
        return ("values", "left", "right")

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        matrices = self.matrices(tuple(x.shape))
        if matrices is None:
            check_finite(x)
            return {"values": to_bytes(x)}
        return self.encode_from(x, self.start(key or 0, *matrices[2:], x.device))[0].arrays

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        matrices, dtype = self.matrices(packet.shape), DTYPES[packet.dtype]
        if matrices is None:
            return to_tensor(packet.bytes_of("values", packet.dense_bytes), dtype, device).view(packet.shape)
        number, rows, columns, rank = matrices
        left = packet.floats_of("left", number * rows * rank, device).view(number, rows, rank)
        right = packet.floats_of("right", number * columns * rank, device).view(number, columns, rank)
        x = cast_saturating(_product(left, right, dtype), dtype)
        if self._by_channel(packet.shape):
            samples, channels, *spots = packet.shape
            return x.view(samples, *spots, channels).movedim(-1, 1).contiguous()
        return x.view(packet.shape)


def _ordered(x: torch.Tensor) -> bool:
    """Return whether sums over `x` are in the stated order; those on a GPU stay there, in its library's order."""
    return x.device.type == "cpu"


def _times(m: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """Return M Q, (number, rows, rank) float64."""
    if times := kernels.find("linear.times", m):
        out = np.empty((len(m), start.shape[2], m.shape[1]))
        times(m.contiguous().float().numpy(), start.transpose(1, 2).contiguous().numpy(), out)
        return torch.from_numpy(out).transpose(1, 2)
    if not _ordered(m):
        return m.double() @ start
    return torch.stack([_dot(m.double(), start[:, None, :, k]) for k in range(start.shape[2])], dim=2)


def _transposed_times(m: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Return M^T P, (number, columns, rank) float64."""
    if times := kernels.find("linear.transposed_times", m):
        out = np.empty((len(m), left.shape[2], m.shape[2]))
        times(m.contiguous().float().numpy(), left.double().transpose(1, 2).contiguous().numpy(), out)
        return torch.from_numpy(out).transpose(1, 2)
    return _in_order(m.double().transpose(1, 2), left.double())


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return P R^T, (number, rows, columns), in float64 if `dtype` is float64, else float32."""
    if kernel := kernels.find_on("linear.product", left.device, dtype=dtype):
        shape = (len(left), left.shape[1], right.shape[1])
        out = kernels.empty(math.prod(shape), np.float32).reshape(shape)
        kernel(left.numpy(), right.transpose(1, 2).contiguous().numpy(), out)
        return torch.from_numpy(out)
    total = _in_order(left, right.transpose(1, 2))
    return total if dtype == torch.float64 else cast_saturating(total, torch.float32)


def _in_order(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b in float64; on the CPU, the terms of each sum are added in order."""
    if not _ordered(a):
        return a @ b
    total = torch.zeros(len(a), a.shape[1], b.shape[2], dtype=torch.float64)
    for k in range(a.shape[2]):
        total += a[:, :, k, None] * b[:, k, None, :]
    return total


def _norm(columns: torch.Tensor) -> torch.Tensor:
    squares = _dot(columns, columns)
    if not _ordered(squares):
        return squares.sqrt()
    return torch.from_numpy(np.sqrt(squares.numpy()))  # torch's sqrt is sometimes off in the last bit


def _dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the sums of a * b over the last axis, float64, in the order stated in the module docstring."""
    products = a * b
    if not _ordered(products):
        return products.sum(-1)
    count = products.shape[-1]
    padded = torch.nn.functional.pad(products, (0, -count % _LANES))
    lanes = padded.view(*padded.shape[:-1], -1, _LANES).movedim(-2, 1)
    sums = torch.from_numpy(np.add.accumulate(lanes.numpy(), axis=1)[:, -1] + 0.0)
    width = _LANES
    while width > 1:
        width //= 2
        sums = sums[..., :width] + sums[..., width:]
    return sums[..., 0] + 0.0
