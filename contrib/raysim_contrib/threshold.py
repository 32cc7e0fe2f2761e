"""Threshold: the values above a given magnitude."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.codecs import Codec, Identity
from raysim.codecs.codec import Key, check_finite, check_is_codec
from raysim.codecs.positions import select_at_least, select_with_values
from raysim.codecs.threshold import Counted
from raysim.notation import check_real
from raysim.on_demand import torch


@dataclass(frozen=True, repr=False)
class Threshold(Counted):
    """Keeps the values of magnitude `threshold` or more; if there is none, the largest.

    Use: Values whose scale is known in advance.

    >>> packet = Threshold(2.0).encode(torch.tensor([1.0, -2.0, 3.0, 0.0]))
    >>> packet.decode(), packet.array_bytes
    (tensor([ 0., -2.,  3.,  0.]), 17)
    """

    variants: ClassVar[tuple[str, ...]] = ("Threshold(0.5)",)

    threshold: float
    values: Codec = Identity()  # noqa: RUF009  a frozen codec

    def __post_init__(self) -> None:
        self._coerce(threshold=check_real("threshold", self.threshold, 0, 3e38, open_low=True))
        check_is_codec("values", self.values)

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        flat = x.contiguous().view(-1)
        positions, kept = select_at_least(flat, self.threshold)
        if not len(positions) and x.numel():
            positions, kept = select_with_values(flat.view(1, -1), 1)
        return self.arrays_of(positions, kept, x.numel(), key)
