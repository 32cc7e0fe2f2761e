"""ErrorBounded: multiples of twice an error bound, in blocks of few bits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from raysim.codecs.bits import pack, packed_bytes, unpack
from raysim.codecs.codec import DTYPES, Codec, Key, Packet, cast_float64, check_finite, to_bytes, to_tensor
from raysim.codecs.groups import Layout, layout_of, total
from raysim.notation import check_choice, check_real
from raysim.on_demand import torch

_BLOCK = 128  # values that share an offset and a width
_LIMIT = 1 << 30  # largest code; a block that exceeds it is sent uncompressed
_RAW = 255  # the width that marks such a block


@dataclass(frozen=True, repr=False)
class ErrorBounded(Codec):
    """Rounds x to a multiple of 2e, so that no value is off by more than e: the error bound of SZ (2016) with block packing.

    e is `bound` itself (`relative="absolute"`), or a share of the tensor's "range" or of its "rms". Each block of 128
    codes is sent as its minimum and the differences from it, in as few bits as the largest needs; a block with codes
    above 2^30 is sent uncompressed.

    Use: A guarantee on the error of each value.

    >>> packet = ErrorBounded(0.1).encode(torch.linspace(0, 1, 6))
    >>> packet.decode(), packet.array_bytes
    (tensor([0.0000, 0.2000, 0.4000, 0.6000, 0.8000, 1.0000]), 57)
    """

    variants: ClassVar[tuple[str, ...]] = ("ErrorBounded(0.1, relative='rms')",)
    size_varies: ClassVar[bool] = True

    bound: float
    relative: str = "absolute"

    def __post_init__(self) -> None:
        self._coerce(bound=check_real("bound", self.bound, 0, 1e30, open_low=True))
        check_choice("relative", self.relative, ["absolute", "range", "rms"])

    def _limit(self, x: torch.Tensor, layout: Layout) -> float:
        """Return e."""
        if self.relative == "absolute" or not layout.numel:
            return self.bound
        if self.relative == "range":
            return self.bound * (float(x.amax()) - float(x.amin()))
        return self.bound * math.sqrt(total(x, "squares") / layout.numel)

    def array_names(self) -> tuple[str, ...]:
        return ("step", "widths", "offsets", "raw", "codes")

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        layout = layout_of(tuple(x.shape), "block", _BLOCK)
        limit = min(
            2 * self._limit(x, layout), float(np.finfo(np.float32).max)
        )  # of float64: a smaller step keeps the bound
        step = np.array([limit], dtype=np.float64).astype(np.float32)
        arrays = {"step": step.view(np.uint8)}
        if not layout.numel:
            return arrays
        # with a bound below float32 precision, a code would be larger than the value itself
        scale = 1 / float(step[0]) if 0 < step[0] < math.inf else None
        blocks = layout.view(x).view(layout.groups, _BLOCK)
        codes = torch.full_like(blocks, math.inf).double() if scale is None else blocks.double().mul(scale).round_()
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

    def _used(self, widths: torch.Tensor) -> list[int]:
        """Return the widths in use, increasing; codes of equal width are packed together."""
        return [int(width) for width in np.unique(widths.cpu().numpy()) if 0 < width != _RAW]

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        layout = layout_of(packet.shape, "block", _BLOCK)
        dtype = DTYPES[packet.dtype]
        step = float(packet.bytes_of("step", 4).copy().view(np.float32)[0])
        if not layout.numel:
            return torch.empty(packet.shape, dtype=dtype, device=device)
        sent_widths = packet.bytes_of("widths", layout.groups)
        raw_blocks = sent_widths == _RAW
        if (sent_widths[~raw_blocks] > 31).any() or not (0 <= step < math.inf):
            raise ValueError(f"A packet of {self!r} holds widths or a step out of bounds.")
        kept = layout.groups - int(raw_blocks.sum())
        held = to_tensor(packet.bytes_of("raw", (layout.groups - kept) * _BLOCK * dtype.itemsize), dtype, device)
        if not torch.isfinite(held).all():
            raise ValueError(f"A packet of {self!r} holds values that are not finite.")
        sent_offsets = packet.bytes_of("offsets", 4 * kept)
        sizes = sent_widths[~raw_blocks].astype(np.int64) * (_BLOCK // 8)
        sent_codes = packet.bytes_of("codes", int(sizes.sum()))
        widths = to_tensor(sent_widths, torch.uint8, device).long()
        raw = widths == _RAW
        values = torch.empty(layout.groups, _BLOCK, dtype=torch.float64, device=device)
        codes = torch.zeros(layout.groups, _BLOCK, dtype=torch.int64, device=device)
        data_left = to_tensor(sent_codes, torch.uint8, device)
        for width in self._used(widths):
            count = int((widths == width).sum()) * _BLOCK
            size = packed_bytes(count, width)
            codes[widths == width] = unpack(data_left[:size], count, width).view(-1, _BLOCK)
            data_left = data_left[size:]
        from_least = to_tensor(sent_offsets, torch.int32, device)[:, None].double()
        values[~raw] = (codes[~raw].double() + from_least) * step
        values[raw] = held.view(-1, _BLOCK).double()
        return cast_float64(layout.flat(values), dtype).view(packet.shape)
