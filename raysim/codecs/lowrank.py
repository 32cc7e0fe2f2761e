"""Low rank: a matrix sent as the product of two thin ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raysim.codecs.packet import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.random import uniform
from raysim.codecs.signs import read_floats
from raysim.notation import check_choice, check_integer


@dataclass(frozen=True, repr=False)
class LowRank(Codec):
    """Sends P = orth(M Q) and M^T P, decoded to P P^T M: one step of PowerSGD's subspace iteration (Vogels et al. 2019,
    1905.13727), with Q drawn from the key.

    M is the `tensor` as (first axis, the rest), or each `sample` as (second axis, the rest): (length, width) of activations.
    What two thin matrices would not make smaller is sent as it is. Exact where the rank of M is at most `rank`. Computed in
    float64, P by QR; both are sent in float32.

    >>> x = torch.outer(torch.arange(8.0), torch.arange(16.0))
    >>> packet = LowRank(1).encode(x, key=1)
    >>> packet.wire_bytes, torch.allclose(packet.decode(), x)
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

    def _matrices(self, shape: tuple[int, ...]) -> tuple[int, int, int, int] | None:
        """Return number, rows, columns and rank of the matrices, or None where they would not make it smaller."""
        lead = 1 if self.per == "sample" else 0
        if len(shape) < 2 + lead or not math.prod(shape):
            return None
        rows, columns = shape[lead], math.prod(shape[lead + 1 :])
        rank = min(rows, columns, self.rank)
        return None if rank * (rows + columns) >= rows * columns else (math.prod(shape[:lead]), rows, columns, rank)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        matrices = self._matrices(tuple(x.shape))
        if matrices is None:
            return {"values": to_bytes(x)}
        number, rows, columns, rank = matrices
        m = x.reshape(number, rows, columns).double()
        left = torch.linalg.qr(m @ self._start(key or 0, columns, rank, x.device)).Q.float()
        right = cast_saturating(m.transpose(1, 2) @ left.double(), torch.float32)
        return {"left": to_bytes(left), "right": to_bytes(right)}

    def _start(self, key: Key, columns: int, rank: int, device: torch.device) -> Tensor:
        """Return Q, standard normal (Box and Muller)."""
        draws = uniform(key, 2 * columns * rank, device).view(2, columns, rank)
        return (-2 * (1 - draws[0]).log()).sqrt_() * (2 * math.pi * draws[1]).cos_()

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        matrices, dtype = self._matrices(packet.shape), DTYPES[packet.dtype]
        if matrices is None:
            return to_tensor(packet.bytes_of("values", packet.dense_bytes), dtype, device).view(packet.shape)
        number, rows, columns, rank = matrices
        left = read_floats(packet, "left", number * rows * rank, device).view(number, rows, rank)
        right = read_floats(packet, "right", number * columns * rank, device).view(number, columns, rank)
        return cast_saturating(left @ right.transpose(1, 2), dtype).view(packet.shape)
