"""A lossless stage behind any codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raysim.codecs.on_demand import torch
from raysim.codecs.packet import Codec, Key, Packet, nest, nested_names
from raysim.notation import check_integer

if TYPE_CHECKING:
    from torch import Tensor

_RAW, _ZSTD = 0, 1


@dataclass(frozen=True, repr=False)
class Entropy(Codec):
    """Compresses every array of a codec's packet by zstd, or sends it as it is where that is not smaller, with a byte that says so.

    Pays where codes are far from evenly used: bitmaps and low-bit codes of activations after ReLU.

    >>> from raysim.codecs import Quantize
    >>> x = torch.zeros(4096).index_fill(0, torch.arange(5), 1.0)
    >>> Quantize(4).encode(x).array_bytes, Entropy(Quantize(4)).encode(x).array_bytes < 100
    (2056, True)
    """

    codec: Codec
    level: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise ValueError(f"`codec` must be a codec, but got {self.codec!r}.")
        if isinstance(self.codec, Entropy):
            raise ValueError(f"`codec` must be one that is not compressed yet, but got {self.codec!r}.")
        self._coerce(level=check_integer("level", self.level, 1, 19))

    @property
    def random(self) -> bool:
        return self.codec.random

    def array_names(self) -> tuple[str, ...]:
        return nested_names("raw", self.codec)

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        from zstandard import ZstdCompressor

        compressor = ZstdCompressor(level=self.level)
        arrays = {}
        for name, array in nest("raw", self.codec.encode(x, key)).items():
            raw = array.reshape(-1).view(np.uint8)
            packed = np.frombuffer(compressor.compress(raw.data), np.uint8)
            flag, data = (_ZSTD, packed) if len(packed) < len(raw) else (_RAW, raw)
            arrays[name] = np.concatenate([np.array([flag], np.uint8), data])
        return arrays

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        inner = packet.part("raw", self.codec, packet.shape)
        # no codec makes more of a tensor than 16 bytes a value and some: a packet that claims more is damaged
        limit = 16 * packet.numel + 65536
        raw = {name: self._read(packet, array, limit) for name, array in inner.arrays.items()}
        return inner._replace(arrays=raw).decode(device)

    def _read(self, packet: Packet, array: np.ndarray, limit: int) -> np.ndarray:
        from zstandard import ZstdDecompressor, ZstdError, get_frame_parameters

        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if len(data) and data[0] == _RAW:
            return data[1:].copy()  # the byte before put what follows out of alignment
        try:
            if not len(data) or data[0] != _ZSTD or get_frame_parameters(data[1:].data).content_size > limit:
                raise ValueError(f"A packet of {packet.codec!r} holds an array that is neither raw nor compressed.")
            return np.frombuffer(ZstdDecompressor().decompress(data[1:].data), np.uint8)
        except ZstdError as error:
            raise ValueError(
                f"A packet of {packet.codec!r} holds an array that cannot be decompressed: {error}."
            ) from None
