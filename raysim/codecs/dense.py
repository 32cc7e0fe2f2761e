"""Codecs that send every value in a floating-point format: Identity and Cast."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs.base import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.notation import check_choice
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class Identity(Codec):
    """Sends a tensor as it is: the dense baseline.

    >>> Identity().encode(torch.ones(2, 3)).array_bytes
    24
    """

    copies: ClassVar[bool] = True

    def relative_variance(self, numel: int) -> float:
        return 0.0

    def array_names(self) -> tuple[str, ...]:
        return ("values",)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        return {"values": to_bytes(x)}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        data = packet.bytes_of("values", packet.dense_bytes)
        return to_tensor(data, DTYPES[packet.dtype], device).view(packet.shape)


@dataclass(frozen=True, repr=False)
class Cast(Codec):
    """Sends a tensor in 16 bits: `Cast("bfloat16")` or `Cast("float16")`, rounded to nearest even.

    float16 saturates at 65504, so that a finite tensor stays finite.

    >>> Cast("float16").encode(torch.tensor([1.0, 1e6])).decode()
    tensor([1.0000e+00, 6.5504e+04])
    """

    target: str

    def __post_init__(self) -> None:
        check_choice("target", self.target, ["bfloat16", "float16"])

    def array_names(self) -> tuple[str, ...]:
        return ("values",)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        return {"values": to_bytes(cast_saturating(x, DTYPES[self.target]))}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        dtype = DTYPES[self.target]
        data = packet.bytes_of("values", packet.numel * dtype.itemsize)
        return cast_saturating(to_tensor(data, dtype, device), DTYPES[packet.dtype]).view(packet.shape)
