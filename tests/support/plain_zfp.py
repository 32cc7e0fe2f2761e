"""ZFP in plain torch and Python, bit by bit: what the kernel of `raysim_contrib.zfp` is compared with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from raysim_contrib.zfp import ZFP, planes_of
from torch import Tensor

_PLANES = 32  # of a coefficient
_NEGABINARY = 0xAAAAAAAA
_ORDER = [0, 1, 4, 5, 2, 8, 6, 9, 3, 12, 10, 7, 13, 11, 14, 15]  # of coefficients, by frequency


def encode(codec: ZFP, blocks: Tensor, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Return the stream of blocks, float64, and a mark for each block that is sent as it is."""
    minexp, least, most, bias, exponent_bits = codec.settings(dtype)
    greatest = blocks.abs().amax(dim=1)
    emax = torch.frexp(greatest).exponent.clamp_min(least)
    needed = torch.where(greatest > 0, emax - minexp + 6, 0)
    scaled = torch.ldexp(torch.ldexp(blocks, torch.full_like(emax, 60)[:, None]), (_PLANES - 62 - emax)[:, None])
    coefficients = _transformed(torch.where((needed > most)[:, None], 0.0, scaled).long())
    patterns = ((coefficients + _NEGABINARY) ^ _NEGABINARY) & 0xFFFFFFFF
    bits: list[int] = []
    for exponent, planes, words in zip(emax.tolist(), needed.tolist(), patterns.tolist(), strict=True):
        header = 0 if planes <= 0 else 2 * (0 if planes > most else exponent + bias) + 1
        bits += [header >> i & 1 for i in range(1 if planes <= 0 else 1 + exponent_bits)]
        if 0 < planes <= most:
            bits += _coded(words, planes)
    stream = np.packbits(np.array(bits, np.uint8), bitorder="little")
    return stream, (needed > most).numpy().astype(np.uint8)


def decode(
    codec: ZFP, stream: np.ndarray, shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[Tensor, np.ndarray]:
    """Return the planes of a stream, float64, and a mark for each block that is sent as it is."""
    raw = np.zeros(shape[0] * -(-shape[1] // 4) * -(-shape[2] // 4), np.uint8)
    minexp, _, _, bias, exponent_bits = codec.settings(dtype)
    reader = _Reader(np.unpackbits(stream, bitorder="little").tolist())
    words, exponents = torch.zeros(len(raw), 16, dtype=torch.int64), torch.zeros(len(raw), dtype=torch.int64)
    for number in range(len(raw)):
        if reader.take(1):
            exponent = reader.take(exponent_bits)
            raw[number] = exponent == 0
            if exponent:
                exponents[number] = exponent - bias
                words[number] = torch.tensor(_decoded(reader, exponent - bias - minexp + 6))
    coefficients = _restored((words ^ _NEGABINARY) - _NEGABINARY).double()
    return planes_of(torch.ldexp(coefficients, (exponents - _PLANES + 2)[:, None]), shape), raw


class _Reader:
    """A stream of bits, the least significant first."""

    def __init__(self, bits: list[int]) -> None:
        self.bits, self.at = bits, 0

    def take(self, count: int) -> int:
        self.at += count
        return sum(bit << i for i, bit in enumerate(self.bits[self.at - count : self.at]))


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
