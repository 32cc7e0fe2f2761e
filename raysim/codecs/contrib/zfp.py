"""ZFP in its fixed-accuracy mode: the tolerance is chosen, and the bytes follow from the data."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs import kernels
from raysim.codecs.base import DTYPES, Codec, Key, Packet, cast_saturating, check_finite, to_bytes, to_tensor
from raysim.notation import check_real
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor

_PLANES = 32  # of a coefficient
_NEGABINARY = 0xAAAAAAAA
_ORDER = [0, 1, 4, 5, 2, 8, 6, 9, 3, 12, 10, 7, 13, 11, 14, 15]  # of coefficients, by frequency


@dataclass(frozen=True, repr=False)
class ZFP(Codec):
    """Sends blocks of 4 x 4 values, transformed and cut at a bit plane, so that no value is off by more than `tolerance`
    (Lindstrom 2014, "Fixed-Rate Compressed Floating-Point Arrays"; the fixed-accuracy mode of zfp).

    Blocks lie in the last two axes. The values of a block get a common exponent, go through ZFP's integer transform along both
    axes, and are written in negabinary, bit plane by bit plane, with its group tests, down to the plane that the tolerance allows.
    A block below the tolerance takes one bit. A block whose tolerance is finer than the dtype resolves is sent as it is, so the
    bound always holds. For float32 the stream is zfp's, but for such blocks.

    The transform pays where neighbours along both axes are alike, as in smooth images. Elsewhere `ErrorBounded` is smaller, and
    faster everywhere: ZFP's errors on noise are a quarter of its tolerance, as it makes room for the worst case.

    >>> x = torch.linspace(0, 1, 64).view(8, 8)
    >>> packet = ZFP(0.01).encode(x)
    >>> packet.array_bytes, bool((packet.decode() - x).abs().max() <= 0.01)
    (28, True)
    """

    size_varies: ClassVar[bool] = True

    tolerance: float

    def __post_init__(self) -> None:
        self._coerce(tolerance=check_real("tolerance", self.tolerance, 0, 1e30, open_low=True))

    def array_names(self) -> tuple[str, ...]:
        return ("stream", "raw")

    def _settings(self, dtype: torch.dtype) -> tuple[int, int, int, int, int]:
        """Return the tolerance's exponent, the least exponent of a block, the most planes, and the exponents' bias and bits."""
        minexp = math.frexp(self.tolerance)[1] - 1
        digits = 1 - math.frexp(torch.finfo(dtype).eps)[1] + 1
        least = math.frexp(torch.finfo(dtype).tiny)[1]
        # half a unit in the last place and the truncation of planes together stay within the tolerance
        wide = dtype == torch.float64
        return minexp, least, min(digits + 5, 30), *((1023, 11) if wide else (127, 8))

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        if not x.numel():
            return {"stream": np.empty(0, np.uint8), "raw": np.empty(0, np.uint8)}
        planes = _planes(x.detach().cpu())
        minexp, least, most, bias, exponent_bits = self._settings(x.dtype)
        if kernels.serves("cpu"):
            from raysim.codecs.kernels.zfp import encode

            count = _num_blocks(tuple(planes.shape))
            raw = np.zeros(count, np.uint8)
            words = kernels.empty(count * 20 + 2, np.uint32)
            wide = planes if x.dtype in (torch.float32, torch.float64) else planes.float()
            bits = encode(
                kernels.opened(wide.contiguous().numpy()), minexp, least, most, bias, exponent_bits, words, raw
            )
            stream = words.view(np.uint8)[: -(-bits // 8)].copy()
        else:
            stream, raw = self._encode_plainly(_blocks(planes).double(), x.dtype)
        held = _blocks(planes)[torch.from_numpy(raw > 0)] if raw.any() else planes.reshape(-1)[:0]
        return {"stream": stream, "raw": to_bytes(held)}

    def _encode_plainly(self, blocks: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
        minexp, least, most, bias, exponent_bits = self._settings(dtype)
        greatest = blocks.abs().amax(dim=1)
        emax = torch.frexp(greatest).exponent.clamp_min(least)
        needed = torch.where(greatest > 0, emax - minexp + 6, 0)
        scaled = torch.ldexp(torch.ldexp(blocks, torch.full_like(emax, 60)[:, None]), (_PLANES - 62 - emax)[:, None])
        coefficients = _transformed(torch.where((needed > most)[:, None], 0.0, scaled).long())
        patterns = ((coefficients + _NEGABINARY) ^ _NEGABINARY) & 0xFFFFFFFF
        bits: list[int] = []
        for exponent, planes, words in zip(emax.tolist(), needed.tolist(), patterns.tolist(), strict=True):
            header = 0 if planes <= 0 else 2 * (0 if planes > most else exponent + bias) + 1
            bits += [header >> place & 1 for place in range(1 if planes <= 0 else 1 + exponent_bits)]
            if 0 < planes <= most:
                bits += _coded(words, planes)
        stream = np.packbits(np.array(bits, np.uint8), bitorder="little")
        return stream, (needed > most).numpy().astype(np.uint8)

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        dtype = DTYPES[packet.dtype]
        stream, held = (np.ascontiguousarray(packet.arrays.get(name, np.empty(0))) for name in ("stream", "raw"))
        stream, held = stream.reshape(-1).view(np.uint8), held.reshape(-1).view(np.uint8)
        if not packet.numel:
            packet.bytes_of("stream", 0)
            packet.bytes_of("raw", 0)
            return torch.empty(packet.shape, dtype=dtype, device=device)
        shape = _planes_shape(packet.shape)
        count = _num_blocks(shape)
        if not -(-count // 8) <= len(stream) <= 80 * count + 8:
            raise self._damaged()
        raw = np.zeros(count, np.uint8)
        minexp, _, most, bias, exponent_bits = self._settings(dtype)
        if kernels.serves("cpu"):
            from raysim.codecs.kernels.zfp import decode

            out = np.empty(shape)
            read = decode(kernels.opened(stream), minexp, most, bias, exponent_bits, out, raw)
            values = torch.from_numpy(out)
        else:
            values, read = self._decode_plainly(stream, shape, dtype, raw)
        if read < 0 or -(-read // 8) != len(stream):
            raise self._damaged()
        apart = torch.from_numpy(raw > 0)
        own = to_tensor(packet.bytes_of("raw", int(raw.sum()) * 16 * dtype.itemsize), dtype)
        if not torch.isfinite(own).all():
            raise self._damaged()
        limit = torch.finfo(torch.float64).max
        values = cast_saturating(values.clamp_(-limit, limit), dtype)
        if len(own):
            blocks = _blocks(values)
            blocks[apart] = own.view(-1, 16)
            values = _joined(blocks, shape)
        return values.contiguous().view(packet.shape).to(device)

    def _decode_plainly(
        self, stream: np.ndarray, shape: tuple[int, int, int], dtype: torch.dtype, raw: np.ndarray
    ) -> tuple[Tensor, int]:
        minexp, _, most, bias, exponent_bits = self._settings(dtype)
        reader = _Reader(np.unpackbits(stream, bitorder="little").tolist())
        words, exponents = torch.zeros(len(raw), 16, dtype=torch.int64), torch.zeros(len(raw), dtype=torch.int64)
        try:
            for number in range(len(raw)):
                if not reader.take(1):
                    continue
                exponent = reader.take(exponent_bits)
                raw[number] = exponent == 0
                planes = exponent - bias - minexp + 6
                if exponent and not 0 < planes <= most:
                    return torch.zeros(shape, dtype=torch.float64), -1
                if exponent:
                    exponents[number] = exponent - bias
                    words[number] = torch.tensor(_decoded(reader, planes))
        except IndexError:
            return torch.zeros(shape, dtype=torch.float64), -1
        coefficients = _restored((words ^ _NEGABINARY) - _NEGABINARY).double()
        return _joined(torch.ldexp(coefficients, (exponents - _PLANES + 2)[:, None]), shape), reader.at

    def _damaged(self) -> ValueError:
        return ValueError(f"A packet of {self!r} holds a stream that is not of its blocks.")


class _Reader:
    """A stream of bits, the least significant first."""

    def __init__(self, bits: list[int]) -> None:
        self.bits, self.at = bits, 0

    def take(self, count: int) -> int:
        if self.at + count > len(self.bits):
            raise IndexError
        self.at += count
        return sum(bit << place for place, bit in enumerate(self.bits[self.at - count : self.at]))


def _coded(words: list[int], planes: int) -> Iterator[int]:
    """Yield the bits of a block's coefficients, plane by plane from the top: bits of significant ones, then group tests."""
    known = 0
    for plane in range(_PLANES - 1, _PLANES - 1 - planes, -1):
        bits = [words[_ORDER[i]] >> plane & 1 for i in range(16)]
        yield from bits[:known]
        while known < 16:
            yield int(any(bits[known:]))
            if not any(bits[known:]):
                break
            while known < 15:
                yield bits[known]
                if bits[known]:
                    break
                known += 1
            known += 1


def _decoded(reader: _Reader, planes: int) -> list[int]:
    """Return the coefficients of a block in negabinary; inverse of `_coded`."""
    words, known = [0] * 16, 0
    for plane in range(_PLANES - 1, _PLANES - 1 - planes, -1):
        for i in range(known):
            words[_ORDER[i]] |= reader.take(1) << plane
        while known < 16 and reader.take(1):
            while known < 15 and not reader.take(1):
                known += 1
            words[_ORDER[known]] |= 1 << plane
            known += 1
    return words


def _transformed(blocks: Tensor) -> Tensor:
    """Return ZFP's integer transform of blocks of 4 x 4, along both axes."""
    for axis in (2, 1):
        x, y, z, w = blocks.view(-1, 4, 4).unbind(axis)
        x = (x + w) >> 1
        w = w - x
        z = (z + y) >> 1
        y = y - z
        x = (x + z) >> 1
        z = z - x
        w = (w + y) >> 1
        y = y - w
        w = w + (y >> 1)
        y = y - (w >> 1)
        blocks = torch.stack([x, y, z, w], dim=axis)
    return blocks.view(-1, 16)


def _restored(blocks: Tensor) -> Tensor:
    """Return the blocks of a transform; the inverse of `_transformed` but for the bits that its shifts drop."""
    for axis in (1, 2):
        x, y, z, w = blocks.view(-1, 4, 4).unbind(axis)
        y = y + (w >> 1)
        w = w - (y >> 1)
        y = y + w
        w = (w << 1) - y
        z = z + x
        x = (x << 1) - z
        y = y + z
        z = (z << 1) - y
        w = w + x
        x = (x << 1) - w
        blocks = torch.stack([x, y, z, w], dim=axis)
    return blocks.view(-1, 16)


def _planes_shape(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Return `shape` as planes of its last two axes."""
    height, width = (1, 1, *shape)[-2:]
    return math.prod(shape) // (height * width), height, width


def _planes(x: Tensor) -> Tensor:
    return x.reshape(_planes_shape(tuple(x.shape)))


def _num_blocks(shape: tuple[int, ...]) -> int:
    return shape[0] * -(-shape[1] // 4) * -(-shape[2] // 4)


def _places(size: int) -> list[int]:
    """Return the places along an axis that whole blocks hold: at its end ZFP repeats some."""
    left = size % 4
    return [*range(size), *(size - left + place for place in ([], [0, 0, 0], [1, 0], [0])[left])]


def _blocks(planes: Tensor) -> Tensor:
    """Return the blocks of planes as rows of 16 values."""
    whole = planes[:, _places(planes.shape[1])][:, :, _places(planes.shape[2])]
    parts = whole.view(len(planes), whole.shape[1] // 4, 4, whole.shape[2] // 4, 4)
    return parts.transpose(2, 3).reshape(-1, 16)


def _joined(blocks: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Return the planes of blocks; inverse of `_blocks`."""
    count, height, width = shape
    parts = blocks.view(count, -(-height // 4), -(-width // 4), 4, 4).transpose(2, 3)
    return parts.reshape(count, -(-height // 4) * 4, -1)[:, :height, :width]
