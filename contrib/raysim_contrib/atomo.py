"""ATOMO: a random choice of a matrix's singular triples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs.codec import (
    DTYPES,
    Codec,
    Key,
    Packet,
    cast_saturating,
    check_finite,
    integer_bytes,
    to_bytes,
    to_tensor,
)
from raysim.codecs.draws import uniform
from raysim.notation import check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


def keep_probabilities(sizes: Tensor, budget: float) -> Tensor:
    """Return the least-variance probabilities of keeping each atom, for `budget` kept atoms in expectation.

    `sizes`: singular values, decreasing. p = s l / sum(l). While a probability exceeds 1, the largest is set to 1 and the rest of
    the budget is redistributed.

    >>> keep_probabilities(torch.tensor([5.0, 2.0, 1.0, 0.5, 0.25, 0.25]), 2.0)
    tensor([1.0000, 0.5000, 0.2500, 0.1250, 0.0625, 0.0625], dtype=torch.float64)
    """
    sizes = sizes.double()
    kept = torch.zeros_like(sizes)
    first, left = 0, float(budget)
    while first < len(sizes) and left > 0:
        total = float(sizes[first:].sum())
        if total <= 0:
            break
        if left * float(sizes[first]) / total <= 1:
            kept[first:] = left * sizes[first:] / total
            break
        kept[first] = 1.0
        first, left = first + 1, left - 1
    return kept


@dataclass(frozen=True, repr=False)
class ATOMO(Codec):
    """Keeps singular triple i with probability p_i, as l_i/p_i u_i v_i^T (Wang et al. 2018, 1806.04090).

    Unbiased, with variance sum l^2 (1/p - 1). `budget`: the expected number of triples, see `keep_probabilities`. The matrix is
    (first axis, the rest). If `budget` atoms would not be smaller, the matrix is sent uncompressed. An atom takes 4 (n + m)
    bytes, since its size is multiplied into u.

    Use: An unbiased low-rank codec.

    >>> x = torch.outer(torch.arange(8.0), torch.arange(16.0))
    >>> packet = ATOMO(1).encode(x, key=1)  # of rank 1: the only atom is always kept
    >>> packet.array_bytes, torch.allclose(packet.decode(), x)
    (104, True)
    """

    variants: ClassVar[tuple[str, ...]] = ("ATOMO(3.0)",)
    size_varies: ClassVar[bool] = True

    budget: float

    def __post_init__(self) -> None:
        self._coerce(budget=check_real("budget", self.budget, 0, 1e6, open_low=True))

    @property
    def random(self) -> bool:
        return True

    @property
    def by_matrix(self) -> bool:
        return True

    def relative_variance(self, numel: int) -> float:
        return max(0.0, math.sqrt(numel) / self.budget - 1)  # a matrix has at most sqrt(numel) triples

    def _matrix(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Return rows and columns, or None if atoms would not make the tensor smaller."""
        if len(shape) < 2 or not math.prod(shape):
            return None
        rows, columns = shape[0], math.prod(shape[1:])
        return None if self.budget * (rows + columns) >= rows * columns else (rows, columns)

    def array_names(self) -> tuple[str, ...]:
        return ("values", "left", "right", "count")

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        matrix = self._matrix(tuple(x.shape))
        if matrix is None:
            return {"values": to_bytes(x)}
        left, sizes, right = torch.linalg.svd(x.reshape(matrix).double(), full_matrices=False)
        kept = keep_probabilities(sizes, self.budget)
        drawn = (uniform(key or 0, len(sizes), x.device) < kept).nonzero().view(-1)
        scaled = left[:, drawn] * (sizes[drawn] / kept[drawn])
        arrays = {
            "left": to_bytes(cast_saturating(scaled, torch.float32)),
            "right": to_bytes(right[drawn].to(torch.float32)),
        }
        return arrays | {"count": integer_bytes(len(drawn))}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        matrix, dtype = self._matrix(packet.shape), DTYPES[packet.dtype]
        if matrix is None:
            return to_tensor(packet.bytes_of("values", packet.dense_bytes), dtype, device).view(packet.shape)
        rows, columns = matrix
        count = packet.integer_of("count")
        if not 0 <= count <= min(rows, columns):
            raise ValueError(f"A packet of {self!r} holds {count} atoms of a matrix of {rows} by {columns}.")
        left = packet.floats_of("left", rows * count, device).view(rows, count)
        right = packet.floats_of("right", columns * count, device).view(count, columns)
        return cast_saturating(left @ right, dtype).view(packet.shape)
