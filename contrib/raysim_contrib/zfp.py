"""ZFP in its fixed-accuracy mode, with a given tolerance and bytes that depend on the data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.codec import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.notation import check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class ZFP(Codec):
    """Sends transformed blocks of 4 x 4 values, cut at a bit plane, with errors of at most `tolerance` (Lindstrom 2014, ZFP's
    fixed-accuracy mode).

    Blocks lie in the last two axes. Their values get a common exponent, go through ZFP's integer transform, and are written in
    negabinary, bit plane by bit plane, with ZFP's group tests. A block below the tolerance takes one bit. If the tolerance is finer
    than the dtype's resolution, a block is sent unchanged. For float32 the stream equals zfp's, except for such blocks.

    Use: Smooth images; otherwise `ErrorBounded` is smaller and faster.

    >>> x = torch.linspace(0, 1, 64).view(8, 8)
    >>> packet = ZFP(0.01).encode(x)
    >>> packet.array_bytes, bool((packet.decode() - x).abs().max() <= 0.01)
    (28, True)
    """

    variants: ClassVar[tuple[str, ...]] = ("ZFP(0.01)",)
    size_varies: ClassVar[bool] = True

    tolerance: float

    def __post_init__(self) -> None:
        self._coerce(tolerance=check_real("tolerance", self.tolerance, 0, 1e30, open_low=True))

    def array_names(self) -> tuple[str, ...]:
        return ("stream", "raw")

    def settings(self, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
        """Return the tolerance's exponent, the least exponent of a block, the most planes, and the exponents' bias and bits."""
        minexp = math.frexp(self.tolerance)[1] - 1
        digits = 1 - math.frexp(torch.finfo(dtype).eps)[1] + 1
        least = math.frexp(torch.finfo(dtype).tiny)[1]
        # half a unit in the last place and the truncation of planes together stay within the tolerance
        wide = dtype == torch.float64
        return minexp, least, min(digits + 5, 30), *((1023, 11) if wide else (127, 8))

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        from raysim_contrib.zfp_kernel import encode

        check_finite(x)
        if not x.numel():
            return {"stream": np.empty(0, np.uint8), "raw": np.empty(0, np.uint8)}
        planes = x.detach().cpu().reshape(_planes_shape(tuple(x.shape)))
        count = _num_blocks(tuple(planes.shape))
        raw = np.zeros(count, np.uint8)
        words = kernels.empty(count * 20 + 2, np.uint32)
        wide = planes if x.dtype in (torch.float32, torch.float64) else planes.float()
        bits = encode(kernels.opened(wide.contiguous().numpy()), *self.settings(x.dtype), words, raw)
        stream = words.view(np.uint8)[: -(-bits // 8)].copy()
        held = blocks_of(planes)[torch.from_numpy(raw > 0)] if raw.any() else planes.reshape(-1)[:0]
        return {"stream": stream, "raw": to_bytes(held)}

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        from raysim_contrib.zfp_kernel import decode

        dtype = DTYPES[packet.dtype]
        stream = np.ascontiguousarray(packet.arrays.get("stream", np.empty(0))).reshape(-1).view(np.uint8)
        if not packet.numel:
            packet.bytes_of("stream", 0)
            packet.bytes_of("raw", 0)
            return torch.empty(packet.shape, dtype=dtype, device=device)
        shape = _planes_shape(packet.shape)
        count = _num_blocks(shape)
        if not -(-count // 8) <= len(stream) <= 80 * count + 8:
            raise self._damaged()
        raw, out = np.zeros(count, np.uint8), np.empty(shape)
        minexp, _, most, bias, exponent_bits = self.settings(dtype)
        read = decode(kernels.opened(stream), minexp, most, bias, exponent_bits, out, raw)
        if read < 0 or -(-read // 8) != len(stream):
            raise self._damaged()
        held = to_tensor(packet.bytes_of("raw", int(raw.sum()) * 16 * dtype.itemsize), dtype)
        if not torch.isfinite(held).all():
            raise self._damaged()
        limit = torch.finfo(torch.float64).max
        values = cast_saturating(torch.from_numpy(out).clamp_(-limit, limit), dtype)
        if len(held):
            blocks = blocks_of(values)
            blocks[torch.from_numpy(raw > 0)] = held.view(-1, 16)
            values = planes_of(blocks, shape)
        return values.contiguous().view(packet.shape).to(device)

    def _damaged(self) -> ValueError:
        return ValueError(f"A packet of {self!r} holds a stream that is not of its blocks.")


def _planes_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return `shape` as planes of its last two axes."""
    height, width = (1, 1, *shape)[-2:]
    return math.prod(shape) // (height * width), height, width


def _num_blocks(shape: tuple[int, ...]) -> int:
    return shape[0] * -(-shape[1] // 4) * -(-shape[2] // 4)


def blocks_of(planes: Tensor) -> Tensor:
    """Return the blocks of planes as rows of 16 values."""
    whole = planes[:, _filled_up(planes.shape[1])][:, :, _filled_up(planes.shape[2])]
    parts = whole.view(len(planes), whole.shape[1] // 4, 4, whole.shape[2] // 4, 4)
    return parts.transpose(2, 3).reshape(-1, 16)


def planes_of(blocks: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return the planes of blocks; inverse of `blocks_of`."""
    count, height, width = shape
    parts = blocks.view(count, -(-height // 4), -(-width // 4), 4, 4).transpose(2, 3)
    return parts.reshape(count, -(-height // 4) * 4, -1)[:, :height, :width]


def _filled_up(size: int) -> list[int]:
    """Return the indices along an axis padded to whole blocks; ZFP repeats some at the end."""
    left = size % 4
    return [*range(size), *(size - left + i for i in ([], [0, 0, 0], [1, 0], [0])[left])]
