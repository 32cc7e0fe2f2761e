"""Random sparsification at positions that both ends draw from one key, so that no index is sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs.codec import (
    Codec,
    Key,
    Packet,
    Support,
    cast_saturating,
    check_codec,
    check_finite,
    integer_bytes,
    nest,
    nested_names,
)
from raysim.codecs.draws import ranks
from raysim.codecs.floats import Identity
from raysim.codecs.positions import scatter
from raysim.codecs.selection import kept_of, select_topk
from raysim.notation import check_choice, check_flag, check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class RandomK(Codec):
    """Keeps the share `density` of values at random positions, drawn from each key without replacement (Stich et al. 2018,
    1809.07599).

    The packet carries the key in 8 bytes in place of indices. Positions are drawn within each `sample`, or the whole `tensor`.
    C contracts, as error feedback requires: E||x - C(x)||^2 = (1 - k/n)||x||^2. `unbiased=True` multiplies by n/k, so that the
    mean over keys is x, with variance (n/k - 1)||x||^2; residuals of error feedback would then grow without bound.

    >>> packet = RandomK(0.25).encode(torch.arange(1.0, 9.0).view(2, 4), key=3)
    >>> packet.decode().count_nonzero(dim=1), packet.array_bytes
    (tensor([1, 1]), 16)
    """

    selects: ClassVar[bool] = True

    density: float
    per: str = "sample"
    values: Codec = Identity()  # noqa: RUF009  a frozen codec
    unbiased: bool = False

    def __post_init__(self) -> None:
        self._coerce(density=check_real("density", self.density, 0, 1, open_low=True))
        check_choice("per", self.per, ["sample", "tensor"])
        check_codec("values", self.values)
        check_flag("unbiased", self.unbiased)

    @property
    def random(self) -> bool:
        return True

    @property
    def linear(self) -> bool:
        return self.values == Identity()

    @property
    def kept_share(self) -> float:
        return self.density

    def relative_variance(self, numel: int) -> float | None:
        if not self.unbiased or self.values != Identity():
            return None
        return numel / kept_of(self.density, numel) - 1

    def check_feedback(self) -> None:
        if self.unbiased and self.density < 0.5:
            raise ValueError(
                "`density` of an unbiased RandomK under a memory must be at least 0.5, or the residual grows without "
                f"bound, but got {self.density}. Leave `unbiased` out."
            )

    def _rows(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return the number of rows that are drawn from separately, their length, and how many values each keeps."""
        rows = 1 if self.per == "tensor" or not shape else shape[0]
        length = math.prod(shape) // max(1, rows)
        return rows, length, kept_of(self.density, length) if rows * length else 0

    def draw(self, key: Key, shape: tuple[int, ...], device: torch.device | str) -> Tensor:
        """Return the flat positions kept under a key; positions of a lower density are a subset of those of a higher density."""
        rows, length, kept = self._rows(shape)
        # the greatest of random numbers are a uniform subset; of equal ones the first is kept
        return select_topk(ranks(key, rows * length, device).view(rows, length), kept)

    def array_names(self) -> tuple[str, ...]:
        return (*nested_names("values", self.values), "key")

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        rows, _, kept = self._rows(tuple(x.shape))
        values = x.reshape(-1)[self.draw(key or 0, tuple(x.shape), x.device)].view(rows, kept)
        drawn = integer_bytes(key or 0)
        return dict(nest("values", self.values.encode(values, key)), key=drawn)

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        rows, length, kept = self._rows(packet.shape)
        key = packet.integer_of("key")
        values = packet.part("values", self.values, (rows, kept)).decode(device).reshape(-1)
        if self.unbiased and kept:
            values = cast_saturating(values.double() * (length / kept), values.dtype)
        return scatter(self.draw(key, packet.shape, device), values, packet.numel).view(packet.shape)

    def support(self, packet: Packet, device: torch.device | str = "cpu") -> Support:
        rows, _, kept = self._rows(packet.shape)
        key = packet.integer_of("key")
        return Support(self.draw(key, packet.shape, device).view(rows, kept), packet.shape)
