"""Quantisation to a given error: the bound is chosen, and the bytes follow from the data."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raysim.codecs.bits import pack, packed_bytes, unpack
from raysim.codecs.layout import Layout, layout_of
from raysim.codecs.packet import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.codecs.sums import group_sums
from raysim.notation import check_choice, check_real

_BLOCK = 128  # values that share an offset and a width
_LIMIT = 1 << 30  # of codes; a block that exceeds it is sent as it is
_RAW = 255  # the width that says so


@dataclass(frozen=True, repr=False)
class ErrorBounded(Codec):
    """Rounds x to a multiple of 2e, so that no value is off by more than e: the bound of SZ (2016) with a block packing.

    e is `bound` itself (`relative="absolute"`), or a share of the tensor's "range" or of its "rms". Each 128 codes are sent as
    their least and the bits that the others need beyond it; a block whose codes pass 2^30 is sent as it is.

    >>> packet = ErrorBounded(0.1).encode(torch.linspace(0, 1, 6))
    >>> packet.decode(), packet.wire_bytes
    (tensor([0.0000, 0.2000, 0.4000, 0.6000, 0.8000, 1.0000]), 57)
    """

    bound: float
    relative: str = "absolute"

    def __post_init__(self) -> None:
        self._coerce(bound=check_real("bound", self.bound, 0, 1e30, open_low=True))
        check_choice("relative", self.relative, ["absolute", "range", "rms"])

    def _limit(self, x: Tensor, layout: Layout) -> float:
        """Return e."""
        if self.relative == "absolute" or not layout.numel:
            return self.bound
        if self.relative == "range":
            return self.bound * (float(x.amax()) - float(x.amin()))
        whole = layout_of((layout.numel,), "tensor", 0)
        return self.bound * math.sqrt(float(group_sums(x, whole, "squares")) / layout.numel)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        layout = layout_of(tuple(x.shape), "block", _BLOCK)
        step = np.array([2 * self._limit(x, layout)], dtype=np.float64).astype(np.float32)
        arrays = {"step": step.view(np.uint8)}
        if not layout.numel:
            return arrays
        blocks = layout.view(x).view(layout.groups, _BLOCK)
        wide = float(step[0])
        codes = (
            blocks.double().div(wide).round_() if 0 < wide < math.inf else torch.full_like(blocks, math.inf).double()
        )
        # a bound below what float32 can tell apart would send more than the value itself
        raw = ~(codes.abs() <= _LIMIT).all(dim=1)
        codes = torch.where(raw[:, None], 0.0, codes).long()
        offsets = codes.amin(dim=1)
        spans = codes.amax(dim=1) - offsets
        widths = torch.where(raw, _RAW, torch.frexp(spans.double()).exponent)
        arrays["widths"] = to_bytes(widths.to(torch.uint8))
        arrays["offsets"] = to_bytes(offsets[~raw].to(torch.int32))
        arrays["raw"] = to_bytes(blocks[raw])
        packed = [
            pack((codes - offsets[:, None])[widths == width].view(-1), int(width)) for width in self._used(widths)
        ]
        arrays["codes"] = to_bytes(torch.cat(packed)) if packed else np.empty(0, np.uint8)
        return arrays

    def _used(self, widths: Tensor) -> list[int]:
        """Return the widths in use, narrow ones first: codes of one width are packed together."""
        return [int(width) for width in np.unique(widths.cpu().numpy()) if 0 < width != _RAW]

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        layout = layout_of(packet.shape, "block", _BLOCK)
        dtype = DTYPES[packet.dtype]
        step = float(packet.bytes_of("step", 4).copy().view(np.float32)[0])
        if not layout.numel:
            return torch.empty(packet.shape, dtype=dtype, device=device)
        widths = to_tensor(packet.bytes_of("widths", layout.groups), torch.uint8, device).long()
        raw = widths == _RAW
        if (widths[~raw] > 31).any() or not (0 <= step < math.inf):
            raise ValueError(f"A packet of {self!r} holds widths or a step out of bounds.")
        kept = int((~raw).sum())
        values = torch.empty(layout.groups, _BLOCK, dtype=torch.float64, device=device)
        held = to_tensor(packet.bytes_of("raw", (layout.groups - kept) * _BLOCK * dtype.itemsize), dtype, device)
        if not torch.isfinite(held).all():
            raise ValueError(f"A packet of {self!r} holds values that are not finite.")
        offsets = to_tensor(packet.bytes_of("offsets", 4 * kept), torch.int32, device)
        codes = torch.zeros(layout.groups, _BLOCK, dtype=torch.int64, device=device)
        counts = {width: int((widths == width).sum()) * _BLOCK for width in self._used(widths)}
        total = sum(packed_bytes(count, width) for width, count in counts.items())
        data = to_tensor(packet.bytes_of("codes", total), torch.uint8, device)
        for width, count in counts.items():
            size = packed_bytes(count, width)
            codes[widths == width] = unpack(data[:size], count, width).view(-1, _BLOCK)
            data = data[size:]
        values[~raw] = (codes[~raw] + offsets[:, None].long()).double() * step
        values[raw] = held.view(-1, _BLOCK).double()
        return cast_saturating(layout.flat(values), dtype).view(packet.shape)
