"""MPC: lossless compression of floating-point values by differences and a transposition of bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from raysim.codecs import transfers
from raysim.codecs.codec import DTYPES, Codec, Key, Packet, check_finite, to_bytes, to_tensor
from raysim.notation import check_integer
from raysim.on_demand import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, repr=False)
class MPC(Codec):
    """Sends every value exactly, by the four stages of MPC (Yang et al. 2015).

    Each word of bits is replaced by its difference from the word `stride` positions before. Groups of as many words as a word has
    bits are transposed, and differenced once more. Zero words are left out, and marked in a bitmap. A tensor that would not become
    smaller is sent unchanged. `stride` is the distance between similar values: 1, or the channels of (batch, length, width).

    Use: Lossless compression if no error is tolerable.

    >>> x = torch.linspace(1, 2, 4096)
    >>> packet = MPC().encode(x)
    >>> packet.array_bytes < 0.8 * packet.dense_bytes, torch.equal(packet.decode(), x)
    (True, True)
    """

    variants: ClassVar[tuple[str, ...]] = ("MPC",)
    size_varies: ClassVar[bool] = True

    stride: int = 1

    def __post_init__(self) -> None:
        self._coerce(stride=check_integer("stride", self.stride, 1, 1 << 20))

    def array_names(self) -> tuple[str, ...]:
        return ("staged", "bitmap", "words", "values")

    def _encode(self, x: Tensor, key: Key | None) -> dict[str, np.ndarray]:
        check_finite(x)
        words = to_bytes(x).view(f"u{x.dtype.itemsize}")
        transfers.land()
        differences = np.zeros(8 * _bitmap_bytes(words.size, words.itemsize), words.dtype)
        differences[: len(words)] = words
        differences[self.stride : len(words)] -= words[: -self.stride]
        staged = _transposed(differences)
        staged[1:] -= staged[:-1].copy()
        bitmap, kept = np.packbits(staged != 0), staged[staged != 0]
        small = bitmap.nbytes + kept.nbytes < words.nbytes
        arrays = {"bitmap": bitmap, "words": kept.view(np.uint8)} if small else {"values": words.view(np.uint8)}
        return {"staged": np.array([small], np.uint8)} | arrays

    def decode(self, packet: Packet, device: torch.device | str = "cpu") -> Tensor:
        dtype = DTYPES[packet.dtype]
        if not packet.bytes_of("staged", 1)[0]:
            return to_tensor(packet.bytes_of("values", packet.dense_bytes), dtype, device).view(packet.shape)
        flags = np.unpackbits(packet.bytes_of("bitmap", _bitmap_bytes(packet.numel, dtype.itemsize))).astype(bool)
        kept = packet.bytes_of("words", int(flags.sum()) * dtype.itemsize).copy().view(f"u{dtype.itemsize}")
        staged = np.zeros(len(flags), kept.dtype)
        staged[flags] = kept
        differences = _transposed(np.cumsum(staged, dtype=kept.dtype))[: packet.numel]
        steps = np.zeros((-(-packet.numel // self.stride), self.stride), kept.dtype)
        steps.reshape(-1)[: packet.numel] = differences
        words = np.cumsum(steps, axis=0, dtype=kept.dtype).reshape(-1)[: packet.numel]
        return to_tensor(words.view(np.uint8), dtype, device).view(packet.shape)


def _bitmap_bytes(count: int, itemsize: int) -> int:
    """Return the bytes of the bitmap of `count` words, padded to whole groups."""
    return -(-count // (8 * itemsize)) * itemsize


def _transposed(words: np.ndarray) -> np.ndarray:
    """Return the words of the transposed squares of bits."""
    width = 8 * words.itemsize
    bits = np.unpackbits(words.byteswap().view(np.uint8)).reshape(-1, width, width)
    return np.packbits(bits.transpose(0, 2, 1)).view(words.dtype).byteswap()
