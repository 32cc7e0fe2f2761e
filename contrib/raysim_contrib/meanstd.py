"""hivemind's 16-bit codec of normalised rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs.codec import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.groups import group_sums, layout_of
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_EPSILON = 2.0**-23  # of float32


@dataclass(frozen=True, repr=False)
class MeanStd(Codec):
    """Sends rows (along the last axis) in float16, less their mean and divided by their deviation.

    This is hivemind's `MEANSTD_16BIT`, used by Petals (2209.01188) and SWARM. The deviation is the root mean square of the
    centred row, at least the epsilon of float32. Mean and deviation are sent in float32: 2 bytes a value and 8 a row.

    Use: 16 bits for rows with scales too different for float16.

    >>> packet = MeanStd().encode(torch.tensor([[1e6, 1e6 + 2.0]]))  # too large for float16 alone
    >>> packet.decode(), packet.array_bytes
    (tensor([[1000000., 1000002.]]), 12)
    """

    variants: ClassVar[tuple[str, ...]] = ("MeanStd",)

    def array_names(self) -> tuple[str, ...]:
        return ("values", "means", "deviations")

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        layout = layout_of(tuple(x.shape), "row", 0)
        if not layout.numel:
            return {
                "values": np.empty(0, np.uint8),
                "means": np.empty(0, np.uint8),
                "deviations": np.empty(0, np.uint8),
            }
        rows = x.reshape(layout.groups, layout.inner)
        means = cast_saturating(group_sums(rows, layout, "sum") / layout.inner, torch.float32)
        means += 0.0  # -0.0 becomes 0.0
        centred = rows.double() - means.double()[:, None]
        squares = group_sums((centred / 2).float(), layout, "squares")  # halves stay within float32
        deviations = cast_saturating((4 * squares / layout.inner).sqrt().clamp_min(_EPSILON), torch.float32)
        values = cast_saturating((centred / deviations.double()[:, None]).float(), torch.float16)
        return {"values": to_bytes(values), "means": to_bytes(means), "deviations": to_bytes(deviations)}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        layout, dtype = layout_of(packet.shape, "row", 0), DTYPES[packet.dtype]
        values = to_tensor(packet.bytes_of("values", 2 * layout.numel), torch.float16, device)
        means, deviations = (packet.floats_of(name, layout.groups, device) for name in ("means", "deviations"))
        if not torch.isfinite(values).all():
            raise ValueError(f"A packet of {self!r} holds values that are not finite.")
        if not layout.numel:
            return torch.empty(packet.shape, dtype=dtype, device=device)
        rows = values.double().view(layout.groups, layout.inner) * deviations[:, None] + means[:, None]
        return cast_saturating(rows, dtype).view(packet.shape)
