"""Entropy: packets of another codec, losslessly compressed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import ClassVar

import numpy as np

from raysim.codecs import transfers
from raysim.codecs.codec import Codec, Key, Packet, check_is_codec, nest, nested_names
from raysim.notation import check_integer
from raysim.on_demand import torch

_RAW = 0  # first byte of an uncompressed array; otherwise the first byte is the item size of the shuffle
_WIDTHS = (1, 2, 4, 8)
_SAMPLE = 1 << 15  # bytes of the sample used to choose the item size


@dataclass(frozen=True, repr=False)
class Entropy(Codec):
    """Compresses every array of a codec's packet with zstd, or sends the array uncompressed if that is smaller.

    Bytes are shuffled first if that helps, as in Blosc and HDF5: the first bytes of all items, then the second bytes,
    and so on, since exponents vary little. Item sizes of 1 byte and of the dtype are tried on a part of the array. One
    byte per array stores the item size, or marks the array as raw.

    Worthwhile if codes are unevenly distributed: bitmaps and low-bit codes of activations after ReLU, and float exponents.

    Use: A lossless stage after any codec, if bytes cost more than compute.

    >>> from raysim.codecs import Quantize
    >>> x = torch.zeros(4096).index_fill(0, torch.arange(5), 1.0)
    >>> Quantize(4).encode(x).array_bytes, Entropy(Quantize(4)).encode(x).array_bytes < 100
    (2056, True)
    """

    variants: ClassVar[tuple[str, ...]] = ("Entropy(Quantize(4))", "Entropy(Identity, level=3)")
    size_varies: ClassVar[bool] = True

    codec: Codec
    level: int = 1

    def __post_init__(self) -> None:
        check_is_codec("codec", self.codec)
        if isinstance(self.codec, Entropy):
            raise ValueError(f"`codec` must be one that is not compressed yet, but got {self.codec!r}.")
        if find_spec("zstandard") is None:
            raise ValueError("`Entropy` needs the package zstandard, which is not installed: `pip install zstandard`.")
        self._coerce(level=check_integer("level", self.level, 1, 19))

    def array_names(self) -> tuple[str, ...]:
        return nested_names("raw", self.codec)

    def _encode(self, x: torch.Tensor, key: Key | None) -> dict[str, np.ndarray]:
        from zstandard import ZstdCompressor

        compressor = ZstdCompressor(level=self.level)

        def compressed(raw: np.ndarray, width: int) -> bytes:
            """Return the lengths of all frames but the last, then one frame for each byte of an item."""
            frames = [compressor.compress(plane.data) for plane in _planes(raw, width)]
            return b"".join(len(frame).to_bytes(4, "little") for frame in frames[:-1]) + b"".join(frames)

        arrays = {}
        inner = nest("raw", self.codec.encode(x, key))
        transfers.land()
        for name, array in inner.items():
            raw = array.reshape(-1).view(np.uint8)
            start = max(0, len(raw) - _SAMPLE) // 16 * 8  # from the middle, on whole items
            sample = raw[start : start + _SAMPLE]
            widths = [1, x.dtype.itemsize] if len(raw) % x.dtype.itemsize == 0 else [1]
            width = min(widths, key=lambda width: len(compressed(sample, width)))
            packed = np.frombuffer(compressed(raw, width), np.uint8)
            flag, data = (width, packed) if len(packed) < len(raw) else (_RAW, raw)
            arrays[name] = np.concatenate([np.array([flag], np.uint8), data])
        return arrays

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> torch.Tensor:
        inner = packet.part("raw", self.codec, packet.shape)
        # no codec needs much more than 16 bytes per value: a packet that claims more is damaged
        limit = 16 * packet.numel + 65536
        raw = {name: self._read(packet, array, limit) for name, array in inner.arrays.items()}
        return inner._replace(arrays=raw).decode(device)

    def _read(self, packet: Packet, array: np.ndarray, limit: int) -> np.ndarray:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if len(data) and data[0] == _RAW:
            return data[1:].copy()  # realigned after the leading byte
        width = int(data[0]) if len(data) else 0
        frames = data[4 * width - 3 :]
        if width not in _WIDTHS or len(data) < 4 * width - 3:
            raise ValueError(f"A packet of {packet.codec!r} holds an array that is neither raw nor compressed.")
        lengths = data[1 : 4 * width - 3].copy().view("<u4").tolist()
        ends = [sum(lengths[:i]) for i in range(width)] + [len(frames)]
        planes = [self._decompressed(packet, frames[start:end], limit) for start, end in pairwise(ends)]
        if len({len(plane) for plane in planes}) > 1:
            raise ValueError(f"A packet of {packet.codec!r} holds items of unequal sizes.")
        return np.ascontiguousarray(np.stack(planes, axis=1)).reshape(-1) if width > 1 else planes[0]

    def _decompressed(self, packet: Packet, frame: np.ndarray, limit: int) -> np.ndarray:
        from zstandard import ZstdDecompressor, ZstdError, get_frame_parameters

        try:
            if get_frame_parameters(frame.data).content_size > limit:
                raise ValueError(f"A packet of {packet.codec!r} holds an array that is neither raw nor compressed.")
            return np.frombuffer(ZstdDecompressor().decompress(frame.data), np.uint8)
        except ZstdError as error:
            raise ValueError(
                f"A packet of {packet.codec!r} holds an array that cannot be decompressed: {error}."
            ) from None


def _planes(raw: np.ndarray, width: int) -> np.ndarray:
    """Return one row per byte of an item of `width` bytes: the first bytes of all items, then the second bytes, and so on."""
    return np.ascontiguousarray(raw.reshape(-1, width).T)
