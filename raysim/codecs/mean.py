"""The mean of a tensor in place of its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs.base import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes
from raysim.codecs.layout import layout_of
from raysim.codecs.signs import read_floats
from raysim.codecs.sums import group_sums
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class Mean(Codec):
    """Sends the mean of all values, in 4 bytes: for the values of a sparse codec that are of one sign (RedSync).

    >>> Mean().encode(torch.tensor([1.0, 2.0, 6.0])).decode()
    tensor([3., 3., 3.])
    """

    def array_names(self) -> tuple[str, ...]:
        return ("mean",)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        if not x.numel():
            return {"mean": np.empty(0, np.uint8)}
        total = group_sums(x, layout_of((x.numel(),), "tensor", 0), "sum")
        # adding zero makes a zero positive, whichever zeros were summed
        return {"mean": to_bytes(cast_saturating(total / x.numel() + 0.0, torch.float32))}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        mean = read_floats(packet, "mean", 1 if packet.numel else 0, device)
        return cast_saturating(mean, DTYPES[packet.dtype]).expand(packet.numel).reshape(packet.shape)
